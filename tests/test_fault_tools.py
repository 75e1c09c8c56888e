"""The tool of the crash runs does what it says: it kills a command just before or just after one chosen call."""

import os
import sys
from pathlib import Path

import pytest

from weighbridge_testlib import kill

PROGRAM = """
import os, sys
os.mkdir(sys.argv[1] + "/one")
os.rename(sys.argv[1] + "/one", sys.argv[1] + "/two")
os.rename(sys.argv[1] + "/two", sys.argv[1] + "/three")
print("told", flush=True)
"""


@pytest.fixture(scope="module")
def _strace() -> None:
    reason = kill.available()
    if reason:
        pytest.skip(reason)


def command(folder: Path) -> list[str]:
    """Return a program that makes a folder and renames it twice."""
    folder.mkdir()
    return [sys.executable, "-S", "-E", "-c", PROGRAM, str(folder)]


@pytest.mark.usefixtures("_strace")
def test_every_call_under_the_root_and_every_word_is_a_point(tmp_path: Path) -> None:
    """The trace of a normal run holds its own changes and its output, before and after, and nothing else."""
    found = kill.trace(command(tmp_path / "w"), tmp_path / "w", env=dict(os.environ), cwd=tmp_path)
    calls = [point.call for point in found if not point.after]
    assert calls == ["mkdir", "rename", "rename", "write"]
    assert len(found) == 2 * len(calls)


@pytest.mark.usefixtures("_strace")
@pytest.mark.parametrize(("after", "left"), [(False, "two"), (True, "three")])
def test_a_kill_falls_before_or_after_the_call(tmp_path: Path, after: bool, left: str) -> None:
    """Killed before the second rename the folder has its second name, killed after it its third; nobody is told."""
    point = kill.Point("rename", 2, after, "")
    killed = kill.kill(command(tmp_path / "w"), point, env=dict(os.environ), cwd=tmp_path)
    assert killed.fired
    assert [path.name for path in (tmp_path / "w").iterdir()] == [left]
    assert killed.stdout == ""


@pytest.mark.usefixtures("_strace")
def test_a_point_that_is_never_reached_is_not_fired(tmp_path: Path) -> None:
    """A command that ends before the chosen call runs to its end, and the caller learns it."""
    killed = kill.kill(command(tmp_path / "w"), kill.Point("rename", 9, True, ""), env=dict(os.environ), cwd=tmp_path)
    assert (killed.fired, killed.returncode, killed.stdout) == (False, 0, "told\n")


def test_points_are_counted_by_thread_and_call() -> None:
    """The number of a point is its place among the calls of the same kind in its thread, wherever they went."""
    log = (
        "7  write(3</etc/x>, 1) = 1\n8  write(4</root/a>, 1) = 1\n7  write(4</root/b>, 1 <unfinished ...>\n"
        "7  <... write resumed>) = 1\n7  fsync(4</root/b>) = 0\n"
    )
    found = kill.points(log, Path("/root"))
    assert [(p.call, p.when) for p in found if p.after] == [("write", 1), ("write", 2), ("fsync", 1)]
