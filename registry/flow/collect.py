"""Tying up what dead publishers left: open claims, decisions that nobody told, files under numbers that were given up.

After seven days by the store's clock an open claim is voided, unless every file that it names lies there: whoever has
the bytes may finish it, and the remote has them. One that cannot be read may be such a one. A wrong guess is safe: of
void and manifest one is created, and a publisher that still runs claims a new number.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Literal

from weighbridge.registry import errors, layout, types
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import decide, feed, once, snapshot
from weighbridge.registry.flow.claims import decode
from weighbridge.registry.flow.decision import Void, decided
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.hashing import sha256_bytes
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

End = Literal["voided", "whole", "damaged"]
"""What becomes of an open claim that is old enough: its number is given up, or stays open, as every file of it is there
or as the claim cannot be read."""

Tell = Callable[[str, int, End], object]
"""Is told what became of a number, as soon as it did."""

Failed = Callable[[errors.WeighbridgeError], object]
"""Is told what kept a sweep from something."""


class Swept(types.Value, frozen=True):
    """How many copies, snapshots and files that nobody goes on with were removed, and the numbers given up.

    Numbers as old that stay as they are: of `whole` every file is there and only the decision is missing, of `damaged`
    the claim cannot be read.
    """

    staged: int = 0
    snapshots: int = 0
    voided: tuple[Number, ...] = ()
    whole: tuple[Number, ...] = ()
    damaged: tuple[Number, ...] = ()
    cleared: int = 0


def sweep(
    remote: Remote,
    registry: types.Registry,
    catalog: Catalog,
    *,
    by: str,
    older_than: float = LEFTOVER_AFTER,
    failed: Failed = lambda _: None,
) -> Swept:
    """Remove from a home what dead publishers left, and end what they began, up to what its catalogue knows.

    What was staged, and superseded snapshots, go after `older_than` seconds; claims by `collect`'s rule. `failed` is
    told what these credentials may not do, which keeps nobody from the rest, and what else the remote raises, which
    ends the sweep: what was done until then is returned all the same.
    """
    check_writer(registry)
    ends = _Ends()

    def collected() -> int:
        loose, gaps = catalog.loose_ends(), catalog.gaps()
        return len(collect(remote, registry, by=by, loose_ends=loose, gaps=gaps, tell=ends.add, denied=failed))

    steps = _staged(remote, older_than, failed)
    if not remote.properties.commits:
        steps["voided"] = collected
        steps["cleared"] = lambda: clear(remote, catalog.given_up(remote.now() - CLEARED_FOR), denied=failed)
    return ends.swept(_done(steps, failed))


def sweep_staged(remote: Remote, older_than: float = LEFTOVER_AFTER, *, failed: Failed = lambda _: None) -> Swept:
    """Remove what was staged on a remote, and superseded snapshots, of at least this age: all a mirror needs."""
    return _Ends().swept(_done(_staged(remote, older_than, failed), failed))


def _staged(remote: Remote, older_than: float, failed: Failed) -> dict[str, Callable[[], int]]:
    return {
        "staged": lambda: remote.sweep(older_than, denied=failed),
        "snapshots": lambda: snapshot.sweep(remote, older_than),
    }


def _done(steps: Mapping[str, Callable[[], int]], failed: Failed) -> Counter[str]:
    """Do one step after the other and return how much each did; one that was denied keeps nobody from the next."""
    done: Counter[str] = Counter()
    for name, step in steps.items():
        try:
            done[name] = step()
        except errors.DeniedError as error:
            failed(error)
        except errors.WeighbridgeError as error:
            failed(error)
            break
    return done


class _Ends:
    """What became of each number so far."""

    def __init__(self) -> None:
        self._ends: list[tuple[Number, End]] = []

    def add(self, name: str, n: int, end: End) -> None:
        self._ends.append(((name, n), end))

    def swept(self, done: Mapping[str, int]) -> Swept:
        return Swept(
            staged=done.get("staged", 0), snapshots=done.get("snapshots", 0), cleared=done.get("cleared", 0),
            voided=self._of("voided"), whole=self._of("whole"), damaged=self._of("damaged"),
        )  # fmt: skip

    def _of(self, wanted: End) -> tuple[Number, ...]:
        return tuple(number for number, end in self._ends if end == wanted)


def foreseen(
    remote: Remote,
    registry: types.Registry,
    catalog: Catalog,
    *,
    failed: Failed = lambda _: None,
    dead_after: float = DEAD_AFTER,
) -> Swept:
    """Return what `sweep` would do now with the numbers that its catalogue knows as open; nothing is written."""
    ends = _Ends()

    def look() -> int:
        known = chain(catalog.loose_ends(), _passed_over(remote, catalog.gaps()))
        for name, n, _ in _claimed(remote, known, remote.now() - dead_after):
            end = _end(remote, registry, name, n) if once.look(remote, layout.manifest(name, n)) is None else None
            if end is not None:
                ends.add(name, n, end)
        return 0

    return ends.swept(_done({} if remote.properties.commits else {"open": look}, failed))


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
    tell: Tell = lambda _name, _n, _end: None,
    denied: Callable[[errors.DeniedError], object] = lambda _: None,
) -> list[Number]:
    """Void every open claim of this registry that is old enough and return (name, number) of each.

    Claims of other registries lie on a mirror, which decides nothing: they end as they end at their home. One of which
    every file is there stays open: its publisher died at the last moment, or its decision was lost, and to give it up
    would delete a version that `mend` can finish. One that cannot be read stays open, too: nobody can tell whose it is
    and whether its files are all there, nothing is published under the name meanwhile, and a copy brings it back.
    `tell` is told of each as soon as it is so, `denied` of files under a void that may not be removed.

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
                    _tell(remote, registry, (name, n), stored, spelled(claimed_at), denied)
                continue
            end = _end(remote, registry, name, n)
            if end == "voided":
                decide.void(remote, registry, name, n, reason="nobody finished it in time", by=by)
                voided.append((name, n))
        except (errors.ConflictError, errors.MissingError):  # finished at the last moment, or never claimed
            continue
        if end is not None:
            tell(name, n, end)
        if end == "voided":
            clear(remote, [(name, n)], denied=denied)
    return voided


def clear(
    remote: Remote, given_up: Iterable[Number], *, denied: Callable[[errors.DeniedError], object] = lambda _: None
) -> int:
    """Remove what lies under numbers that were given up, and return how many files that were.

    A publisher that came back too late and may not delete left it there, or whoever gave the number up was killed.
    `denied` is told what may not be removed. A damaged decision gives nothing up: it is for `verify` to name.
    """
    removed = 0
    for name, n in given_up:
        with suppress(errors.ConflictError, errors.MissingError, errors.IntegrityError, errors.UsageError):
            removed += decide.clear_void(remote, name, n, denied=denied)
    return removed


def _tell(  # noqa: PLR0917 - where, of what, as it lies there and since when
    remote: Remote,
    registry: types.Registry,
    number: Number,
    stored: bytes,
    claimed_at: str,
    denied: Callable[[errors.DeniedError], object],
) -> None:
    """Announce a decision that the feed lacks; a damaged one is for `rebuild` and `verify` to name."""
    name, n = number
    key = layout.manifest(name, n)
    try:
        found = decided(stored, key)
    except (errors.IntegrityError, errors.UsageError):  # what looks like a later format is a flipped bit
        return
    if isinstance(found, Void):
        decide.clear_void(remote, name, n, denied=denied)
        entry = feed.void_entry(name, n, stored, stored_at=claimed_at)
    else:
        card = once.look(remote, layout.version(name, n, "README.md"))
        card_sha256 = None if card is None else sha256_bytes(card)
        entry = feed.version_entry(name, n, found, card_sha256=card_sha256, stored_at=claimed_at)
    feed.announce(remote, registry, [entry])


def _end(remote: Remote, registry: types.Registry, name: str, n: int) -> End | None:
    """Return what becomes of an open claim that is old enough; None of one of another registry. Raises MissingError."""
    key = layout.claim(name, n)
    stored = remote.read(key)
    try:
        claim = decode(stored, key)
    except (errors.IntegrityError, errors.UsageError):  # what looks like a later format is a flipped bit
        return "damaged"
    if claim.registry != registry.registry:
        return None
    return "whole" if decide.is_whole(remote, claim) else "voided"


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
