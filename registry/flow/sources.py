"""What identifies a source file, and whether it is still the one that was judged."""

import errno
import os
import stat

from weighbridge.registry import disk, errors
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Value


class SourceFile(Value, frozen=True):
    """A file to publish: bundle path, absolute real path, size and role.

    Time and inode, where the scan gives them, tie the bytes that are staged to the file that was judged.
    """

    path: str
    source: str
    size: int
    role: str
    mtime_ns: int | None = None
    ino: int | None = None


class SourceStat(Value, frozen=True):
    """What identifies the state of a file: any write changes one of these."""

    path: str
    source: str
    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int


def look(file: SourceFile) -> SourceStat:
    """Return the state of a file that was judged. Raises SourceChangedError, VanishedError, DeniedError."""
    found = status(file.path, file.source)
    if found.size != file.size:
        raise changed(file.path, f"it has {found.size} bytes, when it was judged it had {file.size}")
    if file.mtime_ns not in {None, found.mtime_ns} or file.ino not in {None, found.ino}:
        raise changed(file.path, "it was written again since it was judged")
    return found


def status(path: str, source: str) -> SourceStat:
    """Return the state of a regular file. Raises as `look`."""
    try:
        found = os.lstat(source)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise changed(path, "it is not a regular file")
    return stat_of(path, source, found)


def stat_of(path: str, source: str, found: os.stat_result) -> SourceStat:
    """Return the state that a stat tells."""
    return SourceStat(
        path=path,
        source=source,
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        ino=found.st_ino,
    )


def opened(known: SourceStat) -> int:
    """Return a descriptor of a source, proven to be still the file that was looked at. Raises as `look`."""
    try:
        descriptor = disk.open_source(known.source)
    except OSError as error:
        raise _unreadable(known.path, error) from error
    try:
        same(known, stat_of(known.path, known.source, os.fstat(descriptor)))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def same(known: SourceStat, now: SourceStat) -> None:
    """Raise SourceChangedError where two states differ."""
    if known == now:
        return
    if known.ino != now.ino:
        why = "another file is in its place"
    elif known.size != now.size:
        why = f"it had {known.size} bytes and has {now.size} now"
    else:
        why = "it was written, renamed or linked meanwhile"
    raise changed(known.path, why)


def _unreadable(path: str, error: OSError) -> errors.WeighbridgeError:
    if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ESTALE:
        why = f"{shown(str(error.filename))} went away"
        return errors.VanishedError(f"{shown(path)} is gone", why=why, fix="see who deletes there, then repeat")
    if error.errno == errno.ELOOP:
        return changed(path, "it is a link now")
    return disk.translate(error, f"cannot read {shown(path)}")


def changed(path: str, why: str) -> errors.SourceChangedError:
    """Return the error for a source that somebody wrote to."""
    return errors.SourceChangedError(
        f"{shown(path)} changed while it was read", why=why, fix="wait until its writer is done, then repeat"
    )
