"""The remote that is a folder: conformance, and what only a folder can get wrong."""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.registry import disk, errors
from weighbridge.registry.remotes.directory import DirectoryRemote, open_directory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge_testlib.remote_conformance import SAMPLE, RemoteConformance, write
from weighbridge_testlib.version_conformance import VersionConformance


class TestDirectory(RemoteConformance):
    """The directory remote keeps the contract of all remotes."""

    def open(self, place: Path) -> Remote:
        """Open the folder."""
        return DirectoryRemote(place)

    def opener(self) -> Callable[[Path], Remote] | None:
        """Other processes open the same folder."""
        return DirectoryRemote


class TestDirectoryVersions(VersionConformance):
    """The flow finds on the directory remote what it needs of every remote."""

    def open(self, place: Path) -> Remote:
        """Open the folder."""
        return DirectoryRemote(place)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty folder for a remote."""
    root = tmp_path / "remote"
    root.mkdir()
    return root


def files(root: Path) -> list[str]:
    """Return every file below a folder, hidden ones included."""
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())


def test_nothing_is_left_in_the_stage(root: Path, tmp_path: Path) -> None:
    """After creates, uploads and their failures no part file remains."""
    remote = DirectoryRemote(root)
    remote.create("weighbridge.json", b"{}")
    remote.upload("models/m/v1/w", *write(tmp_path / "w", b"weights"))
    with pytest.raises(errors.ExistsError):
        remote.create("weighbridge.json", b"{}")
    with pytest.raises(errors.SourceChangedError):
        remote.upload("models/m/v1/x", tmp_path / "w", 7, "0" * 64)
    remote.now()
    assert files(root) == ["models/m/v1/w", "weighbridge.json"]


@pytest.mark.parametrize(("root_mode", "file_mode"), [(0o755, 0o444), (0o2770, 0o440), (0o775, 0o444), (0o700, 0o400)])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_who_shares_the_root_shares_what_is_in_it(
    root: Path, tmp_path: Path, root_mode: int, file_mode: int, umask: int
) -> None:
    """Objects can be read by those who can read the root, whatever the writer's umask, and written by nobody."""
    root.chmod(root_mode)
    remote = DirectoryRemote(root)
    previous = os.umask(umask)
    try:
        remote.create("weighbridge.json", b"{}")
        remote.upload("models/m/v1/w", *write(tmp_path / "w", b"weights"))
        stage = remote.stage("m", "aa")
        assert stage is not None
        remote.upload("models/m/v1/s", *write(stage / "s", b"staged"))
    finally:
        os.umask(previous)
    for key in ("weighbridge.json", "models/m/v1/w", "models/m/v1/s"):
        assert stat.S_IMODE((root / key).stat().st_mode) == file_mode
    for folder in ("models", "models/m/v1", "models/m/_wb/stage"):
        assert stat.S_IMODE((root / folder).stat().st_mode) == root_mode
    assert stat.S_IMODE(stage.stat().st_mode) & 0o777 == 0o700


def test_a_staged_file_is_linked_not_copied(root: Path) -> None:
    """A file in our own stage becomes the object itself: same inode, no second copy."""
    remote = DirectoryRemote(root)
    stage = remote.stage("m", "aa")
    assert stage is not None
    (stage / "tokenizer").mkdir()
    source, size, sha256 = write(stage / "tokenizer" / "t.json", SAMPLE)
    remote.upload("models/m/v1/tokenizer/t.json", source, size, sha256)
    assert source.stat().st_ino == (root / "models/m/v1/tokenizer/t.json").stat().st_ino


def test_a_staged_file_of_another_size_is_refused(root: Path) -> None:
    """A staged file that is not as long as its record never becomes visible."""
    remote = DirectoryRemote(root)
    stage = remote.stage("m", "aa")
    assert stage is not None
    source, size, sha256 = write(stage / "w", b"weights")
    with pytest.raises(errors.SourceChangedError):
        remote.upload("models/m/v1/w", source, size + 1, sha256)
    assert list(remote.list("")) == []


@pytest.mark.parametrize("case", ["second link", "open stage", "link for a folder", "outside", "climbing"])
def test_what_others_can_write_is_copied_and_hashed(root: Path, tmp_path: Path, case: str) -> None:
    """A file that is not private, however it came into the stage, is copied while hashing instead of being linked."""
    remote = DirectoryRemote(root)
    stage = remote.stage("m", "aa")
    assert stage is not None
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    source, size, sha256 = write(foreign / "w", b"weights")
    if case == "second link":
        os.link(source, stage / "w")
        source = stage / "w"
    elif case == "open stage":
        source = stage / "w"
        source.write_bytes(b"weights")
        stage.chmod(0o755)
    elif case == "link for a folder":
        (stage / "sub").symlink_to(foreign)
        source = stage / "sub" / "w"
    elif case == "climbing":
        source = stage / ".." / ".." / ".." / ".." / ".." / ".." / "foreign" / "w"
    remote.upload("models/m/v1/w", source, size, sha256)
    stored = root / "models/m/v1/w"
    assert stored.read_bytes() == b"weights"
    assert stored.stat().st_ino != source.stat().st_ino
    with pytest.raises(errors.SourceChangedError):
        remote.upload("models/m/v1/x", source, size, "0" * 64)


def test_a_stage_that_others_can_enter_is_refused(root: Path) -> None:
    """A stage folder that is not private any more is not handed out again."""
    remote = DirectoryRemote(root)
    stage = remote.stage("m", "aa")
    assert stage is not None
    stage.chmod(0o777)
    with pytest.raises(errors.DeniedError, match="private"):
        remote.stage("m", "aa")
    for nonce in ("", "../x", "a/b", "x" * 65):
        with pytest.raises(errors.UsageError):
            remote.stage("m", nonce)
    with pytest.raises(errors.UsageError):
        remote.stage("../m", "aa")


def test_links_and_devices_are_no_sources(root: Path, tmp_path: Path) -> None:
    """A symbolic link, a pipe or a folder is refused as the source of an upload, without blocking."""
    remote = DirectoryRemote(root)
    write(tmp_path / "real", b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(errors.WeighbridgeError):
            remote.upload("models/m/v1/w", tmp_path / name, 6, hashlib.sha256(b"secret").hexdigest())
    assert list(remote.list("")) == []


def test_strangers_in_the_folder_are_no_objects(root: Path, tmp_path: Path) -> None:
    """Dot files, links, pipes and names that cannot be keys are neither listed nor read."""
    remote = DirectoryRemote(root)
    remote.create("models/m/v1/w", b"1")
    folder = root / "models/m/v1"
    (folder / ".nfs0001").write_bytes(b"x")
    (folder / ".snapshot").mkdir()
    (folder / ".snapshot" / "w").write_bytes(b"x")
    (folder / "link").symlink_to(write(tmp_path / "f", b"x")[0])
    (root / "models" / "elsewhere").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/bad-\xff")).write_bytes(b"x")
    (root / "models" / "empty" / "v1").mkdir(parents=True)
    assert [s.key for s in remote.list("")] == ["models/m/v1/w"]
    assert list(remote.folders("models/")) == ["m"]
    for name in ("link", "pipe"):
        with pytest.raises(errors.WeighbridgeError):
            remote.read(f"models/m/v1/{name}")
    with pytest.raises(errors.UsageError):
        remote.read("models/m/v1/.nfs0001")


def test_a_link_for_a_folder_is_not_followed_when_writing(root: Path, tmp_path: Path) -> None:
    """A link in the place of a model's folder does not lead a writer out of the remote."""
    (root / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "models" / "m").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.ConflictError):
        DirectoryRemote(root).create("models/m/v1/w", b"1")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_stage_places_are_no_keys(root: Path) -> None:
    """Nobody reads, writes or deletes stage files through the interface."""
    remote = DirectoryRemote(root)
    for key in ("_wb/stage/x", "models/m/_wb/stage/x", "models/m/_wb/stage", "models/m/.hidden"):
        for act in (remote.read, remote.delete, remote.stat):
            with pytest.raises(errors.UsageError):
                act(key)
        with pytest.raises(errors.UsageError):
            remote.create(key, b"")
    remote.stage("m", "aa")
    assert list(remote.list("models/m/_wb/stage/")) == []


def test_sweeping_removes_what_is_old_and_unfinished(root: Path) -> None:
    """Stage folders and part files in which nothing changed for long go; younger ones and objects stay."""
    remote = DirectoryRemote(root)
    old, young = remote.stage("m", "00"), remote.stage("m", "11")
    assert old is not None
    assert young is not None
    (old / "sub").mkdir()
    for path in (old / "sub" / "w", young / "w", old.parent / "x.part", root / "_wb"):
        path.parent.mkdir(exist_ok=True)
        if path.name != "_wb":
            path.write_bytes(b"left")
    remote.now()
    (root / "_wb" / "stage" / "y.part").write_bytes(b"left")
    before = time.time() - 1000
    for path in (old / "sub" / "w", old / "sub", old, old.parent / "x.part", root / "_wb/stage/y.part"):
        os.utime(path, (before, before))
    # A bundle is young when anything in it is.
    os.utime(young, (before, before))
    assert remote.sweep(500.0) == 3
    assert files(root) == ["models/m/_wb/stage/11/w"]
    assert remote.sweep(500.0) == 0


def test_a_remote_whose_mount_is_gone_is_not_empty(root: Path) -> None:
    """Once the marker was seen, an empty folder in its place is an unreachable remote: nothing is listed or missing."""
    remote = DirectoryRemote(root)
    remote.create("weighbridge.json", b"{}")
    remote.create("models/m/v1/w", b"1")
    assert remote.read("models/m/v1/w") == b"1"
    assert len(list(remote.list(""))) == 2
    root.rename(root.with_name("away"))
    for _ in range(2):
        with pytest.raises(errors.UnreachableError):
            remote.read("models/m/v1/w")
        with pytest.raises(errors.UnreachableError):
            list(remote.list("models/"))
        with pytest.raises(errors.UnreachableError):
            list(remote.folders(""))
        root.mkdir(exist_ok=True)


def test_only_the_marker_begins_a_remote(tmp_path: Path) -> None:
    """Writing to a folder that is not there fails (a mount is missing); storing the marker creates it."""
    remote = DirectoryRemote(tmp_path / "new" / "remote")
    acts: list[Callable[[], object]] = [
        lambda: remote.create("models/m/v1/w", b"1"),
        lambda: remote.stage("m", "aa"),
        lambda: remote.upload("a", *write(tmp_path / "f", b"")),
    ]
    for act in acts:
        with pytest.raises(errors.UnreachableError, match="no remote"):
            act()
    assert not (tmp_path / "new").exists()
    assert list(remote.list("")) == []
    with pytest.raises(errors.MissingError):
        remote.read("weighbridge.json")
    remote.create("weighbridge.json", b"{}")
    remote.create("models/m/v1/w", b"1")
    assert files(tmp_path / "new") == ["remote/models/m/v1/w", "remote/weighbridge.json"]


def test_a_stage_that_was_swept_away_is_made_again(root: Path) -> None:
    """Folders that somebody removed while we ran are made again."""
    remote = DirectoryRemote(root)
    remote.create("models/m/v1/w", b"1")
    (root / "models").rename(root.with_name("elsewhere"))
    (root / "_wb").rename(root.with_name("too")) if (root / "_wb").exists() else None
    remote.create("models/m/v1/w", b"2")
    assert remote.read("models/m/v1/w") == b"2"


def failing(code: int) -> Callable[..., None]:
    """Return a stand-in for a system call that fails."""

    def fail(*paths: object, **_: object) -> None:
        raise OSError(code, os.strerror(code), str(paths[0]))

    return fail


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        (errno.ENOSPC, errors.DiskFullError, "No space"),
        (errno.EDQUOT, errors.DiskFullError, "quota"),
        (errno.EROFS, errors.DeniedError, "Read-only"),
        (errno.EACCES, errors.DeniedError, "Permission"),
        (errno.ESTALE, errors.RetryableError, "Stale"),
        (errno.EMFILE, errors.RetryableError, "open files"),
        (errno.EIO, errors.UnreachableError, "Input/output"),
        (errno.ENOTCONN, errors.UnreachableError, "endpoint"),
        (errno.ENAMETOOLONG, errors.UsageError, "too long"),
        (errno.EPIPE, errors.WeighbridgeError, "pipe"),
    ],
)
def test_errors_of_the_disk_have_words(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[errors.WeighbridgeError], word: str
) -> None:
    """Each error of the file system becomes the class that says what can be done, and nothing appears."""
    remote = DirectoryRemote(root)
    monkeypatch.setattr(disk, "write_all", failing(code))
    with pytest.raises(errors.WeighbridgeError) as caught:
        remote.create("models/m/v1/w", b"1")
    assert type(caught.value) is kind
    assert word.lower() in str(caught.value.why).lower()
    assert caught.value.fix or code == errno.EPIPE
    assert files(root) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Where no hard links can be made, the message says so and names what to use."""
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(errors.UsageError, match="cannot be a remote") as caught:
        DirectoryRemote(root).create("models/m/v1/w", b"1")
    assert "hard links" in str(caught.value.why)
    assert files(root) == []


def test_a_forbidden_link_is_not_taken_for_a_missing_feature(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links can be made but not this one, the trouble is permission."""
    real = os.link

    def link(source: Path, target: Path, **keywords: bool) -> None:
        if not str(target).endswith(".probe"):
            failing(errno.EPERM)(source)
        real(source, target, **keywords)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(errors.DeniedError):
        DirectoryRemote(root).create("models/m/v1/w", b"1")
    assert files(root) == []


def test_a_remote_over_two_file_systems_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link across file systems fails with the reason."""
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    with pytest.raises(errors.UsageError, match="cannot be a remote as it is"):
        DirectoryRemote(root).create("models/m/v1/w", b"1")


def test_a_link_whose_answer_was_lost_is_recognised(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that links, loses the answer and then says "exists" has done what we wanted."""
    real = os.link

    def link(source: Path, target: Path, **keywords: bool) -> None:
        real(source, target, **keywords)
        failing(errno.EEXIST)(source)

    monkeypatch.setattr(os, "link", link)
    remote = DirectoryRemote(root)
    remote.create("models/m/v1/w", b"1")
    assert remote.read("models/m/v1/w") == b"1"


def test_a_folder_that_cannot_be_synced_leaves_the_outcome_unknown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is linked but perhaps not durable is reported as neither stored nor failed."""
    remote = DirectoryRemote(root)
    remote.create("models/m/v1/v", b"1")
    monkeypatch.setattr(disk, "sync_folder", failing(errno.EIO))
    with pytest.raises(errors.OutcomeUnknownError):
        remote.create("models/m/v1/w", b"1")


def test_a_file_system_without_case_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 'stage' and 'STAGE' are the same folder, the remote is refused before anything is stored."""
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: real(str(path).replace("STAGE", "stage")))
    with pytest.raises(errors.UsageError, match="cannot be a remote") as caught:
        DirectoryRemote(root).create("models/m/v1/w", b"1")
    assert "case" in str(caught.value.why)
    assert files(root) == []


def test_a_full_disk_is_noticed_before_anything_is_copied(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that cannot fit says how many bytes are needed and free."""
    monkeypatch.setattr(disk, "free_bytes", lambda _: 3)
    with pytest.raises(errors.DiskFullError) as caught:
        DirectoryRemote(root).upload("models/m/v1/w", *write(tmp_path / "f", b"1234"))
    assert caught.value.data == {"needed": 4, "free": 3}
    assert files(root) == []


def test_what_another_writer_linked_is_synced_before_it_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, or being refused for, an object that is a moment old makes its folder durable first."""
    DirectoryRemote(root).create("models/m/v1/w", b"1")
    synced: list[str] = []
    real = disk.sync_folder

    def sync(path: Path) -> None:
        synced.append(str(path))
        real(path)

    monkeypatch.setattr(disk, "sync_folder", sync)
    remote = DirectoryRemote(root)
    remote.read("models/m/v1/w")
    assert synced == [str(p) for p in (root / "models/m/v1", root / "models/m", root / "models", root)]
    synced.clear()
    remote.read("models/m/v1/w")
    assert synced == []
    with pytest.raises(errors.ExistsError):
        DirectoryRemote(root).create("models/m/v1/w", b"1")
    assert str(root / "models/m/v1") in synced


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, a home path and a file URL lead to the same folder; a relative URL or an endpoint is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r").mkdir()
    open_directory(str(tmp_path / "r")).create("a", b"1")
    for url in (f"file://{tmp_path}/r", f"file://localhost{tmp_path}/r", "~/r"):
        remote = open_directory(url)
        assert remote.read("a") == b"1"
        assert remote.url == url
    for url in ("file:r", "file://host/r"):
        with pytest.raises(errors.UsageError):
            open_directory(url)
    with pytest.raises(errors.UsageError):
        open_directory("/r", "http://127.0.0.1:9")
