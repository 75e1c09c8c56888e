"""Reading the source safely: private copies, clones, direct reading, and every way a source can change meanwhile."""

import fcntl
import hashlib
import os
import stat as modes
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import disk, errors
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Bundle, Mode, discard, ready, recheck, stage
from weighbridge_testlib.publishing import sources, write_files

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tok/tokenizer.json": b"", "a/b/c.txt": b"deep"}
BIG = {
    "model-1.safetensors": os.urandom(1 << 20) * 9,
    "model-2.safetensors": os.urandom(1 << 20) * 3,
    "config.json": b"{}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the trainer's folder."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a stage folder that does not exist yet."""
    return tmp_path / "staging" / "0123abcd"


def seen(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return what a trainer could notice of its files: content is compared elsewhere."""
    return {
        str(p): (s.st_ino, s.st_mode, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns, s.st_size)
        for p in sorted(folder.rglob("*"))
        for s in [p.lstat()]
    }


def check(bundle: Bundle, files: dict[str, bytes]) -> None:
    """Assert that a bundle describes exactly these files."""
    assert {f.path: (f.size, f.sha256) for f in bundle.files} == {
        path: (len(body), hashlib.sha256(body).hexdigest()) for path, body in files.items()
    }


@pytest.mark.parametrize("files", [FILES, BIG], ids=["small", "big"])
@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_a_stage_is_a_private_copy(folder: Path, place: Path, mode: Mode, files: dict[str, bytes]) -> None:
    """Every file lies in the stage with its bytes, read-only, where nobody else can enter; the source is untouched."""
    written = write_files(folder, files)
    before = seen(folder)
    bundle = stage(written, place, mode=mode)
    check(bundle, files)
    assert [f.role for f in bundle.files] == [f.role for f in written]
    assert {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()} == files
    for path in place.rglob("*"):
        assert modes.S_IMODE(path.stat().st_mode) & 0o222 == (0o200 if path.is_dir() else 0)
        assert path.stat().st_nlink == 1 or path.is_dir()
    assert modes.S_IMODE(place.stat().st_mode) == 0o700
    assert seen(folder) == before
    assert bundle.mode in {"copy", "reflink"}
    assert bundle.size == sum(map(len, files.values()))


@pytest.mark.parametrize("files", [FILES, BIG], ids=["small", "big"])
def test_direct_mode_copies_nothing(folder: Path, place: Path, files: dict[str, bytes]) -> None:
    """In direct mode the files are hashed where they lie and nothing is written."""
    bundle = stage(write_files(folder, files), place, mode="direct")
    check(bundle, files)
    assert (bundle.place, bundle.mode) == (None, "direct")
    assert not place.exists()
    assert ready(bundle, bundle.files[0]) == folder / bundle.files[0].path
    assert stage(sources(folder, files), None).mode == "direct"


def test_files_can_be_replaced(folder: Path, place: Path) -> None:
    """Given bytes take the place of a file's own, in a stage and in direct mode."""
    written = write_files(folder, FILES)
    wanted = FILES | {"config.json": b'{"rewritten":true}'}
    staged = stage(written, place, transform={"config.json": b'{"rewritten":true}'})
    check(staged, wanted)
    assert (place / "config.json").read_bytes() == b'{"rewritten":true}'
    direct = stage(written, None, transform={"config.json": b'{"rewritten":true}'})
    check(direct, wanted)
    assert direct.inline == {"config.json": b'{"rewritten":true}'}
    assert (folder / "config.json").read_bytes() == b"{}"
    with pytest.raises(errors.UsageError):
        stage(written, place, transform={"other.json": b""})


def test_progress_adds_up(folder: Path, place: Path) -> None:
    """Progress counts each byte once."""
    for mode in ("auto", "direct"):
        moved: list[int] = []
        stage(write_files(folder, BIG), place / mode, mode=mode, progress=moved.append)
        assert sum(moved) == sum(len(body) for body in BIG.values())


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ".hidden", "a\nb"])
def test_unsafe_paths_are_refused(folder: Path, place: Path, path: str) -> None:
    """A path that leaves the bundle is refused before anything is read or written."""
    write_files(folder, {"f": b""})
    with pytest.raises(errors.UsageError):
        stage([SourceFile(path=path, source=str(folder / "f"), size=0, role="other")], place)
    assert not place.exists()


# ------------------------------------------------------------------------------------------------- sources that change


def overwrite(path: Path) -> None:
    """Write other bytes of the same length in place."""
    with path.open("r+b") as stream:
        stream.write(b"X")


def append(path: Path) -> None:
    """Make the file longer."""
    with path.open("ab") as stream:
        stream.write(b"more")


def truncate(path: Path) -> None:
    """Make the file shorter."""
    os.truncate(path, path.stat().st_size - 1)


def exchange(path: Path) -> None:
    """Put another file of the same bytes in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


def link_away(path: Path) -> None:
    """Put a symbolic link in its place."""
    os.link(path, path.with_name("other"))
    path.with_name("link").symlink_to(path.with_name("other"))
    path.with_name("link").rename(path)


CHANGES = [overwrite, append, truncate, exchange, link_away]


@pytest.mark.parametrize("mode", ["copy", "direct", "auto"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("victim", sorted(BIG))
def test_a_source_that_changes_while_it_is_read_stops_the_job(
    folder: Path, place: Path, mode: Mode, change: Callable[[Path], None], victim: str
) -> None:
    """Whatever happens to any file of the set between the first and the last look, no bundle comes out of it."""
    written = write_files(folder, BIG)
    done: list[int] = []

    def meddle(count: int) -> None:
        if not done:
            change(folder / victim)
        done.append(count)

    with pytest.raises(errors.SourceChangedError, match=victim):
        stage(written, place, mode=mode, progress=meddle)
    assert not place.exists()


@pytest.mark.parametrize("mode", ["copy", "direct"])
def test_a_source_that_vanishes_is_named(folder: Path, place: Path, mode: Mode) -> None:
    """A file, or the whole folder, that rotation removes ends in VanishedError, before and in the middle."""
    written = write_files(folder, BIG)
    done: list[int] = []

    def remove(count: int) -> None:
        if not done:
            folder.rename(folder.with_name("gone"))
        done.append(count)

    with pytest.raises(errors.VanishedError, match="is gone"):
        stage(written, place, mode=mode, progress=remove)
    assert not place.exists()
    with pytest.raises(errors.VanishedError, match=r"model-1\.safetensors"):
        stage(written, place, mode=mode)


def test_a_source_of_another_size_than_judged_is_refused(folder: Path, place: Path) -> None:
    """Size, time and inode of the scan tie what is staged to what was judged."""
    (written,) = write_files(folder, {"config.json": b"{}"})
    found = (folder / "config.json").stat()
    good = msgspec.structs.replace(written, mtime_ns=found.st_mtime_ns, ino=found.st_ino)
    assert stage([good], None).files[0].size == 2
    for wrong in ({"size": 3}, {"mtime_ns": 5}, {"ino": 5}):
        with pytest.raises(errors.SourceChangedError):
            stage([msgspec.structs.replace(good, **wrong)], place)


def test_links_pipes_and_folders_are_not_read(folder: Path, place: Path) -> None:
    """Only regular files are staged; a pipe does not block."""
    (folder / "real").write_bytes(b"x")
    (folder / "link").symlink_to(folder / "real")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe", "."):
        source = SourceFile(path="f", source=str(folder / name), size=1, role="other")
        with pytest.raises(errors.SourceChangedError):
            stage([source], place)
    assert not place.exists()


def test_an_unreadable_source_is_named(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source without permission raises DeniedError with its path."""
    written = write_files(folder, {"config.json": b"{}"})

    def refuse(path: str) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(disk, "open_source", refuse)
    with pytest.raises(errors.DeniedError, match=r"config\.json"):
        stage(written, place)


def test_the_set_is_looked_at_again_before_the_decision(folder: Path) -> None:
    """`recheck` finds any later change or loss."""
    written = write_files(folder, FILES)
    bundle = stage(written, None)
    recheck(bundle)
    overwrite(folder / "config.json")
    with pytest.raises(errors.SourceChangedError, match=r"config\.json"):
        recheck(bundle)
    (folder / "config.json").unlink()
    with pytest.raises(errors.VanishedError):
        recheck(bundle)


# --------------------------------------------------------------------------------------------------- disks and reflinks


def test_the_reserve_stays_free(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and while copying, the disk never falls under its reserve; the message has the numbers."""
    written = write_files(folder, BIG)
    monkeypatch.setattr(staging, "_can_clone", lambda *_: False)
    monkeypatch.setattr(disk, "free_bytes", lambda _: 100 << 20)
    with pytest.raises(errors.DiskFullError) as caught:
        stage(written, place, reserve=95 << 20)
    needed = sum(map(len, BIG.values()))
    assert caught.value.data == {"needed": needed, "free": 100 << 20, "reserve": 95 << 20}
    assert f"{needed:,} bytes" in str(caught.value.why)
    assert not place.exists()
    assert stage(written, place, reserve=1 << 20).mode == "copy"
    shrinking = iter([100 << 20, 1 << 20, 1 << 20])
    monkeypatch.setattr(disk, "free_bytes", lambda _: next(shrinking))
    monkeypatch.setattr(staging, "_CHECK_EVERY", 4 << 20)
    with pytest.raises(errors.DiskFullError):
        stage(written, place.with_name("second"), reserve=2 << 20)
    assert not place.with_name("second").exists()


def test_a_full_disk_leaves_nothing(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle of a copy becomes DiskFullError, and the stage is removed."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "copy_hashing", full)
    monkeypatch.setattr(staging, "_can_clone", lambda *_: False)
    with pytest.raises(errors.DiskFullError):
        stage(write_files(folder, FILES), place)
    assert not place.exists()


def test_a_reflink_that_cannot_be_had_is_refused(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reflink` fails clearly where blocks cannot be shared, instead of copying."""
    monkeypatch.setattr(staging, "_can_clone", lambda *_: False)
    with pytest.raises(errors.UsageError, match="reflink"):
        stage(write_files(folder, FILES), place, mode="reflink")
    assert not place.exists()


def test_a_clone_is_hashed_from_the_clone(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reflink the private clone is read, so that later writes to the source do not count."""
    asked: list[int] = []

    def clone(target: int, request: int, source: int) -> int:
        asked.append(request)
        os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    bundle = stage(write_files(folder, BIG), place)
    check(bundle, BIG)
    assert bundle.mode == "reflink"
    assert set(asked) == {0x40049409}
    assert {p.name for p in place.iterdir()} == set(BIG)


# --------------------------------------------------------------------------------------------- what is staged is kept


def reread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the files that are hashed from now on."""
    count: list[int] = []
    real = disk.hash_open

    def hash_open(descriptor: int, **keywords: object) -> tuple[int, str]:
        count.append(descriptor)
        return real(descriptor, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "hash_open", hash_open)
    return count


def test_a_fresh_stage_is_believed(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process hashed and nobody touched is not read again."""
    bundle = stage(write_files(folder, FILES), place)
    count = reread(monkeypatch)
    assert [ready(bundle, entry) for entry in bundle.files] == [place / entry.path for entry in bundle.files]
    assert count == []


def test_a_stage_of_another_process_is_read_again(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the stored record is compared with the bytes."""
    bundle = stage(write_files(folder, FILES), place)
    stored = msgspec.json.decode(msgspec.json.encode(bundle), type=Bundle)
    assert stored == bundle
    count = reread(monkeypatch)
    later = msgspec.structs.replace(stored, session="another")
    assert [ready(later, entry) for entry in later.files] == [place / entry.path for entry in later.files]
    assert len(count) == len(bundle.files)


@pytest.mark.parametrize("session", ["same", "another"])
def test_a_damaged_stage_is_named(folder: Path, place: Path, session: str) -> None:
    """A flipped bit, a truncated or a lost file in the stage raises StageDamagedError, in any process."""
    bundle = stage(write_files(folder, FILES), place)
    if session == "another":
        bundle = msgspec.structs.replace(bundle, session="another")
    entry = next(e for e in bundle.files if e.path == "model.safetensors")
    victim = place / entry.path
    victim.chmod(0o600)
    body = bytearray(victim.read_bytes())
    body[100] ^= 1
    for damage in (bytes(body), bytes(body[:-1]), None):
        if damage is None:
            victim.unlink()
        else:
            victim.write_bytes(damage)
        with pytest.raises(errors.StageDamagedError, match=r"model\.safetensors"):
            ready(bundle, entry)


def test_discarding_twice_is_harmless(folder: Path, place: Path) -> None:
    """A stage is removed once; the second time there is nothing to do."""
    bundle = stage(write_files(folder, FILES), place)
    discard(bundle)
    discard(bundle)
    discard(stage(sources(folder, FILES), None))
    assert not place.exists()
    assert (folder / "config.json").exists()
