"""The manifest: sealed once, read for ever, never mistaken for something else."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import manifest, types
from weighbridge.registry.errors import IntegrityError, UsageError


def facts(kind: str = "adapter") -> types.Facts:
    """Return the smallest facts that can be sealed."""
    return types.Facts(
        kind=kind,
        weights=types.WeightsFacts(format="safetensors", shards=1, tensors=0, parameters=0, bytes=0, dtypes={}),
        base=types.BaseFacts(),
        license=types.LicenseFacts(),
        provenance=types.Provenance(run=types.RunFacts(project="p", name="r", id="0" * 64)),
    )


def entry(path: str, body: bytes = b"x") -> types.FileEntry:
    """Return the file entry of some bytes."""
    return types.FileEntry(path=path, size=len(body), sha256=hashlib.sha256(body).hexdigest(), role="weights")


def test_sealed_bytes_are_canonical_and_read_back_equal() -> None:
    """Sealing twice gives the same bytes, and reading them gives the same facts."""
    first = manifest.seal([entry("b"), entry("a")], facts())
    again = manifest.seal([entry("a"), entry("b")], facts())
    assert first.stored == again.stored == manifest.canonical(json.loads(first.stored))
    assert manifest.parse(first.stored) == first
    assert first.digest == hashlib.sha256(first.stored).hexdigest()


def test_unknown_fields_are_kept() -> None:
    """A field this version does not know stays in the document and in the stored bytes."""
    document = json.loads(manifest.seal([entry("a")], facts()).stored) | {"later": {"x": 1}}
    read = manifest.parse(manifest.canonical(document))
    assert read.document["later"] == {"x": 1}
    assert b'"later"' in read.stored


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b.replace(b'"kind":"adapter"', b'"kind":"adapter","kind":"model"'),
        lambda b: b.replace(b'"size":1', b'"size":2'),
        lambda b: b.replace(b'"path":"a"', b'"path":"../a"'),
        lambda b: b.replace(b'"size":1', b'"size":NaN'),
        lambda b: b[:-5],
        lambda b: b"[" + b + b"]",
        lambda b: b"\xff" + b,
    ],
)
def test_damaged_manifests_are_refused(damage: object) -> None:
    """Duplicate keys, a changed entry, an unsafe path, NaN, a cut or foreign bytes are an integrity error."""
    assert callable(damage)
    with pytest.raises(IntegrityError):
        manifest.parse(damage(manifest.seal([entry("a")], facts()).stored))


def test_a_newer_schema_is_named_and_not_guessed_at() -> None:
    """A manifest of a later format asks for an upgrade instead of being half read."""
    stored = manifest.seal([entry("a")], facts()).stored.replace(b"manifest/1", b"manifest/9")
    with pytest.raises(UsageError, match="newer"):
        manifest.parse(stored)


@pytest.mark.parametrize("path", ["README.md", "manifest.json", "../x", "a\nb"])
def test_rendered_or_unsafe_files_cannot_be_payload(path: str) -> None:
    """The card and the manifest are derived, and no payload path may leave the folder."""
    with pytest.raises(UsageError):
        manifest.seal([entry(path)], facts())


def test_only_listed_kinds_formats_and_roles_are_sealed() -> None:
    """A kind, a weights format or a role that the one list does not hold is named and refused."""
    weights = msgspec.structs.replace(facts().weights, format="pickle")
    for wrong in (msgspec.structs.replace(facts(), kind="thing"), msgspec.structs.replace(facts(), weights=weights)):
        with pytest.raises(UsageError, match=r"thing|pickle"):
            manifest.seal([entry("a")], wrong)
    with pytest.raises(UsageError, match="toy"):
        manifest.seal([msgspec.structs.replace(entry("a"), role="toy")], facts())


@given(st.binary(max_size=300))
def test_no_bytes_give_a_traceback(stored: bytes) -> None:
    """Whatever stands in the file, the answer is a manifest or an error a person can read."""
    with pytest.raises((IntegrityError, UsageError)):
        manifest.parse(stored)


def test_floats_that_json_lacks_become_strings() -> None:
    """NaN and infinities are stored as strings, so any JSON reader can open a manifest."""
    assert manifest.canonical({"b": float("nan"), "a": float("-inf")}) == b'{"a":"-Infinity","b":"NaN"}'


def test_verify_names_every_kind_of_difference(tmp_path: Path) -> None:
    """Missing, extra, short and damaged files are each named; the card is not compared."""
    sealed = manifest.seal([entry("ok"), entry("gone"), entry("short"), entry("flip")], facts())
    for name, body in {"ok": b"x", "short": b"", "flip": b"y", "extra": b"", "README.md": b"card"}.items():
        (tmp_path / name).write_bytes(body)
    found = {(f.code, f.subject) for f in manifest.verify(sealed, tmp_path)}
    assert found == {
        ("file-missing", "gone"),
        ("file-size", "short"),
        ("file-damaged", "flip"),
        ("file-extra", "extra"),
    }
