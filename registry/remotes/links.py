"""Objects of a folder that appear whole or not at all, once, and stay: part file, sync, link, sync of the folder.

`link` refuses a name that is taken, so that of two racers one wins; a kill leaves a part file, never a torn object.
What was acknowledged survives a power loss, and so does what we let anybody rely on: an object that another writer
linked a moment ago is synced before it is reported as there (`Links.settle`).
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from weighbridge.registry import disk, errors, layout
from weighbridge.registry.refs import check_key, shown

_STAGE: Final = re.compile(r"(?:models/[^/]+/)?_wb/stage(?:/.*)?")
_MODEL: Final = re.compile(r"models/[^/]+(?=/)")
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_REMEMBERED: Final = 4096


def is_stage(key: str) -> bool:
    """Return whether a key lies where only unfinished things are."""
    return _STAGE.fullmatch(key) is not None


class Links:
    """The writing half of a directory remote; safe for many threads and processes at once."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.url = url
        self._durable: set[Path] = set()  # folders whose own names are known to be on the disk
        self._settled: dict[str, None] = {}  # objects known to be on the disk; bounded
        self._case_checked = False

    def final(self, key: str) -> Path:
        """Return where an object lies. Raises UsageError for a key that a folder cannot hold."""
        check_key(key)
        if is_stage(key) or any(part.startswith(".") for part in key.split("/")):
            raise errors.UsageError(f"'{shown(key[:200])}' is not a key here", why="that place is kept for stage files")
        return self.root / key

    def refuse_taken(self, key: str, final: Path) -> None:
        """Raise ExistsError when an object is there already; whoever hears of it may rely on it."""
        if os.path.lexists(final):
            self.settle(key, final)
            raise errors.ExistsError(f"{shown(key)} is taken", why=f"{shown(self.url)} holds an object of that key")

    @contextmanager
    def part(self, key: str, size: int = 0) -> Iterator[tuple[Path, int]]:
        """Give a new part file and its descriptor, on the way to `key`; it is gone afterwards. Raises OSError."""
        folder = self.stage_folder(key)
        if size and (free := disk.free_bytes(folder)) < size:
            raise errors.DiskFullError(
                f"{shown(self.url)} has no room for {shown(key)}",
                why=f"{size} bytes are needed, {free} are free",
                fix="free some space, then repeat",
                needed=size,
                free=free,
            )
        part = folder / f"{secrets.token_hex(12)}.part"
        try:
            descriptor = disk.create_file(part)
        except FileNotFoundError:  # somebody tidied up: make the folder again
            self._durable.clear()
            self.stage_folder(key)
            descriptor = disk.create_file(part)
        try:
            yield part, descriptor
        finally:
            os.close(descriptor)
            with suppress(OSError):
                part.unlink()

    def stage_folder(self, key: str) -> Path:
        """Return the folder for unfinished things on the way to `key`, made when needed. Raises OSError."""
        match = _MODEL.match(key)
        folder = self.root / (match[0] if match else "") / "_wb" / "stage"
        self.make(folder, begin=key == layout.MARKER)
        if not self._case_checked:
            if os.path.lexists(folder.with_name("STAGE")):
                raise errors.UsageError(
                    f"{shown(self.url)} cannot be a remote",
                    why="its file system takes names that differ by case alone for the same",
                    fix="choose a folder on a file system that tells 'a' from 'A'",
                )
            self._case_checked = True
        return folder

    def make(self, folder: Path, *, begin: bool = False) -> None:
        """Create a folder and those above it, and make their names durable, whoever created them. Raises OSError.

        The root itself is only created to `begin` a remote: where it is missing otherwise, its mount probably is.
        """
        if folder in self._durable:
            return
        if folder == self.root:
            self._make_root(begin=begin)
        else:
            self.make(folder.parent, begin=begin)
            try:
                folder.mkdir()
                self._open_up(folder)
            except FileNotFoundError:  # the one above was removed since we remembered it
                self._durable.clear()
                self.make(folder, begin=begin)
                return
            except FileExistsError:
                if not stat.S_ISDIR(folder.lstat().st_mode):  # nor do we follow a link out of the remote
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
            disk.sync_folder(folder.parent)
        self._durable.add(folder)

    def _make_root(self, *, begin: bool) -> None:
        if self.root.is_dir():
            return
        if not begin:
            raise errors.UnreachableError(
                f"there is no remote at {shown(self.url)}",
                why="its folder does not exist; where it did, its file system is not mounted",
                fix="mount it, correct the URL, or begin a new remote with: registry init",
            )
        missing = [self.root]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
            disk.sync_folder(folder.parent)

    def _open_up(self, folder: Path) -> None:
        """Give a folder of ours the permissions of the root: who shares the root shares what is in it."""
        wanted = stat.S_IMODE(self.root.stat().st_mode) & 0o777 | 0o700
        made = stat.S_IMODE(folder.stat().st_mode)
        if made & 0o777 != wanted:
            folder.chmod(made & ~0o777 | wanted)

    def seal(self, descriptor: int) -> None:
        """Let those read a file who can read the root, and nobody write it; make its bytes durable. Raises OSError.

        A daemon's umask is narrow on purpose; it must not decide what a team can read.
        """
        wanted = 0o400 | stat.S_IMODE(self.root.stat().st_mode) & 0o044
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != wanted:
            os.fchmod(descriptor, wanted)
        os.fsync(descriptor)

    def link(self, source: Path, final: Path, key: str) -> None:
        """Give a synced file its final name, durably. Raises ExistsError, OutcomeUnknownError, OSError."""
        self.make(final.parent, begin=key == layout.MARKER)
        try:
            try:
                os.link(source, final, follow_symlinks=False)
            except FileNotFoundError:
                self._durable.clear()
                self.make(final.parent)
                os.link(source, final, follow_symlinks=False)
        except FileExistsError:
            # A network file system may carry out a link, lose the answer and refuse its own repetition.
            if not _same_file(source, final):
                self.settle(key, final)
                raise errors.ExistsError(f"{shown(key)} is taken", why="somebody else stored it first") from None
        except OSError as error:
            raise self._unlinkable(error, source) from error
        try:
            disk.sync_folder(final.parent)
        except OSError as error:
            raise errors.OutcomeUnknownError(
                f"{shown(key)} may not be stored", why=f"its folder could not be synced: {error}", fix="repeat"
            ) from error
        self._remember(key)

    def settle(self, key: str, final: Path) -> None:
        """Make an object durable that another writer linked."""
        if key in self._settled:
            return
        # A reader without the right to sync loses nothing: the writer that acknowledges does it as well.
        with suppress(OSError):
            for folder in final.parents:
                disk.sync_folder(folder)
                if folder in self._durable or folder == self.root:
                    break
            self._remember(key)

    def forget(self, key: str) -> None:
        """Drop what is known of an object that was deleted."""
        self._settled.pop(key, None)

    def _remember(self, key: str) -> None:
        if len(self._settled) >= _REMEMBERED:
            self._settled.clear()
        self._settled[key] = None

    def _unlinkable(self, error: OSError, source: Path) -> errors.WeighbridgeError:
        if error.errno == errno.EXDEV:
            return errors.UsageError(
                f"{shown(self.url)} cannot be a remote as it is",
                why="it spans several file systems, and a link cannot cross them",
                fix="keep the whole remote on one file system, or use one remote for each",
            )
        if error.errno in _NO_LINKS:
            probe = source.with_name(f"{source.name}.probe")
            try:
                os.link(source, probe, follow_symlinks=False)
                probe.unlink()
            except OSError:
                return errors.UsageError(
                    f"{shown(self.url)} cannot be a remote",
                    why=f"its file system has no hard links ({os.strerror(error.errno)}), "
                    "without which two writers could overwrite each other",
                    fix="choose a folder on ext4, xfs, btrfs, zfs or NFS, or an S3 remote",
                )
        return disk.translate(error, f"cannot store an object in {shown(self.url)}")


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except FileNotFoundError:
        return False
