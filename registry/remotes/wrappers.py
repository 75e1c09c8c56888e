"""Remotes around remotes, with the same interface: bounded retries and a rate limit.

A lost answer is never repeated blindly. The rule: look; nothing there means the request
was not carried out and may be repeated; our bytes there mean that it was; other bytes mean that the key is taken.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Chunk, Denied, Progress, Properties, Remote, Stat

T = TypeVar("T")
_AGAIN: Final = (errors.RetryableError, errors.OutcomeUnknownError)


class Wrapper:
    """A remote that hands every call on; the others change what they must."""

    def __init__(self, inner: Remote) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The URL of the remote inside."""
        return self.inner.url

    @property
    def properties(self) -> Properties:
        """What the remote inside can promise."""
        return self.inner.properties

    def create(self, key: str, body: bytes) -> None:
        """Store a small object under a free key."""
        self.inner.create(key, body)

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
        """Store a file under a free key."""
        self.inner.upload(key, source, size, sha256, progress, parts=parts)

    def read(self, key: str) -> bytes:
        """Return a small object whole."""
        return self.inner.read(key)

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes of an object from `offset` on."""
        yield from self.inner.fetch(key, offset)

    def stat(self, key: str) -> Stat:
        """Return what the remote knows of one object."""
        return self.inner.stat(key)

    def learn(self) -> None:
        """Let the remote inside find out what it does with checksums."""
        self.inner.learn()

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`."""
        yield from self.inner.folders(prefix)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix`."""
        yield from self.inner.list(prefix, after=after, limit=limit)

    def delete(self, key: str) -> None:
        """Remove one object."""
        self.inner.delete(key)

    def now(self) -> float:
        """Return the store's clock."""
        return self.inner.now()

    def stage(self, name: str, nonce: str) -> Path | None:
        """Return the stage folder of the remote inside, if it has any."""
        return self.inner.stage(name, nonce)

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Remove unfinished uploads and stages."""
        return self.inner.sweep(older_than, denied=denied)

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each unfinished upload or stage."""
        yield from self.inner.unfinished(older_than)

    def close(self) -> None:
        """Give connections back."""
        self.inner.close()


class Retrying(Wrapper):
    """Repeats what a remote refused for now, up to `attempts` times, waiting longer each time, with jitter.

    Only RetryableError and OutcomeUnknownError are repeated, those apart whose `data["attempts"]` says that the remote
    did so itself; `data["retry_after"]` of an error is honoured up to `cap`. While nothing ever went through, nothing
    is repeated that would not end within `patience` seconds of the first call.
    """

    def __init__(
        self,
        inner: Remote,
        *,
        attempts: int = 6,
        base: float = 0.2,
        cap: float = 20.0,
        patience: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._base = base
        self._cap = cap
        self._patience = patience
        self._sleep = sleep
        self._chance = chance
        self._clock = clock
        self._begun: float | None = None
        self._well = False

    def create(self, key: str, body: bytes) -> None:
        """Store a small object; after a lost answer look whether it is there before the next try. Raises ExistsError.

        Without a lost answer "exists" is raised whatever the bytes: `flow.once.create` compares them.
        """
        self._once(lambda: self.inner.create(key, body), lambda: self._holds(key, body))

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
        """Store a file; after a lost answer look, then start anew. Raises ExistsError, SourceChangedError."""
        self._once(
            lambda: self.inner.upload(key, source, size, sha256, progress, parts=parts),
            lambda: self._holds_file(key, size, sha256),
        )

    def read(self, key: str) -> bytes:
        """Return a small object whole."""
        return self._repeat(lambda: self.inner.read(key))

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes of an object; a broken stream goes on where it stopped."""
        place = offset
        failed = self._begin()
        while True:
            try:
                for chunk in self.inner.fetch(key, place):
                    place += len(chunk)
                    self._well = True
                    failed = 0
                    yield chunk
            except _AGAIN as error:
                failed = self._wait(failed, error)
            else:
                return

    def stat(self, key: str) -> Stat:
        """Return what the remote knows of one object."""
        return self._repeat(lambda: self.inner.stat(key))

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`; a broken listing goes on where it stopped."""
        seen: str | None = None
        failed = self._begin()
        while True:
            try:
                for name in self.inner.folders(prefix):
                    self._well = True
                    if seen is None or f"{name}/".encode() > f"{seen}/".encode():
                        seen = name
                        yield name
            except _AGAIN as error:
                failed = self._wait(failed, error)
            else:
                return

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix`; a broken listing goes on where it stopped.

        It starts again from `after` and drops what was given, because a start key in the middle of nested folders does
        not mean the same everywhere.
        """
        seen: bytes | None = None
        given = 0
        failed = self._begin()
        while limit is None or given < limit:
            try:
                for found in self.inner.list(prefix, after=after, limit=limit):
                    self._well = True
                    if seen is None or found.key.encode() > seen:
                        seen = found.key.encode()
                        given += 1
                        yield found
            except _AGAIN as error:
                failed = self._wait(failed, error)
            else:
                return

    def delete(self, key: str) -> None:
        """Remove one object; repeating is harmless."""
        self._repeat(lambda: self.inner.delete(key))

    def now(self) -> float:
        """Return the store's clock."""
        return self._repeat(self.inner.now)

    def stage(self, name: str, nonce: str) -> Path | None:
        """Return the stage folder of the remote inside."""
        return self._repeat(lambda: self.inner.stage(name, nonce))

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Remove unfinished uploads and stages; repeating is harmless."""
        return self._repeat(lambda: self.inner.sweep(older_than, denied=denied))

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each unfinished upload or stage; after a fault all are counted anew."""
        yield from self._repeat(lambda: list(self.inner.unfinished(older_than)))

    def _repeat(self, call: Callable[[], T]) -> T:
        failed = self._begin()
        while True:
            try:
                result = call()
            except _AGAIN as error:
                failed = self._wait(failed, error)
            except errors.WeighbridgeError as error:
                self._well = self._well or not isinstance(error, errors.UnreachableError)
                raise
            else:
                self._well = True
                return result

    def _begin(self) -> int:
        """Note when the first call began; return that nothing failed yet."""
        if self._begun is None:
            self._begun = self._clock()
        return 0

    def _once(self, write: Callable[[], None], ours: Callable[[], bool | None]) -> None:
        failed = self._begin()
        lost = False
        while True:
            try:
                write()
            except errors.ExistsError:
                if lost and ours():
                    return
                raise
            except _AGAIN as error:
                lost = lost or isinstance(error, errors.OutcomeUnknownError)
                if lost and ours():
                    return
                # Taken by other bytes, or nothing there: the next try says which.
                failed = self._wait(failed, error)
            else:
                self._well = True
                return

    def _holds(self, key: str, body: bytes) -> bool:
        try:
            return self.read(key) == body
        except errors.MissingError:
            return False

    def _holds_file(self, key: str, size: int, sha256: str) -> bool:
        try:
            found = self.stat(key)
            if found.size != size:
                return False
            if found.sha256 is not None:
                return found.sha256 == sha256
            digest = hashlib.sha256()
            for chunk in self.fetch(key):
                digest.update(chunk)
        except errors.MissingError:
            return False
        return digest.hexdigest() == sha256

    def _wait(self, failed: int, error: errors.WeighbridgeError) -> int:
        failed += 1
        if failed >= self._attempts or "attempts" in error.data:
            error.data.setdefault("attempts", failed)
            raise error
        pause = min(self._cap, self._base * 2 ** (failed - 1)) * (0.5 + self._chance() / 2)
        asked = error.data.get("retry_after")
        if isinstance(asked, int | float):
            pause = max(pause, min(float(asked), self._cap))
        if self._patience is not None and not self._well:
            taken = self._clock() - (self._begun or 0.0)
            if taken + pause + taken / failed > self._patience:  # the next try takes as long as those before it
                raise error
        self._sleep(pause)
        return failed


class RateLimited(Wrapper):
    """Keeps a remote below so many requests and bytes a second; None sets no limit. Bursts last one second."""

    def __init__(
        self,
        inner: Remote,
        *,
        requests: float | None = None,
        bytes_per_second: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (requests is not None and requests <= 0) or (bytes_per_second is not None and bytes_per_second <= 0):
            raise errors.UsageError(f"the rate limit of {shown(inner.url)} must be greater than 0")
        super().__init__(inner)
        self._sleep = sleep
        self._requests = _Bucket(requests, clock)
        self._bytes = _Bucket(bytes_per_second, clock)

    def create(self, key: str, body: bytes) -> None:
        """Store a small object within the limits."""
        self._ask()
        self._moved(len(body))
        super().create(key, body)

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
        """Store a file within the limits."""

        def moved(count: int) -> None:
            self._moved(count)
            if progress is not None:
                progress(count)

        self._ask()
        super().upload(key, source, size, sha256, moved, parts=parts)

    def read(self, key: str) -> bytes:
        """Return a small object within the limits."""
        self._ask()
        body = super().read(key)
        self._moved(len(body))
        return body

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes of an object within the limits."""
        self._ask()
        for chunk in super().fetch(key, offset):
            self._moved(len(chunk))
            yield chunk

    def stat(self, key: str) -> Stat:
        """Return what the remote knows of one object, within the limits."""
        self._ask()
        return super().stat(key)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`; counts as one request."""
        self._ask()
        yield from super().folders(prefix)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix`; counts as one request."""
        self._ask()
        yield from super().list(prefix, after=after, limit=limit)

    def delete(self, key: str) -> None:
        """Remove one object within the limits."""
        self._ask()
        super().delete(key)

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each unfinished upload or stage; counts as one request."""
        self._ask()
        yield from super().unfinished(older_than)

    def _ask(self) -> None:
        self._pause(self._requests.take(1))

    def _moved(self, count: int) -> None:
        self._pause(self._bytes.take(count))

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)


class _Bucket:
    """A token bucket that may go into debt: whoever takes more than is there waits until it is paid back."""

    def __init__(self, rate: float | None, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._level = rate or 0.0
        self._time = clock()
        self._lock = threading.Lock()

    def take(self, count: float) -> float:
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._level = min(self._rate, self._level + (now - self._time) * self._rate) - count
            self._time = now
            return max(0.0, -self._level / self._rate)
