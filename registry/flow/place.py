"""Putting a finished folder where a person wants it: by one rename, over nothing but what we put there ourselves.

    ./.model.weighbridge-<id>/     hidden sibling of ./model, filled and synced first, kept when a pull is cut
    ./model/                       appears by one rename, or changes places with its predecessor in one step

A mount point cannot be renamed over. There the folder is filled inside, hidden, and its files are moved one by one:
weights first, then configs, the manifest last; a marker says so until the end. That is the weaker form, and printed
as such.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.registry import disk
from weighbridge.registry.errors import ConflictError, IntegrityError, UsageError
from weighbridge.registry.manifest import SIZE_LIMIT, Manifest, parse
from weighbridge.registry.refs import shown
from weighbridge.registry.types import PAPERS, RENDERED_FILES

PARTIAL: Final = ".weighbridge-partial.json"
"""In a folder that was pulled with --include or --exclude: which files it is meant to hold."""

UNFINISHED: Final = ".weighbridge-unfinished.json"
"""In a mount point that is being filled: which files belong to us while the manifest does not say so."""

OURS: Final = frozenset({*RENDERED_FILES, PARTIAL, UNFINISHED})

_IGNORED_IN_MOUNTS: Final = frozenset({"lost+found"})
_LAST: Final = (*PAPERS, PARTIAL, "manifest.json")
_AT_FDCWD: Final = -100
_NOREPLACE: Final = 1
_EXCHANGE: Final = 2


class Target(NamedTuple):
    """What stands where a version is to go."""

    path: Path
    mounted: bool
    """A mount point: the weaker form."""
    occupied: bool
    """There is something in it."""
    manifest: Manifest | None
    """The manifest of what we put there, when it was us."""
    foreign: tuple[str, ...]
    """Files in it that are not ours."""
    unfinished: bool = False
    """A mount point into which a pull was cut short."""

    def hidden(self, mark: str) -> Path:
        """Return the folder that is filled first."""
        if self.mounted:
            return self.path / f".weighbridge-{mark}"
        return self.path.with_name(f".{self.path.name[:180]}.weighbridge-{mark}")


def look(path: Path) -> Target:
    """Return what stands at a path. Raises ConflictError for a file or a link, UsageError for a path without a name."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link
    if not path.name:
        raise UsageError(f"'{shown(str(path))}' cannot be a target", fix="name a folder that may be made")
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Target(path, mounted=False, occupied=False, manifest=None, foreign=())
    if not stat.S_ISDIR(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a file"
        raise ConflictError(f"{shown(str(path))} is {kind}", why="a version is a folder", fix="name another target")
    with disk.speaking(f"cannot look into {shown(str(path))}"):
        mounted = path.is_mount()
        found = set(_files(path, top=_IGNORED_IN_MOUNTS if mounted else frozenset()))
        manifest = ours(path)
        listed = {f.path for f in manifest.files} if manifest else set()
        listed |= _unfinished(path)
        unfinished = (path / UNFINISHED).exists()
    foreign = sorted(found - listed - OURS) if manifest is not None or unfinished else sorted(found)
    return Target(path, mounted, bool(found), manifest, tuple(foreign), unfinished)


def ours(path: Path) -> Manifest | None:
    """Return the manifest of a folder that was pulled or published by us, or None."""
    try:
        return parse(disk.read_small(path / "manifest.json", SIZE_LIMIT))
    except (OSError, IntegrityError, UsageError):
        return None


def selection(path: Path) -> set[str] | None:
    """Return the files that a pull of some files only put here, None for a pull of all."""
    try:
        return set(map(str, json.loads(disk.read_small(path / PARTIAL, SIZE_LIMIT))["files"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def check(target: Target, *, force: bool) -> None:
    """Raise ConflictError unless the target may be filled: it is absent, empty or half filled, or ours and `force`."""
    where = shown(str(target.path))
    if not target.occupied:
        return
    if target.foreign:
        some = ", ".join(shown(name) for name in target.foreign[:3])
        more = f" and {len(target.foreign) - 3} more" if len(target.foreign) > 3 else ""
        raise ConflictError(
            f"{where} holds files that were not put there by a pull",
            why=f"{some}{more}",
            fix="name another target, or move them away",
        )
    if not force and not target.unfinished:
        raise ConflictError(f"{where} is there already", fix="name another target, or replace it with --force")


@contextmanager
def locked(folder: Path, busy: str = "another pull of this version into this target is running") -> Iterator[None]:
    """Make and hold a hidden folder alone. Raises ConflictError with the words `busy` when another process holds it.

    The lock is on the folder itself and dies with the process; where a file system cannot lock one, nothing is held.
    """
    with disk.speaking(f"cannot write {shown(str(folder.parent))}"):
        while True:
            with suppress(FileExistsError):
                folder.mkdir()
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # its holder just finished
            if _hold(descriptor, folder, busy):
                break
    try:
        yield
    finally:
        os.close(descriptor)


def _hold(descriptor: int, folder: Path, busy: str) -> bool:
    """Lock an open folder and see that it is still the one at its path, and ours."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConflictError(f"{shown(str(folder))} belongs to somebody else", fix="remove it, or name another target")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConflictError(busy, why=f"another process holds {shown(str(folder))}", fix="wait for it") from None
    except OSError as error:
        if error.errno not in {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}:
            os.close(descriptor)
            raise
    try:
        same = os.path.samestat(folder.lstat(), found)
    except FileNotFoundError:
        same = False
    if not same:
        os.close(descriptor)
    return same


def settle(hidden: Path, wanted: Iterable[str]) -> None:
    """Leave exactly the wanted files in a hidden folder, and make every name in it durable."""
    keep = set(wanted)
    with disk.speaking(f"cannot finish {shown(str(hidden))}"):
        for name in list(_files(hidden)):
            if name not in keep:
                (hidden / name).unlink()
        for folder, folders, files in os.walk(hidden, topdown=False):
            if not folders and not files and Path(folder) != hidden:
                Path(folder).rmdir()
                continue
            disk.sync_folder(folder)


def reveal(target: Target, hidden: Path, manifest: Manifest) -> None:
    """Make a finished hidden folder the target, replacing what of ours stood there."""
    with disk.speaking(f"cannot put {shown(str(target.path))} in place"):
        if target.mounted:
            _move_in(target, hidden, manifest)
        elif target.occupied:
            _exchange(hidden, target.path)
            disk.sync_folder(target.path.parent)
            shutil.rmtree(hidden)
        else:
            _rename_new(hidden, target.path)
            disk.sync_folder(target.path.parent)
        sweep(target)


def sweep(target: Target) -> None:
    """Remove what cut pulls left beside a target; what a running one holds stays."""
    prefix, folder = (".weighbridge-", target.path) if target.mounted else (target.hidden("").name, target.path.parent)
    for path in folder.glob(f"{_escaped(prefix)}*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a hidden folder that a cut transfer left; one that a running transfer holds stays."""
    if path.is_symlink() or not path.is_dir():
        return
    with suppress(ConflictError, OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if _hold(descriptor, path, ""):
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def sweep_scratch(scratch: Path, age: float) -> None:
    """Remove the folders in a scratch folder in which nothing changed for `age` seconds; what a process holds stays.

    Where folders cannot be locked, that something changes is all that shows a process at work.
    """
    with suppress(OSError):
        for folder in list(scratch.iterdir()) if scratch.is_dir() else ():
            if all(time.time() - changed > age for changed in _changes(folder)):
                remove(folder)


def _changes(folder: Path) -> Iterator[float]:
    """Yield when a folder, and whatever lies in it, changed last, in seconds since 1970."""
    yield folder.stat().st_mtime
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                yield Path(here, name).lstat().st_mtime


def _rename_new(hidden: Path, path: Path) -> None:
    """Rename to a name that is free or an empty folder; whoever got it in the meantime keeps it."""
    try:
        if not _renameat2(hidden, path, _NOREPLACE):
            hidden.rename(path)
    except FileExistsError:
        path_is_empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        if not path_is_empty:
            raise _taken(path) from None
        hidden.rename(path)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.ENOTDIR, errno.EEXIST}:
            raise _taken(path) from error
        raise


def _taken(path: Path) -> ConflictError:
    return ConflictError(
        f"{shown(str(path))} was made by somebody else in the meantime", fix="name another target, or use --force"
    )


def _exchange(hidden: Path, path: Path) -> None:
    """Swap two folders in one step; where the file system cannot, the old one steps aside first."""
    if _renameat2(hidden, path, _EXCHANGE):
        return
    aside = hidden.with_name(hidden.name + "-old")
    path.rename(aside)
    try:
        hidden.rename(path)
    except OSError:
        aside.rename(path)
        raise
    aside.rename(hidden)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Call renameat2 and return True, or False where libc or the file system lacks it. Raises OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}:
        return False
    raise OSError(code, os.strerror(code), str(new))


def _move_in(target: Target, hidden: Path, manifest: Manifest) -> None:
    """Fill a mount point file by file; a reader finds no manifest and no config until the rest is there."""
    old = target.manifest
    before = [f.path for f in old.files] if old else sorted(_unfinished(target.path))
    marker = target.path / UNFINISHED
    names = sorted({*before, *(f.path for f in manifest.files)})
    fresh = hidden / UNFINISHED
    fresh.write_text(json.dumps({"schema": "weighbridge/unfinished/1", "manifest": manifest.digest, "paths": names}))
    with fresh.open("rb") as stream:
        os.fsync(stream.fileno())
    fresh.rename(marker)
    disk.sync_folder(target.path)
    roles = {f.path: f.role for f in (*(old.files if old else ()), *manifest.files)}
    for name in ["manifest.json", *(n for n in before if roles.get(n) == "config"), *before, *OURS - {UNFINISHED}]:
        with suppress(FileNotFoundError):
            (target.path / name).unlink()
    order = {"weights": 0, "tokenizer": 1, "other": 1, "license": 1, "code": 1, "index": 2, "config": 3}
    moved = sorted((n for n in _files(hidden) if n not in _LAST), key=lambda n: (order.get(roles.get(n, ""), 1), n))
    for name in (*moved, *(n for n in _LAST if (hidden / n).exists())):
        place = target.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).rename(place)
    shutil.rmtree(hidden)
    folders = {parent for name in (*before, *moved) for parent in Path(name).parents if parent.name}
    for folder in sorted(folders, key=lambda f: -len(f.parts)):
        with suppress(OSError):
            (target.path / folder).rmdir()  # of the version before, and empty now
        if (target.path / folder).is_dir():
            disk.sync_folder(target.path / folder)
    disk.sync_folder(target.path)
    marker.unlink()
    disk.sync_folder(target.path)


def _unfinished(path: Path) -> set[str]:
    """Return the files that a cut pull into a mount point may have left."""
    try:
        return set(map(str, json.loads(disk.read_small(path / UNFINISHED, SIZE_LIMIT))["paths"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _files(folder: Path, top: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield every file, link and special file under a folder by its relative path; hidden folders of ours are not."""
    for path, folders, files in os.walk(folder):
        if Path(path) == folder:
            folders[:] = [n for n in folders if n not in top and not n.startswith(".weighbridge-")]
        links = [n for n in folders if (Path(path) / n).is_symlink()]
        for name in (*files, *links):
            yield (Path(path) / name).relative_to(folder).as_posix()


def _escaped(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
