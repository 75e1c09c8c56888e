"""Publish two dozen shards by xet with few descriptors, as the plain client does it and as ours does.

    python tests/proofs/hub_scarce.py [--descriptors 16] [--files 24]

Holds when the plain client ends with a bare I/O error, and ours names the limit, has made no commit, and publishes once
the limit is raised. The library may try for minutes before it gives up.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weighbridge.registry import errors
from weighbridge_testlib.hub import serve
from weighbridge_testlib.hub.rig import environ, publish, remote, run

PLAIN = """
import json, resource, sys
from huggingface_hub import HfApi
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
try:
    HfApi().upload_folder(repo_id="acme/plain", folder_path=sys.argv[1])
    print(json.dumps("done"))
except OSError as error:
    print(json.dumps(str(error)))
"""


def main() -> int:
    """Try both; 0 when it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--descriptors", type=int, default=16)
    parser.add_argument("--files", type=int, default=24)
    given = parser.parse_args()
    files = {f"w{n:02d}.safetensors": bytes([n]) * 70_000 for n in range(given.files)}
    limit = [given.descriptors]
    spawn = subprocess.Popen

    class Few(spawn[bytes]):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if limit:
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (limit[0], limit[0]))

    wrong = []
    with serve() as hub, tempfile.TemporaryDirectory() as text:
        place = Path(text)
        hub.store.create("model", "acme", "plain", hub.store.tokens["hf_ann"])
        (place / "folder").mkdir()
        for name, body in files.items():
            (place / "folder" / name).write_bytes(body)
        said = run(PLAIN, environ(hub, place / "plain"), str(place / "folder"), str(given.descriptors), timeout=600)
        sys.stdout.write(f"the plain client: {said}\n")
        if "Too many open files" not in said:
            wrong.append("the plain client did not run out of descriptors")
        ours = remote(hub, place / "ann", way="xet")
        subprocess.Popen = Few  # type: ignore[misc]
        try:
            publish(ours, place / "1", files={"adapter_config.json": b"{}"} | files)
            wrong.append("ours did not run out of descriptors")
        except errors.WeighbridgeError as error:
            sys.stdout.write(f"ours: {error.what}; {error.why}; fix: {error.fix}\n")
            if "LimitNOFILE" not in (error.fix or ""):
                wrong.append("the limit is not named")
        limit.clear()
        if len(hub.store.get("acme/medical-sft").history("main")) != 1:
            wrong.append("something was committed")
        if publish(ours, place / "2", files={"adapter_config.json": b"{}"} | files).n != 1:
            wrong.append("the next try did not publish")
        subprocess.Popen = spawn  # type: ignore[misc]
        ours.close()
    sys.stdout.write("\n".join(wrong or ["held"]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
