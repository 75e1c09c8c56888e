"""The folders merges are made in: whether there is room, what stands there, and what nobody will go on with.

All of it is ours: what lies below belongs to a merge of the store, or to none.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighbridge.adapters.merge import staging, start
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.daemon.mergestore import ACTIVE, CLOSED, Merge, MergeStore
from weighbridge.registry import disk, errors

KEPT: Final = 2 * 86_400.0
"""Seconds for which what a merge left is kept after it was given up: another try goes on from there."""


def place(scratch: Path, merge: Merge) -> Path:
    """Return the folder of a merge: its adapter, what is being made, and the result."""
    return scratch / "jobs" / merge.home / merge.ref


def standing(seen: Look, target: Path) -> Merged | None:
    """Return the result where it stands; one of another plan is removed: adapter, base or program changed since.

    Raises what `start.standing` raises, and DeniedError where it cannot be removed.
    """
    there = start.standing(seen, target)
    if there is None:
        with disk.speaking(f"{target} cannot be removed"), suppress(FileNotFoundError):
            shutil.rmtree(target)
    return there


def room(seen: Look, scratch: Path, reserve: int) -> None:
    """Raise DiskFullError where a result would eat into what stays free for others."""
    size = staging.needed(*staging.allowed(seen))
    free = disk.free_bytes(scratch)
    if free - size < reserve:
        raise errors.DiskFullError(
            f"there is no room for the merged model in {scratch}",
            why=f"it needs {size} bytes, {free} are free, {reserve} stay free",
            fix="free some space, lower [daemon] disk_reserve, or set [merge] scratch to another disk",
            needed_bytes=size,
            free_bytes=free,
        )


def sweep(scratch: Path, store: MergeStore, now: float) -> None:
    """Remove what merges left that nobody will go on with; what we do not know of may be a try we forgot."""
    known = {place(scratch, one): one for one in store.merges()}
    since = now - KEPT
    for folder in scratch.glob("jobs/*/*"):
        one = known.get(folder)
        with suppress(OSError):
            at = folder.stat().st_mtime if one is None else one.updated_at
            if one is not None and (one.state in ACTIVE or (one.state in CLOSED and at > since)):
                continue
            if one is not None or at < since:
                shutil.rmtree(folder, ignore_errors=True)
    if not store.active():
        shutil.rmtree(scratch / "bases", ignore_errors=True)
