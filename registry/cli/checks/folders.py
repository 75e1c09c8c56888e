"""Checks of this machine's folders: state, watched roots, the daemon that works on them."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weighbridge.config.mounts import network_filesystem
from weighbridge.config.settings import DaemonSettings, Settings
from weighbridge.registry import control
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check
from weighbridge.registry.cli.output import size, span
from weighbridge.registry.errors import DeniedError, UnreachableError


def state(daemon: DaemonSettings, mountinfo: str | None = None) -> Iterator[Check]:
    """Look at the daemon's folder: on a local disk, private, writable, with room."""
    folder = Path(daemon.state)
    kind = network_filesystem(folder, mountinfo)
    if kind is not None:
        yield Check(
            FAIL,
            "state-disk",
            f"state folder {folder} lies on a network file system ({kind})",
            "set [daemon] state to a folder on a local disk",
        )
        return
    if not folder.exists():
        parent = nearest(folder)
        if os.access(parent, os.W_OK | os.X_OK):
            yield Check(OK, "state", f"state folder {folder} is not there yet; the daemon makes it")
        else:
            yield Check(
                FAIL,
                "state",
                f"state folder {folder} is not there and {parent} is not writable for you",
                f"install -d -m 0700 -o $(id -un) {folder}   (as root)",
            )
        return
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        fix = "mount it with write permission, or set [daemon] state to another folder"
        yield Check(FAIL, "state", f"state folder {folder} lies on a file system that is mounted read-only", fix)
        return
    if mode & 0o077:
        yield Check(
            FAIL, "state-mode", f"state folder {folder} is open to others (mode {mode:04o})", f"chmod 700 {folder}"
        )
    if not stat.S_ISDIR(found.st_mode):
        yield Check(FAIL, "state", f"{folder} is no folder", "set [daemon] state to a folder")
    elif not _writable(folder):
        yield Check(FAIL, "state", f"state folder {folder} is not writable for you", "run as the daemon's user")
    else:
        free = free_bytes(folder)
        low = free < daemon.disk_reserve
        yield Check(
            WARN if low else OK,
            "state",
            f"state folder {folder}, local disk, {size(free)} free"
            + (f", below the reserve of {size(daemon.disk_reserve)}: nothing is staged there" if low else ""),
            "free space, or lower [daemon] disk_reserve" if low else None,
        )


def roots(settings: Settings, mountinfo: str | None = None) -> Iterator[Check]:
    """Look at each watched root: there, readable, and how it is watched."""
    for rule in settings.watch:
        root = Path(rule.root)
        if not root.is_dir():
            yield Check(
                WARN,
                "watch",
                f"watched {root} is not there: nothing is found until it is",
                f"mkdir -p {root}, or mend root in {settings.source}",
            )
            continue
        if not os.access(root, os.R_OK | os.X_OK):
            yield Check(FAIL, "watch", f"watched {root} is not readable for you", f"grant read and search on {root}")
            continue
        kind = network_filesystem(root, mountinfo)
        how = f"scanned only, it lies on {kind}" if kind else "inotify and scan"
        mode = root.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield Check(
                WARN,
                "watch-mode",
                f"watched {root} can be written by everybody: whoever does decides what is published",
                f"chmod o-w {root}",
            )
        else:
            yield Check(OK, "watch", f"watched {root}: {how}")


def daemon(settings: Settings) -> Iterator[Check]:
    """Ask the daemon whether it is there."""
    socket = settings.daemon.socket
    try:
        answer: Any = control.ask(socket, "status", timeout=5.0)
    except DeniedError as error:
        yield Check(WARN, "daemon", f"{error.what} ({socket})", error.fix)
    except UnreachableError as error:
        yield Check(WARN, "daemon", f"{error.what}: {error.why}", error.fix)
    else:
        about = answer.get("daemon", answer) if isinstance(answer, dict) else {}
        pid = about.get("pid")
        up = about.get("uptime_seconds")
        details = [f"pid {pid}" if pid else "", f"up {span(up)}" if isinstance(up, (int, float)) else ""]
        yield Check(OK, "daemon", "daemon running" + "".join(f", {part}" for part in details if part))


def nearest(path: Path) -> Path:
    """Return the deepest folder of a path that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write on a folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _writable(folder: Path) -> bool:
    """Write and remove a file: permission bits alone know nothing of read-only mounts and quotas."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-") as stream:
            stream.write(b"probe")
    except OSError:
        return False
    return True
