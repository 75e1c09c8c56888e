"""Look at tensor bytes without a numeric library: NaN and infinities, zeros, equality; in steps of C speed.

A 16-bit float is NaN or infinite when its exponent is all ones, which shows in its high byte; so a strided slice of the
high bytes and a search for a handful of values finds every suspect, and only suspects are decoded.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple

from weighbridge.adapters.formats.safetensors import Header, Tensor
from weighbridge.adapters.listing import File, Tree
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import counted, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

BLOCK: Final = 8 << 20
SAME_LIMIT: Final = 1 << 30
"""Bytes up to which two sets of weights are compared value by value."""

WIDTH: Final = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "C64": 4,
}  # fmt: skip
"""Bytes of a number of each dtype that knows NaN; a complex one is two numbers."""

_SUSPECT_BYTES: Final = {
    "F64": bytes([0x7F, 0xFF]),
    "F32": bytes([0x7F, 0xFF]),
    "BF16": bytes([0x7F, 0xFF]),
    "F16": bytes([0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF]),
    "F8_E4M3": bytes([0x7F, 0xFF]),
    "F8_E5M2": bytes([0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF]),
    "F8_E8M0": bytes([0xFF]),
    "F8_E4M3FNUZ": bytes([0x80]),
    "F8_E5M2FNUZ": bytes([0x80]),
    "C64": bytes([0x7F, 0xFF]),
}
_MARKS: Final = {dtype: tuple(bytes([mark]) for mark in marks) for dtype, marks in _SUSPECT_BYTES.items()}
_FEW: Final = 512
_KEEP: Final = {dtype: bytes(b for b in range(256) if b not in marks) for dtype, marks in _SUSPECT_BYTES.items()}


class Numbers(NamedTuple):
    """What the values of one tensor are: how many NaN and infinities, whether all zero, zero bytes at the end."""

    nan: int
    inf: int
    zero: bool
    zero_tail: int


def numbers(path: Path, header: Header, names: Mapping[str, Tensor]) -> Iterator[tuple[str, Numbers]]:
    """Yield the numbers of some tensors of a file, in file order. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        for tensor in sorted(names.values(), key=lambda t: t.begin):
            stream.seek(header.data_start + tensor.begin)
            yield tensor.name, numbers_of(tensor.dtype, _blocks(stream, tensor.size))


def numbers_of(dtype: str, blocks: Iterable[bytes]) -> Numbers:
    """Return the numbers of one tensor out of its bytes in blocks of whole elements."""
    nan = inf = 0
    zero, tail = True, 0
    for block in blocks:
        more_nan, more_inf = special(dtype, block)
        nan, inf = nan + more_nan, inf + more_inf
        rest = len(block.rstrip(b"\0"))
        zero = zero and rest == 0
        tail = tail + len(block) if rest == 0 else len(block) - rest
    return Numbers(nan, inf, zero, tail)


def broken(
    subject: str, nan: dict[str, int], inf: dict[str, int], owners: Mapping[str, str] | None = None
) -> list[Finding]:
    """Return the finding for NaN and infinities, none where there are none.

    `owners` gives the file of each tensor where there are several; then every broken file is named, not `subject`.
    """
    if not nan and not inf:
        return []
    data: dict[str, Any] = ({"nan": nan} if nan else {}) | ({"inf": inf} if inf else {})
    names = sorted({*nan, *inf})
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault((owners or {}).get(name, subject), []).append(name)
    where = some(names)
    if owners is not None:
        files = sorted(by_file)
        data["broken_files"] = files
        every = len(set(owners.values()))
        each = some((f"{file}: {some(by_file[file])}" for file in files), between="; ")
        where = f"in {len(files)} of {counted(every, 'file')}: {each}" if every > 1 else some(names)
    return [
        findings.finding(
            "values-nan",
            min(by_file),
            f"{counted(len(names), 'tensor')} with NaN or infinities ({where}): {sum(nan.values())} NaN, "
            f"{sum(inf.values())} infinite",
            "publish an earlier checkpoint; the training has diverged",
            **data,
        )
    ]


def _blocks(stream: IO[bytes] | FileIO, left: int) -> Iterator[bytes]:
    while left:
        block = stream.read(min(BLOCK, left))
        if not block:
            return
        left -= len(block)
        yield block


def suspect(dtype: str, high: bytes | bytearray) -> bool:
    """Return whether the high bytes of some elements leave it open that one is NaN or infinite."""
    return any(mark in high for mark in _MARKS[dtype])


def special(dtype: str, block: bytes) -> tuple[int, int]:
    """Return how many NaN and how many infinities some whole elements hold; (0, 0) for dtypes that have none."""
    width = WIDTH.get(dtype)
    if width is None:
        return 0, 0
    high = block[width - 1 :: width]
    if not suspect(dtype, high):
        return 0, 0
    suspects = len(high.translate(None, _KEEP[dtype]))
    if width == 1:
        infinite = high.count(b"\x7c") + high.count(b"\xfc") if dtype == "F8_E5M2" else 0
        return suspects - infinite, infinite
    values = _all(dtype, block) if suspects > _FEW else _some(dtype, block, high, width)
    return sum(map(math.isnan, values)), sum(map(math.isinf, values))


def _some(dtype: str, block: bytes, high: bytes, width: int) -> list[float]:
    """Return the values of the suspects."""
    picked = bytearray()
    for mark in _SUSPECT_BYTES[dtype]:
        at = high.find(mark)
        while at >= 0:
            picked += block[at * width : (at + 1) * width]
            at = high.find(mark, at + 1)
    return list(_all(dtype, bytes(picked)))


def decode(dtype: str, block: bytes) -> list[float]:
    """Return the values of a few elements of a floating dtype or of I64 and I32, nothing for other dtypes."""
    if dtype in {"I64", "I32"}:
        return [float(value) for value in array("q" if dtype == "I64" else "i", block)]
    return list(_all(dtype, block)) if dtype in {"F64", "F32", "BF16", "F16"} else []


def _all(dtype: str, block: bytes) -> Sequence[float]:
    if dtype == "BF16":
        wide = bytearray(len(block) * 2)
        wide[2::4], wide[3::4] = block[0::2], block[1::2]
        return array("f", bytes(wide))
    if dtype == "F16":
        return struct.unpack(f"<{len(block) // 2}e", block)
    return array("d" if dtype == "F64" else "f", block)


def digests(tree: Tree, ours: WeightSet) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return (dtype, shape, digest of the bytes) of every tensor of a safetensors set. Raises OSError."""
    table: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for path in sorted(set(ours.owners.values())):
        with Path(tree.files[path].source).open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            for name, owner in ours.owners.items():
                if owner != path:
                    continue
                tensor = ours.tensors[name]
                stream.seek(start + tensor.begin)
                digest = hashlib.blake2b(digest_size=16)
                for block in _blocks(stream, tensor.size):
                    digest.update(block)
                table[name] = (tensor.dtype, tensor.shape, digest.hexdigest())
    return table


def same_tensors(tree: Tree, ours: WeightSet, header: Header, theirs: File) -> bool | None:
    """Return whether a file holds the same values as a set, tensor by tensor; None where that is too much to read."""
    if header.payload_bytes > SAME_LIMIT or header.faults:
        return None
    try:
        with Path(theirs.source).open("rb") as other:
            for path in sorted(set(ours.owners.values())):
                mine = [ours.tensors[name] for name, owner in ours.owners.items() if owner == path]
                if not _same_part(Path(tree.files[path].source), mine, other, header):
                    return False
    except OSError:
        return None
    return True


def _same_part(path: Path, mine: Sequence[Tensor], other: BinaryIO, header: Header) -> bool:
    with path.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        for tensor in sorted(mine, key=lambda t: t.begin):
            stream.seek(start + tensor.begin)
            other.seek(header.data_start + header.tensors[tensor.name].begin)
            left = tensor.size
            while left:
                block = stream.read(min(BLOCK, left))
                if not block or block != other.read(len(block)):
                    return False
                left -= len(block)
    return True
