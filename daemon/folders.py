"""Every folder that may hold an artifact, and what was seen of it: hints and scans in, verdicts out.

One thread calls `step` again and again; it looks at what is due and tells the ledger what settled, what vanished and
what has waited too long. How often a folder is looked at follows from how long ago it changed, so that a folder that
was given up years ago costs next to nothing.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from weighbridge.adapters import checkpoint, structure
from weighbridge.config.settings import WatchRule
from weighbridge.daemon.scan import Scan, Tree
from weighbridge.daemon.settle import Listing, Seen, Settled, StillWriting, judge
from weighbridge.daemon.watch import Hints, Mode

FULL_EVERY: Final = 3600.0
"""Seconds between full scans, which trust neither events nor folder times."""

KINDNESS: Final = 100.0
"""A scan of a root begins no sooner than so many times the last one's duration after it."""

TOGETHER: Final = 1.0
"""Seconds, at most a third of the quiet time, within which what falls due is looked at in one round.

Checkpoints of one run that were found in one scan settle within milliseconds of each other. Whether one is the last
of its run can only be told when the others are known, so they are told together.
"""

_SOONEST: Final = 0.2
_HURRY: Final = 0.5
_DAY: Final = 86400.0
_BIRTH: Final = 0.2
"""Seconds that a process takes to begin; the kernel counts its age in ticks."""

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """What was last settled or set aside at a path."""

    fingerprint: str
    shape: str


class Settlement(NamedTuple):
    """A folder that is finished."""

    rule: WatchRule
    path: str
    known: Known
    size: int
    marked: bool
    """The wait was shortened by the layout's end mark."""


class Ledger(Protocol):
    """Who remembers across restarts; every call is durable when it returns."""

    def known(self, path: str) -> Known | None:
        """Return what was last settled at a path."""
        ...

    def seen(self, rule: WatchRule, path: str) -> float:
        """Note that a folder is being waited for; return for how many seconds it has been already."""
        ...

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """Take over folders that were found finished in one round: all of them, or none when this raises."""
        ...

    def overdue(self, rule: WatchRule, path: str, reason: str, waited: float) -> None:
        """Note that a folder has waited longer than the limit."""
        ...

    def gone(self, path: str) -> None:
        """Note that a folder vanished."""
        ...

    def awaited(self, rule: WatchRule) -> list[str]:
        """Return the paths under a root whose jobs are not staged yet, or are refused."""

    def first_scan(self, rule: WatchRule) -> bool:
        """Tell whether this root is seen for the first time, so that what stands there is not to be published."""
        ...

    def baseline(self, rule: WatchRule, standing: Mapping[str, tuple[Known, int]]) -> None:
        """Set aside what stood under a root when it was seen for the first time."""
        ...


class Waiting(NamedTuple):
    """A folder that is not finished, for people."""

    path: str
    root: str
    reason: str
    seconds: float
    """How long it has been waited for."""
    hopeless: bool
    """It was at rest for long enough and is not whole: no waiting mends it."""
    overdue: bool


@dataclass(slots=True)
class _Folder:
    path: str
    rule: WatchRule
    seen: Seen | None = None
    settled: str | None = None
    rested: float | None = None
    """When it was found finished; None when that was before this daemon started."""
    next: float = 0.0
    last: float = float("-inf")
    cost: float = 0.0
    reason: str = ""
    overdue: bool = False
    hopeless: bool = False
    structure: tuple[Listing, str | None] | None = None


@dataclass
class RootState:
    """How the watch over one root stands."""

    rule: WatchRule
    tree: Tree
    scanned: float = float("-inf")
    full: float = float("-inf")
    duration: float = 0.0
    at: float | None = None
    """Wall-clock time of the last scan, for people."""
    scans: int = 0
    scanning: bool = False
    """One is under way: what it has listed already may be older than a question that comes now."""
    wanted: bool = True
    full_wanted: bool = False
    unnamed: frozenset[str] = frozenset()
    """Folders whose names are no UTF-8, which the log has told of."""
    absent: bool = False
    """The root was not there at the last scan, which the log has told of."""


def _born_ns() -> int:
    """Return when this process began, in nanoseconds since 1970; now where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.time_ns() - int(max(0.0, age - _BIRTH) * 1e9)


@dataclass
class Folders:
    """The watch over all roots; not thread-safe but for `request_scan`, `waiting` and `states`."""

    rules: Iterable[WatchRule]
    ledger: Ledger
    hints: Hints
    quiet: float = 60.0
    scan: float = 30.0
    wait_limit: float = 86400.0
    exclude: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic
    born_ns: int = field(default_factory=_born_ns)
    """Since when we are here, by the clock of files: what changed later is not old."""
    roots: dict[str, RootState] = field(default_factory=dict)
    wake: threading.Event = field(default_factory=threading.Event)
    full_seconds: float | None = None
    """What the last full scan took, every look at every file included."""
    full_scans: int = 0
    _folders: dict[str, _Folder] = field(default_factory=dict)
    _fully: bool = False

    def __post_init__(self) -> None:
        for rule in self.rules:
            root = os.path.normpath(rule.root)
            self.roots[root] = RootState(rule, Tree(root, rule.ignore, self.exclude, clock=self.clock))

    def request_scan(self, *, full: bool = False, now: bool = False) -> None:
        """Ask for a scan of every root as soon as kindness allows, or now."""
        for state in self.roots.values():
            state.full_wanted = state.full_wanted or full
            if now:
                state.duration = 0.0
            state.wanted = True
        self.wake.set()

    def step(self) -> float:
        """Do what is due and return the monotonic time of the next thing to do."""
        now = self.clock()
        taken = self.hints.take()
        if taken.overflowed:
            _log.warning(
                "inotify queue overflowed: everything is scanned anew", extra={"overflows": self.hints.overflows}
            )
            self.request_scan(full=True)
        for root, state in self.roots.items():
            hinted = [path for path in taken.folders if path == root or path.startswith(root + "/")]
            if hinted:
                self._take(state, state.tree.touch(hinted))
                for path in hinted:
                    self._hurry(path, root)
            if state.wanted and now >= state.scanned + KINDNESS * state.duration:
                self._scan(state, full=state.full_wanted or now >= state.full + FULL_EVERY)
        self._look_at(self._due(now))
        if self._fully:
            self.full_seconds, self._fully = self.clock() - now, False
            self.full_scans += 1
        return self._next(now)

    def first_look(self) -> None:
        """Scan the roots that were never seen before, and set aside what stands there."""
        for state in self.roots.values():
            if self.ledger.first_scan(state.rule):
                self._scan(state, full=True)

    def waiting(self) -> list[Waiting]:
        """Return the folders that are not finished, the longest waiting first."""
        now = self.clock()
        found = [
            Waiting(f.path, f.rule.root, f.reason, now - seen.first, f.hopeless, f.overdue)
            for f in list(self._folders.values())
            if (seen := f.seen) is not None
        ]
        return sorted(found, key=lambda w: -w.seconds)

    def unsettled(self, path: str) -> list[Waiting]:
        """Return the folders at or under a path that are not finished."""
        return [w for w in self.waiting() if w.path == path or w.path.startswith(path.rstrip("/") + "/")]

    def unlooked(self, path: str) -> list[str]:
        """Return the folders at or under a path that were found and not looked at yet."""
        under = path.rstrip("/") + "/"
        return [
            f.path
            for f in list(self._folders.values())
            if f.seen is None and f.last == float("-inf") and (f.path == path or f.path.startswith(under))
        ]

    @property
    def scanned(self) -> bool:
        """Whether every root that is there was scanned."""
        return all(state.scans > 0 or state.tree.missing for state in self.roots.values())

    @property
    def count(self) -> int:
        """Folders that may hold an artifact."""
        return len(self._folders)

    def reconsider(self, path: str) -> None:
        """Forget that a folder was settled, so that it is judged again."""
        folder = self._folders.get(path)
        if folder is not None:
            folder.settled, folder.seen, folder.next = None, None, float("-inf")
            folder.last = float("-inf")
            self.wake.set()

    def mode(self, root: str) -> Mode:
        """Return how a root is watched."""
        return self.hints.modes.get(root, Mode("scan"))

    def _scan(self, state: RootState, *, full: bool) -> None:
        state.scanning = True
        try:
            self._scan_root(state, full=full)
        finally:
            state.scanning = False

    def _scan_root(self, state: RootState, *, full: bool) -> None:
        state.wanted = state.full_wanted = False  # before the scan: what is asked from here on is for the next one
        active = {f.path for f in self._folders.values() if f.seen is not None}
        first = state.scans == 0
        scan = state.tree.scan(full=full, hinted=self.mode(state.tree.root).kind == "inotify", active=active)
        now = self.clock()
        state.scanned, state.duration, state.at = now, scan.seconds, time.time()
        if scan.full:
            state.full, self._fully = now, True
        if state.tree.missing != state.absent:
            state.absent = state.tree.missing
            told = "watched root is not there" if state.absent else "watched root is there again"
            _log.log(logging.WARNING if state.absent else logging.INFO, told, extra={"root": state.tree.root})
        if state.tree.missing:
            return
        if first and self.ledger.first_scan(state.rule):
            self._set_aside(state, scan)
        self._take(state, scan)
        if first:
            self._tell_gone(state)
        self._tell_unnamed(state)
        state.scans += 1  # once its folders can be asked for: whoever waits for a scan looks at them next
        for link in state.tree.followed:
            self.hints.follow(link)
        if scan.full and self.hints.short_of_watches(sum(len(s.tree.nodes) for s in self.roots.values())):
            self.hints.fall_back("the kernel has no inotify watches left (fs.inotify.max_user_watches)")
            _log.warning("not enough inotify watches: roots are scanned only", extra={"code": "watch-limit"})

    def _tell_gone(self, state: RootState) -> None:
        """Note what vanished while nobody watched: a path that the system says is not there, and nothing less."""
        for path in self.ledger.awaited(state.rule):
            try:
                os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                self._folders.pop(path, None)
                self.ledger.gone(path)
            except OSError:
                continue  # it cannot be looked at: that is no proof

    def _tell_unnamed(self, state: RootState) -> None:
        """Log each folder that is passed over for its name, once."""
        for path in sorted(set(state.tree.unnamed) - state.unnamed):
            _log.warning("the name of a folder is not UTF-8: what lies under it is not published", extra={"path": path})
        state.unnamed = frozenset(state.tree.unnamed)

    def _set_aside(self, state: RootState, scan: Scan) -> None:
        standing: dict[str, tuple[Known, int]] = {}
        for path in scan.new:
            try:
                listing = state.tree.look(path)
            except OSError:
                continue
            if listing is not None and not any(f.ctime_ns > self.born_ns for f in listing.files):
                standing[path] = (Known(listing.fingerprint, listing.shape), listing.size)
        self.ledger.baseline(state.rule, standing)

    def _take(self, state: RootState, scan: Scan) -> None:
        for path in scan.gone:
            if not state.tree.is_candidate(path):
                self._drop(path)
        for path in (*scan.new, *scan.changed):
            folder = self._folders.get(path)
            if folder is None:
                known = self.ledger.known(path)
                self._folders[path] = _Folder(path, state.rule, settled=known.fingerprint if known else None)
            else:
                folder.next = min(folder.next, self._earliest(folder))

    def _hurry(self, path: str, root: str) -> None:
        """Look soon at the folder that an event was about, or that it lies in."""
        while len(path) >= len(root):
            folder = self._folders.get(path)
            if folder is not None:
                folder.next = min(folder.next, self._earliest(folder))
                return
            path = os.path.dirname(path)  # noqa: PTH120 - strings, as in the scan

    def _earliest(self, folder: _Folder) -> float:
        return folder.last + max(_SOONEST, KINDNESS / 2 * folder.cost)

    def _due(self, now: float) -> list[_Folder]:
        """Return the folders to look at in this round; none while others fall due within the same moment."""
        return [f for f in self._folders.values() if f.next <= now] if self._moment() <= now else []

    def _moment(self) -> float:
        """Return when everything that falls due together with the first folder is due."""
        due = [f.next for f in self._folders.values()]
        end = min(due, default=float("inf")) + min(TOGETHER, self.quiet / 3)
        return max((time for time in due if time <= end), default=end)

    def _look_at(self, folders: Iterable[_Folder]) -> None:
        verdicts = [(folder, verdict) for folder in folders if (verdict := self._look(folder)) is not None]
        if verdicts:
            self.ledger.settled([_settlement(folder, verdict, self.quiet) for folder, verdict in verdicts])
        for folder, verdict in verdicts:
            folder.settled, folder.seen, folder.structure = verdict.fingerprint, None, None
            folder.overdue, folder.reason, folder.rested = False, "", folder.last
            self._at_rest(folder, folder.last)

    def _look(self, folder: _Folder) -> Settled | None:
        """Look at one folder; return the verdict when it is finished, which the ledger has yet to be told."""
        begun = self.clock()
        folder.next = begun + self.scan  # should this look fail in a way nobody foresaw, the others go on
        tree = self._tree(folder)
        try:
            listing = tree.look(folder.path)
        except OSError as error:
            folder.reason, folder.last = f"it cannot be read: {error.strerror}", begun
            return None
        folder.last = begun
        if listing is None:
            self._drop(folder.path)
            return None
        if folder.seen is None and folder.settled is not None and listing.fingerprint == folder.settled:
            self._at_rest(folder, begun)
            return None
        try:
            verdict = self._judge(folder, listing, begun)
        except FileNotFoundError:
            folder.next = begun + _SOONEST
            return None
        folder.cost = self.clock() - begun
        if isinstance(verdict, Settled):
            folder.next = begun
            return verdict
        self._wait(folder, verdict, begun)
        return None

    def _judge(self, folder: _Folder, listing: Listing, now: float) -> Settled | StillWriting:
        reason = None
        if folder.seen is not None and folder.seen.listing == listing:
            if folder.structure is None or folder.structure[0] != listing:
                folder.structure = (listing, structure.complete(folder.path, mark=False))
            reason = folder.structure[1]
        return judge(folder.seen, listing, now, quiet=self.quiet, structure=reason, mark=self._mark(folder, listing))

    def _mark(self, folder: _Folder, listing: Listing) -> str | None:
        top = {f.path for f in listing.files if "/" not in f.path}
        return checkpoint.end_mark(top, folder.path.rpartition("/")[2])

    def _wait(self, folder: _Folder, verdict: StillWriting, now: float) -> None:
        seen = verdict.seen
        if folder.seen is None:
            seen = seen._replace(first=now - self.ledger.seen(folder.rule, folder.path))
        folder.seen, folder.reason = seen, verdict.reason
        folder.hopeless = seen.looks > 1 and now >= verdict.until
        if not folder.overdue and now - seen.first > self.wait_limit:
            folder.overdue = True
            self.ledger.overdue(folder.rule, folder.path, verdict.reason, now - seen.first)
        age = now - seen.since
        pace = max(_SOONEST if self.quiet < 1 else _HURRY, age / 10, KINDNESS / 2 * folder.cost)
        longest = self.scan if age < FULL_EVERY else 10 * self.scan if age < _DAY else FULL_EVERY
        folder.next = now + min(pace, max(longest, KINDNESS / 2 * folder.cost))
        if now < verdict.until:
            folder.next = min(folder.next, verdict.until)

    def _at_rest(self, folder: _Folder, now: float) -> None:
        """Look again at a finished folder: a few times soon after, and for an hour where there are no events.

        After that its own time is asked by every scan, and every file of it by the full ones.
        """
        hinted = self.mode(self._tree(folder).root).kind == "inotify"
        young = folder.rested is not None and now - folder.rested < (2 * self.scan if hinted else FULL_EVERY)
        folder.next = now + max(self.scan, KINDNESS / 2 * folder.cost) if young else float("inf")

    def _drop(self, path: str) -> None:
        if self._folders.pop(path, None) is not None:
            self.ledger.gone(path)

    def _tree(self, folder: _Folder) -> Tree:
        return self.roots[os.path.normpath(folder.rule.root)].tree

    def _next(self, now: float) -> float:
        due = [s.scanned + KINDNESS * s.duration for s in self.roots.values() if s.wanted]
        return max(min(self._moment(), *due, now + self.scan), now)


def _settlement(folder: _Folder, verdict: Settled, quiet: float) -> Settlement:
    listing = verdict.seen.listing
    return Settlement(
        rule=folder.rule,
        path=folder.path,
        known=Known(verdict.fingerprint, listing.shape),
        size=listing.size,
        marked=folder.last - verdict.seen.since < quiet,
    )
