"""Jobs: every step can be cut at any call and repeated, and one content never becomes two versions."""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weighbridge.config.settings import DaemonSettings, RemoteSettings, WatchRule
from weighbridge.daemon import jobs as steps
from weighbridge.daemon.deliveries import Deliveries
from weighbridge.daemon.folders import Known, Settlement
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.jobs import Runner
from weighbridge.daemon.jobstore import ACTIVE, Job, JobStore
from weighbridge.daemon.scan import Tree
from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import tags
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge.registry.types import Owner
from weighbridge_testlib.builders import llama_model, lora_adapter, run_root, trainer_checkpoint


class Killed(BaseException):
    """The process dies here."""


class Faulty(Wrapper):
    """A remote that dies, is away, or loses an answer at a chosen call."""

    def __init__(self, inner: Remote, bench: "Bench") -> None:
        super().__init__(inner)
        self.bench = bench

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in {"create", "upload", "read", "stat", "list", "folders", "delete", "stage", "now"}:
            bench = object.__getattribute__(self, "bench")
            return lambda *args, **kwargs: bench.call(lambda: found(*args, **kwargs), name)
        return found


class Bench:
    """A daemon's jobs without its threads, on a real database, real folders and a real directory remote."""

    def __init__(self, place: Path, **of_rule: Any) -> None:
        self.place = place
        self.runs = place / "runs"
        self.runs.mkdir()
        self.state = place / "state"
        (self.state / "staging").mkdir(parents=True)
        (place / "remote").mkdir()
        self.rule = WatchRule(self.runs, home="team")._replace(**of_rule)
        self.remotes = {"team": RemoteSettings("team", str(place / "remote"))}
        self.away = False
        self.countdown: int | None = None
        self.kill_after = False
        self.calls: list[str] = []
        self.waited = 0.0
        self.open()

    def open(self) -> None:
        """Start as after a restart: nothing in memory is left."""
        self.catalog = Catalog.open(self.state / "weighbridge.db", durable=True)
        self.store = JobStore(self.catalog)
        self.homes = Homes(self.remotes, self.catalog, connect=lambda r: Faulty(open_directory(r.url), self))
        self.tree = Tree(str(self.runs), self.rule.ignore)
        self.intake = Intake(
            self.store, self.homes, {str(self.runs): self.rule}, self.remotes,
            DaemonSettings(self.state, self.state / "s", disk_reserve=0),
            host="host", mountinfo="",
            look=lambda _root, path: self.tree.look(path),
            below=lambda _root, path: [p for p in self.tree.candidates if p.startswith(path + "/")],
        )  # fmt: skip
        owner = Owner(host="host", daemon="d")
        self.runner = Runner(
            self.store, self.homes, self.intake, owner, clock=lambda: time.time() + self.waited, chance=lambda: 1.0
        )

    def restart(self) -> None:
        """Lose everything that was in memory."""
        self.catalog.close()
        self.open()

    def call(self, inner: Callable[[], Any], name: str) -> Any:
        """Carry out one request, or die before or after it."""
        if self.away:
            raise errors.UnreachableError("the remote is away")
        self.calls.append(name)
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                if self.kill_after:
                    with suppress(errors.WeighbridgeError):
                        inner()
                raise Killed
        return inner()

    def settle(self, *folders: Path) -> list[Job]:
        """Hand folders over as the watch does when they are at rest."""
        self.tree.scan(full=True)
        found = []
        for folder in folders or [Path(p) for p in self.tree.candidates]:
            listing = self.tree.look(str(folder))
            assert listing is not None
            known = Known(listing.fingerprint, listing.shape)
            if self.store.known(str(folder)) == known:
                continue
            path = str(folder)
            run_path = str(folder.parent)
            job = self.store.settled(
                str(self.runs), Settlement(self.rule, path, known, listing.size, marked=False), run_path
            )
            if job is not None:
                found.append(job)
        return found

    def work(self, rounds: int = 60) -> None:
        """Carry every job on until none can go on; waits are over at once."""
        for _ in range(rounds):
            due = self.store.runnable(time.time() + 1e9)
            if not due:
                return
            job = self.store.job(due[0].id)
            assert job is not None
            if job.until is not None:
                job = self.store.advance(job, until=None)
            if job is not None:
                self.runner.run(job)

    def versions(self) -> dict[str, str]:
        """Return every committed version with its content; each is read back and verified."""
        remote = open_directory(str(self.place / "remote"))
        found = {}
        for name in remote.folders(layout.MODELS):
            for claim in remote.list(layout.claims(name)):
                place = layout.claim_number(claim.key)
                assert place is not None
                try:
                    manifest = committed(remote, *place)
                except errors.NotFoundError:
                    continue
                assert not [f for f in verify_version(remote, *place).findings if f.severity == "block"]
                found[f"{name}@v{place[1]}"] = manifest.content
        return found

    def states(self) -> dict[str, str]:
        """Return the state of the newest job of each folder, by its name."""
        return {Path(job.path).name: job.shown for job in self.store.jobs()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Give a bench that publishes everything."""
    found = Bench(tmp_path, publish=("all",))
    yield found
    found.catalog.close()


@contextmanager
def dying(bench: Bench) -> Iterator[list[bool]]:
    """Catch a death and start again; the list tells whether there was one."""
    died: list[bool] = []
    try:
        yield died
    except Killed:
        died.append(True)
        if bench.catalog.link.in_transaction:
            bench.catalog.link.execute("ROLLBACK")
        bench.restart()
    finally:
        bench.countdown = None


def test_a_settled_folder_becomes_a_version(bench: Bench) -> None:
    """Through every state to done, with receipt, catalogue entry and an empty stage."""
    trainer_checkpoint(bench.runs / "team/run/checkpoint-5", step=5)
    (job,) = bench.settle()
    seen = [job.state]
    current: Job | None = job
    while current is not None and current.state in ACTIVE:
        current = bench.runner.attempt(current)
        assert current is not None
        seen.append(current.state)
    assert seen == [*ACTIVE, "done"]
    assert list(bench.versions()) == ["team-run@v1"]
    assert current is not None
    assert (current.name, current.n, current.bundle) == ("team-run", 1, None)
    home = bench.homes.get("team")
    assert home.catalog.receipts("team-run", 1)
    assert not list((bench.place / "remote").glob("models/*/_wb/stage/*/*"))


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


def test_the_same_bytes_never_become_a_second_version(bench: Bench) -> None:
    """The result at the root repeats the last checkpoint: two folders, one version."""
    run_root(bench.runs / "team/run", steps=(1, 2))
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 2
    assert set(bench.states().values()) == {"done"}


def test_a_folder_made_anew_with_other_bytes_is_a_new_version(bench: Bench) -> None:
    """Two contents, two numbers; the second tells which one it supersedes."""
    folder = lora_adapter(bench.runs / "team/run/final", seed=1)
    bench.settle()
    bench.work()
    shutil.rmtree(folder)
    lora_adapter(folder, seed=2)
    bench.settle()
    bench.work()
    assert len(set(bench.versions().values())) == 2
    second = bench.store.jobs("n = 2")[0]
    assert [f.data["previous"] for f in second.findings_list if f.code == "late-file"] == ["team-run@v1"]


def test_an_amnesiac_publishes_nothing_twice(bench: Bench) -> None:
    """With its database gone and the remote full, everything joins what is there."""
    run_root(bench.runs / "team/run", steps=(1, 2, 3), result=False)
    bench.settle()
    bench.work()
    before = bench.versions()
    bench.catalog.close()
    for file in bench.state.glob("weighbridge.db*"):
        file.unlink()
    bench.open()
    bench.settle()
    bench.work()
    assert bench.versions() == before
    assert set(bench.states().values()) == {"done"}
    lora_adapter(bench.runs / "team/run/checkpoint-9", seed=9)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 4


def test_while_home_is_away_jobs_wait_with_their_bytes_kept(bench: Bench) -> None:
    """Sealed from our own staging, even if the trainer deletes the folder meanwhile."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1", seed=1)
    bench.homes.get("team")
    bench.settle()
    bench.away = True
    job = bench.store.job(1)
    assert job is not None
    bench.runner.run(job)
    (job,) = bench.store.jobs()
    assert (job.state, job.shown) == ("sealed", "waiting")
    assert "away" in (job.reason or "")
    assert list((bench.state / "staging").rglob("adapter_model.safetensors"))
    shutil.rmtree(folder)
    bench.store.gone(str(folder))
    bench.away = False
    bench.work()
    assert list(bench.versions()) == ["team-run@v1"]
    assert not list((bench.state / "staging").iterdir())


def test_delays_grow_with_jitter_and_stay_bounded() -> None:
    """Each error class has its own pace; a full disk is asked again soon, a refusal rarely."""
    away, full = errors.UnreachableError("x"), errors.DiskFullError("x")
    assert [steps.delay(away, n, 1.0) for n in range(4)] == [1, 2, 4, 8]
    assert steps.delay(away, 0, 0.0) == 0.5
    assert steps.delay(away, 500, 1.0) == 300
    assert steps.delay(full, 500, 1.0) == 60
    assert steps.delay(errors.DeniedError("x"), 0, 1.0) == 10


def test_poison_is_quarantined_while_others_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in ways nobody foresaw is set apart after a few tries, visibly, and can be tried again by hand."""
    lora_adapter(bench.runs / "team/venom/checkpoint-1", seed=1)
    lora_adapter(bench.runs / "team/healthy/checkpoint-1", seed=2)
    inner = Intake.take

    def bad(intake: Intake, job: Job, *rest: Any) -> Any:
        if "venom" in job.path:
            raise ZeroDivisionError("poison")
        return inner(intake, job, *rest)

    monkeypatch.setattr(Intake, "take", bad)
    bench.settle()
    bench.work()
    venom, healthy = sorted(bench.store.jobs(), key=lambda job: "venom" not in job.path)
    assert (venom.state, healthy.state) == ("quarantined", "done")
    assert "ZeroDivisionError" in (venom.reason or "")
    assert venom.findings_list[0].code == "job-quarantined"
    monkeypatch.setattr(Intake, "take", inner)
    assert bench.store.retry("state = 'quarantined'", []) == 1
    bench.work()
    assert len(bench.versions()) == 2


def test_a_refused_folder_is_blocked_and_tried_again_when_it_changes(bench: Bench) -> None:
    """A short shard blocks with its finding; saved again it becomes a version."""
    folder = llama_model(bench.runs / "team/run/checkpoint-1", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    body = shard.read_bytes()
    shard.write_bytes(body[:-4])
    bench.settle()
    bench.work()
    (job,) = bench.store.jobs()
    assert job.state == "blocked"
    assert {f.code for f in job.findings_list} >= {"file-short"}
    assert not bench.versions()
    shard.write_bytes(body)
    bench.settle()
    bench.work()
    assert list(bench.versions()) == ["team-run@v1"]
    assert bench.store.jobs("state = 'superseded'")


def test_a_folder_that_vanishes_before_it_is_taken(bench: Bench) -> None:
    """Rotation ends the job as vanished; nothing of it is published, and it can come back."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1")
    bench.settle()
    shutil.rmtree(folder)
    bench.work()
    assert bench.states() == {"checkpoint-1": "vanished"}
    assert not bench.versions()


def test_a_folder_that_vanishes_while_it_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a copy is thrown away."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1")
    bench.settle()
    inner = bench.runner.moved

    def rotated(count: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        inner(count)

    monkeypatch.setattr(bench.runner, "moved", rotated)
    bench.work()
    assert bench.states() == {"checkpoint-1": "vanished"}
    assert not bench.versions()
    assert not list((bench.place / "remote").glob("models/*/_wb/stage/*"))


def test_a_folder_that_changes_while_it_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is superseded and the folder watched again; what is published is one state, never a mixture."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1", seed=1)
    bench.settle()
    told: list[str] = []
    monkeypatch.setattr(bench.runner, "_changed", told.append)
    inner = bench.runner.moved
    once = [True]

    def rewritten(count: int) -> None:
        if once.pop() if once else False:
            lora_adapter(folder, seed=2)
        inner(count)

    monkeypatch.setattr(bench.runner, "moved", rewritten)
    bench.work()
    assert told == [str(folder)]
    assert not bench.versions()
    bench.settle()
    bench.work()
    (only,) = bench.versions()
    assert only == "team-run@v1"


def test_a_touch_alone_publishes_nothing(bench: Bench) -> None:
    """Changed change times with equal bytes end quietly; changed bytes under the same times are told as drift."""
    folder = lora_adapter(bench.runs / "team/run/final")
    bench.settle()
    bench.work()
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o600)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 1
    done = bench.store.jobs("state = 'done'")[0]
    assert not [f for f in done.findings_list if f.code == "source-drift"]
    times = weights.stat()
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    with weights.open("r+b") as stream:
        stream.write(body)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 1
    done = bench.store.jobs("state = 'done'")[0]
    assert [f.subject for f in done.findings_list if f.code == "source-drift"] == ["adapter_model.safetensors"]


def test_a_name_belongs_to_its_first_run(tmp_path: Path) -> None:
    """Another run under the same name is a finding, not a mixture - unless the rule shares it."""
    for share, kinds in ((False, ["blocked", "done"]), (True, ["done", "done"])):
        place = tmp_path / str(share)
        place.mkdir()
        bench = Bench(place, publish=("all",), name="same", share=share)
        lora_adapter(bench.runs / "team/one/checkpoint-1", seed=1)
        lora_adapter(bench.runs / "team/two/checkpoint-1", seed=2)
        bench.settle()
        bench.work()
        assert sorted(job.state for job in bench.store.jobs()) == kinds
        if not share:
            (blocked,) = bench.store.jobs("state = 'blocked'")
            assert blocked.findings_list[0].code == "name-taken"
            assert "share = true" in (blocked.findings_list[0].fix or "")
        bench.catalog.close()


def test_a_run_made_anew_goes_on_under_its_name(bench: Bench) -> None:
    """The same output folder trained again keeps its name and counts as another run."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1", seed=1)
    bench.settle()
    bench.work()
    shutil.rmtree(run)
    bench.store.gone(str(run / "checkpoint-1"))
    time.sleep(1.1)
    lora_adapter(run / "checkpoint-1", seed=2)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 2
    first, second = sorted(bench.store.jobs("state = 'done'"), key=lambda job: job.n or 0)
    assert first.run_id != second.run_id


def test_a_second_kind_of_one_run_gets_its_own_name(bench: Bench) -> None:
    """An adapter and a full model of one run never share a name."""
    lora_adapter(bench.runs / "team/run/checkpoint-1")
    llama_model(bench.runs / "team/run/checkpoint-2")
    bench.settle()
    bench.work()
    assert sorted(bench.versions()) == ["team-run-model@v1", "team-run@v1"]


def test_a_folder_with_two_artifacts_becomes_two_versions(bench: Bench) -> None:
    """A whole model and an adapter side by side are published apart."""
    folder = llama_model(bench.runs / "team/run/final")
    lora_adapter(folder, readme=None)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 2, bench.store.jobs()
    assert {job.part for job in bench.store.jobs("state = 'done'")} == {"adapter", "model"}


def test_a_backlog_is_thinned_before_it_is_published(tmp_path: Path) -> None:
    """Of five full checkpoints that settled together only best and last go, and the others say why."""
    bench = Bench(tmp_path, best="eval_loss:min")
    for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0), (400, 2.5), (1000, 2.2)):
        trainer_checkpoint(
            bench.runs / f"team/run/checkpoint-{step}", step=step, adapter=False, seed=step,
            log_history=[{"eval_loss": loss, "step": step, "epoch": 1.0}],
        )  # fmt: skip
    bench.settle()
    bench.work()
    done = {job.step for job in bench.store.jobs("state = 'done'")}
    assert done == {200, 1000}
    assert {row["step"] for row in bench.store.skipped("reason = 'not-chosen'")} == {100, 300, 400}
    best = tags.current(open_directory(str(tmp_path / "remote")), "team-run", "best")
    assert best is not None
    assert best.to == next(job.n for job in bench.store.jobs("step = 200"))
    bench.catalog.close()


def test_when_the_last_one_is_broken_the_one_before_it_is_published(tmp_path: Path) -> None:
    """A checkpoint that was not chosen because of a broken newer one is judged again."""
    bench = Bench(tmp_path, publish=("last",))
    trainer_checkpoint(bench.runs / "team/run/checkpoint-1", step=1, adapter=False, seed=1)
    broken = trainer_checkpoint(bench.runs / "team/run/checkpoint-2", step=2, adapter=False, seed=2)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    bench.settle()
    bench.work()
    assert [job.step for job in bench.store.jobs("state = 'done'")] == [1]
    assert [job.step for job in bench.store.jobs("state = 'blocked'")] == [2]
    bench.catalog.close()


def test_the_sidecar_wins_over_the_rule(bench: Bench) -> None:
    """Name and publish: false come from the run's weighbridge.yaml; taken back, the run is taken up again."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1")
    (run / "weighbridge.yaml").write_text("publish: false\n")
    bench.settle()
    bench.work()
    assert not bench.versions()
    assert [row["reason"] for row in bench.store.skipped()] == ["sidecar"]
    bench.intake.papers_changed()
    assert bench.store.skipped()
    (run / "weighbridge.yaml").write_text("name: medical-sft\nowner: lw\n")
    bench.intake.papers_changed()
    bench.work()
    assert list(bench.versions()) == ["medical-sft@v1"]


def test_a_broken_sidecar_blocks_until_it_is_mended(bench: Bench) -> None:
    """It may have said publish: false, so nothing goes before it can be read."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1")
    (run / "weighbridge.yaml").write_text("name: [unclosed\n")
    bench.settle()
    bench.work()
    assert bench.states() == {"checkpoint-1": "blocked"}
    (run / "weighbridge.yaml").write_text("name: mended\n")
    bench.intake.papers_changed()
    bench.work()
    assert list(bench.versions()) == ["mended@v1"]


def test_a_checkpoint_whose_mark_never_came_is_published_after_its_rest(bench: Bench) -> None:
    """trainer_state.json is missing, the weights are whole: at rest it is taken all the same."""
    trainer_checkpoint(bench.runs / "team/run/checkpoint-7", step=7, ended=False)
    bench.settle()
    bench.work()
    (job,) = bench.store.jobs("state = 'done'")
    assert job.step == 7


def test_a_mirror_follows_in_number_order(tmp_path: Path) -> None:
    """Home goes on while the mirror is away; then it gets every number, and never gives one."""
    bench = Bench(tmp_path, publish=("all",), mirrors=("mirror",))
    assert bench.rule.mirrors == ("mirror",)
    bench.catalog.close()
    bench.remotes["mirror"] = RemoteSettings("mirror", str(tmp_path / "mirror"))
    (tmp_path / "mirror").mkdir()
    bench.open()
    run_root(bench.runs / "team/run", steps=(1, 2, 3), result=False)
    bench.settle()
    bench.work()
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    assert len(bench.store.deliveries("state = 'pending'")) == 3
    bench.homes.get("team")
    bench.homes.get("mirror")
    bench.away = True
    assert deliveries.step()
    assert [row["state"] for row in bench.store.deliveries()] == ["waiting", "pending", "pending"]
    assert not deliveries.step()
    bench.away = False
    late = Deliveries(
        bench.store, bench.homes, bench.remotes, bench.state / "staging", clock=lambda: time.time() + 1000
    )
    while late.step():
        pass
    assert [row["state"] for row in bench.store.deliveries()] == ["done"] * 3
    mirror = open_directory(str(tmp_path / "mirror"))
    home = open_directory(str(tmp_path / "remote"))
    for n in (1, 2, 3):
        assert committed(mirror, "team-run", n).stored == committed(home, "team-run", n).stored
        assert not verify_version(mirror, "team-run", n).findings
        assert mirror.read(layout.claim("team-run", n)) == home.read(layout.claim("team-run", n))
    bench.catalog.close()


def test_a_mirror_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    """Another claim under the same number is reported as diverged and nothing is moved."""
    bench = Bench(tmp_path, publish=("all",), mirrors=("mirror",))
    bench.remotes["mirror"] = RemoteSettings("mirror", str(tmp_path / "mirror"))
    (tmp_path / "mirror").mkdir()
    bench.catalog.close()
    bench.open()
    lora_adapter(bench.runs / "team/run/checkpoint-1", seed=1)
    bench.settle()
    bench.work()
    foreign = tmp_path / "mirror/models/team-run/_wb/claims/00000001.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("{}")
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    while deliveries.step():
        pass
    (row,) = bench.store.deliveries()
    assert row["state"] == "diverged"
    assert foreign.read_text() == "{}"
    bench.catalog.close()


def test_a_flipped_bit_in_a_job_is_a_damaged_database(bench: Bench) -> None:
    """A row that is not what was written raises, and is never acted upon."""
    lora_adapter(bench.runs / "team/run/checkpoint-1")
    bench.settle()
    bench.catalog.link.execute("UPDATE jobs SET path = path || 'x'")
    with pytest.raises(sqlite3.DatabaseError, match="not what was written"):
        bench.store.jobs()


def test_two_hands_cannot_carry_one_job_on(bench: Bench) -> None:
    """A state that was written meanwhile makes the second write do nothing."""
    lora_adapter(bench.runs / "team/run/checkpoint-1")
    (job,) = bench.settle()
    assert bench.store.advance(job, "staged") is not None
    assert bench.store.advance(job, "vanished") is None
    assert bench.store.jobs()[0].state == "staged"


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
