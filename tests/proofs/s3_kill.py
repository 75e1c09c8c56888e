"""Kill a publisher with SIGKILL at every request to a real S3 server, before and after it is carried out, and go on.

    python tests/proofs/s3_kill.py [--every 1] [--large 2]

Holds when after each kill every version that can be seen verifies, when the next run ends with one version, the right
bytes and no unfinished upload left to sweep, and when it sends at most one part of each file again.
"""

import argparse
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.probe import Capabilities
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.types import Receipt
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.proxy import Fault, Proxy, Request
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

NAME: Final = "medical-sft"
SINGLE: Final = 1 << 20
PART: Final = multipart.PART_LEAST
CONTEXT = multiprocessing.get_context("forkserver")
_NUMBER = re.compile(r"[?&]partNumber=(\d+)")


class Store(NamedTuple):
    """Where all of it happens; `can` is what the server was seen to do, `large` how many files go in parts."""

    server: Server
    can: Capabilities
    base: Path
    large: int


class Point(NamedTuple):
    """The number of a request, and whether the kill comes before or after it is carried out."""

    at: int
    when: Literal["before", "after"]


def open_at(place: Place, can: Capabilities) -> S3Remote:
    """Open the remote with small parts."""
    remote = S3Remote(place, single=SINGLE, part=PART)
    remote.probe.trust(can)
    return remote


def attempt(place: Place, can: Capabilities, folder: Path, large: int) -> Receipt:
    """Publish small files and some of four parts, from the marker to the announcement."""
    remote = open_at(place, can)
    registry = open_registry(remote, create=True)
    made = candidate(remote, folder, NAME, files=files(large))
    done = publish(remote, "home", registry, made, OWNER, render=rendered)
    remote.close()
    return done


def child(place: Place, can: Capabilities, folder: Path, large: int) -> None:
    """Publish in a process of its own."""
    attempt(place, can, folder, large)


def files(large: int) -> dict[str, bytes]:
    """Return the files of the artifact."""
    found = payload(1)
    for number in range(large):
        found[f"model-{number}.safetensors"] = random.Random(number).randbytes(3 * PART + 100_000)
    return found


def sent(requests: Iterable[Request]) -> Counter[str]:
    """Count what was sent of payload files: each part, and each file that goes whole."""
    found = Counter[str]()
    for request in requests:
        path = request.target.partition("?")[0]
        number = _NUMBER.search(request.target)
        if request.method == "PUT" and f"/models/{NAME}/v" in path and not path.endswith("/manifest.json"):
            found[f"{path} {number[1] if number else 'whole'}"] += 1
    return found


def die(store: Store, prefix: str, point: Point) -> Counter[str] | None:
    """Kill a publisher at a request; return what it had sent until then, None when there are not that many."""
    dead = threading.Event()
    with Proxy(store.server.endpoint) as proxy:
        place = store.server.place(prefix, endpoint=proxy.endpoint)
        process = CONTEXT.Process(target=child, args=(place, store.can, store.base / "first", store.large))

        def kill(request: Request) -> None:
            if request.number == point.at and not dead.is_set():
                dead.set()
                os.kill(process.pid or 0, signal.SIGKILL)

        def plan(request: Request) -> Fault | None:
            if point.when == "before":
                kill(request)
            # Of a dead process nothing more arrives; what had arrived is carried out.
            return Fault("refuse") if dead.is_set() else Fault("lost") if request.number == point.at else None

        proxy.plan = plan
        if point.when == "after":
            proxy.answered = kill
        process.start()
        process.join()
        found = sent(proxy.requests)
    return found if process.exitcode == -signal.SIGKILL else None


def one(store: Store, point: Point) -> tuple[bool, list[str], int]:
    """Kill, look, go on, judge: whether it was killed, what is wrong, and how many parts were sent twice."""
    prefix = f"kill-{store.large}-{point.at}-{point.when}"
    first = die(store, prefix, point)
    direct = open_at(store.server.place(prefix), store.can)
    wrong: list[str] = []
    for name, n in audit(direct).committed:  # whatever can be seen now has all its bytes
        pull(direct, name, n, store.base / "seen")
    if first is None:
        direct.close()
        return False, wrong, 0
    with Proxy(store.server.endpoint) as proxy:
        place = store.server.place(prefix, endpoint=proxy.endpoint)
        done = attempt(place, store.can, store.base / "second", store.large)
        again = sent(proxy.requests)
    state = audit(direct, [done])
    if state.committed != {(NAME, 1): done.content} or state.open or state.void:
        wrong.append(f"there are {sorted(state.committed)}, open {sorted(state.open)}, void {sorted(state.void)}")
    pull(direct, NAME, 1, store.base / "pulled")
    for path, body in files(store.large).items():
        if (store.base / "pulled" / path).read_bytes() != body:
            wrong.append(f"{path} has other bytes")
    twice = Counter(part.rpartition(" ")[0] for part in first if part in again)
    wrong += [f"{count} parts of {path} were sent again" for path, count in twice.items() if count > 1]
    wrong += [f"{part} was sent {count} times in one run" for part, count in again.items() if count > 1]
    direct.sweep(-60)
    where = f"{prefix}/"
    left = store.server.client().list_multipart_uploads(Bucket=store.server.bucket, Prefix=where).get("Uploads", [])
    wrong += [f"{upload['Key']} is an unfinished upload" for upload in left]
    direct.close()
    return True, wrong, twice.total()


def every(server: Server, can: Capabilities, base: Path, large: int, step: int) -> tuple[int, int, int]:
    """Kill at every so-manieth request until there are no more; return kills, what was sent again, and failures."""
    kills, twice, failures, at = 0, 0, 0, 1
    more = True
    while more:
        more = False
        for when in ("before", "after"):
            with tempfile.TemporaryDirectory(dir=base) as folder:
                died, wrong, again = one(Store(server, can, Path(folder), large), Point(at, when))
            for words in wrong:
                print(f"s3_kill: {large} large files, killed {when} request {at}: {words}", flush=True)
            more = more or died
            kills, twice, failures = kills + died, twice + again, failures + len(wrong)
        at += step
    return kills, twice, failures


def main() -> int:
    """Kill at every point; 0 when everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth request only")
    parser.add_argument("--large", type=int, nargs="+", default=[1, 2], help="files of four parts, one run for each")
    given = parser.parse_args()
    try:
        servers.find("weed")
    except pytest.skip.Exception as reason:
        print(f"s3_kill: SKIPPED: {reason}")
        return 0
    began = time.monotonic()
    CONTEXT.set_forkserver_preload(["weighbridge_testlib.publishing", "weighbridge_testlib.seaweed"])
    with servers.alone() as (server, base):
        remote = S3Remote(server.place("probe"))
        can = remote.probe.ask()
        remote.close()
        found = [every(server, can, base, large, given.every) for large in given.large]
    kills, twice, failures = (sum(column) for column in zip(*found, strict=True))
    print(
        f"s3_kill: {kills} kills, {twice} parts or small files sent again, {failures} wrong, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
