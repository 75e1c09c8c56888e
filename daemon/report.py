"""What `registry status` shows, as one JSON object (docs/schemas/status.schema.json), and its exported copies.

The copy beside the socket has the socket's readers; it lets people see how things stood when the daemon is down.
"""

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge import __version__
from weighbridge.config.settings import Settings
from weighbridge.daemon import state
from weighbridge.daemon.deliveries import mend
from weighbridge.daemon.folders import Folders
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobstore import ACTIVE, Job, JobStore
from weighbridge.daemon.mergestore import Merge, MergeStore
from weighbridge.daemon.upkeep import UNPROVEN
from weighbridge.registry import findings
from weighbridge.registry.times import spelled
from weighbridge.registry.types import Finding

SCHEMA: Final = "weighbridge/status/1"
EXPORT: Final = "status.json"
LISTED: Final = 200
"""Jobs and folders of a kind that are listed one by one; the counts are always whole."""


def status(
    settings: Settings,
    folders: Folders,
    homes: Homes,
    store: JobStore,
    merges: MergeStore,
    *,
    started: float,
    trouble: str | None,
    extra: Iterable[Finding] = (),
) -> dict[str, Any]:
    """Return how everything stands now."""
    now = time.time()
    waiting = folders.waiting()
    counts = store.counts()
    counts.pop("seen", None)
    counts["unfinished"] = len(waiting)
    counts["skipped"] = len(store.skipped())
    active = store.jobs(f"state IN {ACTIVE}", limit=LISTED, order="updated_at DESC")
    closed = store.jobs("state IN ('blocked', 'quarantined')", limit=LISTED, order="updated_at DESC")
    drifted = store.jobs("state = 'done' AND findings LIKE '%source-drift%'", limit=LISTED, order="updated_at DESC")
    database = Path(settings.daemon.state, state.DATABASE)
    merging = merges.merges("state NOT IN ('done', 'superseded')", limit=LISTED)
    return {
        "schema": SCHEMA,
        "written_at": spelled(now),
        "daemon": {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
            "started_at": spelled(started),
            "uptime_seconds": round(now - started),
            "config": settings.source,
        },
        "database": {
            "path": str(database),
            "ok": trouble is None,
            "error": trouble,
            "bytes": sum(part.stat().st_size for part in database.parent.glob(f"{state.DATABASE}*") if part.is_file()),
        },
        "watch": [_root(folders, root) for root in folders.roots],
        "scan": _scan(folders),
        "queue": counts,
        "folders": [
            {"path": w.path, "reason": w.reason, "seconds": round(w.seconds, 1), "overdue": w.overdue}
            for w in waiting[:LISTED]
        ],
        "jobs": [_job(job) for job in active],
        "remotes": [_remote(settings, homes, name) for name in settings.remotes],
        "deliveries": _deliveries(store),
        "merges": {
            "counts": merges.counts(),
            "executor": settings.merge.executor,
            "listed": [merge_row(m) for m in merging],
        },
        "skipped": _skipped(store),
        "problems": [
            *(_finding(f) for f in (*extra, *_watch_findings(folders), *_remote_findings(settings, homes))),
            *(problem for job in (*closed, *drifted) for problem in problems(job)),
            *(held_up(job) for job in active if job.until is not None and job.error is not None),
            *(problem for merge in merging for problem in _merge_problems(merge)),
            *undelivered(store, homes),
            *_damaged(store),
        ],
    }


def export(document: dict[str, Any], folder: Path, beside: Path) -> None:
    """Write the copies for `registry status` while the daemon is down. Raises OSError."""
    state.write(folder / EXPORT, document, durable=False)
    if beside != folder:
        state.write(beside / EXPORT, document, mode=0o640, durable=False)


def _root(folders: Folders, root: str) -> dict[str, Any]:
    held = folders.roots[root]
    mode = folders.mode(root)
    return {
        "root": root,
        "mode": mode.kind,
        "why": mode.reason,
        "missing": held.tree.missing,
        "folders": len(held.tree.candidates),
        "last_scan_at": None if held.at is None else spelled(held.at),
        "last_scan_seconds": round(held.duration, 4),
        "scans": held.scans,
    }


def _scan(folders: Folders) -> dict[str, Any] | None:
    if folders.full_seconds is None:
        return None
    return {"seconds": round(folders.full_seconds, 4), "folders": folders.count, "overflows": folders.hints.overflows}


def _job(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "path": job.path,
        "name": job.name,
        "n": job.n,
        "kind": job.kind,
        "step": job.step,
        "state": job.shown,
        "at": job.state,
        "reason": job.reason,
        "until": None if job.until is None else spelled(job.until),
        "size": job.size,
        "content": job.content,
        "attempts": job.attempts,
        "updated_at": spelled(job.updated_at),
    }


def _remote(settings: Settings, homes: Homes, name: str) -> dict[str, Any]:
    health = homes.health[name]
    return {
        "name": name,
        "url": settings.remotes[name].url,
        "ok": health.ok,
        "milliseconds": None if health.seconds is None else round(health.seconds * 1000, 1),
        "asked_at": None if health.at is None else spelled(health.at),
        "error": None if health.error is None else health.error.what,
        "why": None if health.error is None else health.error.why,
    }


def merge_row(merge: Merge) -> dict[str, Any]:
    """Return what people are told of a merge."""
    return {
        "ref": merge.ref,
        "base": merge.base_ref or merge.base_id,
        "result": merge.merged_name,
        "n": merge.merged_n,
        "dtype": merge.dtype,
        "state": merge.shown,
        "executor": merge.executor,
        "job": merge.handle,
        "tries": merge.tries,
        "reason": merge.reason,
        "until": None if merge.until is None else spelled(merge.until),
        "updated_at": spelled(merge.updated_at),
    }


def _merge_problems(merge: Merge) -> list[dict[str, Any]]:
    place = {"path": merge.path, "name": merge.name, "n": merge.n, "since": spelled(merge.updated_at)}
    if merge.state in {"blocked", "quarantined"}:
        return [_finding(f, **place, state=merge.state) for f in merge.findings_list]
    if merge.error is None:
        return []
    fix = msgspec.json.decode(merge.error.encode()).get("fix")
    found = findings.finding("merge-waits", merge.ref, merge.reason or "it waits", fix)
    return [_finding(found, **place, state="waiting")]


def _deliveries(store: JobStore) -> list[dict[str, Any]]:
    keys = ("remote", "name", "n", "state", "reason", "attempts")
    return [{key: row[key] for key in keys} for row in store.deliveries("state != 'done'")][:LISTED]


def undelivered(store: JobStore, homes: Homes) -> list[dict[str, Any]]:
    """Return what `status` tells of copies that a mirror refuses: the first of each cause, for all of them.

    One that waits for a mirror that does not answer is told of with that mirror.
    """
    first: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in store.deliveries("state IN ('waiting', 'blocked') AND reason IS NOT NULL"):
        first.setdefault((row["remote"], row["state"], row["reason"]), row)
    return [
        _finding(
            findings.finding(
                "mirror-waits" if row["state"] == "waiting" else "mirror-refuses", remote, row["reason"], mend(row)
            ),
            name=row["name"], n=row["n"], since=spelled(row["updated_at"]), state=row["state"],
        )
        for (remote, _, _), row in first.items()
        if row["state"] == "blocked" or (health := homes.health.get(remote)) is None or health.error is None
    ]  # fmt: skip


def _skipped(store: JobStore) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    size = 0
    for row in store.skipped():
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
        size += int(row["size"])
    return {"reasons": reasons, "bytes": size}


def _finding(finding: Finding, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(finding)
    return {"path": None, "name": None, "n": None, "since": None} | told | more


def problems(job: Job) -> list[dict[str, Any]]:
    """Return what `status` tells of a job that is blocked, and of drifted bytes of one that is done."""
    place = {"path": job.path, "name": job.name, "n": job.n, "since": spelled(job.updated_at), "state": job.state}
    wanted = job.findings_list if job.state != "done" else [f for f in job.findings_list if f.code == "source-drift"]
    return [_finding(f, **place) for f in wanted]


def held_up(job: Job) -> dict[str, Any]:
    """Return what `status` tells of a job that failed and waits for its next try."""
    described = msgspec.json.decode((job.error or "{}").encode())
    finding = Finding(
        code=str(described.get("code", "failed")),
        severity="warn",
        subject=job.path,
        message=job.reason or "it waits",
        fix=described.get("fix"),
    )
    return _finding(finding, path=job.path, name=job.name, n=job.n, since=spelled(job.updated_at), state="waiting")


def _damaged(store: JobStore) -> list[dict[str, Any]]:
    """Return what the looks at published versions found; of those that proved nothing one stands for all of a home."""
    told: list[dict[str, Any]] = []
    unproven: dict[str, list[dict[str, Any]]] = {}
    for row in store.verifications("findings != '[]'"):
        for finding in msgspec.json.decode(row["findings"].encode(), type=list[Finding]):
            kept = told if finding.code != UNPROVEN else unproven.setdefault(row["home"], [])
            kept.append(_finding(finding, name=row["name"], n=row["n"], since=spelled(row["at"])))
    for first, *others in unproven.values():
        more = f"; so it was with {len(others)} more version{'s' if len(others) > 1 else ''}" if others else ""
        told.append(first | {"message": first["message"] + more})
    return told


def _watch_findings(folders: Folders) -> list[Finding]:
    found = []
    for root, held in folders.roots.items():
        mode = folders.mode(root)
        if held.tree.missing:
            found.append(findings.finding("root-missing", root, f"the watched root {root} is not there", "mount it"))
        if mode.kind == "scan" and mode.reason and "inotify" in mode.reason:
            found.append(
                findings.finding(
                    "watch-limit", root, f"{root} is scanned only: {mode.reason}", "raise the limit with sysctl"
                )
            )
        for path, why in list(held.tree.unreadable.items())[:LISTED]:
            fix = "let the daemon's user read it"
            found.append(findings.finding("folder-unreadable", path, f"{path} cannot be read: {why}", fix))
        for path in held.tree.unnamed[:LISTED]:
            fix = "rename it; what lies under it is not published"
            found.append(findings.finding("folder-unreadable", path, f"the name of {path} is not UTF-8", fix))
    return found


def _remote_findings(settings: Settings, homes: Homes) -> list[Finding]:
    found = []
    for name in settings.remotes:
        error = homes.health[name].error
        if error is not None:
            why = f": {error.why}" if error.why else ""
            found.append(findings.finding("remote-unreachable", name, error.what + why, error.fix))
    return found
