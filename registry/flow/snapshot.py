"""Snapshots of the feed: the whole state after one of its objects, so that a new reader need not read them all.

    catalog/snap/<10^12 - 1 - seq>.jsonl.gz     a header line {schema, seq, epoch, rows, sha256}, then one entry a line

`sha256` is that of the lines after the header. A snapshot is a shortcut, never a source: a damaged one is passed over.
"""

import gzip
import zlib
from collections.abc import Iterable
from typing import Final

import msgspec

from weighbridge.registry import layout
from weighbridge.registry.errors import FeedDamagedError, UsageError
from weighbridge.registry.flow import entries as facts
from weighbridge.registry.flow import once
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import canonical
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import FeedEntry, Value

SCHEMA: Final = "weighbridge/snapshot/1"
EVERY: Final = 512
"""Objects of the feed from one snapshot to the next."""

SPARE: Final = 2
"""Snapshots that are kept beside the young ones, as the newest may turn out to be damaged."""

SIZE_LIMIT: Final = 2 << 30
"""Bytes a snapshot may unpack to."""


class Header(Value, frozen=True):
    """The first line."""

    schema: str
    seq: int
    epoch: int
    rows: int
    sha256: str


class Snapshot(Value, frozen=True):
    """A sound snapshot: the state after feed object `seq`."""

    seq: int
    epoch: int
    entries: list[FeedEntry]


def encode(seq: int, epoch: int, entries: Iterable[FeedEntry]) -> bytes:
    """Return a snapshot as it is stored; the same state gives the same bytes."""
    lines = [canonical(facts.document(entry)) + b"\n" for entry in entries]
    body = b"".join(lines)
    header = Header(schema=SCHEMA, seq=seq, epoch=epoch, rows=len(lines), sha256=sha256_bytes(body))
    return gzip.compress(canonical(header) + b"\n" + body, mtime=0)


def decode(stored: bytes, seq: int) -> Snapshot:
    """Return the snapshot in these bytes. Raises FeedDamagedError."""
    key = layout.snapshot(seq)
    try:
        unpacker = zlib.decompressobj(wbits=31)
        raw = unpacker.decompress(stored, SIZE_LIMIT)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("it is cut, too large, or has a tail")  # noqa: TRY301 - one place names the object
        cut = raw.find(b"\n") + 1
        body = memoryview(raw)[cut:]  # no second copy: of a large team these are tens of megabytes
        header = msgspec.json.decode(raw[:cut], type=Header)
        if header.schema != SCHEMA or header.seq != seq or header.sha256 != sha256_bytes(body):
            raise ValueError("its sha256 or its number does not fit")  # noqa: TRY301
        found = msgspec.json.Decoder(FeedEntry).decode_lines(body)
        if len(found) != header.rows:
            raise ValueError(f"it has {len(found)} rows, not {header.rows}")  # noqa: TRY301
        for entry in found:
            facts.check(entry)
    except (ValueError, zlib.error, UsageError) as error:
        raise FeedDamagedError(
            f"the snapshot {key} is damaged", why=str(error), fix="registry rebuild", seq=seq
        ) from error
    return Snapshot(seq=seq, epoch=header.epoch, entries=found)


def newest(remote: Remote) -> int:
    """Return the number of the feed object that the newest snapshot stands for, 0 where there is none."""
    return next((seq for seq in _listed(remote, 8)), 0)


def load(remote: Remote, *, above: int = 0, upto: int | None = None) -> Snapshot | None:
    """Return the newest sound snapshot that stands for an object after `above` and not after `upto`, or None."""
    for seq in _listed(remote, None):
        if seq <= above:
            return None
        if upto is not None and seq > upto:
            continue
        stored = once.look(remote, layout.snapshot(seq))
        try:
            if stored is not None:
                return decode(stored, seq)
        except FeedDamagedError:
            continue
    return None


def sweep(remote: Remote, older_than: float) -> int:
    """Remove snapshots for which newer ones have been there for so many seconds, and return how many.

    A reader who listed them before has had that time to read a newer one, and whoever finds none reads the feed, of
    which nothing is ever removed.
    """
    if remote.properties.commits:
        return 0
    stats = [stat for stat in remote.list(layout.SNAPSHOTS) if layout.snapshot_number(stat.key) is not None]
    if len(stats) <= SPARE:
        return 0
    deadline = remote.now() - older_than
    old = [stat for stat in stats if stat.modified <= deadline]  # newest first, as their keys count downwards
    for stat in old[SPARE:]:
        remote.delete(stat.key)
    return len(old[SPARE:])


def _listed(remote: Remote, limit: int | None) -> Iterable[int]:
    for stat in remote.list(layout.SNAPSHOTS, limit=limit):
        seq = layout.snapshot_number(stat.key)
        if seq is not None:
            yield seq
