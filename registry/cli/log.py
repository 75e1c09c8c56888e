"""`registry log`: what the daemon did, or what a remote tells of a name; the newest last."""

from typing import Any, Final

import click

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import control
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.output import Column, Output, instant
from weighbridge.registry.errors import DeniedError, NotFoundError, UnreachableError, UsageError
from weighbridge.registry.flow.history import history
from weighbridge.registry.refs import check_name, shown
from weighbridge.registry.times import seconds

SCHEMA: Final = "weighbridge/log/1"
COLUMNS: Final = (
    Column("at"),
    Column("event"),
    Column("ref", "VERSION"),
    Column("path", wide=True),
    Column("detail", shrink=True),
)


@click.command("log")
@click.argument("name", required=False, shell_complete=complete)
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=100, metavar="N", help="At most N lines.")
@options.remote
@options.config
@options.listing
def log(name: str | None, limit: int, remote: str | None, config: str | None, out: Output) -> None:
    """Show what happened, of NAME only where it is given, the newest last.

    Asks the running daemon. With NAME and --remote, or where no daemon runs, the remote tells: numbers, moves of tags,
    withdrawals and notes, by whom and why.
    """
    settings = context.settings(config)
    if remote is None:
        try:
            asked = {"name": name, "limit": limit}
            told: list[dict[str, Any]] = control.ask(settings.daemon.socket, "log", asked)
        except (UnreachableError, DeniedError) as error:
            if name is None:
                error.fix = f"{error.fix}; of one name the remote tells: registry log NAME"
                raise
            chosen = context.choose_remote(settings, None)
            out.talk(f"{error.what}: this is what {chosen.name} tells", "dim")
            told = _of_remote(chosen, name, limit, out)
    elif name is None:
        raise UsageError("a remote tells of one name", fix="registry log NAME --remote REMOTE")
    else:
        told = _of_remote(context.choose_remote(settings, remote), name, limit, out)
    rows = [
        {
            "at": instant(row["at"]),
            "event": row["event"],
            "ref": _ref(row),
            "name": row["name"],
            "n": row["n"],
            "path": row["path"],
            "detail": row["detail"],
        }
        for row in told
    ]
    if out.fmt == "table":
        for row in rows:
            row["detail"] = row["detail"] or row["path"]  # of which checkpoint it is told
    out.rows(rows, COLUMNS, schema=SCHEMA, into="events")


def _of_remote(chosen: RemoteSettings, name: str, limit: int, out: Output) -> list[dict[str, Any]]:
    check_name(name)
    with fresh.opened(chosen, out, ref=f"{name}@v1") as found:
        rows = found.read(lambda catalog: catalog.listing([name], every=True, limit=None))
        if not rows:
            raise NotFoundError(f"there is no name '{shown(name)}'", fix="registry ls")
        happened = history(found.remote, name, rows, limit)
    return [
        {"at": seconds(one.at), "event": one.event, "name": name, "n": one.n, "path": None, "detail": one.detail}
        for one in happened
    ]


def _ref(row: dict[str, Any]) -> str:
    if not row["name"]:
        return ""
    return f"{row['name']}@v{row['n']}" if row["n"] else str(row["name"])
