"""A publisher that is killed at any request of a publication to the Hub, and the next one that takes it up."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry.flow import commit_publish
from weighbridge.registry.remotes.hub.child import copied
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.killing import Killed, stored_twice
from weighbridge_testlib.hub.rig import environ, run
from weighbridge_testlib.hub.store import Repo
from weighbridge_testlib.yard import until

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


COPIED = """
import json, os, threading
from weighbridge.registry.remotes.hub.child import copied
child, gate = copied(), threading.Event()
thread = threading.Thread(target=gate.wait)
thread.start()
print(json.dumps([child.pid, child.ended(), copied() is None]), flush=True)
os._exit(0)  # as a command that is killed: nobody ends the child
"""


def test_the_copy_of_a_command_ends_with_it(hub: TestHub, tmp_path: Path) -> None:
    """What `registry push` begins in order to upload ends by itself; a process with threads is never copied."""
    pid, ended, refused = run(COPIED, environ(hub, tmp_path))
    assert (ended, refused) == (False, True)
    until(lambda: not Path(f"/proc/{pid}/cmdline").is_file() or not Path(f"/proc/{pid}/cmdline").read_bytes(), 10, "it")
    assert hub.seen == []


@pytest.mark.parametrize("call", ["fork", "pipe"])
def test_a_copy_that_cannot_be_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A machine without a process or a descriptor to spare begins no copy, and no file of the attempt stays open."""

    def refuse() -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, call, refuse)
    before = sorted(Path("/proc/self/fd").iterdir())
    assert copied() is None
    assert sorted(Path("/proc/self/fd").iterdir()) == before
