"""The merges that rules chose, in the daemon's database: what each waits for, who makes it, under which number.

    wanted -> submitting -> running -> merged -> publishing -> done

Beside the line lie blocked (with a finding), quarantined, cancelled and superseded. As for jobs, every change is one
transaction that is durable when the call returns and guarded by the state it was decided on; a row carries a seal.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from weighbridge.daemon.jobstore import FRESH, Job
from weighbridge.daemon.records import Records
from weighbridge.registry import catalog_read, errors, refs, types

ACTIVE: Final = ("wanted", "submitting", "running", "merged", "publishing")
"""States in which a merge has something to do or to wait for."""

CLOSED: Final = ("blocked", "quarantined", "cancelled")
"""States that end only when somebody asks for another try."""


class Merge(types.Value, frozen=True):
    """One adapter version on its way to a merged model; there is one for each (home, name, n)."""

    id: int
    home: str
    name: str
    n: int
    root: str
    path: str
    """The folder the adapter came from."""
    run_path: str | None = None
    run_id: str | None = None
    project: str | None = None
    run: str | None = None
    step: int | None = None
    metric: float | None = None
    best_hint: int = 0
    choice: str = "all"
    """The word of the rule that chose it: best, last or all."""
    dtype: str = "bf16"
    retry: str = "never"
    state: str = "wanted"
    was: str | None = None
    base_id: str | None = None
    base_revision: str | None = None
    base_path: str | None = None
    base_ref: str | None = None
    """The base as lineage names it; never a path."""
    base_content: str | None = None
    derivation: str | None = None
    plan: str | None = None
    stage: str | None = None
    executor: str | None = None
    tries: int = 0
    """Submissions so far: the try's number is part of its key."""
    handle: str | None = None
    """What the executor calls it: Slurm's job id."""
    host: str | None = None
    submitted_at: float | None = None
    finished: int = 0
    """Files that were finished when it was submitted last."""
    barren: int = 0
    """Tries in a row that finished no file."""
    job: int | None = None
    merged_name: str | None = None
    merged_n: int | None = None
    reason: str | None = None
    until: float | None = None
    """Wall-clock time before which nothing is tried again."""
    attempts: int = 0
    unexpected: int = 0
    error: str | None = None
    findings: str = "[]"
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def ref(self) -> str:
        """The adapter version."""
        return f"{self.name}@v{self.n}"

    @property
    def key(self) -> str:
        """The idempotency key of the present try: the same for whoever submits it, and never used again."""
        return f"{(self.plan or '')[:16]}-{self.tries}"

    @property
    def shown(self) -> str:
        """The state people are told: `waiting` while there is a time to wait for."""
        return "waiting" if self.until is not None and self.state in _WAITING else self.state

    @property
    def findings_list(self) -> list[types.Finding]:
        """The findings as values."""
        return msgspec.json.decode(self.findings.encode(), type=list[types.Finding])


_WAITING: Final = ("wanted", "submitting", "merged")
"""States in which a time to wait for is a wait for something outside."""

_COLUMNS: Final = tuple(Merge.__struct_fields__)


class MergeStore(Records):
    """The merges; safe to use from several threads."""

    def merges(self, where: str = "1", arguments: Sequence[Any] = (), *, limit: int = -1) -> list[Merge]:
        """Return merges by a condition of ours (never of people's), the oldest first."""
        sql = f"SELECT {','.join(_COLUMNS)},seal FROM merges WHERE {where} ORDER BY id LIMIT {int(limit)}"  # noqa: S608 - names and conditions of ours
        with self._catalog.immediate() as link:
            rows = link.execute(sql, tuple(arguments)).fetchall()
        return [Merge(**dict(zip(_COLUMNS, _checked(row), strict=False))) for row in rows]

    def merge(self, number: int) -> Merge | None:
        """Return one merge."""
        return next(iter(self.merges("id = ?", [number])), None)

    def of_job(self, job: int) -> Merge | None:
        """Return the merge whose result a job publishes."""
        return next(iter(self.merges("job = ?", [job])), None)

    def find(self, ref: str) -> list[Merge]:
        """Return the merges that people mean by name@v7, or by a name of which one version has one that is not over.

        Raises UsageError for what is no such name, and for a name of several versions; NotFoundError for one of none.
        """
        name, n, _tag, digest = refs.split(ref)
        if name is None or digest is not None or ":" in ref:
            fix = f"write {name or 'NAME'}@vN: registryd merges lists them"
            raise errors.UsageError(f"'{refs.shown(ref)}' names no version by its number", fix=fix)
        of_name = self.merges("name = ?", [name])
        if n is not None:
            found = [merge for merge in of_name if merge.n == n]
        else:
            found = [merge for merge in of_name if merge.state not in {"done", "superseded"}]
            versions = sorted({merge.ref for merge in found})
            if len(versions) > 1:
                fix = "name one of them"
                raise errors.UsageError(f"several versions of {name} have merges", why=", ".join(versions), fix=fix)
        if found:
            return found
        others = ", ".join(f"{merge.ref} ({merge.state})" for merge in of_name[:8])
        raise errors.NotFoundError(
            f"there is no merge of {ref}" if n is not None else f"no merge of {name} waits or was refused",
            why=f"of this name there are {others}" if others else "no rule asked for one of this name",
            fix="registryd merges lists them",
        )

    def active(self) -> list[Merge]:
        """Return what has something to do or to wait for."""
        return self.merges(f"state IN {ACTIVE}")

    def want(self, job: Job, choice: str, dtype: str, retry: str) -> Merge | None:
        """Note that a published adapter is to be merged; None when that was noted before.

        `best` and `last` are about the newest: what was chosen in the same way for this name and has not begun gives
        way.
        """
        with self.transaction():
            if self.merges("home = ? AND name = ? AND n = ?", [job.home, job.name, job.n]):
                return None
            if choice != "all":
                where = "home = ? AND name = ? AND choice = ? AND state = 'wanted'"
                for older in self.merges(where, [job.home, job.name, choice]):
                    why = f"v{job.n} is the {choice} of the run by now"
                    self.advance(older, "superseded", event="merge superseded", reason=why, until=None)
            (last,) = self._catalog.link.execute("SELECT coalesce(max(id), 0) FROM merges").fetchone()
            now = time.time()
            merge = Merge(
                id=last + 1, home=job.home or "", name=job.name or "", n=job.n or 0, root=job.root, path=job.path,
                run_path=job.run_path, run_id=job.run_id, project=job.project, run=job.run,
                step=job.step, metric=job.metric, best_hint=job.best_hint,
                choice=choice, dtype=dtype, retry=retry, created_at=now, updated_at=now,
            )  # fmt: skip
            self._write(merge)
            self.event("merge wanted", name=merge.name, n=merge.n, path=merge.path, detail=f"merge = {choice}, {dtype}")
            return merge

    def advance(
        self, merge: Merge, state: str | None = None, *, event: str | None = None, **changes: Any
    ) -> Merge | None:
        """Write a merge's next state; None when another hand carried it on meanwhile."""
        with self.transaction():
            current = self.merge(merge.id)
            if current is None or current.state != merge.state:
                return None
            fresh = msgspec.structs.replace(current, state=state or current.state, updated_at=time.time(), **changes)
            if event is None and msgspec.structs.replace(fresh, updated_at=current.updated_at) == current:
                return current  # a look that saw nothing new costs no write
            self._write(fresh)
            if event is not None:
                detail = fresh.reason or (f"job {fresh.handle}" if fresh.executor == "slurm" else None)
                self.event(event, name=fresh.name, n=fresh.n, path=fresh.path, detail=detail)
            return fresh

    def again(self, merge: Merge) -> Merge | None:
        """Let a merge that was given up, or waits, be tried at once, from the beginning of its line."""
        state = "wanted" if merge.state in CLOSED else merge.state
        fresh = FRESH | {"barren": 0, "was": None, "findings": "[]"}
        event = "merge wanted" if state != merge.state else None
        return self.advance(merge, state, event=event, **fresh)

    def counts(self) -> dict[str, int]:
        """Return how many merges are in each state."""
        with self._catalog.immediate() as link:
            return {str(state): int(n) for state, n in link.execute("SELECT state, count(*) FROM merges GROUP BY 1")}

    def check(self) -> None:
        """Read every merge once. Raises DamagedError for one that is not what was written."""
        self.merges()

    def _write(self, merge: Merge) -> None:
        values = [getattr(merge, column) for column in _COLUMNS]
        row = dict(zip(_COLUMNS, values, strict=True)) | {"seal": catalog_read.seal(values)}
        self._db.table("merges").upsert(row, pk="id")

    # -- bases

    def content_of(self, path: str, stamp: str, work_out: Callable[[], str]) -> str:
        """Return the content of a base folder, worked out when its files are not those that were hashed before."""
        with self._catalog.immediate() as link:
            row = link.execute("SELECT content FROM bases WHERE path = ? AND stamp = ?", (path, stamp)).fetchone()
        if row is not None:
            return str(row[0])
        content = work_out()
        with self.transaction():
            self._db.table("bases").upsert({"path": path, "stamp": stamp, "content": content}, pk="path")
        return content


def _checked(row: tuple[Any, ...]) -> tuple[Any, ...]:
    if catalog_read.seal(row[:-1]) != row[-1]:
        raise catalog_read.DamagedError(f"the row of merge {row[0]} is not what was written")
    return row
