"""Digests, to the letter of docs/formats.md: content, tensors, derivation, and the hash of bytes as stored."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from weighbridge.registry.types import FileEntry

CHUNK: Final = 1 << 20
"""Bytes per read: 1 MiB keeps SHA-256 at full speed (larger buffers only leave the cache)."""


def sha256_bytes(stored: bytes | memoryview) -> str:
    """Return the lower-case hex sha256 of bytes as stored."""
    return hashlib.sha256(stored).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the lower-case hex sha256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


class PartHashes:
    """The sha256 of each part of so many bytes of a file; give it the whole file in order, then ask."""

    def __init__(self, part: int) -> None:
        self._part = part
        self._left = part
        self._digest = hashlib.sha256()
        self._done: list[bytes] = []

    def see(self, block: bytes | bytearray) -> None:
        """Take the next bytes, of any number; they may be overwritten afterwards."""
        rest = memoryview(block)
        while rest:
            self._digest.update(rest[: self._left])
            taken = min(self._left, len(rest))
            self._left, rest = self._left - taken, rest[taken:]
            if not self._left:
                self._done.append(self._digest.digest())
                self._left, self._digest = self._part, hashlib.sha256()

    def digests(self) -> list[bytes]:
        """Return the hashes of the parts in order, the last of which may be shorter than the others."""
        return self._done if self._left == self._part else [*self._done, self._digest.digest()]


def content_digest(files: Iterable[FileEntry]) -> str:
    """Return `sha256:...` over the payload files: the identity of a bundle.

    The line `weighbridge-content-v1`, then `path NUL size NUL sha256` per file sorted by the UTF-8 bytes of the path,
    each line ended by LF (docs/formats.md).
    """
    lines = sorted((f.path.encode(), f"{f.size}\0{f.sha256}".encode()) for f in files)
    body = b"".join(path + b"\0" + rest + b"\n" for path, rest in lines)
    return "sha256:" + sha256_bytes(b"weighbridge-content-v1\n" + body)


def tensor_digest(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return `sha256:...` over (name, dtype, shape, sha256 of the bytes), whatever the header's order.

    `dtype` is spelled as in safetensors; a scalar has empty dims.
    """
    lines = sorted(
        (name.encode(), f"{dtype}\0{','.join(map(str, shape))}\0{sha256}".encode())
        for name, dtype, shape, sha256 in tensors
    )
    body = b"".join(name + b"\0" + rest + b"\n" for name, rest in lines)
    return "sha256:" + sha256_bytes(b"weighbridge-tensors-v1\n" + body)


def derivation_key(recipe: str, parents: Mapping[str, str], options: Mapping[str, str], tool_major: int) -> str:
    """Return `sha256:...` that names a derived artifact by what it is made from.

    Lines `recipe=`, one per parent in the order given, options sorted by key, `tool-major=` last. Parents are content
    digests with or without their `sha256:`.
    """
    lines = [f"recipe={recipe}"]
    lines += [f"{role}={digest.removeprefix('sha256:')}" for role, digest in parents.items()]
    lines += [f"{key}={value}" for key, value in sorted(options.items())]
    lines.append(f"tool-major={tool_major}")
    body = "".join(line + "\n" for line in lines)
    return "sha256:" + sha256_bytes(b"weighbridge-derivation-v1\n" + body.encode())
