"""Mirrors follow what is said of versions at home: moves of tags, withdrawals, notes.

What the home's feed told is compared with what was brought to each mirror last, so that nothing is asked while nothing
is said. A version that somebody brought by hand counts like one that was delivered. A mirror that is away or refuses
gets it later; a tag that waits for its version goes with the delivery of that version.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry import layout
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.flow.follow import Told
from weighbridge.registry.flow.publish import UNTOLD
from weighbridge.registry.flow.unnamed import beside

AGAIN_AFTER: Final = 300.0
"""Seconds after which a mirror that could not be told is tried again."""

_log = logging.getLogger(__name__)


class Following:
    """Brings what is said to mirrors; `step` is one look at all names that were delivered anywhere."""

    def __init__(self, store: JobStore, homes: Homes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._homes = homes
        self._clock = clock
        self._later: dict[tuple[str, str], float] = {}

    def step(self) -> int:
        """Bring what is new to every mirror and return to how many names something was brought; failures wait."""
        brought = 0
        for (remote, home, name), versions in self._store.mirrored().items():
            configured = {remote, home} <= self._homes.health.keys()
            if not configured or self._clock() < self._later.get((remote, name), 0.0):
                continue
            try:
                source = self._homes.get(home)
                said = f"{versions} {source.catalog.said(name)}"
                before = self._store.followed(remote, name)
                if said == before:
                    continue
                mirror = self._homes.get(remote)
                mirror.confirm()
                # Empty until it is done: after a death in between, what was brought may not have been told.
                self._store.follow(remote, name, "")
                if versions or any(True for _ in mirror.remote.list(layout.claims(name))):
                    known = before and not before.startswith("0 ")
                    told = beside(
                        source.remote, mirror.remote, mirror.registry, name,
                        settings=mirror.settings, retold=0.0 if known else UNTOLD,
                    )  # fmt: skip
                else:
                    told = Told()  # nothing of this name is there: its rules may keep even what is said away
            except WeighbridgeError as error:
                self._failed(remote, name, error)
            else:
                brought += self._tell(remote, name, told)
                self._store.follow(remote, name, said)
        return brought

    def _failed(self, remote: str, name: str, error: WeighbridgeError) -> None:
        self._later[remote, name] = self._clock() + AGAIN_AFTER
        why = f"{error.what}: {error.why}" if error.why else error.what
        _log.warning("a mirror cannot be told", extra={"model": name, "mirror": remote, "why": why})

    def _tell(self, remote: str, name: str, told: Told) -> bool:
        for tag in told.diverged:
            self._store.event("diverged", name=name, detail=f"{remote}: its moves of '{tag}' are others")
        if not (told.tags or told.withdrawn or told.notes):
            return False
        counts = f"{told.tags} tag moves, {told.withdrawn} withdrawals, {told.notes} notes"
        self._store.event("followed", name=name, detail=f"{remote}: {counts}")
        return True
