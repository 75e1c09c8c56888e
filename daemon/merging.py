"""From a published adapter to a merged model: the order of a merge's steps, and what becomes of one that fails.

    wanted -> submitting -> running -> merged -> publishing -> done

One thread looks at what is due. Every step can be repeated after a kill: the merge itself goes on where its journal
ends, a try is found again by its key, and whether it succeeded is told by the file it leaves. From `merged` on the
result is a job like any other (`jobs.Runner`): staged, sealed, claimed under the derivation, uploaded, decided.
"""

import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from weighbridge.adapters.merge import batch, start
from weighbridge.adapters.merge.children import Begun
from weighbridge.adapters.merge.staging import finished
from weighbridge.config.settings import MergeSettings
from weighbridge.daemon import merge_scratch
from weighbridge.daemon.executors.local import MORE
from weighbridge.daemon.executors.protocol import Absent, Executor, Gone, Live, Seen, Unknown, Work
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobs import CutOffError
from weighbridge.daemon.jobstore import FRESH, JobStore
from weighbridge.daemon.merge_jobs import give_up
from weighbridge.daemon.merge_setbacks import Setbacks, words_of
from weighbridge.daemon.merge_sides import Sides, made_before, sides
from weighbridge.daemon.mergestore import ACTIVE, CLOSED, Merge, MergeStore
from weighbridge.registry import control, errors
from weighbridge.registry.flow import hub_base, merged
from weighbridge.registry.flow.hub_base import Hub
from weighbridge.registry.types import Finding

SCRATCH: Final = "merge"
"""Where merges are made inside the state folder, when the configuration names no other place."""

PART: Final = "merged"
"""The part of a job that publishes a merged model."""

HUB: Final = "hub"
"""Where bases lie that were fetched from the Hub, inside the scratch folder."""

_IDLE: Final = 60.0
_log = logging.getLogger(__name__)


class Merging:
    """Carries merges on in a thread of its own; `wake_workers` is told when there is something to publish."""

    def __init__(
        self,
        store: MergeStore,
        jobs: JobStore,
        homes: Homes,
        settings: MergeSettings,
        executors: Mapping[str, Executor],
        *,
        scratch: Path,
        reserve: int = 0,
        caches: Sequence[Path] = (),
        roots: Sequence[Path] = (),
        fetching: Collection[str] = (),
        open_hub: Callable[[], Hub] = lambda: hub_base.open_hub(os.environ),
        wake_workers: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the parts; `caches` are Hub caches, `roots` the watched folders: bases may lie in both.

        `fetching` are those of the roots whose rule lets bases be fetched, with what `open_hub` gives.
        """
        self._store = store
        self._jobs = jobs
        self._homes = homes
        self._settings = settings
        self._executors = executors
        self._scratch = scratch
        self._reserve = reserve
        self._caches = caches
        self._roots = roots
        self._wake_workers = wake_workers
        self._clock = clock
        self._fetching = fetching
        self._open_hub = open_hub
        self._setbacks = Setbacks(store, homes, clock)
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._next: dict[int, float] = {}
        self._thread: threading.Thread | None = None
        self._steps: Mapping[str, Callable[[Merge], Merge | None]] = {
            "wanted": self._prepare,
            "submitting": self._submit,
            "running": self._follow,
            "merged": self._hand_over,
            "publishing": self._await_version,
        }

    # -- the thread

    def start(self) -> None:
        """Begin to carry merges on."""
        self._thread = threading.Thread(target=self._loop, name="merging", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at what is due now."""
        self._work.set()

    def stop(self, seconds: float) -> bool:
        """Begin nothing any more; return whether the step under way ended in time."""
        self._stopping.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join(seconds)
        # A merge made here ends with us. It is not to blame for it, as it would be had we died: its handle says so.
        with suppress(sqlite3.Error):
            for merge in self._store.merges("state = 'running' AND executor = 'local'"):
                self._store.advance(merge, handle=None)
        return self._thread is None or not self._thread.is_alive()

    def _loop(self) -> None:
        woken = True
        while not self._stopping.is_set():
            wait = _IDLE
            try:
                wait = self.round(woken=woken)
            except sqlite3.Error as error:
                _log.warning("merges wait for the database", extra={"why": str(error)})
                wait = 5.0
            except Exception:  # noqa: BLE001 - the next round comes whatever happened in this one
                _log.exception("looking at the merges failed")
                wait = 5.0
            woken = self._work.wait(wait)
            self._work.clear()

    def round(self, *, woken: bool = True) -> float:
        """Carry on what is due, once; return the seconds until something is due again.

        `woken`: something happened, so that nobody waits for the next look.
        """
        for merge in self._store.active():
            if self._stopping.is_set():
                return 0.0
            if woken:
                self._next.pop(merge.id, None)
            if self._wait(merge) <= 0:
                self.run(merge)
        waits = [self._wait(merge) for merge in self._store.active()]
        return max(0.1, min([_IDLE, *waits]))

    def run(self, merge: Merge) -> None:
        """Carry one merge on until it has to wait for something."""
        current: Merge | None = merge
        while current is not None and current.state in ACTIVE and not self._stopping.is_set():
            before = current
            current = self.attempt(current)
            if current is None or current.state in {before.state, *CLOSED} or current.until is not None:
                return

    def attempt(self, merge: Merge) -> Merge | None:
        """Carry out one step and turn whatever it raises into the merge's next state."""
        self._next[merge.id] = time.monotonic() + self._pause(merge)
        try:
            if merge.until is not None:
                merge = self._store.advance(merge, until=None) or merge
            return self._steps[merge.state](merge)
        except CutOffError:
            return None
        except errors.WeighbridgeError as error:
            return self._failed(merge, error)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - a poison merge must not stop the others
            return self._setbacks.unforeseen(merge, error)

    def _wait(self, merge: Merge) -> float:
        if merge.until is not None:
            return merge.until - self._clock()
        if merge.state == "wanted" and not self._executor(self._settings.executor).room():
            return _IDLE  # whoever ends a merge wakes us
        return self._next.get(merge.id, 0.0) - time.monotonic()

    def _pause(self, merge: Merge) -> float:
        if merge.state in {"submitting", "running"}:
            return self._executor(merge.executor or self._settings.executor).pause
        return 2.0

    def quiet(self) -> bool:
        """Tell whether nothing is left here but to wait for others: a base, a remote, a cluster."""
        return not any(self._busy(merge) for merge in self._store.active())

    def _busy(self, merge: Merge) -> bool:
        if merge.until is not None and merge.until > self._clock():
            return False
        if merge.state in {"submitting", "running"}:
            return merge.executor == "local" or merge.state == "submitting"
        if merge.state == "publishing":
            job = self._jobs.job(merge.job or 0)
            return job is None or job.state in {"done", "superseded", "vanished"}
        return True

    # -- the steps

    def _prepare(self, merge: Merge) -> Merge | None:
        """Bring both sides together, and write down what is to be done."""
        kind = self._settings.executor
        if not self._executor(kind).room():
            return merge
        both = self.sides(merge)
        name = merged.merged_name(merge.name, merge.dtype)
        derivation = merged.derivation([both.adapter], both.base, merge.dtype)
        known = {
            "merged_name": name, "derivation": derivation, "base_ref": both.base.ref,
            "base_content": both.base.content,
        }  # fmt: skip
        there = made_before(self._homes.get(merge.home), name, derivation)
        if there is not None:
            self._clear(merge)
            return self._store.advance(
                merge, "done", event="merge joined", merged_n=there, reason=None, error=None, **known
            )
        target = self.target(merge)
        stands = merge_scratch.standing(both.seen, target)
        if stands is not None:
            return self._store.advance(merge, "merged", plan=stands.plan, **FRESH | known)
        merge_scratch.room(both.seen, self._scratch, self._reserve)
        begun = start.begin(both.seen, target, workers=self._executor(kind).workers, behaviour=self._settings.behaviour)
        assert isinstance(begun, Begun), "nobody else writes below our scratch"
        fresh = msgspec.structs.replace(merge, plan=begun.plan, tries=merge.tries + 1)
        batch.write_request(fresh.key, begun)
        return self._store.advance(
            merge, "submitting", plan=begun.plan, stage=begun.stage, tries=fresh.tries, executor=kind, handle=None,
            submitted_at=None, finished=finished(Path(begun.stage)), **FRESH | known,
        )  # fmt: skip

    def _submit(self, merge: Merge) -> Merge | None:
        """Submit a try, unless it is found: we may have been killed right after we did."""
        if self._answer(merge) is not None:
            return self._store.advance(merge, "running", event="merge begun")
        executor, work = self._executor(merge.executor), self._work_of(merge)
        seen = executor.look(work)
        match seen:
            case Absent() if merge.executor != self._settings.executor:
                return self._store.advance(merge, "wanted", reason="merges are made elsewhere now", error=None)
            case Absent():
                # From here on only Slurm can tell whether it was submitted.
                noted = self._store.advance(merge, submitted_at=self._clock())
                if noted is None:
                    return None
                merge, handle = noted, executor.submit(work)
            case Live(handle):
                pass
            case Unknown() if merge.submitted_at is None and merge.executor != self._settings.executor:
                return self._store.advance(merge, "wanted", reason="merges are made elsewhere now", error=None)
            case Unknown(why, fix):
                raise errors.UnreachableError("the merge cannot be submitted", why=why, fix=fix)
            case Gone():
                return self._ended(merge, seen)
        return self._store.advance(merge, "running", event="merge begun", handle=handle, **FRESH)

    def _follow(self, merge: Merge) -> Merge | None:
        """Take what a try left; without an answer, ask whether it is worth waiting for one."""
        answer = self._answer(merge)
        if answer is None:
            seen = self._executor(merge.executor).look(self._work_of(merge))
            answer = self._answer(merge)  # it may have come while we asked
            if answer is None:
                return self._ended(merge, seen)
        if answer.error is not None:
            error = control.rebuild(answer.error)
            _log.warning("a merge failed", extra={"ref": merge.ref, "why": words_of(error)})
            if isinstance(error, errors.MemoryShortError):
                return self._ended(merge, self._executor(merge.executor).starved(words_of(error)))
            if type(error) is errors.WeighbridgeError:  # the child did not finish, and nobody knows better
                return self._ended(merge, Gone(words_of(error), "again"))
            # The answer of this try stands for ever: whatever comes next is another try.
            again = self._store.advance(merge, "wanted", handle=None)
            return None if again is None else self._failed(again, error)
        return self._store.advance(merge, "merged", event="merge made", host=answer.host, **FRESH)

    def _ended(self, merge: Merge, seen: Seen) -> Merge | None:
        """Return a merge after a look at a try that has left no answer."""
        match seen:
            case Live(handle, why):
                return self._store.advance(merge, handle=handle, reason=why, error=None)
            case Unknown(why, fix):
                told = f"{why}; the merge is taken to go on"
                error = errors.describe(errors.UnreachableError(told, fix=fix)) if fix else None
                described = msgspec.json.encode(error).decode() if error is not None else None
                return self._store.advance(merge, reason=told, error=described)
            case Absent() if merge.executor == "local":
                if merge.handle is None:
                    return self._setbacks.again(merge, "the daemon was stopped while it was made", fair=True)
                return self._setbacks.again(merge, "the daemon died while it was made", fix=MORE)
            case Absent():
                return self._setbacks.again(merge, "it is not known any more and left no result")
            case Gone(why, "stop", fix):
                return self._setbacks.stop(merge, why, fix)
            case Gone(why, "cancelled"):
                return self._store.advance(
                    merge, "cancelled", event="merge cancelled", was=merge.state, reason=why, until=None, error=None
                )
            case Gone(why, _, fix, fair):
                return self._setbacks.again(merge, why, fix=fix, fair=fair)

    def _hand_over(self, merge: Merge) -> Merge | None:
        """Judge the result, give it its folder, and make it a job that publishes it."""
        both = self.sides(merge)
        answer = self._answer(merge)
        target = self.target(merge)
        lost = False
        if merge_scratch.standing(both.seen, target) is None and answer is None:
            raise errors.SourceChangedError(f"the result of {merge.ref} is gone", why="it is made again")
        try:
            done = start.finish(both.seen, target, (answer.result if answer else None) or {})
            lost = any(finding.code == "merge-update-lost" for finding in done.findings)
        except errors.RefusedError as error:
            lost = any(_too_coarse(f) for f in error.data.get("findings") or [])
            if not lost or not _finer(merge):
                raise
        if lost and _finer(merge):
            shutil.rmtree(target, ignore_errors=True)
            why = f"{merge.dtype} cannot hold the adapter's change"
            return self._store.advance(
                merge, "wanted", event="merge in fp32", dtype="fp32", reason=why, stage=None, plan=None, until=None
            )
        with self._store.transaction():
            job = self._jobs.follow_up(
                root=merge.root, path=str(target), part=PART, fingerprint=done.plan, kind="merged",
                run_path=merge.run_path, run_id=merge.run_id, project=merge.project, run=merge.run, home=merge.home,
                name=merge.merged_name, step=merge.step, metric=merge.metric, best_hint=merge.best_hint,
            )  # fmt: skip
            fresh = self._store.advance(merge, "publishing", job=job.id, plan=done.plan, **FRESH)
        self._wake_workers()
        return fresh

    def _await_version(self, merge: Merge) -> Merge | None:
        job = self._jobs.job(merge.job or 0)
        if job is None or job.state in {"superseded", "vanished"}:
            why = job.reason if job is not None and job.reason else "its folder changed"
            return self._setbacks.again(msgspec.structs.replace(merge, stage=None), why)
        if job.state != "done":
            stuck = job.state in {"blocked", "quarantined"}
            return self._store.advance(merge, reason=f"its publication is {job.state}: {job.reason}" if stuck else None)
        self._clear(merge)
        return self._store.advance(merge, "done", event="merge done", merged_n=job.n, stage=None, **FRESH)

    # -- its parts

    def sides(self, merge: Merge) -> Sides:
        """Return both sides of a merge; raises as `merge_sides.sides`."""
        return sides(
            merge, self._homes.get(merge.home), self._store,
            adapter=self._place(merge) / "adapter", folders=[Path(folder) for folder in self._settings.bases],
            caches=[*self._caches, self._scratch / HUB], roots=self._roots, scratch=self._scratch, moved=self._moved,
            at=lambda base: self._at(merge, base), fetch=self._fetch if merge.root in self._fetching else None,
        )  # fmt: skip

    def _at(self, merge: Merge, base: Path) -> None:
        """Note where the base of a merge lies: whatever the merge waits for next, it must not go for another one."""
        hub_base.use(self._scratch / HUB, base)
        self._store.advance(merge, base_path=str(base))

    def _fetch(self, repo: str, revision: str | None) -> Path:
        """Get a base from the Hub; those that other merges are made from stay."""
        used = {Path(one.base_path) for one in self._store.active() if one.base_path is not None}
        return hub_base.fetch(
            self._open_hub(), repo, revision, self._scratch / HUB,
            limit=self._settings.fetch_max, reserve=self._reserve, used=used, moved=self._moved,
        )  # fmt: skip

    def _moved(self, _count: int) -> None:
        """Stop between two bytes when the daemon is to end."""
        if self._stopping.is_set():
            raise CutOffError

    def target(self, merge: Merge) -> Path:
        """Return the folder that will hold a merge's result."""
        return self._place(merge) / f"{PART}-{merge.dtype}"

    def _place(self, merge: Merge) -> Path:
        return merge_scratch.place(self._scratch, merge)

    def _executor(self, kind: str | None) -> Executor:
        return self._executors[kind or "local"]

    def _work_of(self, merge: Merge) -> Work:
        stage = Path(merge.stage or "/")
        return Work(key=merge.key, stage=str(stage), memory=batch.memory(stage), handle=merge.handle)

    def _answer(self, merge: Merge) -> batch.Answer | None:
        return batch.answer(Path(merge.stage), merge.key, merge.plan or "") if merge.stage else None

    def _clear(self, merge: Merge) -> None:
        shutil.rmtree(self._place(merge), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what merges left that nobody will go on with."""
        merge_scratch.sweep(self._scratch, self._store, self._clock())

    # -- what people ask

    def cancel(self, ref: str) -> list[Merge]:
        """Give up the merges of an adapter version, unpublished jobs too. Raises NotFoundError, UnreachableError."""
        ended, why = [], "somebody asked for it"
        for merge in self._store.find(ref):
            if merge.state not in {*ACTIVE, "blocked", "quarantined"}:
                continue
            if merge.state in {"submitting", "running"}:
                self._executor(merge.executor).cancel(self._work_of(merge))
            if merge.state == "publishing" and not give_up(self._jobs, merge.job or 0, "its merge was cancelled"):
                continue  # it is published, or just went on
            fresh = self._store.advance(
                merge, "cancelled", event="merge cancelled", was=merge.state, reason=why, until=None, error=None
            )
            ended += [fresh] if fresh is not None else []
        return ended

    def retry(self, ref: str) -> list[Merge]:
        """Try again what was given up, and at once what waits. Raises NotFoundError."""
        tried = []
        for merge in self._store.find(ref):
            if merge.state == "publishing":
                self._jobs.retry("id = ?", [merge.job])
            tried.append(self._store.again(merge))
        self.wake()
        self._wake_workers()
        return [merge for merge in tried if merge is not None]

    def hurry(self) -> None:
        """Try at once what waits after an error: its cause may just have been removed."""
        for merge in self._store.merges(f"state IN {ACTIVE} AND error IS NOT NULL AND until IS NOT NULL"):
            self._store.again(merge)
        self.wake()

    # -- what becomes of a failure

    def _failed(self, merge: Merge, error: errors.WeighbridgeError) -> Merge | None:
        match error:
            case errors.WithdrawnError():
                self._clear(merge)
                return self._store.advance(merge, "superseded", event="merge superseded", reason=words_of(error))
            case errors.SourceChangedError() | errors.VanishedError():
                return self._setbacks.again(merge, words_of(error))
            case errors.UnreachableError() | errors.DiskFullError() | errors.DeniedError() | errors.NotFinishedError():
                return self._setbacks.wait_for(merge, error)
            case errors.UsageError() | errors.ConflictError():
                return self._setbacks.wait_for(merge, error)  # how the cluster or the remote is set up, or another hand
            case _:
                return self._setbacks.refused(merge, error)


def _finer(merge: Merge) -> bool:
    return merge.retry == "fp32" and merge.dtype != "fp32"


def _too_coarse(finding: object) -> bool:
    """Tell whether a finer precision may mend what was found: nothing changed, or the outputs are others."""
    if not isinstance(finding, Finding):
        return False
    return finding.code == "merge-changes-nothing" or (finding.code == "merge-unproven" and "behaviour" in finding.data)
