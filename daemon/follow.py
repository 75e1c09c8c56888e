"""Mirrors follow what is said of versions at home: moves of tags, withdrawals, notes.

What the home's feed told is compared with what was brought to each mirror last, so that nothing is asked while nothing
is said. A mirror that is away gets it later; a tag that waits for its version goes with the delivery of that version.
"""

import logging

from weighbridge.daemon.homes import Homes
from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry.errors import UnreachableError, WeighbridgeError
from weighbridge.registry.flow.follow import beside

_log = logging.getLogger(__name__)


class Following:
    """Brings what is said to mirrors; `step` is one look at all names that were delivered anywhere."""

    def __init__(self, store: JobStore, homes: Homes) -> None:
        self._store = store
        self._homes = homes

    def step(self) -> int:
        """Bring what is new to every mirror and return to how many names something was brought; failures wait."""
        brought = 0
        for (remote, home, name), versions in self._store.mirrored().items():
            try:
                source = self._homes.get(home)
                said = f"{versions} {source.catalog.said(name)}"
                if said == self._store.followed(remote, name):
                    continue
                mirror = self._homes.get(remote)
                told = beside(source.remote, mirror.remote, mirror.registry, name)
            except UnreachableError as error:
                self._homes.failed(remote, error)
                continue
            except WeighbridgeError as error:
                _log.warning(
                    "a mirror cannot be told",
                    extra={"model": name, "mirror": remote, "why": f"{error.what}: {error.why}"},
                )
                continue
            for tag in told.diverged:
                self._store.event("diverged", name=name, detail=f"{remote}: its moves of '{tag}' are others")
            if told.tags or told.withdrawn or told.notes:
                brought += 1
                counts = f"{told.tags} tag moves, {told.withdrawn} withdrawals, {told.notes} notes"
                self._store.event("followed", name=name, detail=f"{remote}: {counts}")
            self._store.follow(remote, name, said)
        return brought
