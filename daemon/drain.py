"""Is everything under a path published? For Slurm epilogs and pod pre-stop hooks, which must not lose a checkpoint.

Drained means: a scan begun after the question found every folder under the path at rest, and the home remote has
confirmed each artifact in them, but for what the rule itself does not publish. A blocked artifact is no success.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from weighbridge.daemon.folders import Folders
from weighbridge.daemon.jobstore import ACTIVE, JobStore
from weighbridge.registry import control, errors

PACE: Final = 0.5
"""Seconds between two questions."""


class Asked(NamedTuple):
    """A drain under way: what was known of scans when it was asked for."""

    path: str
    scans: dict[str, int]


def begin(folders: Folders, store: JobStore, path: str) -> Asked:
    """Take up what was set aside as old under a path, and ask for a scan. Raises UsageError for a foreign path."""
    inside = [root for root in folders.roots if _overlap(path, root)]
    if not inside:
        raise errors.UsageError(
            f"{path} is not watched",
            why=f"watched are {', '.join(folders.roots)}" if folders.roots else "no folder is watched",
            fix="name a folder under a watched root",
        )
    for old in store.forget_old("path = ? OR path LIKE ? ESCAPE '\\'", [path, _like(path)]):
        folders.reconsider(old)
    # A scan that is under way may have passed the path already, so the one after it counts.
    asked = Asked(path, {root: folders.roots[root].scanning + folders.roots[root].scans for root in inside})
    folders.request_scan(full=True)
    return asked


def standing(folders: Folders, store: JobStore, asked: Asked) -> dict[str, Any]:
    """Return how far a drain is: done, what is still waited for, and what is blocked."""
    path = asked.path
    scanned = all(folders.roots[root].scans > count for root, count in asked.scans.items() if root in folders.roots)
    under, arguments = "(path = ? OR path LIKE ? ESCAPE '\\')", [path, _like(path)]
    # Asked in the order in which a folder goes on while we ask: found, looked at and waited for, a job, done.
    found = folders.unlooked(path)
    unfinished = [{"path": w.path, "reason": w.reason} for w in folders.unsettled(path)]
    unseen = [p for p in found if not any(w["path"] == p for w in unfinished)]
    jobs = [
        {"path": job.path, "state": job.shown, "reason": job.reason or job.state, "name": job.name}
        for job in store.jobs(f"state IN {ACTIVE} AND {under}", arguments)
    ]
    closed = [
        {"path": job.path, "state": job.state, "reason": job.reason, "name": job.name}
        for job in store.jobs(f"state IN ('blocked', 'quarantined') AND fingerprint != '' AND {under}", arguments)
    ]
    done = store.jobs(f"state = 'done' AND {under}", arguments)
    return {
        "done": scanned and not unfinished and not unseen and not jobs,
        "waiting": [*unfinished, *({"path": p, "reason": "not looked at yet"} for p in unseen), *jobs],
        "blocked": closed,
        "published": sorted({f"{job.name}@v{job.n}" for job in done}),
        "skipped": len(store.skipped(under, arguments)),
    }


class Drains:
    """The drains that were asked for over the socket, by a token that the asker keeps."""

    def __init__(self) -> None:
        self._asked: dict[str, Asked] = {}

    def answer(self, folders: Folders, store: JobStore, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a drain, or tell how the one of a token stands."""
        path = str(args.get("path") or "")
        if not path.startswith("/"):
            raise errors.UsageError("a drain needs an absolute path")
        token = str(args.get("token") or "")
        asked = self._asked.get(token)
        if asked is None:
            token = f"{time.monotonic_ns():x}"
            asked = begin(folders, store, os.path.normpath(path))
            while len(self._asked) > 100:
                self._asked.pop(next(iter(self._asked)))
            self._asked[token] = asked
        return {"token": token} | standing(folders, store, asked)


def by_socket(
    socket: str, path: str, deadline: float, *, said: Callable[[dict[str, Any]], None] = lambda _answer: None
) -> dict[str, Any]:
    """Ask a running daemon until a path is drained or the seconds are over; return its last answer.

    A daemon that restarts meanwhile is asked anew. Raises UnreachableError when none answers at the first question.
    """
    end = time.monotonic() + deadline
    answer: dict[str, Any] = control.ask(socket, "drain", {"path": path}, timeout=30.0)
    while not answer["done"] and time.monotonic() < end:
        said(answer)
        time.sleep(min(PACE, max(0.0, end - time.monotonic())))
        try:
            answer = control.ask(socket, "drain", {"path": path, "token": answer["token"]}, timeout=30.0)
        except errors.UnreachableError:
            continue
    return answer


def verdict(answer: Mapping[str, Any], path: str, deadline: float) -> None:
    """Raise NotFinishedError when the deadline passed, RefusedError when something is blocked; else return."""
    if not answer["done"]:
        first = answer["waiting"][0] if answer["waiting"] else {"path": path, "reason": "the scan has not ended"}
        more = len(answer["waiting"]) - 1
        raise errors.NotFinishedError(
            f"{path} is not drained after {deadline:.0f} s",
            why=f"{first['path']}: {first['reason']}" + (f", and {more} more" if more > 0 else ""),
            fix="registry status shows what is waited for; give it more time with --deadline",
            waiting=answer["waiting"],
            blocked=answer["blocked"],
        )
    if answer["blocked"]:
        first = answer["blocked"][0]
        raise errors.RefusedError(
            f"{len(answer['blocked'])} of the artifacts under {path} cannot be published",
            why=f"{first['path']}: {first['reason']}",
            fix="registry status shows each with its fix",
            blocked=answer["blocked"],
        )


def _overlap(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/") or root.startswith(path.rstrip("/") + "/")


def _like(path: str) -> str:
    plain = path.rstrip("/").replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"{plain}/%"
