"""One lock per repository on this machine: between threads, and between processes by a file that the kernel unlocks.

Nothing depends on it: commits are guarded. It only spares the refusals that many writers would meet.
"""

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PATIENCE: Final = 60.0
"""Seconds to wait for another process."""

_threads: dict[str, threading.Lock] = {}
_guard = threading.Lock()


@contextmanager
def held(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock of a name, and tell whether it was free; where no file can be locked, only threads are kept apart.

    What is not known counts as not free.
    """
    with _guard:
        lock = _threads.setdefault(name, threading.Lock())
    free = not lock.locked()
    with lock:
        descriptor = _opened(folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock")
        try:
            yield descriptor is not None and _wait(descriptor) and free
        finally:
            if descriptor is not None:
                _let_go(descriptor)


def _wait(descriptor: int) -> bool:
    """Take the lock of another process's file, but not for ever: going on without it is safe. Tell whether it was free.

    Nobody can tell where files are not locked.
    """
    deadline = time.monotonic() + PATIENCE
    waited = False
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            time.sleep(0.02)
        except OSError:
            return False
        else:
            return not waited
    return False


def _let_go(descriptor: int) -> None:
    """Unlock a file in words: a copy of this process (child.py) has it open, too, so closing would not."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _opened(path: Path) -> int | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
