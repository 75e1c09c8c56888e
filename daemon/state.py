"""The daemon's state folder: private, local, one database, and what is done when that database is damaged.

daemon.lock      one daemon at a time (lock.py)
daemon.json      the identity of this folder, as it stands in claims
weighbridge.db   jobs and catalogue
baseline.json    what stood under each root when it was seen first: survives a damaged database
status.json      the last status, for `registry status` while the daemon is down
staging/         private copies of what is being published
damaged/         databases that were moved aside
"""

import json
import logging
import os
import shutil
import sqlite3
import stat
import time
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import run_identity
from weighbridge.config import mounts
from weighbridge.daemon.copying import STAGING
from weighbridge.daemon.folders import Known
from weighbridge.daemon.jobstore import JobStore
from weighbridge.daemon.mergestore import MergeStore
from weighbridge.registry import disk, findings
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import DeniedError, DiskFullError, UsageError, WeighbridgeError
from weighbridge.registry.times import spelled
from weighbridge.registry.types import Finding

DATABASE: Final = "weighbridge.db"
BASELINE: Final = "baseline.json"
IDENTITY: Final = "daemon.json"
_CHECKED_WHOLE: Final = 64 << 20
"""Bytes up to which the database is checked from end to end at every start."""

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An open database; `findings` tell that an earlier one was damaged."""

    catalog: Catalog
    store: JobStore
    findings: list[Finding]


def prepare(state: Path, mountinfo: str) -> None:
    """Make the state folder and see that it can be relied on.

    Raises UsageError on a network file system, DeniedError when it cannot be written or belongs to somebody else.
    """
    kind = mounts.network_filesystem(state, mountinfo)
    if kind is not None:
        raise UsageError(
            f"the state folder {state} lies on a network file system",
            why=f"{kind} is shared between hosts: SQLite and file locks cannot be relied on there",
            fix="set [daemon] state to a folder on a local disk",
        )
    with disk.speaking(f"the state folder {state} cannot be used"):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state.stat()
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise DeniedError(
                f"the state folder {state} belongs to somebody else",
                why=f"its owner has the user id {status.st_uid}, this daemon {os.geteuid()}",
                fix="run the daemon as that user, or set [daemon] state to a folder of its own",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            state.chmod(0o700)
        (state / STAGING).mkdir(mode=0o700, exist_ok=True)
        probe = state / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()


def identity(state: Path) -> str:
    """Return the uuid of this state folder, made once."""
    path = state / IDENTITY
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(uuid.UUID(json.loads(path.read_text())["daemon"]))
    fresh = str(uuid.uuid4())
    write(path, {"daemon": fresh})
    return fresh


def open_database(state: Path, damage: str | None = None) -> Opened:
    """Open the database; a damaged one is moved aside and a new one begun, which the scan and the feed fill again.

    `damage` is what was found wrong with it while it was in use: opening does not read every row of it.
    Raises WeighbridgeError that says what to do when the disk is full or nothing can be written.
    """
    path = state / DATABASE
    try:
        if damage is None:
            return Opened(*_open(path), [])
        reason = damage
    except sqlite3.OperationalError as error:
        if is_about_the_disk(error):
            raise cannot_write(error, path) from error
        reason = str(error)  # words of the schema or values that cannot be read: nobody changes them but damage
    except sqlite3.DatabaseError as error:
        reason = str(error)
    kept = _move_aside(state, path)
    allows = _salvage(kept / DATABASE)
    catalog, store = _open(path)
    for root, standing in read_baselines(state).items():
        store.baseline(root, standing, partial(_run_path, root))
    for row in allows:
        store.allow(row["path"], row["code"], row["reason"], row["who"])
    found = findings.finding(
        "database-damaged",
        str(path),
        f"the database was damaged ({reason}); it lies in {kept} and is filled again from the remote and the folders",
        "check the disk; remove the damaged copy when it is no longer of interest",
    )
    store.event("database-damaged", path=str(path), detail=found.message)
    _log.warning(found.message, extra={"fix": found.fix})
    return Opened(catalog, store, [found])


def _run_path(root: str, path: str) -> str:
    return run_identity.find(root, path).path


def _open(path: Path) -> tuple[Catalog, JobStore]:
    catalog = Catalog.open(path, durable=True)
    try:
        whole = path.stat().st_size <= _CHECKED_WHOLE
        _check(catalog, whole=whole)
        store = JobStore(catalog)
        _check_schema(catalog)
        store.check()
        MergeStore(catalog).check()
    except BaseException:
        catalog.close()
        raise
    return catalog, store


def _check(catalog: Catalog, *, whole: bool) -> None:
    (verdict,) = catalog.link.execute(f"PRAGMA {'integrity_check' if whole else 'quick_check'}(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)


def _check_schema(catalog: Catalog) -> None:
    """Compare the schema with that of a new database: SQLite does not notice a flipped bit in a column's name."""
    fresh = Catalog.open(None, durable=False)
    try:
        JobStore(fresh)
        sql = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
        if catalog.link.execute(sql).fetchall() != fresh.link.execute(sql).fetchall():
            raise sqlite3.DatabaseError("its schema is not what was written")
    finally:
        fresh.close()


def cannot_write(error: sqlite3.Error, path: Path) -> WeighbridgeError:
    """Return the error that tells what is wrong with the disk under the database."""
    text = str(error)
    if "full" in text:
        return DiskFullError(
            "the daemon's database cannot grow",
            why=f"{path}: {text}",
            fix="free some space; the daemon goes on by itself",
        )
    if "readonly" in text or "unable to open" in text or "permission" in text:
        return DeniedError(
            "the daemon's database cannot be written", why=f"{path}: {text}", fix="look at the folder's mount and owner"
        )
    return WeighbridgeError(
        "the daemon's database cannot be used", why=f"{path}: {text}", fix="look at the disk (dmesg), then start again"
    )


def is_damage(error: BaseException) -> bool:
    """Tell a damaged database from one that merely cannot be written at the moment, and from a fault of ours."""
    if isinstance(error, sqlite3.OperationalError):
        return "malformed" in str(error)
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
    )


def is_about_the_disk(error: sqlite3.OperationalError) -> bool:
    """Tell whether SQLite complains of the world around the file rather than of what is in it."""
    words = (
        "full",
        "readonly",
        "unable to open",
        "disk I/O",
        "locked",
        "busy",
        "permission",
        "too many",
        "interrupted",
    )
    return any(word in str(error) for word in words)


def _move_aside(state: Path, path: Path) -> Path:
    kept = state / "damaged" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    with disk.speaking("the damaged database cannot be moved aside"):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        for suffix in ("-wal", "-shm", "-journal", ""):
            part = path.with_name(path.name + suffix)
            if part.exists():
                shutil.move(part, kept / part.name)
        disk.sync_folder(state)
    return kept


def _salvage(damaged: Path) -> list[dict[str, Any]]:
    """Return what people allowed, as far as the damaged file still tells: the one thing nothing else knows."""
    rows: list[dict[str, Any]] = []
    with suppress(sqlite3.Error), closing(sqlite3.connect(damaged)) as link:
        link.row_factory = sqlite3.Row
        for row in link.execute("SELECT path, code, reason, who FROM allows"):
            values = dict(row)
            if all(isinstance(value, str) for value in values.values()):
                rows.append(values)
    return rows


def write(path: Path, value: Mapping[str, Any], *, mode: int = 0o600, durable: bool = True) -> None:
    """Replace a small JSON file in one step. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        disk.write_all(descriptor, json.dumps(value, default=str).encode())
        os.fchmod(descriptor, mode)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(path)
    if durable:
        disk.sync_folder(path.parent)


def read_baselines(state: Path) -> dict[str, dict[str, tuple[Known, int]]]:
    """Return what stood under each root when it was seen first."""
    try:
        stored = json.loads((state / BASELINE).read_text())
        return {
            root: {path: (Known(f, s), int(size)) for path, (f, s, size) in entry["standing"].items()}
            for root, entry in stored["roots"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_baseline(state: Path, root: str, standing: Mapping[str, tuple[Known, int]]) -> None:
    """Remember what stood under a root when it was seen first, beside the database."""
    entries: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        entries = dict(json.loads((state / BASELINE).read_text())["roots"])
    entries[root] = {
        "since": spelled(time.time()),
        "standing": {path: [*known, size] for path, (known, size) in standing.items()},
    }
    write(state / BASELINE, {"roots": entries})
