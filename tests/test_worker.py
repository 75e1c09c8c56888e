"""The child process for heavy work: answers, errors, bounds, and that it never outlives who wants its work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import worker
from weighbridge.registry.errors import RefusedError, WeighbridgeError

HERE = "weighbridge_testlib.worker_tasks"


@pytest.fixture(autouse=True)
def _tasks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "lib"))


def run(task: str, **request: Any) -> dict[str, Any]:
    """Run one of the test's tasks."""
    return worker.run(f"{HERE}:{task}", request)


def test_a_result_comes_back_with_its_progress() -> None:
    """What a task returns is the answer; what it prints does not disturb it, and progress arrives on the way."""
    moved: list[int] = []
    done = worker.run(f"{HERE}:count", {"steps": 4}, progress=moved.append)
    assert done == {"steps": 4, "nice": min(os.nice(0) + 10, 19)}
    assert sum(moved) == 4 * (8 << 20)


def test_an_error_of_ours_arrives_as_it_was_raised() -> None:
    """Kind, cause, cure and figures cross the pipe."""
    with pytest.raises(RefusedError) as caught:
        run("refuse")
    told = caught.value
    assert (told.what, told.why, told.fix, told.data) == ("no", "because", "do this", {"n": 3})


def test_a_fault_of_the_task_is_told_by_its_last_line() -> None:
    """An exception nobody foresaw ends the child; its last line is the cause."""
    with pytest.raises(WeighbridgeError) as caught:
        run("fail")
    assert "ZeroDivisionError" in str(caught.value.why)


def test_a_child_that_is_killed_is_told_as_such() -> None:
    """A signal from outside is named, with the hint that memory may have run out."""
    with pytest.raises(WeighbridgeError) as caught:
        run("die")
    assert "SIGKILL" in str(caught.value.why)


def test_memory_is_bounded() -> None:
    """A task that asks for more than it may use fails alone and says so."""
    with pytest.raises(WeighbridgeError) as caught:
        worker.run(f"{HERE}:hoard", {"size": 1 << 30}, memory=256 << 20)
    assert caught.value.what == "out of memory"


def test_secrets_of_the_parent_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and keys in the parent's environment are not in the child's."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    names = run("environment")["names"]
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(names)
    assert "OPENBLAS_NUM_THREADS" in names


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed takes its child with it, however busy that is."""
    told = tmp_path / "pid"
    code = f"from weighbridge.adapters import worker; worker.run('{HERE}:sleep', {{'tell': {str(told)!r}}})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 20
        while not (told.exists() and told.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        child = int(told.read_text())
        assert _is_running(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 10
    while _is_running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _is_running(child)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_whose_parent_is_gone_before_it_begins_ends_at_once() -> None:
    """A task is not begun for a parent that is not there any more."""
    message = b'{"task": "os:getpid", "request": {}, "memory": null, "nice": 0, "parent": 1}\n'
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge.adapters.worker"], input=message, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert os.getpid() != 1
