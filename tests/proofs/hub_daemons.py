"""Two daemons, real processes, publish 40 versions of one name: to the Hub as home, then to S3 with the Hub as mirror.

    python tests/proofs/hub_daemons.py [--versions 40] [--ways lfs xet]

Holds when all land, numbers are unique and dense, and no refusal as stale comes out; with the home on S3 (SeaweedFS)
and the mirror on the Hub down for half of the run, when both end with the same numbers and contents.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weighbridge.registry import errors, layout
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed
from weighbridge_testlib.builders import card, lora_adapter
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.rig import TRANSPORTS, remote
from weighbridge_testlib.yard import BrokenError, Yard, until

NAME = "shared"
LIMIT = 150.0
"""Seconds after which what has not landed never will; `until` is three times as patient."""


@contextmanager
def yards(
    place: Path, env: Mapping[str, str], home: Mapping[str, str], mirror: Mapping[str, str] | None = None
) -> Iterator[list[Yard]]:
    """Run two daemons, each with a home, a cache and a state of its own; `home` and `mirror` are remotes' tables."""
    with ExitStack() as stack:
        found = []
        for who in "ab":
            yard = Yard(place / who)
            yard.env |= {"HF_TOKEN": "hf_ann", "HF_HOME": str(place / who / "hf"), **env}
            stack.enter_context(yard)
            yard.configure(watch={"name": NAME, "share": True, "mirrors": ["hub"] if mirror else []}, remote=home)
            if mirror is not None:
                lines = [f'{key} = "{value}"\n' for key, value in mirror.items()]
                yard.config.write_text(yard.config.read_text() + "[remotes.hub]\n" + "".join(lines))
            stack.enter_context(yard.daemon())
            found.append(yard)
        yield found


def put(people: list[Yard], seeds: range) -> None:
    """Let trainers of both machines finish adapters, in turn."""
    for seed in seeds:
        folder = lora_adapter(people[seed % 2].runs / "team" / f"run-{seed}" / "final", seed=seed)
        (folder / "README.md").write_text(card())


def tagged(hub: TestHub) -> int:
    """Return how many versions the repository has."""
    repo = hub.store.repos.get(("model", f"acme/{NAME}"))
    return 0 if repo is None else len(repo.tags)


def words(yard: Yard) -> list[str]:
    """Return what of a daemon's log speaks of a refusal as stale, or of a bug."""
    log = (yard.folder / "registryd.log").read_text(errors="replace")
    return [line for line in log.splitlines() if re.search(r"\b412\b|Traceback|commit has happened", line)]


def contents(remote: Remote, count: int) -> dict[int, str]:
    """Return the content of every number, as a reader finds it."""
    found = {}
    for n in range(1, 2 * count):
        try:
            found[n] = committed(remote, NAME, n).content
        except errors.NotFoundError:
            continue
    return found


def home_on_the_hub(count: int, way: str) -> list[str]:
    """Let both daemons publish to one repository; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder, serve() as hub:
        place, began = Path(folder), time.monotonic()

        with yards(place, TRANSPORTS[way], {"url": "hf://acme", "endpoint": hub.url}) as people:
            put(people, range(count))
            until(lambda: tagged(hub) >= count, LIMIT, f"{count} tags")
            wrong = [line for yard in people for line in words(yard)]
        repo = hub.store.get(f"acme/{NAME}")
        ledger = json.loads(hub.store.body(repo.at()["_wb/ledger.json"]))
        if sorted(repo.tags, key=lambda tag: int(tag[1:])) != [f"v{n}" for n in range(1, count + 1)]:
            wrong.append(f"tags are {sorted(repo.tags)}")
        if len({told["content"] for told in ledger["versions"]}) != count:
            wrong.append("a content has two numbers, or none")
        if len(repo.history("main")) != count + 1:
            wrong.append(f"{len(repo.history('main'))} commits for {count} versions")
        commits = hub.count("commit")
        print(
            f"hub_daemons: home on the Hub by {way}: {len(repo.tags)} versions of two daemons, {commits} commit "
            f"requests, {commits - count} of them too late and planned again, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        return wrong


def mirror_on_the_hub(count: int, way: str) -> list[str]:
    """Let both publish to a bucket while the mirror is down for half of it; return what is wrong."""
    keys = {"AWS_ACCESS_KEY_ID": seaweed.ACCESS, "AWS_SECRET_ACCESS_KEY": seaweed.SECRET, "AWS_REGION": "us-east-1"}
    os.environ |= keys
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as disk,
        serve() as hub,
        seaweed.running(Path(disk)) as server,
    ):
        place, began = Path(folder), time.monotonic()
        home = S3Remote(server.place("team"))
        bucket = {"url": f"s3://{server.bucket}/team", "endpoint": server.endpoint}
        mirror = {"url": "hf://acme", "endpoint": hub.url}

        def at_home() -> int:
            keys = (found.key for found in home.list(layout.MODELS + NAME + "/"))
            return sum(re.search(r"/v\d+/manifest\.json$", key) is not None for key in keys)

        with yards(place, keys | TRANSPORTS[way], bucket, mirror) as people:
            put(people, range(count // 4))
            until(lambda: tagged(hub) > 0, LIMIT, "the first delivery")
            hub.faults.add(Fault("any", status=503, times=10**9))
            put(people, range(count // 4, 3 * count // 4))
            until(lambda: at_home() >= 3 * count // 4, LIMIT, "the home to go on without its mirror")
            behind = 3 * count // 4 - tagged(hub)
            hub.faults.clear()
            put(people, range(3 * count // 4, count))
            until(lambda: at_home() >= count, LIMIT, f"{count} versions at home")
            until(lambda: tagged(hub) >= count, LIMIT, f"{count} tags on the mirror")
            wrong = [line for yard in people for line in words(yard)]
        reader = remote(hub, place / "reader", token="hf_ben")
        ours, theirs = contents(home, count), contents(reader, count)
        home.close()
        reader.close()
        if sorted(ours) != list(range(1, count + 1)) or len(set(ours.values())) != count:
            wrong.append(f"the home has {sorted(ours)}")
        if ours != theirs:
            wrong.append(f"the mirror differs at {sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n))}")
        if list(hub.store.get(f"acme/{NAME}").branches) != ["main"]:
            wrong.append(f"branches are left: {list(hub.store.get(f'acme/{NAME}').branches)}")
        print(
            f"hub_daemons: mirror on the Hub by {way}: {len(theirs)} versions, {behind} behind when it came back, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        return wrong


def main() -> int:
    """Run both; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--ways", nargs="+", default=["lfs"], choices=sorted(TRANSPORTS))
    given = parser.parse_args()
    wrong: list[str] = []
    for way in given.ways:
        for run in (home_on_the_hub, mirror_on_the_hub):
            try:
                found = run(given.versions, way)
            except BrokenError as error:
                found = [str(error)]
            wrong += found
            for line in found[:20]:
                print(f"hub_daemons: {way}: {line}")
    print(f"hub_daemons: {'FAILED' if wrong else 'held'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
