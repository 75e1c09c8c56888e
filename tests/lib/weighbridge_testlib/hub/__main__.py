"""`python -m weighbridge_testlib.hub`: a Hub on this machine, for people who develop against it."""

import argparse
import signal
import sys
import time

from weighbridge_testlib.hub import Fault, Limits, serve


def main() -> None:
    """Serve until Ctrl-C, and say what to set."""
    parser = argparse.ArgumentParser(prog="weighbridge_testlib.hub", description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--no-xet", action="store_true", help="a Hub without xet")
    parser.add_argument("--multipart", type=int, metavar="BYTES", help="LFS uploads in parts of this size")
    parser.add_argument("--commits-per-hour", type=int, metavar="N")
    parser.add_argument("--storage", type=int, metavar="BYTES", help="the storage of the organisation")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="ON:STATUS[:TIMES]", help="such as commit:503:2; repeatable"
    )
    given = parser.parse_args()
    # A shell that starts it in the background without job control hands SIGINT on as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limits = Limits(commits_per_hour=given.commits_per_hour, storage=given.storage)
    with serve(limits=limits, xet=not given.no_xet, multipart=given.multipart, port=given.port) as hub:
        for text in given.fault:
            on, status, times = (*text.split(":"), "1")[:3]
            hub.faults.add(Fault(on=on, status=int(status), times=int(times)))
        sys.stdout.write(
            f"The test Hub is at {hub.url}; the organisation is acme. In another shell:\n\n"
            f"  export HF_ENDPOINT={hub.url} HF_TOKEN=hf_ann\n"
            "  hf auth whoami\n  registry push RUN --name my-adapter --remote hf://acme\n\nCtrl-C stops it.\n"
        )
        sys.stdout.flush()
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
