"""What people say of a version: their part of the card, a licence. Create-only objects; the newest of a kind counts."""

import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from weighbridge.registry import layout
from weighbridge.registry.errors import ConflictError, IntegrityError, UsageError
from weighbridge.registry.flow import decision, feed, once
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.manifest import canonical, parse_json
from weighbridge.registry.refs import check_name
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.rows import row_of
from weighbridge.registry.times import spelled
from weighbridge.registry.types import SCHEMA_NOTE, Registry, Value

TEXT_MAX = 256 << 10
"""Bytes of the longest text people may add to a card."""

_ATTEMPTS = 20


class Note(Value, frozen=True):
    """One note: `text` of a `card` note is markdown, of a `license` note the licence as the Hub spells it."""

    schema: str
    name: str
    n: int
    seq: int
    kind: Literal["card", "license"]
    text: str
    who: str
    when: str
    why: str | None
    nonce: str


def add(
    remote: Remote,
    registry: Registry,
    name: str,
    n: int,
    kind: Literal["card", "license"],
    *,
    text: str,
    who: str,
    why: str | None = None,
    clock: Callable[[], float] = time.time,
) -> Note:
    """Add a note to a committed version and tell the team. Notes never conflict: each takes the next number.

    Raises NotFoundError, WithdrawnError, and UsageError for a text that is too long.
    """
    check_writer(registry)
    if len(text.encode()) > TEXT_MAX:
        raise UsageError(f"the text is too long: {len(text.encode())} bytes", why=f"the limit is {TEXT_MAX}")
    manifest = decision.committed(remote, name, n)
    nonce = secrets.token_hex(16)
    for _ in range(_ATTEMPTS):
        last = max((_number(stat.key) for stat in remote.list(layout.notes(name, n))), default=0)
        note = Note(
            schema=SCHEMA_NOTE, name=name, n=n, seq=last + 1, kind=kind, text=text, who=who,
            when=spelled(clock()), why=why, nonce=nonce,
        )  # fmt: skip
        stored = canonical(note)
        if once.create(remote, layout.notes(name, n, note.seq), stored) is None:
            row = msgspec.structs.replace(row_of(manifest), license=text) if kind == "license" else None
            feed.announce(remote, registry, [feed.note_entry(name, n, note.seq, stored, row=row)])
            return note
    raise ConflictError(f"others wrote notes on {name}@v{n} faster {_ATTEMPTS} times", fix="try again")


def read(remote: Remote, name: str, n: int) -> list[Note]:
    """Return the notes on a version, oldest first."""
    return [parse(remote.read(stat.key), stat.key) for stat in remote.list(layout.notes(name, n))]


def people(remote: Remote, name: str, n: int) -> str | None:
    """Return the text people wrote for the card of version n: their newest on it, else that on the version before.

    An empty text is an answer too: somebody took the words back.
    """
    prefix = layout.notes(check_name(name), 1).rpartition("/00000001/")[0] + "/"
    found: dict[int, list[str]] = {}
    for stat in remote.list(prefix):
        parts = stat.key.removeprefix(prefix).split("/")
        if len(parts) == 2 and parts[0].isdecimal() and int(parts[0]) <= n:
            found.setdefault(int(parts[0]), []).append(stat.key)
    for number in sorted(found, reverse=True):
        for key in reversed(found[number]):
            note = parse(remote.read(key), key)
            if note.kind == "card":
                return note.text
    return None


def license_of(found: list[Note]) -> Note | None:
    """Return the newest licence note of some notes."""
    return next((note for note in reversed(found) if note.kind == "license"), None)


def parse(stored: bytes, key: str) -> Note:
    """Return the note in these bytes. Raises IntegrityError."""
    try:
        note = msgspec.convert(parse_json(stored, key), Note)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"{key} is damaged", why=str(error)) from error
    if key != layout.notes(note.name, note.n, note.seq):
        raise IntegrityError(f"{key} is damaged", why="it is a note on something else")
    return note


def _number(key: str) -> int:
    digits = key.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdecimal() else 0
