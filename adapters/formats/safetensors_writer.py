"""Write safetensors: a header in the library's own order, then the tensors' bytes one after the other.

8 bytes   length of the header
header    JSON, padded with blanks so that the data begins on a multiple of 8
data      tensors of wide elements first, then by name, as the library does it: every tensor is aligned
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from weighbridge.adapters.formats.safetensors import BITS, product

METADATA: Final = {"format": "pt"}
"""What loaders want to see in a header."""


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return product(self.shape) * BITS[self.dtype] // 8


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """Return tensors in the order they lie in a file."""
    return sorted(entries, key=lambda e: (-BITS[e.dtype], e.name))


def header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the length and the header of a file of these tensors, which must be in their order."""
    table: dict[str, object] = {"__metadata__": dict(METADATA if metadata is None else metadata)}
    at = 0
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.size]}
        at += entry.size
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body
