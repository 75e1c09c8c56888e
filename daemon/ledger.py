"""What the watch tells, written into the jobs' tables (the `Ledger` of folders.py)."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weighbridge.adapters import run_identity
from weighbridge.config.settings import WatchRule
from weighbridge.daemon import state
from weighbridge.daemon.folders import Known, Settlement
from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry import findings


class StoreLedger:
    """Remembers in the database, and beside it what stood under each root at first; `wake` is told of new work."""

    def __init__(self, store: JobStore, folder: Path, wake: Callable[[], None]) -> None:
        self._store = store
        self._folder = folder
        self._wake = wake

    def known(self, path: str) -> Known | None:
        """Return what was last settled at a path."""
        return self._store.known(path)

    def seen(self, rule: WatchRule, path: str) -> float:
        """Note that a folder is being waited for; return for how many seconds it has been already."""
        return self._store.seen(_root(rule), path)

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """Take over folders that were found finished in one round."""
        runs = [run_identity.find(_root(one.rule), one.path).path for one in settlements]
        with self._store.transaction():
            for one, run in zip(settlements, runs, strict=True):
                self._store.settled(_root(one.rule), one, run)
        self._wake()

    def overdue(self, rule: WatchRule, path: str, reason: str, waited: float) -> None:
        """Note that a folder has waited longer than the limit."""
        found = findings.finding(
            "wait-limit",
            path,
            f"it did not become whole in {waited / 3600:.1f} h: {reason}",
            "save it again, or delete it; it is taken as soon as it is whole",
            waited_seconds=round(waited),
        )
        self._store.overdue(_root(rule), path, found)

    def gone(self, path: str) -> None:
        """Note that a folder vanished."""
        self._store.gone(path)

    def awaited(self, rule: WatchRule) -> list[str]:
        """Return the paths under a root whose jobs are not staged yet, or are refused."""
        held = "root = ? AND n IS NULL AND state IN ('seen', 'settling', 'blocked', 'quarantined')"
        return sorted({job.path for job in self._store.jobs(held, [_root(rule)])})

    def first_scan(self, rule: WatchRule) -> bool:
        """Tell whether this root is seen for the first time and what stands there is not to be published."""
        if _root(rule) in self._store.roots():
            return False
        if rule.backfill:
            self._store.baseline(_root(rule), {})
            return False
        return True

    def baseline(self, rule: WatchRule, standing: Mapping[str, tuple[Known, int]]) -> None:
        """Set aside what stood under a root when it was seen for the first time."""
        state.write_baseline(self._folder, _root(rule), standing)
        root = _root(rule)
        self._store.baseline(root, standing, lambda path: run_identity.find(root, path).path)


def _root(rule: WatchRule) -> str:
    return os.path.normpath(rule.root)
