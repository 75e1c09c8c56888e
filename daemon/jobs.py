"""The order of a job's steps, and what becomes of one that fails.

    settling -> staged -> sealed -> claimed -> uploading -> committed -> announced -> done

`advance` is the only place that knows the order: look at the state, carry out one step, store the result in one
transaction. Every step can be repeated after a kill at any instant; none calls another. Beside the line lie waiting
(with a reason and a time), blocked (with a finding), quarantined, vanished and superseded.
"""

import logging
import random
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from weighbridge.adapters.run_place import same_place
from weighbridge.daemon.homes import Home, Homes
from weighbridge.daemon.intake import Intake, Taken, Unfit
from weighbridge.daemon.jobstore import ACTIVE, FRESH, Job, JobStore
from weighbridge.daemon.records import encode
from weighbridge.registry import disk, errors, findings, types
from weighbridge.registry.flow import papers
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.claims import Claimed, manifest_of
from weighbridge.registry.flow.decide import clear_void, decide
from weighbridge.registry.flow.publish import claim_entry, needs_telling, rejoin, version_entry
from weighbridge.registry.flow.upload import upload
from weighbridge.registry.manifest import Manifest, parse, seal

UNEXPECTED_MAX: Final = 5
"""Failures that nobody foresaw after which a job is quarantined."""

STAGES_MAX: Final = 5
"""Times a staged copy may turn out damaged before somebody has to look at the disk."""

_log = logging.getLogger(__name__)


class CutOffError(Exception):
    """The daemon is to end; this step will be repeated."""


class Sequel(Protocol):
    """What follows from a version: it is told of each, and gives what was made of one back as a job."""

    def follows(self, job: Job) -> None:
        """Take note of a version, in the transaction that ends its job."""
        ...

    def derivation(self, job: Job) -> str | None:
        """Return the key by which the same thing, made twice, becomes one version; None for what was not made here."""
        ...

    def take(self, job: Job, moved: Callable[[int], None]) -> Taken | Unfit | None:
        """Return what was made and is to be published, as `Intake.take` does; None for a job of the watch."""
        ...


class Runner:
    """Carries jobs on, one step at a time; safe to use from several threads for different jobs."""

    def __init__(
        self,
        store: JobStore,
        homes: Homes,
        intake: Intake,
        owner: types.Owner,
        *,
        changed: Callable[[str], None] = lambda _path: None,
        stopping: threading.Event | None = None,
        sequel: Sequel | None = None,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Take the parts; `changed` is told of a folder that changed under our hands, so that it is watched again.

        When `stopping` is set, whatever moves bytes is cut off between two of them; the step is repeated later.
        """
        self._store = store
        self._homes = homes
        self._intake = intake
        self._owner = owner
        self._changed = changed
        self._sequel = sequel
        self._stopping = stopping or threading.Event()
        self._clock = clock
        self._chance = chance
        self._steps: Mapping[str, Callable[[Job], Job | None]] = {
            "settling": self._take_in,
            "staged": self._seal,
            "sealed": self._claim,
            "claimed": self._announce_claim,
            "uploading": self._publish,
            "committed": self._announce,
            "announced": self._finish,
        }

    def run(self, job: Job, *, upto: str | None = None) -> Job | None:
        """Carry a job on until it is done, waits, or has reached the state `upto`; None when another hand has it.

        Raises sqlite3.Error only: what our own store cannot do is not the job's fault.
        """
        current: Job | None = job
        while current is not None and current.state in ACTIVE and current.until is None and current.state != upto:
            if self._stopping.is_set():
                break
            current = self.attempt(current)
        return current

    def moved(self, _count: int) -> None:
        """Take note that bytes were moved, and stop here when the daemon is to end. Raises CutOffError."""
        if self._stopping.is_set():
            raise CutOffError

    def attempt(self, job: Job) -> Job | None:
        """Carry out one step and turn whatever it raises into the job's next state."""
        try:
            try:
                return self.advance(job)
            except CutOffError:
                return None
            except errors.WeighbridgeError as error:
                return self._failed(job, error)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - a poison job must not stop the others
            foreseen = _of_the_source(job, error)
            return self._unforeseen(job, error) if foreseen is None else self._failed(job, foreseen)

    def advance(self, job: Job) -> Job | None:
        """Carry out the one step that the job's state asks for; the result is durable when this returns."""
        return self._steps[job.state](job)

    # -- the steps

    def _take_in(self, job: Job) -> Job | None:
        taken = self._sequel.take(job, self.moved) if self._sequel is not None else None
        taken = taken or self._intake.take(job, self.moved)
        if isinstance(taken, Unfit):
            return taken.job
        return self._store.advance(
            taken.job,
            "staged",
            event="staged",
            bundle=msgspec.json.encode(taken.bundle).decode(),
            facts=msgspec.json.encode(taken.facts).decode(),
            findings=encode(taken.facts.findings),
            people=taken.people,
            **FRESH,
        )

    def _seal(self, job: Job) -> Job | None:
        bundle, facts = _bundle(job), msgspec.json.decode((job.facts or "").encode(), type=types.Facts)
        manifest = seal(bundle.files, facts)
        return self._store.advance(
            job, "sealed", content=manifest.content, manifest=manifest.stored.decode(), facts=None, size=bundle.size
        )

    def _claim(self, job: Job) -> Job | None:
        home = self._home(job)
        home.confirm()
        name, manifest = job.name or "", _sealed(job)
        known = home.known.setdefault(name, {})
        share = self._intake.shares(job)
        key = self._sequel.derivation(job) if self._sequel is not None else None
        claimed = claim(
            home.remote, home.registry, name, manifest, self._owner, derivation=key, share=share, known=known
        )
        self._adopt(job, claimed)
        done = {"n": claimed.claim.n, "claim": msgspec.json.encode(claimed).decode()}
        if not claimed.committed:
            return self._store.advance(job, "claimed", event="joined" if claimed.joined else "claimed", **done)
        rendered = partial(papers.render, home.remote, manifest_of(claimed), name, claimed.claim.n, people=job.people)
        joined = rejoin(home.remote, home.name, claimed, _bundle(job), rendered, progress=self.moved)
        return self._record(job, home, claimed, joined, event="joined", **done)

    def _adopt(self, job: Job, claimed: Claimed) -> None:
        """Take over the identity under which these bytes were published before: our memory may be younger."""
        theirs = manifest_of(claimed).facts.provenance.run.id
        mine = job.run_id or ""
        if claimed.joined and job.run_path and theirs != mine and same_place(theirs, mine):
            self._store.adopt_run(job.run_path, theirs)

    def _announce_claim(self, job: Job) -> Job | None:
        home = self._home(job)
        home.announce([claim_entry(_claimed(job))])
        return self._store.advance(job, "uploading", **FRESH)

    def _publish(self, job: Job) -> Job | None:
        home, claimed, bundle = self._home(job), _claimed(job), _bundle(job)
        name, n = claimed.claim.name, claimed.claim.n
        rendered = papers.render(home.remote, manifest_of(claimed), name, n, people=job.people)
        try:
            verified = upload(home.remote, claimed, bundle, rendered, self.moved)
            if bundle.mode == "direct":
                staging.recheck(bundle)
            done = decide(home.remote, home.name, claimed, verified)
        except errors.VoidedError:
            clear_void(home.remote, name, n)
            return self._store.advance(job, "sealed", event="voided", n=None, claim=None, attempts=job.attempts + 1)
        return self._record(job, home, claimed, done, event="committed")

    def _record(
        self, job: Job, home: Home, claimed: Claimed, done: types.Receipt, *, event: str, **changes: object
    ) -> Job | None:
        """Record what the remote confirmed: receipt, manifest and the job's state in one transaction."""
        entry = version_entry(home.remote, claimed)
        with self._store.transaction():
            home.catalog.record(manifest_of(claimed), done)
            home.catalog.apply(None, [entry])
            fresh = self._store.advance(
                job, "committed", event=event, receipt=msgspec.json.encode(done).decode(), **FRESH | changes
            )
            if fresh is not None:
                self._store.bind(home.name, done.name, manifest_of(claimed).kind, job.run_id or "")
                self._store.published(home.name, done.name, self._clock())
                for mirror in self._intake.mirrors(job):
                    self._store.deliver(mirror, home.name, done.name, done.n)
            return fresh

    def _announce(self, job: Job) -> Job | None:
        home, claimed = self._home(job), _claimed(job)
        if not claimed.committed or needs_telling(home.remote, claimed):
            home.announce([version_entry(home.remote, claimed)])
        return self._store.advance(job, "announced", **FRESH)

    def _finish(self, job: Job) -> Job | None:
        claimed = _claimed(job)
        self._intake.tag(job, self._home(job), claimed.claim.name, claimed.claim.n)
        if job.bundle is not None:
            staging.discard(_bundle(job))
        spent = dict.fromkeys(("bundle", "people", "manifest", "claim"))  # what lasts of them is in the catalogue
        with self._store.transaction():
            done = self._store.advance(job, "done", event="done", **spent, **FRESH)
            if done is not None and self._sequel is not None:
                self._sequel.follows(done)
            return done

    def _home(self, job: Job) -> Home:
        return self._homes.get(job.home or "")

    # -- what becomes of a failure

    def _failed(self, job: Job, error: errors.WeighbridgeError) -> Job | None:
        described = msgspec.json.encode(errors.describe(error), enc_hook=str).decode()
        match error:
            case errors.VanishedError():
                return self._close(job, "vanished", error)
            case errors.SourceChangedError():
                self._changed(job.path)
                # Deleting a file changes it first, and then it is gone.
                return self._close(job, "superseded" if Path(job.path).exists() else "vanished", error)
            case errors.StageDamagedError() if job.attempts < STAGES_MAX:
                staging.discard(_bundle(job))
                return self._store.advance(
                    job, "settling", event="staged again", bundle=None, n=None, claim=None, attempts=job.attempts + 1
                )
            case errors.UsageError() | errors.NotFoundError() if error.data.get("remote"):
                self._homes.failed(job.home or "", error)
                return self._wait(job, error, described)  # how a remote is set up, or a bucket that is not there
            case errors.NameTakenError() if error.data.get("kind"):
                return self._rename(job, error)
            case errors.UnreachableError() | errors.DiskFullError() | errors.DeniedError() | errors.NotFinishedError():
                self._homes.failed(job.home or "", error)
                return self._wait(job, error, described)
            case _:
                return self._block(job, error, described)

    def _close(self, job: Job, state: str, error: errors.WeighbridgeError) -> Job | None:
        if job.n is not None:
            # A number is claimed and its bytes are gone: whoever has them joins, else a collector voids it.
            _log.warning(
                "a claimed version cannot be finished", extra={"ref": f"{job.name}@v{job.n}", "why": str(error)}
            )
        if job.bundle is not None:
            staging.discard(_bundle(job))
        self._reconsider(job)
        return self._store.advance(job, state, event=state, reason=_words(error), until=None, bundle=None)

    def _reconsider(self, job: Job) -> None:
        """Judge again what was not chosen because of this one: it may be the last or the best of the run now."""
        if job.run_path is not None:
            self._store.unskip("reason = 'not-chosen' AND run_path = ?", [job.run_path])

    def _rename(self, job: Job, error: errors.WeighbridgeError) -> Job | None:
        """Give a second kind its own name: a name has one kind for ever."""
        fresh = (job.name or "") + types.KIND_SUFFIX.get(job.kind or "", "-merged")
        if job.name is None or job.name.endswith(types.KIND_SUFFIX.get(job.kind or "", "-merged")):
            return self._block(job, error, None)
        return self._store.advance(job, job.state, name=fresh)

    def _wait(self, job: Job, error: errors.WeighbridgeError, described: str) -> Job | None:
        until = self._clock() + delay(error, job.attempts, self._chance())
        _log.warning(
            "a job waits",
            extra={"path": job.path, "job": job.id, "why": _words(error), "seconds": round(until - self._clock())},
        )
        event = "waiting" if job.reason != _words(error) else None
        return self._store.advance(
            job, event=event, until=until, attempts=job.attempts + 1, reason=_words(error), error=described
        )

    def _block(self, job: Job, error: errors.WeighbridgeError, described: str | None) -> Job | None:
        found = error.data.get("findings") if isinstance(error, errors.RefusedError) else None
        blocking = [f for f in found or [] if isinstance(f, types.Finding)] or [finding_of(job, error)]
        self._reconsider(job)
        _log.warning("a job is blocked", extra={"path": job.path, "job": job.id, "why": _words(error)})
        return self._store.advance(
            job,
            "blocked",
            event="blocked",
            was=job.state,
            findings=encode(blocking),
            reason=_words(error),
            error=described,
            until=None,
        )

    def _unforeseen(self, job: Job, error: Exception) -> Job | None:
        _log.exception("a job failed in a way nobody foresaw", extra={"path": job.path, "job": job.id})
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"[:500]
        count = job.unexpected + 1
        if count < UNEXPECTED_MAX:
            until = self._clock() + delay(error, job.unexpected, self._chance())
            return self._store.advance(job, unexpected=count, reason=reason, until=until)
        found = findings.finding(
            "job-quarantined",
            job.path,
            f"it failed {count} times: {reason}",
            f"look at the log, then: registry allow {job.path} --code job-quarantined --reason '...' tries again",
        )
        return self._store.advance(
            job,
            "quarantined",
            event="quarantined",
            was=job.state,
            unexpected=count,
            reason=reason,
            findings=encode([found]),
            until=None,
        )


def _of_the_source(job: Job, error: Exception) -> errors.WeighbridgeError | None:
    """Return what happened to the folder of a job that reads it, None for anything else: that is a fault of ours."""
    if job.state != "settling" or not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if Path(job.path).exists():
            return errors.SourceChangedError(f"a file of {job.path} went away", why=str(error.filename or error))
        return errors.VanishedError(f"{job.path} is gone")
    told = disk.translate(error, f"{job.path} cannot be read")
    return None if type(told) is errors.WeighbridgeError else told


def delay(error: Exception, attempts: int, chance: float) -> float:
    """Return the seconds until the next try: longer each time, with jitter, bounded by the kind of error."""
    asked = error.data.get("retry_after") if isinstance(error, errors.QuotaError) else None
    if isinstance(asked, int | float):
        return float(asked) + 30.0 * chance  # nothing helps before; not all at the same second afterwards
    if isinstance(error, errors.DiskFullError):
        first, most = 5.0, 60.0
    elif isinstance(error, errors.DeniedError):
        first, most = 10.0, 300.0
    elif isinstance(error, errors.NotFinishedError):
        first, most = 5.0, 300.0
    else:
        first, most = 1.0, 300.0
    return min(most, first * 2.0 ** min(attempts, 20)) * (0.5 + chance / 2)


def finding_of(job: Job, error: errors.WeighbridgeError) -> types.Finding:
    """Return an error that blocks as a finding about the job's folder."""
    code = error.code if error.code in findings.CODES else "publish-refused"
    why = f": {error.why}" if error.why else ""
    return findings.finding(code, job.path, error.what + why, error.fix, severity="block")


def _words(error: errors.WeighbridgeError) -> str:
    return f"{error.what} ({error.why})" if error.why else error.what


def _bundle(job: Job) -> staging.Bundle:
    return msgspec.json.decode((job.bundle or "").encode(), type=staging.Bundle)


def _claimed(job: Job) -> Claimed:
    return msgspec.json.decode((job.claim or "").encode(), type=Claimed)


def _sealed(job: Job) -> Manifest:
    return parse((job.manifest or "").encode(), f"the sealed manifest of {job.path}")
