"""Reading an object in windows: the next ones are fetched while the first is consumed, in bounded memory.

What is yielded is in order. A window is repeated by itself when its connection breaks, so that a cut costs little.
"""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from weighbridge.registry import errors
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.errors import CAUGHT, translate

WINDOW: Final = 8 << 20
"""Bytes asked for at once: large enough that a request costs nothing beside it."""
AHEAD: Final = 7
"""Windows of one object that are under way beside the one that is read: one connection alone is slow in most places."""
_TRIES: Final = 3

Window = list[bytes]


class Budget:
    """Bytes that may lie in memory at the same time; one that is larger than all goes alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._free = threading.Condition()

    def take(self, count: int) -> None:
        """Wait until so many bytes are free, and take them."""
        with self._free:
            self._free.wait_for(lambda: self._fits(count))
            self._used += count

    def try_take(self, count: int) -> bool:
        """Take so many bytes if they are free; never waits."""
        with self._free:
            if not self._fits(count):
                return False
            self._used += count
            return True

    def give(self, count: int) -> None:
        """Give bytes back."""
        with self._free:
            self._used -= count
            self._free.notify_all()

    def _fits(self, count: int) -> bool:
        return self._used == 0 or self._used + count <= self._total


class Reader:
    """Reads one object from an offset on."""

    def __init__(
        self, link: Connection, pool: ThreadPoolExecutor, budget: Budget, key: str, *, window: int = WINDOW
    ) -> None:
        self._link = link
        self._pool = pool
        self._budget = budget
        self._key = key
        self._window = window
        self._what = f"cannot read {shown(key)}"
        self._etag: str | None = None

    def chunks(self, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on, in chunks of at most 1 MiB. Raises MissingError, RetryableError."""
        first, total = self._open(offset)
        if first is None:
            return
        ahead: deque[tuple[Future[Window], int]] = deque()
        waiting = deque(
            (start, min(self._window, total - start)) for start in range(offset + self._window, total, self._window)
        )
        try:
            self._order(ahead, waiting)
            yield from self._body(first, min(self._window, total - offset))
            while ahead or waiting:
                if not ahead:  # no memory for another window: read one straight through
                    start, size = waiting.popleft()
                    yield from self._straight(start, size)
                else:
                    future, size = ahead.popleft()
                    try:
                        chunks = future.result()
                        self._order(ahead, waiting)
                        yield from chunks
                    finally:
                        self._budget.give(size)
                self._order(ahead, waiting)
        finally:
            for future, size in ahead:
                _drop(future, size, self._budget)

    def _order(self, ahead: "deque[tuple[Future[Window], int]]", waiting: deque[tuple[int, int]]) -> None:
        while waiting and len(ahead) < AHEAD and self._budget.try_take(waiting[0][1]):
            start, size = waiting.popleft()
            ahead.append((self._pool.submit(self._fetch, start, size), size))

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

    def _fetch(self, start: int, size: int) -> Window:
        for left in reversed(range(_TRIES)):
            try:
                return list(self._straight(start, size))
            except errors.RetryableError:
                if not left:
                    raise
        raise AssertionError

    def _straight(self, start: int, size: int) -> Iterator[bytes]:
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
        yield from self._body(answer["Body"], size)

    def _body(self, body: Any, size: int) -> Iterator[bytes]:
        left = size
        try:
            while left:
                chunk = body.read(min(CHUNK, left))
                if not chunk:
                    raise errors.RetryableError(self._what, why=f"the answer broke off {left} bytes too early")
                left -= len(chunk)
                yield chunk
        except CAUGHT as error:
            raise translate(error, self._what, self._link.place.url) from error
        finally:
            body.close()  # a connection whose answer was read to its end has gone back to the pool already


def _drop(future: "Future[Window]", size: int, budget: Budget) -> None:
    """Give a window's memory back as soon as nobody works on it."""
    if future.cancel():
        budget.give(size)
    else:
        future.add_done_callback(lambda _: budget.give(size))
