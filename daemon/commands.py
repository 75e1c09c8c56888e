"""The command `registryd`: run the daemon, make one passage without it, drain a path, install a unit."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from weighbridge.config.load import load
from weighbridge.config.settings import Settings
from weighbridge.registry import errors
from weighbridge.registry.refs import shown

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}

config_option = click.option(
    "--config", metavar="FILE", help="The configuration file [default: WEIGHBRIDGE_CONFIG, the system's, the user's]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="weighbridge", prog_name="registryd")
def registryd() -> None:
    """Watch training output folders and publish what is proven whole."""


@registryd.command()
@config_option
@click.option("--scan-only", is_flag=True, help="Use no file events, the periodic scan alone.")
def run(config: str | None, scan_only: bool) -> int:
    """Run the daemon in the foreground until SIGTERM; SIGHUP reads the configuration again.

    Ends 0 after a stop, 2 when the configuration is not usable, 7 when another daemon works on the same state.
    """
    from weighbridge.daemon.service import serve  # noqa: PLC0415 - `--help` must not pay for the whole daemon

    return serve(lambda: load(config), os.environ, scan_only=scan_only)


@registryd.command()
@config_option
@click.option("--backfill", is_flag=True, help="Take what was there before the first start, too.")
@click.option("--dry-run", is_flag=True, help="Only print what would be published: files, bytes, warnings.")
@json_option
def once(config: str | None, backfill: bool, dry_run: bool, as_json: bool) -> int:
    """Scan once, publish what is finished and due, and end.

    With --dry-run the files and sizes are those that would be published, and each artifact whose values are looked at
    only while it is staged says so; what lies at the remote already is not asked.

    Ends 0 when all that is due is published and on its mirrors, 3 when a watched root is not there, 5 when something is
    blocked, 6 when a remote gives no answer, 7 when a daemon works on the same state, 8 when a folder is not finished
    or a copy waits for its mirror. Whatever stands in the way is listed, a line each; the first line decides.
    """
    settings = load(config)
    if dry_run:
        from weighbridge.daemon.preview import preview  # noqa: PLC0415 - as above

        return _print_preview(preview(settings, os.environ, backfill=backfill), as_json=as_json)
    from weighbridge.daemon.passage import once as passage  # noqa: PLC0415 - as above
    from weighbridge.daemon.problems import together  # noqa: PLC0415 - as above

    if not settings.watch:
        raise errors.UsageError(
            "there is nothing to watch",
            why=f"{settings.source or 'the built-in configuration'} has no [[watch]]",
            fix="registry init --watch FOLDER writes one",
        )
    _talk()
    done = passage(settings, os.environ, backfill=backfill)
    if as_json:
        rows = [{"name": j.name, "n": j.n, "path": j.path, "content": j.content} for j in done.published]
        _say(json.dumps({"schema": "weighbridge/once/1", "published": rows}))
    else:
        for job in done.published:
            _say(f"{job.name}@v{job.n}  {shown(job.path)}")
    kept = together(done.problems)
    if kept is not None:
        raise kept
    return 0


@registryd.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--deadline", default="20m", metavar="SPAN", help="How long to wait, such as 90s or 20m [default: 20m].")
@config_option
@json_option
def drain(path: Path, deadline: str, config: str | None, as_json: bool) -> int:
    """Return when everything under PATH is published, for Slurm epilogs and pod pre-stop hooks.

    Asks the running daemon; without one it does the work itself. Ends 0 only when the home remote has confirmed every
    artifact under PATH that its rule publishes, 5 when one of them is blocked, 8 when the deadline passed, 3 when PATH
    is not there and nothing was published from it.
    """
    from weighbridge.daemon import drain as draining  # noqa: PLC0415 - as above

    settings = load(config)
    seconds = _seconds(deadline)
    absolute = os.path.abspath(path)  # noqa: PTH100 - links stay as they are: they are watched under their names
    answer = _drained(settings, absolute, seconds)
    if not answer["published"] and not os.path.lexists(absolute):
        raise errors.NotFoundError(f"{absolute} is not there", why="nothing was ever published from it")
    if as_json:
        _say(json.dumps({"schema": "weighbridge/drain/1"} | {k: v for k, v in answer.items() if k != "token"}))
    else:
        for ref in answer["published"]:
            _say(ref)
    draining.verdict(answer, absolute, seconds)
    return 0


def _drained(settings: Settings, path: str, seconds: float) -> dict[str, Any]:
    """Drain through the daemon, else under its lock; one that is just starting or ending is waited for."""
    from weighbridge.daemon import drain as draining  # noqa: PLC0415 - as above
    from weighbridge.daemon.passage import drained  # noqa: PLC0415 - as above

    end = time.monotonic() + seconds
    _talk()
    while True:
        try:
            return draining.by_socket(settings.daemon.socket, path, max(0.0, end - time.monotonic()))
        except errors.UnreachableError:
            pass  # no daemon, or one that is not listening yet: the lock below tells which
        try:
            return drained(settings, os.environ, path, max(0.0, end - time.monotonic()))
        except errors.StateHeldError as held:
            if time.monotonic() + draining.PACE >= end:
                raise errors.NotFinishedError(
                    f"{path} is not drained after {seconds:.0f} s",
                    why=f"{held.what}, and it does not answer at {settings.daemon.socket}",
                    fix="look at the daemon's log, then drain again",
                ) from held
        time.sleep(draining.PACE)


@registryd.command()
@click.option(
    "--cancel", metavar="NAME[@vN]", help="Give up the merges of this adapter version; a Slurm job is cancelled."
)
@click.option("--retry", metavar="NAME[@vN]", help="Try again at once what was given up, or waits.")
@config_option
@json_option
def merges(cancel: str | None, retry: str | None, config: str | None, as_json: bool) -> int:
    """List the merges that rules asked for and that are not done; cancel one, or try it again.

    A name alone will do where one version of it has a merge that is not over. Asks the running daemon; without one the
    database itself, and what is tried again is carried on by the next `registryd once` or `run`. Ends 0, 3 when no
    merge has this name, 6 when no scheduler answers, or no daemon and it never ran.
    """
    if cancel and retry:
        raise errors.UsageError("--cancel and --retry contradict each other", fix="give one of them")
    rows = _merges(load(config), {"cancel": cancel, "retry": retry})
    if as_json:
        _say(json.dumps({"schema": "weighbridge/merges/1", "merges": rows}))
        return 0
    if not rows and not cancel and not retry:
        sys.stderr.write("no merge waits, runs or was set aside; registry log NAME tells of those that are done\n")
    for row in rows:
        job = f"  {row['executor']} {row['job']}" if row["job"] else ""
        why = f"  {row['reason']}" if row["reason"] else ""
        _say(f"{row['state']:<11} {row['ref']}  {row['dtype']}{job}{shown(why)}")
    return 0


def _merges(settings: Settings, asked: dict[str, str | None]) -> list[dict[str, Any]]:
    """Ask the daemon, else its database: no daemon needs to be started to give up what the last one left."""
    from weighbridge.registry import control  # noqa: PLC0415 - as above

    try:
        rows: list[dict[str, Any]] = control.ask(str(settings.daemon.socket), "merges", asked, timeout=60.0)
    except errors.UnreachableError as silent:
        if silent.__cause__ is None or not isinstance(silent.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            raise
        from weighbridge.daemon.passage import merges as offline  # noqa: PLC0415 - as above

        kept = offline(settings, os.environ, asked)
        if kept is None:
            raise
        return kept
    return rows


@registryd.command("install-unit")
@click.option("--user", is_flag=True, help="A unit of this user instead of one of the system.")
@click.option("--to", type=click.Path(path_type=Path), metavar="FOLDER", help="Write into another folder.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="The configuration the unit names.")
@click.option("--program", type=click.Path(path_type=Path), metavar="FILE", help="The registryd that the unit starts.")
def install_unit(user: bool, to: Path | None, config: Path | None, program: Path | None) -> int:
    """Write the systemd unit with the paths of this installation, and say what to type next."""
    from weighbridge.daemon.install import install_unit as install  # noqa: PLC0415 - as above

    done = install(user=user, to=to, config=config, program=program)
    for path in done.paths:
        _say(str(path))
    for warning in done.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    sys.stderr.write("".join(f"next: {command}\n" for command in done.commands))
    return 0


def _talk() -> None:
    """Tell people on stderr what goes wrong on the way, each line with what it is about."""
    import logging  # noqa: PLC0415 - as above

    from weighbridge.daemon import logs  # noqa: PLC0415 - as above

    logs.start("text")
    logging.getLogger().setLevel(logging.WARNING)


def _print_preview(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    total = sum(row["size"] for row in rows if row["publish"])
    count = sum(1 for row in rows if row["publish"])
    if as_json:
        _say(json.dumps({"schema": "weighbridge/preview/1", "count": count, "bytes": total, "artifacts": rows}))
        return 0
    for row in rows:
        verdict = f"{row['name']}" if row["publish"] else f"- {row['reason']}"
        _say(f"{row['size']:>14}  {row['kind'] or '-':<9}  {shown(row['path'])}  {shown(verdict)}")
        for file in row["files"]:
            _say(f"{file['size']:>14}  {file['role']:<9}    {shown(file['path'])}")
        for told in row["warnings"]:
            _say(f"{'':>14}  warn         {told['code']}: {shown(told['message'])}")
        if row["unread"]:
            _say(f"{'':>14}  later        {row['unread']}")
    sys.stderr.write(f"{count} would be published, {total} bytes; {len(rows) - count} would not\n")
    return 0


def _seconds(text: str) -> float:
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise errors.UsageError(f"'{shown(text)}' is no span of time", fix="write 90s, 20m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
