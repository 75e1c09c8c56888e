"""A yard on a Slurm cluster, where merges are jobs; how a proof waits for them, holds them and looks at them.

with stood(folder, cluster) as stand:
    stand.adapter()
    stand.until_published()
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge.config.settings import MergeSettings, SlurmSettings
from weighbridge.daemon.executors.protocol import Executor
from weighbridge.daemon.executors.slurm import SlurmExecutor
from weighbridge.registry import control
from weighbridge_testlib import builders, merging, slurm
from weighbridge_testlib.merge_bench import MergeBench
from weighbridge_testlib.slurm import Cluster
from weighbridge_testlib.yard import BIN, BrokenError, Yard, until

BASE = "example-org/tiny-base"


class Stand(NamedTuple):
    """A yard on a cluster, with its adapter; `held` is the process of a job that was stopped."""

    yard: Yard
    slurm: Cluster

    def configure(self, *, behaviour: bool = False, **of_slurm: Any) -> None:
        """Let merges be jobs."""
        self.yard.configure(
            daemon={"quiet": "0.2s", "scan": "1s"},
            watch={"merge": "all"},
            merge={
                "executor": "slurm",
                "scratch": str(self.yard.folder / "shared"),
                "bases": [str(self.yard.folder / "models")],
                "behaviour": behaviour,
            },
            slurm={"poll": "0.3s", "cpus": 1, "memory": "300 MB"} | of_slurm,
        )

    def adapter(self) -> None:
        """Finish a checkpoint."""
        self.adapter_at(self.yard.runs / "team/run-1/checkpoint-5")

    def adapter_at(self, place: Path) -> Path:
        """Finish a checkpoint anywhere."""
        folder = builders.trainer_checkpoint(place, step=5, ended=False)
        merging.wide_adapter(folder, self.yard.folder / "models" / BASE)
        builders.write_json(folder / "trainer_state.json", builders.trainer_state(5))
        return folder

    def merge(self) -> dict[str, Any]:
        """Return what the daemon says of the merge, {} when there is none, or it is done."""
        told = control.ask(str(self.yard.socket), "status")["merges"]["listed"]
        return dict(told[0]) if told else {}

    def events(self) -> list[str]:
        """Return the log of the merge."""
        told = control.ask(str(self.yard.socket), "log", {"name": "team-run-1"})
        return [e["event"] for e in told if e["event"].startswith("merge")]

    def problem(self) -> str:
        """Return message and cure of the first problem that status shows."""
        problems = control.ask(str(self.yard.socket), "status")["problems"]
        return " | ".join(f"{p['message']} - {p['fix']}" for p in problems)

    def until_state(self, state: str, seconds: float = 30) -> dict[str, Any]:
        """Wait for a state of the merge."""
        until(lambda: self.merge().get("state") == state, seconds, f"state {state}; it is {self.merge()}")
        return self.merge()

    def until_published(self, seconds: float = 40) -> None:
        """Wait for the merged version, and see that there is exactly one."""
        manifest = self.yard.remote / "models/team-run-1-merged-bf16/v1/manifest.json"
        until(manifest.exists, seconds, f"the merged version; the merge is {self._told()}")
        committed = self.yard.check(closed=False)["committed"]
        merged = [ref for ref in committed if "merged" in ref]
        if merged != ["team-run-1-merged-bf16@v1"]:
            raise BrokenError(f"published: {merged}")

    def _told(self) -> object:
        try:
            return self.merge()
        except Exception as error:  # noqa: BLE001 - only words for another error
            return error

    def hold(self) -> int:
        """Stop the job's process as soon as it is there and the daemon knows that it runs; return its id."""
        found: list[int] = []

        def look() -> bool:
            process = slurm.batch_process(self.yard.folder)
            found[:] = [process] if process is not None else []
            return bool(found)

        until(look, 40, "the job to start", every=0.002)
        os.kill(found[0], signal.SIGSTOP)
        until(lambda: "running on" in (self.merge().get("reason") or ""), 40, f"the job to be seen; {self._told()}")
        return found[0]

    def swell(self, limit: int) -> None:
        """Stop the job's process when it holds more than so many bytes: Slurm looks at its memory once in a second."""

        def look() -> bool:
            process = slurm.batch_process(self.yard.folder)
            try:
                held = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except (OSError, IndexError):
                return False
            if process is not None and held > limit:
                os.kill(process, signal.SIGSTOP)
                return True
            return False

        until(look, 40, "the job to take memory", every=0.002)

    def command(self, *arguments: str) -> Any:
        """Run `registryd merges` with JSON."""
        done = self.yard.run([str(BIN / "registryd"), "merges", *arguments, "--json"])
        if done.returncode != 0:
            raise BrokenError(done.stderr)
        return json.loads(done.stdout)["merges"]


class ClusterBench(MergeBench):
    """The daemon's parts without its threads, on the cluster."""

    def __init__(self, place: Path, stand: Stand) -> None:
        place.mkdir()
        self._environ = {**os.environ, **stand.slurm.env}
        self._models = stand.yard.folder / "models"
        super().__init__(place)

    def more_executors(self) -> dict[str, Executor]:
        """Return Slurm's, which merges go to, and the bases of the yard."""
        self.settings = MergeSettings(executor="slurm", bases=(str(self._models),))
        return {"slurm": SlurmExecutor(SlurmSettings(cpus=1, memory=300 << 20, poll=0.1), self._environ)}


def expect(condition: object, what: object) -> None:
    """Raise BrokenError unless a condition holds."""
    if not condition:
        raise BrokenError(str(what))


@contextmanager
def stood(folder: Path, cluster: Cluster) -> Iterator[Stand]:
    """Give a yard on the cluster."""
    with Yard(folder) as yard:
        yard.env |= cluster.env
        stand = Stand(yard, cluster)
        stand.configure()
        base = merging.wide_model(folder / "models" / BASE, shards=4, layers=2)
        (base / "README.md").write_text(builders.card(license_id="apache-2.0"))
        yield stand
