"""Flip one random bit in what is kept, and see that nothing damaged is delivered or shown as verified.

Each seed chooses a target and a bit: a payload file, a manifest, a claim, an object of the feed, the command line's
cache, the daemon's database, or a file that waits in staging. Files and manifests must be named by `pull` and `verify`,
claims by `verify`, the feed by `ls` unless it shows the truth; caches and databases must come back by themselves.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge_testlib import kill
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint
from weighbridge_testlib.yard import BIN, BrokenError, Yard, restore

INTEGRITY = 5
MOVING = {"age", "as_of", "refreshed_at", "cursor", "epoch"}


class World(NamedTuple):
    """A prepared yard: its template, what `ls` says of it, and where the daemon dies with its stage full."""

    yard: Yard
    template: Path
    rows: Any
    contents: int
    staged: kill.Point | None


class Flip(NamedTuple):
    """What was flipped: a file and the number of a bit in it."""

    path: Path
    bit: int


def flip(source: random.Random, path: Path) -> Flip:
    """Flip one bit of a file, its time kept."""
    found = path.stat()
    bit = source.randrange(8 * found.st_size)
    mode = found.st_mode
    path.chmod(0o600)
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))
    path.chmod(mode)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return Flip(path, bit)


def listed(yard: Yard) -> subprocess.CompletedProcess[str]:
    """Ask for every version."""
    return yard.registry("ls", "--all", "--json", "--remote", "team")


def rows_of(stdout: str) -> Any:
    """Return what `ls --json` says, without what changes by itself."""
    return _still(json.loads(stdout))


def _still(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _still(part) for key, part in value.items() if key not in MOVING}
    return [_still(part) for part in value] if isinstance(value, list) else value


def versions(yard: Yard) -> list[Path]:
    """Return every version folder."""
    return sorted(path.parent for path in yard.remote.glob("models/*/v*/manifest.json"))


def ref_of(folder: Path) -> str:
    """Return the reference of a version folder."""
    return f"{folder.parent.name}@{folder.name}"


def pull(yard: Yard, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Pull a version into a place that is not there yet."""
    target = yard.folder / "pulled"
    return yard.registry("pull", ref_of(folder), target, "--remote", "team"), target


def refused(done: subprocess.CompletedProcess[str], word: str, what: str) -> None:
    """See that a command stopped for damage and named its object."""
    if done.returncode != INTEGRITY:
        raise BrokenError(f"{what} ended with {done.returncode}, not {INTEGRITY}: {(done.stdout + done.stderr)[-400:]}")
    if word not in done.stdout + done.stderr:
        raise BrokenError(f"{what} does not name {word}: {(done.stdout + done.stderr)[-400:]}")


# -- the targets


def payload(world: World, source: random.Random) -> Flip:
    """Damage a payload file: pull delivers nothing and names it, verify names it."""
    yard = world.yard
    folder = source.choice(versions(yard))
    files = json.loads((folder / "manifest.json").read_text())["files"]
    path = folder / str(source.choice(files)["path"])
    flipped = flip(source, path)
    done, target = pull(yard, folder)
    refused(done, path.name, "pull")
    if target.exists():
        raise BrokenError("pull delivered a damaged version")
    refused(yard.registry("verify", ref_of(folder), "--remote", "team"), path.name, "verify")
    return flipped


def decision(world: World, source: random.Random) -> Flip:
    """Damage a manifest: the version is not delivered, and the manifest is named."""
    yard = world.yard
    folder = source.choice(versions(yard))
    flipped = flip(source, folder / "manifest.json")
    done, target = pull(yard, folder)
    refused(done, "manifest", "pull")
    if target.exists():
        raise BrokenError("pull delivered a version whose manifest is damaged")
    refused(yard.registry("verify", ref_of(folder), "--remote", "team"), "manifest", "verify")
    return flipped


def claim(world: World, source: random.Random) -> Flip:
    """Damage a claim: verify names it, and what a pull delivers is what the decision says, or nothing."""
    yard = world.yard
    folder = source.choice(versions(yard))
    number = f"{int(folder.name[1:]):08d}.json"
    flipped = flip(source, folder.parent / "_wb/claims" / number)
    done, target = pull(yard, folder)
    if done.returncode == 0:
        same(folder, target)
    elif target.exists():
        raise BrokenError("pull failed and left a target")
    refused(yard.registry("verify", ref_of(folder), "--remote", "team"), number, "verify")
    return flipped


def same(folder: Path, target: Path) -> None:
    """Compare a pulled folder with the version as it stands."""
    for path in folder.rglob("*"):
        if path.is_file() and (target / path.relative_to(folder)).read_bytes() != path.read_bytes():
            raise BrokenError(f"pull delivered another {path.name}")


def feed(world: World, source: random.Random) -> Flip:
    """Damage an object of the feed: a reader without a cache sees the truth or an error, and a rebuild mends it."""
    yard = world.yard
    flipped = flip(source, source.choice(sorted(yard.remote.glob("catalog/feed/*.json"))))
    if source.random() < 0.7:
        shutil.rmtree(yard.cache)
    truthful(yard, world, "ls")
    done = yard.registry("rebuild", "--remote", "team")
    if done.returncode:
        raise BrokenError(f"rebuild ended with {done.returncode}: {done.stderr[-400:]}")
    again = listed(yard)
    if again.returncode or rows_of(again.stdout) != world.rows:
        raise BrokenError(f"ls after the rebuild: {again.returncode} {again.stderr[-400:]}")
    return flipped


def truthful(yard: Yard, world: World, what: str) -> None:
    """See that `ls` shows the truth, or says what is damaged."""
    done = listed(yard)
    if done.returncode == 0:
        if rows_of(done.stdout) != world.rows:
            raise BrokenError(f"{what} shows something else: {done.stdout[:600]}")
    elif done.returncode != INTEGRITY or "catalog/feed" not in done.stderr:
        raise BrokenError(f"{what} ended with {done.returncode} and does not name the feed: {done.stderr[-400:]}")


def cache(world: World, source: random.Random) -> Flip:
    """Damage the command line's cache: it is thrown away and the truth is shown."""
    yard = world.yard
    flipped = flip(source, source.choice(sorted(p for p in yard.cache.rglob("*") if p.is_file() and p.stat().st_size)))
    for turn in ("ls", "a second ls"):
        done = listed(yard)
        if done.returncode or rows_of(done.stdout) != world.rows:
            raise BrokenError(f"{turn}: {done.returncode} {done.stderr[-400:]} {done.stdout[:300]}")
    folder = source.choice(versions(yard))
    shown = yard.registry("show", ref_of(folder), "--json", "--remote", "team")
    content = json.loads((folder / "manifest.json").read_text())["content"]
    if shown.returncode or content not in shown.stdout:
        raise BrokenError(f"show: {shown.returncode} {shown.stderr[-400:]}")
    return flipped


def database(world: World, source: random.Random) -> Flip:
    """Damage the daemon's database: the next round mends it and publishes nothing twice."""
    yard = world.yard
    flipped = flip(source, source.choice(sorted(p for p in yard.state.glob("*.db*") if p.stat().st_size)))
    for turn in ("once", "a second once"):
        done = yard.daemon_once()
        if done.returncode:
            raise BrokenError(f"{turn} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    yard.check(contents=world.contents, closed=True, state=True)
    return flipped


def staging(world: World, source: random.Random) -> Flip:
    """Damage what waits in staging after the daemon died: what is published in the end is the trainer's."""
    yard = world.yard
    checkpoint = yard.runs / "team/run-1/checkpoint-2"
    trainer_checkpoint(checkpoint, step=2, seed=2)
    assert world.staged is not None
    kill.kill([str(BIN / "registryd"), "once"], world.staged, env=yard.env, cwd=yard.folder)
    waiting = sorted(p for p in yard.remote.glob("models/*/_wb/stage/*/**/*") if p.is_file() and p.stat().st_size)
    if not waiting:
        raise BrokenError("nothing waits in staging where it should")
    chosen = source.choice(waiting)
    placed = chosen.stat().st_nlink > 1
    flipped = flip(source, chosen)
    done = yard.daemon_once()
    if placed:  # the file has its final name already: what lies there is foreign, and stays invisible
        refused(done, chosen.name, "once")
        if len(yard.look()[0]["committed"]) != world.contents:
            raise BrokenError("a version with a damaged file was committed")
        return flipped
    if done.returncode:
        raise BrokenError(f"once ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    yard.check(contents=world.contents + 1, closed=True, state=True)
    for folder in versions(yard):
        weights = folder / "adapter_model.safetensors"
        if folder.parent.name == "team-run-1" and weights.read_bytes() == (checkpoint / weights.name).read_bytes():
            return flipped
    raise BrokenError("the trainer's bytes are in no version")


TARGETS: dict[str, Callable[[World, random.Random], Flip]] = {
    "payload": payload,
    "manifest": decision,
    "claim": claim,
    "feed": feed,
    "cache": cache,
    "database": database,
    "staging": staging,
}


def build(folder: Path) -> World:
    """Publish four versions by hand and by the daemon, tag one, and learn where the daemon holds a full stage."""
    with Yard(folder) as yard:
        for seed, name in ((1, "demo"), (2, "demo")):
            demand(yard.push(lora_adapter(yard.folder / f"adapter-{seed}", seed=seed), name))
        demand(yard.push(llama_model(yard.folder / "full", shards=2), "full"))
        demand(yard.registry("tag", "demo@v1", "prod", "--remote", "team"))
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-1", step=1, seed=1)
        demand(yard.daemon_once())
    contents = yard.acknowledge_all()
    done = listed(yard)
    demand(done)
    template = folder.with_name(f"{folder.name}.template")
    restore(folder, template)
    staged = None
    if kill.available() is None:
        trainer_checkpoint(yard.runs / "team/run-1/checkpoint-2", step=2, seed=2)
        points = kill.trace([str(BIN / "registryd"), "once"], yard.folder, env=yard.env, cwd=yard.folder)
        staged = next((p for p in points if p.call.startswith("link") and not p.after and "/v2/" in p.shows), None)
    return World(yard, template, rows_of(done.stdout), contents, staged)


def demand(done: subprocess.CompletedProcess[str]) -> None:
    """Raise unless a command that prepares something succeeded."""
    if done.returncode:
        raise BrokenError(f"{' '.join(map(str, done.args))} ended with {done.returncode}: {done.stderr[-800:]}")


class Result(NamedTuple):
    """What became of one seed."""

    seed: int
    target: str
    violation: str | None


def attempt(world: World, seed: int, targets: list[str]) -> Result:
    """Flip one bit and look."""
    source = random.Random(seed)
    target = targets[seed % len(targets)]
    restore(world.template, world.yard.folder)
    try:
        TARGETS[target](world, source)
    except BrokenError as error:
        return Result(seed, target, str(error))
    return Result(seed, target, None)


def main() -> int:
    """Flip so many bits and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed, to repeat one")
    parser.add_argument("--seconds", type=float, default=420, help="begin no new seed after so long (default 420)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-flip-") as base:
        worlds = [build(Path(base) / f"yard-{number}") for number in range(options.workers)]
        targets = options.only or [name for name in TARGETS if name != "staging" or worlds[0].staged]
        deadline = time.monotonic() + options.seconds
        seeds = range(options.first, options.first + options.seeds)

        def work(number: int) -> list[Result]:
            mine = seeds[number :: options.workers]
            return [attempt(worlds[number], seed, targets) for seed in mine if time.monotonic() < deadline]

        with ThreadPoolExecutor(options.workers) as pool:
            results = [result for part in pool.map(work, range(options.workers)) for result in part]
    for result in results:
        if result.violation:
            print(f"flip: seed {result.seed} {result.target}: {result.violation}")
    violations = sum(result.violation is not None for result in results)
    each = ", ".join(f"{name} {count}" for name, count in Counter(r.target for r in results).items())
    print(f"flip: {len(results)} seeds ({each}), {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
