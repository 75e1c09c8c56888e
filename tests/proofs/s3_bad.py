"""The real commands against every S3 remote that cannot be used: `s3_bad.py [--commands ls,push] [--only WORDS]`.

Each line is a command: its seconds, exit code and first line. It fails on more than five seconds, another exit code
than that of the case, a traceback, an error without cause or fix, and on anything half published.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.s3_bad import CASES, COMMANDS, KEYS, Case, World, arguments, written
from weighbridge_testlib.shelf import Shelf

BOUND: Final = 5.0
"""Seconds after which nobody still waits."""
USUAL: Final = ("ls", "pull", "push", "doctor")
REGISTRY: Final = Path(sys.executable).parent / "registry"


class Run:
    """Carries the commands of one case out, and counts what is wrong."""

    def __init__(self, world: World, folder: Path, other: Path, cases: tuple[Case, ...], bound: float) -> None:
        self.world = world
        self.folder = folder
        self.other = other
        self.cases = cases
        self.bound = bound
        self.bad: list[str] = []
        self.longest = (0.0, "")

    def case(self, case: Case, commands: list[str]) -> None:
        """Run the commands of a case and look at the bucket."""
        place = self.folder / f"case-{self.cases.index(case)}"
        place.mkdir()
        config = written(place, case.remote(self.world), None)
        model = lora_adapter(place / f"bad-{self.cases.index(case)}", seed=self.cases.index(case))
        asked: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WEIGHBRIDGE_"))},
            **KEYS,
            "HOME": str(place),
            "WEIGHBRIDGE_CONFIG": str(config),
            "WEIGHBRIDGE_CACHE": str(place / "cache"),
            "NO_PROXY": "*",
            **case.env,
        }
        env = {name: value for name, value in asked.items() if value is not None}
        before = self.world.bucket()
        for command in commands:
            wanted = case.codes.get(command, case.code)
            if wanted is not None:
                self._command(case, command, min(1, wanted) if command == "doctor" else wanted, env, model)
        objects, uploads = self.world.bucket()
        left = {key for key, _ in objects - before[0] if "/_wb/probe/" not in key}
        if not before[0] <= objects or not uploads <= before[1] or any(key.endswith("/manifest.json") for key in left):
            begun = sorted(uploads - before[1])
            self._fault(case, "push", f"something is half published: {sorted(left)}, unfinished uploads: {begun}")
        if any("/_wb/claims/" not in key and "catalog/feed/" not in key and "/v1/" not in key for key in left):
            self._fault(case, "push", f"left behind: {sorted(left)}")

    def _command(self, case: Case, command: str, wanted: int, env: dict[str, str], model: Path) -> None:
        words = arguments(command, model, model.parent / "out", self.other)
        began = time.monotonic()
        done = subprocess.run(
            [str(REGISTRY), *words], env=env, cwd=model.parent, capture_output=True, text=True, timeout=120, check=False
        )
        taken = time.monotonic() - began
        said = done.stderr if command != "doctor" else done.stdout
        lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("warning:")]
        first = next((line for line in lines if line.startswith(("error:", "FAIL", "warn"))), lines[0] if lines else "")
        print(f"{case.title:<48} {command:<8} {taken:5.2f} s  {done.returncode}  {first[:110]}", flush=True)
        self.longest = max(self.longest, (taken, f"{command} of {case.title}"))
        if taken > self.bound:
            self._fault(case, command, f"{taken:.1f} s")
        if done.returncode != wanted:
            self._fault(case, command, f"ended with {done.returncode}, not {wanted}: {said[-400:]}")
        if "Traceback" in done.stdout + done.stderr:
            self._fault(case, command, "a traceback")
        if wanted and command != "doctor":
            labels = {line.partition(":")[0] for line in lines}
            if "fix" not in labels or not {"why", "error"} <= labels | {"why"}:
                self._fault(case, command, f"no fix: {said[-400:]}")
            if not re.search(case.why, said):
                self._fault(case, command, f"not told: {case.why}: {said[-400:]}")

    def _fault(self, case: Case, command: str, words: str) -> None:
        self.bad.append(f"{case.title}, {command}: {words}")
        print(f"  WRONG: {words}", flush=True)


def main() -> int:
    """Run what the command line asks for and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commands", default=",".join(USUAL), help=f"any of {','.join(COMMANDS)}, or all")
    parser.add_argument("--only", default="", help="cases whose title has these words")
    parser.add_argument("--bound", type=float, default=BOUND, help="seconds that a command may take")
    options = parser.parse_args()
    commands = list(COMMANDS) if options.commands == "all" else options.commands.split(",")
    if unknown := set(commands) - set(COMMANDS):
        parser.error(f"no command is called {', '.join(sorted(unknown))}")
    try:
        servers.find("weed")
    except pytest.skip.Exception as reason:
        print(f"s3_bad: SKIPPED: {reason}")
        return 0
    chosen = tuple(case for case in CASES if options.only in case.title)
    with servers.alone() as (server, folder), World(server, folder) as world:
        other = folder / "other"
        other.mkdir()
        Shelf(DirectoryRemote(other), registry="11111111-7a53-4b1e-9a0e-3f4f0f1b2c3d").publish("elsewhere")
        run = Run(world, folder, other, chosen, options.bound)
        for case in chosen:
            run.case(case, commands)
    for words in run.bad:
        print(f"s3_bad: WRONG: {words}")
    print(
        f"s3_bad: {len(chosen)} cases, {', '.join(commands)}; {len(run.bad)} wrong; "
        f"the longest took {run.longest[0]:.1f} s: {run.longest[1]}"
    )
    return 1 if run.bad else 0


if __name__ == "__main__":
    sys.exit(main())
