"""A regular file, or a stretch of one, read at positions: every short read is a fault, never a short answer."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from weighbridge.adapters.formats.protocol import FormatFault


class Source(NamedTuple):
    """An open stretch of a file; `length` is fixed when it is opened, so a file that grows or shrinks is noticed."""

    descriptor: int
    length: int
    base: int = 0
    """Where the stretch begins in the file."""

    def at(self, position: int, size: int) -> bytes:
        """Return exactly these bytes. Raises FormatFault `file-short` where they are not there."""
        if position < 0 or size < 0 or position + size > self.length:
            raise FormatFault(
                "file-short",
                f"the file ends at {self.length}, bytes {position} to {position + size} are asked for",
                file_bytes=self.length,
                expected_bytes=position + size,
            )
        data = os.pread(self.descriptor, size, self.base + position)
        if len(data) != size:
            data = self._rest(data, position, size)
        return data

    def _rest(self, data: bytes, position: int, size: int) -> bytes:
        """Read on after a short answer: the system gives at most 2 GiB at once."""
        parts, have = [data], len(data)
        while have < size:
            more = os.pread(self.descriptor, size - have, self.base + position + have)
            if not more:
                raise FormatFault("file-short", "the file became shorter while it was read", file_bytes=self.length)
            parts.append(more)
            have += len(more)
        return b"".join(parts)

    def head(self, size: int) -> bytes:
        """Return the first bytes, fewer where the file is shorter."""
        return self.at(0, min(size, self.length))

    def part(self, position: int, length: int) -> "Source":
        """Return a stretch of this one. Raises FormatFault where it reaches beyond."""
        if position < 0 or length < 0 or position + length > self.length:
            raise FormatFault(
                "file-short",
                f"the file ends at {self.length}, a part from {position} to {position + length} is asked for",
                file_bytes=self.length,
                expected_bytes=position + length,
            )
        return Source(self.descriptor, length, self.base + position)


def contents(path: Path, limit: int) -> bytes:
    """Return the first bytes of a regular file; a pipe or device is refused without waiting. Raises OSError."""
    try:
        with opened(path) as source:
            return source.at(0, min(limit, source.length))
    except FormatFault as fault:
        raise OSError(errno.EPERM, fault.message, os.fspath(path)) from fault


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open a regular file; a FIFO or device is refused without waiting for it. Raises OSError, FormatFault."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise FormatFault("not-a-file", "this is no regular file")
        yield Source(descriptor, state.st_size)
    finally:
        os.close(descriptor)
