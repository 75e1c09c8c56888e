"""Tying up what dead publishers left: open claims, decisions that nobody told, files under numbers that were given up.

After seven days by the store's clock an open claim is voided, unless every file that it names lies there: whoever has
the bytes may finish it, and the remote has them. A wrong guess is safe: of void and manifest one is created, and a
publisher that still runs claims a new number.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Final

import msgspec

from weighbridge.registry import errors, layout, types
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import decide, feed, once, snapshot
from weighbridge.registry.flow.claims import decode
from weighbridge.registry.flow.decision import Void, decided
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import parse, parse_json
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled

DEAD_AFTER: Final = 7 * 86_400.0
"""Seconds by the store's clock after which the owner of an open claim is taken for dead."""

LEFTOVER_AFTER: Final = 2 * 86_400.0
"""Seconds after which what a dead publisher staged on a remote is swept."""

CLEARED_FOR: Final = 60 * 86_400.0
"""Seconds after its claim for which a number that was given up is looked at for files of a publisher that came late."""


Number = tuple[str, int]
"""A name, and a number of it."""

Tell = Callable[[str, int], object]
"""Is told of a number that stays open, because every file of it is there."""


class Swept(types.Value, frozen=True):
    """How many copies, snapshots and files that nobody goes on with were removed, and the numbers given up.

    `whole` are numbers as old of which every file is there and only the decision is missing: they stay as they are.
    """

    staged: int = 0
    snapshots: int = 0
    voided: tuple[Number, ...] = ()
    whole: tuple[Number, ...] = ()
    cleared: int = 0


def sweep(
    remote: Remote,
    registry: types.Registry,
    catalog: Catalog,
    *,
    by: str,
    older_than: float = LEFTOVER_AFTER,
    denied: Callable[[errors.DeniedError], object] = lambda _: None,
) -> Swept:
    """Remove from a home what dead publishers left, and end what they began, up to what its catalogue knows.

    What was staged, and superseded snapshots, go after `older_than` seconds; claims by `collect`'s rule. `denied` is
    told what these credentials may not do, which keeps nobody from the rest. Raises what else the remote raises.
    """
    check_writer(registry)
    swept = sweep_staged(remote, older_than, denied=denied)
    if remote.properties.commits:
        return swept
    whole: list[Number] = []
    with _may(denied):
        loose, gaps = catalog.loose_ends(), catalog.gaps()
        tell: Tell = lambda name, n: whole.append((name, n))  # noqa: E731
        voided = collect(remote, registry, by=by, loose_ends=loose, gaps=gaps, tell=tell)
        swept = msgspec.structs.replace(swept, voided=tuple(voided), whole=tuple(whole))
    cleared = 0
    with _may(denied):
        cleared = clear(remote, catalog.given_up(remote.now() - CLEARED_FOR))
    return msgspec.structs.replace(swept, cleared=cleared)


def sweep_staged(
    remote: Remote, older_than: float = LEFTOVER_AFTER, *, denied: Callable[[errors.DeniedError], object]
) -> Swept:
    """Remove what was staged on a remote, and superseded snapshots, of at least this age: all a mirror needs."""
    staged = snapshots = 0
    with _may(denied):
        staged = remote.sweep(older_than)
    with _may(denied):
        snapshots = snapshot.sweep(remote, older_than)
    return Swept(staged=staged, snapshots=snapshots)


@contextmanager
def _may(denied: Callable[[errors.DeniedError], object]) -> Iterator[None]:
    try:
        yield
    except errors.DeniedError as error:
        denied(error)


def abandoned(
    remote: Remote,
    registry: types.Registry,
    loose_ends: Iterable[Number],
    gaps: Mapping[str, Sequence[tuple[int, int]]],
    *,
    dead_after: float = DEAD_AFTER,
) -> Swept:
    """Return what `collect` would do now: the numbers that it would give up, and those that it would leave as whole."""
    voided: list[Number] = []
    whole: list[Number] = []
    for name, n, _ in _claimed(remote, chain(loose_ends, _passed_over(remote, gaps)), remote.now() - dead_after):
        decision = once.look(remote, layout.manifest(name, n))
        if decision is None and _is_given_here(remote, registry, name, n):
            (whole if _is_whole(remote, name, n) else voided).append((name, n))
    return Swept(voided=tuple(voided), whole=tuple(whole))


def _claimed(remote: Remote, numbers: Iterable[Number], deadline: float) -> Iterator[tuple[str, int, float]]:
    """Yield those of some numbers that were claimed before then, with when."""
    for name, n in numbers:
        with suppress(errors.MissingError):
            at = remote.stat(layout.claim(name, n)).modified
            if at <= deadline:
                yield name, n, at


def collect(
    remote: Remote,
    registry: types.Registry,
    *,
    by: str,
    loose_ends: Iterable[Number] | None = None,
    gaps: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    dead_after: float = DEAD_AFTER,
    tell: Tell = lambda _name, _n: None,
) -> list[Number]:
    """Void every open claim of this registry that is old enough and return (name, number) of each.

    Claims of other registries lie on a mirror, which decides nothing: they end as they end at their home. One of which
    every file is there stays open, and `tell` is told: its publisher died at the last moment, or its decision was lost,
    and to give it up would delete a version that `mend` can finish.

    `loose_ends` are the numbers of which a catalogue does not know from the feed how they ended: those that were
    decided all the same are told to the team, as whoever decided them died before that. `gaps` are by name the runs of
    numbers of which it knows nothing: those that are claimed are loose ends too. Without `loose_ends` every claim of
    the remote is looked at, and nothing is told but what is voided.
    """
    check_writer(registry)
    deadline = remote.now() - dead_after
    voided = []
    known = None if loose_ends is None else chain(loose_ends, _passed_over(remote, gaps or {}))
    numbers = _all_claims(remote, deadline) if known is None else known
    for name, n, claimed_at in _claimed(remote, numbers, deadline):
        try:
            stored = once.look(remote, layout.manifest(name, n))
            if stored is not None:
                if loose_ends is not None:
                    _tell(remote, registry, (name, n), stored, spelled(claimed_at))
                continue
            if not _is_given_here(remote, registry, name, n):
                continue
            if _is_whole(remote, name, n):
                tell(name, n)
                continue
            decide.void(remote, registry, name, n, reason="nobody finished it in time", by=by)
        except (errors.ConflictError, errors.MissingError):  # finished at the last moment, or never claimed
            continue
        voided.append((name, n))
    return voided


def clear(remote: Remote, given_up: Iterable[Number]) -> int:
    """Remove what lies under numbers that were given up, and return how many files that were.

    A publisher that came back too late and may not delete left it there, or whoever gave the number up was killed.
    """
    removed = 0
    for name, n in given_up:
        with suppress(errors.ConflictError, errors.MissingError):
            removed += decide.clear_void(remote, name, n)
    return removed


def _tell(remote: Remote, registry: types.Registry, number: Number, stored: bytes, claimed_at: str) -> None:
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


def _is_whole(remote: Remote, name: str, n: int) -> bool:
    """Tell whether every file that an open claim names lies there, by name and size."""
    key = layout.claim(name, n)
    try:
        claim = decode(remote.read(key), key)
        decide.check_set(remote, name, n, parse(claim.manifest.encode(), key))
    except errors.ForeignBytesError:
        return True  # and something else beside them
    except errors.IntegrityError:
        return False
    return True


def _passed_over(remote: Remote, gaps: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[Number]:
    """Yield the numbers in these runs that are claimed; how long a run is costs nothing, what is claimed is listed."""
    for name, runs in gaps.items():
        for found in list(remote.list(layout.claims(name), after=layout.claim(name, runs[0][0] - 1))):
            place = layout.claim_number(found.key)
            run = bisect_right(runs, place[1], key=lambda one: one[0]) - 1 if place is not None else -1
            if place is not None and run >= 0 and place[1] <= runs[run][1]:
                yield place


def _all_claims(remote: Remote, deadline: float) -> Iterator[Number]:
    for name in list(remote.folders(layout.MODELS)):
        for found in list(remote.list(layout.claims(name))):
            place = layout.claim_number(found.key)
            if place is not None and found.modified <= deadline:
                yield place
