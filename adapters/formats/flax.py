"""Flax's msgpack checkpoints: a map of texts to maps and arrays, walked without unpacking an array."""

from pathlib import Path
from typing import Final

from weighbridge.adapters.formats.protocol import (
    RANK_LIMIT,
    SIZE_LIMIT,
    Directory,
    FormatFault,
    Hazard,
    Tensor,
    elements,
    nbytes,
    shown,
)
from weighbridge.adapters.formats.source import Source, opened

ITEM_LIMIT: Final = 1_000_000
DEPTH_LIMIT: Final = 32
NAME_LIMIT: Final = 1024

_WINDOW: Final = 64 << 10
_ARRAY: Final = 1
_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "complex128": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_SIZES: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_FIXED: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EXTENSIONS: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def read(path: Path) -> Directory:
    """Return what a Flax checkpoint holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return what an open one holds. Raises FormatFault."""
    walk = _Walk(source)
    kind, count = walk.head()
    if kind != "map":
        raise FormatFault("not-flax", "the file is no msgpack map", file_bytes=source.length)
    walk.map(count, ())
    if walk.at != source.length:
        text = f"{source.length - walk.at} bytes follow the map"
        walk.hazards.append(Hazard("file-long", "warn", "", text))
    return Directory("flax-msgpack", tuple(walk.tensors), (), tuple(walk.hazards), {"container": "flax-msgpack"})


class _Walk:
    """One pass over the values of a file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = 0
        self.items = 0
        self.tensors: list[Tensor] = []
        self.hazards: list[Hazard] = []
        self._data = b""
        self._from = 0

    def map(self, count: int, path: tuple[str, ...]) -> None:
        """Walk a map of texts."""
        if len(path) > DEPTH_LIMIT:
            raise self._damaged("maps are nested too deep")
        for _ in range(count):
            kind, size = self.head()
            if kind != "text":
                raise self._damaged("a key is no text")
            key = self._take(min(size, NAME_LIMIT)).decode("utf-8", "replace")
            self.at += size - min(size, NAME_LIMIT)
            self._value((*path, key))

    def head(self) -> tuple[str, int]:
        """Return what comes next and its length or count; a plain value is already passed then."""
        self.items += 1
        if self.items > ITEM_LIMIT:
            raise FormatFault("header-too-large", f"the file holds more than {ITEM_LIMIT} values")
        code = self._take(1)[0]
        if code <= 0x7F or code >= 0xE0 or code in {0xC0, 0xC2, 0xC3}:
            return "plain", 0
        if code <= 0x8F:
            return "map", code & 15
        if code <= 0x9F:
            return "list", code & 15
        if code <= 0xBF:
            return "text", code & 31
        if code in _FIXED:
            self._take(_FIXED[code])
            return "plain", 0
        if code in _EXTENSIONS:
            return "extension", _EXTENSIONS[code]
        if 0xC7 <= code <= 0xC9:
            return "extension", int.from_bytes(self._take((1, 2, 4)[code - 0xC7]), "big")
        size = _SIZES.get(code)
        if size is None:
            raise self._damaged(f"0x{code:02x} is no msgpack")
        value = int.from_bytes(self._take(size), "big")
        kind = "text" if code in {0xD9, 0xDA, 0xDB} else "bytes" if code <= 0xC6 else "list" if code <= 0xDD else "map"
        return kind, value

    def _value(self, path: tuple[str, ...]) -> None:
        kind, size = self.head()
        if kind == "map":
            self.map(size, path)
        elif kind == "list":
            if len(path) > DEPTH_LIMIT:
                raise self._damaged("lists are nested too deep")
            for index in range(size):
                self._value((*path, str(index)))
        elif kind in {"text", "bytes"}:
            self._skip(size)
        elif kind == "extension":
            self._extension(size, path)

    def _extension(self, size: int, path: tuple[str, ...]) -> None:
        code, stop = self._take(1)[0], self.at + size
        if stop > self.source.length:
            raise FormatFault(
                "file-short",
                f"short by {stop - self.source.length} bytes: an array ends at {stop}",
                file_bytes=self.source.length,
                expected_bytes=stop,
                short_by=stop - self.source.length,
            )
        if code == _ARRAY:
            self._array(path, stop)
        self.at = stop

    def _array(self, path: tuple[str, ...], stop: int) -> None:
        """Add an array, which is packed as (shape, name of its dtype, bytes)."""
        kind, count = self.head()
        inner, rank = self.head() if kind == "list" and count == 3 else ("", 0)
        if inner != "list" or rank > RANK_LIMIT:
            raise self._damaged("an array has no valid shape")
        shape = tuple(self._integer() for _ in range(rank))
        kind, size = self.head()
        name = self._take(size).decode("utf-8", "replace") if kind == "text" and size < 64 else ""
        kind, size = self.head()
        dtype = _DTYPES.get(name)
        label = ".".join(path)
        if kind != "bytes" or self.at + size > stop or elements(shape) >= SIZE_LIMIT:
            raise self._damaged("an array holds no bytes of its own")
        if dtype is None:
            self.tensors.append(Tensor(label, "U8", (), size, unsupported=name or "unknown"))
        else:
            if nbytes(dtype, shape) != size:
                text = f"{shown(label)} needs {nbytes(dtype, shape)} bytes and has {size}"
                self.hazards.append(Hazard("tensor-invalid", "block", label, text, {"bad_tensor": label}))
            unsupported = "complex128" if dtype == "C128" else None
            start = self.source.base + self.at
            self.tensors.append(Tensor(label, dtype, shape, nbytes(dtype, shape), start, unsupported=unsupported))

    def _integer(self) -> int:
        code = self._take(1)[0]
        if code <= 0x7F:
            return code
        if code in {0xCC, 0xCD, 0xCE, 0xCF}:
            return int.from_bytes(self._take(_FIXED[code]), "big")
        raise self._damaged("a shape holds something that is no size")

    def _skip(self, size: int) -> None:
        if self.at + size > self.source.length:
            self.source.at(self.at, size)  # raises the fault that names both lengths
        self.at += size

    def _take(self, size: int) -> bytes:
        if self.at < self._from or self.at + size > self._from + len(self._data):
            self._from = self.at
            self._data = self.source.at(self.at, max(size, min(_WINDOW, self.source.length - self.at)))
        place = self.at - self._from
        self.at += size
        return self._data[place : place + size]

    def _damaged(self, why: str) -> FormatFault:
        return FormatFault(
            "header-damaged", f"the file is no sound msgpack near byte {self.at}: {why}", position=self.at
        )
