"""The parent's watch over a jailed child: memory, threads and the clock, and the end of its whole process group.

A limit on address space would count what a numerical library merely maps, several times what it uses. So a thread of
the parent reads what the kernel counts for the child, twenty times a second, and ends it where that is too much.
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from weighbridge.adapters.jail import Policy
from weighbridge.registry import errors

_STEP: Final = 0.05


class Watch:
    """A thread that watches one child, the leader of its own process group, until that ends."""

    def __init__(self, process: int, policy: Policy) -> None:
        self._process = process
        self._policy = policy
        self._end = time.monotonic() + policy.clock
        self.peak = 0
        """Bytes of memory of its own that it was seen with."""
        self.verdict: errors.LimitError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the child and all of its group, because nobody wants its work any more."""
        self._kill()

    def wait(self) -> None:
        """Return when the child and all of its group have ended; its exit status is still to be fetched."""
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended():
            if self.verdict is None:
                self.verdict = self._judged()
                if self.verdict is not None:
                    self._kill()
            time.sleep(_STEP)
        self._kill()  # whoever else is in the group; its number cannot be used again before the status is fetched

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process, signal.SIGKILL)

    def _judged(self) -> errors.LimitError | None:
        own, threads = usage(self._process)
        self.peak = max(self.peak, own)
        if own > self._policy.memory:
            return errors.LimitError(
                "the child process was ended: it used too much memory",
                why=f"it held {own} bytes of its own, it may hold {self._policy.memory}",
                fix="run it on a machine with more memory, if the input is yours; else do not trust the input",
                limit="memory", used=own, allowed=self._policy.memory,
            )  # fmt: skip
        if threads > self._policy.threads:
            return errors.LimitError(
                "the child process was ended: it started too many threads",
                why=f"it had {threads} threads, it may have {self._policy.threads}",
                fix="do not trust the input",
                limit="threads", used=threads, allowed=self._policy.threads,
            )  # fmt: skip
        if time.monotonic() > self._end:
            return errors.LimitError(
                "the child process was ended: it took too long",
                why=f"it ran for {self._policy.clock} seconds, all it may",
                fix="run it where it is quicker, if the input is yours; else do not trust the input",
                limit="clock", allowed=self._policy.clock,
            )  # fmt: skip
        return None


def over_time(code: int, policy: Policy) -> errors.LimitError | None:
    """Return the error for a child that the kernel ended for its processor time, by its exit code."""
    if code != -signal.SIGXCPU:
        return None
    return errors.LimitError(
        "the child process was ended: it computed for too long",
        why=f"it used {policy.processor} seconds of processor time, all it may",
        fix="run it where it is quicker, if the input is yours; else do not trust the input",
        limit="processor", allowed=policy.processor,
    )  # fmt: skip


def usage(process: int) -> tuple[int, int]:
    """Return (bytes of memory of its own, threads) of a process, (0, 0) when it is gone.

    Its own are the pages that no file stands behind: what it has merely mapped of files can be taken away from it.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    own = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem") if name in fields)
    return own, int(fields.get("Threads", "0"))
