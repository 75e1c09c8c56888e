"""Tying up what dead publishers left: open claims, decisions that nobody told, files under numbers that were given up.

After seven days by the store's clock an open claim is voided. A wrong guess is safe: of void and manifest one is
created, and a publisher that still runs claims a new number.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import decide, feed, once
from weighbridge.registry.flow.decision import Void, decided
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import parse_json
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled

DEAD_AFTER: Final = 7 * 86_400.0
"""Seconds by the store's clock after which the owner of an open claim is taken for dead."""


def collect(
    remote: Remote,
    registry: types.Registry,
    *,
    by: str,
    loose_ends: Iterable[tuple[str, int]] | None = None,
    gaps: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    dead_after: float = DEAD_AFTER,
) -> list[tuple[str, int]]:
    """Void every open claim of this registry that is old enough and return (name, number) of each.

    Claims of other registries lie on a mirror, which decides nothing: they end as they end at their home.

    `loose_ends` are the numbers of which a catalogue does not know from the feed how they ended: those that were
    decided all the same are told to the team, as whoever decided them died before that. `gaps` are by name the runs of
    numbers of which it knows nothing: those that are claimed are loose ends too. Without `loose_ends` every claim of
    the remote is looked at, and nothing is told but what is voided.
    """
    check_writer(registry)
    deadline = remote.now() - dead_after
    voided = []
    known = None if loose_ends is None else chain(loose_ends, _passed_over(remote, gaps or {}))
    for name, n in _all_claims(remote, deadline) if known is None else known:
        try:
            claimed_at = remote.stat(layout.claim(name, n)).modified
            if claimed_at > deadline:
                continue
            stored = once.look(remote, layout.manifest(name, n))
            if stored is not None:
                if loose_ends is not None:
                    _tell(remote, registry, (name, n), stored, spelled(claimed_at))
                continue
            if not _is_given_here(remote, registry, name, n):
                continue
            decide.void(remote, registry, name, n, reason="nobody finished it in time", by=by)
        except (errors.ConflictError, errors.MissingError):  # finished at the last moment, or never claimed
            continue
        voided.append((name, n))
    return voided


def clear(remote: Remote, given_up: Iterable[tuple[str, int]]) -> int:
    """Remove what lies under numbers that were given up, and return how many files that were.

    A publisher that came back too late and may not delete left it there, or whoever gave the number up was killed.
    """
    removed = 0
    for name, n in given_up:
        with suppress(errors.ConflictError, errors.MissingError):
            removed += decide.clear_void(remote, name, n)
    return removed


def _tell(remote: Remote, registry: types.Registry, number: tuple[str, int], stored: bytes, claimed_at: str) -> None:
    """Announce a decision that the feed lacks; a damaged one is for `rebuild` and `verify` to name."""
    name, n = number
    key = layout.manifest(name, n)
    try:
        found = decided(stored, key)
    except errors.IntegrityError:
        return
    if isinstance(found, Void):
        decide.clear_void(remote, name, n)
        entry = feed.void_entry(name, n, stored, stored_at=claimed_at)
    else:
        card = once.look(remote, layout.version(name, n, "README.md"))
        card_sha256 = None if card is None else sha256_bytes(card)
        entry = feed.version_entry(name, n, found, card_sha256=card_sha256, stored_at=claimed_at)
    feed.announce(remote, registry, [entry])


def _is_given_here(remote: Remote, registry: types.Registry, name: str, n: int) -> bool:
    key = layout.claim(name, n)
    try:
        claim = parse_json(remote.read(key), key)
    except errors.IntegrityError:
        return True  # nobody can finish it
    return not isinstance(claim, dict) or claim.get("registry") == registry.registry


def _passed_over(remote: Remote, gaps: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[tuple[str, int]]:
    """Yield the numbers in these runs that are claimed; how long a run is costs nothing, what is claimed is listed."""
    for name, runs in gaps.items():
        for found in list(remote.list(layout.claims(name), after=layout.claim(name, runs[0][0] - 1))):
            place = layout.claim_number(found.key)
            run = bisect_right(runs, place[1], key=lambda one: one[0]) - 1 if place is not None else -1
            if place is not None and run >= 0 and place[1] <= runs[run][1]:
                yield place


def _all_claims(remote: Remote, deadline: float) -> Iterator[tuple[str, int]]:
    for name in list(remote.folders(layout.MODELS)):
        for found in list(remote.list(layout.claims(name))):
            place = layout.claim_number(found.key)
            if place is not None and found.modified <= deadline:
                yield place
