"""One daemon per state folder: a kernel lock that dies with the process.

The lock file is opened by nothing else (a second open and close would drop some kinds of lock), is never removed, holds
no process id, and is closed on exec, so that no child keeps it alive.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Self

from weighbridge.registry.errors import StateHeldError

FILE: Final = "daemon.lock"


class StateLock:
    """The right to use a state folder; a context manager."""

    def __init__(self, state: Path) -> None:
        self.path = state / FILE
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        """Take the lock. Raises StateHeldError when another daemon has it, OSError where nothing can be written."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            raise StateHeldError(
                f"another daemon works on {self.path.parent}",
                why="it holds the lock of this state folder",
                fix="registry status shows it; or give this one a state folder of its own ([daemon] state)",
            ) from error
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Give the lock back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
