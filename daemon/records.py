"""What the daemon remembers beside its jobs: runs, names, what people allowed, deliveries, second looks, its log."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from weighbridge.adapters import run_identity
from weighbridge.daemon.migrations import schema
from weighbridge.registry import types
from weighbridge.registry.catalog import Catalog

EVENTS_KEPT: Final = 20_000
"""Lines of the log people read; older ones go."""


class Records:
    """The daemon's tables in the database of a catalogue; safe to use from several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._db = catalog.db
        for step in [s.name for s in schema.pending(catalog.db)]:
            with catalog.immediate():
                later = [s.name for s in schema.pending(catalog.db) if s.name != step]
                schema.apply(catalog.db, stop_before=later)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group calls into one transaction."""
        with self._catalog.immediate():
            yield

    # -- runs and names

    def run(self, path: str, key: str, make: Callable[[], str]) -> str:
        """Return the identity of a run, made by `make()` when it is new or was made anew."""
        with self.transaction():
            row = self._catalog.link.execute("SELECT id, key FROM runs WHERE path = ?", (path,)).fetchone()
            if row and run_identity.is_same(row[1], key):
                return str(row[0])
            fresh = str(make())
            self._db.table("runs").upsert({"path": path, "id": fresh, "key": key, "first_seen": time.time()}, pk="path")
            return fresh

    def adopt_run(self, path: str, identity: str) -> None:
        """Give a run the identity under which its bytes were published before."""
        with self.transaction():
            self._catalog.link.execute("UPDATE runs SET id = ? WHERE path = ?", (identity, path))

    def bound(self, home: str, name: str) -> dict[str, Any] | None:
        """Return kind, run and time of the last publication of a name."""
        with self._catalog.immediate():
            rows = self._db.table("bound").rows_where("home = ? AND name = ?", [home, name])
            return next(iter(rows), None)

    def bind(self, home: str, name: str, kind: str, run_id: str) -> None:
        """Bind a name to its first run and kind; the first one stays."""
        with self.transaction():
            if self.bound(home, name) is None:
                row = {"home": home, "name": name, "kind": kind, "run_id": run_id, "published_at": None}
                self._db.table("bound").upsert_all([row], pk=("home", "name"))

    def published(self, home: str, name: str, at: float) -> None:
        """Note when a name was published last."""
        with self.transaction():
            self._catalog.link.execute(
                "UPDATE bound SET published_at = ? WHERE home = ? AND name = ?", (at, home, name)
            )

    def registry_at(self, url: str) -> str | None:
        """Return the uuid of the registry that was seen at a URL."""
        with self._catalog.immediate() as link:
            row = link.execute("SELECT uuid FROM seen_registries WHERE url = ?", (url,)).fetchone()
        return str(row[0]) if row else None

    def remember_registry(self, url: str, uuid: str) -> None:
        """Remember which registry was seen at a URL."""
        with self.transaction():
            self._db.table("seen_registries").upsert({"url": url, "uuid": uuid, "at": time.time()}, pk="url")

    # -- what people allowed, and what they read

    def allow(self, path: str, code: str, reason: str, who: str) -> None:
        """Record that a finding is allowed for everything at or under a path."""
        with self.transaction():
            row = {"path": path, "code": code, "reason": reason, "who": who, "at": time.time()}
            self._db.table("allows").upsert(row, pk=("path", "code"))
            self.event("allowed", path=path, detail=f"{code}: {reason} ({who})")

    def allows(self, path: str) -> list[dict[str, Any]]:
        """Return what is allowed for a path."""
        with self._catalog.immediate():
            rows = list(self._db.table("allows").rows)
        return [row for row in rows if path == row["path"] or path.startswith(row["path"].rstrip("/") + "/")]

    def event(
        self, event: str, *, name: str | None = None, n: int | None = None, path: str | None = None,
        detail: str | None = None,
    ) -> None:  # fmt: skip
        """Write a line of the log people read; old lines go."""
        with self.transaction():
            row = {"at": time.time(), "name": name, "n": n, "path": path, "event": event, "detail": detail}
            last = self._db.table("events").insert(row).last_rowid or 0
            if last % 1000 == 0:
                self._catalog.link.execute("DELETE FROM events WHERE id <= ?", (last - EVENTS_KEPT,))

    def events(self, name: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Return the newest lines of the log, the newest last."""
        with self._catalog.immediate():
            where, arguments = ("name = ?", [name]) if name else ("1", [])
            rows = list(self._db.table("events").rows_where(where, arguments, order_by="id DESC", limit=limit))
        return rows[::-1]

    # -- deliveries to mirrors

    def deliver(self, remote: str, home: str, name: str, n: int) -> None:
        """Note that a mirror has to get a version; noting it twice changes nothing."""
        with self.transaction():
            found = self._catalog.link.execute(
                "SELECT 1 FROM deliveries WHERE remote = ? AND name = ? AND n = ?", (remote, name, n)
            ).fetchone()
            if found is None:
                row = {"remote": remote, "home": home, "name": name, "n": n}
                row |= {"state": "pending", "reason": None, "until": None, "attempts": 0, "receipt": None}
                now = time.time()
                self._db.table("deliveries").upsert_all(
                    [row | {"created_at": now, "updated_at": now}], pk=("remote", "name", "n")
                )

    def deliveries(self, where: str = "1", arguments: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return deliveries in number order, by a condition of ours."""
        with self._catalog.immediate():
            rows = self._db.table("deliveries").rows_where(where, list(arguments), order_by="remote, name, n")
            return list(rows)

    def delivered(self, remote: str, name: str, n: int, **changes: Any) -> None:
        """Write how a delivery stands."""
        with self.transaction():
            self._db.table("deliveries").update((remote, name, n), changes | {"updated_at": time.time()})

    def mirrored(self) -> dict[tuple[str, str, str], int]:
        """Return how many versions of a name were delivered, by mirror, home and name.

        0 where all that were tried ended otherwise: somebody may have brought them by hand.
        """
        sql = """SELECT remote, home, name, sum(state = 'done') FROM deliveries
                 WHERE state NOT IN ('pending', 'waiting') GROUP BY remote, home, name"""
        with self._catalog.immediate() as link:
            return {(remote, home, name): count for remote, home, name, count in link.execute(sql)}

    def followed(self, remote: str, name: str) -> str | None:
        """Return what was said of a name when a mirror was told last."""
        with self._catalog.immediate() as link:
            sql = "SELECT said FROM followed WHERE remote = ? AND name = ?"
            found: tuple[str] | None = link.execute(sql, (remote, name)).fetchone()
        return found[0] if found else None

    def follow(self, remote: str, name: str, said: str) -> None:
        """Note what a mirror was told of a name."""
        with self.transaction():
            self._db.table("followed").upsert({"remote": remote, "name": name, "said": said}, pk=("remote", "name"))

    # -- looking again

    def verified(self, home: str, name: str, n: int, findings: Sequence[types.Finding]) -> None:
        """Record what a look at a published version found."""
        with self.transaction():
            row = {"home": home, "name": name, "n": n, "at": time.time(), "findings": encode(findings)}
            self._db.table("verifications").upsert(row, pk=("home", "name", "n"))

    def verifications(self, where: str = "1", arguments: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the results of looks at published versions, the oldest first."""
        with self._catalog.immediate():
            return list(self._db.table("verifications").rows_where(where, list(arguments), order_by="at"))


def encode(findings: Sequence[types.Finding]) -> str:
    """Return findings as JSON text."""
    return msgspec.json.encode(list(findings)).decode()
