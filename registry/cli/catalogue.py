"""What the reading commands read: the cached catalogue of one remote, refreshed when it is too old.

On the start-up path of `ls` and `show`: what asks a remote is imported only when one has to be asked (`fresh`).
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import click

from weighbridge.config.settings import HUB, RemoteSettings
from weighbridge.registry import catalog_read
from weighbridge.registry.catalog_read import DAMAGE, Row, View
from weighbridge.registry.cli import context
from weighbridge.registry.cli.output import Output, instant, span
from weighbridge.registry.errors import NotFoundError, UnreachableError, WeighbridgeError
from weighbridge.registry.refs import hub_repo
from weighbridge.registry.shell import load

T = TypeVar("T")

DAMAGED = "damaged"
"""What stands in the place of a level where the last `verify` from here found a copy damaged."""

_FRESH = "weighbridge.registry.cli.fresh:refresh"


class Shelf(NamedTuple):
    """One remote's catalogue: where it is from, when it was true, and its rows."""

    remote: RemoteSettings
    view: View
    registry: str
    as_of: float
    cached: bool
    """It was read from the cache without asking the remote."""

    def known(self) -> dict[str, Any]:
        """Return what every JSON answer says of its source."""
        return {"registry": self.registry, "remote": self.remote.name, "as_of": instant(self.as_of)}

    def age(self) -> str:
        """Return `as of 12s ago` for what was cached, else nothing."""
        return f", as of {span(time.time() - self.as_of)} ago" if self.cached else ""


def reading(chosen: RemoteSettings, out: Output, look: Callable[[Shelf], T], *, offline: bool = False) -> T:
    """Return what `look` finds in a remote's catalogue.

    The cache answers while it is young enough, and always with `offline`; else the remote is asked first. A remote that
    does not answer leaves the cache to speak, with a warning; a damaged cache is thrown away and read anew, with a
    note.
    Raises NotFoundError when nothing is cached and nobody may be asked, and what the remote raises.
    """
    shelf = _cached(chosen, out)
    if shelf is not None and (offline or _young(shelf)):
        try:
            return look(shelf)
        except DAMAGE as error:
            _dispose(shelf.registry, shelf.view, error, out)
        finally:
            shelf.view.link.close()
    elif shelf is not None:
        shelf.view.link.close()
    if offline:
        raise NotFoundError(
            f"nothing is known here of the remote '{chosen.name}'",
            why="--offline asks nobody, and there is no sound cache",
            fix="run it once without --offline",
        )
    fresh = _asked(chosen, out)
    try:
        return look(fresh)
    except DAMAGE as error:
        _dispose(fresh.registry, fresh.view, error, out)
    finally:
        fresh.view.link.close()
    fresh = _asked(chosen, out)
    try:
        return look(fresh)
    finally:
        fresh.view.link.close()


def _asked(chosen: RemoteSettings, out: Output) -> Shelf:
    """Ask the remote; when it does not answer, let an old cache speak."""
    try:
        fresh: Shelf = load(_FRESH)(chosen, out)
    except UnreachableError as error:
        shelf = _cached(chosen, out)
        if shelf is None:
            raise
        out.talk(f"warning: {error.what}; this was true {span(time.time() - shelf.as_of)} ago", "yellow")
        return shelf
    return fresh


def _dispose(registry: str, view: View | None, error: Exception, out: Output) -> None:
    """Throw a damaged cache away and say so; one that can only not be used right now is left alone."""
    broken = catalog_read.is_damage(error)
    out.talk(f"the cache {'was damaged and is read anew' if broken else 'cannot be used'} ({error})")
    if view is not None:
        view.link.close()
    if broken:
        load("weighbridge.registry.cli.fresh:discard")(registry)


def _cached(chosen: RemoteSettings, out: Output) -> Shelf | None:
    """Open the cache of a remote, or return None when there is none that can be read."""
    registry = context.known_registry(chosen)
    if registry is None:
        return None
    path = context.catalog_path(registry)
    if not os.path.exists(path):  # noqa: PTH110 - cheaper than a failed connection
        return None
    try:
        link = catalog_read.open_file(path)
    except DAMAGE as error:
        _dispose(registry, None, error, out)
        return None
    view = View(link)
    try:
        row = view.registry()
    except DAMAGE as error:
        _dispose(registry, view, error, out)
        return None
    if row["uuid"] != registry or row["refreshed_at"] is None:
        link.close()
        return None
    return Shelf(chosen, view, registry, row["refreshed_at"], cached=True)


def _young(shelf: Shelf) -> bool:
    """Tell whether the cache may speak: younger than `max_age`, and nothing newer lies in the folder of a directory."""
    if not 0 <= time.time() - shelf.as_of < shelf.remote.max_age:
        return False
    root = folder_of(shelf.remote.url)
    if root is None:
        return True
    # The feed is dense, so one look says whether there is anything new; it costs less than knowing the age.
    cursor = shelf.view.registry()["cursor"]
    return not os.path.exists(f"{root}/catalog/feed/{cursor + 1:012d}.json")  # noqa: PTH110 - as above


def copies(shelf: Shelf, row: Row, remotes: Iterable[RemoteSettings]) -> list[dict[str, Any]]:
    """Return where else a version is, the remote that was read first: as far as the caches here know; nobody is asked.

    `state` is that of the version there, `absent` where it is not, `diverged` where the number stands for something
    else, `unknown` where the remote was never looked at from here.
    """
    found = [_copy(shelf, row)]
    for remote in remotes:
        if remote.url == shelf.remote.url:
            continue
        other = _cached(remote, Output(quiet=True))
        if other is None:
            told = {"remote": remote.name, "location": _location(remote, row), "state": "unknown"}
            found.append(told | dict.fromkeys(("verified", "verified_at", "as_of")))
            continue
        try:
            found.append(_copy(other, row))
        except DAMAGE:
            continue  # whoever reads that remote next is told, and it is read anew
        finally:
            other.view.link.close()
    return found


def _copy(shelf: Shelf, row: Row) -> dict[str, Any]:
    there = shelf.view.version(row["name"], row["n"])
    state = "absent" if there is None else there["state"]
    if there is not None and there["content"] not in {None, row["content"]}:
        state = "diverged"
    checked = shelf.view.copy(row["name"], row["n"])
    return {
        "remote": shelf.remote.name,
        "location": _location(shelf.remote, row),
        "state": state,
        "verified": checked["level"] if checked else None,
        "verified_at": instant(checked["checked_at"]) if checked else None,
        "as_of": instant(shelf.as_of),
    }


def _location(remote: RemoteSettings, row: Row) -> str:
    """Return where a version lies: its folder or key, or on a Hub the page of its tag."""
    repo = hub_repo(remote.url, row["name"])
    if repo is not None:
        host = (remote.endpoint or os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        return f"{host}/{repo}/tree/v{row['n']}"
    return f"{folder_of(remote.url) or remote.url.rstrip('/')}/models/{row['name']}/v{row['n']}"


def known_as(content: str | None, manifest: str | None) -> str | None:
    """Return the version that a sealed manifest is of, as far as any cache here knows; nobody is asked."""
    if content is None or manifest is None:
        return None
    folder = load("pathlib:Path")(context.catalog_path("x")).parent
    for path in sorted(folder.glob("*.db")):
        try:
            link = catalog_read.open_file(path)
        except DAMAGE:
            continue
        try:
            rows = View(link).by_content(content.removeprefix("sha256:"))
        except DAMAGE:
            continue
        finally:
            link.close()
        for row in rows:
            if row["manifest"] == manifest:
                return f"{row['name']}@v{row['n']}"
    return None


def published_as(remote: RemoteSettings, content: str, manifest: str) -> Any:
    """Return what a sealed manifest is known as, as `types.PublishedAs`, and where that would lie on this Hub."""
    ref = known_as(content, manifest)
    if ref is None:
        return None
    name, _, tag = ref.partition("@")
    return load("weighbridge.registry.types:PublishedAs")(ref, hub_repo(remote.url, name), tag)


def complete(context_: click.Context, _param: click.Parameter, word: str) -> list[str]:
    """Return what a half-typed reference can become, from the cache alone; nothing is ever said or raised."""
    try:
        given = context_.params
        chosen = context.choose_remote(context.settings(given.get("config")), given.get("remote"))
        shelf = _cached(chosen, Output(quiet=True))
        if shelf is None:
            return []
        try:
            return _completions(shelf.view, word)
        finally:
            shelf.view.link.close()
    except (WeighbridgeError, OSError, *DAMAGE):
        return []


def _completions(view: View, word: str) -> list[str]:
    name, at, _ = word.partition("@")
    if at:
        found = [f"{row['name']}@v{row['n']}" for row in view.listing([name], limit=200)]
        return [ref for ref in found if ref.startswith(word)]
    name, colon, _ = word.partition(":")
    if colon:
        tags = sorted(tag for tags in view.tags(name).values() for tag in tags)
        return [f"{name}:{tag}" for tag in tags if f"{name}:{tag}".startswith(word)]
    return view.names(f"{word}*")[:200]


def folder_of(url: str) -> str | None:
    """Return the folder behind the URL of a directory remote, None for any other."""
    if "://" not in url:
        return os.path.expanduser(url)  # noqa: PTH111 - on the start-up path
    scheme, _, path = url.partition("://")
    return path.removeprefix("localhost") if scheme == "file" else None


def public(row: Row, where: str) -> dict[str, Any]:
    """Return a row as JSON shows it."""
    return {
        "ref": f"{row['name']}@v{row['n']}",
        "name": row["name"],
        "version": row["n"],
        "state": row["state"],
        "tags": row["tags"],
        "kind": row["kind"],
        "base": row["base"],
        "license": row["license"],
        "checks": row["worst"] or ("ok" if row["state"] == "committed" else None),
        "owner": row["owner"],
        "size": row["size"],
        "parameters": row["parameters"],
        "run": row["run"],
        "step": row["step"],
        "content": row["content"],
        "manifest_sha256": row["manifest"],
        "created_at": instant(row["created_at"]),
        "claimed_at": instant(row["claimed_at"]),
        "where": [where],
    }
