"""Kill a command just before or just after one chosen system call, by strace's injection.

    points = trace(command, root, env=env)          every call that changes something under `root`, in one normal run
    killed = kill(command, points[7], env=env)      the same command, killed there

*Before*: strace delivers SIGKILL on entry, so the kernel never carries the call out. *After*: strace holds the call on
its way out, and the whole process group is killed while it is held.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

CALLS: Final = (
    "fsync", "fdatasync", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink",
    "unlinkat", "mkdir", "mkdirat", "rmdir", "write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate",
    "truncate", "copy_file_range", "sendfile",
)  # fmt: skip
"""Every call by which a process changes files, and `write`, by which it tells somebody."""

_LINE = re.compile(r"(\d+) +([a-z0-9_]+)\((.*)")
STRACE: Final = ("strace", "-f", "-qq", "--signal=none")
_HOLD: Final = "60000000"


class Point(NamedTuple):
    """The `when`th use of a call in one thread; `shows` is the call as the reference run made it."""

    call: str
    when: int
    after: bool
    shows: str

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.call} #{self.when}"


class Killed(NamedTuple):
    """How a killed command ended; `fired` is False when it got through without meeting the point."""

    fired: bool
    stdout: str
    stderr: str
    returncode: int


def available() -> str | None:
    """Return why injection does not work here, or None."""
    if not shutil.which("strace"):
        return "strace is not installed"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "made"
        done = subprocess.run(
            ["strace", "-f", "-qq", "-o", "/dev/null", "--inject=mkdir:signal=SIGKILL:when=1", "mkdir", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        if target.exists() or done.returncode == 0:
            return f"strace cannot inject here: {done.stderr.strip()[-200:] or 'the call was carried out'}"
    return None


def trace(
    command: Sequence[str], root: Path, *, env: Mapping[str, str], cwd: Path, timeout: float = 120
) -> list[Point]:
    """Run a command normally and return the calls that touched something under `root` or wrote to stdout."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "trace"
        done = subprocess.run(
            [*STRACE, "-y", "-s", "512", f"--trace={','.join(CALLS)}", f"--output={log}", *command],
            env=dict(env),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the command fails without any fault: {done.stderr[-1500:]}")
        return points(log.read_text(errors="replace"), root)


def points(log: str, root: Path) -> list[Point]:
    """Return the kill points in a log of `strace -f -y`, two for each call, without repeats."""
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int, bool], Point] = {}
    for line in log.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        thread, call, rest = match.groups()
        counts[thread, call] += 1
        if str(root) in rest or (call == "write" and rest.startswith("1<")):
            for after in (False, True):
                key = (call, counts[thread, call], after)
                found.setdefault(key, Point(*key, rest[:600]))
    return list(found.values())


def kill(
    command: Sequence[str],
    point: Point,
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float = 60,
    held: Callable[[], None] | None = None,
) -> Killed:
    """Run a command and kill all of it at a point; `held` is called first, while the command hangs *after* the call."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "trace"
        fault = f"delay_exit={_HOLD}" if point.after else "signal=SIGKILL"
        process = subprocess.Popen(
            [
                *STRACE,
                f"--trace={point.call}",
                f"--output={log}",
                f"--inject={point.call}:{fault}:when={point.when}",
                *command,
            ],
            env=dict(env),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            fired = _await_hold(process, log, timeout) if point.after else False
            if fired:
                if held is not None:
                    held()
                _end(process.pid)
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            _end(process.pid)
            process.communicate()
            raise
        if not point.after:
            fired = process.returncode == -signal.SIGKILL
        return Killed(fired, stdout, stderr, process.returncode)


def _await_hold(process: subprocess.Popen[str], log: Path, timeout: float) -> bool:
    """Wait until strace reports the held call; False when the command ended without one."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if log.exists() and "(DELAYED)" in log.read_text(errors="replace"):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return False


def _end(group: int) -> None:
    """Kill what is left of a process group that this module started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
