"""Files that were downloaded from the Hub are held against what its client wrote down of them."""

import os
from pathlib import Path

import pytest

from weighbridge.adapters import downloads
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Bundle, discard, stage
from weighbridge.registry.hashing import sha256_file
from weighbridge_testlib.hub import serve
from weighbridge_testlib.hub.rig import environ, hf
from weighbridge_testlib.hub.store import git_oid

COMMIT = "c" * 40


def downloaded(folder: Path, files: dict[str, bytes]) -> Path:
    """Leave files and their records as `hf download --local-dir` does."""
    for path, body in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(body)
        etag = sha256_file(folder / path) if path.endswith(".safetensors") else git_oid(body)
        note = folder / downloads.RECORDS / f"{path}.metadata"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{COMMIT}\n{etag}\n{(folder / path).stat().st_mtime}\n")
    return folder


def staged(folder: Path, place: Path, paths: list[str], **more: dict[str, bytes]) -> Bundle:
    """Stage files of a folder."""
    files = [SourceFile(p, str((folder / p).resolve()), (folder / p).stat().st_size, "other") for p in paths]
    return stage(files, place, **more)  # type: ignore[arg-type]


def rewrite(file: Path, body: bytes, *, later: float) -> None:
    """Change a file's bytes so many seconds after it was downloaded."""
    at = file.stat().st_mtime
    file.write_bytes(body)
    os.utime(file, (at, at + later))


FILES = {"model.safetensors": b"w" * 5000, "config.json": b"{}", "part/tokenizer.json": b"[]"}


def test_what_is_as_it_was_downloaded_has_no_finding(tmp_path: Path) -> None:
    """Stored objects by their sha256, small files by their Git id, in the folder and below it."""
    folder = downloaded(tmp_path / "d", FILES)
    assert staged(folder, tmp_path / "s", list(FILES)).findings == []
    assert staged(folder / "part", tmp_path / "t", ["tokenizer.json"]).findings == []


@pytest.mark.parametrize("path", list(FILES))
@pytest.mark.parametrize(("later", "words"), [(60.0, "was written to since"), (0.0, "look at the disk")])
def test_a_file_that_differs_is_named(tmp_path: Path, path: str, later: float, words: str) -> None:
    """The record is named, and whether somebody changed the file or it changed by itself."""
    folder = downloaded(tmp_path / "d", FILES)
    rewrite(folder / path, FILES[path][:-1] + b"X", later=later)
    (found,) = staged(folder, tmp_path / "s", list(FILES)).findings
    assert (found.code, found.severity, found.subject) == ("download-differs", "warn", path)
    assert words in found.message
    assert COMMIT[:12] in found.message
    assert found.data["touched"] == (later > 0)


def test_what_we_rewrote_ourselves_is_not_held_against_its_record(tmp_path: Path) -> None:
    """A config whose path was replaced by evidence is told by its own finding."""
    folder = downloaded(tmp_path / "d", FILES)
    assert staged(folder, tmp_path / "s", list(FILES), transform={"config.json": b"{ }"}).findings == []


@pytest.mark.parametrize("note", [b"", b"main\nabc\n1\n", b"\xff\xfe", f"{COMMIT}\nshort\n1\n".encode()])
def test_a_record_that_says_nothing_is_passed_over(tmp_path: Path, note: bytes) -> None:
    """A record that is damaged, or of another kind, is no evidence of anything."""
    folder = downloaded(tmp_path / "d", FILES)
    (folder / downloads.RECORDS / "config.json.metadata").write_bytes(note)
    assert downloads.record(folder, "config.json") is None
    assert staged(folder, tmp_path / "s", ["config.json"]).findings == []


def test_a_file_of_a_hub_cache_is_named_by_its_blob(tmp_path: Path) -> None:
    """A snapshot's files are links to blobs that are called as they hash; one that was overwritten there is found."""
    repo = tmp_path / "models--acme--base"
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "blobs").mkdir()
    (tmp_path / "w").write_bytes(b"w" * 5000)
    blob = repo / "blobs" / sha256_file(tmp_path / "w")
    (tmp_path / "w").rename(blob)
    (repo / "snapshots" / COMMIT / "model.safetensors").symlink_to(blob)
    folder = repo / "snapshots" / COMMIT
    assert staged(folder, tmp_path / "s", ["model.safetensors"]).findings == []
    blob.write_bytes(b"x" * 5000)
    (found,) = staged(folder, tmp_path / "t", ["model.safetensors"]).findings
    assert found.code == "download-differs"


def test_the_real_client_writes_such_records(tmp_path: Path) -> None:
    """`hf download --local-dir` from a Hub: every file has its record, and all of them agree."""
    with serve() as hub:
        repo = hub.store.create("model", "acme", "base", hub.store.tokens["hf_ann"])
        changes = [("file", {"path": path, "content": body}) for path, body in FILES.items()]
        hub.store.commit(repo, "main", title="t", message="", author="ann", parent=None, changes=changes)
        done = hf(environ(hub, tmp_path / "ann"), "download", "acme/base", "--local-dir", str(tmp_path / "d"))
        assert done.returncode == 0, done.stderr
        known = downloads.record(tmp_path / "d", "config.json")
    assert known is not None
    assert (known.commit, known.git) == (repo.head.oid, git_oid(b"{}"))
    bundle = staged(tmp_path / "d", tmp_path / "s", list(FILES))
    assert bundle.findings == []
    discard(bundle)
