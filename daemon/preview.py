"""What a passage would publish: judged like the real thing, on a database in memory, and nothing is written.

The files, their sizes and what a remote's rules refuse are those of the passage itself. Adapters and models of up to
256 MB are looked at value by value; of larger ones each row says that staging does it, and what it may find.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weighbridge.adapters import run_identity, structure
from weighbridge.adapters.reading import VALUES_LIMIT
from weighbridge.config import mounts
from weighbridge.config.settings import Settings, WatchRule
from weighbridge.daemon import policy, state
from weighbridge.daemon.folders import Known, Settlement
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.intake import Intake, Judged
from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge.daemon.lock import StateLock
from weighbridge.daemon.scan import Tree
from weighbridge.registry import disk, errors
from weighbridge.registry.catalog import Catalog


def preview(settings: Settings, environ: Mapping[str, str], *, backfill: bool) -> list[dict[str, Any]]:
    """Return every artifact under the watched roots and whether a passage would publish it, in path order.

    Without `backfill` what stood there before the first start is shown as skipped. What was published already is left
    out. Quiet time is not waited for.
    """
    memory = _memory(settings)
    catalog = Catalog.open(None, durable=False)
    try:
        store = JobStore(catalog)
        trees = {rule.root: Tree(rule.root, rule.ignore) for rule in settings.watch}
        rules = {rule.root: rule for rule in settings.watch}
        intake = Intake(
            store, Homes(settings.remotes, catalog, store), rules, settings.remotes, settings.daemon,
            host="", mountinfo=mounts.read_table(environ),
            look=lambda root, path: trees[root].look(path),
            below=lambda root, path: [p for p in trees[root].candidates if p.startswith(path + "/")],
            values=VALUES_LIMIT,
        )  # fmt: skip
        for root, tree in trees.items():
            tree.scan()
            for path in sorted(tree.candidates):
                listing = tree.look(path)
                if listing is None or (path, listing.fingerprint) in memory.done:
                    continue
                here = Known(listing.fingerprint, listing.shape)
                run = run_identity.find(root, path).path
                store.settled(root, Settlement(rules[root], path, here, listing.size, marked=False), run)
        rows = _rows(store, intake, rules, lambda path, root: not backfill and memory.is_old(path, root, rules[root]))
        return sorted(rows, key=lambda row: (row["path"], row["kind"] or ""))
    finally:
        catalog.close()


def _rows(
    store: JobStore, intake: Intake, rules: Mapping[str, WatchRule], is_old: Callable[[str, str], bool]
) -> Iterator[dict[str, Any]]:
    asked: dict[int, Judged | None] = {}
    while jobs := [job for job in store.jobs("state = 'settling'", order="path, id") if job.id not in asked]:
        for job in jobs:
            reason = structure.complete(job.path, mark=False)
            try:
                judged = None if reason else intake.judge(job, rules[job.root])
            except (errors.WeighbridgeError, OSError) as error:
                reason = _told(job, error)
                store.advance(job, "blocked", reason=reason)
                judged = None
            asked[job.id] = judged if isinstance(judged, Judged) else None
            if isinstance(judged, Judged):
                continue
            if judged is None:
                store.advance(job, "blocked", reason=reason)
            yield _row(job, reason or _why(store, job))
    for job in store.jobs("state = 'settling'"):
        rule = rules[job.root]
        verdict = intake.decide(job, rule)
        if is_old(job.path, job.root):
            yield _row(job, "it was there before the daemon came (--backfill takes it)")
        elif isinstance(verdict, policy.Publish):
            yield _published(intake, job, asked[job.id], rules[job.root])
        else:
            yield _row(job, verdict.why)


def _published(intake: Intake, job: Job, judged: Judged | None, rule: WatchRule) -> dict[str, Any]:
    """Return the row of what the rule publishes, unless a rule of its remotes stands against it."""
    if judged is None:
        return _row(job, "it is not finished")
    try:
        admission = intake.admit(judged._replace(job=job), rule, hashed=False)
    except (errors.WeighbridgeError, OSError) as error:
        return _row(job, _told(job, error))
    files = [{"path": f.path, "size": admission.size_of(f), "role": f.role} for f in admission.files]
    warnings = [f for f in admission.findings if f.severity == "warn"]
    return _row(job, None) | {
        "size": admission.size,
        "files": files,
        "unread": judged.artifact.unread,
        "warnings": [{"code": f.code, "subject": f.subject, "message": f.message} for f in warnings],
    }


def _told(job: Job, error: errors.WeighbridgeError | OSError) -> str:
    """Return an error as the reason of a row; the folder may have moved on, or a file of it cannot be read."""
    told = disk.translate(error, f"{job.path} cannot be read") if isinstance(error, OSError) else error
    return told.why or told.what


def _row(job: Job, reason: str | None) -> dict[str, Any]:
    return {
        "path": job.path,
        "kind": job.kind,
        "name": job.name,
        "step": job.step,
        "size": job.size or 0,
        "publish": reason is None,
        "reason": reason,
        "files": [],
        "unread": None,
        "warnings": [],
    }


def _why(store: JobStore, job: Job) -> str:
    rows = store.skipped("path = ?", [job.path])
    return str(rows[0]["why"]) if rows else "it is not finished"


class _Memory(NamedTuple):
    """What the daemon's database tells: what was published, by path and fingerprint, and which roots it knows."""

    done: frozenset[tuple[str, str]] = frozenset()
    aside: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()

    def is_old(self, path: str, root: str, rule: WatchRule) -> bool:
        """Tell whether a folder stood there before the first start."""
        return path in self.aside or (root not in self.roots and not rule.backfill)


def _memory(settings: Settings) -> _Memory:
    """Return what an existing database tells. Raises ConflictError while a daemon works on it."""
    folder = Path(settings.daemon.state)
    if not (folder / state.DATABASE).exists():
        return _Memory()
    with StateLock(folder):
        opened = state.open_database(folder)
        try:
            jobs = opened.store.jobs("fingerprint != '' AND state IN ('done', 'superseded')")
            return _Memory(
                frozenset((job.path, job.fingerprint) for job in jobs),
                frozenset(str(row["path"]) for row in opened.store.skipped("reason = 'backfill'")),
                frozenset(opened.store.roots()),
            )
        finally:
            opened.catalog.close()
