"""The team's feed: facts in dense, create-only objects. It tells and decides nothing (docs/formats.md).

    catalog/feed/000000000007.json   {schema, seq, epoch, nonce, entries, sha256}

`sha256` is that of the object's canonical bytes without this field, so that a flipped bit in a row is noticed. A repair
(`rebuild.py`) raises the epoch with its first object; its last one carries `"rebuild": first`, and the objects from
`first` to there hold the full state: whoever reads on forgets everything older.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from weighbridge.registry import layout, types
from weighbridge.registry.errors import FeedDamagedError, IntegrityError, RetryableError, UsageError, WeighbridgeError
from weighbridge.registry.flow import entries as facts
from weighbridge.registry.flow import once, snapshot
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, canonical, parse, parse_json
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.rows import row_of

ENTRIES_MAX: Final = 256
"""Entries of one object."""

ATTEMPTS: Final = 200
"""Numbers tried by one announcement before it gives way to the crowd."""

_FIELDS: Final = frozenset({"schema", "seq", "epoch", "nonce", "entries"})


class Head(NamedTuple):
    """Where the feed stands: the number of its newest object, and its epoch."""

    seq: int
    epoch: int


class Part(types.Value, frozen=True):
    """One object of the feed; `rebuild` is set on the last object of a repair and names its first."""

    seq: int
    epoch: int
    nonce: str
    entries: list[types.FeedEntry]
    rebuild: int | None = None


class Changes(NamedTuple):
    """What a reader who stands at one object has to take in: `parts` in order, `fresh` when older facts are void."""

    parts: list[Part]
    fresh: bool
    head: int


# ---------------------------------------------------------------------------------------------------------- the entries


def claim_entry(claim: types.Claim, sha256: str, *, stored_at: str | None = None) -> types.FeedEntry:
    """Return the entry of a claim; `sha256` is that of the claim as stored, `stored_at` its store time."""
    return types.FeedEntry(
        type="claim",
        name=claim.name,
        n=claim.n,
        content=claim.content,
        source=layout.claim(claim.name, claim.n),
        sha256=sha256,
        row=row_of(parse(claim.manifest.encode(), "the manifest of a claim")),
        stored_at=stored_at,
    )


def version_entry(
    name: str, n: int, manifest: Manifest, *, card_sha256: str | None = None, stored_at: str | None = None
) -> types.FeedEntry:
    """Return the entry of a committed version; `card_sha256` is that of README.md as it lies on the remote.

    `stored_at` is the store time of the version's *claim*, by which runs without a start time are ordered.
    """
    return types.FeedEntry(
        type="version",
        name=name,
        n=n,
        content=manifest.content,
        source=layout.manifest(name, n),
        sha256=manifest.digest,
        card_sha256=card_sha256,
        row=row_of(manifest),
        stored_at=stored_at,
    )


def void_entry(name: str, n: int, stored: bytes, *, stored_at: str | None = None) -> types.FeedEntry:
    """Return the entry of a number that was given up; `stored` is the void as it lies on the remote."""
    return types.FeedEntry(
        type="void",
        name=name,
        n=n,
        source=layout.manifest(name, n),
        sha256=sha256_bytes(stored),
        stored_at=stored_at,
    )


def withdrawn_entry(name: str, n: int, stored: bytes) -> types.FeedEntry:
    """Return the entry of a withdrawal; `stored` is its mark as it lies on the remote."""
    return types.FeedEntry(
        type="withdrawn", name=name, n=n, source=layout.withdrawn(name, n), sha256=sha256_bytes(stored)
    )


def tag_entry(move: types.TagMove, stored: bytes) -> types.FeedEntry:
    """Return the entry of one move of a tag; `stored` is the move as it lies on the remote."""
    return types.FeedEntry(
        type="tag",
        name=move.name,
        tag=move.tag,
        to=move.to,
        from_=move.from_,
        source=layout.tag(move.name, move.tag, move.seq),
        sha256=sha256_bytes(stored),
    )


def note_entry(name: str, n: int, seq: int, stored: bytes, *, row: types.Row | None = None) -> types.FeedEntry:
    """Return the entry of a note; `row` is the version's row as it reads from now on, where the note changes it."""
    return types.FeedEntry(
        type="note", name=name, n=n, source=layout.notes(name, n, seq), sha256=sha256_bytes(stored), row=row
    )


# ---------------------------------------------------------------------------------------------------------- the objects


def encode(part: Part) -> bytes:
    """Return an object of the feed as it is stored."""
    document = msgspec.to_builtins(part) | {"schema": types.SCHEMA_FEED}
    document["entries"] = [facts.document(entry) for entry in part.entries]
    if part.rebuild is None:
        del document["rebuild"]
    return canonical(document | {"sha256": sha256_bytes(canonical(document))})


def decode(stored: bytes, seq: int) -> Part:
    """Return the object of the feed in these bytes. Raises FeedDamagedError, naming the object."""
    try:
        document = parse_json(stored, layout.feed(seq))
        if not isinstance(document, dict) or document.get("schema") != types.SCHEMA_FEED:
            raise damaged(seq, "it has no feed schema")
        part = msgspec.convert(document, Part)
        for entry in part.entries:
            facts.check(entry)
    except (IntegrityError, msgspec.ValidationError, UsageError) as error:
        raise damaged(seq, getattr(error, "why", None) or str(error)) from error
    seal = document.pop("sha256", None)
    # Without a seal only the plain five fields pass: a flipped bit in the word `sha256` leaves a sixth.
    if part.seq != seq or (document.keys() != _FIELDS if seal is None else sha256_bytes(canonical(document)) != seal):
        raise damaged(seq, "its sha256 or its number does not fit")
    return part


def damaged(seq: int, why: str) -> FeedDamagedError:
    """Return the error that names a damaged or missing object of the feed."""
    return FeedDamagedError(
        f"the team's catalogue is damaged at {layout.feed(seq)}", why=why, fix="registry rebuild", seq=seq
    )


# -------------------------------------------------------------------------------------------------------------- writing


def announce(
    remote: Remote,
    registry: types.Registry,
    entries: Sequence[types.FeedEntry],
    *,
    known: Head | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Tell the team: put entries into the next free objects of the feed, in order; return the last number.

    `known` is a place where the feed is known to stand or to have stood; it saves two requests. Telling twice is
    harmless. Every 512th object is followed by a snapshot. Raises RetryableError when others were faster every time.
    """
    if remote.properties.commits:
        return 0  # the repositories tell of themselves
    at = known or head(remote, registry)
    for start in range(0, len(entries), ENTRIES_MAX):
        at = append(remote, registry, entries[start : start + ENTRIES_MAX], at, pause=pause)
        if at.seq % snapshot.EVERY == 0:
            take_snapshot(remote, at.seq)
    return at.seq


def append(
    remote: Remote,
    registry: types.Registry,
    entries: Sequence[types.FeedEntry],
    at: Head,
    *,
    epochs: int = 0,
    rebuild: int | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Head:
    """Write one object after `at` and return where the feed stands then; `epochs` is added to the epoch."""
    check_writer(registry)
    nonce = secrets.token_hex(16)
    for attempt in range(ATTEMPTS):
        part = Part(seq=at.seq + 1, epoch=at.epoch + epochs, nonce=nonce, entries=list(entries), rebuild=rebuild)
        if once.create(remote, layout.feed(part.seq), encode(part), pause=pause) is None:
            return Head(part.seq, part.epoch)
        pause(random.uniform(0.2, 1) * min(0.5, 0.005 * 2 ** min(attempt, 10)))  # noqa: S311 - jitter
        at = head(remote, registry, at)
    raise RetryableError(
        "the catalogue could not be told", why=f"{ATTEMPTS} numbers in a row went to others", fix="try again"
    )


def head(remote: Remote, registry: types.Registry, known: Head | None = None) -> Head:
    """Return where the feed stands; `known` is a place where it stood."""
    if remote.properties.commits:
        return Head(0, registry.epoch)
    start = known.seq if known else snapshot.newest(remote)
    numbers = [seq for seq, _ in list_after(remote, start)] or ([] if known else [start] if start else [])
    last = start
    for seq in reversed(numbers):
        # A damaged head must not stop the team from publishing: the epoch is then read from the object before it.
        # One that is listed and not there was made up by a listing that was damaged on its way: it would leave a hole.
        try:
            stored = once.look(remote, layout.feed(seq))
            if stored is None:
                continue
            last = max(last, seq)
            return Head(last, decode(stored, seq).epoch)
        except IntegrityError:
            last = max(last, seq)
    return Head(last, known.epoch if known else registry.epoch)


def take_snapshot(remote: Remote, seq: int) -> bool:
    """Write the state after feed object `seq` as a snapshot, unless it is there; return whether one is there now.

    It is a convenience for readers: when the feed is damaged or the remote fails, there is none, and the next multiple
    of 512 brings another.
    """
    try:
        before = snapshot.load(remote, upto=seq)
        if before is not None and before.seq == seq:
            return True
        state = facts.State()
        state.apply(before.entries if before else [])
        found = changes(remote, before.seq if before else 0, upto=seq)
        if found.fresh:
            state = facts.State()
        for part in found.parts:
            state.apply(part.entries)
        epoch = found.parts[-1].epoch if found.parts else before.epoch if before else 1
        once.create(remote, layout.snapshot(seq), snapshot.encode(seq, epoch, state.entries()))
    except WeighbridgeError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- reading


def changes(
    remote: Remote, after: int, *, listed: Iterable[tuple[int, Stat]] | None = None, upto: int | None = None
) -> Changes:
    """Return what stands in the feed after object `after`.

    Raises FeedDamagedError for a hole or a damaged object, unless a later repair has made it harmless.
    """
    there = list_after(remote, after) if listed is None else listed
    numbers = [seq for seq, _ in there if upto is None or seq <= upto]
    if not numbers:
        return Changes([], fresh=False, head=after)
    found = _read(remote, numbers)
    top = numbers[-1]
    for part in reversed(list(found.values())):
        if not isinstance(part, Part) or part.rebuild is None or part.rebuild > part.seq:
            continue
        if part.rebuild <= after:
            older = [seq for seq, _ in list_after(remote, part.rebuild - 1) if seq <= after]
            found = _read(remote, older) | found
        whole = _run(found, part.rebuild, top)
        if isinstance(whole, list):
            return Changes(whole, fresh=True, head=top)
    whole = _run(found, after + 1, top)
    if isinstance(whole, FeedDamagedError):
        raise whole
    return Changes(whole, fresh=False, head=top)


def _run(found: Mapping[int, Part | FeedDamagedError], first: int, last: int) -> list[Part] | FeedDamagedError:
    """Return the objects from `first` to `last`, or what is wrong with the first of them that is damaged or missing."""
    whole: list[Part] = []
    for seq in range(first, last + 1):
        part = found.get(seq)
        if part is None:
            return damaged(seq, "the object is missing")
        if isinstance(part, FeedDamagedError):
            return part
        whole.append(part)
    return whole


def list_after(remote: Remote, seq: int, limit: int | None = None) -> list[tuple[int, Stat]]:
    """Return number and stat of the feed's objects after `seq`, in order; foreign keys are passed over."""
    after = layout.feed(seq) if seq > 0 else None
    numbered = ((layout.feed_number(s.key), s) for s in remote.list(layout.FEED, after=after, limit=limit))
    return [(number, stat) for number, stat in numbered if number is not None]


def _read(remote: Remote, numbers: Sequence[int]) -> dict[int, Part | FeedDamagedError]:
    """Return the objects with these numbers, several fetched at once; a damaged one stands as its error."""

    def one(seq: int) -> tuple[int, Part | FeedDamagedError]:
        stored = once.look(remote, layout.feed(seq))
        try:
            return seq, decode(stored, seq) if stored is not None else damaged(seq, "the object is missing")
        except FeedDamagedError as error:
            return seq, error

    workers = min(remote.properties.parallel, len(numbers))
    if workers < 2:
        return dict(map(one, numbers))
    with ThreadPoolExecutor(workers, thread_name_prefix="feed") as pool:
        return dict(pool.map(one, numbers))
