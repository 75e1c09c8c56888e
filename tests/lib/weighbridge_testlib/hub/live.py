"""The remotes' suite on a real Hub, in throw-away repositories of your own: `make test-hub-live ORG=you`. Not in CI.

It makes private repositories `weighbridge-live-...` under the organisation or user, goes through everything that a
remote has to do (`version_conformance`), by LFS and by xet, each in a fresh process, and deletes them. HF_TOKEN needs
write access; HF_ENDPOINT chooses another Hub.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from weighbridge.registry.remotes.hub.remote import HubRemote

SUITE = Path(__file__).with_name("conforming.py")
WAYS = {"lfs": {"HF_HUB_DISABLE_XET": "1"}, "xet": {}}
PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "-c", os.devnull, "--rootdir", "/"),
    *("--noconftest", "--import-mode=importlib"),
    *("-o", "filterwarnings=error\nignore:Use .content=:DeprecationWarning"),
)


def suite(owner: str, prefix: str, way: str) -> int:
    """Run the suite in a process whose client reads its environment anew; return its exit code."""
    environ = {key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_XET"} | WAYS[way]
    environ |= {"CONFORMING_OWNER": owner, "CONFORMING_PREFIX": prefix}
    return subprocess.run([sys.executable, "-m", "pytest", *PYTEST, str(SUITE)], env=environ, check=False).returncode


def main() -> int:
    """Run the suite for each transport; 0 when all of it held."""
    parser = argparse.ArgumentParser(prog="make test-hub-live", description=__doc__)
    parser.add_argument("owner", help="the organisation or user that the throw-away repositories are made under")
    parser.add_argument("--way", action="append", choices=sorted(WAYS), help="one transport only")
    given = parser.parse_args()
    failed = 0
    for way in given.way or WAYS:
        prefix = f"weighbridge-live-{secrets.token_hex(3)}-"
        began = time.monotonic()
        try:
            failed |= suite(given.owner, prefix, way)
        finally:
            remote = HubRemote(given.owner)
            names = [m.id for m in remote.line.api.list_models(author=given.owner) if f"/{prefix}" in m.id]
            for name in names:
                remote.line.api.delete_repo(name)
            remote.close()
            sys.stdout.write(f"{way}: {time.monotonic() - began:.1f} s, deleted {len(names)} repositories\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
