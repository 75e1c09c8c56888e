"""Events as hints: which folders somebody touched since we asked last. The scan stays the truth (`scan.py`).

inotify loses events (a full queue; files written into a folder that was just made), so nothing here decides anything:
a hint only means that a folder is looked at sooner. Where events cannot be had - network file systems, no watches or
instances left - a root is only scanned, and says so.
"""

import errno
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver

try:
    from watchdog.observers.inotify import InotifyObserver
except (ImportError, OSError, AttributeError):  # a system without inotify
    _INOTIFY = False
else:
    _INOTIFY = True

_EVENTS: Final[list[type[FileSystemEvent]]] = [
    FileClosedEvent,
    FileMovedEvent,
    DirCreatedEvent,
    DirMovedEvent,
    DirDeletedEvent,
]
"""One event per written file instead of six."""

_log = logging.getLogger(__name__)


class Mode(NamedTuple):
    """How a root is watched: `inotify` or `scan`, and why not by events."""

    kind: str
    reason: str | None = None


class Taken(NamedTuple):
    """The hints since the last call; after an overflow nothing is known and everything has to be looked at."""

    folders: frozenset[str]
    overflowed: bool


class Hints:
    """The watches on some roots; `wake` is set whenever there is something to take."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._folders: set[str] = set()
        self._overflowed = False
        self._followed: set[str] = set()
        self._observer: BaseObserver | None = None
        self._alarm = _OverflowAlarm(self._on_overflow)
        self.modes: dict[str, Mode] = {}
        self.overflows = 0

    def bind(self, wake: threading.Event) -> None:
        """Set another event from here on whenever there is something to take."""
        self._wake = wake

    def start(self, roots: Iterable[str], *, scan_only: Iterable[tuple[str, str]] = ()) -> None:
        """Watch these roots; `scan_only` are (root, reason) of those where events cannot be relied on.

        Never fails: a root that cannot be watched is scanned, and `modes` tells why.
        """
        self.modes = {root: Mode("scan", reason) for root, reason in scan_only}
        wanted = [root for root in roots if root not in self.modes]
        if not _INOTIFY:
            self.modes |= {root: Mode("scan", "this system has no inotify") for root in wanted}
            return
        if not wanted:
            return
        logging.getLogger("watchdog.observers").addHandler(self._alarm)
        # watchdog adds a watch twice when a folder fills while it is entered; it says so and goes on.
        warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)
        try:
            self._observer = InotifyObserver()
            self._observer.start()
        except OSError as error:
            self._observer = None
            self.modes |= {root: Mode("scan", _words(error)) for root in wanted}
            return
        for root in wanted:
            self.modes[root] = self._watch(self._observer, root)

    def follow(self, path: str) -> None:
        """Watch behind a link under a root that is watched, too; where that fails the scan is enough."""
        if self._observer is not None and path not in self._followed:
            self._followed.add(path)
            self._watch(self._observer, path)

    def _watch(self, observer: BaseObserver, path: str) -> Mode:
        real = os.path.realpath(path)
        try:
            observer.schedule(_Handler(self._on_event, real, path), real, recursive=True, event_filter=_EVENTS)
        except OSError as error:
            return Mode("scan", _words(error))
        return Mode("inotify")

    def fall_back(self, reason: str) -> None:
        """Stop listening: from here on every root is scanned only."""
        self.stop()
        self.modes = {root: Mode("scan", mode.reason or reason) for root, mode in self.modes.items()}

    def take(self) -> Taken:
        """Return and forget the hints so far."""
        with self._lock:
            taken = Taken(frozenset(self._folders), self._overflowed)
            self._folders.clear()
            self._overflowed = False
        return taken

    def short_of_watches(self, folders: int) -> bool:
        """Tell whether the kernel gave us fewer watches than there are folders: it refuses them without a word."""
        return self._observer is not None and kernel_watches() < folders

    def stop(self) -> None:
        """Give all watches back."""
        logging.getLogger("watchdog.observers").removeHandler(self._alarm)
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            observer.join(5.0)

    def _on_event(self, paths: Iterable[str], *, folder: bool) -> None:
        # Nothing else may happen here: the queue before us is serial and has no bound.
        with self._lock:
            for path in paths:
                self._folders.add(path.rpartition("/")[0])
                if folder:
                    self._folders.add(path)
        self._wake.set()

    def _on_overflow(self) -> None:
        with self._lock:
            self._overflowed = True
            self.overflows += 1
        self._wake.set()


class _Handler(FileSystemEventHandler):
    """Tells events under the name that people configured, whatever links lie on the way."""

    def __init__(self, call: "_OnEvent", real: str, shown: str) -> None:
        super().__init__()
        self._call, self._real, self._shown = call, real, shown

    def dispatch(self, event: FileSystemEvent) -> None:
        """Hand an event of any kind on."""
        paths = [os.fsdecode(raw) for raw in (event.src_path, event.dest_path) if raw]
        self._call(
            [self._shown + path[len(self._real) :] if path.startswith(self._real) else path for path in paths],
            folder=event.is_directory,
        )


class _OnEvent(Protocol):
    def __call__(self, paths: Iterable[str], *, folder: bool) -> None: ...


class _OverflowAlarm(logging.Handler):
    """watchdog tells nobody but its log that the kernel dropped events."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Inotify queue overflowed; filesystem"):
            self._call()


def kernel_watches() -> int:
    """Return how many inotify watches this process holds, as the kernel counts them."""
    count = 0
    for number in _descriptors():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:inotify":  # noqa: PTH115 - a number, not a path
                count += Path(f"/proc/self/fdinfo/{number}").read_text().count("inotify wd:")
    return count


def _descriptors() -> Iterator[str]:
    with suppress(OSError):
        yield from os.listdir("/proc/self/fd")  # noqa: PTH208 - numbers, not paths


def _words(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the kernel has no inotify watches left (fs.inotify.max_user_watches)"
    if error.errno == errno.EMFILE:
        return "the kernel has no inotify instances left (fs.inotify.max_user_instances)"
    return f"no events: {error.strerror or error}"
