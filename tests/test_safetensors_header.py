"""The safetensors header reader: sound files, every way to be damaged, and fuzzed bytes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors import deserialize as library_reads

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.formats.safetensors import FAULTS, Header
from weighbridge_testlib import builders


def _file(tensors: dict[str, builders.TensorSpec], **header: Any) -> bytes:
    return builders.safetensors_bytes(tensors, header=header)


TWO: dict[str, builders.TensorSpec] = {"a": ("F32", (2, 3), 1.0), "b": ("BF16", (4,), 0.5)}


def _codes(header: Header) -> list[str]:
    return [fault.code for fault in header.faults]


def test_sound_file_is_read_whole(tmp_path: Path) -> None:
    """A sound file gives its tensors with dtype, shape and place, its metadata, and no fault."""
    path = builders.write_safetensors(tmp_path / "x.safetensors", TWO)
    header = safetensors.read(path)
    assert header.faults == ()
    assert header.metadata == {"format": "pt"}
    assert header.tensors["a"] == ("a", "F32", (2, 3), 0, 24)
    assert header.tensors["b"].elements == 4
    assert header.payload_bytes == 32
    assert header.file_bytes == path.stat().st_size


def test_no_tensor_byte_is_read() -> None:
    """The reader stops after the header, so a file of any size costs the same."""
    stored = _file(TWO)

    class Counting(io.BytesIO):
        taken = 0

        def read(self, count: int | None = -1, /) -> bytes:
            part = super().read(count)
            self.taken += len(part)
            return part

    stream = Counting(stored)
    header = safetensors.read_from(stream, len(stored))
    assert stream.taken == header.data_start


@pytest.mark.parametrize("cut", [1, 17, 32])
def test_short_file_says_by_how_much(cut: int) -> None:
    """A file cut in its data names the missing bytes and the tensors that lie outside."""
    stored = _file(TWO)
    header = safetensors.parse(stored[:-cut])
    assert _codes(header) == ["file-short"]
    assert header.faults[0].data["short_by"] == cut
    assert header.faults[0].data["expected_bytes"] == len(stored)
    assert header.faults[0].data["tensors_outside"] == (["b"] if cut <= 8 else ["a", "b"])
    assert set(header.tensors) == {"a", "b"}


def test_long_file_says_by_how_much() -> None:
    """Bytes after the last tensor are a fault of their own, not a cut file."""
    header = safetensors.parse(_file(TWO) + b"\0" * 64)
    assert _codes(header) == ["file-long"]
    assert header.faults[0].data["longer_by"] == 64


def test_empty_and_headless_files() -> None:
    """No bytes, fewer than eight, and a header that ends early each have their name."""
    assert _codes(safetensors.parse(b"")) == ["file-empty"]
    assert _codes(safetensors.parse(b"\x08\0\0")) == ["header-cut"]
    cut = safetensors.parse(_file(TWO)[:40])
    assert _codes(cut) == ["header-cut"]
    assert cut.faults[0].data["declared_header_bytes"] > 32


def test_terabyte_header_is_refused_without_reading() -> None:
    """A header length beyond the limit is refused by its number alone."""
    header = safetensors.parse((1 << 40).to_bytes(8, "little") + b"{" * 64)
    assert _codes(header) == ["header-too-large"]
    assert header.faults[0].data["declared_header_bytes"] == 1 << 40


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b" {}",
        b"{",
        b"\xff\xfe{}",
        b'{"a":1,"a":2}',
        b'{"a":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"k":1}}',
        b'{"__metadata__":[]}',
        b'{"a":NaN}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"1" * 5000 + b"}",
    ],
)
def test_text_that_is_no_header(text: bytes) -> None:
    """Wrong JSON, duplicate keys, metadata that is no text, NaN and bombs all end as one named fault."""
    assert _codes(safetensors.parse(len(text).to_bytes(8, "little") + text)) == ["header-damaged"]


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"dtype": "", "shape": [], "data_offsets": [0, 0]}, "empty dtype"),
        ({"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "before it begins"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "need 8 bytes"),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}, "need"),
        ({"dtype": "F32", "shape": [1 << 62, 1 << 62, 1 << 62], "data_offsets": [0, 4]}, "need"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "note": 1}, "unknown field"),
        ("text", "no object"),
        (None, "no object"),
    ],
)
def test_entry_that_cannot_be(entry: Any, word: str) -> None:
    """An impossible entry is named with what is wrong about it."""
    header = safetensors.parse(_file({}, bad=entry))
    faults = [f for f in header.faults if f.code == "tensor-invalid"]
    assert [f.data["bad_tensor"] for f in faults] == ["bad"]
    assert word in faults[0].data["problem"]


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "x" * 2000, "\u202eevil"])
def test_name_that_cannot_be_printed(name: str) -> None:
    """A tensor name that is empty, endless or steers a terminal is not accepted."""
    assert "tensor-invalid" in _codes(safetensors.parse(_file({name: ("F32", (1,), 1.0)})))


def test_overlap_names_both_tensors() -> None:
    """Two names over one range of bytes are named together."""
    header = safetensors.parse(
        _file({"a": ("F32", (4,), 1.0)}, twin={"dtype": "F32", "shape": [2], "data_offsets": [8, 16]})
    )
    assert _codes(header) == ["tensors-overlap"]
    assert header.faults[0].data["overlapping"] == ["a", "twin"]


def test_hole_between_tensors() -> None:
    """Bytes that belong to nobody are a fault, as in the library."""
    stored = _file({"a": ("F32", (1,), 1.0)}, b={"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}) + b"\0" * 8
    assert _codes(safetensors.parse(stored)) == ["data-hole"]


@pytest.mark.parametrize("dtype", sorted(safetensors.BITS))
def test_every_dtype_has_its_size(dtype: str) -> None:
    """Every dtype of the format is read with its own size, halves of a byte included."""
    size = 16 * safetensors.BITS[dtype] // 8
    header = safetensors.parse(_file({"t": (dtype, (4, 4), bytes(size))}))
    assert header.faults == ()
    assert header.tensors["t"].size == size


def test_scalar_and_empty_tensors() -> None:
    """A scalar has one element, a shape with a zero none, and the latter is told."""
    header = safetensors.parse(_file({"s": ("F32", (), 1.0), "e": ("F32", (0, 4), b"")}))
    assert header.faults == ()
    assert header.tensors["s"].elements == 1
    assert header.empty_tensors == ["e"]


def test_fifo_and_folder_raise_oserror(tmp_path: Path) -> None:
    """What is no file is an OSError of the caller's, never a header."""
    with pytest.raises(OSError):
        safetensors.read(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*safetensors.BITS, "", "X"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | JSON_VALUES,
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    header=st.dictionaries(st.sampled_from(["__metadata__", "a", "b", "c.weight"]), ENTRIES | JSON_VALUES, max_size=4),
    data=st.binary(max_size=64),
    cut=st.integers(0, 40),
)
def test_fuzzed_headers_give_a_header_or_a_typed_fault(header: dict[str, Any], data: bytes, cut: int) -> None:
    """Whatever JSON a header holds and wherever the file ends, the answer is a Header whose faults have known codes."""
    text = json.dumps(header).encode()
    stored = len(text).to_bytes(8, "little") + text + data
    stored = stored[: max(0, len(stored) - cut)]
    found = safetensors.parse(stored)
    assert set(_codes(found)) <= set(FAULTS)
    if not found.faults:
        assert found.data_start + found.payload_bytes == len(stored)


@settings(max_examples=300, deadline=None)
@given(stored=st.binary(max_size=200))
def test_random_bytes_never_raise(stored: bytes) -> None:
    """Random bytes are never a traceback and, without a fault, never anything the library would refuse."""
    found = safetensors.parse(stored)
    assert set(_codes(found)) <= set(FAULTS)


@settings(max_examples=200, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 3),
)
def test_what_we_accept_the_library_accepts(flips: list[tuple[int, int]], cut: int) -> None:
    """A damaged copy that passes here is one that the safetensors library reads too: we are never the looser one."""
    stored = bytearray(_file(TWO))
    for place, value in flips:
        stored[place % len(stored)] = value
    mutated = bytes(stored[: len(stored) - cut])
    if not safetensors.parse(mutated).faults:
        try:
            library_reads(mutated)  # type: ignore[no-untyped-call]
        except SafetensorError as error:  # pragma: no cover - the failure itself
            pytest.fail(f"accepted here, refused there: {error}")


def test_large_header() -> None:
    """A header of a hundred thousand tensors is read whole."""
    entries = {f"layer.{i}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(100_000)}
    text = json.dumps(entries).encode()
    stored = len(text).to_bytes(8, "little") + text + bytes(100_000)
    header = safetensors.parse(stored)
    assert header.faults == ()
    assert len(header.tensors) == 100_000
