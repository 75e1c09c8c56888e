"""Kill merges with SIGKILL in the middle of their files and see that the next run gives the same bytes.

    python tests/proofs/merge.py [--kills 50] [--seed 1]

Four kills of five come when a random number of bytes lie in the staging folder, the others at a random moment of the
command's time; every third one takes the child process that writes, as a machine short of memory would, the others
the command itself. After each kill: no target, nobody who writes on, and of the files that lie there at most one that
the journal does not list; the run that finishes keeps every listed one untouched and writes no other byte anew. A kill
that comes too late, when the target is there already, counts as well: it must be whole.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from weighbridge.adapters.merge import start
from weighbridge.adapters.merge.preview import look
from weighbridge.registry.hashing import sha256_file
from weighbridge_testlib import merging

SHARDS = 8
STEP = 0.0005
LONGEST = 60.0


class Kill(NamedTuple):
    """When a merge is killed: at a number of written bytes, or after some seconds; `child` is whom."""

    written: int | None
    seconds: float
    child: bool


class Seen(NamedTuple):
    """What lay in the staging folder after a kill: listed files with inode and time, and others with their size."""

    listed: dict[str, tuple[int, int]]
    open: dict[str, int]


def content(folder: Path) -> dict[str, str]:
    """Return the digest of every file but the record, which names the time it took."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != start.RECORD
    }


def written(yard: Path) -> int:
    """Return the bytes of weights that lie in the staging folder of the merge into `out`."""
    total = 0
    for path in yard.glob(".out.merge-*/out/*.safetensors"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it was published just now
            continue
    return total


def seen(yard: Path) -> Seen:
    """Return what lies in the staging folder."""
    listed: dict[str, tuple[int, int]] = {}
    others: dict[str, int] = {}
    for stage in yard.glob(".out.merge-*"):
        journal = stage / "journal.jsonl"
        for line in journal.read_bytes().split(b"\n") if journal.exists() else []:
            try:
                path = json.loads(line)["path"]
            except ValueError:
                continue
            status = (stage / "out" / path).stat()
            listed[path] = (status.st_ino, status.st_mtime_ns)
        for path in (stage / "out").glob("*.safetensors"):
            if path.name not in listed:
                others[path.name] = path.stat().st_size
    return Seen(listed, others)


def children(process: int) -> list[int]:
    """Return the processes that one started."""
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except FileNotFoundError:
        return []


def strike(yard: Path, when: Kill) -> None:
    """Run one merge with one worker and kill it."""
    words = ("merge", yard / "adapter", "--base", yard / "base", "--to", yard / "out", "--workers", "1")
    with merging.command(*words) as running:
        begun = time.monotonic()
        while running.poll() is None and time.monotonic() - begun < LONGEST:
            there = written(yard) >= when.written if when.written is not None else False
            if there or (when.written is None and time.monotonic() - begun >= when.seconds):
                break
            time.sleep(STEP)
        started = children(running.pid)
        for process in started if when.child else []:
            os.kill(process, signal.SIGKILL)
        if when.child and started:
            running.communicate()  # it tells what became of its child, and ends
        running.kill()
        running.wait()
        end = time.monotonic() + LONGEST
        while any(Path(f"/proc/{process}").exists() for process in started) and time.monotonic() < end:
            time.sleep(STEP)


def one(yard: Path, when: Kill, sizes: dict[str, int]) -> tuple[list[str], Seen]:
    """Kill one merge and finish it; return what was wrong, and what lay there between."""
    target = yard / "out"
    strike(yard, when)
    before = seen(yard)
    time.sleep(0.05)
    wrong = [] if seen(yard) == before else ["somebody wrote on after the kill"]
    if len(before.open) > 1:
        wrong.append(f"{len(before.open)} files have to be written again")
    wrong += [f"{name} is longer than planned" for name, size in before.open.items() if size > sizes[name]]
    done = start.merge(look([yard / "adapter"], yard / "base"), target)
    if content(target) != content(yard / "right"):
        wrong.append("the bytes differ from the undisturbed merge")
    for path, (inode, changed) in before.listed.items():
        status = (target / path).stat()
        if path not in done.facts["kept_files"] or (status.st_ino, status.st_mtime_ns) != (inode, changed):
            wrong.append(f"{path} was finished and was written again")
    wrong += [f"{left.name} is left over" for left in yard.glob(".out.merge-*")]
    shutil.rmtree(target)
    return wrong, before


def main() -> int:
    """Run all kills and print one closing line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    source = random.Random(given.seed)
    failed, inside, some = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        yard = Path(folder)
        base = merging.wide_model(yard / "base", shards=SHARDS, layers=SHARDS, hidden=512)
        merging.wide_adapter(yard / "adapter", base)
        start.merge(look([yard / "adapter"], base), yard / "right")
        sizes = {path.name: path.stat().st_size for path in (yard / "right").glob("*.safetensors")}
        begun = time.monotonic()
        strike(yard, Kill(None, LONGEST, child=False))
        whole = time.monotonic() - begun
        shutil.rmtree(yard / "out")
        for number in range(given.kills):
            bytes_there = source.randrange(1, sum(sizes.values()))
            when = Kill(bytes_there if number % 5 else None, source.uniform(0.2, 1.05) * whole, number % 3 == 0)
            wrong, before = one(yard, when, sizes)
            inside += any(0 < size < sizes[name] for name, size in before.open.items())
            some += 0 < len(before.listed) < SHARDS
            for line in wrong:
                print(f"merge: kill {number} ({when}): {line}", flush=True)
            failed += bool(wrong)
    if 2 * inside < given.kills:
        failed += 1
        print(f"merge: only {inside} of {given.kills} kills met a file half written", flush=True)
    print(
        f"merge: {given.kills} kills, {failed} wrong; {inside} in the middle of a file, {some} with some of {SHARDS} "
        "files finished",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
