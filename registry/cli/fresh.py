"""Asking a remote: opening it, bringing the cache up to it, and saying what was odd on the way."""

import getpass
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.cli import context
from weighbridge.registry.cli.catalogue import Shelf
from weighbridge.registry.cli.output import Output
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.flow import sync
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Registry


class Opened(NamedTuple):
    """A remote that was asked: its registry and its catalogue as it is now."""

    settings: RemoteSettings
    remote: Remote
    registry: Registry
    catalog: Catalog


def refresh(chosen: RemoteSettings, out: Output) -> Shelf:
    """Bring the cache of a remote up to date and return it; the caller closes its connection."""
    remote = context.connect(chosen)
    try:
        opened = _open(chosen, remote, out)
    finally:
        remote.close()
    return Shelf(chosen, opened.catalog, opened.registry.registry, time.time(), cached=False)


@contextmanager
def opened(chosen: RemoteSettings, out: Output) -> Iterator[Opened]:
    """Open a remote and bring its cache up to date, for a command that goes on to read or write there."""
    remote = context.connect(chosen)
    try:
        found = _open(chosen, remote, out)
        try:
            yield found
        finally:
            found.catalog.close()
    finally:
        remote.close()


def _open(chosen: RemoteSettings, remote: Remote, out: Output) -> Opened:
    registry = open_registry(remote, create=False)
    with suppress(OSError):
        context.remember_registry(chosen, registry.registry)
    catalog, _, notes = sync.refresh(remote, context.catalog_path(registry.registry), registry.registry)
    for note in notes:
        out.talk(f"warning: {note}" if "/" in note else note, "yellow")
    return Opened(chosen, remote, registry, catalog)


def catch_up(found: Opened) -> None:
    """Bring the cache up to what was just written, so that the next `ls` shows it; failing that is no error."""
    with suppress(WeighbridgeError):
        sync.sync(found.remote, found.catalog)


def whoami() -> str:
    """Return `user@host`, for the record of who moved a tag or wrote a note."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
