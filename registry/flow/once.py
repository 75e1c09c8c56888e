"""Create-only writes whose outcome is always known: ours, or somebody else's bytes (docs/formats.md)."""

import random
import time
from collections.abc import Callable
from typing import Final

from weighbridge.registry.errors import ExistsError, MissingError, OutcomeUnknownError
from weighbridge.registry.remotes.protocol import Remote

ATTEMPTS: Final = 6
"""Looks at a key whose fate is unknown before giving up."""


def create(remote: Remote, key: str, body: bytes, *, pause: Callable[[float], None] = time.sleep) -> bytes | None:
    """Store a small object under a free key; return None when it is ours, else the bytes that are there already.

    Equal bytes are ours, whoever wrote them: a lost answer and the client's own retries end that way. A remote that
    cannot refuse a taken key is looked at before and read back after. Raises OutcomeUnknownError when every look fails
    to settle it, and whatever the remote raises.
    """
    careful = not remote.properties.conditional_create
    for attempt in range(ATTEMPTS):
        if attempt or careful:
            stored = look(remote, key)
            if stored is not None:
                return None if stored == body else stored
        try:
            remote.create(key, body)
        except (ExistsError, OutcomeUnknownError):
            stored = look(remote, key)
            if stored is not None:
                return None if stored == body else stored
            pause(random.uniform(0.5, 1) * min(2.0, 0.05 * 2**attempt))  # noqa: S311 - jitter
            continue
        if not careful:
            return None
        stored = look(remote, key)
        if stored is not None:
            return None if stored == body else stored
    raise OutcomeUnknownError(
        f"nobody can tell whether {key} was written",
        why=f"{remote.url} lost its answer {ATTEMPTS} times",
        fix="try again",
    )


def look(remote: Remote, key: str) -> bytes | None:
    """Return a small object, or None when the remote holds nothing under this key."""
    try:
        return remote.read(key)
    except MissingError:
        return None
