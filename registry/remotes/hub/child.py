"""The process that uploads: a program of its own, or a copy of a command that has just begun.

The copy loads the library while the command looks at the folder, on another core. A process with several threads must
not be copied, so the daemon starts the program.
"""

import os
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from signal import SIG_DFL, SIGINT, SIGKILL, signal
from typing import IO, Final, NamedTuple

from weighbridge.registry.parent import end_with
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.hub.errors import FEW_FILES
from weighbridge.registry.shell import load

_PROGRAM: Final = "weighbridge.registry.remotes.hub.send"
_TAIL: Final = 2000
_END: Final = 5.0
"""Seconds in which a child that has closed its output must have ended."""

GROUP: Final = 64 << 20
"""Bytes after which what was sent is confirmed, so that a kill costs no more; a child sends what is more than that."""


class Child(NamedTuple):
    """A process that takes orders on one pipe and answers on another; `noise` is what it says besides."""

    pid: int
    orders: IO[bytes]
    answers: IO[bytes]
    noise: IO[bytes]
    program: subprocess.Popen[bytes] | None = None
    """Where it is a program of its own: who waits for it."""

    def ended(self) -> bool:
        """Tell whether it has ended."""
        if self.program is not None:
            return self.program.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def last_words(self) -> tuple[str, str]:
        """Return what it said last besides its answers, or how it was ended, and what helps."""
        if self._killed():
            return "it was killed, as the kernel does where memory runs out", "give it more memory, then repeat it"
        size = self.noise.seek(0, os.SEEK_END)
        self.noise.seek(max(0, size - _TAIL))
        lines = [line for line in self.noise.read().decode("utf-8", "replace").splitlines() if line.strip()]
        last = shown(lines[-1][:300]) if lines else "it said nothing"
        return last, FEW_FILES if "too many open files" in last.lower() else "repeat it"

    def _killed(self) -> bool:
        watch = os.pidfd_open(self.pid)
        try:
            select.select([watch], [], [], _END)  # its output is closed, so it is about to end
        finally:
            os.close(watch)
        if self.program is not None:
            return self.program.poll() == -SIGKILL
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and (ended.si_code, ended.si_status) == (os.CLD_KILLED, SIGKILL)

    def end(self) -> None:
        """End it and what it started, at once."""
        if not self.ended():
            try:
                os.killpg(self.pid, SIGKILL)
            except ProcessLookupError:
                os.kill(self.pid, SIGKILL)  # it has not yet got a group of its own
        for stream in (self.orders, self.answers, self.noise):
            try:
                stream.close()
            except BrokenPipeError:
                continue
        if self.program is not None:
            self.program.wait()
            return
        try:
            os.waitpid(self.pid, os.WNOHANG)  # a copy's end is not waited for: the command that began it ends soon
        except ChildProcessError:
            return


def started(environ: Mapping[str, str]) -> Child:
    """Start the program."""
    noise = _noise()
    program = subprocess.Popen(
        [sys.executable, "-m", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=noise,
        env=environ,
        start_new_session=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    return Child(program.pid, program.stdin, program.stdout, noise, program)


def copied() -> Child | None:
    """Copy this process; None where it has several threads."""
    if threading.active_count() > 1:
        return None
    parent = os.getpid()
    try:
        noise = _noise()
    except OSError:
        return None  # it only saves time
    opened: list[int] = []
    try:
        opened += os.pipe()
        opened += os.pipe()
        pid = os.fork()
    except OSError:
        noise.close()
        for descriptor in opened:
            os.close(descriptor)
        return None
    to_read, orders, answers, to_write = opened
    if pid == 0:
        try:
            os.close(orders)
            os.close(answers)
            end_with(parent)  # it holds the parent's locks, too
            _become(to_read, to_write, noise.fileno())
        finally:
            os._exit(1)  # whatever happens: nothing of the command may go on twice
    os.close(to_read)
    os.close(to_write)
    return Child(pid, os.fdopen(orders, "wb"), os.fdopen(answers, "rb"), noise)


def _become(orders: int, answers: int, noise: int) -> None:
    """Be the process that uploads, until there are no more orders."""
    os.setsid()
    signal(SIGINT, SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(noise, 1)
    os.dup2(noise, 2)
    try:
        with os.fdopen(orders, encoding="utf-8") as source, os.fdopen(answers, "w", encoding="utf-8") as out:
            load(f"{_PROGRAM}:serve")(source, out)
    except BaseException:  # noqa: BLE001 - its last words are read by the command
        os.write(2, traceback.format_exc().encode())


def _noise() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="weighbridge-hub-")
