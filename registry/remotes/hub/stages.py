"""Private copies that commands make in the user's cache before they publish; a killed one leaves its copy behind."""

import shutil
import time
from pathlib import Path

from weighbridge.registry import disk
from weighbridge.registry.refs import shown


def sweep(root: Path, older_than: float) -> int:
    """Remove the folders in which nothing changed for so many seconds; return how many."""
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
