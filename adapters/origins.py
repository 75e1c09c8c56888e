"""Where a tensor's bytes come from, and how they are streamed: one torch file, stretches of rank files, or pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.dcp import Chunk
from weighbridge.adapters.formats.protocol import BITS, FormatFault, Tensor, elements
from weighbridge.adapters.formats.source import opened
from weighbridge.adapters.formats.torch_bytes import BLOCK, blocks, turned

PIECES_LIMIT: Final = 1 << 30
"""Bytes of a tensor whose pieces must be put together in memory: those cut across its rows."""


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
    size = elements(shape) * BITS[origin.dtype] // 8
    if size > PIECES_LIMIT:
        raise FormatFault("tensor-incomplete", f"a tensor of {size} bytes is cut across its rows: too large to join")
    data = bytearray(size)
    width = BITS[origin.dtype] // 8
    for chunk in origin.chunks:
        _place(data, shape, chunk, b"".join(_piece(origin, chunk)), width)
    for at in range(0, size, BLOCK):
        yield bytes(data[at : at + BLOCK])


def _piece(origin: InPieces, chunk: Chunk) -> Iterator[bytes]:
    with opened(Path(origin.folder, chunk.file)) as source:
        part = source.part(chunk.offset, chunk.length)
        found = torch_zip.read_from(part)
        if len(found.tensors) != 1 or found.blocked or found.tensors[0].elements != elements(chunk.sizes):
            raise FormatFault("metadata-damaged", f"a piece in {chunk.file} is not what .metadata says")
        tensor = found.tensors[0]
        if tensor.dtype != origin.dtype:
            raise FormatFault("metadata-damaged", f"a piece in {chunk.file} has another dtype than .metadata says")
        yield from blocks(source, tensor, big_endian=found.facts.get("byteorder") == "big")


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
