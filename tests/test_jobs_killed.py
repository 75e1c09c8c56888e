"""Jobs under the axe: every step can be cut at any call and repeated, and one content never becomes two versions."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge_testlib.bench import Bench, Killed, dying
from weighbridge_testlib.builders import lora_adapter, trainer_checkpoint


def test_killed_at_every_call(tmp_path: Path) -> None:
    """Before and after each request to the remote: after a restart there is one version, whole and recorded."""
    (tmp_path / "plain").mkdir()
    plain = Bench(tmp_path / "plain", publish=("all",))
    trainer_checkpoint(plain.runs / "team/run/checkpoint-5", step=5)
    plain.settle()
    plain.calls.clear()
    plain.work()
    calls = list(plain.calls)
    plain.catalog.close()
    assert len(calls) > 15
    for at, call in enumerate(calls):
        changes = call in {"create", "upload", "delete", "stage"}
        if not changes and at % 3:
            continue
        # Dead after a question is dead before the next request.
        for after in (False, True) if changes else (False,):
            place = tmp_path / f"{at}-{after}"
            place.mkdir()
            bench = Bench(place, publish=("all",))
            trainer_checkpoint(bench.runs / "team/run/checkpoint-5", step=5)
            bench.settle()
            bench.countdown, bench.kill_after = at, after
            with dying(bench) as died:
                bench.work()
            assert died, f"{call} {at} never came"
            bench.tree.scan(full=True)
            bench.work()
            assert list(bench.versions()) == ["team-run@v1"], f"{call} {at}, after={after}"
            assert bench.states() == {"checkpoint-5": "done"}
            bench.catalog.close()
            shutil.rmtree(place)


def test_killed_at_every_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead just before a state is written: the step is repeated and changes nothing twice."""
    inner = JobStore.advance
    for at in range(9):
        place = tmp_path / str(at)
        place.mkdir()
        bench = Bench(place, publish=("all",))
        trainer_checkpoint(bench.runs / "team/run/checkpoint-5", step=5)
        bench.settle()
        count = [at]

        def dies(store: JobStore, *args: Any, count: list[int] = count, **kwargs: Any) -> Job | None:
            count[0] -= 1
            if count[0] == -1:
                raise Killed
            return inner(store, *args, **kwargs)

        monkeypatch.setattr(JobStore, "advance", dies)
        with dying(bench):
            bench.work()
        monkeypatch.setattr(JobStore, "advance", inner)
        bench.tree.scan(full=True)
        bench.work()
        assert list(bench.versions()) == ["team-run@v1"], f"transaction {at}"
        assert bench.states() == {"checkpoint-5": "done"}
        bench.catalog.close()


class Yard(RuleBasedStateMachine):
    """Trainers write, rotate and rewrite; the daemon is killed and cut off; at the end every content is there once."""

    def __init__(self) -> None:
        super().__init__()
        self.bench: Bench | None = None
        self.seeds = 0

    @initialize()
    def begin(self) -> None:
        """Start with an empty yard."""
        self.home = Path(tempfile.mkdtemp(prefix="wb-jobs-"))
        self.bench = Bench(self.home, publish=("all",))

    @property
    def made(self) -> Bench:
        """The bench, which is there from the first step on."""
        assert self.bench is not None
        return self.bench

    @rule(step=st.integers(1, 3), again=st.booleans())
    def save(self, step: int, again: bool) -> None:
        """Save a checkpoint, new bytes or those of the last time."""
        self.seeds += 0 if again else 1
        folder = self.made.runs / f"team/run/checkpoint-{step}"
        if folder.exists():
            shutil.rmtree(folder)
        lora_adapter(folder, seed=self.seeds)

    @rule(step=st.integers(1, 3))
    def rotate(self, step: int) -> None:
        """Delete a checkpoint."""
        shutil.rmtree(self.made.runs / f"team/run/checkpoint-{step}", ignore_errors=True)

    @rule()
    def rest(self) -> None:
        """Let what is there settle."""
        self.made.settle()

    @precondition(lambda self: self.bench is not None and not self.bench.away)
    @rule(at=st.integers(0, 40), after=st.booleans())
    def die(self, at: int, after: bool) -> None:
        """Work until a call kills us."""
        self.made.countdown, self.made.kill_after = at, after
        with dying(self.made):
            self.made.work()
        self.made.tree.scan(full=True)

    @rule()
    def outage(self) -> None:
        """Let the remote go away or come back."""
        self.made.away = not self.made.away

    @rule()
    def work(self) -> None:
        """Do a few things."""
        self.made.work(3)

    @invariant()
    def contents_are_unique(self) -> None:
        """No content has two numbers, and whatever is visible verifies."""
        if self.bench is not None:
            found = list(self.made.versions().values())
            assert len(found) == len(set(found))

    def teardown(self) -> None:
        """Let everything come to rest: what stands in the yard is published, once."""
        if self.bench is None:
            return
        bench = self.made
        bench.away = False
        bench.tree.scan(full=True)
        bench.settle()
        bench.work(200)
        for job in bench.store.jobs("state != 'seen'"):
            assert job.state in {"done", "vanished", "superseded"}, (job.state, job.reason)
        contents = set(bench.versions().values())
        for folder in bench.runs.glob("team/run/checkpoint-*"):
            (newest,) = bench.store.jobs("path = ?", [str(folder)], order="id DESC", limit=1)
            manifest = msgspec.json.decode((bench.store.manifest_of(newest) or "{}").encode())
            assert newest.state == "done" or newest.reason
            assert manifest.get("content") in contents
        bench.catalog.close()
        shutil.rmtree(self.home)


TestYard = Yard.TestCase


TestYard.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
