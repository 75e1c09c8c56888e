"""The remotes as the daemon holds them: opened when first needed, kept open, and how each one is doing.

Announcements of several workers go into one object of the feed: whoever comes first writes for all who wait.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import types
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import NoRegistryError, UnreachableError, UsageError, WeighbridgeError
from weighbridge.registry.flow import feed
from weighbridge.registry.flow.claims import Known
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.flow.sync import Report, sync
from weighbridge.registry.refs import hub_repo
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.table import open_remote


@dataclass
class Health:
    """How a remote answered last."""

    ok: bool | None = None
    seconds: float | None = None
    at: float | None = None
    error: WeighbridgeError | None = None


@dataclass
class Home:
    """One remote with its registry; `known` are claims that were read before, by name."""

    name: str
    settings: RemoteSettings
    remote: Remote
    registry: types.Registry
    catalog: Catalog
    known: dict[str, dict[int, Known]] = field(default_factory=dict)
    _head: feed.Head | None = None
    _waiting: list[tuple[Sequence[types.FeedEntry], threading.Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writer: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, entries: Sequence[types.FeedEntry]) -> None:
        """Tell the team; several threads that come at the same time share one object. Raises what the remote raises."""
        mine = threading.Event()
        with self._lock:
            self._waiting.append((entries, mine))
        with self._writer:
            if mine.is_set():
                return  # another thread wrote ours with its own
            with self._lock:
                taken, self._waiting = self._waiting, []
            try:
                at = feed.head(self.remote, self.registry, self._head)
                entries = [entry for some, _ in taken for entry in some]
                self._head = feed.Head(feed.announce(self.remote, self.registry, entries, known=at), at.epoch)
            except BaseException:
                # Each of the others repeats for itself; telling twice is harmless.
                with self._lock:
                    self._waiting += [one for one in taken if one[1] is not mine]
                raise
            for _, event in taken:
                event.set()

    def confirm(self) -> None:
        """Read the marker again before something is written: what it says may have changed since it was read.

        An unmounted folder must not become a new registry: raises UnreachableError when the marker is gone or another's
        is there. Raises UsageError when by now only a newer version may write.
        """
        try:
            found = open_registry(self.remote, create=False)
        except NoRegistryError as error:
            raise _gone(self.name, self.settings) from error
        _same(self.name, self.settings, self.registry.registry, found.registry)
        self.registry = found
        check_writer(found)

    def sync(self) -> Report:
        """Bring what the daemon knows of this remote up to its feed."""
        return sync(self.remote, self.catalog)


class Memory(Protocol):
    """Who remembers across restarts which registry was seen where."""

    def registry_at(self, url: str) -> str | None:
        """Return the uuid of the registry that was seen at a URL."""
        ...

    def remember_registry(self, url: str, uuid: str) -> None:
        """Remember a registry."""
        ...


def _same(name: str, settings: RemoteSettings, known: str, found: str) -> None:
    if known != found:
        raise UnreachableError(
            f"another registry is where '{name}' was",
            why=f"{settings.url} holds {found}, it was {known}",
            fix="mount the right one; if the change is meant, give the remote another URL or a new state folder",
        )


def _gone(name: str, settings: RemoteSettings) -> UnreachableError:
    return UnreachableError(
        f"the registry '{name}' is gone",
        why=f"{settings.url} holds no marker any more",
        fix="mount it, or restore weighbridge.json; nothing is written there before",
    )


def keeps_out(error: WeighbridgeError) -> bool:
    """Tell whether an error keeps us from a remote as a whole: no answer, no leave, or a remote set up wrongly."""
    return isinstance(error, UnreachableError) or bool(error.data.get("remote"))


class Homes:
    """All configured remotes; safe to use from several threads."""

    def __init__(
        self,
        settings: Mapping[str, RemoteSettings],
        catalog: Catalog,
        memory: Memory,
        *,
        connect: Callable[[RemoteSettings], Remote] = lambda remote: open_remote(remote.url, settings=remote),
        writer: str | None = None,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._writer = writer
        self._connect = connect
        self._catalog = catalog
        self._open: dict[str, Home] = {}
        self._lock = threading.RLock()
        self.health: dict[str, Health] = {name: Health() for name in settings}

    def get(self, name: str) -> Home:
        """Return a remote, opened at its first use; a registry is begun where there is none.

        Raises UsageError for a name that is not configured, and what the remote raises.
        """
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                return found
            settings = self._settings.get(name)
            if settings is None:
                raise UsageError(f"there is no remote '{name}'", fix=f"add [remotes.{name}], or name another")
            remote = self._connect(settings)
            try:
                registry = self.watched(name, lambda: self._registry(name, settings, remote))
            except BaseException:
                remote.close()
                raise
            home = Home(name, settings, remote, registry, self._catalog.at(registry.registry))
            self._open[name] = home
            return home

    def _registry(self, name: str, settings: RemoteSettings, remote: Remote) -> types.Registry:
        """Return the registry of a remote; one is begun only where none was ever seen."""
        known = self._memory.registry_at(settings.url)
        try:
            registry = open_registry(remote, create=known is None, writer=self._writer)
        except NoRegistryError as error:
            raise _gone(name, settings) from error
        if known is None:
            self._memory.remember_registry(settings.url, registry.registry)
        else:
            _same(name, settings, known, registry.registry)
        return registry

    def published_as(self, names: Sequence[str], content: str, manifest: str) -> types.PublishedAs | None:
        """Return what a sealed manifest is known as at one of these remotes, as far as was seen; nobody is asked."""
        for home in filter(None, map(self.known, names)):
            for row in home.catalog.by_content(content.removeprefix("sha256:")):
                if row["manifest"] == manifest:
                    repos = (hub_repo(self._settings[name].url, row["name"]) for name in names)
                    repo = next(filter(None, repos), None)
                    return types.PublishedAs(f"{row['name']}@v{row['n']}", repo, f"v{row['n']}")
        return None

    def watched(self, name: str, call: Callable[[], Any]) -> Any:
        """Carry out a request and remember how the remote did."""
        begun = time.monotonic()
        try:
            result = call()
        except WeighbridgeError as error:
            if keeps_out(error):
                self.health[name] = Health(ok=False, at=time.time(), error=error)
            raise
        self.health[name] = Health(ok=True, seconds=time.monotonic() - begun, at=time.time())
        return result

    def failed(self, name: str, error: WeighbridgeError) -> None:
        """Note what kept us from a remote in a request that did not go through `watched`."""
        if name in self.health and keeps_out(error):
            self.health[name] = Health(ok=False, at=time.time(), error=error)

    def known(self, name: str) -> Home | None:
        """Return a remote if it is open already; nothing is asked."""
        with self._lock:
            return self._open.get(name)

    def opened(self) -> list[Home]:
        """Return the remotes that are open."""
        with self._lock:
            return list(self._open.values())

    def close(self) -> None:
        """Give all connections back."""
        with self._lock:
            for home in self._open.values():
                home.remote.close()
            self._open.clear()
