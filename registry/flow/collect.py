"""Giving up what nobody finished: after seven days by the store's clock an open claim is voided.

A wrong guess is safe: of void and manifest one is created, and a publisher that still runs claims a new number.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import once
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.remotes.protocol import Remote

DEAD_AFTER: Final = 7 * 86_400.0
"""Seconds by the store's clock after which the owner of an open claim is taken for dead."""


def collect(
    remote: Remote,
    registry: types.Registry,
    *,
    by: str,
    open_claims: Iterable[tuple[str, int]] | None = None,
    dead_after: float = DEAD_AFTER,
) -> list[tuple[str, int]]:
    """Void every open claim that is old enough and return (name, number) of each.

    `open_claims` are those a catalogue knows of; without them every claim of the remote is looked at.
    """
    check_writer(registry)
    deadline = remote.now() - dead_after
    voided = []
    for name, n in _all_claims(remote, deadline) if open_claims is None else open_claims:
        try:
            if remote.stat(layout.claim(name, n)).modified > deadline:
                continue
            if once.look(remote, layout.manifest(name, n)) is not None:
                continue
            void(remote, registry, name, n, reason="nobody finished it in time", by=by)
        except (errors.ConflictError, errors.MissingError):  # finished at the last moment, or never claimed
            continue
        voided.append((name, n))
    return voided


def _all_claims(remote: Remote, deadline: float) -> Iterator[tuple[str, int]]:
    for name in list(remote.folders(layout.MODELS)):
        for found in list(remote.list(layout.claims(name))):
            place = layout.claim_number(found.key)
            if place is not None and found.modified <= deadline:
                yield place
