"""GGUF files: header and tensor directory equal what was written, and every lie in them is named."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.formats import gguf
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.mutation import mutated, outcome

PAIRS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "general.license": "apache-2.0",
    "general.file_type": 2,
    "general.tags": ["a", "b"],
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": [f"w{i}" for i in range(40)],
    "tokenizer.ggml.scores": [0.5] * 40,
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS: dict[str, Any] = {
    "token_embd.weight": ("F16", (40, 32), None),
    "blk.0.attn_q.weight": ("Q4_0", (16, 64), None),
    "blk.0.attn_norm.weight": ("F32", (5,), None),
    "output.weight": ("Q8_0", (40, 32), None),
}


def read_bytes(tmp_path: Path, data: bytes) -> Directory:
    """Write and read."""
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return gguf.read(path)


@pytest.mark.parametrize(("version", "order"), [(1, "<"), (2, "<"), (3, "<"), (3, ">")])
def test_every_version_and_byte_order_is_read(tmp_path: Path, version: int, order: str) -> None:
    """Versions 1 to 3, little and big end first, give the same facts and tensors."""
    data = c.gguf(PAIRS, TENSORS, version=version, order=order)
    directory = read_bytes(tmp_path, data)
    facts = directory.facts
    assert facts["gguf_version"] == version
    assert facts["byteorder"] == ("little" if order == "<" else "big")
    assert facts["architecture"] == "llama"
    assert facts["general"]["license"] == "apache-2.0"
    assert facts["general"]["tags"] == ["a", "b"]
    assert facts["file_type"] == "Q4_0"
    assert facts["metadata_keys"] == len(PAIRS)
    assert facts["tokenizer_entries"] == 40
    assert facts["has_chat_template"] is True
    assert facts["vocab_only"] is False
    assert [(t.name, t.dtype, t.shape) for t in directory.tensors] == [(n, d, s) for n, (d, s, _) in TENSORS.items()]
    assert [t.nbytes for t in directory.tensors] == [2560, 16 * 2 * 18, 20, 40 * 34]
    assert all(t.offset is not None and t.offset % 32 == 0 for t in directory.tensors)
    assert directory.hazards == ()


def test_the_bytes_of_a_tensor_are_where_it_says(tmp_path: Path) -> None:
    """Offsets count from the file's beginning, alignment included."""
    value = struct.pack("<4f", 1, 2, 3, 4)
    data = c.gguf({"general.alignment": 64}, {"a": ("F32", (3,), None), "b": ("F32", (2, 2), value)}, align=64)
    directory = read_bytes(tmp_path, data)
    tensor = directory.tensors[1]
    assert tensor.shape == (2, 2)
    assert c.materialise(tmp_path / "x.gguf", tensor, 4) == value


def test_adapters_and_splits_state_themselves(tmp_path: Path) -> None:
    """A LoRA names its type and alpha; a part of a split file names its place."""
    lora = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    facts = read_bytes(tmp_path, c.gguf(lora, {"a.lora_a": ("F32", (4, 16), None)})).facts
    assert (facts["adapter_type"], facts["alpha"]) == ("lora", 8.0)
    split = {"split.no": 1, "split.count": 3, "split.tensors.count": 9}
    facts = read_bytes(tmp_path, c.gguf(split, {"w": ("F32", (4,), None)})).facts
    assert (facts["split_no"], facts["split_count"], facts["split_tensors"]) == (1, 3, 9)


def test_a_vocabulary_alone_is_said(tmp_path: Path) -> None:
    """A file with a tokenizer and no tensor is complete and no model."""
    directory = read_bytes(tmp_path, c.gguf(PAIRS, {}))
    assert directory.facts["vocab_only"] is True
    assert directory.hazards == ()


def test_a_short_file_names_what_lies_outside(tmp_path: Path) -> None:
    """A file that ends before its last tensor names the tensors outside and the missing bytes; more bytes are told."""
    good = c.gguf({}, {"a": ("F32", (16,), None), "b": ("F32", (64,), None)})
    short = read_bytes(tmp_path, good[:-100])
    assert [(h.code, h.data["short_by"], h.data["tensors_outside"]) for h in short.hazards] == [
        ("file-short", 100, ["b"])
    ]
    assert short.blocked
    assert [h.code for h in read_bytes(tmp_path, good + bytes(64)).hazards] == ["file-long"]
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, good[:60])
    assert caught.value.code == "header-cut"


def test_lies_about_tensors_are_named(tmp_path: Path) -> None:
    """Unknown types, rows that are no whole blocks, places that overlap or are not aligned block by name."""
    good = c.gguf({}, {"a": ("F32", (8,), None), "b": ("F32", (8,), None)})
    at = good.find(b"b" + struct.pack("<I", 1)) + 5 + 8
    unknown = good[:at] + struct.pack("<I", 99) + good[at + 4 :]
    overlap = good[: at + 4] + struct.pack("<Q", 0) + good[at + 12 :]
    crooked = good[: at + 4] + struct.pack("<Q", 33) + good[at + 12 :]
    packed = good[:at] + struct.pack("<I", 12) + good[at + 4 :]
    assert [h.code for h in read_bytes(tmp_path, unknown).hazards] == ["tensor-invalid"]
    assert read_bytes(tmp_path, overlap).hazards[0].data == {"overlapping": ["a", "b"]}
    assert [h.subject for h in read_bytes(tmp_path, crooked).hazards] == ["b"]
    assert "multiple of the block" in read_bytes(tmp_path, packed).hazards[0].message


def test_another_file_is_no_gguf(tmp_path: Path) -> None:
    """Another magic and an unknown version are named."""
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, b"PK\3\4" + bytes(60))
    assert caught.value.code == "not-gguf"
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, b"GGUF" + struct.pack("<I", 77) + bytes(60))
    assert caught.value.code == "gguf-version"


def test_a_large_vocabulary_costs_little(tmp_path: Path) -> None:
    """A vocabulary of 300,000 texts is walked, counted and not kept."""
    pairs = {**PAIRS, "tokenizer.ggml.tokens": [f"word{i}" for i in range(300_000)]}
    (tmp_path / "v.gguf").write_bytes(c.gguf(pairs, TENSORS))
    start = time.process_time()
    directory = gguf.read(tmp_path / "v.gguf")
    assert time.process_time() - start < 0.5
    assert directory.facts["tokenizer_entries"] == 300_000
    assert len(directory.root["tokenizer.ggml.tokens"].values) == gguf.VALUES_KEPT


@given(
    shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=8),
    align=st.sampled_from([1, 8, 32, 256]),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sound_file_is_read_without_hazard(tmp_path: Path, shapes: list[list[int]], align: int) -> None:
    """Whatever the shapes and the alignment, a sound file has its tensors and no hazard."""
    tensors: dict[str, Any] = {f"t{i}": ("F32", tuple(shape), None) for i, shape in enumerate(shapes)}
    directory = read_bytes(tmp_path, c.gguf({"general.alignment": align}, tensors, align=align))
    assert [t.shape for t in directory.tensors] == [tuple(shape) for shape in shapes]
    assert directory.hazards == ()


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(c.gguf(PAIRS, TENSORS)))
def test_a_mutated_file_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to a file, a reader gets a directory or one typed fault."""
    outcome(gguf.read, tmp_path / "x.gguf", data)
