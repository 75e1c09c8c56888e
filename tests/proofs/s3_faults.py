"""Publish and pull through a network that breaks three requests in ten: `s3_faults.py [--rounds N] [--seed S]`.

Every round publishes a content, new or known, and pulls it. At the end each content has one version, every byte that
was pulled is right, and a sweep leaves no unfinished upload.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import pytest

from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.s3_rounds import Rounds


def main() -> int:
    """Run the rounds and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        servers.find("weed")
    except pytest.skip.Exception as reason:
        print(f"s3_faults: SKIPPED: {reason}")
        return 0
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="s3-faults-") as folder:
        servers.credentials(patch)
        patch.setenv("HOME", folder)
        (Path(folder) / "server").mkdir()
        with servers.running(Path(folder) / "server") as server:
            found = Rounds(server, Path(folder), "faults", options.seed).run(options.rounds)
    print(f"s3_faults: broken: {dict(sorted(found.broken.items()))}")
    print(f"s3_faults: tried again after: {dict(sorted(found.errors.items()))}")
    print(
        f"s3_faults: {found.rounds} rounds, {found.versions} versions, {found.requests} requests, "
        f"{sum(found.broken.values())} broken, {found.wrong} wrong, {found.leaked} uploads left after sweeping "
        f"{found.swept}, {time.monotonic() - began:.0f} s"
    )
    return 1 if found.wrong or found.leaked else 0


if __name__ == "__main__":
    sys.exit(main())
