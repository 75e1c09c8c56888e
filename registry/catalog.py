"""The SQLite catalogue: what the feed tells, what was sealed, what remotes confirmed. A journal, never the truth.

The same tables serve the command line's disposable cache (one file per registry) and the daemon's database (durable,
several registries). One connection writes; whoever reads and then writes does so inside `immediate()`.
"""

import itertools
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import msgspec

from weighbridge.config import mounts
from weighbridge.registry import catalog_read as read
from weighbridge.registry.errors import UsageError
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.shell import load
from weighbridge.registry.times import seconds
from weighbridge.registry.types import FeedEntry, Receipt, Row

_BUSY_MS = 10_000
_CACHE_KB = 32_000
_PAGE = 1024
_MANY = 10_000
_version = itemgetter(*read.VERSION)
_VERSION_LINE = ("registry", *read.VERSION, "seal")
_TOLD = ("tag_moves", "tags", "versions", "names", "heads", "untold")


class Catalog(read.View):
    """One registry's rows in a database that may be written; `at()` gives those of another in the same file."""

    __slots__ = ("_lock", "durable", "path", "uuid")

    def __init__(
        self, link: sqlite3.Connection, path: str, *, durable: bool, lock: threading.RLock, uuid: str, row: int
    ) -> None:
        super().__init__(link, row)
        self.path = path
        self.durable = durable
        self.uuid = uuid
        self._lock = lock

    @classmethod
    def open(cls, path: Path | None, registry: str = "", *, durable: bool) -> Self:
        """Open or create a catalogue and bring its schema up to date; `path` None keeps it in memory.

        `durable`: an acknowledged transaction survives a power loss. Raises UsageError when a newer release wrote the
        file, sqlite3.DatabaseError when it is damaged, OSError and sqlite3.OperationalError when it cannot be written.
        """
        link = sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=_BUSY_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            link.execute("PRAGMA foreign_keys = ON")
            if durable:
                # Nearly every commit changes a few short rows: small pages write a third as much to log and file.
                link.execute(f"PRAGMA page_size = {_PAGE}")
            link.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
            link.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            # WAL needs memory that is shared, which two hosts cannot: a cache in a home on NFS does without.
            shared = path is not None and not durable and mounts.network_filesystem(path) is not None
            link.execute(f"PRAGMA journal_mode = {'DELETE' if shared else 'WAL'}")
            catalog = cls(link, str(path or ":memory:"), durable=durable, lock=threading.RLock(), uuid="", row=0)
            catalog._migrate()
            return catalog.at(registry)
        except BaseException:
            link.close()
            raise

    def at(self, registry: str) -> Self:
        """Return the catalogue of one registry, by its uuid; its row is made when it is new."""
        with self.immediate():
            found = self.link.execute("SELECT id FROM registries WHERE uuid = ?", (registry,)).fetchone()
            if found is None:
                row: read.Row = dict.fromkeys(read.REGISTRY, 0)
                row |= {"uuid": registry, "cursor_size": None, "cursor_modified": None, "refreshed_at": None}
                (last,) = self.link.execute("SELECT coalesce(max(id), 0) FROM registries").fetchone()
                found = (last + 1,)
                self._put("registries", ("id",), [{"id": last + 1} | _sealed(row, read.REGISTRY)])
        return type(self)(self.link, self.path, durable=self.durable, lock=self._lock, uuid=registry, row=found[0])

    @property
    def db(self) -> Any:
        """The same connection as sqlite_utils has it; loaded when it is needed, which for a cache is hardly ever."""
        return load("weighbridge.registry.sqlite:Database")(self.link, recursive_triggers=False, execute_plugins=False)

    @contextmanager
    def immediate(self) -> Iterator[sqlite3.Connection]:
        """Hold the one write transaction: reads inside it stay true until it is committed. Inner calls join it."""
        with self._lock:
            if self.link.in_transaction:
                yield self.link
                return
            self.link.execute("BEGIN IMMEDIATE")
            try:
                yield self.link
            except BaseException:
                if self.link.in_transaction:
                    self.link.execute("ROLLBACK")
                raise
            self.link.execute("COMMIT")

    def close(self) -> None:
        """Close the connection that all registries of this file share."""
        with self._lock:
            self.link.close()

    # -------------------------------------------------------------------------------------------- where the feed stands

    @property
    def cursor(self) -> int:
        """The feed object up to which this is the state."""
        return int(self.registry()["cursor"])

    @property
    def epoch(self) -> int:
        """The epoch of that object."""
        return int(self.registry()["epoch"])

    def mark(self, **values: Any) -> None:
        """Set columns of the registry's own row: cursor, epoch, refreshed_at, ..."""
        with self.immediate():
            self._put("registries", ("id",), [{"id": self.id} | _sealed(self.registry() | values, read.REGISTRY)])

    def forget(self) -> None:
        """Drop everything the feed told; what was sealed and confirmed stays."""
        with self.immediate():
            for table in _TOLD:
                self.link.execute(f"DELETE FROM {table} WHERE registry = ?", (self.id,))
            self.mark(cursor=0, cursor_size=None, cursor_modified=None, names=0, versions=0, bytes=0)

    def heads(self) -> dict[str, str]:
        """Return the commit at which each name was read last; empty for remotes with a feed."""
        sql = "SELECT name, commit_id FROM heads WHERE registry = ?"
        return dict(self.link.execute(sql, (self.id,)).fetchall())

    def replace(self, name: str, commit: str | None, entries: Iterable[FeedEntry]) -> None:
        """Make the rows of a name exactly what `entries` say, as read at a commit; None: the name is gone."""
        with self.immediate():
            for table in _TOLD:
                self.link.execute(f"DELETE FROM {table} WHERE registry = ? AND name = ?", (self.id, name))
            if commit is not None:
                self.apply(None, entries)
                self._put("heads", ("registry", "name"), [{"registry": self.id, "name": name, "commit_id": commit}])
            self._total()

    # ---------------------------------------------------------------------------------------------- what the feed tells

    def apply(self, seq: int | None, entries: Iterable[FeedEntry], *, told_at: float | None = None) -> None:
        """Take in entries of the feed and move the cursor to `seq` (None: facts that came another way, cursor stays).

        Repeating changes nothing. `told_at` is the store time of the feed object, for claims that do not tell theirs.
        """
        self.apply_all(seq, ((entry, told_at) for entry in entries))

    def found(self, decisions: Sequence[FeedEntry]) -> None:
        """Take in decisions that were found by looking, and remember that the feed has not told them."""
        with self.immediate():
            self.apply(None, decisions)
            rows = [{"registry": self.id, "name": entry.name, "n": entry.n} for entry in decisions]
            self.link.executemany("INSERT OR IGNORE INTO untold VALUES (:registry, :name, :n)", rows)

    def apply_all(self, seq: int | None, facts: Iterable[tuple[FeedEntry, float | None]]) -> None:
        """Take in entries of several objects at once, each with the store time of its object."""
        with self.immediate():
            rows: dict[tuple[str, int], read.Row] = {}
            held: dict[str, bool] = {}
            untold = self._untold() if seq is not None else set()
            for entry, told_at in facts:
                if entry.type == "tag":
                    self._apply_tag(entry)
                elif entry.n is not None:
                    key = (entry.name, entry.n)
                    if key not in rows:
                        # One question for each name, not for each version: a first reader knows none of them.
                        if entry.name not in held:
                            held[entry.name] = self._holds(entry.name)
                        rows[key] = (self._told(*key) if held[entry.name] else None) or _blank(*key)
                    _apply_fact(rows[key], entry, told_at)
                    if key in untold and entry.type in {"version", "void"}:
                        sql = "DELETE FROM untold WHERE registry = ? AND name = ? AND n = ?"
                        self.link.execute(sql, (self.id, *key))
            touched = sorted({name for name, _ in rows})
            known = set(self._known(touched))
            new = [dict.fromkeys(read.NAME) | {"name": n, "versions": 0, "bytes": 0} for n in touched if n not in known]
            self._put("names", ("registry", "name"), [self._mine(row, read.NAME) for row in new])
            # In the order of the table, so that a page is written once.
            told = (rows[key] for key in sorted(rows) if rows[key]["state"])
            with self._filling("versions", len(rows)):
                self._put_lines("versions", ("registry", "name", "n"), _VERSION_LINE, map(self._line, told))
            if touched:
                self._count(touched)
            if seq is not None and seq > self.cursor:
                self.mark(cursor=seq)

    def _apply_tag(self, entry: FeedEntry) -> None:
        assert entry.tag is not None
        seq = int(entry.source.rpartition("/")[2].removesuffix(".json"))
        move = {"seq": seq, "to_n": entry.to, "from_n": entry.from_, "sha256": entry.sha256}
        move |= {"registry": self.id, "name": entry.name, "tag": entry.tag}
        self._put("tag_moves", ("registry", "name", "tag", "seq"), [move])
        at = self.tag(entry.name, entry.tag)
        if at is None or at["seq"] < seq:
            row = {"name": entry.name, "tag": entry.tag, "seq": seq, "n": entry.to}
            self._put("tags", ("registry", "name", "tag"), [self._mine(row, read.TAG)])

    def _untold(self) -> set[tuple[str, int]]:
        return set(self.link.execute("SELECT name, n FROM untold WHERE registry = ?", (self.id,)).fetchall())

    def _holds(self, name: str) -> bool:
        sql = "SELECT 1 FROM versions WHERE registry = ? AND name = ? LIMIT 1"
        return self.link.execute(sql, (self.id, name)).fetchone() is not None

    def _told(self, name: str, n: int) -> read.Row | None:
        sql = f"SELECT {','.join(read.VERSION)},seal FROM versions WHERE registry = ? AND name = ? AND n = ?"
        return self._one(sql, (self.id, name, n), read.VERSION)

    def _known(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            if self.link.execute("SELECT 1 FROM names WHERE registry = ? AND name = ?", (self.id, name)).fetchone():
                yield name

    def _count(self, names: Sequence[str]) -> None:
        """Work out kind, latest and totals of some names, then the registry's totals."""
        counted = [self._mine(self._counted(name), read.NAME) for name in names]
        self._put("names", ("registry", "name"), counted)
        self._total()

    def _total(self) -> None:
        sql = "SELECT sum(versions > 0), sum(versions), sum(bytes) FROM names WHERE registry = ?"
        totals = [int(value or 0) for value in self.link.execute(sql, (self.id,)).fetchone()]
        self.mark(**dict(zip(("names", "versions", "bytes"), totals, strict=True)))

    def _counted(self, name: str) -> read.Row:
        mine = (self.id, name)
        sql = """SELECT count(*), coalesce(sum(size), 0) FROM versions
                 WHERE registry = ? AND name = ? AND state = 'committed'"""
        count, size = self.link.execute(sql, mine).fetchone()
        sql = "SELECT kind FROM versions WHERE registry = ? AND name = ? AND kind IS NOT NULL ORDER BY n LIMIT 1"
        kind = self.link.execute(sql, mine).fetchone()
        latest = self._latest(name) if count else None
        return {
            "name": name,
            "kind": kind[0] if kind else None,
            "latest": latest[0] if latest else None,
            "latest_at": latest[1] if latest else None,
            "versions": count,
            "bytes": size,
        }

    def _latest(self, name: str) -> tuple[int, float | None] | None:
        """Return number and time of `latest`: of the newest run the greatest step, ties by number.

        A run is as old as its start says, else as the store time of its first claim; a run of which nothing is
        committed does not count.
        """
        sql = """SELECT run_id FROM versions WHERE registry = ? AND name = ? GROUP BY run_id
                 HAVING max(state = 'committed')
                 ORDER BY coalesce(min(run_started), min(claimed_at)) DESC, max(n) DESC LIMIT 1"""
        run = self.link.execute(sql, (self.id, name)).fetchone()
        if run is None:
            return None
        sql = """SELECT n, created_at FROM versions
                 WHERE registry = ? AND name = ? AND run_id IS ? AND state = 'committed'
                 ORDER BY step DESC, n DESC LIMIT 1"""
        found: tuple[int, float | None] | None = self.link.execute(sql, (self.id, name, run[0])).fetchone()
        return found

    # --------------------------------------------------------------------------------------- what was sealed and stored

    def keep(self, manifest: Manifest) -> None:
        """Keep a manifest: its text, files, findings and lineage. Repeating changes nothing."""
        digest = manifest.digest
        with self.immediate():
            if self.link.execute("SELECT 1 FROM manifests WHERE sha256 = ?", (digest,)).fetchone():
                return
            text = manifest.stored.decode()
            self.db.table("manifests").insert(
                {
                    "sha256": digest,
                    "content": manifest.content,
                    "kind": manifest.kind,
                    "document": text,
                    "seal": read.seal((digest, text)),
                }
            )
            owned: read.Row = {"manifest": digest}
            self.db.table("files").insert_all(owned | msgspec.to_builtins(file) for file in manifest.files)
            self.db.table("findings").insert_all(
                owned
                | {"position": at}
                | msgspec.to_builtins(finding)
                | {"data": msgspec.json.encode(finding.data).decode()}
                for at, finding in enumerate(manifest.facts.findings)
            )
            self.db.table("lineage").insert_all(
                owned | {"position": at, "relation": edge.relation, "ref": edge.ref, "parent": edge.content}
                for at, edge in enumerate(manifest.facts.lineage)
            )

    def record(self, manifest: Manifest, receipt: Receipt) -> None:
        """Record a publication that a remote confirmed, manifest and receipt in one transaction."""
        with self.immediate():
            self.keep(manifest)
            row = msgspec.to_builtins(receipt)
            row |= {"manifest": row.pop("manifest_sha256"), "registry": self.uuid, "joined": int(receipt.joined)}
            row["files"] = msgspec.json.encode(receipt.files).decode()
            self._put("receipts", ("remote", "registry", "name", "n"), [row])

    def said(self, name: str) -> str:
        """Return a text that changes when a tag of the name moves, a version is withdrawn or a note is added."""
        mine = (self.id, name)
        tags = "SELECT tag, seq FROM tags WHERE registry = ? AND name = ? ORDER BY tag"
        marks = """SELECT n, state = 'withdrawn', note FROM versions WHERE registry = ? AND name = ?
                   AND (state = 'withdrawn' OR note IS NOT NULL) ORDER BY n"""
        with self.immediate() as link:
            told = [link.execute(sql, mine).fetchall() for sql in (tags, marks)]
        return sha256_bytes(repr(told).encode())

    def checked(self, name: str, n: int, level: str, at: float) -> None:
        """Remember that the copy of a version behind this remote was verified, at which level and when."""
        row = {"name": name, "n": n, "level": level, "checked_at": at}
        with self.immediate():
            self._put("copies", ("registry", "name", "n"), [self._mine(row, read.COPY)])

    def receipts(self, name: str, n: int) -> list[dict[str, Any]]:
        """Return what remotes confirmed of a version, by remote."""
        rows = self.db.table("receipts").rows_where(
            "registry = ? AND name = ? AND n = ?", [self.uuid, name, n], order_by="remote"
        )
        return [dict(row) | {"files": msgspec.json.decode(row["files"])} for row in rows]

    # --------------------------------------------------------------------------------------------------------- plumbing

    def _mine(self, row: read.Row, columns: Sequence[str]) -> read.Row:
        return {"registry": self.id} | _sealed(row, columns)

    @contextmanager
    def _filling(self, table: str, rows: int) -> Iterator[None]:
        """Fill an empty table without its indexes and make them afterwards: a first reader of a large team waits."""
        sql = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
        many = rows >= _MANY and self.link.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is None
        indexes = self.link.execute(sql, (table,)).fetchall() if many else []
        for name, _ in indexes:
            self.link.execute(f"DROP INDEX {name}")
        yield
        for _, made in indexes:
            self.link.execute(made)

    def _line(self, row: read.Row) -> tuple[Any, ...]:
        """Return a version's row as it is stored; of a large team there are very many."""
        values = _version(row)
        return (self.id, *values, read.seal(values))

    def _put(self, table: str, key: tuple[str, ...], rows: Iterable[read.Row]) -> None:
        """Insert rows or bring them up to date; plain SQL, because a first reader of a large registry waits for it."""
        given = iter(rows)
        first = next(given, None)
        if first is None:
            return
        columns = list(first)
        lines = ([row[column] for column in columns] for row in itertools.chain((first,), given))
        self._put_lines(table, key, columns, lines)

    def _put_lines(
        self, table: str, key: tuple[str, ...], columns: Sequence[str], lines: Iterable[Sequence[Any]]
    ) -> None:
        change = ",".join(f"{column} = excluded.{column}" for column in columns if column not in key)
        self.link.executemany(
            f"INSERT INTO {table} ({','.join(columns)}) VALUES ({','.join('?' * len(columns))}) "
            f"ON CONFLICT ({','.join(key)}) DO UPDATE SET {change}",
            lines,
        )

    def _migrate(self) -> None:
        """Apply what is missing, each step in a transaction of its own, safe against another process doing the same."""
        (version,) = self.link.execute("PRAGMA user_version").fetchone()
        if version == read.SCHEMA:
            return
        if version > read.SCHEMA:
            raise UsageError(
                f"{self.path} was written by a newer release",
                why=f"its schema is {version}, this release knows {read.SCHEMA}",
                fix="upgrade weighbridge",
            )
        catalog, db = load("weighbridge.registry.migrations:catalog"), self.db
        steps = [step.name for step in catalog.pending(db)]
        for at, step in enumerate(steps):
            with self.immediate():
                if step in {s.name for s in catalog.pending(db)}:
                    catalog.apply(db, stop_before=steps[at + 1 :])
        with self.immediate():
            self.link.execute(f"PRAGMA user_version = {read.SCHEMA}")


def _blank(name: str, n: int) -> read.Row:
    return dict.fromkeys(read.VERSION) | {"name": name, "n": n}


def _sealed(row: read.Row, columns: Sequence[str]) -> read.Row:
    values = [row[column] for column in columns]
    return dict(zip(columns, values, strict=True)) | {"seal": read.seal(values)}


def _apply_fact(row: read.Row, entry: FeedEntry, told_at: float | None) -> None:
    """Change a version's row by one entry; a decision outlives a claim that is told again later."""
    if entry.type == "withdrawn":
        row["state"] = "withdrawn"
        return
    if entry.type == "note":
        row["note"] = max(row["note"] or 0, int(entry.source.rpartition("/")[2].removesuffix(".json")))
        if entry.row is not None:
            row["noted_license"] = entry.row.license
        return
    row["content"] = entry.content or row["content"]
    stored_at = seconds(entry.stored_at)
    if row["claimed_at"] is None or entry.type == "claim":
        row["claimed_at"] = stored_at if stored_at is not None else row["claimed_at"] or told_at
    if entry.type == "claim":
        row["claim"] = entry.sha256
        row["state"] = row["state"] or "open"
    elif row["state"] != "withdrawn":
        row["state"] = "committed" if entry.type == "version" else "void"
    if entry.type == "version":
        row["manifest"] = entry.sha256
        row["card"] = entry.card_sha256 or row["card"]
    if entry.row is not None:
        _apply_row(row, entry.row)
    if row["created_at"] is None:
        row["created_at"] = row["claimed_at"]


def _apply_row(row: read.Row, told: Row) -> None:
    for column in ("kind", "base", "license", "size", "parameters", "owner", "step", "run", "run_id", "worst"):
        row[column] = getattr(told, column)
    row["run_started"] = seconds(told.run_started)
    row["created_at"] = seconds(told.created_at) or row["claimed_at"]
