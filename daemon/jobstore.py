"""The daemon's own tables, beside the catalogue's and on the same connection: jobs, what was set aside, deliveries.

Every change of a job is one immediate transaction that is durable when the call returns, guarded by the state the job
was in: two threads cannot both carry a job on. A row carries a seal like the catalogue's rows, so that a flipped bit in
the database is a damaged database and never a wrong version.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import layout
from weighbridge.daemon.folders import Known, Settlement
from weighbridge.daemon.records import Records, encode
from weighbridge.daemon.settle import same_shape
from weighbridge.registry import catalog_read, types

ACTIVE: Final = ("settling", "staged", "sealed", "claimed", "uploading", "committed", "announced")
"""States in which a job has something to do, in their order."""

FRESH: Final[dict[str, Any]] = {"until": None, "attempts": 0, "unexpected": 0, "error": None, "reason": None}
"""What a job that is tried anew starts with."""


LOST: Final = ("blocked", "quarantined", "vanished")
"""States of a job that publishes nothing, as things stand."""

UNPUBLISHED: Final = ("not-publishable", "max-bytes", "backfill")
"""Reasons for which an artifact itself is set aside, whatever lies beside it."""


class Job(types.Value, frozen=True):
    """One artifact of one folder on its way out; key is (path, part, fingerprint), after staging the content."""

    id: int
    root: str
    path: str
    part: str = ""
    """Empty for the only artifact of a folder, else its kind."""
    fingerprint: str = ""
    """Of the folder at rest; empty while the folder is still being written."""
    shape: str = ""
    state: str = "seen"
    was: str | None = None
    """The state in which it was blocked or quarantined."""
    run_path: str | None = None
    run_id: str | None = None
    project: str | None = None
    run: str | None = None
    home: str | None = None
    name: str | None = None
    kind: str | None = None
    step: int | None = None
    metric: float | None = None
    best_hint: int = 0
    size: int | None = None
    content: str | None = None
    bundle: str | None = None
    facts: str | None = None
    people: str | None = None
    """What people wrote into the folder's README.md."""
    manifest: str | None = None
    n: int | None = None
    claim: str | None = None
    receipt: str | None = None
    reason: str | None = None
    until: float | None = None
    """Wall-clock time before which nothing is tried again."""
    attempts: int = 0
    unexpected: int = 0
    error: str | None = None
    findings: str = "[]"
    recheck: int | None = None
    """The job whose bytes are to be compared: only change times differ."""
    late: str | None = None
    """The version of this folder that was published before."""
    created_at: float = 0.0
    updated_at: float = 0.0
    settled_at: float | None = None

    @property
    def shown(self) -> str:
        """The state people are told: `waiting` while there is a time to wait for."""
        return "waiting" if self.until is not None and self.state in ACTIVE else self.state

    @property
    def findings_list(self) -> list[types.Finding]:
        """The findings as values."""
        return msgspec.json.decode(self.findings.encode(), type=list[types.Finding])


class Due(NamedTuple):
    """A job that has something to do."""

    id: int
    path: str
    name: str | None
    state: str
    step: int | None


class Made(NamedTuple):
    """A version that a job ended in, without the job's documents: there may be thousands."""

    root: str
    home: str
    name: str
    n: int
    at: float


_COLUMNS: Final = tuple(Job.__struct_fields__)


class JobStore(Records):
    """The jobs and what was set aside; safe to use from several threads."""

    # -- jobs

    def job(self, number: int) -> Job | None:
        """Return one job."""
        return next(self._jobs("id = ?", [number]), None)

    def jobs(self, where: str = "1", arguments: Sequence[Any] = (), *, order: str = "id", limit: int = -1) -> list[Job]:
        """Return jobs by a condition of ours (never of people's)."""
        return list(self._jobs(f"{where} ORDER BY {order} LIMIT {int(limit)}", arguments))

    def _jobs(self, rest: str, arguments: Sequence[Any]) -> Iterator[Job]:
        sql = f"SELECT {','.join(_COLUMNS)},seal FROM jobs WHERE {rest}"  # noqa: S608 - names and conditions of ours
        with self._catalog.immediate() as link:
            found = link.execute(sql, tuple(arguments)).fetchall()
        for row in found:
            yield Job(**dict(zip(_COLUMNS, _checked(row), strict=False)))

    def check(self) -> None:
        """Read every job once. Raises DamagedError for one that is not what was written."""
        with self._catalog.immediate() as link:
            for row in link.execute(f"SELECT {','.join(_COLUMNS)},seal FROM jobs"):  # noqa: S608 - names of ours
                _checked(row)

    def made(self) -> list[Made]:
        """Return every version that a job ended in."""
        sql = "SELECT root, home, name, n, updated_at FROM jobs WHERE state = 'done' AND n IS NOT NULL"
        with self._catalog.immediate() as link:
            return [Made(*row) for row in link.execute(sql)]

    def recorded(self, home: str, name: str, n: int) -> str | None:
        """Return the sha256 of the manifest that a job committed as this version; None where no job did."""
        sql = (
            "SELECT receipt FROM jobs WHERE home = ? AND name = ? AND n = ? AND state = 'done' AND receipt IS NOT NULL"
        )
        with self._catalog.immediate() as link:
            row = link.execute(sql, (home, name, n)).fetchone()
        return None if row is None else str(msgspec.json.decode(row[0].encode())["manifest_sha256"])

    def runnable(self, now: float) -> list[Due]:
        """Return what has something to do now, those nearest to their end first, then by training step."""
        sql = f"SELECT id, path, name, state, step FROM jobs WHERE state IN {ACTIVE} AND (until IS NULL OR until <= ?)"  # noqa: S608
        with self._catalog.immediate() as link:
            found = [Due(*row) for row in link.execute(sql, (now,))]
        # A result without a step comes after the checkpoints, one of which it may repeat.
        return sorted(
            found, key=lambda due: (-ACTIVE.index(due.state), math.inf if due.step is None else due.step, due.id)
        )

    def next_due(self) -> float | None:
        """Return the earliest time a waiting job wants to be tried again."""
        with self._catalog.immediate() as link:
            (due,) = link.execute(f"SELECT min(until) FROM jobs WHERE state IN {ACTIVE}").fetchone()  # noqa: S608
        return due if due is None else float(due)

    def advance(self, job: Job, state: str | None = None, *, event: str | None = None, **changes: Any) -> Job | None:
        """Write a job's next state; None when another hand carried it on meanwhile."""
        with self.transaction():
            current = self.job(job.id)
            if current is None or current.state != job.state:
                return None
            fresh = msgspec.structs.replace(current, state=state or current.state, updated_at=time.time(), **changes)
            self._write(fresh)
            if event is not None:
                self.event(event, name=fresh.name, n=fresh.n, path=fresh.path, detail=fresh.reason)
            if fresh.state in LOST:
                self._give_back(fresh.path)
            return fresh

    def manifest_of(self, job: Job) -> str | None:
        """Return the manifest of a job's version as it was claimed: the sealed one, unless it joined another.

        Of a job that is done the catalogue alone keeps it.
        """
        if job.claim is not None:
            return str(msgspec.json.decode(job.claim.encode())["claim"]["manifest"])
        if job.receipt is not None:
            return self._catalog.document(str(msgspec.json.decode(job.receipt.encode())["manifest_sha256"]))
        return job.manifest

    def _write(self, job: Job) -> None:
        values = [getattr(job, column) for column in _COLUMNS]
        row = dict(zip(_COLUMNS, values, strict=True)) | {"seal": catalog_read.seal(values)}
        self._db.table("jobs").upsert(row, pk="id")

    def _insert(self, **values: Any) -> Job:
        (last,) = self._catalog.link.execute("SELECT coalesce(max(id), 0) FROM jobs").fetchone()
        now = time.time()
        job = Job(**({"id": last + 1, "created_at": now, "updated_at": now} | values))
        self._write(job)
        return job

    def split(self, job: Job, part: str) -> Job:
        """Return the job of another artifact in the same folder, made when it is new."""
        with self.transaction():
            found = self.jobs("path = ? AND part = ? AND fingerprint = ?", [job.path, part, job.fingerprint])
            if found:
                return found[0]
            return self._insert(
                root=job.root, path=job.path, part=part, fingerprint=job.fingerprint, shape=job.shape,
                state="settling", settled_at=job.settled_at, late=job.late,
            )  # fmt: skip

    def follow_up(self, **values: Any) -> Job:
        """Return the job that publishes what was made of another one's version, made when it is new."""
        with self.transaction():
            key = [values["path"], values["part"], values["fingerprint"]]
            found = self.jobs("path = ? AND part = ? AND fingerprint = ?", key)
            if found:
                return self._revive(found) or found[0]
            return self._insert(**values, state="settling", settled_at=time.time())

    def retry(self, where: str, arguments: Sequence[Any]) -> int:
        """Let jobs that were given up or wait be tried again at once; return how many."""
        count = 0
        with self.transaction():
            for job in self.jobs(where, arguments):
                state = (job.was or "settling") if job.state in {"blocked", "quarantined"} else job.state
                if state in ACTIVE and job.fingerprint:
                    again = {} if state == job.state else {"findings": "[]", "was": None}
                    self.advance(job, state, **FRESH, **again)
                    count += 1
        return count

    def prune(self, seconds: float) -> int:
        """Forget jobs that ended without a version so long ago; return how many."""
        with self.transaction():
            sql = "DELETE FROM jobs WHERE state IN ('vanished', 'superseded') AND updated_at < ?"
            return int(self._catalog.link.execute(sql, (time.time() - seconds,)).rowcount)

    # -- what the watch tells (folders.Ledger)

    def known(self, path: str) -> Known | None:
        """Return what was last settled or set aside at a path."""
        with self._catalog.immediate() as link:
            row = link.execute("SELECT fingerprint, shape FROM folders WHERE path = ?", (path,)).fetchone()
        return Known(*row) if row else None

    def seen(self, root: str, path: str) -> float:
        """Note that a folder is waited for and return the seconds since it was first."""
        with self.transaction():
            found = self.jobs("path = ? AND fingerprint = ''", [path])
            job = found[0] if found else self._insert(root=root, path=path, state="seen")
            return max(0.0, time.time() - job.created_at)

    def overdue(self, root: str, path: str, finding: types.Finding) -> None:
        """Turn a wait into a finding."""
        with self.transaction():
            self.seen(root, path)
            (job,) = self.jobs("path = ? AND fingerprint = ''", [path])
            self.advance(job, "blocked", reason=finding.message, findings=encode([finding]), event="blocked")

    def settled(self, root: str, settlement: Settlement, run_path: str | None = None) -> Job | None:
        """Take over a finished folder: a new job, or none when this very state was dealt with before."""
        path, known = settlement.path, settlement.known
        now = time.time()
        with self.transaction():
            self._drop_seen(path)
            before = self.known(path)
            self._remember(root, path, known, settlement.size, now)
            same = self.jobs("path = ? AND fingerprint = ?", [path, known.fingerprint], order="id DESC")
            if same:
                return self._revive(same)
            # What has a private copy goes on: those bytes were whole too.
            for job in self.jobs("path = ? AND state IN ('settling', 'blocked', 'quarantined')", [path]):
                if job.n is None:
                    self.advance(job, "superseded", event="superseded", reason="the folder changed", until=None)
            self._catalog.link.execute("DELETE FROM skipped WHERE path = ?", (path,))
            done = self.jobs("path = ? AND state = 'done'", [path], order="settled_at DESC, id DESC", limit=1)
            late = f"{done[0].name}@v{done[0].n}" if done else None
            touched = done[0].id if done and before is not None and same_shape(before.shape, known.shape) else None
            return self._insert(
                root=root, path=path, fingerprint=known.fingerprint, shape=known.shape, state="settling",
                settled_at=now, late=late, recheck=touched, run_path=run_path,
                step=layout.step_of(path.rpartition("/")[2]),
            )  # fmt: skip

    def _revive(self, same: Sequence[Job]) -> Job | None:
        for job in same:
            if job.state in {"vanished", "superseded"}:
                return self.advance(job, "settling", **FRESH)
        return None

    def gone(self, path: str) -> None:
        """Note that a folder vanished: what was not staged yet ends here, what was goes on from its own copy."""
        with self.transaction():
            self._drop_seen(path)
            self._catalog.link.execute("DELETE FROM folders WHERE path = ?", (path,))
            self._catalog.link.execute("DELETE FROM skipped WHERE path = ?", (path,))
            if not self.jobs("path = ? AND state != 'superseded'", [path], limit=1):
                self._give_back(path)
            for job in self.jobs("path = ? AND state IN ('settling', 'blocked', 'quarantined')", [path]):
                if job.n is None:
                    self.advance(job, "vanished", event="vanished", reason="the folder is gone", until=None)

    def _drop_seen(self, path: str) -> None:
        self._catalog.link.execute("DELETE FROM jobs WHERE path = ? AND fingerprint = ''", (path,))

    def _remember(self, root: str, path: str, known: Known, size: int, at: float) -> None:
        row = {"path": path, "root": root, "fingerprint": known.fingerprint, "shape": known.shape}
        self._db.table("folders").upsert(row | {"size": size, "at": at}, pk="path")

    def roots(self) -> list[str]:
        """Return the roots that were scanned before."""
        with self._catalog.immediate() as link:
            return [root for (root,) in link.execute("SELECT root FROM roots")]

    def baseline(
        self,
        root: str,
        standing: Mapping[str, tuple[Known, int]],
        run_of: Callable[[str], str | None] = lambda _path: None,
    ) -> None:
        """Note a root's first scan, and set aside what stood there; `run_of` tells the run of a path."""
        now = time.time()
        with self.transaction():
            self._db.table("roots").upsert({"root": root, "since": now}, pk="root")
            for path, (known, size) in standing.items():
                self._remember(root, path, known, size, now)
                row = _skip(path, "", root, known, "backfill", "it was there before the daemon came", size, now)
                self._db.table("skipped").upsert(row | {"run_path": run_of(path)}, pk=("path", "part"))

    # -- what is not published

    def skip(self, job: Job, reason: str, why: str) -> None:
        """Set an artifact aside: the rule does not publish it."""
        with self.transaction():
            known = Known(job.fingerprint, job.shape)
            row = _skip(job.path, job.part, job.root, known, reason, why, job.size or 0, time.time())
            facts = {k: getattr(job, k) for k in ("run_path", "kind", "step", "metric", "best_hint")}
            self._db.table("skipped").upsert(row | facts, pk=("path", "part"))
            self._catalog.link.execute("DELETE FROM jobs WHERE id = ? AND state = 'settling'", (job.id,))
            self.event("skipped", name=job.name, path=job.path, detail=why)
            if reason in UNPUBLISHED:
                self._give_back(job.path)

    def lost(self, path: str) -> bool:
        """Tell whether what was seen last at a path is published by nobody, as things stand."""
        aside = self.skipped("path = ?", [path])
        jobs = self.jobs("path = ? AND state != 'superseded'", [path], order="id DESC")
        newest = aside[0]["fingerprint"] if aside else jobs[0].fingerprint if jobs else None
        states = {job.state for job in jobs if job.fingerprint == newest}
        return newest is not None and states <= set(LOST) and {row["reason"] for row in aside} <= set(UNPUBLISHED)

    def _give_back(self, path: str) -> None:
        """Judge again what was set aside in favour of a running average that is lost."""
        folder, _, name = path.rpartition("/")
        raw = layout.raw_of(name)
        if raw is not None:
            self.unskip("reason = 'averaged' AND path = ?", [f"{folder}/{raw}"])

    def skipped(self, where: str = "1", arguments: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return what was set aside, by a condition of ours."""
        with self._catalog.immediate():
            return list(self._db.table("skipped").rows_where(where, list(arguments), order_by="path"))

    def forget_old(self, where: str = "1", arguments: Sequence[Any] = ()) -> list[str]:
        """Forget what was set aside at the first scan, so that the watch judges it anew; return the paths."""
        with self.transaction():
            paths = [str(row["path"]) for row in self.skipped(f"reason = 'backfill' AND ({where})", arguments)]
            for path in paths:
                self._catalog.link.execute("DELETE FROM skipped WHERE path = ?", (path,))
                self._catalog.link.execute("DELETE FROM folders WHERE path = ?", (path,))
            return paths

    def unskip(self, where: str, arguments: Sequence[Any] = ()) -> int:
        """Take up again what was set aside; return how many."""
        with self.transaction():
            rows = self.skipped(where, arguments)
            for row in rows:
                self._catalog.link.execute(
                    "DELETE FROM skipped WHERE path = ? AND part = ?", (row["path"], row["part"])
                )
                if not self.jobs(
                    "path = ? AND part = ? AND fingerprint = ?", [row["path"], row["part"], row["fingerprint"]]
                ):
                    self._insert(
                        root=row["root"], path=row["path"], part=row["part"], fingerprint=row["fingerprint"],
                        shape=row["shape"], state="settling", settled_at=row["at"], run_path=row["run_path"],
                        step=layout.step_of(row["path"].rpartition("/")[2]),
                    )  # fmt: skip
            return len(rows)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state people are told."""
        with self._catalog.immediate() as link:
            rows = link.execute(
                f"SELECT CASE WHEN until IS NOT NULL AND state IN {ACTIVE} THEN 'waiting' ELSE state END, count(*)"  # noqa: S608
                " FROM jobs GROUP BY 1"
            ).fetchall()
        return {str(state): int(count) for state, count in rows}


def _checked(row: tuple[Any, ...]) -> tuple[Any, ...]:
    if catalog_read.seal(row[:-1]) != row[-1]:
        raise catalog_read.DamagedError(f"the row of job {row[0]} is not what was written")
    return row


def _skip(  # noqa: PLR0917 - the columns, in their order
    path: str, part: str, root: str, known: Known, reason: str, why: str, size: int, at: float
) -> dict[str, Any]:
    return {
        "path": path, "part": part, "root": root, "fingerprint": known.fingerprint, "shape": known.shape,
        "reason": reason, "why": why, "size": size, "at": at,
        "run_path": None, "kind": None, "step": None, "metric": None, "best_hint": 0,
    }  # fmt: skip
