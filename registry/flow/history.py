"""What happened to a name, as its remote tells: numbers, moves of its tags, withdrawals and notes, with who and why."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from weighbridge.registry import layout
from weighbridge.registry.errors import IntegrityError
from weighbridge.registry.flow import notes, tags
from weighbridge.registry.manifest import parse_json
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.times import spelled
from weighbridge.registry.types import Value

_WORDS: Final = {"open": "claimed", "void": "voided"}


class Happening(Value, frozen=True):
    """One thing that happened: when (ISO 8601, UTC), in a word, to which number, and what is to be said of it."""

    at: str
    event: str
    n: int | None
    detail: str


def history(remote: Remote, name: str, rows: Iterable[Mapping[str, Any]], limit: int) -> list[Happening]:
    """Return what happened to a name last, at most `limit`, the newest last.

    `rows` are its versions as the catalogue has them; a number stands at the store time of its claim. One request for
    each move, withdrawal or note. Raises what the remote raises; what is damaged is told in its place.
    """
    found = [
        Happening(at=spelled(row["claimed_at"]), event=_WORDS.get(row["state"], "committed"), n=row["n"], detail="")
        for row in rows
        if row["claimed_at"] is not None
    ]
    beside = layout.claims(name).removesuffix("claims/")
    stats = [stat for folder in ("tags/", "withdrawn/", "notes/") for stat in remote.list(beside + folder)]
    newest = sorted(stats, key=lambda stat: stat.modified)[-limit:]
    with ThreadPoolExecutor(max(1, remote.properties.parallel), thread_name_prefix="history") as pool:
        found += pool.map(lambda stat: _told(remote, stat), newest)
    return sorted(found, key=lambda happening: (happening.at, happening.n or 0))[-limit:]


def _told(remote: Remote, stat: Stat) -> Happening:
    kind = stat.key.split("/_wb/", 1)[-1].partition("/")[0]
    stored = remote.read(stat.key)
    try:
        if kind == "tags":
            move = tags.parse(stored, stat.key)
            to = "removed" if move.to is None else f"v{move.to}"
            words = f"{move.tag}: {to}" if move.from_ is None else f"{move.tag}: v{move.from_} -> {to}"
            return Happening(
                at=move.when, event="tagged", n=move.to or move.from_, detail=_by(words, move.who, move.why)
            )
        if kind == "notes":
            note = notes.parse(stored, stat.key)
            return Happening(at=note.when, event="noted", n=note.n, detail=_by(note.kind, note.who, note.why))
        mark = parse_json(stored, stat.key)
        if not isinstance(mark, dict) or not isinstance(mark.get("n"), int):
            raise IntegrityError(f"{stat.key} is damaged")  # noqa: TRY301 - told in its place like the others
        said = _by("", str(mark.get("who")), mark.get("why"))
        at = str(mark.get("when") or spelled(stat.modified))
        return Happening(at=at, event="withdrawn", n=mark["n"], detail=said)
    except IntegrityError as error:
        return Happening(at=spelled(stat.modified), event="damaged", n=None, detail=error.what)


def _by(words: str, who: str, why: str | None) -> str:
    """Say what was done by whom, and why where that was said."""
    said = f"{words}, by {who}" if words else f"by {who}"
    return f"{said}: {why}" if why else said
