"""Delete the daemon's memory, or give it a twin: the home remote is the truth, so every content is published once.

First the state folder disappears beside a full remote; then two daemons with two states watch one folder and one remote
while a trainer writes into it; then several people push at the same time, one folder or each their own.
"""

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from weighbridge_testlib.builders import llama_model, lora_adapter, run_root, trainer_checkpoint
from weighbridge_testlib.yard import BIN, BrokenError, Yard


def forgotten_state(folder: Path) -> str:
    """Publish, delete state and cache, start again: no new version, every old one found."""
    with Yard(folder) as yard:
        for number in (1, 2, 3):
            run_root(yard.runs / f"team/run-{number}", steps=(10, 20, 30), seed=100 * number, result=False)
        llama_model(yard.runs / "team/full/checkpoint-5", shards=2, seed=7)
        first = yard.daemon_once()
        before = yard.check(contents=10, closed=True, state=True)
        yard.acknowledge_all()
        for gone in (yard.state, yard.cache):
            shutil.rmtree(gone, ignore_errors=True)
        second = yard.daemon_once()
        if first.returncode or second.returncode:
            raise BrokenError(
                f"once: {first.returncode} {first.stderr[-400:]}, {second.returncode} {second.stderr[-400:]}"
            )
        after = yard.check(contents=10, closed=True, state=True)
        if after["claims"] != before["claims"]:
            raise BrokenError("the daemon without memory made claims of its own")
        listed = yard.registry("ls", "--all", "-q")
        missing = set(before["committed"]) - set(listed.stdout.split())
        if listed.returncode or missing:
            raise BrokenError(f"ls does not list {sorted(missing)}: {listed.stderr[-400:]}")
        third = yard.daemon_once()
        if third.returncode or yard.check()["claims"] != before["claims"]:
            raise BrokenError(f"a third round changed something: {third.stderr[-400:]}")
        return "10 versions found again"


def twins(folder: Path, *, checkpoints: int) -> str:
    """Let two daemons with separate states watch a run that is being written."""
    with Yard(folder) as one, ExitStack() as stack:
        two = stack.enter_context(twin(one))
        stack.enter_context(one.daemon())
        stack.enter_context(two.daemon())
        for step in range(1, checkpoints + 1):
            trainer_checkpoint(one.runs / f"team/run-1/checkpoint-{step}", step=step, seed=step)
        drains = [[str(BIN / "registryd"), "drain", str(one.runs), "--deadline", "60s"]] * 2
        with ThreadPoolExecutor(2) as pool:
            done = list(pool.map(lambda pair: pair[0].run(pair[1]), zip((one, two), drains, strict=True)))
        for yard, drained in zip((one, two), done, strict=True):
            if drained.returncode:
                raise BrokenError(f"drain: {drained.returncode} {drained.stderr[-400:]} {yard.log_tail(600)}")
        one.check(contents=checkpoints, closed=True, state=True)
        two.check(contents=checkpoints, closed=True, state=True)
    one.check(contents=checkpoints, closed=True, swept=0.0)
    return f"{checkpoints} contents, two daemons, each once"


def twin(yard: Yard) -> Yard:
    """Return a second daemon's yard with the same runs and the same remote."""
    other = Yard(yard.folder / "twin", remote=yard.remote)
    other.runs = yard.runs
    return other


def crowd(folder: Path, *, people: int) -> str:
    """Let several people push the same folder at the same instant: one version, and all are told its number."""
    with Yard(folder) as yard:
        source = lora_adapter(yard.folder / "adapter", seed=1)
        told = at_once(yard, [source] * people)
        if set(told) != {"crowd@v1"}:
            raise BrokenError(f"{people} pushes were told {sorted(set(told))}")
        yard.check(contents=1, closed=True, swept=0.0)
        return f"{people} pushes, one version"


def market(folder: Path, *, people: int) -> str:
    """Let several people push different folders under one name at the same instant: each gets a number of its own."""
    with Yard(folder) as yard:
        sources = [lora_adapter(yard.folder / f"adapter-{seed}", seed=seed) for seed in range(people)]
        told = at_once(yard, sources)
        if sorted(told) != sorted(f"crowd@v{n}" for n in range(1, people + 1)):
            raise BrokenError(f"{people} pushes were told {sorted(told)}")
        yard.check(contents=people, closed=True, swept=0.0)
        return f"{people} pushes, {people} versions"


def at_once(yard: Yard, sources: list[Path]) -> list[str]:
    """Push folders at the same instant and return what each push printed."""
    gate = threading.Barrier(len(sources))

    def push(source: Path) -> str:
        gate.wait()
        done = yard.push(source, "crowd")
        return done.stdout.strip() if done.returncode == 0 else f"{done.returncode}: {done.stderr[-300:]}"

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(push, sources))


def main() -> int:
    """Run all parts and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=12, help="what the twins compete for (default 12)")
    parser.add_argument("--people", type=int, default=6)
    options = parser.parse_args()
    parts: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("forgotten state", forgotten_state),
        ("twins", partial(twins, checkpoints=options.checkpoints)),
        ("crowd", partial(crowd, people=options.people)),
        ("market", partial(market, people=options.people)),
    )
    violations = 0
    with tempfile.TemporaryDirectory(prefix="wb-amnesia-") as base:
        for name, part in parts:
            try:
                print(f"amnesia: {name}: {part(Path(base) / name.replace(' ', '-'))}")
            except BrokenError as error:
                violations += 1
                print(f"amnesia: {name}: {error}")
    print(f"amnesia: {len(parts)} parts, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
