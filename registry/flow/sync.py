"""Bringing a catalogue up to the feed: list after the cursor, get what is new, look at claims that are still open.

Two to four requests when little is new; a snapshot when much is. The result does not depend on when it was run before.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from weighbridge.registry import layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.catalog_read import DAMAGE, check, is_damage
from weighbridge.registry.errors import FeedDamagedError, IntegrityError, UsageError
from weighbridge.registry.flow import commit_sync, feed, once, snapshot
from weighbridge.registry.flow.decision import Void, settled
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.types import FeedEntry, Value

_READONLY: Final = 8

MANY: Final = 64
"""New objects from which on a snapshot is looked for."""


class Report(Value, frozen=True):
    """What a synchronisation did; `anew` means that older knowledge was dropped, `problems` name damaged objects."""

    cursor: int
    objects: int
    resolved: int
    open: int
    anew: bool
    problems: list[str]


def sync(remote: Remote, catalog: Catalog, *, only: str | None = None, now: Callable[[], float] = time.time) -> Report:
    """Bring the catalogue of one registry up to the remote's feed.

    `only` is the one name that is news, for a remote that can be asked about one; a catalogue that never was up to it
    is brought up whole.
    Raises FeedDamagedError when the feed has a hole or a damaged object and was not repaired since; the catalogue then
    stays as it was. Errors of the remote are raised too.
    """
    repositories = commits.of(remote)
    if repositories is not None:
        if only is not None and catalog.registry()["refreshed_at"] is not None:
            commit_sync.sync_name(repositories, catalog, only)
            return Report(cursor=0, objects=1, resolved=0, open=0, anew=False, problems=[])
        names, problems = commit_sync.sync(repositories, catalog)
        catalog.mark(refreshed_at=now())
        return Report(cursor=0, objects=names, resolved=0, open=0, anew=False, problems=problems)
    cursor = catalog.cursor
    fresh = cursor == 0
    listed: list[tuple[int, Stat]] = []
    if not fresh:
        listed = feed.list_after(remote, cursor - 1, MANY + 2)
        if not _stands(catalog, listed):
            cursor, fresh, listed = 0, True, []  # the remote was set back or exchanged
        else:
            listed = listed[1:]
    anew = fresh and catalog.cursor > 0
    shortcut = None
    if fresh or len(listed) > MANY:
        shortcut = snapshot.load(remote, above=cursor)
        cursor = shortcut.seq if shortcut else cursor
        listed = feed.list_after(remote, cursor)
    changes = feed.changes(remote, cursor, listed=listed)
    with catalog.immediate():
        if fresh or shortcut or changes.fresh:
            catalog.forget()
        if shortcut and not changes.fresh:
            catalog.apply(shortcut.seq, shortcut.entries)
            catalog.mark(epoch=shortcut.epoch)
        told_at = {seq: stat.modified for seq, stat in listed}
        _apply(catalog, changes.parts, told_at)
        if listed:
            _, last = listed[-1]
            catalog.mark(cursor=changes.head, cursor_size=last.size, cursor_modified=last.modified)
        elif shortcut:
            catalog.mark(cursor_size=None, cursor_modified=None)
    resolved, problems = _resolve(remote, catalog)
    catalog.mark(refreshed_at=now())
    return Report(
        cursor=catalog.cursor,
        objects=len(changes.parts),
        resolved=resolved,
        open=len(catalog.open_claims()),
        anew=anew or changes.fresh,
        problems=problems,
    )


def _stands(catalog: Catalog, listed: list[tuple[int, Stat]]) -> bool:
    """Tell whether the object at the cursor is still the one that was read."""
    row = catalog.registry()
    if not listed or listed[0][0] != row["cursor"]:
        return False
    _, stat = listed[0]
    return row["cursor_size"] is None or (row["cursor_size"], row["cursor_modified"]) == (stat.size, stat.modified)


def _apply(catalog: Catalog, parts: Sequence[feed.Part], told_at: dict[int, float]) -> None:
    if parts:
        last = parts[-1]
        catalog.apply_all(last.seq, ((entry, told_at.get(part.seq)) for part in parts for entry in part.entries))
        catalog.mark(epoch=last.epoch)


def _resolve(remote: Remote, catalog: Catalog) -> tuple[int, list[str]]:
    """Look at each open claim's decision, one GET each; return how many were found and what is damaged."""
    rows = catalog.open_claims()

    def one(row: dict[str, object]) -> FeedEntry | str | None:
        name, n = str(row["name"]), int(str(row["n"]))
        key = layout.manifest(name, n)
        stored = once.look(remote, key)
        if stored is None:
            return None
        try:
            found = settled(remote, name, n, stored)
        except IntegrityError as error:
            return f"{error.what}: {error.why} (what helps says: registry verify {name}@v{n})"
        if isinstance(found, Void):
            return feed.void_entry(name, n, stored)
        if found.content != row["content"]:
            why = "its content is not that of its claim"
            return f"{key} is damaged: {why} (what helps says: registry verify {name}@v{n})"
        return feed.version_entry(name, n, found)

    workers = min(remote.properties.parallel, len(rows))
    if workers < 2:
        answers = [one(row) for row in rows]
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="resolve") as pool:
            answers = list(pool.map(one, rows))
    entries = [answer for answer in answers if isinstance(answer, FeedEntry)]
    catalog.found(entries)
    return len(entries), [answer for answer in answers if isinstance(answer, str)]


# ------------------------------------------------------------------------------------------------------------ the cache


def open_cache(path: Path | None, registry: str) -> tuple[Catalog, str | None]:
    """Open a registry's disposable cache, made anew when it is damaged and kept in memory where it cannot be written.

    Returns the catalogue and, when something was wrong, a sentence about it.
    """
    if path is None:
        return Catalog.open(None, registry, durable=False), None
    note = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            catalog = Catalog.open(path, registry, durable=False)
            _examine(catalog)
        except (*DAMAGE, UsageError) as error:
            if not _is_damage(error, path):
                raise
            discard(path)
            note = f"the cache was damaged and is read anew ({error})"
            catalog = Catalog.open(path, registry, durable=False)
    except (OSError, *DAMAGE) as error:
        return Catalog.open(None, registry, durable=False), f"the cache cannot be used: {error}"
    return catalog, note


def _examine(catalog: Catalog) -> None:
    """Raise DamagedError for a cache that is broken where that can be told quickly; it is closed then."""
    try:
        check(catalog.link)
        catalog.registry()
    except BaseException:
        catalog.close()
        raise


def refresh(
    remote: Remote, path: Path | None, registry: str, *, only: str | None = None
) -> tuple[Catalog, Report, list[str]]:
    """Return the cache of a registry, brought up to the remote; the list says what was wrong on the way.

    A cache that turns out to be damaged is thrown away and read anew, once; one that is locked for long, or on a full
    disk, is left alone and the result kept in memory.
    """
    catalog, note = open_cache(path, registry)
    notes = [note] if note else []
    try:
        report = sync(remote, catalog, only=only)
    except FeedDamagedError:
        catalog.close()
        raise
    except DAMAGE as error:
        catalog.close()
        if path is None:
            raise
        if _is_damage(error, path):
            discard(path)
            notes.append(f"the cache was damaged and is read anew ({error})")
        else:
            path = None
            notes.append(f"the cache cannot be used: {error}")
        catalog, _ = open_cache(path, registry)
        report = sync(remote, catalog)
    except BaseException:
        catalog.close()
        raise
    return catalog, report, notes + report.problems


def _is_damage(error: Exception, path: Path) -> bool:
    """Tell damage from a file that cannot be used; a file that says it is read-only though it is not is damaged."""
    if is_damage(error):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == _READONLY and all(
        os.access(place, os.W_OK) for place in (path, path.parent)
    )


def discard(path: Path) -> None:
    """Remove a cache and its journal; the journal goes first, so that it is never replayed into a new file."""
    for suffix in ("-wal", "-shm", "-journal", ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
