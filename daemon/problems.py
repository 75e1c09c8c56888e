"""What keeps a passage from a clean end: every problem as an error of its own, and all of them as one."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from weighbridge.daemon.deliveries import mend
from weighbridge.daemon.folders import Folders
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobstore import JobStore
from weighbridge.daemon.mergestore import CLOSED, MergeStore
from weighbridge.registry import control, errors

_FAILED: Final = "error IS NOT NULL AND until IS NOT NULL"
_REFUSED: Final = "state IN ('blocked', 'quarantined')"


def found(
    folders: Folders, store: JobStore, merges: MergeStore, homes: Homes, source: str | None
) -> list[errors.WeighbridgeError]:
    """Return what keeps jobs, merges and deliveries from their end: errors first, then what is refused, then waits.

    `source` is the configuration that people mend. The first one gives a command its exit code.
    """
    return [
        *(_told(job.error) for job in store.jobs(_FAILED, order="updated_at")),
        *_blocked(store),
        *_roots(folders, source),
        *_merges(merges),
        *(
            errors.NotFinishedError(
                f"{waiting.path} is not finished", why=waiting.reason, fix=f"registry inspect {waiting.path}"
            )
            for waiting in folders.waiting()
        ),
        *_deliveries(store, homes),
    ]


def together(every: Sequence[errors.WeighbridgeError]) -> errors.WeighbridgeError | None:
    """Return one error that lists all of them, a line each, with the exit code of the first; None for none."""
    if len(every) < 2:
        return every[0] if every else None
    lines = [one.what + (f": {one.why}" if one.why else "") + (f"; fix: {one.fix}" if one.fix else "") for one in every]
    return type(every[0])(
        f"{len(every)} things are not done",
        why="\n".join(line.replace("\n", " ") for line in lines),
        problems=[errors.describe(one) for one in every],
    )


def _told(error: str | None) -> errors.WeighbridgeError:
    described: dict[str, Any] = msgspec.json.decode((error or "{}").encode())
    return control.rebuild(described)


def _blocked(store: JobStore) -> Iterator[errors.WeighbridgeError]:
    for job in store.jobs(_REFUSED, order="updated_at"):
        fix = next((f.fix for f in job.findings_list if f.fix), None)
        yield errors.RefusedError(f"{job.path} is {job.state}", why=job.reason, fix=fix)


def _roots(folders: Folders, source: str | None) -> Iterator[errors.WeighbridgeError]:
    for root, held in folders.roots.items():
        if held.tree.missing:
            yield errors.NotFoundError(
                f"the watched root {root} is not there",
                why="nothing under it was looked at",
                fix=f"mount it, or mend root in {source}",
            )


def _merges(merges: MergeStore) -> Iterator[errors.WeighbridgeError]:
    for merge in merges.merges(_REFUSED):
        fix = next((f.fix for f in merge.findings_list if f.fix), None)
        end = f"registryd merges --retry {merge.ref} tries it again, --cancel {merge.ref} gives it up"
        told = f"{fix}; {end}" if fix and "registryd merges" not in fix else fix or end
        yield errors.RefusedError(f"the merge of {merge.ref} is {merge.state}", why=merge.reason, fix=told)
    for merge in merges.merges(f"{_FAILED} AND state NOT IN {CLOSED}"):
        yield _told(merge.error)


def _deliveries(store: JobStore, homes: Homes) -> Iterator[errors.WeighbridgeError]:
    """Tell what is published and not yet on a mirror: refused there, without an answer, or waiting its turn."""
    for row in store.deliveries("state IN ('pending', 'waiting', 'blocked', 'diverged')"):
        ref, mirror = f"{row['name']}@v{row['n']}", str(row["remote"])
        if row["state"] in {"blocked", "diverged"}:
            refused = errors.RefusedError if row["state"] == "blocked" else errors.DivergedError
            yield refused(
                f"{ref} is published on {row['home']}, and its copy on {mirror} is {row['state']}",
                why=row["reason"],
                fix=mend(row),
            )
            continue
        health = homes.health.get(mirror)
        away = health is not None and isinstance(health.error, errors.UnreachableError)
        kind = errors.UnreachableError if away else errors.NotFinishedError
        yield kind(
            f"{ref} is published on {row['home']}, and its copy on {mirror} waits",
            why=row["reason"] or "an earlier version waits for the same mirror",
            fix="registryd once tries it again",
        )
