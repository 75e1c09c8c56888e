"""Good files with something done to them: the strategy of every fuzz test of a container reader."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from weighbridge.adapters.formats.protocol import Directory, FormatFault


@st.composite
def mutated(draw: st.DrawFn, seed: bytes) -> bytes:
    """Flip, cut, insert, truncate, overwrite or repeat parts of a good file."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.integers(0, 5))
        if kind == 0 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == 2:
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == 3:
            data = data[:at]
        elif kind == 4:
            data[at : at + 8] = struct.pack("<Q", draw(st.sampled_from([0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 63])))
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


def storm(seed: bytes, count: int, source: random.Random) -> Iterator[bytes]:
    """Yield mutations of a good file by the thousand: the same kinds as `mutated`, without its bookkeeping."""
    numbers = [
        struct.pack("<Q", value) for value in (0, 1, 127, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63)
    ]
    for _ in range(count):
        data = bytearray(seed)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(data) or 1)
            kind = source.randrange(7)
            if kind == 0 and data:
                data[at] ^= 1 << source.randrange(8)
            elif kind == 1 and data:
                data[at] = source.randrange(256)
            elif kind == 2:
                del data[at : at + source.randint(1, 40)]
            elif kind == 3:
                data[at:at] = source.randbytes(source.randint(1, 12))
            elif kind == 4:
                del data[at:]
            elif kind == 5:
                width = source.choice((1, 2, 4, 8))
                data[at : at + width] = source.choice(numbers)[:width]
            else:
                data[at:at] = data[at : at + source.randint(1, 200)]
        yield bytes(data)


@contextmanager
def memory_file() -> Iterator[Path]:
    """Give a file without a disk behind it: thousands of small writes cost nothing there."""
    descriptor = os.memfd_create("fuzz")
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def outcome(read: Callable[[Path], Directory], path: Path, data: bytes) -> Directory | None:
    """Write and read; anything but a directory or a FormatFault comes out as it is, and fails the test."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
    words: tuple[Any, ...]
    directory = None
    try:
        directory = read(path)
    except FormatFault as fault:
        words = (fault.code, fault.message)
    else:
        words = tuple(hazard.message for hazard in directory.hazards)
        if not directory.blocked:
            assert all(tensor.offset is None or tensor.offset <= len(data) for tensor in directory.tensors)
    assert all(word.isprintable() and len(word) < 2000 for word in words)
    return directory
