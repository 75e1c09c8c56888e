"""Where a tensor's bytes come from, and how they are streamed: one torch file, stretches of rank files, or pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.dcp import Chunk
from weighbridge.adapters.formats.protocol import BITS, FormatFault, Tensor, elements
from weighbridge.adapters.formats.source import opened
from weighbridge.adapters.formats.torch_bytes import BLOCK, blocks, turned

BAND: Final = 64 << 20
"""Bytes of a tensor that are put together at once where its pieces are cut across its rows."""

ROW_LIMIT: Final = 1 << 30
"""Bytes of a row beyond which such a tensor is not put together: a band is never less than a row."""


class InFile(NamedTuple):
    """One tensor of one torch file."""

    path: str
    tensor: Tensor
    big_endian: bool = False


class Stretch(NamedTuple):
    """Some bytes of a file; `width` is the size of an element where it must be turned."""

    path: str
    offset: int
    length: int
    width: int = 1


class InStretches(NamedTuple):
    """Stretches of files, one after the other."""

    stretches: tuple[Stretch, ...]


class InPieces(NamedTuple):
    """Pieces of a torch distributed checkpoint."""

    folder: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


Origin = InFile | InStretches | InPieces


def stream(origin: Origin) -> Iterator[bytes]:
    """Yield a tensor's bytes in row order. Raises OSError, FormatFault."""
    if isinstance(origin, InFile):
        with opened(Path(origin.path)) as source:
            yield from blocks(source, origin.tensor, big_endian=origin.big_endian)
    elif isinstance(origin, InStretches):
        for stretch in origin.stretches:
            yield from part_of(stretch)
    else:
        yield from _pieces(origin)


def part_of(stretch: Stretch) -> Iterator[bytes]:
    """Yield the bytes of one stretch, in blocks of whole elements. Raises OSError, FormatFault."""
    with opened(Path(stretch.path)) as source:
        at, left = stretch.offset, stretch.length
        while left > 0:
            count = min(BLOCK, left)
            data = source.at(at, count)
            yield turned(data, stretch.width) if stretch.width > 1 else data
            at += count
            left -= count


def _pieces(origin: InPieces) -> Iterator[bytes]:
    shape = origin.shape
    if all(chunk.sizes[1:] == shape[1:] for chunk in origin.chunks):
        at = 0
        for chunk in sorted(origin.chunks, key=lambda c: c.offsets):
            begin = chunk.offsets[0] if shape else 0
            if shape and chunk.sizes[0] == 0:
                continue
            if begin != at:
                raise FormatFault("tensor-incomplete", f"the pieces leave a gap or overlap at row {min(begin, at)}")
            at = begin + (chunk.sizes[0] if shape else 1)
            yield from _piece(origin, chunk)
        return
    yield from _bands(origin)


def _bands(origin: InPieces) -> Iterator[bytes]:
    """Yield a tensor whose pieces are cut across its rows, some rows at a time."""
    shape, width = origin.shape, BITS[origin.dtype] // 8
    row = elements(shape[1:]) * width
    if row > ROW_LIMIT:
        raise FormatFault("tensor-incomplete", f"a tensor is cut across rows of {row} bytes: too large to join")
    step = max(1, BAND // row) if row else shape[0]
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        data = bytearray(count * row)
        filled = 0
        for chunk in origin.chunks:
            low, high = max(first, chunk.offsets[0]), min(first + count, chunk.offsets[0] + chunk.sizes[0])
            if low < high:
                here = (low - first, *chunk.offsets[1:])
                part = chunk._replace(offsets=here, sizes=(high - low, *chunk.sizes[1:]))
                rows = _piece(origin, chunk, low - chunk.offsets[0], high - low)
                _place(data, (count, *shape[1:]), part, b"".join(rows), width)
                filled += elements(part.sizes) * width
        if filled != len(data):
            raise FormatFault(
                "tensor-incomplete", f"the pieces leave a gap or overlap in rows {first} to {first + count}"
            )
        for at in range(0, len(data), BLOCK):
            yield bytes(data[at : at + BLOCK])


def _piece(origin: InPieces, chunk: Chunk, first: int = 0, count: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a piece, or of `count` of its rows from the `first` on."""
    with opened(Path(origin.folder, chunk.file)) as source:
        part = source.part(chunk.offset, chunk.length)
        found = torch_zip.read_from(part)
        if len(found.tensors) != 1 or found.blocked or found.tensors[0].elements != elements(chunk.sizes):
            raise FormatFault("metadata-damaged", f"a piece in {chunk.file} is not what .metadata says")
        tensor = found.tensors[0]
        if tensor.dtype != origin.dtype:
            raise FormatFault("metadata-damaged", f"a piece in {chunk.file} has another dtype than .metadata says")
        if tensor.stride is not None and tensor.shape != chunk.sizes:
            raise FormatFault("metadata-damaged", f"a piece in {chunk.file} has another shape than .metadata says")
        if count is not None:
            tensor = _rows(tensor._replace(shape=chunk.sizes), first, count)
        yield from blocks(source, tensor, big_endian=found.facts.get("byteorder") == "big")


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    """Return some rows of a tensor, as a tensor."""
    width = BITS[tensor.dtype] // 8
    inner = elements(tensor.shape[1:])
    step = tensor.stride[0] if tensor.stride is not None else inner
    return tensor._replace(
        shape=(count, *tensor.shape[1:]),
        nbytes=count * inner * width,
        offset=None if tensor.offset is None else tensor.offset + first * step * width,
    )


def _place(data: bytearray, shape: tuple[int, ...], chunk: Chunk, piece: bytes, width: int) -> None:
    """Copy one piece into a whole tensor, row by row."""
    row = chunk.sizes[-1] * width
    lead = chunk.sizes[:-1]
    for number in range(elements(lead)):
        rest, position = number, 0
        index = []
        for side in reversed(lead):
            rest, here = divmod(rest, side)
            index.append(here)
        for side, begin, here in zip(shape[:-1], chunk.offsets[:-1], reversed(index), strict=True):
            position = position * side + begin + here
        at = (position * shape[-1] + chunk.offsets[-1]) * width
        data[at : at + row] = piece[number * row : (number + 1) * row]
