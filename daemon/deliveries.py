"""Versions on their way to mirrors: one row per version and mirror, in number order, each tried until it is there.

A mirror that is down for a week changes nothing at home. A mirror that is stricter than the seal, or that holds
something else, is told as such and never forced.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobs import delay
from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry import errors
from weighbridge.registry.flow.mirror import deliver, refused
from weighbridge.registry.flow.pull import checked_manifest

_log = logging.getLogger(__name__)


class Deliveries:
    """Carries versions to mirrors; one thread calls `step`."""

    def __init__(
        self,
        store: JobStore,
        homes: Homes,
        remotes: Mapping[str, RemoteSettings],
        scratch: Path,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._homes = homes
        self._remotes = remotes
        self._scratch = scratch
        self._clock = clock

    def pending(self) -> bool:
        """Tell whether there is a delivery that could be tried now."""
        now = self._clock()
        rows = self._store.deliveries("state IN ('pending', 'waiting')")
        return any(row["until"] is None or row["until"] <= now for row in rows)

    def step(self) -> bool:
        """Carry one delivery; return whether there was one that could be tried."""
        held: set[tuple[str, str]] = set()
        rows = self._store.deliveries("state IN ('pending', 'waiting')")
        newest: dict[tuple[str, str], int] = {}
        for row in rows:
            line = (row["remote"], row["name"])
            newest[line] = max(newest.get(line, 0), row["n"])
        for row in rows:
            line = (row["remote"], row["name"])
            if row["n"] < newest[line] and self._remotes[row["remote"]].mirror == "latest-only":
                self._note(row, "skipped", f"v{newest[line]} is waiting, and this mirror takes the latest only")
                return True
            if line in held:
                continue  # an earlier number of this name is still waiting for this mirror
            if row["until"] is not None and row["until"] > self._clock():
                held.add(line)
                continue
            self._carry(row)
            return True
        return False

    def _carry(self, row: dict[str, Any]) -> None:
        remote, name, n = str(row["remote"]), str(row["name"]), int(row["n"])
        try:
            home, mirror = self._homes.get(str(row["home"])), self._homes.get(remote)
            manifest = checked_manifest(home.remote, name, n)
            refusal = refused(home.remote, mirror.remote, name, n, manifest, settings=self._remotes[remote])
            if refusal is not None:
                self._note(row, "blocked", f"{refusal.why}; {refusal.fix}")
                return
            mirror.confirm()
            done = deliver(
                home.remote, mirror.remote, name, n,
                mirror_name=remote, registry=mirror.registry, scratch=self._scratch,
            )  # fmt: skip
        except errors.DivergedError as error:
            self._note(row, "diverged", f"{error.what}: {error.why}")
        except (errors.WithdrawnError, errors.MissingError) as error:
            self._note(row, "skipped", error.what)
        except errors.WeighbridgeError as error:
            why = f"{error.what} ({error.why})" if error.why else error.what
            if not _passes(error):
                self._note(row, "blocked", why)
                return
            self._homes.failed(remote, error)
            until = self._clock() + delay(error, row["attempts"], random.random())  # noqa: S311 - jitter
            self._store.delivered(
                remote, name, n, state="waiting", reason=why, until=until, attempts=row["attempts"] + 1
            )
        else:
            receipt = msgspec.json.encode(done).decode()
            self._store.delivered(remote, name, n, state="done", reason=None, until=None, receipt=receipt)
            self._store.event("delivered", name=name, n=n, detail=remote)

    def _note(self, row: dict[str, Any], state: str, why: str) -> None:
        name, n, remote = str(row["name"]), int(row["n"]), str(row["remote"])
        _log.warning("a delivery ended", extra={"ref": f"{name}@v{n}", "mirror": remote, "state": state, "why": why})
        self._store.delivered(remote, name, n, state=state, reason=why, until=None)
        self._store.event(state, name=name, n=n, detail=f"{remote}: {why}")


def mend(row: Mapping[str, Any]) -> str:
    """Return the command that says what stands in the way of a delivery, and makes it where nothing does any more."""
    return f"registry mirror {row['name']}@v{row['n']} --to {row['remote']} says what is in the way"


def _passes(error: errors.WeighbridgeError) -> bool:
    """Tell whether another try can help: what passes by itself, or is mended without the daemon."""
    if isinstance(error, errors.UsageError | errors.NotFoundError):
        return "remote" in error.data  # how a remote is set up, or a repository that is not there for this token
    kinds = errors.UnreachableError | errors.DiskFullError | errors.DeniedError | errors.IntegrityError
    return isinstance(error, kinds) and not isinstance(error, errors.RefusedError)
