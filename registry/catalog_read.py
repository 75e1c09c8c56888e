"""Reading the catalogue on plain sqlite3: what `ls` and `show` print, in milliseconds.

On the start-up path of `registry ls`: it imports nothing heavy. Nothing is written here. Rows carry a seal, and a row
whose seal does not fit raises DamagedError, a sqlite3.DatabaseError like those of a file that is broken: the caller
throws the cache away and reads the feed anew.
"""

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from weighbridge.registry.refs import split

SCHEMA: Final = 6
"""Steps in `migrations.catalog`."""

CHECKED_WHOLE: Final = 1 << 20
"""Bytes up to which a cache is checked from end to end each time it is opened."""

REGISTRY: Final = (
    "uuid",
    "epoch",
    "cursor",
    "cursor_size",
    "cursor_modified",
    "refreshed_at",
    "names",
    "versions",
    "bytes",
)
NAME: Final = ("name", "kind", "latest", "latest_at", "versions", "bytes")
VERSION: Final = (
    "name", "n", "state", "content", "manifest", "claim", "card", "kind", "base", "license", "noted_license", "note",
    "size", "parameters", "owner", "step", "run", "run_id", "run_started", "worst", "created_at", "claimed_at",
)  # fmt: skip
TAG: Final = ("name", "tag", "seq", "n")
COPY: Final = ("name", "n", "level", "checked_at")
SORTS: Final = {
    "age": "created_at",
    "name": "name",
    "version": "n",
    "size": "size",
    "owner": "owner",
    "kind": "kind",
    "base": "base",
    "step": "step",
}
"""What rows can be sorted by, and the column behind it."""

Row = dict[str, Any]

_ALL_TAGS_FROM: Final = 200


class DamagedError(sqlite3.DatabaseError):
    """A row is not what was written."""


DAMAGE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What a broken file may raise: SQLite's own messages can hold undecodable bytes of it."""


_SHUT: Final = frozenset({3, 5, 6, 7, 8, 9, 10, 13, 14, 15})
"""SQLite's codes for a file that is locked, closed to us or on a full disk."""


def is_damage(error: Exception) -> bool:
    """Tell a broken file, or one of another release, from a file that cannot be used right now."""
    return getattr(error, "sqlite_errorcode", 11) & 0xFF not in _SHUT


def seal(values: Iterable[Any]) -> int:
    """Return the checksum of a row's values."""
    return zlib.crc32(repr(tuple(values)).encode())


def open_file(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """Return a read-only connection. Raises sqlite3.Error for a missing, foreign or damaged file."""
    quoted = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    link = sqlite3.connect(f"file:{quoted}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    try:
        check(link)
    except BaseException:
        link.close()
        raise
    return link


def check(link: sqlite3.Connection) -> None:
    """Raise DamagedError for another schema, and for a small file that is broken anywhere."""
    (version,) = link.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA:
        raise DamagedError(f"its schema is {version}, not {SCHEMA}")
    (pages,) = link.execute("PRAGMA page_count").fetchone()
    (page,) = link.execute("PRAGMA page_size").fetchone()
    if pages * page <= CHECKED_WHOLE:
        (verdict,) = link.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise DamagedError(verdict)


class View:
    """The rows of one registry in a catalogue."""

    __slots__ = ("id", "link")

    def __init__(self, link: sqlite3.Connection, registry: int = 1) -> None:
        """Read through `link`; a cache holds one registry, whose id is 1."""
        self.link = link
        self.id = registry

    def registry(self) -> Row:
        """Return the registry's own row: cursor, epoch, when it was refreshed, and its totals."""
        row = self._one(f"SELECT {','.join(REGISTRY)},seal FROM registries WHERE id = ?", (self.id,), REGISTRY)
        if row is None:
            raise DamagedError("it holds no registry")
        return row

    def names(self, pattern: str | None = None) -> list[str]:
        """Return every name, or those that match a pattern of `*` and `?`, sorted."""
        sql, values = "SELECT name FROM names WHERE registry = ?", [self.id, *([pattern] if pattern else [])]
        sql += " AND name GLOB ?" if pattern else ""
        return [name for (name,) in self.link.execute(sql, values)]

    def name(self, name: str) -> Row | None:
        """Return what is known of a name: kind, latest, number and bytes of its versions."""
        return self._one(
            f"SELECT {','.join(NAME)},seal FROM names WHERE registry = ? AND name = ?", (self.id, name), NAME
        )

    def version(self, name: str, n: int) -> Row | None:
        """Return one version with its tags, whatever its state."""
        found = self._rows("v.registry = ? AND v.name = ? AND v.n = ?", [self.id, name, n])
        return found[0] if found else None

    def listing(
        self,
        names: Sequence[str] = (),
        *,
        every: bool = False,
        kind: str | None = None,
        base: str | None = None,
        licensed: str | None = None,
        since: float | None = None,
        sort: str = "age",
        ascending: bool = False,
        limit: int | None = 50,
    ) -> list[Row]:
        """Return versions as `ls` shows them, newest first.

        The latest version of each name; with `names` (each may hold `*` and `?`) every version of these; with `every`
        all there is, given-up and withdrawn numbers included. `base` and `licensed` match a part of the word, without
        regard to case; `unknown` matches what has none.
        """
        where, values = ["v.registry = ?"], [self.id]  # type: tuple[list[str], list[Any]]
        table = "versions AS v"
        if names:
            where.append("(" + " OR ".join("v.name GLOB ?" if _is_pattern(n) else "v.name = ?" for n in names) + ")")
            values += names
        if not every:
            where.append("v.state = 'committed'")
            if not names:
                table = "names AS a INDEXED BY names_newest CROSS JOIN versions AS v"
                where = ["a.registry = ?", "a.latest IS NOT NULL", *_HOP, *where[1:]]
        for column, value in (("v.kind = ?", kind), ("v.created_at >= ?", since)):
            if value is not None:
                where.append(column)
                values.append(value)
        for column, word in (("v.base", base), ("coalesce(v.noted_license, v.license)", licensed)):
            if word == "unknown":
                where.append(f"{column} IS NULL")
            elif word is not None:
                where.append(f"instr(lower({column}), lower(?)) > 0")
                values.append(word)
        return self._rows(" AND ".join(where), values, table, self._order(sort, ascending, table, names), limit)

    @staticmethod
    def _order(sort: str, ascending: bool, table: str, names: Sequence[str]) -> str:
        way = "ASC" if ascending else "DESC"
        if sort == "age" and len(names) == 1 and not _is_pattern(names[0]):
            return f"v.n {way}"
        if sort == "age":
            return (
                f"a.latest_at {way}, a.name" if table.startswith("names") else f"v.created_at {way}, v.name, v.n DESC"
            )
        return f"v.{SORTS[sort]} {way}, v.name, v.n DESC"

    def by_content(self, prefix: str, name: str | None = None) -> list[Row]:
        """Return the versions whose content digest begins with these hex digits."""
        low = f"sha256:{prefix}"
        where, values = "v.registry = ? AND v.content >= ? AND v.content < ?", [self.id, low, low + "g"]
        if name is not None:
            where, values = where + " AND v.name = ?", [*values, name]
        return self._rows(where, values, order="v.name, v.n")

    def by_step(self, name: str, step: int) -> list[Row]:
        """Return the committed versions of a name that were made at a training step."""
        return self._rows(
            "v.registry = ? AND v.name = ? AND v.step = ? AND v.state = 'committed'", [self.id, name, step], order="v.n"
        )

    def find(self, ref: str, step: int | None = None) -> Row | None:
        """Return the one committed version that a reference means, or None when it is not that simple.

        What an ambiguous or unknown reference is answered with is decided in `flow.resolve`. Raises UsageError for a
        text that is no reference.
        """
        name, n, tag, digest = split(ref)
        if step is not None:
            rows = self.by_step(name, step) if name is not None and tag == "latest" else []
        elif digest is not None:
            rows = [row for row in self.by_content(digest, name) if row["state"] == "committed"]
        else:
            assert name is not None
            if tag == "latest":
                known = self.name(name)
                n = known["latest"] if known else None
            elif tag is not None:
                moved = self.tag(name, tag)
                n = moved["n"] if moved else None
            found = self.version(name, n) if n is not None else None
            rows = [found] if found is not None and found["state"] == "committed" else []
        return rows[0] if len(rows) == 1 else None

    def open_claims(self) -> list[Row]:
        """Return the versions that are claimed and not known to be decided."""
        return self._rows("v.registry = ? AND v.state = 'open'", [self.id], order="v.name, v.n")

    def loose_ends(self) -> list[tuple[str, int]]:
        """Return the numbers whose end the feed does not tell, by name and number.

        They are claimed and not known to be decided, or decided and untold. Those of which nothing at all was told are
        in `gaps`.
        """
        open_ = "SELECT name, n FROM versions WHERE registry = ? AND state = 'open'"
        untold = "SELECT name, n FROM untold WHERE registry = ?"
        return sorted({(name, n) for sql in (open_, untold) for name, n in self.link.execute(sql, (self.id,))})

    def gaps(self) -> dict[str, list[tuple[int, int]]]:
        """Return by name the numbers that were passed over, as first and last of each run of them, in order.

        They are below the highest number of the name and were never told. A run is one pair however long it is: the
        highest number is somebody's word, and may be any.
        """
        before = "lag(n, 1, 0) OVER (PARTITION BY name ORDER BY n)"
        told = f"SELECT name, n, {before} AS before FROM versions WHERE registry = ?"
        sql = f"SELECT name, before + 1, n - 1 FROM ({told}) WHERE n > before + 1 ORDER BY name, n"
        found: dict[str, list[tuple[int, int]]] = {}
        for name, first, last in self.link.execute(sql, (self.id,)):
            found.setdefault(name, []).append((first, last))
        return found

    def given_up(self, since: float) -> list[tuple[str, int]]:
        """Return the numbers that were claimed since then, in seconds since 1970, and given up."""
        sql = "SELECT name, n FROM versions WHERE registry = ? AND state = 'void' AND claimed_at >= ? ORDER BY name, n"
        return [(str(name), int(n)) for name, n in self.link.execute(sql, (self.id, since))]

    def tag(self, name: str, tag: str) -> Row | None:
        """Return where a tag stands: seq, and n or None."""
        return self._one(
            f"SELECT {','.join(TAG)},seal FROM tags WHERE registry = ? AND name = ? AND tag = ?",
            (self.id, name, tag),
            TAG,
        )

    def copy(self, name: str, n: int) -> Row | None:
        """Return at which level the copy on this remote was verified from here, and when; None when it never was."""
        sql = f"SELECT {','.join(COPY)},seal FROM copies WHERE registry = ? AND name = ? AND n = ?"
        return self._one(sql, (self.id, name, n), COPY)

    def tags(self, name: str) -> dict[int, list[str]]:
        """Return the tags of a name by number, sorted; `latest`, which is worked out, comes first."""
        return self._tags([name]).get(name, {})

    def moves(self, name: str, tag: str) -> list[Row]:
        """Return the moves of a tag that were told, oldest first."""
        columns = ("seq", "to_n", "from_n", "sha256")
        sql = f"SELECT {','.join(columns)} FROM tag_moves WHERE registry = ? AND name = ? AND tag = ? ORDER BY seq"
        return [dict(zip(columns, row, strict=True)) for row in self.link.execute(sql, (self.id, name, tag))]

    def document(self, sha256: str) -> str | None:
        """Return the text of a manifest that was kept, by its digest."""
        columns = ("sha256", "document")
        row = self._one("SELECT sha256,document,seal FROM manifests WHERE sha256 = ?", (sha256,), columns)
        return row["document"] if row else None

    def _rows(
        self,
        where: str,
        values: Sequence[Any],
        table: str = "versions AS v",
        order: str | None = None,
        limit: int | None = None,
    ) -> list[Row]:
        sql = f"SELECT {_VERSION_COLUMNS},v.seal FROM {table} WHERE {where}"
        sql += f" ORDER BY {order}" if order else ""
        sql += f" LIMIT {int(limit)}" if limit is not None else ""
        rows = [_checked(row, VERSION) for row in self.link.execute(sql, values)]
        tags = self._tags(sorted({row["name"] for row in rows}))
        for row in rows:
            row["tags"] = tags.get(row["name"], {}).get(row["n"], [])
            row["license"] = row["noted_license"] or row["license"]
        return rows

    def _tags(self, names: Sequence[str]) -> dict[str, dict[int, list[str]]]:
        found: dict[str, dict[int, list[str]]] = {}
        for row in self._each(NAME, "names", names):
            if row["latest"] is not None:
                found.setdefault(row["name"], {})[row["latest"]] = ["latest"]
        for row in self._each(TAG, "tags", names):
            if row["n"] is not None:
                found.setdefault(row["name"], {}).setdefault(row["n"], []).append(row["tag"])
        return found

    def _each(self, columns: Sequence[str], table: str, names: Sequence[str]) -> Iterator[Row]:
        sql = f"SELECT {','.join(columns)},seal FROM {table} WHERE registry = ?"
        if len(names) <= _ALL_TAGS_FROM:
            sql += f" AND name IN ({','.join('?' * len(names))})"
            values = [self.id, *names]
        else:
            values = [self.id]
        yield from (_checked(row, columns) for row in self.link.execute(sql, values))

    def _one(self, sql: str, values: Sequence[Any], columns: Sequence[str]) -> Row | None:
        row = self.link.execute(sql, values).fetchone()
        return None if row is None else _checked(row, columns)


_VERSION_COLUMNS: Final = ",".join(f"v.{column}" for column in VERSION)
_HOP: Final = ("v.registry = a.registry", "v.name = a.name", "v.n = a.latest")


def _checked(values: Sequence[Any], columns: Sequence[str]) -> Row:
    if seal(values[:-1]) != values[-1]:
        raise DamagedError(f"the row of {values[0]!r} is damaged")
    return dict(zip(columns, values, strict=False))


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name or "[" in name
