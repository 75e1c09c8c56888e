"""Kill the commands before and after the system calls that change anything, start them again, and let the checker look.

Each scenario runs once under strace to learn its calls; then, for each kill point, the same command starts on the same
files, dies at that point and is started again. Nothing acknowledged may be lost, nothing visible may fail to verify,
nothing may be published twice, and no leftovers may stay.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge_testlib import kill
from weighbridge_testlib.builders import lora_adapter, trainer_checkpoint
from weighbridge_testlib.yard import BIN, BrokenError, Yard, restore

NAME = "demo"
SWEEP = """
import sys
from weighbridge.registry.remotes.table import open_remote
remote = open_remote(sys.argv[1])
remote.sweep(0.0)
remote.close()
"""


class Scenario(NamedTuple):
    """A command on prepared files, and what must hold once it was killed and once it was run again."""

    name: str
    contents: int
    prepare: Callable[[Yard], None]
    command: Callable[[Yard], list[str]]
    after_kill: Callable[[Yard, str], None]
    after_restart: Callable[[Yard, int], None]


def demand(done: Any) -> None:
    """Raise unless a command succeeded."""
    if done.returncode:
        raise BrokenError(f"{' '.join(map(str, done.args))} ended with {done.returncode}: {done.stderr[-800:]}")


# -- what stands before the command runs


def nothing_but_an_adapter(yard: Yard) -> None:
    """Put a folder to push beside a remote that does not exist yet."""
    lora_adapter(yard.folder / "adapter", seed=1, tokenizer=True)


def a_first_version(yard: Yard) -> None:
    """Publish another content, acknowledged, before there is a folder to push."""
    demand(yard.push(lora_adapter(yard.folder / "first", seed=2), NAME))
    yard.acknowledge_all()
    nothing_but_an_adapter(yard)


def a_version(yard: Yard) -> None:
    """Publish the adapter itself."""
    nothing_but_an_adapter(yard)
    demand(yard.push(yard.folder / "adapter", NAME))
    yard.acknowledge_all()


def a_quiet_run(yard: Yard) -> None:
    """Leave a run with two checkpoints that nobody has touched for ten minutes, and let the daemon look quickly."""
    yard.configure(daemon={"scan": "200ms", "quiet": "200ms"})
    for step in (10, 20):
        folder = trainer_checkpoint(yard.runs / f"team/run-1/checkpoint-{step}", step=step, seed=step)
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (time.time() - 600,) * 2)


# -- the commands


def push(yard: Yard) -> list[str]:
    """Publish by hand."""
    return [str(BIN / "registry"), *yard.push_arguments(yard.folder / "adapter", NAME)]


def once(yard: Yard) -> list[str]:
    """Let the daemon settle, stage, seal, claim, upload, decide and record all there is."""
    return [str(BIN / "registryd"), "once", "--config", str(yard.config)]


def pull(yard: Yard) -> list[str]:
    """Fetch a version."""
    return [str(BIN / "registry"), "pull", f"{NAME}@v1", str(target(yard)), "--remote", "team"]


def tag(_yard: Yard) -> list[str]:
    """Move a tag."""
    return [str(BIN / "registry"), "tag", f"{NAME}@v1", "prod", "--remote", "team"]


# -- what must hold


def printed_is_committed(yard: Yard, stdout: str) -> None:
    """See that a version whose number was printed exists, and that all that is visible verifies."""
    committed = yard.check()["committed"]
    for version in stdout.split():
        name, _, n = version.rpartition("@v")
        if name == NAME and n.isdigit():
            if version not in committed:
                raise BrokenError(f"{version} was printed and is not committed")
            yard.acknowledge(name, int(n), committed[version])


def committed_is_kept(yard: Yard, _stdout: str) -> None:
    """Hold the daemon to every version that is visible now, and its database to the remote."""
    yard.acknowledge_all()
    yard.check(state=True)


def target_is_absent_or_whole(yard: Yard, _stdout: str) -> None:
    """See that the target of a pull is never anything between."""
    if target(yard).exists():
        whole(yard)


def all_once_and_swept(yard: Yard, contents: int) -> None:
    """See every content once, every claim decided, and after a sweep no leftovers."""
    demand(yard.run([sys.executable, "-c", SWEEP, str(yard.remote)]))
    yard.check(contents=contents, closed=True, swept=0.0, state=True)


def target_is_whole(yard: Yard, contents: int) -> None:
    """See the target whole and alone."""
    whole(yard)
    left = [p.name for p in target(yard).parent.iterdir() if p != target(yard)]
    if left:
        raise BrokenError(f"left beside the target: {left}")
    yard.check(contents=contents, closed=True)


SCENARIOS = (
    Scenario("push-first", 1, nothing_but_an_adapter, push, printed_is_committed, all_once_and_swept),
    Scenario("push-next", 2, a_first_version, push, printed_is_committed, all_once_and_swept),
    Scenario("once", 2, a_quiet_run, once, committed_is_kept, all_once_and_swept),
    Scenario("pull", 1, a_version, pull, target_is_absent_or_whole, target_is_whole),
    Scenario("tag", 1, a_version, tag, committed_is_kept, all_once_and_swept),
)


def target(yard: Yard) -> Path:
    """Return where the pull goes."""
    return yard.folder / "pulled/model"


def whole(yard: Yard) -> None:
    """Compare a pulled folder with the version as it stands on the remote, byte by byte."""
    version = yard.remote / f"models/{NAME}/v1"
    for path in version.rglob("*"):
        twin = target(yard) / path.relative_to(version)
        if path.is_file() and (not twin.is_file() or twin.read_bytes() != path.read_bytes()):
            raise BrokenError(f"the target is there without a true {twin.name}")
    listed = {f["path"] for f in json.loads((version / "manifest.json").read_text())["files"]}
    here = {p.relative_to(target(yard)).as_posix() for p in target(yard).rglob("*") if p.is_file()}
    extra = here - listed - {"README.md", "training.json", "manifest.json", "manifest.dsse.json"}
    if extra:
        raise BrokenError(f"the target holds {sorted(extra)}, which no manifest lists")


class Outcome(NamedTuple):
    """What became of one kill point."""

    scenario: str
    point: kill.Point
    fired: bool
    violation: str | None


def attempt(scenario: Scenario, yard: Yard, template: Path, point: kill.Point) -> Outcome:
    """Kill the command at one point, start it again, look."""
    restore(template, yard.folder)
    killed = kill.kill(scenario.command(yard), point, env=yard.env, cwd=yard.folder)
    try:
        scenario.after_kill(yard, killed.stdout)
        demand(yard.run(scenario.command(yard)))
        scenario.after_restart(yard, scenario.contents)
    except BrokenError as error:
        return Outcome(scenario.name, point, killed.fired, str(error))
    return Outcome(scenario.name, point, killed.fired, None)


def spread(points: Sequence[kill.Point], limit: int) -> list[kill.Point]:
    """Return at most `limit` points, evenly over the whole run, so that each stage is hit."""
    if len(points) <= limit:
        return list(points)
    return [points[i * len(points) // limit] for i in range(limit)]


def prove(scenario: Scenario, base: Path, limit: int, workers: int, deadline: float) -> tuple[int, list[Outcome]]:
    """Run one scenario until the deadline; return how many points there are, and what became of those tried."""

    def build(number: int) -> tuple[Yard, Path]:
        folder = base / f"{scenario.name}-{number}"
        with Yard(folder) as yard:
            scenario.prepare(yard)
        template = base / f"{scenario.name}-{number}.template"
        restore(folder, template)
        return yard, template

    yards = [build(number) for number in range(workers)]
    yard, _ = yards[0]
    found = kill.trace(scenario.command(yard), yard.folder, env=yard.env, cwd=yard.folder)
    scenario.after_restart(yard, scenario.contents)
    chosen = spread(found, limit)
    random.Random(scenario.name).shuffle(chosen)  # so that a run that is cut short has looked everywhere

    def work(number: int) -> list[Outcome]:
        yard, template = yards[number]
        mine = chosen[number::workers]
        return [attempt(scenario, yard, template, point) for point in mine if time.monotonic() < deadline]

    with ThreadPoolExecutor(workers) as pool:
        outcomes = [outcome for part in pool.map(work, range(workers)) for outcome in part]
    return len(found), outcomes


def main() -> int:
    """Run the scenarios the command line names and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=80, help="kill points per scenario at most (default 80)")
    parser.add_argument("--seconds", type=float, default=600, help="begin no new point after so long (default 600)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS], action="append")
    options = parser.parse_args()
    reason = kill.available()
    if reason:
        print(f"crash: SKIPPED {reason}")
        return 0
    chosen = [scenario for scenario in SCENARIOS if not options.only or scenario.name in options.only]
    tried, missed, violations = 0, 0, 0
    left = options.seconds
    with tempfile.TemporaryDirectory(prefix="wb-crash-") as base:
        for number, scenario in enumerate(chosen):
            begin = time.monotonic()
            deadline = begin + left / (len(chosen) - number)
            there, outcomes = prove(scenario, Path(base), options.points, options.workers, deadline)
            tried += sum(o.fired for o in outcomes)
            missed += sum(not o.fired for o in outcomes)
            for outcome in outcomes:
                if outcome.violation:
                    violations += 1
                    print(f"crash: {outcome.scenario} {outcome.point}: {outcome.violation}\n  {outcome.point.shows}")
            seconds = time.monotonic() - begin
            left -= seconds
            print(f"crash: {scenario.name}: {len(outcomes)} of {there} points, {seconds:.0f} s", file=sys.stderr)
    print(f"crash: {tried} kills, {missed} points not met, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
