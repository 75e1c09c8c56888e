"""Checks of the machine itself: interpreter, SQLite, PATH, extras, kernel."""

import os
import platform
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from weighbridge import __version__
from weighbridge.adapters import jail
from weighbridge.config.settings import Settings
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check

_SQLITE_FLOOR: Final = (3, 35, 0)
_SQLITE_RESET_FIXED: Final = (3, 51, 3)
"""Until then two connections that checkpoint at the same moment can damage a WAL database."""

_INOTIFY: Final = "/proc/sys/fs/inotify/"
_QUEUE_ENOUGH: Final = 65536
_WATCHES_ENOUGH: Final = 65536
_EVENTS_PER_FILE: Final = 6
_EXTRAS: Final = {"merge": ("numpy", "ml_dtypes"), "torch": ("torch", "peft", "transformers")}


def interpreter() -> Iterator[Check]:
    """Name Python, SQLite and the one bug of SQLite that the single-writer rule works around."""
    line = f"python {platform.python_version()}, weighbridge {__version__}, sqlite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info < _SQLITE_FLOOR:
        yield Check(FAIL, "sqlite", f"{line}: too old", "use a Python that comes with SQLite 3.35 or later")
    elif sqlite3.sqlite_version_info < _SQLITE_RESET_FIXED:
        yield Check(OK, "sqlite", f"{line} (has the WAL-reset bug of two writers; only one process ever writes here)")
    else:
        yield Check(OK, "sqlite", line)


def command(path: str | None = None) -> Iterator[Check]:
    """Tell whether the `registry` that the shell finds is ours."""
    found = shutil.which("registry", path=path)
    own = Path(sys.executable).parent
    if found is None:
        place = f"export PATH={own}:$PATH" if (own / "registry").exists() else "pip install weighbridge"
        yield Check(WARN, "command", "`registry` is not on the PATH", place)
    elif Path(found).resolve().parent == own.resolve():
        yield Check(OK, "command", f"`registry` is {found}")
    elif _is_ours(Path(found)):
        yield Check(OK, "command", f"`registry` is {found}, another installation of weighbridge")
    else:
        yield Check(
            WARN, "command", f"another program called `registry` comes first: {found}", "type weighbridge instead"
        )


def _is_ours(script: Path) -> bool:
    try:
        with script.open("rb") as stream:
            return b"weighbridge.registry.cli" in stream.read(4096)
    except OSError:
        return False


def extras(settings: Settings) -> Iterator[Check]:
    """Tell whether the optional libraries are there, and whether a rule needs them."""
    merging = any(rule.merge != "never" for rule in settings.watch)
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        needed = merging and (extra == "merge" or settings.merge.behaviour)
        what = "merge jobs will be refused here" if extra == "merge" else "merges will not be compared here"
        if not missing:
            yield Check(OK, f"extra-{extra}", f"{extra} extra installed")
        elif needed:
            yield Check(
                WARN,
                f"extra-{extra}",
                f"{extra} extra not installed ({', '.join(missing)} missing): {what}",
                f"pip install 'weighbridge[{extra}]'",
            )
        else:
            yield Check(OK, f"extra-{extra}", f"{extra} extra not installed; no rule needs it")


def inotify(folder: str = _INOTIFY) -> Iterator[Check]:
    """Compare the kernel's limits with a trainer's bursts; overflow costs time only, because the scan is the truth."""
    limits = {name: _number(folder + name) for name in ("max_queued_events", "max_user_watches", "max_user_instances")}
    queue, watches = limits["max_queued_events"], limits["max_user_watches"]
    if queue is None or watches is None:
        yield Check(
            WARN, "inotify", "this kernel has no inotify: folders are only scanned", "use Linux to be told at once"
        )
        return
    if watches < _WATCHES_ENOUGH:
        yield Check(
            WARN,
            "inotify-watches",
            f"inotify watches {watches}: folders beyond that are only scanned",
            "sysctl fs.inotify.max_user_watches=524288",
        )
    if queue < _QUEUE_ENOUGH:
        yield Check(
            WARN,
            "inotify-queue",
            f"inotify queue {queue}: some {queue // _EVENTS_PER_FILE} files at once can overflow it (a scan covers it)",
            "sysctl fs.inotify.max_queued_events=131072",
        )
    if watches >= _WATCHES_ENOUGH and queue >= _QUEUE_ENOUGH:
        yield Check(OK, "inotify", f"inotify queue {queue}, watches {watches}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def jailed() -> Iterator[Check]:
    """Ask whether the kernel can jail, without root, the child processes that open untrusted files."""
    held = jail.able()
    words = jail.finding(held)
    if words is None:
        yield Check(
            OK,
            "jail",
            f"landlock ABI {held.landlock} and a system call filter: child processes that need torch are jailed",
        )
    else:
        yield Check(WARN, "jail", words.message, words.fix)


def runtime(environ: Mapping[str, str]) -> Iterator[Check]:
    """Name what in the environment changes how we behave; values may be secrets and are not shown."""
    chosen = [name for name in sorted(environ) if name.startswith("WEIGHBRIDGE_")]
    if chosen:
        yield Check(OK, "environment", f"environment sets {', '.join(chosen)}")
    if os.geteuid() == 0:
        yield Check(OK, "user", "running as root: permissions of other users are not tested")
