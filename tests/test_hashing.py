"""The three digests against fixed vectors, and what they must not depend on."""

import hashlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import hashing
from weighbridge.registry.types import FileEntry

CONFIG = b'{"peft_type":"LORA","r":4}\n'
WEIGHTS = b"not real weights\n"


def entry(path: str, body: bytes) -> FileEntry:
    """Return the file entry of some bytes."""
    return FileEntry(path=path, size=len(body), sha256=hashlib.sha256(body).hexdigest(), role="other")


def test_content_digest_matches_the_published_vector() -> None:
    """Three known files give the digest that docs/formats.md prints."""
    files = [
        entry("tokenizer/vocab-é.json", b"{}"),
        entry("adapter_model.safetensors", WEIGHTS),
        entry("adapter_config.json", CONFIG),
    ]
    assert hashing.content_digest(files) == "sha256:5e2cd38ee11cab6e6a8bbc78eb365131a166580dd237df9a667a53fede2cdc56"


def test_tensor_digest_matches_the_published_vector() -> None:
    """Two known tensors give the digest that docs/formats.md prints, whatever their order in the header."""
    tensors = [
        ("a.lora_B.weight", "BF16", [2, 1], hashlib.sha256(bytes.fromhex("01010101")).hexdigest()),
        ("a.lora_A.weight", "F32", [1, 2], hashlib.sha256(bytes(8)).hexdigest()),
    ]
    expected = "sha256:34ceb22e2d97198ead22083bf9af73efca144233e41b9ecdd86df3d9ee8e4eb9"
    assert hashing.tensor_digest(tensors) == hashing.tensor_digest(tensors[::-1]) == expected


def test_derivation_key_matches_the_published_vector() -> None:
    """A known merge gives the key that docs/formats.md prints, with or without the digests' prefix."""
    parents = {"adapter": "sha256:5e2cd38ee11cab6e6a8bbc78eb365131a166580dd237df9a667a53fede2cdc56", "base": "0" * 64}
    expected = "sha256:8774a600ab69f204e550cf5c9fc23e12a271d1d4a499e0784152a31f37a1a466"
    assert hashing.derivation_key("merge", parents, {"dtype": "bf16"}, 1) == expected


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.binary(max_size=8)), unique_by=lambda f: f[0], max_size=6)
)
def test_content_digest_ignores_order_and_sees_every_change(files: list[tuple[str, bytes]]) -> None:
    """The digest is the same in any order and differs as soon as one path, size or byte differs."""
    entries = [entry(path, body) for path, body in files]
    assert hashing.content_digest(entries) == hashing.content_digest(entries[::-1])
    for path, body in files:
        changed = [e for e in entries if e.path != path] + [entry(path, body + b"x")]
        assert hashing.content_digest(changed) != hashing.content_digest(entries)


@given(st.binary(max_size=40), st.integers(1, 9), st.integers(1, 20))
def test_parts_are_hashed_however_the_bytes_come(body: bytes, part: int, step: int) -> None:
    """Each run of so many bytes has its hash, the last one may be shorter, and an empty file has none."""
    hashes = hashing.PartHashes(part)
    for at in range(0, len(body), step):
        hashes.see(bytearray(body[at : at + step]))
    assert hashes.digests() == [hashlib.sha256(body[at : at + part]).digest() for at in range(0, len(body), part)]


def test_file_hash_reads_past_one_buffer(tmp_path: Path) -> None:
    """A file longer than one read buffer hashes like its bytes."""
    body = bytes(range(256)) * 9000
    path = tmp_path / "f"
    path.write_bytes(body)
    assert hashing.sha256_file(path) == hashlib.sha256(body).hexdigest()
