"""GGUF, versions 1 to 3 in either byte order: key-value header and tensor directory, no tensor read.

    magic 'GGUF', version, number of tensors, number of key-value pairs
    key-value pairs     text key, type, value; arrays are walked and counted, their first values kept
    tensor infos        name, dimensions (fastest first), type, offset from the data's beginning
    padding, data       each tensor begins on a multiple of general.alignment

Shapes are given slowest dimension first, as everywhere else in this house.
"""

from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.protocol import SIZE_LIMIT, Directory, FormatFault, Hazard, Tensor, elements, shown
from weighbridge.adapters.formats.source import Source, opened

HEADER_LIMIT: Final = 128 << 20
TENSOR_LIMIT: Final = 200_000
PAIR_LIMIT: Final = 65_536
TEXTS_LIMIT: Final = 4_000_000
"""Texts in all arrays together; the largest vocabularies have a million with their merges."""

NAME_LIMIT: Final = 1024
DIMENSIONS_LIMIT: Final = 8
VALUES_KEPT: Final = 16
TEXT_KEPT: Final = 4096

_FIRST: Final = 1 << 20

TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18),
    33: ("Q4_0_8_8", 32, 18), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's tensor types: name, elements of a block, bytes of a block."""

FILE_TYPES: Final[dict[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip
"""What general.file_type stands for: the type of most tensors."""

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NESTED_COST: Final = 64
_TEXT: Final = 8
_ARRAY: Final = 9


class Array(NamedTuple):
    """An array of the header: how many values it has and the first of them."""

    length: int
    values: tuple[Any, ...]


class _ShortError(Exception):
    """The bytes read so far end inside the header."""


def read(path: Path) -> Directory:
    """Return what a GGUF file holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return what an open one holds. Raises FormatFault."""
    size = min(_FIRST, source.length)
    while True:
        try:
            return _Header(source, source.head(size)).directory()
        except (_ShortError, StructError) as error:
            if size == source.length:
                raise FormatFault(
                    "header-cut", f"the file ends after {size} bytes, inside its header", file_bytes=size
                ) from error
            if size == HEADER_LIMIT:
                raise FormatFault(
                    "header-too-large", f"the header is longer than {HEADER_LIMIT} bytes", limit=HEADER_LIMIT
                ) from error
        size = min(size * 8, HEADER_LIMIT, source.length)


class _Header:
    """A walk over the header's bytes."""

    def __init__(self, source: Source, data: bytes) -> None:
        self.source = source
        self.data = data
        self.at = 0
        self.texts = 0
        if data[:4] != b"GGUF":
            raise FormatFault("not-gguf", "the file does not begin with GGUF", file_bytes=source.length)
        version = int.from_bytes(data[4:8], "little")
        self.order = "<"
        if version & 0xFFFF == 0:
            version, self.order = int.from_bytes(data[4:8], "big"), ">"
        if len(data) >= 8 and not 1 <= version <= 3:
            raise FormatFault("gguf-version", f"version {version} of GGUF is not known", gguf_version=version)
        self.version = version
        self.at = 8
        self.length = Struct(self.order + ("I" if version == 1 else "Q"))
        self.word = Struct(self.order + "I")
        self.wide = Struct(self.order + "Q")
        self.scalars = {kind: Struct(self.order + code) for kind, code in _SCALARS.items()}

    def directory(self) -> Directory:
        """Return the whole directory."""
        tensors, pairs = self._take(self.length), self._take(self.length)
        if tensors > TENSOR_LIMIT or pairs > PAIR_LIMIT:
            raise FormatFault(
                "header-too-large",
                f"the header claims {tensors} tensors and {pairs} keys, the limits are {TENSOR_LIMIT} and {PAIR_LIMIT}",
            )
        table = self._pairs(pairs)
        alignment = table.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {shown(str(alignment), 40)}, no power of two")
        infos = [self._info(index, tensors) for index in range(tensors)]
        start = -(-self.at // alignment) * alignment
        listed, hazards = _placed(infos, start, alignment, self.source)
        return Directory("gguf", listed, (), tuple(hazards), self._facts(table, listed, alignment), table)

    def _facts(self, table: dict[str, Any], tensors: tuple[Tensor, ...], alignment: int) -> dict[str, Any]:
        general = {
            key.removeprefix("general."): list(value.values) if isinstance(value, Array) else value
            for key, value in table.items()
            if key.startswith("general.")
        }
        file_type = general.get("file_type")
        facts: dict[str, Any] = {
            "container": "gguf",
            "gguf_version": self.version,
            "byteorder": "little" if self.order == "<" else "big",
            "alignment": alignment,
            "metadata_keys": len(table),
            "architecture": general.get("architecture"),
            "general": general,
            "file_type": FILE_TYPES.get(file_type) if isinstance(file_type, int) else None,
            "has_chat_template": "tokenizer.chat_template" in table,
            "vocab_only": not tensors and "tokenizer.ggml.tokens" in table,
        }
        words = table.get("tokenizer.ggml.tokens")
        if isinstance(words, Array):
            facts["tokenizer_entries"] = words.length
        for key, name in _NAMED.items():
            if key in table:
                facts[name] = table[key]
        return facts

    # --------------------------------------------------------------------------------------------------------- pieces

    def _take(self, layout: Struct) -> Any:
        value = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        return value

    def _text(self, limit: int) -> str:
        size = self._take(self.length)
        if size > limit:
            raise self._damaged(f"a text of {size} bytes begins at byte {self.at}, the limit is {limit}")
        stop = self.at + size
        if stop > len(self.data):
            raise _ShortError
        raw = self.data[self.at : min(stop, self.at + TEXT_KEPT)] if size > TEXT_KEPT else self.data[self.at : stop]
        self.at = stop
        return raw.decode("utf-8", "replace")

    def _pairs(self, count: int) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for _ in range(count):
            key = self._text(NAME_LIMIT)
            if key in table:
                raise self._damaged(f"the key {shown(key)} appears twice")
            table[key] = self._value(self._take(self.word), 0)
        return table

    def _value(self, kind: int, depth: int) -> Any:
        if kind in self.scalars:
            return self._take(self.scalars[kind])
        if kind == _TEXT:
            return self._text(HEADER_LIMIT)
        if kind != _ARRAY or depth > 3:
            raise self._damaged(f"a value at byte {self.at} has the unknown type {kind}")
        inner, count = self._take(self.word), self._take(self.length)
        if inner in self.scalars:
            layout = self.scalars[inner]
            if self.at + count * layout.size > self.source.length:
                raise self._damaged(f"an array of {count} values begins at byte {self.at} and leaves the file")
            kept = tuple(self._take(layout) for _ in range(min(count, VALUES_KEPT)))
            self.at += (count - len(kept)) * layout.size
            if self.at > len(self.data):
                raise _ShortError
            return Array(count, kept)
        self.texts += count if inner == _TEXT else count * _NESTED_COST
        if self.texts > TEXTS_LIMIT:
            raise FormatFault("header-too-large", f"the header claims {self.texts} texts, the limit is {TEXTS_LIMIT}")
        kept = tuple(self._value(inner, depth + 1) for _ in range(min(count, VALUES_KEPT)))
        if inner == _TEXT:
            self._skip_texts(count - len(kept))
        else:
            for _ in range(count - len(kept)):
                self._value(inner, depth + 1)
        return Array(count, kept)

    def _skip_texts(self, count: int) -> None:
        at, size, layout, data, limit = self.at, self.length.size, self.length.unpack_from, self.data, len(self.data)
        for _ in range(count):
            at += size + layout(data, at)[0]
            if at > limit:
                raise _ShortError
        self.at = at

    def _info(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text(NAME_LIMIT)
        dimensions = self._take(self.word)
        if dimensions > DIMENSIONS_LIMIT:
            raise self._damaged(f"tensor {index + 1} of {count}, {shown(name)}, claims {dimensions} dimensions")
        shape = tuple(self._take(self.length) for _ in range(dimensions))
        kind, offset = self._take(self.word), self._take(self.wide)
        return name, shape[::-1], kind, offset

    def _damaged(self, message: str) -> FormatFault:
        return FormatFault("header-damaged", message, file_bytes=self.source.length, position=self.at)


_NAMED: Final = {
    "split.no": "split_no",
    "split.count": "split_count",
    "split.tensors.count": "split_tensors",
    "adapter.type": "adapter_type",
    "adapter.lora.alpha": "alpha",
}


def _placed(
    infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, source: Source
) -> tuple[tuple[Tensor, ...], list[Hazard]]:
    """Return the tensors and what is wrong with their places. Raises FormatFault for two of one name."""
    tensors: list[Tensor] = []
    hazards: list[Hazard] = []
    names: set[str] = set()
    for name, shape, kind, offset in infos:
        if name in names:
            raise FormatFault("header-damaged", f"the tensor {shown(name)} is listed twice", bad_tensor=name)
        names.add(name)
        dtype, block, size = TYPES.get(kind, ("", 1, 0))
        problem = None
        if not dtype:
            problem = f"its type {kind} is not known"
        elif elements(shape) >= SIZE_LIMIT or offset >= SIZE_LIMIT:
            problem = "its size is beyond every file"
        elif (shape[-1] if shape else 1) % block:
            problem = f"its rows of {shape[-1] if shape else 1} are no multiple of the block of {block}"
        elif offset % alignment:
            problem = f"its offset {offset} is no multiple of {alignment}"
        if problem:
            hazards.append(Hazard("tensor-invalid", "block", name, f"{shown(name)}: {problem}", {"bad_tensor": name}))
            tensors.append(Tensor(name, dtype or "U8", shape if dtype else (), 0, None, unsupported=problem))
            continue
        tensors.append(Tensor(name, dtype, shape, elements(shape) // block * size, source.base + start + offset))
    if not hazards:
        hazards += _layout(tensors, start, alignment, source)
    return tuple(tensors), hazards


def _layout(tensors: list[Tensor], start: int, alignment: int, source: Source) -> list[Hazard]:
    reach, owner, overlapping = start, "", set[str]()
    hazards: list[Hazard] = []
    for tensor in sorted(tensors, key=lambda t: (t.offset or 0, t.nbytes)):
        begin = (tensor.offset or 0) - source.base
        if begin < reach and tensor.nbytes:
            overlapping |= {owner, tensor.name} if owner else {tensor.name}
        elif begin - reach >= alignment and not hazards:
            text = f"no tensor owns the bytes {reach} to {begin} before {shown(tensor.name)}"
            hazards.append(Hazard("data-hole", "warn", tensor.name, text, {"hole": [reach, begin]}))
        if begin + tensor.nbytes >= reach:
            reach, owner = begin + tensor.nbytes, tensor.name
    if overlapping:
        names = sorted(overlapping)
        text = f"{len(names)} tensors share bytes: {', '.join(map(shown, names[:4]))}"
        hazards.append(Hazard("tensors-overlap", "block", names[0], text, {"overlapping": names}))
    figures = {"file_bytes": source.length, "expected_bytes": reach}
    if tensors and reach > source.length:
        outside = sorted(t.name for t in tensors if (t.offset or 0) - source.base + t.nbytes > source.length)
        text = f"short by {reach - source.length} bytes: its header asks for {reach}, it has {source.length}"
        data = {**figures, "short_by": reach - source.length, "tensors_outside": outside}
        hazards.append(Hazard("file-short", "block", "", text, data))
    elif source.length - reach >= alignment:
        text = f"longer by {source.length - reach} bytes: its header asks for {reach}, it has {source.length}"
        hazards.append(Hazard("file-long", "warn", "", text, {**figures, "longer_by": source.length - reach}))
    return hazards
