"""Merges on this machine: one at a time, in a child process that is bounded in memory and ends with the daemon.

A try that was cut short by the end of the daemon is simply begun again: its journal knows what is finished.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from weighbridge.adapters.merge import batch
from weighbridge.daemon.executors.protocol import Absent, Gone, Live, Seen, Work
from weighbridge.registry import errors

HANDLE: Final = "here"
MORE: Final = "give the daemon more memory (MemoryMax of its unit), or make merges elsewhere (executor in [merge])"
_AGAIN: Final = 0.2
"""Seconds between two tries to take hold of a staging folder that another process holds."""

_log = logging.getLogger(__name__)


class _CancelledError(Exception):
    """Somebody asked for the end of this try."""


class LocalExecutor:
    """Runs one try at a time in a thread that waits for the child; `ended` is called when it is over."""

    pause: float = 10.0
    workers: int | None = None

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        self.ended = ended
        self._lock = threading.Lock()
        self._key: str | None = None
        self._cancelled: set[str] = set()
        self._failed: dict[str, str] = {}
        self._moved = 0

    def room(self) -> bool:
        """Tell whether nothing runs."""
        with self._lock:
            return self._key is None

    def submit(self, work: Work) -> str:
        """Begin a try. Raises ConflictError while another one runs."""
        with self._lock:
            if self._key == work.key:
                return HANDLE
            if self._key is not None:
                raise errors.ConflictError("another merge runs", why="one at a time is made on this machine")
            self._key, self._moved = work.key, 0
            self._failed.pop(work.key, None)
            self._cancelled.discard(work.key)
        threading.Thread(target=self._carry, args=(work,), name=f"merge-{work.key}", daemon=True).start()
        return HANDLE

    def look(self, work: Work) -> Seen:
        """Return how a try stands: it runs in this process, it failed and left no answer, or it is not here."""
        with self._lock:
            if self._key == work.key:
                return Live(HANDLE, f"{self._moved} bytes written" if self._moved else None)
            why = self._failed.pop(work.key, None)
        if why is not None:
            return Gone(why, "again")
        return Absent()

    def starved(self, why: str) -> Gone:
        """Try again: what took the memory may be gone by then."""
        return Gone(why, "again", MORE)

    def cancel(self, work: Work) -> None:
        """End a try at its next word of progress; an answer that came before stands."""
        with self._lock:
            self._cancelled.add(work.key)

    def _when_free(self, work: Work, moved: Callable[[int], None]) -> None:
        """Carry a try out as soon as nobody else does: an earlier life of this daemon may just be ending."""
        while True:
            try:
                batch.perform(Path(work.stage), progress=moved)
            except errors.ConflictError:
                time.sleep(_AGAIN)
                moved(0)
            else:
                return

    def _carry(self, work: Work) -> None:
        def moved(count: int) -> None:
            self._moved += count
            if work.key in self._cancelled:
                raise _CancelledError

        try:
            self._when_free(work, moved)
        except _CancelledError:
            pass
        except (errors.WeighbridgeError, OSError) as error:
            with self._lock:
                self._failed[work.key] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it was, the merge must hear of it
            _log.exception("a merge failed in a way nobody foresaw", extra={"key": work.key})
            with self._lock:
                self._failed[work.key] = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._key = None
            self.ended()
