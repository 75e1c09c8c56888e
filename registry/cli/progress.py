"""How far a transfer is: bars on a terminal, one line a file elsewhere, nothing for programs.

The only home of rich, which is imported when bars are drawn and only then.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.refs import shown
from weighbridge.registry.shell import load
from weighbridge.registry.types import FileEntry

_EVERY: Final = 10.0
"""Seconds between two lines about a long transfer where no bars can be drawn."""


class Follower(Protocol):
    """Is told which files come and how their bytes move; safe to call from several threads."""

    def begin(self, files: Sequence[FileEntry]) -> None:
        """Take note of the files before the first byte."""
        ...

    def moved(self, path: str, count: int) -> None:
        """Take note of `count` bytes of one file; negative when they have to come again."""
        ...

    def total(self, count: int) -> None:
        """Take note of `count` bytes of files that are told as one."""
        ...


@contextmanager
def following(out: Output) -> Iterator[Follower]:
    """Follow one transfer in the way that fits where stderr goes."""
    if out.lively():
        bars = _Bars()
        with bars.display:
            yield bars
    else:
        yield _Lines(out)


class _Lines:
    """A line for each file that is complete, and one every ten seconds in between."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._sizes: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._told = time.monotonic()
        self._sum = 0
        self._lock = threading.Lock()

    def begin(self, files: Sequence[FileEntry]) -> None:
        self._sizes |= {file.path: file.size for file in files}

    def moved(self, path: str, count: int) -> None:
        with self._lock:
            self._done[path] = self._done.get(path, 0) + count
            whole = self._sizes.get(path)
            if whole is not None and self._done[path] >= whole:
                self._say(f"{path}   {size(whole)}")
                return
        self._now_and_then(sum(self._done.values()))

    def total(self, count: int) -> None:
        with self._lock:
            self._sum += count
        self._now_and_then(self._sum)

    def _now_and_then(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told >= _EVERY:
            whole = sum(self._sizes.values())
            self._say(f"{size(done)} of {size(whole)}" if whole else size(done))

    def _say(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._out.as_json:
            self._out.talk(text)


class _Bars:
    """One bar a file, drawn by rich on stderr."""

    def __init__(self) -> None:
        rich: Any = load("importlib:import_module")("rich.progress")
        console: Any = load("rich.console:Console")(stderr=True)
        self.display: Any = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(bar_width=24),
            rich.TaskProgressColumn(),
            rich.DownloadColumn(),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(compact=True),
            console=console,
        )
        self._tasks: dict[str, Any] = {}
        self._one: Any = None

    def begin(self, files: Sequence[FileEntry]) -> None:
        self._add({file.path: file.size for file in files})

    def moved(self, path: str, count: int) -> None:
        if path in self._tasks:
            self.display.advance(self._tasks[path], count)

    def total(self, count: int) -> None:
        if self._one is None:
            self._one = self.display.add_task("bytes", total=None)
        self.display.advance(self._one, count)

    def _add(self, sizes: Mapping[str, int]) -> None:
        for path, whole in sizes.items():
            self._tasks[path] = self.display.add_task(shown(path), total=whole)
