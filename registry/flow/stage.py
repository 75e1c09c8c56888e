"""Reading the source safely: bytes that are hashed are the bytes that are sent.

    reflink   a private clone, taken in one step by the file system and hashed afterwards; costs no space
    copy      a private copy, hashed from the buffers that are written
    direct    no copy: a hash pass now, an upload pass that stops at the first difference

In all three the whole set is looked at before and after; whatever changed in between stops the job before anything is
visible. Nothing is ever written to the source's folder, not even a link.
"""

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from weighbridge.adapters import downloads
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.sift import Sieves
from weighbridge.registry import disk, errors, findings
from weighbridge.registry.flow import sources
from weighbridge.registry.flow.clone import share_blocks
from weighbridge.registry.flow.sources import SourceFile, SourceStat
from weighbridge.registry.hashing import PartHashes, sha256_bytes
from weighbridge.registry.refs import check_paths, shown
from weighbridge.registry.remotes.protocol import Progress
from weighbridge.registry.types import Facts, FileEntry, Finding, Value

T = TypeVar("T")
Mode = Literal["auto", "reflink", "copy", "direct"]

SESSION: Final = secrets.token_hex(16)
"""Names this process: what it hashed itself and nobody touched since need not be read again."""

READERS: Final = 2
"""Files read at the same time; hashing releases the interpreter lock, and the trainer needs the other cores."""

_CHECK_EVERY: Final = 32 << 20
"""Bytes after which the free space is looked at again."""

_SMALL: Final = 8 << 20
"""Bytes of a bundle that is not worth a thread."""


class Made(Protocol):
    """A file that is made out of a source while it is staged: its length, and its bytes."""

    @property
    def size(self) -> int:
        """Bytes that `parts` will give."""
        ...

    def parts(self) -> Iterable[bytes]:
        """Return the bytes, read from the source anew. Raises OSError, FormatFault."""
        ...

    def told(self) -> Iterable[Finding]:
        """Return what was found while all files that are made for a bundle passed; each may tell the same."""
        ...


class Bundle(Value, frozen=True):
    """The files of one artifact, hashed. `place` is the stage folder, None in direct mode.

    `inline` holds the bytes of replaced files in direct mode; `staged` the state of the staged files when `session`
    hashed them; `findings` what the values of the weights, and the parts they were made of, told while they passed;
    `parts` the sha256 of each part of the large files, where the remote checks those itself.
    """

    place: str | None
    mode: Literal["reflink", "copy", "direct"]
    files: list[FileEntry]
    sources: list[SourceStat]
    inline: dict[str, bytes] = msgspec.field(default_factory=dict)
    staged: list[SourceStat] = msgspec.field(default_factory=list)
    session: str = ""
    findings: list[Finding] = msgspec.field(default_factory=list)
    parts: dict[str, list[bytes]] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def stage(
    files: Sequence[SourceFile],
    place: Path | None,
    *,
    mode: Mode = "auto",
    transform: Mapping[str, bytes] | None = None,
    made: Mapping[str, Made] | None = None,
    inputs: Sequence[SourceFile] = (),
    reserve: int = 0,
    durable: bool = True,
    part: int = 0,
    progress: Progress | None = None,
) -> Bundle:
    """Hash the files of an artifact and, unless in direct mode, take a private copy of them in `place`.

    The copy is on the disk when this returns if it is to be `durable`; one that ends with its process need not be.

    `place` is private to us and holds nothing else; after an error it is gone. `transform` gives bytes that replace a
    file, `made` what is made out of one while it is read (always a copy, never direct), `inputs` what it is made out of
    where that is more than the one file; `reserve` is the number of bytes that stay free on the disk, `part` that of
    the parts whose hashes the remote wants to know. Every value of the weights is looked at as it passes, and what was
    downloaded is held against the record of its download. Raises SourceChangedError, VanishedError, DiskFullError,
    RefusedError where weights hold NaN or infinities, UsageError where a reflink is demanded and cannot be had, and
    what `made` raises of its own.
    """
    replaced = dict(transform or {})
    check_paths([file.path for file in files])
    converted = dict(made or {})
    strangers = sorted((replaced.keys() | converted.keys()) - {file.path for file in files})
    if strangers:
        raise errors.UsageError(f"'{shown(strangers[0])}' cannot be replaced", why="it is not among the files")
    before = [sources.look(file) for file in files]
    read = [sources.look(file) for file in inputs]
    if mode == "direct" or place is None:
        if converted:
            raise errors.UsageError(
                f"{shown(min(converted))} cannot be published without a staging folder",
                why="it is made out of another file, and what is published must be what was hashed",
                fix='set staging = "auto" or "copy"',
            )
        bundle = _direct(files, before, replaced, part, progress)
    else:
        try:
            bundle = _copied(
                files, before, replaced, converted, place,
                mode=mode, reserve=reserve, durable=durable, part=part, progress=progress,
            )  # fmt: skip
        except FormatFault as fault:
            shutil.rmtree(place, ignore_errors=True)
            for known in [*before, *read]:
                sources.same(known, sources.status(known.path, known.source))
            # The sources are what they were: they never held what their lists say.
            raise _unusable(fault) from fault
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    bundle = msgspec.structs.replace(bundle, sources=[*bundle.sources, *read])
    try:
        recheck(bundle)
    except errors.WeighbridgeError:
        discard(bundle)
        raise
    own = replaced.keys() | converted.keys()
    plain = [
        (e.path, known.source, e.sha256) for e, known in zip(bundle.files, before, strict=True) if e.path not in own
    ]
    told = [*bundle.findings, *downloads.compared(plain)]
    return msgspec.structs.replace(bundle, findings=told)


def seen(bundle: Bundle, facts: Facts) -> Facts:
    """Return the facts with what the staged values told."""
    return msgspec.structs.replace(facts, findings=[*facts.findings, *bundle.findings])


def recheck(bundle: Bundle) -> None:
    """Look at the whole source set again. Raises SourceChangedError or VanishedError, naming the file."""
    for known in bundle.sources:
        sources.same(known, sources.status(known.path, known.source))


def discard(bundle: Bundle) -> None:
    """Remove a bundle's stage folder; what was linked from it stays."""
    if bundle.place is not None:
        shutil.rmtree(bundle.place, ignore_errors=True)


def ready(bundle: Bundle, entry: FileEntry, progress: Progress | None = None) -> Path:
    """Return the file to upload for an entry, proven to be what was hashed.

    A staged file that this process hashed and nobody touched since is believed; any other is read again. Raises
    StageDamagedError. In direct mode the upload itself is the proof.
    """
    if bundle.place is None:
        return Path(next(known.source for known in bundle.sources if known.path == entry.path))
    path = Path(bundle.place, entry.path)
    known = next((staged for staged in bundle.staged if staged.path == entry.path), None)
    try:
        if bundle.session == SESSION and known == sources.stat_of(entry.path, str(path), os.lstat(path)):
            return path
        descriptor = disk.open_source(path)
        try:
            found = disk.hash_open(descriptor, progress=progress)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _damaged(entry.path, str(error.strerror)) from error
    if found != (entry.size, entry.sha256):
        raise _damaged(entry.path, f"its sha256 is {found[1][:12]}, when it was staged it was {entry.sha256[:12]}")
    return path


# ----------------------------------------------------------------------------------------------------------- the modes


def _direct(
    files: Sequence[SourceFile],
    before: Sequence[SourceStat],
    replaced: Mapping[str, bytes],
    part: int,
    progress: Progress | None,
) -> Bundle:
    watch, sieves, parts = _Watch(progress), Sieves(), _Parts(part)

    def one(file: SourceFile, known: SourceStat) -> FileEntry:
        if file.path in replaced:
            return _entry_of(file, replaced[file.path])
        descriptor = sources.opened(known)
        see = parts.over(file.path, known.size, sieves.over(file.path, file.role))
        try:
            with disk.speaking(f"cannot read {shown(known.source)}"):
                size, digest = disk.hash_open(descriptor, progress=watch.moved, see=see)
                sources.same(known, sources.stat_of(known.path, known.source, os.fstat(descriptor)))
        finally:
            os.close(descriptor)
        return FileEntry(path=file.path, size=size, sha256=digest, role=file.role)

    entries = _each(one, files, before, watch)
    return Bundle(
        place=None,
        mode="direct",
        files=entries,
        sources=list(before),
        inline=dict(replaced),
        findings=sieves.findings(),
        parts=parts.digests(),
    )


def _copied(
    files: Sequence[SourceFile],
    before: Sequence[SourceStat],
    replaced: Mapping[str, bytes],
    made: Mapping[str, Made],
    place: Path,
    *,
    mode: Mode,
    reserve: int,
    durable: bool,
    part: int,
    progress: Progress | None,
) -> Bundle:
    with disk.speaking(f"cannot stage in {shown(str(place))}"):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        folders = _make_folders([file.path for file in files], place)
        copied = [known for known in before if known.path not in replaced and known.path not in made]
        clone = mode != "copy" and _can_clone(copied, place)
        if mode == "reflink" and not clone:
            raise errors.UsageError(
                f"{shown(str(place))} cannot hold reflinks of these files",
                why="it lies on another file system, or on one that cannot share blocks",
                fix='set staging = "copy" or "auto"',
            )
        watch, sieves, parts = _Watch(progress, place, reserve), Sieves(), _Parts(part)
        fresh = sum(map(len, replaced.values())) + sum(one.size for one in made.values())
        watch.demand(fresh + (0 if clone else sum(known.size for known in copied)))

    def one(file: SourceFile, known: SourceStat) -> tuple[FileEntry, SourceStat]:
        target = place / file.path
        size = made[file.path].size if file.path in made else known.size
        see = parts.over(file.path, size, sieves.over(file.path, file.role))
        with disk.speaking(f"cannot stage {shown(file.path)}"):
            descriptor = disk.create_file(target)
            try:
                if file.path in replaced:
                    disk.write_all(descriptor, replaced[file.path])
                    entry = _entry_of(file, replaced[file.path])
                elif file.path in made:
                    entry = _make(file, known, made[file.path], descriptor, moved=watch.moved, see=see)
                else:
                    entry = _take(file, known, descriptor, clone=clone, moved=watch.moved, see=see)
                if durable:
                    os.fsync(descriptor)
                return entry, sources.stat_of(file.path, str(target), os.fstat(descriptor))
            finally:
                os.close(descriptor)

    taken = _each(one, files, before, watch)
    with disk.speaking(f"cannot stage in {shown(str(place))}"):
        for folder in [*reversed(folders), place.parent] if durable else []:
            disk.sync_folder(folder)
    told = sieves.findings()
    for one_made in made.values():
        told += [found for found in one_made.told() if found not in told]
    return Bundle(
        place=str(place),
        mode="reflink" if clone else "copy",
        files=[entry for entry, _ in taken],
        sources=list(before),
        staged=[staged for _, staged in taken],
        session=SESSION,
        findings=told,
        parts=parts.digests(),
    )


def _take(
    file: SourceFile, known: SourceStat, target: int, *, clone: bool, moved: Progress, see: disk.See | None
) -> FileEntry:
    source = sources.opened(known)
    try:
        if clone and known.size:
            share_blocks(target, source)
            size, digest = disk.hash_open(target, progress=moved, see=see)
        else:
            size, digest = disk.copy_hashing(source, target, limit=known.size, progress=moved, see=see)
        sources.same(known, sources.stat_of(known.path, known.source, os.fstat(source)))
    finally:
        os.close(source)
    if size != known.size:
        raise sources.changed(file.path, f"{size} bytes were read, it had {known.size}")
    return FileEntry(path=file.path, size=size, sha256=digest, role=file.role)


def _make(
    file: SourceFile, known: SourceStat, made: Made, target: int, *, moved: Progress, see: disk.See | None
) -> FileEntry:
    """Write what is made out of a source; the source must be the same before and after."""
    digest, size = hashlib.sha256(), 0
    source = sources.opened(known)
    try:
        for part in made.parts():
            digest.update(part)
            disk.write_all(target, part)
            if see is not None:
                see(part)
            size += len(part)
            moved(len(part))
        sources.same(known, sources.stat_of(known.path, known.source, os.fstat(source)))
    finally:
        os.close(source)
    return FileEntry(path=file.path, size=size, sha256=digest.hexdigest(), role=file.role)


def _can_clone(copied: Sequence[SourceStat], place: Path) -> bool:
    largest = max(copied, key=lambda known: known.size, default=None)
    if largest is None or not largest.size:
        return False
    probe = place / f".{secrets.token_hex(8)}"
    source = sources.opened(largest)
    try:
        target = disk.create_file(probe)
        try:
            share_blocks(target, source)
        except OSError:
            return False
        finally:
            os.close(target)
            probe.unlink()
    finally:
        os.close(source)
    return True


def _make_folders(paths: Iterable[str], place: Path) -> list[Path]:
    """Create the folders of a bundle and return all of them, each before those inside it."""
    wanted = {place}
    for path in paths:
        wanted |= {place / parent for parent in Path(path).parents}
    folders = sorted(wanted)
    for folder in folders[1:]:
        folder.mkdir(mode=0o700)
    return folders


def _each(
    one: Callable[[SourceFile, SourceStat], T],
    files: Sequence[SourceFile],
    before: Sequence[SourceStat],
    watch: "_Watch",
) -> list[T]:
    """Treat every file, large ones first and two at a time; after an error the others end at their next buffer."""
    if len(files) < 2 or sum(known.size for known in before) < _SMALL:
        return list(map(one, files, before))

    def guarded(index: int) -> T:
        try:
            return one(files[index], before[index])
        except BaseException:
            watch.stopped = True
            raise

    order = sorted(range(len(files)), key=lambda i: -before[i].size)
    with ThreadPoolExecutor(READERS, thread_name_prefix="stage") as pool:
        running = {i: pool.submit(guarded, i) for i in order}
        try:
            wait(running.values())
        except BaseException:  # an interrupt ends the readers as well
            watch.stopped = True
            raise
    failed = [error for run in running.values() if (error := run.exception()) is not None]
    for error in sorted(failed, key=lambda e: isinstance(e, _GivenUpError)):
        raise error
    return [running[i].result() for i in range(len(files))]


class _Parts:
    """Hashes the parts of the files that have several."""

    def __init__(self, part: int) -> None:
        self._part = part
        self._hashes: dict[str, PartHashes] = {}

    def over(self, path: str, size: int, see: disk.See | None) -> disk.See | None:
        """Return what is shown the bytes of a file: `see`, and what hashes its parts."""
        if not self._part or size <= self._part:
            return see
        hashes = self._hashes[path] = PartHashes(self._part)
        if see is None:
            return hashes.see

        def both(block: bytes | bytearray) -> None:
            see(block)
            hashes.see(block)

        return both

    def digests(self) -> dict[str, list[bytes]]:
        """Return the hashes by path."""
        return {path: hashes.digests() for path, hashes in self._hashes.items()}


class _GivenUpError(Exception):
    """Another file of the bundle failed; this one is not read to its end."""


class _Watch:
    """Counts bytes, passes them on, keeps the reserve free, and stops a reader when another one has failed."""

    def __init__(self, progress: Progress | None, place: Path | None = None, reserve: int = 0) -> None:
        self.stopped = False
        self._progress = progress
        self._place = place
        self._reserve = reserve
        self._since = 0
        self._lock = threading.Lock()

    def demand(self, needed: int) -> None:
        """Raise DiskFullError when the disk would fall under its reserve."""
        if self._place is None:
            return
        free = disk.free_bytes(self._place)
        if free - needed < self._reserve:
            raise errors.DiskFullError(
                f"there is no room to stage in {shown(str(self._place))}",
                why=f"{needed:,} bytes are needed; {free:,} are free, of which {self._reserve:,} are kept as a reserve",
                fix="free some space, or lower disk_reserve" if self._reserve else "free some space, then repeat",
                needed=needed,
                free=free,
                reserve=self._reserve,
            )

    def moved(self, count: int) -> None:
        """Take note of bytes that were read."""
        if self.stopped:
            raise _GivenUpError
        with self._lock:
            self._since += count
            due = self._since >= _CHECK_EVERY
            if due:
                self._since = 0
            if self._progress is not None:
                self._progress(count)
        if due:
            self.demand(0)


def _unusable(fault: FormatFault) -> errors.RefusedError:
    found = findings.finding(fault.code, str(fault.data.get("bad_tensor") or ""), fault.message)
    return errors.RefusedError("the weights cannot be made", why=fault.message, findings=[found])


def _damaged(path: str, why: str) -> errors.StageDamagedError:
    return errors.StageDamagedError(f"the staged copy of {shown(path)} is damaged", why=why, fix="stage it again")


def _entry_of(file: SourceFile, body: bytes) -> FileEntry:
    return FileEntry(path=file.path, size=len(body), sha256=sha256_bytes(body), role=file.role)
