"""The file that is sent: opened, and read whole into the memory that goes out, proven to be what was hashed before."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighbridge.registry import disk, errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Progress


@contextmanager
def opened(source: Path) -> Iterator[int]:
    """Open a source for reading. Raises VanishedError, and what a disk answers instead."""
    try:
        descriptor = disk.open_source(source)
    except FileNotFoundError as error:
        raise errors.VanishedError(f"{shown(source.name)} is gone", why=f"{shown(str(source))} went away") from error
    except OSError as error:
        raise disk.translate(error, f"cannot read {shown(str(source))}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def whole(descriptor: int, source: Path, body: bytearray, sha256: str, progress: Progress | None) -> None:
    """Read a file into the buffer that is sent. Raises SourceChangedError when it is not what was hashed."""
    have = 0
    with disk.speaking(f"cannot read {shown(str(source))}"), memoryview(body) as view:
        while have < len(body) and (count := os.readv(descriptor, [view[have : have + CHUNK]])):
            have += count
            if progress is not None:
                progress(count)
        more = len(os.read(descriptor, 1))
    found = hashlib.sha256(body).hexdigest()
    if have != len(body) or more or found != sha256:
        read = f"{have + more} bytes with sha256 {found[:12]} were read"
        raise changed(source, f"{read}, expected were {len(body)} with {sha256[:12]}")


def changed(source: Path, why: str) -> errors.SourceChangedError:
    """Say that a source is not what it was."""
    return errors.SourceChangedError(
        f"{shown(source.name)} changed while it was read", why=why, fix="wait until its writer is done, then repeat"
    )
