"""What a merge has finished, kept on the disk: a merge that was killed goes on with the files that are still missing.

One JSON line for each finished file, synced after the file was. A torn last line is a file that is written again.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.merge.stream import Written
from weighbridge.adapters.merge.tally import Tally
from weighbridge.registry.hashing import sha256_file

_LIMIT: Final = 64 << 20


class Journal:
    """The finished files of one plan; safe to write from several threads."""

    def __init__(self, path: Path, plan: str) -> None:
        self._path = path
        self._plan = plan
        self._lock = threading.Lock()

    def finished(self, folder: Path) -> dict[str, Written]:
        """Return the files that lie in the folder as they were recorded, hashed again."""
        found: dict[str, Written] = {}
        for entry in self._entries():
            try:
                written = Written(
                    str(entry["path"]),
                    int(entry["size"]),
                    str(entry["sha256"]),
                    {str(name): Tally(**counts) for name, counts in entry["tallies"].items()},
                )
            except (KeyError, TypeError, ValueError):
                continue
            if entry.get("plan") == self._plan and _is_there(folder / written.path, written):
                found[written.path] = written
        return found

    def record(self, written: Written) -> None:
        """Record a file that is durable. Raises OSError."""
        entry = {
            "plan": self._plan,
            "path": written.path,
            "size": written.size,
            "sha256": written.sha256,
            "tallies": {name: tally.facts() for name, tally in written.tallies.items()},
        }
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                if self._torn():
                    line = b"\n" + line
                os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _torn(self) -> bool:
        with self._path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            if not stream.tell():
                return False
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"

    def _entries(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                lines = stream.read(_LIMIT).split(b"\n")
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                found.append(entry)
        return found


def _is_there(path: Path, written: Written) -> bool:
    try:
        return path.stat().st_size == written.size and sha256_file(path) == written.sha256
    except OSError:
        return False
