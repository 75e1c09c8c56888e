"""The note in a run: what it may say, and what happens when it cannot be understood."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.adapters import sidecar
from weighbridge.registry.findings import CODES


def test_a_run_without_a_note_says_nothing(tmp_path: Path) -> None:
    """No file, no facts, no finding."""
    assert sidecar.read(tmp_path) == sidecar.Sidecar()
    assert not sidecar.read(tmp_path).present


def test_every_key_is_read(tmp_path: Path) -> None:
    """All keys in their usual form, from the run's folder."""
    (tmp_path / "weighbridge.yaml").write_text(
        "name: medical-sft\npublish: true\nowner: lw\nlicense: other\nlicense_name: acme-1.0\n"
        "license_link: https://x.test\ndata:\n- acme/notes@v3\n- {id: x, revision: 2}\npurpose: triage\nid: run-1\n"
        "base: Qwen/Qwen3-8B@0123abc\ncode: ~/src\n"
    )
    told = sidecar.read(tmp_path)
    assert told.findings == ()
    assert (told.name, told.publish, told.owner, told.license, told.license_name) == (
        "medical-sft",
        True,
        "lw",
        "other",
        "acme-1.0",
    )
    assert told.data == ({"id": "acme/notes", "revision": "v3"}, {"id": "x", "revision": "2"})
    assert (told.purpose, told.id, told.base, told.base_revision, told.code) == (
        "triage",
        "run-1",
        "Qwen/Qwen3-8B",
        "0123abc",
        "~/src",
    )


@pytest.mark.parametrize(
    ("word", "meant"), [("false", False), ("no", False), ("Off", False), ("yes", True), ("true", True)]
)
def test_publish_takes_every_word_for_yes_and_no(word: str, meant: bool) -> None:
    """Whatever YAML somebody learned, `publish: no` keeps the run private."""
    assert sidecar.parse(f"publish: {word}".encode()).publish is meant


@pytest.mark.parametrize(
    "raw",
    [
        b"a: [",
        b"\xff\xfe\x00",
        b"- a",
        b"name: a\nname: b",
        b"publish: perhaps",
        b"name: ../x",
        b"owner: [a]",
        b"data: {}\nname: 'a b'",
        b"name: x\n\tbad",
    ],
)
def test_a_note_that_cannot_be_understood_blocks(raw: bytes) -> None:
    """It may have said `publish: false`: nothing goes out until it is mended."""
    told = sidecar.parse(raw)
    assert [f.severity for f in told.findings] == ["block"]
    assert told.findings[0].fix


@pytest.mark.parametrize(
    ("key", "near", "severity"),
    [("nmae", "name", "warn"), ("licence", "license", "warn"), ("pubish", "publish", "block"), ("zzz", None, "warn")],
)
def test_unknown_keys_name_the_nearest_one(key: str, near: str | None, severity: str) -> None:
    """A misspelt key is never silently ignored, least of all `publish`."""
    [found] = sidecar.parse(f"{key}: x".encode()).findings
    assert (found.code, found.severity, found.data["nearest"]) == ("sidecar-unknown-key", severity, near)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_note_fail(raw: bytes) -> None:
    """Any bytes give a note and listed findings."""
    assert all(f.code in CODES for f in sidecar.parse(raw).findings)


@given(
    st.dictionaries(
        st.sampled_from(sidecar.KEYS),
        st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3),
    )
)
def test_no_value_makes_the_note_fail(document: dict[str, object]) -> None:
    """Any value of any type gives a note whose fields have their type."""
    told = sidecar.parse(json.dumps(document).encode())
    assert told.publish is None or isinstance(told.publish, bool)
    assert all(isinstance(d, dict) for d in told.data)


def test_an_unreadable_note_blocks(tmp_path: Path) -> None:
    """A folder in the place of the file is no traceback."""
    (tmp_path / "weighbridge.yaml").mkdir()
    told = sidecar.read(tmp_path / "weighbridge.yaml" / "weighbridge.yaml")
    assert not told.present
    assert [f.code for f in sidecar.read(tmp_path).findings] == ["sidecar-invalid"]
