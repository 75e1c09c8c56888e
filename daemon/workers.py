"""The threads that carry jobs on: each job by one hand, each name by one hand, poison set apart from the rest."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from weighbridge.daemon.jobs import Runner
from weighbridge.daemon.jobstore import Due, JobStore

NAMELESS = ("settling", "staged")
"""States in which a job needs no hold on its name: it is judged and copied."""

_log = logging.getLogger(__name__)


class Workers:
    """A few threads over one runner; `trouble` is told when our own store fails, with the error."""

    def __init__(
        self, store: JobStore, runner: Callable[[], Runner], count: int, trouble: Callable[[sqlite3.Error | None], None]
    ) -> None:
        self._store = store
        self._runner = runner
        self._count = count
        self._trouble = trouble
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._busy: dict[int, Due] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work."""
        for number in range(self._count):
            thread = threading.Thread(target=self._loop, name=f"worker-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wake(self) -> None:
        """Look for work now."""
        self._work.set()

    def stop(self, seconds: float) -> bool:
        """Let every thread end its step, at most so long; return whether all did."""
        self._stopping.set()
        self._work.set()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def busy(self) -> list[Due]:
        """What is being worked on."""
        with self._lock:
            return list(self._busy.values())

    @property
    def alive(self) -> bool:
        """Whether every thread is there."""
        return all(thread.is_alive() for thread in self._threads)

    def idle(self) -> bool:
        """Tell whether nothing is worked on and nothing could be."""
        with self._lock:
            return not self._busy and not self._store.runnable(time.time())

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                due = self._pick()
                if due is None:
                    self._rest()
                    continue
                try:
                    self._carry(due)
                finally:
                    with self._lock:
                        self._busy.pop(due.id, None)
                    self._work.set()  # what waited for this name or folder can go on
                self._trouble(None)
            except sqlite3.Error as error:
                self._trouble(error)
                self._stopping.wait(5.0)

    def _pick(self) -> Due | None:
        with self._lock:
            self._work.clear()
            paths = {due.path for due in self._busy.values()}
            names = {due.name for due in self._busy.values() if due.state not in NAMELESS}
            for due in self._store.runnable(time.time()):
                if due.path in paths or (due.state not in NAMELESS and due.name in names):
                    continue
                self._busy[due.id] = due
                return due
        return None

    def _rest(self) -> None:
        due = self._store.next_due()
        self._work.wait(10.0 if due is None else min(10.0, max(0.1, due - time.time())))

    def _carry(self, due: Due) -> None:
        job = self._store.job(due.id)
        if job is None:
            return
        if job.until is not None:
            job = self._store.advance(job, until=None)
            if job is None:
                return
        # From the seal on a job needs its name for itself, so it is picked again under that name.
        self._runner().run(job, upto="sealed" if due.state in NAMELESS else None)
