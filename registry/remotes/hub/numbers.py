"""The highest number of every name that this machine has seen on a Hub: numbers are never given out twice.

A repository that was deleted takes its ledger and its tags along, and an emptied one may have lost them. What is noted
here outlives it, for this user of this machine; it lies in the cache folder, and without it the Hub's word counts.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from weighbridge.registry.remotes.hub import locks


def highest(folder: Path, name: str) -> int:
    """Return the highest number that was noted for a name; 0 where none was, or where that cannot be read."""
    try:
        return int(_place(folder, name).read_text("ascii"))
    except (OSError, ValueError):
        return 0


def note(folder: Path, name: str, n: int) -> None:
    """Note the highest number of a name, unless a higher one is; that it cannot be written is no reason to fail."""
    place = _place(folder, name)
    fresh = place.with_name(f"{place.name}.{os.getpid()}")
    with locks.held(folder, f"number of {name}"), suppress(OSError):
        if n > highest(folder, name):
            fresh.write_text(f"{n}\n", "ascii")
            fresh.replace(place)


def _place(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.last"
