"""`registry init`: write a commented weighbridge.toml, checked before it appears, and begin the registry it names."""

import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.config import places
from weighbridge.config.load import load, read_text
from weighbridge.config.settings import RemoteSettings, Settings
from weighbridge.config.starter import starter
from weighbridge.config.values import Fault
from weighbridge.config.values import url as checked_url
from weighbridge.registry import disk, layout
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.output import Output
from weighbridge.registry.errors import ExistsError, MissingError, UsageError, WeighbridgeError
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote

SCHEMA: Final = "weighbridge/init/1"
_SYSTEM_REMOTE: Final = "/srv/weighbridge"


@click.command("init")
@click.option(
    "--path",
    metavar="FILE",
    help="Where to write it [default: $WEIGHBRIDGE_CONFIG, else /etc/weighbridge for root, else your own].",
)
@click.option("--watch", metavar="DIR", multiple=True, help="A folder that holds runs; may be given several times.")
@click.option("--remote", metavar="URL", help="Where versions are kept: a folder, s3://bucket/prefix or hf://org.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@options.talking
def init(*, path: str | None, watch: tuple[str, ...], remote: str | None, force: bool, out: Output) -> None:
    """Write a commented weighbridge.toml and begin the registry it names.

    Without --watch it suits a teammate who only reads; with it, the machine whose training folders are watched. All
    keys stand in it as comments with their meaning and default. A file that is there is kept; a registry that is
    there is used.
    """
    target = Path(path).expanduser().absolute() if path else _default_path()
    system = places.is_system(str(target))
    roots = [os.path.abspath(os.path.expanduser(root)) for root in watch]  # noqa: PTH100, PTH111 - links stay
    kept = os.path.lexists(target) and not force
    if kept:
        if watch or remote:
            raise _exists(target)
        settings = load(target)
    else:
        url = _url(remote) if remote else (_SYSTEM_REMOTE if system else places.embedded_remote(os.environ))
        text = starter(roots, url)
        settings = _checked(text, target)
        _write(target, text, mode=0o644 if system else 0o600, force=force)
    for rule in settings.watch:
        if not Path(rule.root).is_dir():
            out.talk(f"note: {rule.root} is not there yet; it is watched as soon as it is", "yellow")
    begun = [_begin(each, out) for each in _homes(settings)]
    following = _next(target, watched=bool(settings.watch), system=system)
    if out.as_json:
        out.json({"schema": SCHEMA, "path": str(target), "kept": kept, "registries": begun, "next": following})
        return
    out.say(str(target))
    out.talk(f"{'kept' if kept else 'written'}; next:")
    for command in following:
        out.talk(f"  {command}")


def _default_path() -> Path:
    named = os.environ.get("WEIGHBRIDGE_CONFIG")
    if named:
        return Path(named).absolute()
    return Path(places.SYSTEM_CONFIG if os.geteuid() == 0 else places.user_config(os.environ))


def _url(given: str) -> str:
    try:
        return str(checked_url(given if "://" in given else os.path.abspath(os.path.expanduser(given))))  # noqa: PTH100, PTH111
    except Fault as fault:
        raise UsageError(f"--remote: {fault.message}", fix=fault.fix) from fault


def _exists(target: Path) -> ExistsError:
    return ExistsError(
        f"{shown(str(target))} is there already",
        why="it may hold somebody's settings",
        fix="edit it, or replace it with: registry init --force",
    )


def _checked(text: str, target: Path) -> Settings:
    """Return the settings of a text. Raises UsageError where the folders that were asked for do not go together."""
    try:
        return read_text(text, str(target), os.environ)
    except UsageError as error:
        faults = "\n".join(problem["message"] for problem in error.data["problems"])
        raise UsageError(
            "these folders make no valid configuration", why=faults, fix="name other folders", **error.data
        ) from error


def _write(target: Path, text: str, *, mode: int, force: bool) -> None:
    """Let the file appear whole and durably; one that is there is only replaced by force."""
    with disk.speaking(f"cannot write {shown(str(target))}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor, fresh = tempfile.mkstemp(prefix=".weighbridge-", dir=target.parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target.parent)) from error  # nobody named the other one
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        if force:
            Path(fresh).replace(target)
        else:
            os.link(fresh, target)
    except FileExistsError as error:
        raise _exists(target) from error
    finally:
        with suppress(FileNotFoundError):
            Path(fresh).unlink()


def _homes(settings: Settings) -> list[RemoteSettings]:
    """Return the remotes that give numbers here: a mirror is begun by nobody but its own home."""
    names = dict.fromkeys(rule.home for rule in settings.watch)
    if not names and len(settings.remotes) == 1:
        names = dict.fromkeys(settings.remotes)
    return [settings.remotes[name] for name in names]


def _begin(remote: RemoteSettings, out: Output) -> dict[str, Any]:
    """Begin the registry of a remote, or find it; where that fails the configuration stands all the same."""
    uuid, begun = None, False
    try:
        opened = context.connect(remote)
        try:
            begun = not _has_marker(opened)
            uuid = open_registry(opened, create=True).registry
        finally:
            opened.close()
        out.talk(f"registry {uuid} at {remote.url} {'begun' if begun else 'found'}")
    except WeighbridgeError as error:
        why = f" ({error.why})" if error.why else ""
        out.talk(f"note: no registry at {remote.url} yet: {error.what}{why}", "yellow")
    return {"remote": remote.name, "url": remote.url, "registry": uuid, "begun": begun and uuid is not None}


def _has_marker(opened: Remote) -> bool:
    try:
        opened.read(layout.MARKER)
    except MissingError:
        return False
    return True


def _next(target: Path, *, watched: bool, system: bool) -> Sequence[str]:
    """Return the commands that come next on this machine."""
    commands = []
    if not system and str(target) != places.user_config(os.environ):
        commands.append(f"export WEIGHBRIDGE_CONFIG={shlex.quote(str(target))}")
    commands.append("registry doctor")
    if not watched:
        return [*commands, "registry ls"]
    user = "" if system or os.geteuid() == 0 else " --user"
    unit = f"registryd install-unit{user}   # prints the commands that start the service"
    return [*commands, unit, "registryd run   # or: in the foreground, without systemd", "registry ls"]
