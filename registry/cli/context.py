"""What a command works with: its settings, the remote it was asked to use, and where its disposable cache lies.

`ls` and `show` need settings and a cache path only, so nothing here opens or imports a remote before it is asked to.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from weighbridge.config.load import load, remote_settings
from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings, Settings, names_table
from weighbridge.config.values import Fault
from weighbridge.config.values import url as checked_url
from weighbridge.registry.errors import UsageError
from weighbridge.registry.refs import shown
from weighbridge.registry.shell import load as attribute

if TYPE_CHECKING:
    from weighbridge.registry.remotes.protocol import Remote

PATIENCE: Final = 4.0
"""Seconds that a command waits for a first answer: with its start, a person is told within five what is wrong."""
_UUID_LENGTH: Final = 64


def settings(config: str | None = None, *, resolve: bool = False) -> Settings:
    """Return the settings that --config or the environment name; `resolve` as in `config.load.load`."""
    return load(config, resolve=resolve)


def choose_remote(
    settings: Settings, name: str | None = None, environ: Mapping[str, str] | None = None
) -> RemoteSettings:
    """Return the remote of a name or a URL, else that of WEIGHBRIDGE_REMOTE, of all watch rules, or the only one.

    Raises UsageError that lists the remotes when the name is unknown or several could be meant.
    """
    given = name or (os.environ if environ is None else environ).get("WEIGHBRIDGE_REMOTE") or None
    known = settings.remotes
    if given is not None:
        if given in known:
            return known[given]
        if "/" in given:
            told = _unnamed(given)
            told = told._replace(names=all(one.paths == "keep" for one in (told, *known.values())))
            same = next((one for one in known.values() if one.url == told.url), None)
            return same or (told._replace(name=told.url) if told.name in known else told)
        near = attribute("weighbridge.config.nearest:nearest")(given, known)
        raise UsageError(
            f"there is no remote '{shown(given[:80])}'",
            why=f"did you mean '{near}'?" if near else f"{settings.source or 'the built-in configuration'} has none",
            fix=f"--remote {near}" if near else f"name one of: {', '.join(known)}, or give a URL",
        )
    homes = {rule.home for rule in settings.watch} or set(known)
    if len(homes) == 1:
        return known[homes.pop()]
    raise UsageError(
        "several remotes could be meant",
        why=f"{settings.source} has {', '.join(sorted(homes))}",
        fix="name one with --remote, or set WEIGHBRIDGE_REMOTE",
    )


def _unnamed(url: str) -> RemoteSettings:
    """Return the settings of a remote that is given as a URL or a path; a relative path is taken from here."""
    scheme, colon, rest = url.partition(":/")
    if colon and scheme in {"s3", "hf", "file"} and not rest.startswith("/"):
        raise UsageError(f"--remote: '{shown(url)}' is no URL", fix=f"write {scheme}://{shown(rest)}")
    try:
        whole = checked_url(url if "://" in url else os.path.abspath(os.path.expanduser(url)))  # noqa: PTH100, PTH111
    except Fault as fault:
        raise UsageError(f"--remote: {fault.message}", fix=fault.fix) from fault
    return GivenRemote(*remote_settings(_label(whole), whole))


class GivenRemote(RemoteSettings):
    """A remote that somebody named by its address; no table of the configuration has it."""

    @property
    def word(self) -> str:
        """What names it in a command: its address, which means the same in every folder."""
        quoted: str = attribute("shlex:quote")(shown(self.url))
        return quoted

    def written(self, *lines: str) -> str:
        """Return in words the table that has to be added for these lines."""
        name = self.name if names_table(self.name) else "NAME"
        told = [f'url = "{shown(self.url)}"', *lines]
        return f"a table [remotes.{name}] with {' and '.join(told)}"


def _label(url: str) -> str:
    """Return what a remote without a name is called in tables: the last word of its address."""
    return url.rstrip("/").rpartition("/")[2] or url


def open_remote(settings: Settings, name: str | None = None) -> tuple["Remote", RemoteSettings]:
    """Return an open remote that repeats what failed for a moment, and its settings; the caller closes it."""
    chosen = choose_remote(settings, name)
    return connect(chosen), chosen


def connect(remote: RemoteSettings) -> "Remote":
    """Return an open remote of these settings, as patient as a person; nothing is asked of it yet."""
    opened: Remote = attribute("weighbridge.registry.remotes.table:open_remote")(remote.url, settings=patient(remote))
    return opened


def patient(remote: RemoteSettings) -> RemoteSettings:
    """Return the settings of a remote for a person who waits."""
    return remote._replace(patience=remote.patience or PATIENCE)


def catalog_path(registry: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the disposable catalogue cache of one registry, by its uuid."""
    return f"{cache_dir(os.environ if environ is None else environ)}/catalog/{registry}.db"


def known_registry(remote: RemoteSettings, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the uuid of the registry that was last seen behind a remote, without asking it; None when never seen."""
    try:
        with open(memory_path(remote, environ), "rb") as stream:  # noqa: PTH123 - on the start-up path
            text = stream.read().decode()
    except (OSError, UnicodeDecodeError):
        return None
    address, _, registry = text.strip().rpartition("\n")
    plain = registry.replace("-", "")
    return registry if address == address_of(remote) and plain.isalnum() and len(registry) <= _UUID_LENGTH else None


def memory_path(remote: RemoteSettings, environ: Mapping[str, str] | None = None) -> str:
    """Return the file that remembers a remote: by address, because a name means another place elsewhere.

    Two addresses may share a file; it says whose it is, so that costs a question to the remote and nothing else.
    """
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in address_of(remote))
    return f"{cache_dir(os.environ if environ is None else environ)}/remotes/{plain[-100:]}"


def address_of(remote: RemoteSettings) -> str:
    """Return what tells one remote from another, in ASCII."""
    return f"{remote.url} {remote.endpoint or ''}".encode("ascii", "backslashreplace").decode().strip()
