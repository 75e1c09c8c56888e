"""TensorFlow Lite models: a flatbuffer with the mark TFL3, walked with bounds. Facts only; the model stays opaque."""

from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any, Final

from weighbridge.adapters.formats.protocol import BITS, RANK_LIMIT, Directory, FormatFault, Tensor, elements, nbytes
from weighbridge.adapters.formats.source import Source, opened

SIZE_LIMIT: Final = 64 << 20
"""Bytes of the tables that are walked; larger files keep their weights behind them."""

ITEM_LIMIT: Final = 100_000

_U32: Final = Struct("<I").unpack_from
_I32: Final = Struct("<i").unpack_from
_U16: Final = Struct("<H").unpack_from
_DTYPES: Final = {
    0: "F32", 1: "F16", 2: "I32", 3: "U8", 4: "I64", 6: "BOOL", 7: "I16", 8: "C64", 9: "I8", 10: "F64", 11: "C128",
    12: "U64", 15: "U32", 16: "U16", 18: "BF16",
}  # fmt: skip


class _Table:
    """One table of a flatbuffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data = data
        self.at = at
        self.fields = at - _I32(data, at)[0]
        if self.fields < 0:
            raise IndexError
        self.size = _U16(data, self.fields)[0]

    def place(self, index: int) -> int | None:
        """Return where a field lies, None where it is left out."""
        slot = 4 + 2 * index
        if slot + 2 > self.size:
            return None
        step = _U16(self.data, self.fields + slot)[0]
        return self.at + step if step else None

    def number(self, index: int) -> int:
        """Return an unsigned number."""
        place = self.place(index)
        return 0 if place is None else int(_U32(self.data, place)[0])

    def text(self, index: int) -> str | None:
        """Return a text, cut to a sentence."""
        place = self.place(index)
        if place is None:
            return None
        at = place + _U32(self.data, place)[0]
        size = _U32(self.data, at)[0]
        return self.data[at + 4 : at + 4 + min(size, 500)].decode("utf-8", "replace")

    def vector(self, index: int) -> tuple[int, int]:
        """Return where a list begins and how many items it has."""
        place = self.place(index)
        if place is None:
            return 0, 0
        at = place + _U32(self.data, place)[0]
        count = int(_U32(self.data, at)[0])
        if count > ITEM_LIMIT or at + 4 + count > len(self.data):
            raise IndexError
        return at + 4, count

    def tables(self, index: int) -> list["_Table"]:
        """Return a list of tables."""
        at, count = self.vector(index)
        return [_Table(self.data, place + _U32(self.data, place)[0]) for place in range(at, at + 4 * count, 4)]


def read(path: Path) -> Directory:
    """Return what a TFLite model holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return what an open one holds. Raises FormatFault."""
    data = source.head(SIZE_LIMIT)
    if data[4:8] != b"TFL3":
        raise FormatFault("not-tflite", "the file does not have the mark TFL3", file_bytes=source.length)
    try:
        return _model(data)
    except (IndexError, ValueError, StructError) as error:
        raise FormatFault(
            "header-damaged", "the tables of the model lead out of the file", file_bytes=source.length
        ) from error


def _model(data: bytes) -> Directory:
    model = _Table(data, _U32(data, 0)[0])
    graphs = model.tables(2)
    buffers = model.tables(4)
    full = [buffer.vector(0)[1] if buffer.place(0) is not None else buffer.number(2) for buffer in buffers]
    tensors: list[Tensor] = []
    operators = 0
    for graph in graphs:
        operators += graph.vector(3)[1]
        for entry in graph.tables(0):
            buffer = entry.number(2)
            if buffer < len(full) and full[buffer]:
                tensors.append(_tensor(data, entry, full[buffer]))
            if len(tensors) > ITEM_LIMIT:
                raise IndexError
    facts: dict[str, Any] = {
        "container": "tflite",
        "version": model.number(0),
        "description": model.text(3),
        "subgraphs": len(graphs),
        "operators": operators,
    }
    return Directory("tflite", tuple(tensors), (), (), facts)


def _tensor(data: bytes, entry: _Table, held: int) -> Tensor:
    at, count = entry.vector(0)
    if count > RANK_LIMIT:
        raise IndexError
    shape = tuple(int(_U32(data, at + 4 * i)[0]) for i in range(count))
    place = entry.place(1)
    code = data[place] if place is not None else 0
    dtype = _DTYPES.get(code)
    name = entry.text(3) or ""
    if dtype is None or elements(shape) >= 1 << 62:
        return Tensor(name, "U8", shape if dtype else (), held, unsupported=f"tflite type {code}")
    unsupported = None if dtype in BITS and nbytes(dtype, shape) == held else "packed"
    return Tensor(name, dtype, shape, held, unsupported=unsupported)
