"""A remote that fails on demand: refuses, loses answers, fills up, or takes the whole process down with it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from weighbridge.registry import errors
from weighbridge.registry.remotes.protocol import Chunk, Progress, Remote, Stat
from weighbridge.registry.remotes.wrappers import Wrapper

T = TypeVar("T")
Fault = Literal["busy", "lost", "dropped", "full", "die-before", "die-after"]
"""busy: refused for now. lost: done, but the answer is lost. dropped: not done, the answer is lost. full: no room.
die-before, die-after: the process ends before or after the remote has done it."""


class Killed(BaseException):
    """The process is dead; only the test may catch it."""


class Call(NamedTuple):
    """One call of the remote: its number from 1 on, the method, and the key or prefix."""

    number: int
    method: str
    key: str


class Faulty(Wrapper):
    """Asks `plan` before every call what shall go wrong; `calls` holds what was asked for so far."""

    def __init__(self, inner: Remote, plan: Callable[[Call], Fault | None] = lambda _: None) -> None:
        super().__init__(inner)
        self.plan = plan
        self.calls: list[Call] = []
        self._lock = threading.Lock()

    def create(self, key: str, body: bytes) -> None:
        """Store a small object, or fail."""
        self._meet("create", key, lambda: self.inner.create(key, body))

    def upload(
        self,
        key: str,
        source: Path,
        size: int,
        sha256: str,
        progress: Progress | None = None,
        *,
        parts: Sequence[bytes] = (),
    ) -> None:
        """Store a file, or fail."""
        self._meet("upload", key, lambda: self.inner.upload(key, source, size, sha256, progress, parts=parts))

    def read(self, key: str) -> bytes:
        """Return an object, or fail."""
        return self._meet("read", key, lambda: self.inner.read(key))

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield an object's bytes, or fail after the first chunk."""
        chunks = [bytes(chunk) for chunk in self.inner.fetch(key, offset)]
        yield from chunks[:1]
        self._meet("fetch", key, lambda: None)
        yield from chunks[1:]

    def stat(self, key: str) -> Stat:
        """Return an object's stat, or fail."""
        return self._meet("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield objects, or fail after the first."""
        found = list(self.inner.list(prefix, after=after, limit=limit))
        yield from found[:1]
        self._meet("list", prefix, lambda: None)
        yield from found[1:]

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield folder names, or fail after the first."""
        found = list(self.inner.folders(prefix))
        yield from found[:1]
        self._meet("folders", prefix, lambda: None)
        yield from found[1:]

    def delete(self, key: str) -> None:
        """Remove an object, or fail."""
        self._meet("delete", key, lambda: self.inner.delete(key))

    def now(self) -> float:
        """Return the store's clock, or fail."""
        return self._meet("now", "", self.inner.now)

    def count(self, *methods: str) -> int:
        """Return how many calls of these methods were made; of all methods when none is named."""
        return sum(1 for call in self.calls if not methods or call.method in methods)

    def _meet(self, method: str, key: str, act: Callable[[], T]) -> T:
        with self._lock:
            call = Call(len(self.calls) + 1, method, key)
            self.calls.append(call)
        fault = self.plan(call)
        if fault == "busy":
            raise errors.RetryableError("slow down")
        if fault == "dropped":
            raise errors.OutcomeUnknownError("no answer")
        if fault == "full":
            raise errors.DiskFullError("no room")
        if fault == "die-before":
            raise Killed
        result = act()
        if fault == "lost":
            raise errors.OutcomeUnknownError("no answer")
        if fault == "die-after":
            raise Killed
        return result
