"""Files that were pulled before, by their sha256: a second pull of the same content transfers nothing.

    <cache>/files/3f/3fa9...        0400, a clone or a copy of what was pulled, never a link to it

A person may edit what was pulled, so nothing here shares its bytes with a target except where the file system copies on
write. What is lent is hashed by whoever borrows it before it counts, so a damaged file costs a transfer and nothing
else. Any number of processes may use one cache: a file appears whole by a rename, and one that is swept stays readable
for whoever has it open. The files that were not used for longest go first.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.registry import disk
from weighbridge.registry.flow.clone import share_blocks

FREE: Final = 0.1
"""Part of the disk that stays free: a copy (a clone takes no room) is not kept where less would."""

_STALE: Final = 86_400.0
_NO_CLONE: Final = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})


class _Kept(NamedTuple):
    path: Path
    size: int
    used: float


class Cache:
    """A folder of files by their sha256, at most `limit` bytes once swept; nothing here raises for a bad disk."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder / "files"
        self.limit = limit

    def lend(self, sha256: str, size: int, target: Path) -> bool:
        """Put a private copy of a file at `target`, which is not there yet; False when the file is not here.

        Whoever borrows hashes it, and says `damaged` when it is not what was asked for.
        """
        kept = self._path(sha256)
        try:
            source = os.open(kept, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(source).st_size != size:
                self.damaged(sha256)  # such as a power cut leaves it: nothing here is synced
                return False
            _copy(source, target, size, mode=0o666)
            with suppress(OSError):
                os.utime(kept)  # used now: it is swept later than others
        except OSError:
            target.unlink(missing_ok=True)
            return False
        finally:
            os.close(source)
        return True

    def damaged(self, sha256: str) -> None:
        """Forget a file that turned out not to be what its name says."""
        kept = self._path(sha256)
        with suppress(OSError):
            if kept.is_dir():
                shutil.rmtree(kept)
            else:
                kept.unlink()

    def keep(self, source: Path, sha256: str, size: int) -> None:
        """Keep a file that was just verified; does nothing when it is here, too large, or the disk is nearly full."""
        kept = self._path(sha256)
        if not 0 < size <= self.limit or kept.exists():
            return
        fresh = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}")
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _copy(descriptor, fresh, size, mode=0o400, spare=FREE)
            finally:
                os.close(descriptor)
            fresh.rename(kept)
        except OSError:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what was not used for longest until the rest fits the limit; return the bytes that went."""
        found = sorted(self._kept(), key=lambda kept: kept.used)
        total = sum(kept.size for kept in found)
        freed = 0
        for kept in found:
            if total - freed <= self.limit:
                break
            with suppress(OSError):
                kept.path.unlink()
                freed += kept.size
        return freed

    def _kept(self) -> Iterator[_Kept]:
        """Yield what is kept; what a killed process was about to keep is removed after a day."""
        with suppress(OSError):
            for folder in list(self._folder.iterdir()):
                for path in list(folder.iterdir()):
                    with suppress(OSError):
                        found = path.lstat()
                        if "." not in path.name:
                            yield _Kept(path, found.st_size, found.st_mtime)
                        elif time.time() - found.st_mtime > _STALE:
                            path.unlink()

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


def _copy(source: int, target: Path, size: int, *, mode: int, spare: float = 0.0) -> None:
    """Clone a file, else copy it in the kernel; a copy only where `spare` of the disk stays free. Raises OSError."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            share_blocks(descriptor, source)
        except OSError as error:
            if error.errno not in _NO_CLONE:
                raise
        else:
            return
        room = os.fstatvfs(descriptor)
        if disk.free_bytes(target) - size < spare * room.f_blocks * room.f_frsize:
            raise OSError(errno.ENOSPC, "the disk is nearly full", str(target))
        os.lseek(source, 0, os.SEEK_SET)
        left = size
        while left:
            moved = os.sendfile(descriptor, source, None, left)
            if not moved:
                raise OSError(errno.EIO, "it became shorter", str(target))
            left -= moved
    finally:
        os.close(descriptor)
