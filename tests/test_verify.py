"""Verify: every byte of a version, a pulled folder or a published source against its record; what differs is named."""

from pathlib import Path

import pytest

from weighbridge.registry import card, layout
from weighbridge.registry.errors import NotFoundError, WithdrawnError
from weighbridge.registry.flow import place, verify
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import parse
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.types import Finding
from weighbridge_testlib.shelf import Shelf, facts, manifest_of, payload

NAME = "medical-sft"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def shelf() -> Shelf:
    """Return a registry with one version."""
    shelf = Shelf(MemoryRemote())
    _, manifest = shelf.publish(NAME, payload(1))
    replace(shelf, layout.version(NAME, 1, "training.json"), card.training(manifest))
    return shelf


def replace(shelf: Shelf, key: str, body: bytes) -> None:
    """Damage an object."""
    shelf.remote.delete(key)
    shelf.remote.create(key, body)


def codes(found: list[Finding]) -> list[tuple[str, str]]:
    """Return code and subject of findings."""
    return [(f.code, f.subject) for f in found]


def test_a_sound_version_has_no_findings(shelf: Shelf) -> None:
    """Every byte is read; the result says how many files and bytes."""
    told: list[int] = []
    result = verify.verify_version(shelf.remote, NAME, 1, progress=lambda _, count: told.append(count))
    assert result.findings == []
    assert (result.files, result.bytes) == (3, sum(map(len, payload(1).values())))
    assert sum(told) == result.bytes
    assert verify.verify_version(shelf.remote, NAME, 1, reading="needed").findings == []


@pytest.mark.parametrize("reading", ["all", "needed"])
def test_each_kind_of_damage_is_named(shelf: Shelf, reading: verify.Reading) -> None:
    """A flipped bit, a short file, a missing and an extra one."""
    key = layout.version(NAME, 1, WEIGHTS)
    body = bytearray(shelf.remote.read(key))
    body[9] ^= 1
    replace(shelf, key, bytes(body))
    replace(shelf, layout.version(NAME, 1, "adapter_config.json"), b"{}")
    shelf.remote.delete(layout.version(NAME, 1, "tokenizer/tokenizer.json"))
    shelf.remote.create(layout.version(NAME, 1, "stray.bin"), b"x")
    found = verify.verify_version(shelf.remote, NAME, 1, reading=reading).findings
    assert codes(found) == [
        ("file-extra", "stray.bin"),
        ("file-size", "adapter_config.json"),
        ("file-damaged", WEIGHTS),
        ("file-missing", "tokenizer/tokenizer.json"),
    ]


def test_a_manifest_that_is_not_the_claimed_one_is_named(shelf: Shelf) -> None:
    """Facts are sealed too: a changed owner is damage."""
    key = layout.manifest(NAME, 1)
    whole = shelf.remote.read(key)
    replace(shelf, key, whole.replace(b'"owner":"lw"', b'"owner":"lx"'))
    for told in (None, parse(whole).digest):
        found = verify.verify_version(shelf.remote, NAME, 1, manifest_sha256=told).findings
        assert codes(found) == [("manifest-damaged", key)]


def test_a_flip_that_looks_like_a_later_format_is_damage(shelf: Shelf) -> None:
    """A schema that names a version nobody has claimed is a flipped bit, not a reason to upgrade."""
    key = layout.manifest(NAME, 1)
    whole = shelf.remote.read(key)
    replace(shelf, key, whole.replace(b"weighbridge/manifest/1", b"weighbridge/manifest/3"))
    for told in (None, parse(whole).digest):
        found = verify.verify_version(shelf.remote, NAME, 1, manifest_sha256=told).findings
        assert codes(found) == [("manifest-damaged", key)]


def test_a_damaged_claim_is_named(shelf: Shelf) -> None:
    """Also where only its nonce changed: the team was told its sha256."""
    key = layout.claim(NAME, 1)
    whole = shelf.remote.read(key)
    told, seal = parse(shelf.remote.read(layout.manifest(NAME, 1))).digest, sha256_bytes(whole)
    assert verify.verify_version(shelf.remote, NAME, 1, manifest_sha256=told, claim_sha256=seal).findings == []
    for body in (whole.replace(b'"host":"trainer-03"', b'"host":"trainer-13"'), whole.replace(b"F32", b"F22"), b"torn"):
        replace(shelf, key, body)
        found = verify.verify_version(shelf.remote, NAME, 1, manifest_sha256=told, claim_sha256=seal).findings
        assert codes(found) == [("claim-damaged", key)]
    shelf.remote.delete(key)
    found = verify.verify_version(shelf.remote, NAME, 1, manifest_sha256=told, claim_sha256=seal).findings
    assert codes(found) == [("claim-damaged", key)]


def test_card_and_history_are_looked_at(shelf: Shelf) -> None:
    """The card must be the announced one, the history must follow from the manifest."""
    stored = shelf.remote.read(layout.version(NAME, 1, "README.md"))
    told = sha256_bytes(stored)
    assert verify.verify_version(shelf.remote, NAME, 1, card_sha256=told).findings == []
    replace(shelf, layout.version(NAME, 1, "README.md"), stored + b"x")
    replace(shelf, layout.version(NAME, 1, "training.json"), b"torn")
    found = verify.verify_version(shelf.remote, NAME, 1, card_sha256=told).findings
    assert codes(found) == [("card-damaged", "README.md"), ("file-damaged", "training.json")]
    replace(shelf, layout.version(NAME, 1, "training.json"), b"{}")
    found = verify.verify_version(shelf.remote, NAME, 1).findings
    assert [(f.code, f.severity) for f in found] == [("history-differs", "note")]


def test_what_is_not_there_cannot_be_verified(shelf: Shelf) -> None:
    """Unknown and withdrawn versions are errors, not findings."""
    with pytest.raises(NotFoundError):
        verify.verify_version(shelf.remote, NAME, 2)
    shelf.withdraw(NAME, 1)
    with pytest.raises(WithdrawnError):
        verify.verify_version(shelf.remote, NAME, 1)


def test_a_pulled_folder_is_compared_with_its_manifest(shelf: Shelf, tmp_path: Path) -> None:
    """No remote is needed; changed, missing and added files are named."""
    folder = tmp_path / "model"
    pull(shelf.remote, NAME, 1, folder)
    result = verify.verify_folder(folder)
    assert (result.findings, result.files, result.partial) == ([], 3, False)
    (folder / WEIGHTS).write_bytes(b"x" * len(payload(1)[WEIGHTS]))
    (folder / "adapter_config.json").unlink()
    (folder / ".hidden").write_text("x")
    (folder / "README.md").write_text("people may write here")
    assert codes(verify.verify_folder(folder).findings) == [
        ("file-extra", ".hidden"),
        ("file-missing", "adapter_config.json"),
        ("file-damaged", WEIGHTS),
    ]


def test_a_part_is_compared_with_what_was_asked_for(shelf: Shelf, tmp_path: Path) -> None:
    """Files that --include left out are not missing; those it took are checked."""
    folder = tmp_path / "model"
    pull(shelf.remote, NAME, 1, folder, include=["*.json"])
    result = verify.verify_folder(folder)
    assert (result.findings, result.files, result.partial) == ([], 2, True)
    (folder / "adapter_config.json").unlink()
    assert codes(verify.verify_folder(folder).findings) == [("file-missing", "adapter_config.json")]


def test_a_folder_without_or_with_a_damaged_manifest(tmp_path: Path) -> None:
    """Without a manifest there is nothing to compare with; a damaged one, and a half-filled mount point, are named."""
    with pytest.raises(NotFoundError, match="no manifest"):
        verify.verify_folder(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert codes(verify.verify_folder(tmp_path).findings) == [("manifest-damaged", "manifest.json")]
    (tmp_path / "manifest.json").unlink()
    (tmp_path / place.UNFINISHED).write_text("{}")
    assert codes(verify.verify_folder(tmp_path).findings) == [("pull-unfinished", place.UNFINISHED)]


def test_a_source_that_changed_since_is_named(shelf: Shelf, tmp_path: Path) -> None:
    """Files left out do not count; rewritten ones are not compared; changed and vanished ones are drift."""
    manifest = parse(shelf.remote.read(layout.manifest(NAME, 1)))
    for path, body in payload(1).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(body)
    (tmp_path / "optimizer.pt").write_bytes(b"left out")
    assert verify.verify_source(tmp_path, manifest).findings == []
    (tmp_path / WEIGHTS).write_bytes(b"trained on")
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    found = verify.verify_source(tmp_path, manifest).findings
    assert codes(found) == [
        ("source-drift", "adapter_config.json"),
        ("source-drift", WEIGHTS),
        ("source-drift", "tokenizer/tokenizer.json"),
    ]
    note = Finding(code="private-path-rewritten", severity="note", subject="adapter_config.json", message="m")
    told = manifest_of(payload(1), facts(findings=[note]))
    assert codes(verify.verify_source(tmp_path, told).findings) == codes(found)[1:]


def test_a_commit_is_not_mended_but_replaced(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a version is one commit, the fix is another number; elsewhere the lost file is put back."""
    shelf.remote.delete(layout.version(NAME, 1, WEIGHTS))
    (lost,) = verify.verify_version(shelf.remote, NAME, 1).findings
    assert str(lost.fix).startswith(f"registry push FOLDER --name {NAME}")
    commits = shelf.remote.properties._replace(commits=True)
    monkeypatch.setattr(MemoryRemote, "properties", commits)
    (lost,) = verify.verify_version(shelf.remote, NAME, 1).findings
    assert str(lost.fix).startswith(f"registry withdraw {NAME}@v1")
