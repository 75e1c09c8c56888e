"""A remote that is a folder: on this machine, on a mounted file system, shared by a team.

    models/<name>/v7/...                     plain files; who can read the root can read them, nobody writes them
    models/<name>/_wb/stage/<nonce>/...      a bundle that waits to be linked into place, private (0700) to its writer
    models/<name>/_wb/stage/<nonce>.part     one object on its way; `_wb/stage/` at the root for all other keys

How objects come into being is in `links.py`. Names that begin with a dot, links and special files are never objects:
editors and network file systems leave them behind.
"""

import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weighbridge.registry import disk, errors, layout, stages
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import check_key, check_name, shown
from weighbridge.registry.remotes.links import Links, is_stage
from weighbridge.registry.remotes.protocol import Denied, Progress, Properties, Stat
from weighbridge.registry.remotes.source import changed, opened

_NONCE: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
_YOUNG: Final = 60.0
"""Seconds during which an object that somebody else linked may not be on the disk yet."""


def open_directory(url: str, endpoint: str | None = None) -> "DirectoryRemote":
    """Return the remote of a path or a `file://` URL. Raises UsageError for a relative URL or an endpoint."""
    if endpoint:
        raise errors.UsageError(f"'{shown(url)}' takes no endpoint", why="it is a folder", fix="remove the endpoint")
    path = url
    if url.startswith("file:"):
        path = url.removeprefix("file://").removeprefix("localhost")
        if not path.startswith("/"):
            raise errors.UsageError(
                f"'{shown(url)}' is not a file URL", why="its path must be absolute", fix="write file:///path"
            )
    return DirectoryRemote(Path(path).expanduser().absolute(), url=url)


class DirectoryRemote:
    """A folder as a remote; safe for many threads, processes and machines at once."""

    def __init__(self, root: Path, *, url: str | None = None) -> None:
        self._root = root
        self._url = url or str(root)
        self._links = Links(root, self._url)
        self._marked = False  # the marker was seen: if it is gone one day, the mount is

    @property
    def url(self) -> str:
        """The path or URL as configured."""
        return self._url

    @property
    def properties(self) -> Properties:
        """Create-only by link, durable by fsync; a folder computes no checksum by itself."""
        return Properties(
            conditional_create=True,
            server_sha256=False,
            durable_ack=True,
            parallel=max(2, min(4, os.cpu_count() or 2)),
            hashes_stored=True,
        )

    def create(self, key: str, body: bytes) -> None:
        """Store a small object under a free key, durably and all at once. Raises ExistsError."""
        final = self._links.final(key)
        with disk.speaking(f"cannot store {shown(key)}"):
            self._links.refuse_taken(key, final)
            with self._links.part(key) as (part, descriptor):
                disk.write_all(descriptor, body)
                self._links.seal(descriptor)
                self._links.link(part, final, key)

    def upload(
        self,
        key: str,
        source: Path,
        size: int,
        sha256: str,
        progress: Progress | None = None,
        *,
        parts: Sequence[bytes] = (),  # noqa: ARG002 - it hashes what it stores
    ) -> None:
        """Store a file under a free key; one from our own private stage is linked, any other copied while hashing.

        A staged file was hashed while it was staged, and the flow proves that it has not changed since. Raises
        SourceChangedError before anything is visible, ExistsError, VanishedError.
        """
        final = self._links.final(key)
        with disk.speaking(f"cannot store {shown(key)}"):
            self._links.refuse_taken(key, final)
            with opened(source) as reading:
                found = os.fstat(reading)
                if found.st_size != size:
                    raise changed(source, f"it has {found.st_size} bytes, expected were {size}")
                if self._is_staged(source, found):
                    self._links.seal(reading)
                    self._links.link(source, final, key)
                    if progress is not None:
                        progress(size)
                    return
                with self._links.part(key, size) as (part, descriptor):
                    copied, digest = disk.copy_hashing(reading, descriptor, limit=size, progress=progress)
                    if copied != size:
                        raise changed(source, f"{copied} bytes were read, expected were {size}")
                    if digest != sha256:
                        raise changed(source, f"its sha256 is {digest[:12]}, expected was {sha256[:12]}")
                    self._links.seal(descriptor)
                    self._links.link(part, final, key)

    def read(self, key: str) -> bytes:
        """Return a small object whole; what is returned is on the disk. Raises MissingError."""
        with self._reading(key) as descriptor:
            found = os.fstat(descriptor)
            if abs(time.time() - found.st_ctime) < _YOUNG:
                self._links.settle(key, self._root / key)
            body = bytearray()
            while chunk := os.read(descriptor, max(CHUNK, found.st_size + 1)):
                body += chunk
            return bytes(body)

    def fetch(self, key: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an object from `offset` on, in chunks of at most 1 MiB. Raises MissingError."""
        with self._reading(key) as descriptor:
            os.lseek(descriptor, offset, os.SEEK_SET)
            os.posix_fadvise(descriptor, offset, 0, os.POSIX_FADV_SEQUENTIAL)
            while chunk := os.read(descriptor, CHUNK):
                yield chunk

    def stat(self, key: str) -> Stat:
        """Return size and store time of one object; a folder has no checksum of its own. Raises MissingError."""
        with disk.speaking(f"cannot look at {shown(key)}"):
            try:
                found = self._links.final(key).lstat()
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(key) from None
        if not stat.S_ISREG(found.st_mode):
            raise self._missing(key)
        return Stat(key, found.st_size, None, found.st_mtime)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix` that hold an object, sorted by their UTF-8 bytes."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        with disk.speaking(f"cannot list {shown(prefix)} in {shown(self._url)}"):
            self._check_mounted()
            for name, is_folder, _ in _children(self._root, prefix):
                if is_folder and next(_walk(self._root, f"{prefix}{name}/", prefix, None), None) is not None:
                    yield name

    def learn(self) -> None:
        """There is nothing to find out."""

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix` in UTF-8 order, those after the key `after` only; never a stage file."""
        base = prefix.rpartition("/")[0]
        if base:
            check_key(base)
        with disk.speaking(f"cannot list {shown(prefix)} in {shown(self._url)}"):
            self._check_mounted()
            start = f"{base}/" if base else ""
            found = _walk(self._root, start, prefix, None if after is None else after.encode())
            yield from found if limit is None else itertools.islice(found, limit)

    def delete(self, key: str) -> None:
        """Remove one object, durably; a key that is not there is no error."""
        final = self._links.final(key)
        self._links.forget(key)
        with disk.speaking(f"cannot delete {shown(key)}"):
            try:
                final.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            disk.sync_folder(final.parent)

    def now(self) -> float:
        """Return the file system's clock: the time that it gives to a file made now."""
        with disk.speaking(f"cannot ask {shown(self._url)} for the time"), self._links.part("") as (_, descriptor):
            return os.fstat(descriptor).st_mtime

    def stage(self, name: str, nonce: str) -> Path | None:
        """Return a folder that only we can enter, on the remote's own file system; `upload` links from it."""
        if not _NONCE.fullmatch(nonce):
            raise errors.UsageError(f"'{shown(nonce[:80])}' is not a nonce")
        with disk.speaking(f"cannot stage for {shown(name)} in {shown(self._url)}"):
            folder = self._links.stage_folder(f"{layout.MODELS}{check_name(name)}/") / nonce
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            if not _is_private(folder):
                raise errors.DeniedError(
                    f"the stage folder {shown(str(folder))} is not private",
                    why="it belongs to somebody else, or others can enter it",
                    fix="remove it, or choose another nonce",
                )
        return folder

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Remove stage files and folders in which nothing changed for so many seconds of the store's clock.

        What belongs to somebody else may stay: its writer or an administrator sweeps it.
        """
        removed = 0
        with disk.speaking(f"cannot sweep {shown(self._url)}"):
            for path in self._leftovers(older_than):
                try:
                    with disk.speaking(f"cannot remove {shown(str(path))}"):
                        _remove(path)
                except errors.DeniedError as error:
                    denied(error)
                except errors.WeighbridgeError:  # somebody is at work there, or was faster
                    continue
                removed += not os.path.lexists(path)
        return removed

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each stage file and folder that `sweep` would remove."""
        with disk.speaking(f"cannot look for leftovers in {shown(self._url)}"):
            yield from map(stages.size_of, self._leftovers(older_than))

    def _leftovers(self, older_than: float) -> Iterator[Path]:
        found = [Path(entry.path) for folder in self._stage_folders() for entry in _entries(folder)]
        deadline = self.now() - older_than if found else 0.0
        yield from (path for path in found if _last_change(path) <= deadline)

    def close(self) -> None:
        """Nothing is held open."""

    def _missing(self, key: str) -> errors.MissingError:
        self._check_mounted()
        return errors.MissingError(f"{shown(key)} is not there", why=f"{shown(self._url)} holds nothing under this key")

    def _check_mounted(self) -> None:
        """Raise UnreachableError when the marker was there and is gone: an empty mount point is no empty remote."""
        if os.path.lexists(self._root / layout.MARKER):
            self._marked = True
        elif self._marked:
            raise errors.UnreachableError(
                f"the remote {shown(self._url)} is gone",
                why=f"its {layout.MARKER} was there and is not any more",
                fix="mount its file system again",
            )

    def _is_staged(self, source: Path, found: os.stat_result) -> bool:
        """Return whether a file lies in our own private stage, where nobody else can write it."""
        if not source.is_relative_to(self._root):
            return False
        parts = source.relative_to(self._root).parts
        if len(parts) < 6 or ".." in parts or parts[0] != "models" or parts[2:4] != ("_wb", "stage"):
            return False
        folders = [self._root.joinpath(*parts[:depth]) for depth in range(5, len(parts))]
        # A second link means that somebody could write through another name: such a file is copied instead.
        return (
            all(stat.S_ISDIR(folder.lstat().st_mode) for folder in folders)
            and _is_private(folders[0])
            and found.st_nlink == 1
            and found.st_uid == os.geteuid()
        )

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        with disk.speaking(f"cannot read {shown(key)}"):
            try:
                descriptor = os.open(self._links.final(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise self._missing(key) from None
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._missing(key)
                yield descriptor
            finally:
                os.close(descriptor)

    def _stage_folders(self) -> Iterator[Path]:
        yield self._root / "_wb" / "stage"
        for entry in _entries(self._root / layout.MODELS):
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path) / "_wb" / "stage"


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _children(root: Path, base: str) -> list[tuple[str, bool, os.DirEntry[str]]]:
    """Return what stands in a folder, in the order of keys: a folder sorts as its name with a `/`."""
    found = []
    for entry in _entries(root / base):
        if entry.name.startswith(".") or not entry.name.isprintable() or entry.is_symlink():
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder or entry.is_file(follow_symlinks=False):
            found.append((entry.name, is_folder, entry))
    return sorted(found, key=lambda child: (child[0] + "/" if child[1] else child[0]).encode())


def _walk(root: Path, base: str, prefix: str, after: bytes | None) -> Iterator[Stat]:
    if is_stage(base.removesuffix("/")):
        return
    for name, is_folder, entry in _children(root, base):
        key = f"{base}{name}/" if is_folder else f"{base}{name}"
        place = key.encode()
        if is_folder:
            wanted = key.startswith(prefix) or prefix.startswith(key)
            if wanted and (after is None or place > after or after.startswith(place)):
                yield from _walk(root, key, prefix, after)
        elif key.startswith(prefix) and (after is None or place > after):
            with suppress(FileNotFoundError):  # deleted since its folder was listed
                found = entry.stat(follow_symlinks=False)
                yield Stat(key, found.st_size, None, found.st_mtime)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with as much of it as one may; what others are at work on stays. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # again, to hear why something is left
        else:
            path.unlink()


def _is_private(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _last_change(path: Path) -> float:
    """Return the time of the latest change in a file or a folder; what goes away meanwhile does not count."""
    latest = 0.0
    waiting = [path]
    while waiting:
        current = waiting.pop()
        with suppress(OSError):
            found = current.lstat()
            latest = max(latest, found.st_mtime)
            if stat.S_ISDIR(found.st_mode):
                waiting += [Path(entry.path) for entry in _entries(current)]
    return latest
