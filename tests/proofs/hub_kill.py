"""Kill a publisher with SIGKILL at every request to the test Hub, before and after it is carried out, and go on.

    python tests/proofs/hub_kill.py [--every 1] [--ways lfs child xet]

Holds when the next run always ends with one commit and one tag, the right bytes, and no stored file sent again whose
upload had been confirmed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from weighbridge_testlib.hub import TestHub, serve
from weighbridge_testlib.hub.killing import Killed, stored_twice
from weighbridge_testlib.hub.rig import environ

NAME = "acme/medical-sft"
SIZES = (3000, 70_000)


def judge(hub: TestHub, *, confirmed: bool, before: int) -> list[str]:
    """Return what is wrong after a run that was taken up again."""
    repo = hub.store.get(NAME)
    wrong = []
    titles = [c.title for c in repo.history("main")]
    if titles != ["medical-sft v1", "initial commit"]:
        wrong.append(f"commits are {titles}")
    if repo.tags != {"v1": repo.head.oid}:
        wrong.append(f"tags are {repo.tags}")
    for number, size in enumerate(SIZES):
        if hub.store.body(repo.at()[f"w{number}.safetensors"]) != bytes([65 + number]) * size:
            wrong.append(f"w{number} has other bytes")
    if stored_twice(hub):
        wrong.append(f"sent twice: {stored_twice(hub)}")
    if confirmed and hub.count("xorb") != before:
        wrong.append(f"{hub.count('xorb') - before} xorbs were sent again")
    return wrong


def one(way: str, at: int, when: str) -> tuple[bool, list[str]]:
    """Kill at one request, go on, and judge; the first value is False when there are not that many requests."""
    with tempfile.TemporaryDirectory() as folder, serve() as hub:
        place = Path(folder)
        job = Killed(hub, environ(hub, place / "home"), place / "run", SIZES, way=way)
        died, _ = job.run(at=at, when=when)
        if not died:
            return False, []
        # After the second preupload, that of the papers, what was sent before has been confirmed.
        confirmed, before = hub.count("preupload") >= 2, hub.count("xorb")
        job.run()
        return True, judge(hub, confirmed=confirmed, before=before)


def main() -> int:
    """Run every point; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth request only")
    parser.add_argument("--ways", nargs="+", default=["lfs", "child", "xet"])
    given = parser.parse_args()
    failures = 0
    for way in given.ways:
        points = 0
        at = 1
        more = True
        while more:
            more = False
            for when in ("before", "after"):
                died, wrong = one(way, at, when)
                more = more or died
                points += died
                for words in wrong:
                    print(f"hub_kill: {way}: killed {when} request {at}: {words}")
                failures += len(wrong)
            at += given.every
        print(f"hub_kill: {way}: {points} kills", flush=True)
    print(f"hub_kill: {'FAILED' if failures else 'held'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
