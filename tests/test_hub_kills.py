"""A publisher that is killed at any request of a publication to the Hub, and the next one that takes it up."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weighbridge.registry.remotes.hub.child import copied
from weighbridge_testlib.hub import Fault, TestHub
from weighbridge_testlib.hub.killing import Killed, ended, stored_twice
from weighbridge_testlib.hub.rig import environ
from weighbridge_testlib.hub.store import Repo

NAME = "medical-sft"


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
    hub.faults.add(Fault("lfs-put", "stall"))  # the other file's upload is still under way at that moment
    job = Killed(hub, environ(hub, tmp_path / "ann"), tmp_path / "run", (70_000, 70_001), way="child")
    job.run(at=1, when="before", on="PUT /_storage")
    assert job.orphans, "it had begun the child that uploads"
    assert all(ended(child) for child in job.orphans)
    assert (hub.count("lfs-put"), hub.count("commit")) == (2, 0)


COPIED = """
import json, os, threading
from weighbridge.registry.remotes.hub.child import copied
child, gate = copied(), threading.Event()
thread = threading.Thread(target=gate.wait)
thread.start()
print(json.dumps([child.pid, child.ended(), copied() is None]), flush=True)
input()
os._exit(0)  # as a command that is killed: nobody ends the child
"""


def test_the_copy_of_a_command_ends_with_it(hub: TestHub, tmp_path: Path) -> None:
    """What `registry push` begins in order to upload ends by itself; a process with threads is never copied."""
    words = [sys.executable, "-W", "ignore", "-c", COPIED]
    with subprocess.Popen(
        words, env=environ(hub, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        pid, gone, refused = json.loads(command.stdout.readline())
        assert (gone, refused) == (False, True)
        copy = os.pidfd_open(pid)
        command.communicate("\n")
    assert ended(copy)
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
