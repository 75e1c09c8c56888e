"""The daemon as a process: one state, one lock, signals, and what the service manager is told.

SIGTERM, SIGINT   stop within ten seconds; what is cut is repeated by the next start
SIGHUP            read the configuration again; a bad one is logged and the old one stays
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from weighbridge.config import mounts
from weighbridge.config.settings import Settings
from weighbridge.daemon import logs, state
from weighbridge.daemon.lock import StateLock
from weighbridge.daemon.notify import notify, watchdog_seconds
from weighbridge.daemon.session import Session
from weighbridge.registry import errors

_STALE: float = 60.0
"""Seconds without a round of the watch after which the service manager is no longer told that all is well."""

_log = logging.getLogger(__name__)


@contextmanager
def locked_state(settings: Settings, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold a state folder for this process alone. Raises ConflictError when another daemon has it."""
    os.umask(0o077)
    folder = Path(settings.daemon.state)
    state.prepare(folder, mounts.read_table(environ))
    lock = StateLock(folder)
    try:
        lock.acquire()
    except OSError as error:
        raise errors.DeniedError(
            f"the state folder {folder} cannot be used", why=f"{lock.path}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def serve(read: Callable[[], Settings], environ: Mapping[str, str], *, scan_only: bool = False) -> int:
    """Run until a signal says stop. `read` reads the configuration; the first reading may raise UsageError."""
    settings = read()
    if not settings.watch:
        raise errors.UsageError(
            "there is nothing to watch",
            why=f"{settings.source or 'the built-in configuration'} has no [[watch]]",
            fix="registry init --watch FOLDER writes one",
        )
    logs.start(settings.daemon.log, environ=environ)
    stop = threading.Event()
    with locked_state(settings, environ):
        current: list[Session] = []

        def end(_number: int, _frame: FrameType | None) -> None:
            stop.set()
            if current:
                current[-1].folders.wake.set()

        def again(_number: int, _frame: FrameType | None) -> None:
            threading.Thread(target=_reload, args=(read, current, environ), name="reload", daemon=True).start()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGHUP, again)
        while not stop.is_set():
            session = Session(
                current[-1].settings if current else settings,
                state.open_database(Path(settings.daemon.state), current[-1].damage if current else None),
                environ=environ,
                scan_only=scan_only,
                stop=stop,
            )
            current[:] = [session]
            beat = _heart(session, stop, environ)
            session.run(ready=partial(_ready, session, environ))
            beat.join(1.0)
        notify("STOPPING=1", environ=environ)
        _log.info("stopped")
    return 0


def _ready(session: Session, environ: Mapping[str, str]) -> None:
    roots = {root: session.folders.mode(root).kind for root in session.folders.roots}
    _log.info("ready", extra={"pid": os.getpid(), "watch": roots, "socket": session.settings.daemon.socket})
    notify("READY=1", f"STATUS=watching {len(roots)} folders", environ=environ)


def _heart(session: Session, stop: threading.Event, environ: Mapping[str, str]) -> threading.Thread:
    """Tell the service manager that the watch goes round, for as long as it does."""
    span = watchdog_seconds(environ)

    def tell() -> None:
        while span is not None and not stop.wait(span / 3) and session.damage is None:
            if session.healthy(_STALE):
                notify("WATCHDOG=1", environ=environ)

    thread = threading.Thread(target=tell, name="heart", daemon=True)
    thread.start()
    return thread


def _reload(read: Callable[[], Settings], current: list[Session], environ: Mapping[str, str]) -> None:
    notify("RELOADING=1", environ=environ)
    try:
        fresh = read()
        old = current[-1].settings
        for key in ("state", "socket", "workers"):
            if getattr(fresh.daemon, key) != getattr(old.daemon, key):
                _log.warning("this setting needs a restart and stays as it was", extra={"key": f"daemon.{key}"})
                fresh = fresh._replace(daemon=fresh.daemon._replace(**{key: getattr(old.daemon, key)}))
        if not fresh.watch:
            raise errors.UsageError("there is nothing to watch", why="it has no [[watch]]")
    except errors.WeighbridgeError as error:
        _log.error("the configuration is not usable; the old one stays", extra={"why": error.what, "fix": error.fix})
    except OSError as error:
        _log.error("the configuration cannot be read; the old one stays", extra={"why": str(error)})
    else:
        if fresh.daemon.log != old.daemon.log:
            logs.start(fresh.daemon.log, environ=environ)
        current[-1].reload(fresh)
    notify("READY=1", environ=environ)
