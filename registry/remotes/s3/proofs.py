"""What was once proven of files in parts: that the store's hash over the parts stands for a sha256 that we hashed.

A store keeps no sha256 of a whole file that came in parts. Whoever sent it, or compared it, knows which sha256 the
store's hash stands for; that is said in one small object for each file, `_wb/proofs/<key>.json`, so that anybody can
verify the copy without reading it, and in a line beside the caches, which spares the request. What is said of another
file than the one that lies there now fits neither its tag nor its hash, and is as good as nothing.
"""

import json
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighbridge.registry.remotes.s3.multipart import Sent

FOLDER: Final = "_wb/proofs/"
"""Where the objects lie that say it; names of models never begin with `_`."""
KEPT: Final = 20_000
"""Lines of which the newer half is kept when there are more."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def record_key(key: str) -> str:
    """Return the key of the object that says what a file's hash over its parts stands for."""
    return f"{FOLDER}{key}.json"


def record(sent: Sent) -> bytes:
    """Return what that object holds: the same bytes, whoever proved it."""
    return json.dumps({"composite": sent.composite, "sha256": sent.sha256}, separators=(",", ":")).encode()


def recorded(body: bytes, etag: str, composite: str) -> Sent | None:
    """Return what such an object says of a file with this tag and this hash; None when it speaks of another."""
    with suppress(ValueError, TypeError, KeyError):
        told = json.loads(body)
        if told["composite"] == composite and _DIGEST.fullmatch(told["sha256"]):
            return Sent(etag, composite, told["sha256"])
    return None


class Proofs:
    """The proofs of one bucket: of this process, and in a file those of earlier ones; safe for many threads."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Sent] = {}
        self._read = path is None
        self._lock = threading.Lock()

    def keep(self, key: str, sent: Sent) -> None:
        """Keep what was proven of the object of a key; that the file cannot be written is no error."""
        with self._lock:
            if self._found.get(key) == sent:
                return
            self._found[key] = sent
            if self._path is not None:
                with suppress(OSError):
                    self._append(self._path, json.dumps([key, *sent]))

    def find(self, key: str) -> Sent | None:
        """Return what was proven of a key, None when nothing was."""
        with self._lock:
            if not self._read and self._path is not None and key not in self._found:
                self._load(self._path)
            return self._found.get(key)

    def drop(self, key: str) -> None:
        """Forget a key in this process."""
        with self._lock:
            self._found.pop(key, None)

    def _load(self, path: Path) -> None:
        self._read = True
        lines: list[bytes] = []
        with suppress(OSError):
            lines = path.read_bytes().splitlines()
        ours = self._found
        self._found = {}
        for line in lines:
            with suppress(ValueError, TypeError):
                key, etag, composite, sha256 = json.loads(line)
                self._found[str(key)] = Sent(str(etag), str(composite), str(sha256))
        self._found |= ours
        if len(lines) > KEPT:
            with suppress(OSError):
                fresh = path.with_name(f"{path.name}.{os.getpid()}")
                fresh.write_bytes(b"\n".join(lines[-KEPT // 2 :]) + b"\n")
                fresh.replace(path)

    def _append(self, path: Path, line: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # One write of a line with a break on both sides: what a kill cut short spoils no other line.
            os.write(descriptor, f"\n{line}\n".encode())
        finally:
            os.close(descriptor)
