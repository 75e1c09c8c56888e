"""LZ4 frames, unpacked in plain Python: enough for the chunks that tests send."""

from typing import Final

_MAGIC: Final = b"\x04\x22\x4d\x18"


def decode_frame(packed: bytes) -> bytes:
    """Return the bytes of a frame. Raises ValueError when it is none."""
    if packed[:4] != _MAGIC:
        raise ValueError("no LZ4 frame")
    flags = packed[4]
    at = 6 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0) + 1
    found = bytearray()
    while True:
        word = int.from_bytes(packed[at : at + 4], "little")
        at += 4
        if word == 0:
            return bytes(found)
        size = word & 0x7FFFFFFF
        block = packed[at : at + size]
        at += size + (4 if flags & 0x10 else 0)
        if word >> 31:
            found += block
        else:
            _block(block, found)


def _block(block: bytes, found: bytearray) -> None:
    at = 0
    while at < len(block):
        token = block[at]
        at += 1
        length, at = _length(block, at, token >> 4)
        found += block[at : at + length]
        at += length
        if at >= len(block):
            return
        offset = block[at] | block[at + 1] << 8
        length, at = _length(block, at + 2, token & 15)
        length += 4
        start = len(found) - offset
        if offset >= length:
            found += found[start : start + length]
        else:  # it reaches into what it writes: the piece repeats
            piece = bytes(found[start:])
            found += (piece * (length // offset + 1))[:length]


def _length(block: bytes, at: int, length: int) -> tuple[int, int]:
    if length == 15:
        while True:
            more = block[at]
            at += 1
            length += more
            if more != 255:
                break
    return length, at
