"""The bytes of one tensor of a torch file, in plain row order and little end first, block by block in bounded memory.

A view is read as the tensor it is: only its own elements, never its whole storage. Nothing but the standard library.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from weighbridge.adapters.formats.protocol import BITS, FormatFault, Tensor
from weighbridge.adapters.formats.source import Source

BLOCK: Final = 1 << 20
"""Bytes of a block: larger ones leave the cache between reading, hashing and writing."""

SPAN: Final = 32 << 20
"""Bytes of a view that are held at once; a larger one is read in parts."""

_CODES: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_HALVES: Final = frozenset({"C64", "C32"})


def blocks(source: Source, tensor: Tensor, *, big_endian: bool = False) -> Iterator[bytes]:
    """Yield a tensor's bytes. Raises FormatFault where they are not to be had, or the file became shorter."""
    if tensor.nbytes == 0:
        return
    if tensor.offset is None or tensor.unsupported is not None:
        raise FormatFault("record-missing", f"the bytes of {tensor.name} are not to be had", bad_tensor=tensor.name)
    size = BITS[tensor.dtype] // 8
    if tensor.stride is None:
        parts = _plain(source, tensor.offset - source.base, tensor.nbytes)
    elif size not in _CODES:
        raise FormatFault("tensor-invalid", f"a view of {tensor.dtype} cannot be read", bad_tensor=tensor.name)
    else:
        parts = _joined(_view(source, tensor.offset - source.base, tensor.shape, tensor.stride, size))
    width = size // 2 if tensor.dtype in _HALVES else size
    for part in parts:
        yield turned(part, width) if big_endian and width > 1 else part


def _plain(source: Source, at: int, left: int) -> Iterator[bytes]:
    while left > 0:
        count = min(BLOCK, left)
        yield source.at(at, count)
        at += count
        left -= count


def _joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Put small parts together; every block ends on an element."""
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= BLOCK:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def turned(part: bytes, width: int) -> bytes:
    """Return elements of a width with their bytes in reverse order."""
    turned = bytearray(len(part))
    for i in range(width):
        turned[i::width] = part[width - 1 - i :: width]
    return bytes(turned)


# ---------------------------------------------------------------------------------------------------------------- views


def _view(source: Source, at: int, shape: Sequence[int], stride: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield a view in row order; `at` is the byte of its first element."""
    kept = [(side, step) for side, step in zip(shape, stride, strict=True) if side != 1]
    shape, stride = [side for side, _ in kept], [step for _, step in kept]
    span = (sum((side - 1) * step for side, step in kept) + 1) * size
    if span <= SPAN:
        yield from _rows(memoryview(source.at(at, span)), shape, stride, size)
        return
    count = size
    for side in shape:
        count *= side
    if count <= SPAN:
        data, own = _gathered(source, at, shape, stride, size)
        yield from _rows(memoryview(data), shape, own, size)
        return
    inner = count // shape[0]
    step = max(1, SPAN // inner)
    for first in range(0, shape[0], step):
        rows = min(step, shape[0] - first)
        yield from _view(source, at + first * stride[0] * size, [rows, *shape[1:]], stride, size)


def _gathered(
    source: Source, at: int, shape: Sequence[int], stride: Sequence[int], size: int
) -> tuple[bytearray, list[int]]:
    """Read only the elements of a view, in the order they lie in, and return them with their strides there."""
    order = sorted((i for i in range(len(shape)) if stride[i]), key=lambda i: (-stride[i], -shape[i]))
    own = [0] * len(shape)
    step = 1
    for i in reversed(order):
        own[i] = step
        step *= shape[i]
    run = 1
    while order and stride[order[-1]] == run:
        run *= shape[order.pop()]
    data = bytearray(step * size)
    target = 0
    for begin in _places([shape[i] for i in order], [stride[i] for i in order]):
        data[target : target + run * size] = source.at(at + begin * size, run * size)
        target += run * size
    return data, own


def _places(shape: Sequence[int], stride: Sequence[int]) -> Iterator[int]:
    if not shape:
        yield 0
        return
    for first in range(shape[0]):
        base = first * stride[0]
        for rest in _places(shape[1:], stride[1:]):
            yield base + rest


def _rows(data: memoryview, shape: Sequence[int], stride: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield the elements of a view of bytes at hand, row by row."""
    if not shape:
        yield data[:size].tobytes()
        return
    cells = data[: len(data) // size * size].cast("B").cast(_CODES[size])
    last, step = shape[-1], stride[-1]
    for begin in _places(shape[:-1], stride[:-1]):
        if step == 0:
            yield cells[begin : begin + 1].tobytes() * last
        else:
            yield cells[begin : begin + (last - 1) * step + 1 : step].tobytes()
