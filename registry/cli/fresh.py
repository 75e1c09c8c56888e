"""Asking a remote: opening it, bringing the cache up to it, and saying what was odd on the way."""

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.catalog_read import DAMAGE, Row, is_damage
from weighbridge.registry.cli import context
from weighbridge.registry.cli.catalogue import Shelf, folder_of
from weighbridge.registry.cli.output import Output
from weighbridge.registry.errors import (
    DeniedError,
    FeedDamagedError,
    NoRegistryError,
    NotFoundError,
    UnreachableError,
    UsageError,
    WeighbridgeError,
)
from weighbridge.registry.flow import sync
from weighbridge.registry.flow.feed import version_entry
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.flow.resolve import Resolved, resolve
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.refs import shown, split
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Owner, Receipt, Registry

T = TypeVar("T")


class Opened:
    """A remote that was asked: its registry and its catalogue as it is now."""

    def __init__(self, settings: RemoteSettings, remote: Remote, registry: Registry, catalog: Catalog) -> None:
        self.settings = settings
        self.remote = remote
        self.registry = registry
        self.catalog = catalog

    def resolve(self, ref: str, step: int | None = None) -> Resolved:
        """Return the version a reference means. Raises what `flow.resolve` raises."""
        return self.read(lambda catalog: resolve(self.remote, catalog, ref, step=step))

    def read(self, look: Callable[[Catalog], T]) -> T:
        """Return what `look` finds in the catalogue; a cache that turns out to be damaged is read anew, once."""
        try:
            return look(self.catalog)
        except DAMAGE as error:
            if not is_damage(error):
                raise
            self.catalog.close()
            path = _cache(self.registry.registry)
            sync.discard(path)
            self.catalog, _, _ = sync.refresh(self.remote, path, self.registry.registry)
            return look(self.catalog)


def refresh(chosen: RemoteSettings, out: Output) -> Shelf:
    """Bring the cache of a remote up to date and return it; the caller closes its connection."""
    remote = context.connect(chosen)
    try:
        opened = _open(chosen, remote, out)
    finally:
        remote.close()
    return Shelf(chosen, opened.catalog, opened.registry.registry, time.time(), cached=False)


def look_everywhere(remotes: Iterable[RemoteSettings], out: Output) -> None:
    """Bring the caches of all remotes up to date; one that does not answer is told of and left as it was known."""
    for remote in remotes:
        try:
            refresh(remote, out).view.link.close()
        except (UnreachableError, NotFoundError, DeniedError) as error:
            out.talk(f"warning: {remote.name}: {error.what}", "yellow")


@contextmanager
def opened(chosen: RemoteSettings, out: Output, *, ref: str | None = None) -> Iterator[Opened]:
    """Open a remote and bring its cache up to date, for a command that goes on to read or write there.

    A damaged feed does not stop a command whose `ref` names a number or a tag: both are asked of the remote itself.
    """
    remote = context.connect(chosen)
    try:
        found = _open_for(chosen, remote, out, ref)
        try:
            yield found
        finally:
            found.catalog.close()
    finally:
        remote.close()


def _open_for(
    chosen: RemoteSettings, remote: Remote, out: Output, ref: str | None, *, only: str | None = None
) -> Opened:
    try:
        return _open(chosen, remote, out, only=only)
    except FeedDamagedError as error:
        if ref is None or not _plain(ref):
            raise
        out.talk(f"warning: {error.what} ({error.why}); fix: {error.fix}", "yellow")
        registry = open_registry(remote, create=False)
        return Opened(chosen, remote, registry, Catalog.open(None, registry.registry, durable=False))


def published(
    chosen: RemoteSettings, remote: Remote, receipt: Receipt, untold: Sequence[WeighbridgeError], out: Output
) -> None:
    """Let the next `ls` and `show` tell of a version that was just published; say where the team could not be told.

    Nothing that fails here makes the version undone, so nothing is raised.
    """
    ref = f"{receipt.name}@v{receipt.n}"
    for error in untold:
        why = f"{error.what} ({error.why})" if error.why else error.what
        out.talk(f"warning: {ref} is published; telling the team failed: {why}", "yellow")
        out.talk("  fix: remove the cause and repeat the command: the number stays, the team is told")
    with suppress(WeighbridgeError, OSError, *DAMAGE):
        known = _open_for(chosen, remote, out, ref, only=receipt.name)
        with closing(known.catalog):
            if not receipt.joined or receipt.verified != "size":
                remember(known, receipt.name, receipt.n, receipt.verified)


def _plain(ref: str) -> bool:
    """Tell whether a reference can be followed without the catalogue."""
    _, n, tag, _ = split(ref)
    return n is not None or tag not in {None, "latest"}


def _open(chosen: RemoteSettings, remote: Remote, out: Output, *, only: str | None = None) -> Opened:
    try:
        registry = open_registry(remote, create=False)
    except NoRegistryError as error:
        if context.known_registry(chosen) is None:
            raise
        raise _gone(chosen, remote) from error
    with suppress(OSError):
        remember_registry(chosen, registry.registry)
    catalog, _, notes = sync.refresh(remote, _cache(registry.registry), registry.registry, only=only)
    for note in () if out.as_json else notes:  # an error that follows is to be the one object on stderr
        out.talk(note, "yellow")
    return Opened(chosen, remote, registry, catalog)


def _gone(chosen: RemoteSettings, remote: Remote) -> UnreachableError:
    return UnreachableError(
        f"there is no registry any more at {shown(remote.url)}",
        why="there was one when it was last looked at",
        fix=f"see whether the disk or share is mounted; to begin a new one, delete {context.memory_path(chosen)}",
    )


def registry_of(chosen: RemoteSettings, remote: Remote, *, writer: str | None = None) -> Registry:
    """Open the registry of a remote that is to be written to, made where there never was one.

    Raises UnreachableError where there was one and it is gone: numbers are never given out anew beside an empty mount
    point. Raises UsageError where none ever was and the folder holds files of somebody else, and where only a newer
    version may write.
    """
    _refuse_foreign(chosen)
    try:
        registry = open_registry(remote, create=context.known_registry(chosen) is None, writer=writer)
    except NoRegistryError as error:
        raise _gone(chosen, remote) from error
    check_writer(registry)  # before the long work
    return registry


_NOBODYS: Final = frozenset({"_wb", "lost+found"})
"""What a new disk has, and what is left of a registry whose beginner was killed before it was one."""


def _refuse_foreign(chosen: RemoteSettings) -> None:
    """Refuse to begin a registry among other files: whoever names such a folder has mostly named the wrong one."""
    root = folder_of(chosen.url)
    if root is None or context.known_registry(chosen) is not None:
        return
    try:
        names = sorted(name for name in os.listdir(root) if not name.startswith(".") and name not in _NOBODYS)  # noqa: PTH208
    except OSError:
        return  # whoever opens it says why
    if names and layout.MARKER not in names:
        listed = ", ".join(map(shown, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise UsageError(
            f"{shown(root)} holds other files and no registry",
            why=listed,
            fix="name an empty or a new folder; to begin one there all the same: registry init --path weighbridge.toml "
            f"--remote {shown(root)}",
        )


def remember_registry(remote: RemoteSettings, registry: str, environ: Mapping[str, str] | None = None) -> None:
    """Note which registry was seen behind a remote, for the next `context.known_registry`."""
    if context.known_registry(remote, environ) == registry:
        return
    place = Path(context.memory_path(remote, environ))
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = place.with_name(f"{place.name}.{os.getpid()}")
    fresh.write_bytes(f"{context.address_of(remote)}\n{registry}\n".encode())
    fresh.replace(place)


def discard(registry: str) -> None:
    """Throw the cache of a registry away."""
    sync.discard(_cache(registry))


def _cache(registry: str) -> Path:
    return Path(context.catalog_path(registry))


def catch_up(found: Opened) -> None:
    """Bring the cache up to what was just written, so that the next `ls` shows it; failing that is no error."""
    with suppress(WeighbridgeError, *DAMAGE):
        sync.sync(found.remote, found.catalog)


def remember(found: Opened, name: str, n: int, level: str) -> None:
    """Note at which level the copy of a version was verified just now, for `show`; failing that is no error."""
    with suppress(*DAMAGE):
        found.catalog.checked(name, n, level, time.time())


def whoami(chosen: RemoteSettings) -> str:
    """Return who moves a tag, withdraws or writes a note: `user@host`, by a digest where no such name is kept."""
    return _whoami() if chosen.paths == "keep" else writer().daemon


def _whoami() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def writer() -> Owner:
    """Return who claims: this user of this machine, by a digest, because a claim may lie where no user name belongs."""
    digest = sha256_bytes(f"weighbridge-push-v1\0{_whoami()}".encode())
    return Owner(host=socket.gethostname(), daemon=f"push-{digest[:32]}")


def offline(shelf: Shelf, ref: str, step: int | None) -> Row:
    """Return the row of a reference that the cache does not hold plainly. Raises what `resolve` raises."""
    found = resolve(None, shelf.view, ref, step=step)
    row = shelf.view.version(found.name, found.n)
    assert row is not None
    return row


def fetched(
    chosen: RemoteSettings,
    ref: str,
    step: int | None,
    out: Output,
    describe: Callable[[Shelf, Row, str | None, Output], None],
) -> None:
    """Ask the remote for a version and its manifest, keep both in the cache, and hand them to `describe`."""
    with opened(chosen, out) as found:
        version = found.resolve(ref, step)
        manifest = checked_manifest(found.remote, version.name, version.n, version.manifest)
        with suppress(*DAMAGE):  # a cache that cannot be written only makes the next look slower
            found.catalog.keep(manifest)
        row = found.catalog.version(version.name, version.n)
        if row is None or row["state"] != "committed":
            # It was committed a moment ago: its announcement is still on its way.
            entry = version_entry(version.name, version.n, manifest)
            found.catalog.apply(None, [entry])
            row = found.catalog.version(version.name, version.n)
            assert row is not None
        shelf = Shelf(chosen, found.catalog, found.registry.registry, time.time(), cached=False)
        describe(shelf, row, manifest.stored.decode(), out)
