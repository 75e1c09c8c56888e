"""Tar archives, packed or not: the list of names, bounded. Nothing is ever taken out of one.

torch 0.1 wrote tar files with the members sys_info, pickle, storages and tensors; NeMo and AllenNLP pack whole folders.
"""

import bz2
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.formats.protocol import Directory, Entry, FormatFault, Hazard
from weighbridge.adapters.formats.source import Source, opened

MEMBER_LIMIT: Final = 10_000
UNPACKED_LIMIT: Final = 64 << 20
"""Bytes that are unpacked to find names behind names."""

TAR_MARK: Final = b"ustar"
_BLOCK: Final = 512
_PIECE: Final = 64 << 10
_OLD_TORCH: Final = frozenset({"sys_info", "pickle", "storages", "tensors"})
PACKERS: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
}


def packer(head: bytes) -> str | None:
    """Return how a file is packed, by its first bytes."""
    return next((name for mark, name in PACKERS.items() if head.startswith(mark)), None)


def is_tar(head: bytes) -> bool:
    """Return whether some first bytes are a tar header."""
    return len(head) >= _BLOCK and head[257:262] == TAR_MARK


def read(path: Path) -> Directory:
    """Return the names in a tar archive, packed or not. Raises OSError, FormatFault."""
    with opened(path) as source:
        return read_from(source)


def read_from(source: Source) -> Directory:
    """Return the names in an open one. Raises FormatFault."""
    head = source.head(_BLOCK)
    if is_tar(head):
        return _tar(_Plain(source), None)
    packed = packer(head)
    if packed is None:
        raise FormatFault("not-an-archive", "the file is no archive that is known", file_bytes=source.length)
    opener = _OPENERS.get(packed)
    if opener is None:
        return Directory(packed, facts={"container": packed, "packed": packed})
    return _tar(_Packed(source, opener()), packed)


class _Plain:
    """Blocks of a file at positions."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = 0

    def take(self) -> bytes:
        """Return the next block, fewer bytes at the end."""
        size = min(_BLOCK, self.source.length - self.at)
        data = self.source.at(self.at, size) if size > 0 else b""
        self.at += size
        return data

    def skip(self, size: int) -> bool:
        """Pass over bytes; False where the archive ends before them."""
        self.at += size
        return self.at <= self.source.length


class _Packed:
    """Blocks of what a packed file unpacks to, up to a limit."""

    def __init__(self, source: Source, unpacker: Any) -> None:
        self.left = UNPACKED_LIMIT
        self.data = b""
        self.parts = _unpacked(source, unpacker)

    def take(self) -> bytes:
        """Return the next block, fewer bytes at the end."""
        self._hold(_BLOCK)
        data, self.data = self.data[:_BLOCK], self.data[_BLOCK:]
        return data

    def skip(self, size: int) -> bool:
        """Pass over bytes; False where the archive or the budget ends before them."""
        while size > len(self.data):
            size -= len(self.data)
            self.data = b""
            if not self._more():
                return False
        self.data = self.data[size:]
        return True

    def _hold(self, size: int) -> None:
        while len(self.data) < size and self._more():
            pass

    def _more(self) -> bool:
        part = next(self.parts, b"") if self.left > 0 else b""
        self.left -= len(part)
        self.data += part
        return bool(part)


def _unpacked(source: Source, unpacker: Any) -> Iterator[bytes]:
    at = 0
    while at < source.length:
        raw = source.at(at, min(_PIECE, source.length - at))
        at += len(raw)
        while raw:
            try:
                part = unpacker.decompress(raw, _PIECE)
            except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError) as error:
                raise FormatFault(
                    "header-damaged", "the archive cannot be unpacked", file_bytes=source.length
                ) from error
            raw = getattr(unpacker, "unconsumed_tail", b"")
            if part:
                yield part
            elif not raw:
                break
            while not raw and not getattr(unpacker, "needs_input", True) and not unpacker.eof:
                part = unpacker.decompress(b"", _PIECE)
                if not part:
                    break
                yield part
        if unpacker.eof:
            return


def _xz() -> Any:
    return lzma.LZMADecompressor(memlimit=UNPACKED_LIMIT)


def _gzip() -> Any:
    return zlib.decompressobj(31)


def _bzip2() -> Any:
    return bz2.BZ2Decompressor()


_OPENERS: Final = {"gzip": _gzip, "bzip2": _bzip2, "xz": _xz}


def _tar(blocks: _Plain | _Packed, packed: str | None) -> Directory:
    entries: list[Entry] = []
    complete = False
    while len(entries) < MEMBER_LIMIT:
        header = blocks.take()
        if packed and not entries and not is_tar(header):
            return Directory(packed, facts={"container": packed, "packed": packed})
        if len(header) < _BLOCK or not header.strip(b"\0"):
            complete = len(header) == _BLOCK
            break
        if not is_tar(header):
            raise FormatFault("header-damaged", f"what follows member {len(entries)} is no tar header")
        size = _octal(header[124:136])
        name = (header[345:500].rstrip(b"\0") + b"/" if header[345:346] != b"\0" else b"") + header[:100].rstrip(b"\0")
        if header[156:157] in {b"0", b"\0", b"7"}:
            entries.append(Entry(name.decode("utf-8", "replace"), "file", 0, size))
        if not blocks.skip(-(-size // _BLOCK) * _BLOCK):
            break
    names = {entry.name for entry in entries}
    facts: dict[str, Any] = {"container": "tar", "packed": packed, "members": len(entries), "complete": complete}
    if packed is None and names >= _OLD_TORCH:
        text = "this is a torch file from before 2017 (a tar archive): open it with torch and save it again"
        facts["container"] = "torch-tar"
        return Directory("torch-tar", (), tuple(entries), (Hazard("torch-tar", "block", "", text),), facts)
    hazards = () if complete else (Hazard("archive-cut", "note", "", "the list of names may not be whole"),)
    return Directory("tar", (), tuple(entries), hazards, facts)


def _octal(raw: bytes) -> int:
    if raw[:1] == b"\x80":
        return int.from_bytes(raw[4:], "big")
    text = raw.strip(b" \0")
    if not text:
        return 0
    try:
        value = int(text, 8)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 62:
        raise FormatFault("header-damaged", "a tar header has no valid size")
    return value
