"""Versions on their way to mirrors: one row per version and mirror, in number order, each tried until it is there.

A mirror that is down for a week changes nothing at home. A mirror that is stricter than the seal, or that holds
something else, is told as such and never forced. What was refused is judged again when the daemon starts and when its
settings were read again, which is when `Deliveries` is made; what somebody brought to the mirror by hand is delivered.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobs import delay
from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry import errors
from weighbridge.registry.flow.mirror import deliver, held, refused
from weighbridge.registry.flow.pull import checked_manifest

_OPEN: Final = ("pending", "waiting")
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
        self._again: set[tuple[str, str, int]] | None = None
        """What was closed before and was not looked at again yet."""

    def pending(self) -> bool:
        """Tell whether there is a delivery that could be tried now."""
        return self._next() is not None

    def step(self) -> bool:
        """Carry one delivery; return whether there was one that could be tried."""
        found = self._next()
        if found is None:
            return False
        row, instead = found
        if self._again:
            self._again.discard(_key(row))
        if instead is not None:
            self._note(row, "skipped", f"v{instead} is waiting, and this mirror takes the latest only")
        else:
            self._carry(row)
        return True

    def _next(self) -> tuple[dict[str, Any], int | None] | None:
        """Return the delivery whose turn it is, and the number that goes in its place to a mirror of the latest."""
        if self._again is None:
            closed = self._store.deliveries("state IN ('blocked', 'diverged')")
            self._again = {_key(row) for row in closed if {row["remote"], row["home"]} <= self._remotes.keys()}
        also = ", 'blocked', 'diverged'" if self._again else ""
        rows = self._store.deliveries(f"state IN ('pending', 'waiting'{also})")
        rows = [row for row in rows if row["state"] in _OPEN or _key(row) in self._again]
        newest: dict[tuple[str, str], int] = {}
        for row in rows:
            line = (row["remote"], row["name"])
            newest[line] = max(newest.get(line, 0), row["n"])
        waiting: set[tuple[str, str]] = set()
        for row in rows:
            line = (row["remote"], row["name"])
            settings = self._remotes.get(row["remote"])
            latest = settings is not None and settings.mirror == "latest-only"
            if latest and row["state"] in _OPEN and row["n"] < newest[line]:
                return row, newest[line]
            if line in waiting:
                continue  # an earlier number of this name is still waiting for this mirror
            if row["until"] is not None and row["until"] > self._clock():
                waiting.add(line)
                continue
            return row, None
        return None

    def _carry(self, row: dict[str, Any]) -> None:
        remote, name, n = str(row["remote"]), str(row["name"]), int(row["n"])
        try:
            home, mirror = self._homes.get(str(row["home"])), self._homes.get(remote)
            manifest = checked_manifest(home.remote, name, n)
            refusal = refused(home.remote, mirror.remote, name, n, manifest, settings=self._remotes[remote])
            tried = row["state"] == "diverged" or (row["state"] == "blocked" and row["attempts"] > 0)
            done = held(mirror.remote, name, n, manifest, mirror_name=remote) if refusal is not None or tried else None
            if refusal is not None and done is None:
                self._note(row, "blocked", f"{refusal.why}; {refusal.fix}")
                self._store.delivered(remote, name, n, attempts=0)
                return
            if tried and done is None:
                return  # its bytes were on their way once: they go again when somebody says so
            if done is None:
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
                judged = isinstance(error, errors.UsageError)  # by the settings, before a byte was moved
                self._store.delivered(remote, name, n, attempts=0 if judged else row["attempts"] + 1)
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
        if (row["state"], row["reason"]) == (state, why):
            return  # judged again, and told before
        _log.warning("a delivery ended", extra={"ref": f"{name}@v{n}", "mirror": remote, "state": state, "why": why})
        self._store.delivered(remote, name, n, state=state, reason=why, until=None)
        self._store.event(state, name=name, n=n, detail=f"{remote}: {why}")


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["remote"]), str(row["name"]), int(row["n"])


def mend(row: Mapping[str, Any]) -> str:
    """Return the command that says what stands in the way of a delivery, and makes it where nothing does any more."""
    return f"registry mirror {row['name']}@v{row['n']} --to {row['remote']} says what is in the way"


def _passes(error: errors.WeighbridgeError) -> bool:
    """Tell whether another try can help: what passes by itself, or is mended without the daemon."""
    if isinstance(error, errors.UsageError | errors.NotFoundError):
        return "remote" in error.data  # how a remote is set up, or a repository that is not there for this token
    kinds = errors.UnreachableError | errors.DiskFullError | errors.DeniedError | errors.IntegrityError
    return isinstance(error, kinds) and not isinstance(error, errors.RefusedError)
