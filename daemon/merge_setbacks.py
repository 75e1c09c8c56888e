"""What becomes of a merge that a step of it failed: it waits, it is tried again, or it needs somebody."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from weighbridge.adapters.merge.staging import finished
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobs import delay
from weighbridge.daemon.mergestore import Merge, MergeStore
from weighbridge.daemon.records import encode
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding

BARREN_MAX: Final = 3
"""Tries in a row that finished no file after which somebody has to look; one that the daemon did not survive counts."""

_log = logging.getLogger(__name__)


class Setbacks:
    """Writes down what a failure means for a merge."""

    def __init__(self, store: MergeStore, homes: Homes, clock: Callable[[], float]) -> None:
        self._store = store
        self._homes = homes
        self._clock = clock

    def again(self, merge: Merge, why: str, *, fix: str | None = None, fair: bool = False) -> Merge | None:
        """Try a merge once more; one that gets nowhere several times in a row waits for somebody."""
        grown = finished(Path(merge.stage or "/")) > merge.finished
        barren = 0 if grown else merge.barren if fair else merge.barren + 1
        if barren >= BARREN_MAX:
            return self.stop(merge, f"it was tried {merge.tries} times and gets no further: {why}", fix)
        until = None
        if not fair or merge.executor != "local":
            until = self._clock() + delay(errors.WeighbridgeError(why), barren, random.random())  # noqa: S311 - jitter
        return self._store.advance(
            merge, "wanted", event="merge again", reason=why, barren=barren, until=until, handle=None, error=None
        )

    def stop(self, merge: Merge, why: str, fix: str | None) -> Merge | None:
        """Set a merge aside that needs `fix` before it is tried again."""
        return self.block(merge, findings.finding("merge-not-made", merge.ref, why, _cure(merge, fix)), why)

    def wait_for(self, merge: Merge, error: errors.WeighbridgeError) -> Merge | None:
        """Let a merge wait for what will pass, or be mended, without another hand."""
        if isinstance(error, errors.UnreachableError) and merge.state not in {"submitting", "running"}:
            self._homes.failed(merge.home, error)
        until = self._clock() + delay(error, merge.attempts, random.random())  # noqa: S311 - jitter
        fresh = merge.reason != words_of(error)
        return self._store.advance(
            merge, event="merge waits" if fresh else None, until=until, attempts=merge.attempts + 1,
            reason=words_of(error), error=msgspec.json.encode(errors.describe(error), enc_hook=str).decode(),
        )  # fmt: skip

    def refused(self, merge: Merge, error: errors.WeighbridgeError) -> Merge | None:
        """Give a merge up with the words of who refused it."""
        told = [f for f in error.data.get("findings") or [] if isinstance(f, Finding)]
        found = told[0] if told else findings.finding("merge-not-made", merge.ref, words_of(error), error.fix)
        return self.block(merge, found, words_of(error), quarantine=found.code == "merge-unproven")

    def block(self, merge: Merge, found: Finding, why: str, *, quarantine: bool = False) -> Merge | None:
        """Set a merge aside until somebody asks for another try."""
        state = "quarantined" if quarantine else "blocked"
        _log.warning("a merge is %s", state, extra={"ref": merge.ref, "why": why})
        return self._store.advance(
            merge, state, event=f"merge {state}", was=merge.state, reason=why, findings=encode([found]), until=None
        )

    def unforeseen(self, merge: Merge, error: Exception) -> Merge | None:
        """Try a merge again after an error that is none of ours; one that keeps coming waits for somebody."""
        _log.exception("a merge failed in a way nobody foresaw", extra={"ref": merge.ref})
        reason = f"{type(error).__name__}: {error}"[:500]
        count = merge.unexpected + 1
        if count < BARREN_MAX:
            until = self._clock() + delay(error, count, random.random())  # noqa: S311 - jitter
            return self._store.advance(merge, unexpected=count, reason=reason, until=until)
        said = f"its merge failed {count} times: {reason}"
        found = findings.finding("job-quarantined", merge.ref, said, _cure(merge, None))
        return self.block(merge, found, reason, quarantine=True)


def _cure(merge: Merge, fix: str | None) -> str:
    """Return what lets a merge be tried again: mend it, then ask for it."""
    return f"{fix or 'look at the log'}; then: registryd merges --retry {merge.ref}"


def words_of(error: errors.WeighbridgeError) -> str:
    """Return what happened and why, in one line."""
    return f"{error.what} ({error.why})" if error.why else error.what
