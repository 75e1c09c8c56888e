"""Private copies that commands make in the user's cache before they publish; a killed one leaves its copy behind.

A copy is held by a lock on its folder that dies with its process, so that one that is still being sent is never swept.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weighbridge.config.places import cache_dir
from weighbridge.registry import disk
from weighbridge.registry.refs import shown

LEFTOVER_AFTER: Final = 3600.0
"""Seconds in which nothing changed in a copy that nobody holds, after which its command is taken for dead."""


def root(environ: Mapping[str, str]) -> Path:
    """Return the folder of all copies; each has one of its own in it."""
    return Path(cache_dir(environ), "stage")


@contextmanager
def held(place: Path | None) -> Iterator[None]:
    """Hold a copy while it is needed; without a folder, or where a file system cannot lock one, nothing is held."""
    descriptor = None
    with suppress(OSError):
        descriptor = None if place is None else _locked(place)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def sweep(folder: Path, older_than: float) -> int:
    """Remove the copies that nobody holds and in which nothing changed for so many seconds; return how many."""
    if not folder.is_dir():
        return 0
    removed = 0
    with disk.speaking(f"cannot sweep {shown(str(folder))}"):
        places = list(folder.iterdir())
    for place in places:
        with suppress(OSError):  # another process sweeps, too, or publishes and is done
            latest = max(found.lstat().st_mtime for found in (place, *place.rglob("*")))
            if time.time() - latest >= older_than and _is_free(place):
                shutil.rmtree(place, ignore_errors=True)
                removed += not place.exists()
    return removed


def _is_free(place: Path) -> bool:
    try:
        os.close(_locked(place))
    except BlockingIOError:
        return False
    except OSError:
        return True  # no folder, or one that cannot be locked: its age has to do
    return True


def _locked(place: Path) -> int:
    """Return a descriptor that holds a folder. Raises BlockingIOError where another process holds it, OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
