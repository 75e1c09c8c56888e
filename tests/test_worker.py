"""The child process for heavy work: answers, errors, bounds, and that it never outlives who wants its work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import starved, worker
from weighbridge.registry.errors import MemoryShortError, RefusedError, WeighbridgeError

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
    """A task that asks for more than it may use fails alone and says so, with what is allowed and by what."""
    with pytest.raises(MemoryShortError) as caught:
        worker.run(f"{HERE}:hoard", {"size": 1 << 30}, memory=256 << 20)
    assert caught.value.what == "the work ran out of memory"
    assert f"{256 << 20} bytes are allowed (ulimit -d)" in str(caught.value.why)
    assert caught.value.data["allowed_bytes"] == 256 << 20


@pytest.mark.parametrize(
    ("task", "memory"),
    [("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", True), ("KeyError: 'x'", False)],
)
def test_a_library_that_ends_for_want_of_memory_is_told_as_such(task: str, *, memory: bool) -> None:
    """BLAS prints a sentence and ends the process: its words decide what the error is about."""
    with pytest.raises(WeighbridgeError) as caught:
        run("give_up", words=task)
    assert isinstance(caught.value, MemoryShortError) is memory
    assert task.rstrip(".") in str(caught.value.why)


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: cuda runtime error (2) : out of memory at THCGeneral.cpp:50",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: MPS backend out of memory",
    ],
)
def test_a_full_gpu_is_not_told_as_missing_memory(words: str) -> None:
    """Figures of the machine and fewer workers would not help; another device would."""
    found = starved.told(words)
    assert type(found) is WeighbridgeError
    assert ("GPU" in found.what, "--device cpu" in (found.fix or ""), found.why) == (True, True, words)
    for host in ("MemoryError: cannot allocate 9 bytes for /data/cuda/a", "RuntimeError: out of memory (no GPU)"):
        assert isinstance(starved.told(host), MemoryShortError)
    assert starved.told("RuntimeError: CUDA error: invalid device ordinal") is None


def test_what_the_kernel_ends_for_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL means memory where the kernel's count has grown meanwhile, else it is a signal from somebody."""
    (tmp_path / "proc/self").mkdir(parents=True)
    assert starved.kills(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 41\noom_kill_other 9\n")
    assert starved.kills(tmp_path) == 41
    for group, count, folder in (("9:cpu:/b\n0::/a/b", 3, "a/b"), ("7:cpu,memory:/j", 5, "memory/j")):
        (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
        assert starved.kills(tmp_path) == 41, "a group that does not count"
        ours = tmp_path / "sys/fs/cgroup" / folder
        ours.mkdir(parents=True)
        (ours / ("memory.oom_control" if "memory" in folder else "memory.events")).write_text(
            f"oom 9\noom_kill {count}\n"
        )
        assert starved.kills(tmp_path) == count, "another job's are not ours"
    counts = iter([41, 42])
    monkeypatch.setattr(starved, "kills", lambda: next(counts))
    with pytest.raises(MemoryShortError) as caught:
        run("die")
    assert caught.value.data["free_bytes"] > 0


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
