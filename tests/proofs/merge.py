"""Kill merges with SIGKILL at random moments of time and see that the next run gives the same bytes.

    python tests/proofs/merge.py [--kills 50] [--seed 1]

After each kill: no target, no child that writes on, and every file the journal lists is kept, untouched, by the run
that finishes. A kill that comes too late, when the target is there already, counts as well: it must be whole.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from weighbridge.adapters.merge import start
from weighbridge.adapters.merge.preview import look
from weighbridge.registry.hashing import sha256_file
from weighbridge_testlib import merging


def content(folder: Path) -> dict[str, str]:
    """Return the digest of every file but the record, which names the time it took."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != start.RECORD
    }


def finished(yard: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every file that a journal beside the target lists."""
    found: dict[str, tuple[int, int]] = {}
    for journal in yard.glob(".out.merge-*/journal.jsonl"):
        for line in journal.read_bytes().split(b"\n"):
            try:
                path = json.loads(line)["path"]
            except ValueError:
                continue
            status = (journal.parent / "out" / path).stat()
            found[path] = (status.st_ino, status.st_mtime_ns)
    return found


def one(yard: Path, moment: float) -> tuple[list[str], int]:
    """Kill one merge after `moment` seconds and finish it; return what was wrong, and how many files were kept."""
    target = yard / "out"
    with merging.command("merge", yard / "adapter", "--base", yard / "base", "--to", target) as running:
        time.sleep(moment)
        running.kill()
    time.sleep(0.2)
    before = finished(yard)
    time.sleep(0.1)
    wrong = [] if finished(yard) == before else ["the child wrote on after its parent was gone"]
    done = start.merge(look([yard / "adapter"], yard / "base"), target)
    if content(target) != content(yard / "right"):
        wrong.append("the bytes differ from the undisturbed merge")
    for path, (inode, changed) in before.items():
        status = (target / path).stat()
        if path not in done.facts["kept_files"] or (status.st_ino, status.st_mtime_ns) != (inode, changed):
            wrong.append(f"{path} was finished and was written again")
    wrong += [f"{left.name} is left over" for left in yard.glob(".out.merge-*")]
    shutil.rmtree(target)
    return wrong, len(before)


def main() -> int:
    """Run all kills and print one closing line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    source = random.Random(given.seed)
    failed = 0
    kept: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        yard = Path(folder)
        base = merging.wide_model(yard / "base", shards=8, layers=8, hidden=512)
        adapter = merging.wide_adapter(yard / "adapter", base)
        start.merge(look([adapter], base), yard / "right")
        with merging.command("merge", adapter, "--base", base, "--to", yard / "out") as running:
            begun = time.monotonic()
            running.wait()
            whole = time.monotonic() - begun
        shutil.rmtree(yard / "out")
        for number in range(given.kills):
            moment = source.uniform(0.2, 1.05) * whole
            wrong, count = one(yard, moment)
            kept.append(count)
            for line in wrong:
                print(f"merge: kill {number} after {moment:.3f} s: {line}", flush=True)
            failed += bool(wrong)
    between = sum(1 for count in kept if 0 < count < 8)
    print(f"merge: {given.kills} kills, {failed} wrong; {between} of them with some of 8 files finished", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
