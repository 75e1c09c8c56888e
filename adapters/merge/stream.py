"""Write one file of the result: read a block, change, round, hash and write it; memory does not grow with the model.

Source files are only ever opened for reading; the file is written at its own place and never linked to the base's.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np

from weighbridge.adapters.formats.safetensors import BITS
from weighbridge.adapters.merge import block
from weighbridge.adapters.merge.block import Array, Room
from weighbridge.adapters.merge.tally import Tally
from weighbridge.adapters.merge.values import Origin, OutFile, Plan, Step
from weighbridge.registry import disk

Progress = Callable[[int], None]
EVERY: Final = 16
"""Of a large merge every so manieth block is looked at for the share that stayed; of a small one all."""

SMALL: Final = 64 << 20
"""Bytes of touched tensors up to which a merge is small."""

_FLOAT_BYTES: Final = 8
_SYNC: Final = 8 << 20
"""Bytes after which the disk begins to write them, so that little is left for the end."""


class Written(NamedTuple):
    """One file as it was written."""

    path: str
    size: int
    sha256: str
    tallies: dict[str, Tally]


class Files:
    """The source files of a plan, open for reading. A context manager."""

    def __init__(self, plan: Plan) -> None:
        self._descriptors = [os.open(s.path, os.O_RDONLY | os.O_CLOEXEC) for s in plan.sources]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def into(self, file: int, at: int, buffer: memoryview) -> None:
        """Fill a buffer from a place in a file. Raises OSError where the file ends before."""
        read_into(self._descriptors[file], at, buffer)

    def load(self, origin: Origin) -> Array:
        """Return a whole tensor, in its own dtype and shape."""
        raw = bytearray(byte_count(origin))
        self.into(origin.file, origin.at, memoryview(raw))
        return np.frombuffer(raw, block.dtype_of(origin.dtype)).reshape(origin.shape)

    def rows(self, origin: Origin, columns: int, start: int, stop: int, room: Room) -> Array:
        """Return some rows of a tensor seen as a matrix, in its own dtype; the next call uses the memory again."""
        kind = block.dtype_of(origin.dtype)
        space = room.take("raw", (stop - start, columns), kind)
        self.into(origin.file, origin.at + start * columns * kind.itemsize, flat(space))
        return space


def flat(array: Array) -> memoryview:
    """Return the bytes of an array whose rows follow each other, to be read or filled."""
    raw: Any = array.reshape(-1).view(np.uint8)
    return memoryview(raw)


def read_into(descriptor: int, at: int, buffer: memoryview) -> None:
    """Fill a buffer from a place in an open file. Raises OSError where the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], at + done)
        if not count:
            raise OSError(f"the file ends {len(buffer) - done} bytes too early")
        done += count


def byte_count(origin: Origin) -> int:
    """Return the bytes of a stored tensor."""
    return origin.count * BITS[origin.dtype] // 8


def every(plan: Plan) -> int:
    """Return the distance of the blocks that are looked at."""
    touched = sum(byte_count(step.origin) for step in plan.steps if step.factors or step.computed)
    return 1 if touched <= SMALL else EVERY


class _Sink:
    """The written file and its digest."""

    def __init__(self, descriptor: int, progress: Progress) -> None:
        self._descriptor = descriptor
        self._progress = progress
        self.digest = hashlib.sha256()
        self.at = 0
        self._begun = 0

    def put(self, data: Any) -> None:
        view = flat(data) if isinstance(data, np.ndarray) else memoryview(data)
        self.digest.update(view)
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self.at + done)
        self.at += len(view)
        if self.at - self._begun >= _SYNC:
            disk.begin_sync(self._descriptor, self._begun, self.at - self._begun)
            self._begun = self.at
        self._progress(len(view))


class Base(NamedTuple):
    """How an engine reads the base's values of a step: rows from and to, into memory that the next call uses again.

    `size` is the rows of a block of the processor's; `looked` tells whether the block of a number is looked at.
    """

    rows: Callable[[int, int], Array]
    size: int
    looked: Callable[[int], bool]


class Changed(NamedTuple):
    """Some rows with their new values as they are stored, and whether any of them changed.

    `seen` are the blocks that were looked at: before, wanted and after, in single precision.
    """

    out: Array
    moved: bool
    seen: list[tuple[Array, Array, Array]]


class Engine(Protocol):
    """Another way to do the arithmetic (`device.Engine`); `name` is that of its device."""

    @property
    def name(self) -> str:
        """What the device is called."""
        ...

    def able(self, step: Step) -> bool:
        """Tell whether it carries a step out."""
        ...

    def change(self, it: block.Prepared, base: Base) -> Iterator[Changed]:
        """Yield the rows of a tensor in order, each stretch with its new values."""
        ...


def write(
    file: OutFile, files: Files, target: str, look: int, progress: Progress, *, engine: Engine | None = None
) -> Written:
    """Write one file durably and return its digest. Raises OSError, ArithmeticError that names the tensor.

    `engine` does the arithmetic of the steps it is able to; None is numpy.
    """
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        sink = _Sink(descriptor, progress)
        sink.put(file.header)
        room = Room()
        tallies: dict[str, Tally] = {}
        for step in file.steps:
            if sink.at != step.at:
                raise AssertionError(f"{step.name} would begin at {sink.at}, not at {step.at}")
            if step.verbatim:
                _copy(step, files, sink, room)
                continue
            try:
                there = engine if engine is not None and engine.able(step) else None
                tally = _elsewhere(step, files, sink, there, look) if there else _change(step, files, sink, room, look)
            except ArithmeticError as error:
                raise ArithmeticError(f"{step.name}: {error}") from error
            if tally is not None:
                tallies[step.name] = tally
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(file.path, sink.at, sink.digest.hexdigest(), tallies)


def _copy(step: Step, files: Files, sink: _Sink, room: Room) -> None:
    total = byte_count(step.origin)
    for start, stop in block.spans(total, block.BLOCK):
        space = room.take("copy", (1, stop - start), np.uint8)[0]
        files.into(step.origin.file, step.origin.at + start, flat(space))
        sink.put(space)


def _change(step: Step, files: Files, sink: _Sink, room: Room, look: int) -> Tally | None:
    it = block.prepare(step, files.load)
    norms = column_norms(it, files, room) if step.magnitude is not None and step.magnitude.columns else None
    rows, columns = step.matrix
    width = max(block.dtype_of(step.origin.dtype).itemsize, block.dtype_of(step.dtype).itemsize)
    tally = Tally() if step.factors or step.computed else None
    size = block.block_rows(columns, width)
    for number, (start, stop) in enumerate(block.spans(rows, size)):
        raw = files.rows(step.origin, columns, start, stop, room)
        values = room.take("values", raw.shape, it.wide)
        np.copyto(values, raw, casting="unsafe")
        looked = tally is not None and (number % look == 0 or not tally.changed)
        before = _before(step, values, files, (start, stop), room) if looked else None
        new = block.apply(it, values, start, stop, room=room, norms=norms)
        out = block.rounded(new, step.dtype, room)
        sink.put(out)
        if before is None or tally is None:
            continue
        after = out.astype(it.wide)
        if number % look == 0:
            tally.add(before, new, after)
        elif bool(np.any(after != before)):
            tally.changed = True
    return tally


def _elsewhere(step: Step, files: Files, sink: _Sink, engine: Engine, look: int) -> Tally:
    """Write a tensor whose arithmetic an engine does; the same blocks are looked at as by `_change`."""
    it = block.prepare(step, files.load)
    _, columns = step.matrix
    width = max(block.dtype_of(step.origin.dtype).itemsize, block.dtype_of(step.dtype).itemsize)
    room, tally = Room(), Tally()

    def rows(start: int, stop: int) -> Array:
        return files.rows(step.origin, columns, start, stop, room)

    base = Base(rows, block.block_rows(columns, width), lambda number: number % look == 0)
    for changed in engine.change(it, base):
        sink.put(changed.out)
        tally.changed = tally.changed or changed.moved
        for before, wanted, after in changed.seen:
            tally.add(before, wanted, after)
    return tally


def _before(step: Step, values: Array, files: Files, span: tuple[int, int], room: Room) -> Array:
    """Return the base's values of a block, in the arithmetic's dtype; the memory is the caller's."""
    if not step.computed or step.base is None:
        return values.copy()
    return files.rows(step.base, values.shape[1], *span, room).astype(values.dtype)


def column_norms(it: block.Prepared, files: Files, room: Room, wide: Any = None) -> Array:
    """Return the norms of the columns of a tensor with its products added: the first of two passes."""
    rows, columns = it.step.matrix
    norms = block.ColumnNorms(columns, wide or it.wide)
    size = block.block_rows(columns, _FLOAT_BYTES)
    for start, stop in block.spans(rows, size):
        raw = files.rows(it.step.origin, columns, start, stop, room)
        values = raw.astype(it.wide)
        added = block.delta(it, start, stop, room)
        norms.feed(values if added is None else values + added)
    return norms.result()


def beyond(plan: Plan, files: Files) -> list[tuple[str, float]]:
    """Return every tensor that its new dtype cannot hold, with its largest magnitude (NaN where it holds one)."""
    room = Room()
    found: list[tuple[str, float]] = []
    for step in plan.steps:
        if step.verbatim or step.touched:
            continue
        rows, columns = step.matrix
        top = 0.0
        for start, stop in block.spans(rows, block.block_rows(columns, _FLOAT_BYTES)):
            values = files.rows(step.origin, columns, start, stop, room).astype(np.float64)
            top = float(np.maximum(top, np.abs(values).max(initial=0.0)))
        if not top < block.limit(step.dtype):
            found.append((step.name, top))
    return found
