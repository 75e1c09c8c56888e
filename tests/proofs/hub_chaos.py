"""Publish to the test Hub while it fails at random, in both transports, and count what came out.

    python tests/proofs/hub_chaos.py [--publishes 300] [--seed 1]

Holds when every version is exactly one commit and one tag, no wrong size or hash was ever committed, nothing is lost,
and the Hub was asked at most three times as often as without faults.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

from weighbridge.registry import errors
from weighbridge.registry.flow import commit_publish
from weighbridge.registry.remotes.hub.client import Patience
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.rig import publish, remote
from weighbridge_testlib.shelf import payload

# huggingface_hub 2.4 hands files to httpx2 in its older way.
warnings.filterwarnings("ignore", "Use .content=", DeprecationWarning)

ROUTES = (
    "info", "refs", "tree", "paths-info", "validate-yaml", "preupload", "commit", "commit", "commit", "tag", "resolve",
    "lfs-batch", "lfs-put", "lfs-verify", "xet-token", "xorb", "shard", "whoami", "create",
)  # fmt: skip
ACTS = ("refuse", "lose", "cut", "cut-body", "flip")
NAMES = ("one", "two", "three")
TRIES = 12


def fault(chance: random.Random) -> Fault:
    """Return a fault at random; a flipped bit only where bytes are read."""
    on, act = chance.choice(ROUTES), chance.choice(ACTS)
    if act == "flip":
        on = r"GET /acme/\w+/resolve/[0-9a-f]+/(adapter_config.json|tokenizer/tokenizer.json)"
    status = chance.choice((500, 502, 503, 504, 429, 412 if on == "commit" else 503))
    return Fault(on, act, times=chance.choice((1, 1, 2)), skip=chance.randrange(2), status=status)  # type: ignore[arg-type]


def run(hub: TestHub, people: list[HubRemote], count: int, place: Path, chance: random.Random | None) -> int:
    """Publish so many contents, each until it lands; return how often somebody had to try again."""
    again = 0
    for turn in range(count):
        if chance is not None:
            hub.faults.clear()
            hub.faults.add(*(fault(chance) for _ in range(chance.randrange(3))))
        for attempt in range(TRIES):
            try:
                publish(people[turn % len(people)], place / f"{turn}-{attempt}", NAMES[turn % 3], seed=turn)
            except (errors.UnreachableError, errors.IntegrityError, errors.DeniedError) as error:
                if attempt + 1 == TRIES:
                    raise SystemExit(f"hub_chaos: {turn} did not land: {error} ({error.why})") from error
                again += 1
            else:
                break
    hub.faults.clear()
    return again


def judge(hub: TestHub, count: int) -> list[str]:
    """Return what is wrong on the Hub."""
    wrong: list[str] = []
    found: dict[str, int] = {}
    for name in NAMES:
        repo = hub.store.get(f"acme/{name}")
        titles = [c.title for c in repo.history("main")]
        ledger = json.loads(hub.store.body(repo.at()["_wb/ledger.json"]))
        standing = {told["n"] for told in ledger["versions"] if told["void"] is None}
        if {f"v{n}" for n in standing} != set(repo.tags):
            wrong.append(f"{name}: tags {sorted(repo.tags)} for versions {sorted(standing)}")
        counts = {f"{name} v{told['n']}": titles.count(f"{name} v{told['n']}") for told in ledger["versions"]}
        wrong += [f"{title} has {times} commits" for title, times in counts.items() if times != 1]
        for n in standing:
            tree = repo.at(f"v{n}")
            manifest = json.loads(hub.store.body(tree["manifest.json"]))
            found[manifest["content"]] = found.get(manifest["content"], 0) + 1
            bodies = {file["path"]: hub.store.body(tree[file["path"]]) for file in manifest["files"]}
            seeds = [seed for seed in range(count) if payload(seed) == bodies]
            if not seeds:
                wrong.append(f"{name} v{n} holds bytes that nobody published")
    if len(found) != count:
        wrong.append(f"{len(found)} contents are there, {count} were published")
    wrong += [f"{content} is there {times} times" for content, times in found.items() if times > 1]
    if hub.leaked():
        wrong.append("a token went to the storage host")
    return wrong


def main() -> int:
    """Run both transports; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--publishes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    commit_publish.LOOKS = (0.0, 0.05, 0.05)  # type: ignore[misc]
    failures = 0
    for way in ("lfs", "xet"):
        count = given.publishes // 2
        asked = []
        began, again = time.monotonic(), 0
        for chance in (None, random.Random(given.seed)):
            with tempfile.TemporaryDirectory() as folder, serve() as hub:
                place = Path(folder)
                patience = Patience(connect=2, answer=5, commit=10, stall=10)
                people = [remote(hub, place / f"home{n}", way=way, patience=patience) for n in range(2)]
                again = run(hub, people, count if chance else min(count, 30), place, chance)
                asked.append(len(hub.seen) / (count if chance else min(count, 30)))
                wrong = judge(hub, count if chance else min(count, 30))
                for one in people:
                    one.close()
            for words in wrong:
                print(f"hub_chaos: {way}: {words}")
            failures += len(wrong)
        ratio = asked[1] / asked[0]
        failures += ratio > 3
        print(
            f"hub_chaos: {way}: {count} publishes, {again} tries again, {asked[1]:.1f} requests each "
            f"({ratio:.2f}x of {asked[0]:.1f} without faults), {time.monotonic() - began:.0f} s"
        )
    print(f"hub_chaos: {'FAILED' if failures else 'held'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
