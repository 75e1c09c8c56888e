"""Publishers that race and are killed on a real S3 server, while a collector gives up claims under their hands.

    python tests/proofs/s3_races.py [--contents 200] [--kills 40] [--publishers 8] [--seed 1]

Each publisher is a process with a list of contents, of which others have some too; one content in ten is large, goes in
parts, and is had by two. A killed one begins its list again with nothing remembered. Holds when at the end each content
has one version, what was acknowledged is there, numbers have no gap but recorded voids, the feed tells of everything,
and no unfinished upload is left.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from weighbridge.registry import errors
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow.claims import Known
from weighbridge.registry.flow.collect import collect
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.sync import sync
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.probe import Capabilities
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge.registry.types import Owner
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.audit import audit
from weighbridge_testlib.publishing import candidate, rendered
from weighbridge_testlib.shelf import payload

NAMES = ("medical-sft", "legal-dpo")
TRIES = 30
LARGE = 10
"""One content in so many is large."""
CONTEXT = multiprocessing.get_context("forkserver")

Work = tuple[str, int]
"""A name and the seed of a content."""


def connect(place: Place, can: Capabilities) -> Retrying:
    """Open the remote, of which one process found out what it can do."""
    remote = S3Remote(place, single=1 << 20, part=multipart.PART_LEAST)
    remote.probe.trust(can)
    return Retrying(remote, attempts=8, base=0.02, cap=0.5)


def files(seed: int) -> dict[str, bytes]:
    """Return the files of a content."""
    found = payload(seed)
    if seed % LARGE == 0:
        found["model.safetensors"] = random.Random(seed).randbytes(multipart.PART_LEAST + 300_000)
    return found


def life(place: Place, can: Capabilities, folder: Path, work: Sequence[Work], nonce: int) -> None:
    """Publish a list of contents with no memory of earlier lives; what is acknowledged is written down at once."""
    remote = connect(place, can)
    registry = open_registry(remote, create=True)
    owner = Owner(host="trainer", daemon=f"{nonce:032x}")
    known: dict[str, dict[int, Known]] = {name: {} for name in NAMES}
    order = list(work)
    random.Random(nonce).shuffle(order)
    with (folder / f"told-{nonce}").open("w", buffering=1) as stream:
        for name, seed in order:
            made = candidate(remote, folder / f"{nonce}-{name}-{seed}", name, seed=seed, files=files(seed))
            for left in reversed(range(TRIES)):
                try:
                    done = publish(remote, "home", registry, made, owner, render=rendered, known=known[name])
                except (errors.ConflictError, errors.IntegrityError, errors.UnreachableError, errors.VoidedError):
                    known[name].clear()  # the collector was faster; a daemon would try again later, too
                    if not left:
                        raise
                else:
                    stream.write(json.dumps([name, done.n, done.content]) + "\n")
                    break
    remote.close()


def sweeper(place: Place, can: Capabilities, told: Path, seed: int, end: Event) -> None:
    """Give claims up that are a moment old, rightly or wrongly, until the publishers are done."""
    remote, chance = connect(place, can), random.Random(seed)
    registry = open_registry(remote, create=True)
    voided = 0
    while not end.wait(0.2):
        # A store counts whole seconds, so that "0.5" is anything up to 1.5.
        voided += len(collect(remote, registry, by="collector", dead_after=chance.choice((0.0, 0.5, 1.0, 3.0))))
    told.write_text(str(voided))
    remote.close()


def race(place: Place, can: Capabilities, folder: Path, given: argparse.Namespace) -> Counter[str]:
    """Let all of them work, kill now and then, and return what happened."""
    chance = random.Random(given.seed)
    lists: list[list[Work]] = [[] for _ in range(given.publishers)]
    for seed in range(given.contents):
        for owner in chance.sample(range(given.publishers), chance.choice((1, 1, 2)) if seed % LARGE else 2):
            lists[owner].append((NAMES[seed % len(NAMES)], seed))
    end = CONTEXT.Event()
    collector = CONTEXT.Process(target=sweeper, args=(place, can, folder / "voided", given.seed, end))
    collector.start()
    lives = Counter[int]()

    def begin(number: int) -> ForkServerProcess:
        lives[number] += 1
        nonce = number * 1000 + lives[number]
        process = CONTEXT.Process(target=life, args=(place, can, folder, lists[number], nonce))
        process.start()
        return process

    running = {number: begin(number) for number in range(given.publishers)}
    done = Counter[str]()
    while running:
        time.sleep(chance.uniform(0.05, 0.4))
        for number, process in list(running.items()):
            if process.exitcode is not None:
                done["crashed"] += process.exitcode != 0
                del running[number]
        if running and done["kills"] < given.kills:
            number = chance.choice(sorted(running))
            os.kill(running[number].pid or 0, signal.SIGKILL)
            running[number].join()
            done["kills"] += 1
            running[number] = begin(number)
    end.set()
    collector.join()
    done["crashed"] += collector.exitcode != 0
    done["lives"] = lives.total()
    done["voided under way"] = int((folder / "voided").read_text() or 0) if not collector.exitcode else 0
    return done


def judge(place: Place, can: Capabilities, folder: Path, contents: int) -> tuple[list[str], str]:
    """Return what is wrong with what stands there, and how much that is."""
    remote = connect(place, can)
    registry = open_registry(remote, create=False)
    collect(remote, registry, by="collector", dead_after=-100)  # what the dead left open
    state = audit(remote)  # every content once for each name, claims dense, bytes right, feed without a hole
    wrong = [f"{name}@v{n} is still open" for name, n in sorted(state.open)]
    if len(state.committed) != contents:
        wrong.append(f"{len(state.committed)} versions of {contents} contents")
    acknowledged = 0
    for told in folder.glob("told-*"):
        for line in told.read_text().splitlines():
            name, n, content = json.loads(line)
            acknowledged += 1
            if state.committed.get((name, n)) != content:
                wrong.append(f"{name}@v{n} was acknowledged and is not there")
    catalog = Catalog.open(folder / "catalogue.db", registry.registry, durable=False)
    report = sync(remote, catalog)
    rows = {(row["name"], row["n"]): row["state"] for row in catalog.listing(every=True, limit=None)}
    catalog.close()
    standing = dict.fromkeys(state.committed, "committed") | dict.fromkeys(state.void, "void")
    if rows != standing or report.problems or report.open:
        differ = sorted(set(rows.items()) ^ set(standing.items()))
        wrong.append(f"the feed tells another story: {differ[:5]} {report.problems[:3]}")
    for name in NAMES:
        numbers = sorted(n for at, n in standing if at == name)
        if numbers != list(range(1, len(numbers) + 1)):
            wrong.append(f"{name}: the numbers have a gap that nobody recorded")
    remote.sweep(-60)
    left = remote.inner.link.ask("list_multipart_uploads", "cannot look", Prefix=place.prefix)  # type: ignore[attr-defined]
    wrong += [f"{upload['Key']} is an unfinished upload" for upload in left.get("Uploads", ())]
    remote.close()
    return wrong, f"{len(state.committed)} versions, {len(state.void)} voids, {acknowledged} acknowledgements"


def main() -> int:
    """Race, judge, and print what came out; 0 when everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contents", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--publishers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        servers.find("weed")
    except pytest.skip.Exception as reason:
        print(f"s3_races: SKIPPED: {reason}")
        return 0
    began = time.monotonic()
    CONTEXT.set_forkserver_preload(["weighbridge_testlib.publishing", "weighbridge_testlib.seaweed"])
    with servers.alone() as (server, folder):
        place = server.place("races")
        remote = S3Remote(place)
        can = remote.probe.ask()
        remote.close()
        done = race(place, can, folder, given)
        wrong, found = judge(place, can, folder, given.contents)
    if done["crashed"]:
        wrong.append(f"{done['crashed']} processes ended badly by themselves")
    for words in wrong:
        print(f"s3_races: {words}")
    print(
        f"s3_races: {given.publishers} publishers in {done['lives']} lives, {done['kills']} kills, "
        f"{done['voided under way']} claims given up meanwhile: {found}, {len(wrong)} wrong, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
