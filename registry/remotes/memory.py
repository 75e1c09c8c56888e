"""A remote that lives in this process: for tests and for trying things out. It forgets everything at the end."""

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weighbridge.registry import disk, errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import check_key, shown
from weighbridge.registry.remotes.protocol import Denied, Progress, Properties, Stat

_shelves: dict[str, "MemoryRemote"] = {}


def open_memory(url: str, endpoint: str | None = None) -> "MemoryRemote":
    """Return the remote of `memory://<label>`; the same label is the same remote within one process."""
    if endpoint:
        raise errors.UsageError(f"'{shown(url)}' takes no endpoint", fix="remove the endpoint")
    return _shelves.setdefault(url, MemoryRemote(url))


class MemoryRemote:
    """Objects in a dictionary, with a checksum of their own as a good server has."""

    def __init__(self, url: str = "memory://", *, clock: Callable[[], float] = time.time) -> None:
        self._url = url
        self._clock = clock
        self._objects: dict[str, tuple[bytes, Stat]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL as given."""
        return self._url

    @property
    def properties(self) -> Properties:
        """Everything but durability."""
        return Properties(conditional_create=True, server_sha256=True, durable_ack=False, parallel=4)

    def create(self, key: str, body: bytes) -> None:
        """Store a small object under a free key. Raises ExistsError."""
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise errors.ExistsError(f"{shown(key)} is taken", why=f"{self._url} holds an object of that key")
            stored = Stat(key, len(body), hashlib.sha256(body).hexdigest(), self._clock())
            self._objects[key] = (bytes(body), stored)

    def upload(
        self,
        key: str,
        source: Path,
        size: int,
        sha256: str,
        progress: Progress | None = None,
        *,
        parts: Sequence[bytes] = (),  # noqa: ARG002 - it hashes what it stores
    ) -> None:
        """Store a file under a free key. Raises SourceChangedError, ExistsError, VanishedError."""
        check_key(key)
        digest = hashlib.sha256()
        body = bytearray()
        try:
            with source.open("rb", buffering=0) as stream:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    body += chunk
                    if progress is not None:
                        progress(len(chunk))
        except FileNotFoundError as error:
            raise errors.VanishedError(f"{shown(source.name)} is gone", why=f"{shown(str(source))}") from error
        except OSError as error:
            raise disk.translate(error, f"cannot read {shown(str(source))}") from error
        if len(body) != size or digest.hexdigest() != sha256:
            raise errors.SourceChangedError(
                f"{shown(source.name)} changed while it was read",
                why=f"{len(body)} bytes with sha256 {digest.hexdigest()[:12]} were read, "
                f"expected were {size} with {sha256[:12]}",
                fix="wait until its writer is done, then repeat",
            )
        self.create(key, bytes(body))

    def read(self, key: str) -> bytes:
        """Return an object whole. Raises MissingError."""
        return self._get(key)[0]

    def fetch(self, key: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an object from `offset` on. Raises MissingError."""
        body = self._get(key)[0]
        for start in range(offset, len(body), CHUNK):
            yield body[start : start + CHUNK]

    def stat(self, key: str) -> Stat:
        """Return size, checksum and store time of one object. Raises MissingError."""
        return self._get(key)[1]

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`, sorted by their UTF-8 bytes."""
        with self._lock:
            keys = [key.removeprefix(prefix) for key in self._objects if key.startswith(prefix)]
        yield from sorted({key.partition("/")[0] for key in keys if "/" in key}, key=lambda name: f"{name}/".encode())

    def learn(self) -> None:
        """There is nothing to find out."""

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix` in UTF-8 order, those after the key `after` only."""
        with self._lock:
            found = [stored for key, (_, stored) in self._objects.items() if key.startswith(prefix)]
        start = None if after is None else after.encode()
        ordered = sorted(found, key=lambda s: s.key.encode())
        yield from itertools.islice((s for s in ordered if start is None or s.key.encode() > start), limit)

    def delete(self, key: str) -> None:
        """Remove one object; a key that is not there is no error."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def now(self) -> float:
        """Return the clock that gives objects their store time."""
        return self._clock()

    def stage(self, name: str, nonce: str) -> Path | None:  # noqa: ARG002 - a memory has no folder
        """Return None: there is no local folder to upload from without a copy."""
        return None

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:  # noqa: ARG002 - nothing is ever unfinished
        """Return 0: nothing is ever unfinished here."""
        return 0

    def unfinished(self, older_than: float) -> Iterator[int]:  # noqa: ARG002
        """Yield nothing: nothing is ever unfinished here."""
        yield from ()

    def close(self) -> None:
        """Nothing is held open."""

    def _get(self, key: str) -> tuple[bytes, Stat]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise errors.MissingError(f"{shown(key)} is not there", why=f"{self._url} holds nothing under this key")
        return found
