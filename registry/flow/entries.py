"""The entries of the feed: what makes one valid, and how many of them fold into the state they describe."""

from collections.abc import Iterable
from typing import Any

import msgspec

from weighbridge.registry import layout
from weighbridge.registry.errors import UsageError
from weighbridge.registry.refs import check_name
from weighbridge.registry.types import FeedEntry


def check(entry: FeedEntry) -> None:
    """Raise UsageError unless the entry is complete, its numbers can be, and its source is the object its type says."""
    name, n = check_name(entry.name), entry.n
    numbers = (number for number in (n, entry.to, entry.from_) if number is not None)
    if not all(1 <= number <= layout.LAST for number in numbers):
        sound = False
    elif entry.type == "tag":
        sound = entry.tag is not None and entry.source == layout.tag(name, entry.tag, last_number(entry))
    elif n is None:
        sound = False
    elif entry.type == "claim":
        sound = entry.source == layout.claim(name, n) and bool(entry.content)
    elif entry.type == "version":
        sound = entry.source == layout.manifest(name, n) and bool(entry.content) and entry.row is not None
    elif entry.type == "void":
        sound = entry.source == layout.manifest(name, n)
    elif entry.type == "withdrawn":
        sound = entry.source == layout.withdrawn(name, n)
    else:
        sound = entry.source == layout.notes(name, n, last_number(entry))
    if not sound or len(entry.sha256) != 64:
        raise UsageError(f"an entry of {name} is not valid", why=f"{entry.type} of {entry.source}")


def document(entry: FeedEntry) -> dict[str, Any]:
    """Return an entry as it is stored: without what does not concern its type, but with both ends of a tag's move."""
    told: dict[str, Any] = msgspec.to_builtins(entry)
    return told | {"to": entry.to, "from": entry.from_} if entry.type == "tag" else told


def last_number(entry: FeedEntry) -> int:
    """Return the number in the last segment of an entry's source: which move of a tag, which note; 0 for none."""
    digits = entry.source.rpartition("/")[2].removesuffix(".json")
    return int(digits) if digits.isdecimal() and len(digits) == len(str(layout.LAST)) else 0


class State:
    """The facts told so far, each once: a decision takes the place of its claim, a newer move that of an older one."""

    def __init__(self) -> None:
        self._facts: dict[str, FeedEntry] = {}

    def apply(self, entries: Iterable[FeedEntry]) -> None:
        """Take in entries; a repeated one changes nothing."""
        for entry in entries:
            kept = entry
            if entry.type == "claim":
                assert entry.n is not None
                decided = self._facts.get(layout.manifest(entry.name, entry.n))
                if decided is not None:
                    self._facts[decided.source] = _with_claim(decided, entry)
                    continue
            elif entry.type in {"version", "void"}:
                assert entry.n is not None
                claim = self._facts.pop(layout.claim(entry.name, entry.n), self._facts.get(entry.source))
                kept = _with_claim(entry, claim) if claim else entry
            self._facts[entry.source] = kept

    def entries(self) -> list[FeedEntry]:
        """Return the facts in an order that depends on them alone: by name, number, source."""
        return sorted(self._facts.values(), key=lambda e: (e.name, e.n or 0, e.source))


def _with_claim(decision: FeedEntry, claim: FeedEntry) -> FeedEntry:
    """Keep what only the claim told: its store time, and the content of a number that was given up."""
    return msgspec.structs.replace(
        decision,
        stored_at=decision.stored_at or claim.stored_at,
        content=decision.content or claim.content,
        card_sha256=decision.card_sha256 or claim.card_sha256,
        row=decision.row or claim.row,
    )
