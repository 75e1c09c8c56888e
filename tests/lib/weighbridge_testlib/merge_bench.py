"""The daemon's jobs and merges without their threads: a `Bench` whose rule asks for merges."""

import json
import time
from pathlib import Path
from typing import Any

from weighbridge.config.settings import MergeSettings
from weighbridge.daemon.executors.local import LocalExecutor
from weighbridge.daemon.executors.protocol import Executor
from weighbridge.daemon.mergestore import Merge, MergeStore
from weighbridge.daemon.merging import Merging
from weighbridge.daemon.sequel import Merges
from weighbridge_testlib import builders
from weighbridge_testlib.bench import Bench, Killed
from weighbridge_testlib.yard import until

BASE = "example-org/tiny-base"


class DyingStore(MergeStore):
    """A store that dies right before or right after it has written that a merge reached a state."""

    fatal: tuple[str, bool] | None = None

    def advance(self, merge: Merge, state: str | None = None, *, event: str | None = None, **changes: Any) -> Any:
        """Write a merge's next state, or die."""
        now = self.fatal is not None and self.fatal[0] == state
        if now and self.fatal == (state, False):
            raise Killed
        done = super().advance(merge, state, event=event, **changes)
        if now:
            raise Killed
        return done


class MergeBench(Bench):
    """Published adapters are merged by `merge_all`; bases lie in `models`."""

    def __init__(self, place: Path, **of_rule: Any) -> None:
        self.models = place / "models"
        self.settings = MergeSettings(bases=(str(self.models),))
        super().__init__(place, **({"publish": ("all",), "merge": "all"} | of_rule))

    def open(self) -> None:
        """Start as after a restart."""
        super().open()
        self.merges = MergeStore(self.catalog)
        self.executors: dict[str, Executor] = {"local": LocalExecutor()} | self.more_executors()
        self.merging = Merging(
            self.merges, self.store, self.homes, self.settings, self.executors,
            scratch=self.place / "scratch", roots=[self.runs], clock=lambda: time.time() + self.waited, **self.hub(),
        )  # fmt: skip
        self.runner._sequel = Merges(self.merges, self.intake, self.merging, host="host")

    def hub(self) -> dict[str, Any]:
        """Return what lets bases be fetched, nothing where no rule does."""
        return {}

    def more_executors(self) -> dict[str, Executor]:
        """Return executors besides the local one."""
        return {}

    def base(self, folder: Path | None = None, **of_model: Any) -> Path:
        """Put the base where the configuration looks for it."""
        given = {"readme": builders.card(license_id="apache-2.0")} | of_model
        return builders.llama_model(folder or self.models / BASE, **given)

    def adapter(self, step: int, run: str = "run-1", **more: Any) -> Path:
        """Save a checkpoint of a LoRA run."""
        return builders.trainer_checkpoint(self.runs / "team" / run / f"checkpoint-{step}", step=step, **more)

    def publish(self, *folders: Path) -> None:
        """Publish adapters; their merges are noted and not begun."""
        self.settle(*folders)
        self.work()

    def round(self) -> None:
        """Carry every merge one look further, waits included, and let what runs here end."""
        self.waited += 1e6
        self.merging.round()
        until(self.executors["local"].room, 60, "the merge that runs here")

    def merge_all(self, rounds: int = 12) -> list[Merge]:
        """Carry merges and their jobs on until nothing changes any more; return every merge."""
        for _ in range(rounds):
            before = self.merges.merges()
            self.round()
            self.work()
            if self.merges.merges() == before and self.merging.quiet():
                break
        return self.merges.merges()

    def claim(self, name: str, n: int = 1) -> Any:
        """Return a claim as it is stored."""
        return json.loads((self.place / "remote/models" / name / f"_wb/claims/{n:08d}.json").read_bytes())
