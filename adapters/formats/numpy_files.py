"""NumPy's .npy and .npz: shapes and dtypes from the headers; object arrays, which are pickles, are named, not read."""

import re
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats import zipdir
from weighbridge.adapters.formats.protocol import (
    BITS,
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

MAGIC: Final = b"\x93NUMPY"
HEADER_LIMIT: Final = 64 << 10

_DTYPES: Final = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL", "c8": "C64", "c16": "C128",
}  # fmt: skip
_HEADER = re.compile(
    r"\{'descr': (?P<descr>'[^']{1,200}'|\[.{0,60000}\]), 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>[0-9, L]{0,2000})\),? ?\}\s*",
    re.DOTALL,
)


class Header(NamedTuple):
    """What the header of an array says; `length` is where its data begins."""

    descr: str
    fortran: bool
    shape: tuple[int, ...]
    length: int


def read(path: Path) -> Directory:
    """Return what a .npy or .npz file holds. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_npy(source) if source.head(6) == MAGIC else read_npz(source)


def read_npy(source: Source) -> Directory:
    """Return the one array of an open .npy file. Raises FormatFault."""
    header = _header(source.head(HEADER_LIMIT))
    hazards: list[Hazard] = []
    tensor = _tensor("", header, source.base + header.length, source.length - header.length, hazards)
    return Directory("npy", (tensor,), (), tuple(hazards), {"container": "npy"})


def read_npz(source: Source) -> Directory:
    """Return the arrays of an open .npz file. Raises FormatFault."""
    members = zipdir.read(source)
    tensors: list[Tensor] = []
    hazards: list[Hazard] = []
    for name, member in members.items():
        if not name.endswith(".npy"):
            raise FormatFault("not-npz", f"{shown(name)} in the archive is no array")
        header = _header(_first(source, member))
        plain = member.method == zipdir.STORED
        start = source.base + member.start + header.length if plain else None
        tensors.append(_tensor(name[:-4], header, start, member.size - header.length, hazards))
    packed = any(member.method != zipdir.STORED for member in members.values())
    return Directory("npz", tuple(tensors), (), tuple(hazards), {"container": "npz", "compressed": packed})


def _first(source: Source, member: zipdir.Member) -> bytes:
    """Return the first bytes of a member, unpacked where they must be, never more than a header."""
    raw = source.at(member.start, min(member.stored, HEADER_LIMIT))
    if member.method == zipdir.STORED:
        return raw
    if member.method != zipdir.DEFLATED:
        raise FormatFault("zip-damaged", f"{shown(member.name)} is packed in an unknown way")
    try:
        return zlib.decompressobj(-15).decompress(raw, HEADER_LIMIT)
    except zlib.error as error:
        raise FormatFault("zip-damaged", f"{shown(member.name)} cannot be unpacked") from error


def _header(data: bytes) -> Header:
    if data[:6] != MAGIC or len(data) < 12:
        raise FormatFault("header-damaged", "an array does not begin as NumPy writes them")
    wide = data[6] >= 2
    size = int.from_bytes(data[8 : 12 if wide else 10], "little")
    begin = 12 if wide else 10
    if begin + size > len(data):
        raise FormatFault("header-cut", f"the header of an array claims {size} bytes")
    match = _HEADER.fullmatch(data[begin : begin + size].decode("utf-8" if data[6] >= 3 else "latin1", "replace"))
    if match is None:
        raise FormatFault("header-damaged", "the header of an array is not as NumPy writes them")
    sides = [side.strip().rstrip("L") for side in match["shape"].split(",")]
    shape = tuple(int(side) for side in sides if side and len(side) < 20)
    return Header(match["descr"].strip("'"), match["fortran"] == "True", shape, begin + size)


def _tensor(name: str, header: Header, start: int | None, held: int, hazards: list[Hazard]) -> Tensor:
    descr, shape = header.descr, header.shape
    dtype = _DTYPES.get(descr.lstrip("<>|="))
    if "O" in descr:
        text = f"{shown(name)} is an array of objects, which NumPy stores as a pickle"
        hazards.append(Hazard("pickled-array", "block", name, text))
        return Tensor(name, "U8", (), 0, unsupported="objects")
    if dtype is None or len(shape) > RANK_LIMIT or elements(shape) >= SIZE_LIMIT:
        return Tensor(name, "U8", (), 0, unsupported=descr[:40])
    size = nbytes(dtype, shape)
    if size != held:
        text = f"{shown(name)}: dtype {dtype} and shape {list(shape)} need {size} bytes, it has {held}"
        data: dict[str, Any] = {"bad_tensor": name, "expected_bytes": size, "file_bytes": held}
        hazards.append(Hazard("tensor-invalid", "block", name, text, data))
    stride = None
    if header.fortran and len(shape) > 1:
        step, steps = 1, []
        for side in shape:
            steps.append(step)
            step *= side
        stride = tuple(steps)
    unsupported = None if dtype in BITS and dtype != "C128" else "complex128"
    if descr.startswith(">") and BITS[dtype] > 8:
        unsupported = unsupported or "big-endian"
    return Tensor(name, dtype, shape, size, start, None, stride, (), unsupported)
