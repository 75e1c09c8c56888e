"""A publisher that is killed at any request of a publication to the Hub, and the next one that takes it up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.flow import commit_publish
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.killing import Killed, stored_twice
from weighbridge_testlib.hub.rig import environ, publish, remote
from weighbridge_testlib.hub.store import Repo

NAME = "medical-sft"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestHub]:
    """Run a Hub; nobody waits long for a lost commit to arrive."""
    monkeypatch.setattr(commit_publish, "LOOKS", (0.0, 0.05))
    with serve() as running:
        yield running
        assert running.leaked() == []


def repo_of(hub: TestHub) -> Repo:
    """Return the repository of the tests' name."""
    return hub.store.get(f"acme/{NAME}")


def titles(hub: TestHub) -> list[str]:
    """Return the titles of main's commits, newest first."""
    return [commit.title for commit in repo_of(hub).history("main")]


# ------------------------------------------------------------------------------------------------------------ kill -9


@pytest.mark.parametrize(
    ("way", "on", "at", "when"),
    [
        ("lfs", "PUT /_storage", 2, "before"),
        ("child", "PUT /_storage", 2, "before"),
        ("lfs", "POST /api/models/acme/medical-sft/commit", 1, "before"),
        ("child", "POST /api/models/acme/medical-sft/commit", 1, "after"),
        ("lfs", "POST /api/models/acme/medical-sft/tag", 1, "before"),
        ("xet", "POST /api/models/acme/medical-sft/commit", 1, "before"),
        ("xet", "POST /api/models/acme/medical-sft/commit", 1, "after"),
    ],
)
def test_a_publisher_that_is_killed_is_taken_up_again(
    hub: TestHub, tmp_path: Path, *, way: str, on: str, at: int, when: str
) -> None:
    """Killed at any request, the next run ends with one commit and one tag, and sends nothing that was confirmed."""
    job = Killed(hub, environ(hub, tmp_path / "ann"), tmp_path / "run", (3000, 70_000), way=way)
    died, _ = job.run(at=at, when=when, on=on)
    assert died
    xorbs = hub.count("xorb")
    died, said = job.run()
    assert (died, said) == (False, "1")
    assert titles(hub) == [f"{NAME} v1", "initial commit"]
    assert repo_of(hub).tags == {"v1": repo_of(hub).head.oid}
    assert hub.store.body(repo_of(hub).at()["w1.safetensors"]) == b"B" * 70_000
    assert stored_twice(hub) == {}
    if way == "xet":
        assert hub.count("xorb") == xorbs


def test_the_uploading_child_ends_with_its_parent(hub: TestHub, tmp_path: Path) -> None:
    """When the publisher is killed in the middle of an upload, nothing of it goes on behind its back."""
    hub.faults.add(Fault("lfs-put", "stall", seconds=0.5))
    job = Killed(hub, environ(hub, tmp_path / "ann"), tmp_path / "run", (70_000, 70_001), way="child")
    job.run(at=1, when="before", on="PUT /_storage")
    hub.wait(0.6)
    before = len(hub.seen)
    hub.wait(0.5)
    assert len(hub.seen) == before
    assert hub.count("commit") == 0


# --------------------------------------------------------------------------------------------------------------- status


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        (Fault("info", status=401, times=99), errors.DeniedError, 4),
        (Fault("commit", status=403, times=99), errors.DeniedError, 4),
        (Fault("commit", status=403, times=99, message="storage limit"), errors.StorageFullError, 1),
        (Fault("commit", status=413, times=99), errors.RefusedError, 5),
        (Fault("lfs-batch", status=413, times=99), errors.RefusedError, 5),
        (Fault("preupload", status=429, times=99), errors.QuotaError, 6),
        (Fault("commit", status=503, times=99), errors.OutcomeUnknownError, 6),
        (Fault("refs", status=500, times=99), errors.RetryableError, 6),
        (Fault("info", "cut", times=99), errors.RetryableError, 6),
        (Fault("tag", status=500, times=99), errors.OutcomeUnknownError, 6),
    ],
    ids=lambda value: value.on + str(value.status) if isinstance(value, Fault) else "",
)
def test_every_failure_has_its_words_and_exit_code(
    hub: TestHub, tmp_path: Path, fault: Fault, kind: type[errors.WeighbridgeError], code: int
) -> None:
    """What, why and fix, the documented exit code, and only as many requests as can help."""
    ann = remote(hub, tmp_path / "ann")
    if fault.on in {"refs", "tag"}:
        publish(ann, tmp_path / "first", seed=9)
        hub.seen.clear()
    hub.faults.add(fault)
    with pytest.raises(kind) as caught:
        publish(ann, tmp_path / "run")
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    assert caught.value.why
    assert caught.value.fix
    assert len(hub.asked(fault.on)) <= 5 * (1 + (fault.on == "info"))
    if fault.on == "commit" and fault.status == 403:
        assert hub.count("commit") <= 2
    hub.faults.clear()
    assert publish(ann, tmp_path / "again").content
    ann.close()


def test_a_lost_answer_to_a_tag_or_a_new_repository_is_looked_up(hub: TestHub, tmp_path: Path) -> None:
    """Both are looked for before anything is repeated."""
    ann = remote(hub, tmp_path / "ann")
    hub.faults.add(Fault("create", "lose", status=504), Fault("tag", "lose", status=0))
    assert publish(ann, tmp_path / "run").n == 1
    assert (hub.count("create"), hub.count("tag")) == (1, 1)
    assert json.loads(ann.read(layout.manifest(NAME, 1)))["content"]
    ann.close()
