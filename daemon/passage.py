"""One passage without a daemon: scan, publish what is to be published, end. For cron, for drains, for a first look."""

import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge.config.settings import Settings
from weighbridge.daemon import drain, state
from weighbridge.daemon.jobstore import Job
from weighbridge.daemon.service import locked_state
from weighbridge.daemon.session import Session
from weighbridge.registry import errors


class Passage(NamedTuple):
    """What a passage did: the jobs that ended in a version, and everything that kept others from it."""

    published: list[Job]
    problems: list[errors.WeighbridgeError]


def once(settings: Settings, environ: Mapping[str, str], *, backfill: bool = False) -> Passage:
    """Publish what is there and is to be published.

    A folder that is still being written is waited for while it changes or rests; what no waiting makes whole is left.
    Raises ConflictError when a daemon works on this state.
    """

    def first(session: Session) -> None:
        for path in session.store.forget_old() if backfill else ():
            session.folders.reconsider(path)

    return _work(settings, environ, first, lambda session: session.quiet())


def drained(settings: Settings, environ: Mapping[str, str], path: str, deadline: float) -> dict[str, Any]:
    """Drain a path without a daemon, under its lock; return the last answer of `drain.standing`."""
    end = time.monotonic() + deadline
    asked: list[drain.Asked] = []
    answer: dict[str, Any] = {}

    def first(session: Session) -> None:
        asked.append(drain.begin(session.folders, session.store, path))

    def over(session: Session) -> bool:
        answer.update(drain.standing(session.folders, session.store, asked[-1]))
        return bool(answer["done"]) or time.monotonic() >= end

    _work(settings, environ, first, over, patience=deadline)
    if not answer:
        raise errors.NotFinishedError(f"{path} is not drained after {deadline:.0f} s", why="the scan has not ended")
    return answer


def merges(settings: Settings, environ: Mapping[str, str], asked: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Answer what `registryd merges` asks from the database, under the lock; None where no daemon ever made one.

    What is tried again is carried on by the next passage or daemon. Raises StateHeldError when a daemon has the lock,
    NotFoundError and UsageError for what is named.
    """
    folder = Path(settings.daemon.state)
    if not (folder / state.DATABASE).exists():
        return None
    with locked_state(settings, environ):
        opened = state.open_database(folder)
        session = Session(settings, opened, environ=environ, stop=threading.Event())
        try:
            rows: list[dict[str, Any]] = session.ops()["merges"](asked)
            return rows
        finally:
            session.homes.close()
            opened.catalog.close()


class _Until:
    """Ends a passage: after the first scan `first` is called once, then `over` is asked after every round."""

    def __init__(
        self, first: Callable[[Session], None], over: Callable[[Session], bool], patience: float | None
    ) -> None:
        self._first: Callable[[Session], None] | None = first
        self._over = over
        self._end = None if patience is None else time.monotonic() + patience
        self.session: Session | None = None
        self.trouble: errors.WeighbridgeError | None = None

    def __call__(self) -> bool:
        assert self.session is not None
        if self.session.trouble is not None:
            self.trouble = self.session.trouble  # another thread's next step may succeed and clear it
            return True
        if not self.session.folders.scanned:
            return self._end is not None and time.monotonic() >= self._end
        if self._first is not None:
            first, self._first = self._first, None
            _again(self.session)
            first(self.session)
            return False
        return self._over(self.session)


def _again(session: Session) -> None:
    """Try at once what waits after an error: whoever asks for a passage may just have removed its cause."""
    if session.store.retry("error IS NOT NULL AND until IS NOT NULL", []):
        session.workers.wake()
    session.merging.hurry()
    for row in session.store.deliveries("state = 'waiting' AND until IS NOT NULL"):
        session.store.delivered(row["remote"], row["name"], row["n"], until=None)


def _work(
    settings: Settings,
    environ: Mapping[str, str],
    first: Callable[[Session], None],
    over: Callable[[Session], bool],
    *,
    patience: float | None = None,
) -> Passage:
    stop = threading.Event()
    folder = Path(settings.daemon.state)

    def end(_number: int, _frame: object) -> None:
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with locked_state(settings, environ):
            damage = None
            for _ in range(3):
                opened = state.open_database(folder, damage)
                session = Session(settings, opened, environ=environ, stop=stop)
                until = _Until(first, over, patience)
                until.session = session
                session.start(ear=False)
                try:
                    session.watch(until=until)
                    if stop.is_set():
                        raise KeyboardInterrupt
                    damage = session.damage
                    if damage is None:
                        return Passage(session.published(), [until.trouble] if until.trouble else session.problems())
                except sqlite3.OperationalError as error:
                    raise state.cannot_write(error, folder / state.DATABASE) from error
                finally:
                    session.close()
        raise errors.IntegrityError("the database is damaged again and again", fix="look at the disk (dmesg)")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
