"""`registry doctor`: check this machine, the configuration and every remote, and say what to type to mend it."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Final

import click

from weighbridge.config import places
from weighbridge.config.mounts import read_table
from weighbridge.config.settings import RemoteSettings, Settings
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.checks import folders, machine, merges, remotes
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check, guarded
from weighbridge.registry.cli.output import Output
from weighbridge.registry.errors import WeighbridgeError

SCHEMA: Final = "weighbridge/doctor/1"
_STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "red"}


@click.command("doctor")
@click.argument("remote", required=False)
@click.option("--no-write", is_flag=True, help="Only look: put no probe into remotes.")
@options.config
@options.talking
def doctor(*, remote: str | None, config: str | None, no_write: bool, out: Output) -> int:
    """Check this machine, the configuration and every remote.

    With REMOTE only that one. A probe of 32 bytes is written to each remote and removed. Ends 0 when nothing fails,
    1 when something does; warnings do not count.
    """
    counts = {OK: 0, WARN: 0, FAIL: 0}
    found: list[Check] = []
    for check in run(config, remote, write=not no_write):
        counts[check.status] += 1
        found.append(check)
        if not out.as_json:
            show(check, out)
    if out.as_json:
        out.json({"schema": SCHEMA, "checks": [check._asdict() for check in found], "counts": counts})
    else:
        out.talk(", ".join((f"{counts[OK]} ok", _counted(counts[WARN], "warning"), _counted(counts[FAIL], "failure"))))
    return 1 if counts[FAIL] else 0


def run(config: str | None, remote: str | None, *, write: bool) -> Iterator[Check]:
    """Yield every check as it is done; none stops the others."""
    if remote is None:
        yield from guarded("sqlite", machine.interpreter)
        yield from guarded("command", machine.command)
        yield from guarded("environment", partial(machine.runtime, os.environ))
    try:
        settings = context.settings(config, resolve=True)
    except WeighbridgeError as error:
        why = f": {error.why}" if error.why else ""
        yield Check(FAIL, "config", f"{error.what}{why}", error.fix)
        return
    if remote is not None:
        chosen = context.choose_remote(settings, remote)
        yield from _remote(settings, chosen, write=write)
        return
    yield _config(settings)
    mountinfo = read_table(os.environ)
    if settings.watch:
        yield from guarded("state", partial(folders.state, settings.daemon, mountinfo))
        yield from guarded("watch", partial(folders.roots, settings, mountinfo))
        yield from guarded("daemon", partial(folders.daemon, settings))
        yield from guarded("inotify", machine.inotify)
        yield from guarded("extras", partial(machine.extras, settings))
        yield from guarded("merge", partial(merges.merges, settings))
    yield from guarded("jail", machine.jailed)  # a merge by hand needs it, too
    every = dict(settings.remotes)
    if os.environ.get("WEIGHBRIDGE_REMOTE"):
        chosen = context.choose_remote(settings)
        # Without a configuration the built-in remote is nobody's: commands use the one the environment names.
        every = {chosen.name: chosen} if settings.source is None else every | {chosen.name: chosen}
    for each in every.values():
        yield from _remote(settings, each, write=write)


def _remote(settings: Settings, remote: RemoteSettings, *, write: bool) -> Iterator[Check]:
    """Yield the checks of a remote, each with its name: an error tells a URL, which two remotes can have."""
    for found in guarded(f"remote-{remote.name}", partial(remotes.check, settings, remote, write=write)):
        named = (
            found.message.startswith((f"{remote.name} ", f"{remote.name}:")) or f" of {remote.name} " in found.message
        )
        yield found if named else found._replace(message=f"{remote.name}: {found.message}")


def show(check: Check, out: Output) -> None:
    """Print one check: the word, what was found, and below it what to type."""
    first, *more = check.message.split("\n")
    label = out.paint(f"{check.status:<4}", _STYLES[check.status])
    out.say_painted(label, f"  {first}")
    for line in more:
        out.say(f"      {line}")
    if check.fix:
        out.say(f"      fix: {check.fix}")


def _config(settings: Settings) -> Check:
    if settings.source is None:
        where = places.user_config(os.environ)
        return Check(OK, "config", f"no configuration: versions are kept in {settings.remotes['local'].url} ({where})")
    rules, places_ = len(settings.watch), len(settings.remotes)
    counted = f"{_counted(rules, 'watched folder')}, {_counted(places_, 'remote')}"
    return Check(OK, "config", f"configuration {settings.source}: {counted}" + ("" if rules else "; no daemon here"))


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
