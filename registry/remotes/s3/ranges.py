"""Reading an object in windows: the next ones are fetched while the first is consumed, in bounded memory.

What is yielded is in order. A window is repeated by itself when its connection breaks, so that a cut costs little.
Windows are received into buffers that are used again and again: fresh memory costs more than receiving into it.
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from weighbridge.registry import errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Chunk
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.errors import CAUGHT, translate
from weighbridge.registry.remotes.s3.receive import receive

WINDOW: Final = 16 << 20
"""Bytes asked for at once: large enough that a request costs little beside it."""
AHEAD: Final = 4
"""Windows of one object that are under way beside the one that is read: one connection alone is slow in most places."""
STEP: Final = 2 << 20
"""Bytes of a window that are given out at once: each step costs who writes beside hashing a change of threads."""
_TRIES: Final = 3


class Budget:
    """Bytes that may lie in memory at the same time; one that is larger than all goes alone.

    Large buffers are lent again and again, as long as any is out: fresh memory costs more than what is read into it.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._spare: list[bytearray] = []
        self._free = threading.Condition()

    def take(self, count: int) -> bytearray:
        """Wait until so many bytes are free, and return a buffer of them with whatever was in it."""
        with self._free:
            self._free.wait_for(lambda: self._fits(count))
            self._used += count
            found = next((at for at, spare in enumerate(self._spare) if len(spare) == count), None)
            if found is not None:
                return self._spare.pop(found)
            while self._spare and self._used + sum(map(len, self._spare)) > self._total:
                self._spare.pop()
        return bytearray(count)

    def give(self, buffer: bytearray) -> None:
        """Give a buffer back, which nobody looks at any more."""
        with self._free:
            self._used -= len(buffer)
            if not self._used:
                self._spare.clear()
            elif len(buffer) >= CHUNK:
                self._spare.append(buffer)
            self._free.notify_all()

    def _fits(self, count: int) -> bool:
        return self._used == 0 or self._used + count <= self._total


class Buffers:
    """Windows that may lie in memory at the same time, at least one; memory is held only while some are taken."""

    def __init__(self, total: int, window: int = WINDOW) -> None:
        self.window = window
        self._most = max(1, total // window)
        self._taken = 0
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def try_take(self) -> bytearray | None:
        """Return a buffer of one window with whatever was in it, None when all are taken; never waits."""
        with self._lock:
            if self._taken == self._most:
                return None
            self._taken += 1
            return self._free.pop() if self._free else bytearray(self.window)

    def give(self, buffer: bytearray | None) -> None:
        """Give a buffer back, or None for one that somebody still looks at and that nobody may fill again."""
        with self._lock:
            self._taken -= 1
            if not self._taken:
                self._free.clear()
            elif buffer is not None:
                self._free.append(buffer)


class _Ahead(NamedTuple):
    """A window under way."""

    run: Future[None]
    buffer: bytearray
    size: int


class Reader:
    """Reads one object from an offset on."""

    def __init__(self, link: Connection, pool: ThreadPoolExecutor, buffers: Buffers, key: str) -> None:
        self._link = link
        self._pool = pool
        self._buffers = buffers
        self._key = key
        self._window = buffers.window
        self._what = f"cannot read {shown(key)}"
        self._etag: str | None = None

    def chunks(self, offset: int) -> Iterator[Chunk]:
        """Yield the bytes from `offset` on, in chunks of at most 2 MiB that are valid until the next is asked for.

        Raises MissingError, RetryableError.
        """
        first, total = self._open(offset)
        if first is None:
            return
        ahead: deque[_Ahead] = deque()
        waiting = deque(
            (start, min(self._window, total - start)) for start in range(offset + self._window, total, self._window)
        )
        try:
            self._order(ahead, waiting)
            yield from self._body(first, min(self._window, total - offset))
            while ahead or waiting:
                if not ahead:  # no memory for another window: read one straight through
                    yield from self._straight(*waiting.popleft())
                else:
                    yield from self._received(ahead, waiting)
                self._order(ahead, waiting)
        finally:
            for window in ahead:
                _drop(window, self._buffers)

    def _order(self, ahead: deque[_Ahead], waiting: deque[tuple[int, int]]) -> None:
        while waiting and len(ahead) < AHEAD and (buffer := self._buffers.try_take()) is not None:
            start, size = waiting.popleft()
            ahead.append(_Ahead(self._pool.submit(self._fetch, start, size, buffer), buffer, size))

    def _received(self, ahead: deque[_Ahead], waiting: deque[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the next window when it has come; its buffer is given back when it was consumed."""
        ahead[0].run.result()
        window = ahead.popleft()
        spare: bytearray | None = window.buffer
        try:
            self._order(ahead, waiting)
            for start in range(0, window.size, STEP):
                chunk = memoryview(window.buffer)[start : min(start + STEP, window.size)]
                try:
                    yield chunk
                finally:
                    try:
                        chunk.release()  # whoever uses it later gets an error, and never other bytes
                    except BufferError:  # somebody was interrupted while he wrote it
                        spare = None
        finally:
            self._buffers.give(spare)

    def _open(self, offset: int) -> tuple[Any, int]:
        """Ask for the first window; return its body and the size of the object."""
        wanted = f"bytes={offset}-{offset + self._window - 1}"
        try:
            answer = self._link.ask(
                "get_object", self._what, needs=("ContentLength",), Key=self._link.key(self._key), Range=wanted
            )
        except errors.WeighbridgeError as error:
            if error.data.get("kind") != "range":
                raise
            # Behind the last byte, or an object without any: there is nothing more.
            return None, 0
        self._etag = answer.get("ETag")
        body = answer["Body"]
        total = str(answer.get("ContentRange") or "").rpartition("/")[2]
        if total.isdecimal():
            return body, int(total)
        if offset:  # a server that knows no ranges sends everything
            body.close()
            raise errors.WeighbridgeError(self._what, why=f"{shown(self._link.place.url)} knows no ranges")
        length = int(answer["ContentLength"])
        self._window = max(self._window, length)
        return body, length

    def _fetch(self, start: int, size: int, buffer: bytearray) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return self._fill(start, memoryview(buffer)[:size])
            except errors.RetryableError:
                if not left:
                    raise
        raise AssertionError

    def _fill(self, start: int, window: memoryview) -> None:
        """Receive a window into its buffer."""
        body = self._ask(start, len(window))
        with self._told(body):
            have = receive(body, window)
            if have < len(window):
                raise self._broken(len(window) - have)

    def _straight(self, start: int, size: int) -> Iterator[bytes]:
        """Yield a window while it comes."""
        yield from self._body(self._ask(start, size), size)

    def _ask(self, start: int, size: int) -> Any:
        same: dict[str, Any] = {"IfMatch": self._etag} if self._etag else {}
        try:
            answer = self._link.ask(
                "get_object",
                self._what,
                Key=self._link.key(self._key),
                Range=f"bytes={start}-{start + size - 1}",
                **same,
            )
        except errors.ExistsError as error:
            raise errors.IntegrityError(
                f"{shown(self._key)} was replaced while it was read", why="objects of a registry never change"
            ) from error
        return answer["Body"]

    def _body(self, body: Any, size: int) -> Iterator[bytes]:
        left = size
        with self._told(body):
            while left:
                chunk = body.read(min(CHUNK, left))
                if not chunk:
                    raise self._broken(left)
                left -= len(chunk)
                yield chunk

    @contextmanager
    def _told(self, body: Any) -> Iterator[None]:
        """Turn what breaks an answer into our errors, and give its connection back."""
        try:
            yield
        except CAUGHT as error:
            raise translate(error, self._what, self._link.place.url) from error
        finally:
            body.close()  # a connection whose answer was read to its end has gone back to the pool already

    def _broken(self, left: int) -> errors.RetryableError:
        return errors.RetryableError(self._what, why=f"the answer broke off {left} bytes too early")


def _drop(window: _Ahead, buffers: Buffers) -> None:
    """Give a window's memory back as soon as nobody works on it."""
    if window.run.cancel():
        buffers.give(window.buffer)
    else:
        window.run.add_done_callback(lambda _: buffers.give(window.buffer))
