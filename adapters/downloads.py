"""What the Hub's client wrote down beside a file that it downloaded: its commit and its checksum there.

`hf download --local-dir` leaves `.cache/huggingface/download/<file>.metadata`, three lines: commit, ETag, time (read in
huggingface_hub's `_local_folder.py`). In a Hub cache a file is a link to `blobs/<ETag>`. The ETag of a stored object is
its sha256, that of any other file the id that Git gives to its bytes.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters.formats.source import contents
from weighbridge.registry.findings import finding
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

RECORDS: Final = ".cache/huggingface/download"
_RECORD_MAX: Final = 4096
_SMALL_MAX: Final = 16 << 20
"""Bytes of a file that is read again because only its Git id is recorded; the Hub stores larger ones by sha256."""

_UP: Final = 3
"""Folders above a file of a bundle in which the records of its download may lie."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Record(NamedTuple):
    """The commit that a file came from, its sha256 or its Git id there, and when that was true (seconds since 1970)."""

    commit: str | None
    sha256: str | None
    git: str | None
    at: float


def record(folder: Path, name: str) -> Record | None:
    """Return what is written down of a file of a folder, None where nothing usable is. Raises nothing."""
    try:
        lines = contents(folder / RECORDS / f"{name}.metadata", _RECORD_MAX).decode().split("\n")
        commit, etag, at = lines[0].strip(), lines[1].strip().strip('"'), float(lines[2])
    except (OSError, ValueError, IndexError):
        return _blob(os.path.realpath(folder / name))
    if _COMMIT.fullmatch(commit) is None:
        return None
    return _of(commit, etag, at)


def fresh(record: Record, file: Path) -> bool:
    """Tell whether a file was not touched since its record was written, by the client's own rule. Raises nothing."""
    try:
        return file.stat().st_mtime - 1 <= record.at
    except OSError:
        return False


def _blob(real: str) -> Record | None:
    """Return what the place of a file in a Hub cache says of it; `real` is a path without links."""
    folder, name = os.path.split(real)
    cache, blobs = os.path.split(folder)
    if blobs != "blobs" or not os.path.basename(cache).startswith("models--"):  # noqa: PTH119 - thousands of files
        return None
    return _of(None, name, float("inf"))


def _of(commit: str | None, etag: str, at: float) -> Record | None:
    if _SHA256.fullmatch(etag):
        return Record(commit, etag, None, at)
    return Record(commit, None, etag, at) if _COMMIT.fullmatch(etag) else None


def compared(files: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """Return a finding for each file that is not what its record says was downloaded.

    A file is its path in the bundle, its real path on the disk, and its sha256.
    """
    told = []
    holders: dict[tuple[str, int], Path | None] = {}  # by folder: a bundle may have thousands of files
    for path, source, sha256 in files:
        known = _record_of(path, source, holders)
        if known is None or _same(known, Path(source), sha256):
            continue
        at = f" of commit {known.commit[:12]}" if known.commit else ""
        recorded = f"sha256 {known.sha256[:12]}" if known.sha256 else f"Git id {(known.git or '')[:12]}"
        touched = not fresh(known, Path(source))
        why = "it was written to since" if touched else "its time says that nobody wrote to it since: look at the disk"
        told.append(
            finding(
                "download-differs",
                path,
                f"{shown(path)} is not what was downloaded from the Hub ({recorded}{at}); {why}",
                "nothing, if the change is meant; else download it again",
                recorded=known.sha256 or known.git,
                commit=known.commit,
                touched=touched,
            )
        )
    return told


def _record_of(path: str, source: str, holders: dict[tuple[str, int], Path | None]) -> Record | None:
    """Return the record of a file of a bundle: beside the bundle's own folder, or a few folders above it."""
    at = os.path.split(source)[0], path.count("/") + 1
    if at not in holders:
        holders[at] = _holder(Path(source), at[1])
    folder = holders[at]
    return _blob(source) if folder is None else record(folder, Path(source).relative_to(folder).as_posix())


def _holder(source: Path, inside: int) -> Path | None:
    """Return the folder that holds the records of a file so deep in its bundle, None where none does."""
    for depth in range(inside, inside + _UP):
        if len(source.parts) <= depth + 1:
            break
        folder = source.parents[depth - 1]
        if (folder / RECORDS).is_dir():
            return folder
    return None


def _same(known: Record, source: Path, sha256: str) -> bool:
    if known.sha256 is not None:
        return known.sha256 == sha256
    try:
        if source.stat().st_size > _SMALL_MAX:
            return True
        body = source.read_bytes()
    except OSError:
        return True
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest() == known.git
