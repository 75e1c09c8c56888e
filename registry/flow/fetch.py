"""Moving a version's files from a remote into a folder: several at once, hashed as they are written, resumed."""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.registry import disk, layout
from weighbridge.registry.errors import IntegrityError, MissingError
from weighbridge.registry.flow import once
from weighbridge.registry.flow.cache import Cache
from weighbridge.registry.flow.decision import withdrawn
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Chunk, Remote
from weighbridge.registry.types import FileEntry

Progress = Callable[[str, int], None]
"""Called with a file's path and the number of its bytes that were just received or found here; negative when they
turned out to be wrong."""

_LARGE: Final = 8 << 20
"""Bytes from which on a file is written beside the hashing."""
_SYNC: Final = 8 << 20
"""Bytes of a large file after which the disk begins to write them, so that little is left for the end."""
_WRITE: Final = 256 << 10
"""Bytes written at once.

Larger writes take larger pieces of memory, which the kernel has rarely used before. In a virtual machine, whose host
must find that memory first, copying into it was seen to take three times as long.
"""
_READ: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Moved(NamedTuple):
    """How bytes came: fetched from the remote, found here, and of the latter those that the cache lent."""

    fetched: int
    reused: int
    cached: int


class _Stopped(Exception):  # noqa: N818 - it is not an error: another file's is
    """Another file failed."""


class _Job(NamedTuple):
    """What all files of one pull share."""

    remote: Remote
    name: str
    n: int
    folder: Path
    donor: Path | None
    cache: Cache | None
    stop: threading.Event
    progress: Progress | None


def files(
    remote: Remote,
    name: str,
    n: int,
    entries: Sequence[FileEntry],
    folder: Path,
    *,
    donor: Path | None = None,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Fetch files of a version into a folder and return how their bytes came; each is whole, right and synced.

    What lies in `folder` from before is hashed again and gone on from. `donor` is a folder that may hold some of the
    files already; `cache` lends what it has, and gets all of them. Raises IntegrityError that names a damaged file,
    WithdrawnError, and what remote and disk raise.
    """
    job = _Job(remote, name, n, folder, donor, cache, threading.Event(), progress)
    pool = ThreadPoolExecutor(max(1, min(remote.properties.parallel, len(entries))), thread_name_prefix="fetch")
    work: list[Future[Moved]] = []
    try:
        work += [pool.submit(_fetch, job, entry) for entry in sorted(entries, key=lambda f: -f.size)]
        wait(work, return_when=FIRST_EXCEPTION)
    finally:
        job.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    for failed in _failures(work):
        raise failed
    moved = [future.result() for future in work]
    if cache is not None:
        room = cache.limit
        for entry in entries:
            if entry.size <= room:  # what the sweep would take away again is not written at all
                room -= entry.size
                cache.keep(folder / entry.path, entry.sha256, entry.size)
        cache.sweep()
    return Moved(*(sum(counts) for counts in zip(*moved, strict=True)))


def _failures(work: "Sequence[Future[Moved]]") -> Iterator[BaseException]:
    """Yield what went wrong, damage first: it is what a person has to know."""
    found = [error for future in work if not future.cancelled() and (error := future.exception()) is not None]
    yield from sorted(
        (error for error in found if not isinstance(error, _Stopped)), key=lambda e: not isinstance(e, IntegrityError)
    )


def _fetch(job: _Job, entry: FileEntry) -> Moved:
    """Fetch one file, going on behind what is here; the hash is that of the bytes that were written."""
    path = job.folder / entry.path
    with disk.speaking(f"cannot write {shown(entry.path)}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if job.donor is not None and not path.exists():
            _borrow(job.donor / entry.path, path, entry)
        lent = job.cache is not None and not path.exists() and job.cache.lend(entry.sha256, entry.size, path)
        descriptor = os.open(path, _READ, 0o666)
        try:
            while True:
                digest, have = _digest_of(job, descriptor, entry)
                total = _receive(job, descriptor, entry, digest, have)
                if total == entry.size and digest.hexdigest() == entry.sha256:
                    os.fsync(descriptor)
                    return Moved(total - have, have, have if lent else 0)
                os.ftruncate(descriptor, 0)
                if lent and job.cache is not None:
                    job.cache.damaged(entry.sha256)
                    lent = False
                if not have:
                    raise _damaged(job, entry, total, digest.hexdigest())
                # What lay here from before was not the beginning of this file: once more, from its first byte.
                _report(job, entry, -min(total, entry.size))
        finally:
            os.close(descriptor)


def _digest_of(job: _Job, descriptor: int, entry: FileEntry) -> tuple["hashlib._Hash", int]:
    """Hash what a file holds already; a file that is too long is begun anew."""
    if os.fstat(descriptor).st_size > entry.size:
        os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    digest, have = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK))
    while count := os.readv(descriptor, [buffer]):
        digest.update(buffer[:count])
        have += count
        _report(job, entry, count)
        if job.stop.is_set():
            raise _Stopped
    return digest, have


def _receive(job: _Job, descriptor: int, entry: FileEntry, digest: "hashlib._Hash", have: int) -> int:
    """Append what the remote has behind `have` bytes; stops at the first byte too many. Returns the length."""
    if have == entry.size and have:
        return have
    try:
        with _taking(descriptor, digest, have, entry.size) as take:
            for chunk in job.remote.fetch(layout.version(job.name, job.n, entry.path), have):
                if job.stop.is_set():
                    raise _Stopped
                have += len(chunk)
                if have > entry.size:
                    break
                take(chunk)
                _report(job, entry, len(chunk))
    except MissingError as error:
        mark = once.look(job.remote, layout.withdrawn(job.name, job.n))
        if mark is not None:
            raise withdrawn(job.name, job.n, mark) from error
        raise IntegrityError(
            f"{shown(entry.path)} of {job.name}@v{job.n} is missing on the remote",
            why="the manifest lists it",
            fix=f"registry verify {job.name}@v{job.n}",
            file=entry.path,
        ) from error
    return have


@contextmanager
def _taking(descriptor: int, digest: "hashlib._Hash", have: int, size: int) -> Iterator[Callable[[Chunk], None]]:
    """Give what appends a chunk to a file and hashes it, of a large file both at once; it is done when it returns.

    A large file's room is reserved first, and the disk begins to write while the rest arrives. What is written is
    always a beginning of the file, so that a cut costs nothing but what was not written yet. Raises OSError.
    """
    if size - have < _LARGE:

        def small(chunk: Chunk) -> None:
            disk.write_all(descriptor, chunk)
            digest.update(chunk)

        yield small
        return
    disk.reserve(descriptor, have, size - have)
    begun = written = have
    with ThreadPoolExecutor(1, thread_name_prefix="write") as pool:

        def append(chunk: Chunk) -> None:
            nonlocal begun, written
            for start in range(0, len(chunk), _WRITE):
                disk.write_all(descriptor, memoryview(chunk)[start : start + _WRITE])
            written += len(chunk)
            if written - begun >= _SYNC:
                disk.begin_sync(descriptor, begun, written - begun)
                begun = written

        def large(chunk: Chunk) -> None:
            writing = pool.submit(append, chunk)
            digest.update(chunk)
            writing.result()

        yield large


def _report(job: _Job, entry: FileEntry, count: int) -> None:
    if job.progress is not None:
        job.progress(entry.path, count)


def _damaged(job: _Job, entry: FileEntry, total: int, sha256: str) -> IntegrityError:
    if total != entry.size:
        why = f"it has {'more' if total > entry.size else total} bytes, the manifest says {entry.size}"
    else:
        why = f"its sha256 is {sha256[:12]}, the manifest says {entry.sha256[:12]}"
    return IntegrityError(
        f"{shown(entry.path)} of {job.name}@v{job.n} is damaged on the remote",
        why=why,
        fix=f"registry verify {job.name}@v{job.n}",
        file=entry.path,
    )


def _borrow(source: Path, path: Path, entry: FileEntry) -> None:
    """Copy a file of the version that is replaced, when it may be the same; its hash decides afterwards."""
    try:
        if source.is_symlink() or not source.is_file() or source.stat().st_size != entry.size or not entry.size:
            return
        shutil.copyfile(source, path)
    except OSError:
        path.unlink(missing_ok=True)
