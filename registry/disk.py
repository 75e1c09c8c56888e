"""Durable files: what is acknowledged is on the disk, and every error of the operating system becomes words.

The buffer that feeds a hash is the buffer that is written (`copy_hashing`); a folder is synced after a name in it
changed (`sync_folder`), because otherwise the name is gone after a power loss though the bytes are there.
"""

import ctypes
import errno
import functools
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from weighbridge.registry import errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import shown

Progress = Callable[[int], None]
"""Called with the number of bytes that were just moved."""

See = Callable[[bytes | bytearray], None]
"""Called with the bytes that were just moved; they are overwritten afterwards."""

_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE of fallocate(2)."""
_BEGIN_WRITING: Final = 2
"""SYNC_FILE_RANGE_WRITE of sync_file_range(2)."""
_HERE: Final = -100
"""AT_FDCWD of statx(2)."""
_BIRTH: Final = 0x800
"""STATX_BTIME of statx(2)."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CLOSED: Final = frozenset({errno.EACCES, errno.EPERM})
_LATER: Final = frozenset({errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM, errno.ETIMEDOUT})
_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_GONE: Final = frozenset({errno.EIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV, errno.ENXIO})
_ODD: Final = frozenset({errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_SHAPE: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP})


def translate(error: OSError, what: str) -> errors.WeighbridgeError:
    """Return the error that tells a person what failed, why and what to do; `what` is "cannot do this"."""
    code = error.errno or 0
    where = shown(str(error.filename)) if error.filename else "the file system"
    why = f"{where}: {error.strerror or error}"
    if code == errno.EFBIG:
        fix = "raise the limit of a file's size (ulimit -f), or choose a file system that holds larger files"
        return errors.DiskFullError(what, why=why, fix=fix, path=where)
    if code in _FULL:
        return errors.DiskFullError(what, why=why, fix="free some space or raise the quota, then repeat", path=where)
    if code == errno.EROFS:
        return errors.DeniedError(what, why=why, fix="mount it with write permission, or choose another folder")
    if code in _CLOSED:
        return errors.DeniedError(what, why=why, fix="ask its owner for access (ls -ld shows who that is)")
    if code in _LATER:
        return errors.RetryableError(what, why=why, fix="repeat; where it goes on, look at the mount")
    if code in _FILES:
        return errors.RetryableError(what, why=why, fix="raise the limit of open files (ulimit -n)")
    if code in _GONE:
        return errors.UnreachableError(what, why=why, fix="look at the disk or the mount (dmesg), then repeat")
    if code in _SHAPE:
        return errors.ConflictError(what, why=why, fix="move away what is in the way: a file, a folder or a link")
    if code == errno.ENAMETOOLONG:
        return errors.UsageError(what, why=why, fix="use a shorter name")
    if code in {errno.ENOENT, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return errors.WeighbridgeError(
            what, why=why, fix="see that it lies on an ordinary file system, or choose another folder"
        )
    return errors.WeighbridgeError(what, why=why, fix="look at that file system (df, mount, dmesg), then repeat")


@contextmanager
def speaking(what: str) -> Iterator[None]:
    """Turn every OSError inside into the error of `translate`."""
    try:
        yield
    except OSError as error:
        raise translate(error, what) from error


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names inside a folder durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_source(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor; a link, pipe or device is refused. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EPERM, "not a regular file", os.fspath(path))
    return descriptor


def read_small(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit`; no link, no pipe, no device. Raises OSError."""
    with os.fdopen(open_source(path), "rb") as stream:
        body = stream.read(limit + 1)
    if len(body) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return body


def create_file(path: str | os.PathLike[str]) -> int:
    """Create a file that nobody may write afterwards and return its descriptor, for us to fill. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)


def write_all(descriptor: int, body: bytes | memoryview) -> None:
    """Write every byte; a short write goes on. Raises OSError."""
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve room for `size` bytes from `start` on, without making the file longer; nothing where that is unknown.

    A file that is filled in order is then in one piece, and a full disk is met before the first byte. Raises OSError.
    """
    call = _system_call("fallocate")
    if call is None or size <= 0:
        return
    if call(descriptor, _KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in _FULL:
            raise OSError(code, os.strerror(code))


def begin_sync(descriptor: int, start: int, size: int) -> None:
    """Have the system begin to write `size` bytes from `start` on to the disk; nothing where it cannot be asked for.

    An fsync later finds little left to wait for, and it alone says whether the bytes are there.
    """
    call = _system_call("sync_file_range")
    if call is not None and size > 0:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _BEGIN_WRITING)


@functools.cache
def _system_call(name: str) -> Callable[..., int] | None:
    """Return a call of the C library that Python lacks, None where the library lacks it as well."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def copy_hashing(
    source: int, target: int, *, limit: int, progress: Progress | None = None, see: See | None = None
) -> tuple[int, str]:
    """Copy between two descriptors and return (bytes, sha256) of what was written; `see` is shown the same bytes.

    Stops behind `limit` bytes, so that a source that grows for ever cannot fill the disk. Raises OSError.
    """
    return _pass(source, target, limit, progress, see)


def hash_open(descriptor: int, *, progress: Progress | None = None, see: See | None = None) -> tuple[int, str]:
    """Return (bytes, sha256) of an open file from its current position on. Raises OSError."""
    return _pass(descriptor, None, None, progress, see)


def _pass(
    source: int, target: int | None, limit: int | None, progress: Progress | None, see: See | None
) -> tuple[int, str]:
    digest = hashlib.sha256()
    store, spare = bytearray(CHUNK), bytearray()
    hashing: Future[None] | None = None
    total = 0
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:  # it has no thread before it is given work
        while True:
            count = os.readv(source, [store])
            if hashing is not None:
                hashing.result()  # of the buffer that is filled next
            if not count:
                break
            chunk = memoryview(store)[:count]
            if count == CHUNK:
                spare = spare or bytearray(CHUNK)  # two large ones at once cost more to get than a small file to hash
                hashing = pool.submit(digest.update, chunk)
            else:  # most files are smaller than a buffer, and no file ends in more than one
                hashing = None
                digest.update(chunk)
            if target is not None:
                write_all(target, chunk)
            if see is not None:
                see(store if count == CHUNK else store[:count])
            total += count
            if progress is not None:
                progress(count)
            if limit is not None and total > limit:
                break
            if hashing is not None:
                store, spare = spare, store
    return total, digest.hexdigest()


def born_ns(path: str | os.PathLike[str]) -> int | None:
    """Return when a file or folder was made, in nanoseconds since 1970; None where the file system does not tell.

    By statx(2), which Python lacks: the mask comes first, the time of birth 80 bytes on. Raises nothing.
    """
    call = _system_call("statx")
    found = ctypes.create_string_buffer(256)
    if call is None or call(_HERE, os.fsencode(path), 0, _BIRTH, found) != 0:
        return None
    mask, seconds, nanoseconds = struct.unpack_from("=I76xqI", found)
    return int(seconds) * 1_000_000_000 + int(nanoseconds) if mask & _BIRTH else None


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Return the bytes that an ordinary user may still write where `path` lies. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
