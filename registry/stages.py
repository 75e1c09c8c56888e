"""Private copies that commands make in the user's cache before they publish; a killed one leaves its copy behind.

A copy is held by a lock on its folder that dies with its process, so that one that is still being sent is never swept.
A cache may lie in a home that many machines share, and such a lock is seen by its own machine alone: a copy is called
after the machine that made it, which may sweep it at once when it is free; any other machine waits for its age.
"""

import fcntl
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weighbridge.config.places import cache_dir
from weighbridge.registry import disk
from weighbridge.registry.refs import shown

LEFTOVER_AFTER: Final = 2 * 86_400.0
"""Seconds in which nothing changed in a copy whose lock cannot be seen from here, after which its command is dead."""
FREE_AFTER: Final = 10.0
"""The same of a copy of this machine that nobody holds: it is free for a moment when it is made and when it is sent.

So short that of tries one after the other the last copies stay at most, where they are large: making one takes longer.
"""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def root(environ: Mapping[str, str]) -> Path:
    """Return the folder of all copies; each has one of its own in it."""
    return Path(cache_dir(environ), "stage")


def place_of(environ: Mapping[str, str], nonce: str) -> Path:
    """Return where the copy of a command goes: its folder is called after this machine, since it was booted."""
    return root(environ) / f"{_machine()}-{nonce}"


@contextmanager
def begun(place: Path) -> Iterator[None]:
    """Make the folder of a copy and hold it while it is filled; nothing stays of one that could not be begun."""
    with disk.speaking(f"cannot stage in {shown(str(place))}"):
        place.mkdir(mode=0o700, parents=True)
    try:
        with held(place):
            yield
    except BaseException:
        with suppress(OSError):
            place.rmdir()
        raise


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
            with suppress(OSError):
                os.utime(descriptor)  # so that it is young for whoever holds it next
            os.close(descriptor)


def sweep(folder: Path, older_than: float) -> int:
    """Remove the copies that nobody holds and in which nothing changed for so many seconds; return how many."""
    removed = 0
    for place in leftovers(folder, older_than):
        shutil.rmtree(place, ignore_errors=True)
        removed += not place.exists()
    return removed


def leftovers(folder: Path, older_than: float) -> Iterator[Path]:
    """Yield the copies that nobody holds and in which nothing changed for so many seconds of their file system's clock.

    One of this machine is left after `FREE_AFTER` when that is sooner: that its lock is free says that its command
    ended. Of a cache in a home that many machines share the server dates what lies there.
    """
    if not folder.is_dir():
        return
    with disk.speaking(f"cannot sweep {shown(str(folder))}"):
        places = list(folder.iterdir())
        if not places:
            return
        os.utime(folder)  # dated by the file system itself, also where it has no room
        now = folder.stat().st_mtime
    for place in places:
        with suppress(OSError):  # another process sweeps, too, or publishes and is done
            free = _is_free(place)
            sure = free is True and place.name.startswith(f"{_machine()}-")
            latest = max(found.lstat().st_mtime for found in (place, *place.rglob("*")))
            if free is not False and now - latest >= (min(older_than, FREE_AFTER) if sure else older_than):
                yield place


def size_of(place: Path) -> int:
    """Return the bytes of a file, or of every file in a folder; what goes away meanwhile does not count."""
    total = 0
    for one in (place, *place.rglob("*")) if place.is_dir() and not place.is_symlink() else (place,):
        with suppress(OSError):
            found = one.lstat()
            total += 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return total


def _is_free(place: Path) -> bool | None:
    """Tell whether nobody holds a folder; None where that cannot be told, of a file or where none can be locked."""
    try:
        os.close(_locked(place))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _machine() -> str:
    """Return what tells this machine from others that see the same folder, and from itself before it was booted."""
    try:
        return _BOOT.read_text("ascii")[:8]
    except (OSError, ValueError):
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _locked(place: Path) -> int:
    """Return a descriptor that holds a folder. Raises BlockingIOError where another process holds it, OSError."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
