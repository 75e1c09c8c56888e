"""Where bundles for the Hub wait on this machine: private folders in the user's cache."""

import re
import shutil
import stat
import time
from pathlib import Path
from typing import Final

from weighbridge.registry import disk, errors
from weighbridge.registry.refs import shown

_NONCE: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")


def folder(cache: Path, nonce: str) -> Path:
    """Return the folder of a nonce, made when it is new. Raises DeniedError when it is not private."""
    if not _NONCE.fullmatch(nonce):
        raise errors.UsageError(f"'{shown(nonce[:80])}' is not a nonce")
    place = cache / "stage" / nonce
    with disk.speaking(f"cannot stage in {shown(str(cache))}"):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.parent.chmod(0o700)
        mode = place.lstat().st_mode
    if not stat.S_ISDIR(mode) or mode & 0o077:
        raise errors.DeniedError(
            f"the stage folder {shown(str(place))} is not private", why="others can enter it", fix="remove it"
        )
    return place


def sweep(cache: Path, older_than: float) -> int:
    """Remove the folders in which nothing changed for so many seconds; return how many."""
    root = cache / "stage"
    if not root.is_dir():
        return 0
    removed = 0
    with disk.speaking(f"cannot sweep {shown(str(root))}"):
        for place in root.iterdir():
            latest = max((found.lstat().st_mtime for found in (place, *place.rglob("*"))), default=0.0)
            if time.time() - latest >= older_than:
                shutil.rmtree(place, ignore_errors=True)
                removed += not place.exists()
    return removed
