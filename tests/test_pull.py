"""Pull: all or nothing, verified, resumed, and never over anything we did not put there."""

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import layout, manifest
from weighbridge.registry.errors import (
    ConflictError,
    DiskFullError,
    IntegrityError,
    NotFoundError,
    UnreachableError,
    UsageError,
    WithdrawnError,
)
from weighbridge.registry.flow import place
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge_testlib.shelf import Shelf, holds, leftovers, payload

pytestmark = pytest.mark.long

NAME = "medical-sft"
FILES = {
    "adapter_config.json": b'{"peft_type":"LORA","r":4}\n',
    "adapter_model.safetensors": random.Random(1).randbytes(3_500_000),
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/empty.txt": b"",
}


@pytest.fixture
def shelf() -> Shelf:
    """Return a registry in memory with one version."""
    shelf = Shelf(MemoryRemote())
    shelf.publish(NAME, FILES)
    return shelf


def replace(shelf: Shelf, key: str, body: bytes) -> None:
    """Damage an object."""
    shelf.remote.delete(key)
    shelf.remote.create(key, body)


def test_a_version_arrives_whole_with_card_history_and_manifest(shelf: Shelf, tmp_path: Path) -> None:
    """The target holds the manifest's files and what is rendered beside them, and nothing else stays behind."""
    target = tmp_path / "deep" / "model"
    result = pull(shelf.remote, NAME, 1, target)
    assert holds(target, FILES)
    assert leftovers(target.parent) == []
    assert (result.bytes, result.fetched, result.reused) == (sum(map(len, FILES.values())),) * 2 + (0,)
    assert (result.weaker, result.partial, result.already, result.notes) == (False, False, False, [])
    assert manifest.verify(manifest.parse((target / "manifest.json").read_bytes()), target) == []


def test_progress_adds_up_to_the_size_of_each_file(shelf: Shelf, tmp_path: Path) -> None:
    """Whoever draws bars is told every byte once."""
    told: dict[str, int] = {}
    lock = threading.Lock()

    def progress(path: str, count: int) -> None:
        with lock:
            told[path] = told.get(path, 0) + count

    pull(shelf.remote, NAME, 1, tmp_path / "model", progress=progress)
    assert told == {path: len(body) for path, body in FILES.items() if body}


def test_an_empty_folder_may_be_the_target(shelf: Shelf, tmp_path: Path) -> None:
    """`mkdir model; registry pull name ./model` works."""
    (tmp_path / "model").mkdir()
    pull(shelf.remote, NAME, 1, tmp_path / "model")
    assert holds(tmp_path / "model", FILES)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", ["file", "link", "dangling", "folder"])
def test_nothing_foreign_is_ever_replaced(shelf: Shelf, tmp_path: Path, what: str, force: bool) -> None:
    """A file, a link or a folder with anything of somebody else's in it is refused, also with --force."""
    target = tmp_path / "model"
    if what == "file":
        target.write_text("mine")
    elif what == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    elif what == "dangling":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConflictError):
        pull(shelf.remote, NAME, 1, target, force=force)
    assert sorted(tmp_path.iterdir()) == before
    assert what != "folder" or (target / "notes.txt").read_text() == "mine"


def test_a_file_that_somebody_added_to_a_pulled_folder_protects_it(shelf: Shelf, tmp_path: Path) -> None:
    """--force removes nothing that no pull put there."""
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target)
    (target / "my-notes.txt").write_text("mine")
    shelf.publish(NAME)
    with pytest.raises(ConflictError, match="not put there") as caught:
        pull(shelf.remote, NAME, 2, target, force=True)
    assert "my-notes.txt" in str(caught.value.why)
    assert (target / "my-notes.txt").read_text() == "mine"


def test_a_second_version_needs_force_and_then_takes_its_place(shelf: Shelf, tmp_path: Path) -> None:
    """Without --force the old version stays; with it the new one stands there, also when the old one was changed."""
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target)
    second = FILES | {"adapter_config.json": b'{"peft_type":"LORA","r":8}\n'}
    shelf.publish(NAME, second)
    with pytest.raises(ConflictError, match="there already"):
        pull(shelf.remote, NAME, 2, target)
    assert holds(target, FILES)
    (target / "adapter_config.json").write_text("changed by hand")
    result = pull(shelf.remote, NAME, 2, target, force=True)
    assert holds(target, second)
    assert leftovers(tmp_path) == []
    assert result.reused == len(FILES["adapter_model.safetensors"]) + 2
    assert result.fetched == len(second["adapter_config.json"])


def test_without_renameat2_the_old_folder_steps_aside_first(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot swap two names gets the same result by three renames."""
    monkeypatch.setattr(place, "_renameat2", lambda *_: False)
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target)
    shelf.publish(NAME)
    pull(shelf.remote, NAME, 2, target, force=True)
    assert holds(target, payload(2))
    assert leftovers(tmp_path) == []


def test_pulling_the_same_again_changes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    """A target that holds the version already is verified and left alone."""
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target)
    before = target.stat().st_ino
    result = pull(shelf.remote, NAME, 1, target)
    assert result.already
    assert result.fetched == 0
    assert target.stat().st_ino == before


def test_a_changed_folder_is_named_and_repaired_with_force(shelf: Shelf, tmp_path: Path) -> None:
    """The same version again over a damaged copy needs --force, which fetches only what differs."""
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target)
    (target / "adapter_config.json").write_bytes(b'{"peft_type":"LORA","r":5}\n')
    with pytest.raises(ConflictError) as caught:
        pull(shelf.remote, NAME, 1, target)
    assert "adapter_config.json" in str(caught.value.why)
    result = pull(shelf.remote, NAME, 1, target, force=True)
    assert holds(target, FILES)
    assert result.fetched == len(FILES["adapter_config.json"])


@pytest.mark.parametrize("path", [path for path, body in FILES.items() if body])
@pytest.mark.parametrize("damage", ["flip", "short", "long", "gone"])
def test_a_damaged_file_is_named_and_nothing_is_delivered(shelf: Shelf, tmp_path: Path, path: str, damage: str) -> None:
    """A flipped bit, a file cut short, one with a tail, one that is gone: exit code 5, its name, no target."""
    key = layout.version(NAME, 1, path)
    body = bytearray(shelf.remote.read(key))
    shelf.remote.delete(key)
    if damage == "flip":
        body[len(body) // 2] ^= 4
    if damage != "gone":
        shelf.remote.create(key, bytes(body[:-1] if damage == "short" else body + b"x" if damage == "long" else body))
    target = tmp_path / "model"
    for _ in range(2):
        with pytest.raises(IntegrityError) as caught:
            pull(shelf.remote, NAME, 1, target)
        assert caught.value.data["file"] == path
        assert path in caught.value.what
        assert not target.exists()


def test_a_file_that_was_repaired_is_fetched_anew(shelf: Shelf, tmp_path: Path) -> None:
    """Damaged bytes from a failed pull are never the beginning of a later one."""
    key = layout.version(NAME, 1, "adapter_model.safetensors")
    whole = shelf.remote.read(key)
    replace(shelf, key, b"\1" + whole[1:])
    with pytest.raises(IntegrityError):
        pull(shelf.remote, NAME, 1, tmp_path / "model")
    replace(shelf, key, whole)
    pull(shelf.remote, NAME, 1, tmp_path / "model")
    assert holds(tmp_path / "model", FILES)


def test_a_damaged_manifest_is_named(shelf: Shelf, tmp_path: Path) -> None:
    """A manifest that still parses and is not what was claimed is refused, with or without the catalogue's word."""
    key = layout.manifest(NAME, 1)
    whole = shelf.remote.read(key)
    replace(shelf, key, whole.replace(b'"owner":"lw"', b'"owner":"lx"'))
    told = manifest.parse(whole).digest
    for known in (None, told):
        with pytest.raises(IntegrityError, match=r"v1/manifest\.json is damaged"):
            pull(shelf.remote, NAME, 1, tmp_path / "model", manifest_sha256=known)
    assert not (tmp_path / "model").exists()


def test_a_damaged_claim_does_not_stop_a_version_that_the_team_was_told_of(shelf: Shelf, tmp_path: Path) -> None:
    """The manifest alone proves the files; where nobody told its digest, the claim must agree."""
    replace(shelf, layout.claim(NAME, 1), b"{}")
    with pytest.raises(IntegrityError):
        pull(shelf.remote, NAME, 1, tmp_path / "model")
    told = manifest.parse(shelf.remote.read(layout.manifest(NAME, 1))).digest
    pull(shelf.remote, NAME, 1, tmp_path / "model", manifest_sha256=told)
    assert holds(tmp_path / "model", FILES)


def test_open_void_withdrawn_and_unknown_versions_are_told_apart(shelf: Shelf, tmp_path: Path) -> None:
    """Each reason why there is nothing to pull has its own sentence."""
    shelf.claim(NAME)
    shelf.claim(NAME)
    shelf.void(NAME, 3)
    shelf.withdraw(NAME, 1)
    for n, kind, words in (
        (1, WithdrawnError, "withdrawn"),
        (2, NotFoundError, "not finished"),
        (3, NotFoundError, "given up"),
        (9, NotFoundError, "no medical-sft@v9"),
    ):
        with pytest.raises(kind, match=words):
            pull(shelf.remote, NAME, n, tmp_path / "model")


def test_some_files_only(shelf: Shelf, tmp_path: Path) -> None:
    """--include and --exclude choose by pattern; the folder says that it is a part, and pulling it again is a no-op."""
    target = tmp_path / "model"
    for _ in range(2):
        result = pull(shelf.remote, NAME, 1, target, include=["*.json"], exclude=["tokenizer/"])
        assert result.partial
    assert result.already
    names = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
    assert names == {"adapter_config.json", "README.md", "training.json", "manifest.json", place.PARTIAL}
    with pytest.raises(UsageError, match="no file is left"):
        pull(shelf.remote, NAME, 1, tmp_path / "none", include=["*.gguf"])
    pull(shelf.remote, NAME, 1, target, force=True)
    assert holds(target, FILES)


def test_a_damaged_card_is_rendered_anew_and_said(shelf: Shelf, tmp_path: Path) -> None:
    """The card is not what the version is for: a damaged one is not delivered, the version with a fresh card is."""
    stored = shelf.remote.read(layout.version(NAME, 1, "README.md"))
    target = tmp_path / "model"
    pull(shelf.remote, NAME, 1, target, card_sha256=sha256_bytes(stored))
    assert (target / "README.md").read_bytes() == stored
    result = pull(shelf.remote, NAME, 1, tmp_path / "other", card_sha256="0" * 64)
    assert "README.md" in result.notes[0]
    assert b"medical-sft" in (tmp_path / "other" / "README.md").read_bytes()
    assert (tmp_path / "other" / "README.md").read_bytes() != stored


def test_the_history_follows_from_the_manifest(shelf: Shelf, tmp_path: Path) -> None:
    """A damaged training.json is never delivered: it is rendered from what was sealed."""
    replace(shelf, layout.version(NAME, 1, "training.json"), b'{"loss":0}')
    pull(shelf.remote, NAME, 1, tmp_path / "model")
    document = json.loads((tmp_path / "model" / "training.json").read_bytes())
    assert document["schema"] == "weighbridge/training/1"
    assert document["step"] == 280


def test_too_little_room_is_said_before_the_first_byte(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that cannot hold the version is named with both numbers."""
    monkeypatch.setattr("weighbridge.registry.disk.free_bytes", lambda _: 1000)
    with pytest.raises(DiskFullError) as caught:
        pull(shelf.remote, NAME, 1, tmp_path / "model")
    assert caught.value.data["free"] == 1000
    assert list(tmp_path.iterdir()) == []


class Cutting(MemoryRemote):
    """Breaks a stream after some bytes."""

    left: int | None = None

    def fetch(self, key: str, offset: int = 0) -> Iterator[bytes]:
        """Give what is left, then break."""
        for chunk in super().fetch(key, offset):
            if self.left is not None:
                if self.left < len(chunk):
                    yield chunk[: self.left]
                    raise UnreachableError("the connection broke")
                self.left -= len(chunk)
            yield chunk


def test_a_cut_pull_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What was received before the cut is hashed again and not fetched again."""
    remote = Cutting()
    Shelf(remote).publish(NAME, FILES)
    remote.left = 2_000_000
    target = tmp_path / "model"
    with pytest.raises(UnreachableError):
        pull(remote, NAME, 1, target)
    assert not target.exists()
    assert len(leftovers(tmp_path)) == 1
    remote.left = None
    result = pull(remote, NAME, 1, target)
    assert holds(target, FILES)
    assert result.reused >= 1_900_000
    assert result.fetched + result.reused == result.bytes
    assert leftovers(tmp_path) == []


def test_what_a_cut_pull_left_is_checked_like_everything_else(tmp_path: Path) -> None:
    """A wrong beginning, a file that is too long, a stray file: the result is right all the same."""
    remote = Cutting()
    Shelf(remote).publish(NAME, FILES)
    remote.left = 2_000_000
    with pytest.raises(UnreachableError):
        pull(remote, NAME, 1, tmp_path / "model")
    remote.left = None
    (hidden,) = (tmp_path / name for name in leftovers(tmp_path))
    weights = hidden / "adapter_model.safetensors"
    body = bytearray(weights.read_bytes())
    body[7] ^= 1
    weights.write_bytes(body)
    (hidden / "adapter_config.json").write_bytes(b"x" * 1000)
    (hidden / "stray").mkdir()
    (hidden / "stray" / "file").write_text("x")
    pull(remote, NAME, 1, tmp_path / "model")
    assert holds(tmp_path / "model", FILES)


def test_a_finished_pull_sweeps_what_cut_ones_left(shelf: Shelf, tmp_path: Path) -> None:
    """Nothing of an abandoned version stays beside the target for ever; other targets' leftovers do."""
    for name in (".model.weighbridge-0123456789ab", ".other.weighbridge-0123456789ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("x")
    pull(shelf.remote, NAME, 1, tmp_path / "model")
    assert leftovers(tmp_path) == [".other.weighbridge-0123456789ab"]


def test_two_pulls_into_one_target_do_not_meet(tmp_path: Path) -> None:
    """The second one is told so at once; its lock dies with the process that held it."""
    target = place.look(tmp_path / "model")
    hidden = target.hidden("ab")
    with place.locked(hidden), pytest.raises(ConflictError, match="another pull"), place.locked(hidden):
        pass
    with place.locked(hidden):
        pass


def test_many_pulls_at_once_give_one_whole_target(tmp_path: Path) -> None:
    """Threads that pull two versions into one target: each ends well or with a conflict, the target is one of them."""
    remote = DirectoryRemote(tmp_path / "remote")
    shelf = Shelf(remote)
    shelf.publish(NAME, payload(1, 400_000))
    shelf.publish(NAME, payload(2, 400_000))
    target = tmp_path / "model"
    outcomes: list[object] = []

    def work(n: int) -> None:
        try:
            outcomes.append(pull(remote, NAME, n, target))
        except ConflictError as error:
            outcomes.append(error)
        except BaseException as error:  # noqa: BLE001 - reported below
            outcomes.append(repr(error))

    threads = [threading.Thread(target=work, args=(1 + i % 2,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert any(not isinstance(outcome, ConflictError) for outcome in outcomes)
    assert holds(target, payload(1, 400_000)) or holds(target, payload(2, 400_000))
