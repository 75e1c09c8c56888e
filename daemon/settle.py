"""When is a folder finished? Pure functions over what was seen of it; nothing here looks at the disk or at a clock.

A folder is finished when its structure is whole **and** nothing changed between two looks for long enough. How long is
measured on the daemon's own monotonic clock, never on file times, which may lie in 1970 or in the future:

- `quiet` seconds, as configured, for every folder;
- MARKED seconds where the layout has an end mark of its own that can be believed: it is the newest file of the folder
  and one process alone wrote there. With several processes a mark is one process's word.

A mark only shortens the wait. A writer that stalled in the middle has no whole structure, however long it is quiet.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

MARKED: Final = 2.0
"""Seconds without change that are enough behind a believable end mark."""

_RANK = re.compile(
    r"(?:^|/)(?:rng_state_\d+\.pth|[^/]*_optim_states\.pt|zero_pp_rank_[^/]*|[^/]*\.distcp|random_states_[1-9]\d*\.pkl)$"
)
"""Files that exist once per process: several of them save into one folder, each at its own pace."""


class FileStat(NamedTuple):
    """One file of a folder as the file system shows it; `path` is relative with `/`."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int


class Listing(NamedTuple):
    """The files of a folder at one look, sorted by path."""

    files: tuple[FileStat, ...]

    @property
    def fingerprint(self) -> str:
        """A digest over every stat: another value means that somebody touched a file."""
        return _digest("%s\0%d\0%d\0%d\0%d" % f for f in self.files)  # noqa: UP031 - half the time of an f-string

    @property
    def shape(self) -> str:
        """What stays when only change times differ: names, sizes and inodes, and the sum of the modification times."""
        names = _digest(f"{f.path}\0{f.size}\0{f.ino}" for f in self.files)
        return f"{names}:{sum(f.mtime_ns for f in self.files)}"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)


class Seen(NamedTuple):
    """What is remembered of a folder between two looks; times are of the daemon's monotonic clock."""

    listing: Listing
    since: float
    """When this very listing was seen first."""
    first: float
    """When the folder began to differ from what was last settled."""
    looks: int


class Settled(NamedTuple):
    """Whole and at rest."""

    seen: Seen
    fingerprint: str


class StillWriting(NamedTuple):
    """Not finished; `until` is the earliest time at which another look can change that."""

    seen: Seen
    reason: str
    until: float


def listing(files: Iterable[FileStat]) -> Listing:
    """Return the listing of some files, in the order that fingerprints need."""
    return Listing(tuple(sorted(files)))


def observe(previous: Seen | None, current: Listing, now: float) -> Seen:
    """Return what is to be remembered after a look: the clock starts anew whenever anything differs."""
    if previous is not None and previous.listing == current:
        return previous._replace(looks=previous.looks + 1)
    return Seen(listing=current, since=now, first=previous.first if previous else now, looks=1)


def judge(
    previous: Seen | None,
    current: Listing,
    now: float,
    *,
    quiet: float,
    structure: str | None,
    mark: str | None,
) -> Settled | StillWriting:
    """Return whether a folder is finished after the look `current` at the monotonic time `now`.

    `previous` is what the last verdict remembered, `structure` the reason why the folder cannot be whole (None when it
    can), `mark` the path of the layout's end mark when it is there.
    """
    seen = observe(previous, current, now)
    needed = needed_quiet(current, quiet=quiet, mark=mark)
    rest = seen.since + needed
    if not current.files:
        return StillWriting(seen, "the folder is empty", rest)
    if seen.looks < 2:
        return StillWriting(seen, "files are being written", rest)
    if structure is not None:
        return StillWriting(seen, structure, rest)
    if now < rest:
        return StillWriting(seen, f"unchanged for {_seconds(now - seen.since)} of {_seconds(needed)}", rest)
    return Settled(seen, current.fingerprint)


def needed_quiet(current: Listing, *, quiet: float, mark: str | None) -> float:
    """Return for how many seconds nothing may have changed before the folder counts as finished."""
    return min(quiet, MARKED) if mark is not None and believable(current, mark) else quiet


def believable(current: Listing, mark: str) -> bool:
    """Tell whether an end mark speaks for the whole folder.

    It does when no file changed after it (an old mark under a new save, or a copy that brought the files in another
    order, proves nothing) and when one process wrote the folder. Change times are compared with each other only, never
    with a clock, and nobody can set them.
    """
    marked = next((f for f in current.files if f.path == mark), None)
    if marked is None or not marked.size:
        return False
    return not several_writers(f.path for f in current.files) and all(
        f.ctime_ns <= marked.ctime_ns for f in current.files
    )


def same_shape(one: str, other: str) -> bool:
    """Tell whether two states of a folder differ by change times alone: then no trainer saved into it in between.

    What sets a time back may lose its last digits, so times count as equal within a millisecond.
    """
    first, second = one.partition(":"), other.partition(":")
    return first[0] == second[0] and abs(int(first[2] or 0) - int(second[2] or 0)) < 1_000_000


def several_writers(paths: Iterable[str]) -> bool:
    """Tell from file names whether several processes save into this folder."""
    return any(_RANK.search(path) for path in paths)


def end_mark(paths: Collection[str], *, checkpoint: bool) -> str | None:
    """Return the file that the Trainer writes last into such a folder, when it is there.

    `_save_checkpoint` ends with trainer_state.json; `save_model`, which fills the run's root, with training_args.bin.
    """
    mark = "trainer_state.json" if checkpoint else "training_args.bin"
    return mark if mark in paths else None


def _digest(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 1 or value == 0 else f"{value:.1f} s"
