"""The life of a job: from a settled folder to a version, and what becomes of outages, poison and rotation."""

import errno
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.settings import RemoteSettings
from weighbridge.daemon import jobs as steps
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.jobstore import ACTIVE, Job
from weighbridge.registry import errors
from weighbridge.registry.remotes.protocol import Properties, Remote
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import llama_model, lora_adapter, run_root, trainer_checkpoint


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Give a bench that publishes everything."""
    found = Bench(tmp_path, publish=("all",))
    yield found
    found.catalog.close()


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


class InParts(Bench):
    """A home that checks the hashes of parts itself; `told` holds what its uploads knew of them, by file."""

    def connect(self, settings: RemoteSettings) -> Remote:
        """Open the home."""
        told = self.told = getattr(self, "told", {})

        class Parts(Wrapper):
            @property
            def properties(self) -> Properties:
                """Say how large the parts are."""
                return self.inner.properties._replace(part=1000)

            def upload(self, key: str, source: Path, size: int, sha256: str, *more: Any, **known: Any) -> None:
                """Note what is known."""
                told[source.name] = (size, list(known["parts"]))
                super().upload(key, source, size, sha256, *more, **known)

        return Parts(super().connect(settings))


def test_hashes_of_parts_outlive_a_restart(tmp_path: Path) -> None:
    """What was hashed while it was staged is told to the home at the upload, also by the daemon's next start."""
    bench = InParts(tmp_path, publish=("all",))
    folder = lora_adapter(bench.runs / "team/run/final")
    (job,) = bench.settle()
    for _ in range(ACTIVE.index("uploading")):
        assert (job := bench.runner.attempt(job) or job)
    assert job.state == "uploading"
    bench.restart()
    bench.work()
    assert len(bench.versions()) == 1
    weights = (folder / "adapter_model.safetensors").read_bytes()
    parts = [hashlib.sha256(weights[at : at + 1000]).digest() for at in range(0, len(weights), 1000)]
    assert len(parts) > 1
    assert bench.told["adapter_model.safetensors"] == (len(weights), parts)
    assert bench.told["adapter_config.json"][1] == []
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


@pytest.mark.parametrize(
    ("code", "gone", "state"),
    [
        (errno.EACCES, False, "waiting"),
        (errno.ESTALE, False, "waiting"),
        (errno.EIO, False, "waiting"),
        (errno.ENOENT, False, "superseded"),
        (errno.ENOENT, True, "vanished"),
        (errno.EINVAL, False, "quarantined"),
    ],
)
def test_a_source_that_cannot_be_read_is_no_fault_of_ours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int, gone: bool, state: str
) -> None:
    """A closed, stale or vanished file makes a job wait or end; only what nobody foresaw is poison."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1")
    (job,) = bench.settle()

    def fails(*_: Any, **__: Any) -> Any:
        if gone:
            shutil.rmtree(folder, ignore_errors=True)
        raise OSError(code, os.strerror(code), str(folder / "adapter_config.json"))

    with monkeypatch.context() as patch:
        patch.setattr(Intake, "take", fails)
        for _ in range(8):
            job = bench.store.jobs()[0]
            if job.state == "settling":
                bench.runner.attempt(job)
    job = bench.store.jobs()[0]
    assert (job.shown, job.unexpected > 0) == (state, state == "quarantined")
    if state == "waiting":
        bench.work()
        assert list(bench.versions()) == ["team-run@v1"]


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


def test_names_that_are_no_utf8_stop_nobody(bench: Bench) -> None:
    """A folder of undecodable bytes is passed over and told, a file is listed, and weights block their folder."""
    runs = bench.runs / "team"
    lora_adapter(runs / os.fsdecode(b"run-\xff") / "final", seed=1)
    aside = lora_adapter(runs / "one" / "final", seed=2)
    (aside / os.fsdecode(b"note-\xff.txt")).write_text("x")
    model = llama_model(runs / "two" / "final", seed=3)
    (model / "model.safetensors").rename(model / os.fsdecode(b"model\xff.safetensors"))
    bench.settle()
    bench.work()
    assert bench.tree.unnamed == [rf"{runs}/run-\xff"]
    assert list(bench.versions()) == ["team-one@v1"]
    (blocked,) = bench.store.jobs("state = 'blocked'")
    assert blocked.path == str(model)
    assert {f.subject for f in blocked.findings_list} >= {r"model\xff.safetensors"}


def test_a_failure_that_cannot_be_told_stops_no_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong while a failure is written down is one more failure of that job, not the end of the thread."""
    lora_adapter(bench.runs / "team/run/final")
    (job,) = bench.settle()

    def refuse(*_: Any) -> None:
        raise errors.RefusedError("no")

    def broken(_: object) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "no")

    monkeypatch.setattr(bench.intake, "take", refuse)
    monkeypatch.setattr(errors, "describe", broken)
    found = bench.runner.attempt(job)
    assert found is not None
    assert found.until is not None
