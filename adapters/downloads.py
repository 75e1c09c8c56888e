"""What the Hub's client wrote down beside a file that it downloaded: its commit and its checksum there.

`hf download --local-dir` leaves `.cache/huggingface/download/<file>.metadata`, three lines: commit, ETag, time (read in
huggingface_hub's `_local_folder.py`). In a Hub cache a file is a link to `blobs/<ETag>`. The ETag of a stored object is
its sha256, that of any other file the id that Git gives to its bytes.
"""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

RECORDS: Final = ".cache/huggingface/download"
_RECORD_MAX: Final = 4096
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
        with (folder / RECORDS / f"{name}.metadata").open("rb") as stream:
            lines = stream.read(_RECORD_MAX).decode().split("\n")
        commit, etag, at = lines[0].strip(), lines[1].strip().strip('"'), float(lines[2])
    except (OSError, ValueError, IndexError):
        return _linked(folder / name)
    if _COMMIT.fullmatch(commit) is None:
        return None
    return _of(commit, etag, at)


def fresh(record: Record, file: Path) -> bool:
    """Tell whether a file was not touched since its record was written, by the client's own rule. Raises nothing."""
    try:
        return file.stat().st_mtime - 1 <= record.at
    except OSError:
        return False


def _linked(file: Path) -> Record | None:
    """Return what the place of a file in a Hub cache says of it."""
    real = Path(os.path.realpath(file))
    if real.parent.name != "blobs" or not real.parent.parent.name.startswith("models--"):
        return None
    return _of(None, real.name, float("inf"))


def _of(commit: str | None, etag: str, at: float) -> Record | None:
    if _SHA256.fullmatch(etag):
        return Record(commit, etag, None, at)
    return Record(commit, None, etag, at) if _COMMIT.fullmatch(etag) else None
