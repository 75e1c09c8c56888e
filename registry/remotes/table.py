"""Which scheme is which remote. A factory is imported when its scheme is used, so that nobody pays for the others."""

import importlib
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Final, cast

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Retrying

TABLE: Final = {
    "file": "weighbridge.registry.remotes.directory:open_directory",
    "memory": "weighbridge.registry.remotes.memory:open_memory",
    "s3": "weighbridge.registry.remotes.s3.remote:open_s3",
    "hf": "weighbridge.registry.remotes.hub.remote:open_hub",
}
"""Scheme -> "module:factory"; a factory takes the URL and an endpoint or None, those of `CONFIGURED` settings too."""

CONFIGURED: Final = frozenset({"s3", "hf"})
"""Schemes with settings of their own: region, addressing, and the like."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; a plain path is a `file`. Raises UsageError for a scheme that no remote has."""
    match = _SCHEME.match(url)
    if not match:
        if not url.strip():
            raise errors.UsageError("a remote needs a URL", fix="write a path, or file:///path")
        return "file"
    scheme = match[1].lower()
    if scheme not in TABLE:
        near = get_close_matches(scheme, TABLE, 1)
        raise errors.UsageError(
            f"'{shown(url)}' is no remote",
            why=f"nothing is known of '{shown(scheme)}'; schemes are {', '.join(TABLE)}",
            fix=f"did you mean {near[0]}://?" if near else "write a path, or file:///path",
        )
    return scheme


def open_remote(url: str, *, endpoint: str | None = None, settings: RemoteSettings | None = None) -> Remote:
    """Return the remote of a URL or path, with bounded retries around it. Connects to nothing yet.

    `settings` are those of a configured remote and include its endpoint; with their `patience` nothing is repeated for
    longer before anything went through. Raises UsageError for a URL that is none.
    """
    scheme = scheme_of(url)
    module, _, factory = TABLE[scheme].partition(":")
    make = cast("Callable[..., Remote]", getattr(importlib.import_module(module), factory))
    endpoint = settings.endpoint if settings is not None else endpoint
    made = make(url, endpoint, settings) if scheme in CONFIGURED else make(url, endpoint)
    return Retrying(made, patience=None if settings is None else settings.patience)
