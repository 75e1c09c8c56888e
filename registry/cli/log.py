"""`registry log`: what the daemon did, the newest last."""

from typing import Any, Final

import click

from weighbridge.registry import control
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.output import Column, Output, instant

SCHEMA: Final = "weighbridge/log/1"
COLUMNS: Final = (
    Column("at"),
    Column("event"),
    Column("ref", "VERSION"),
    Column("path", wide=True),
    Column("detail", shrink=True),
)


@click.command("log")
@click.argument("name", required=False)
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=100, metavar="N", help="At most N lines.")
@options.config
@options.listing
def log(name: str | None, limit: int, config: str | None, out: Output) -> None:
    """Show what happened, of NAME only where it is given, the newest last. Asks the running daemon."""
    settings = context.settings(config)
    told: list[dict[str, Any]] = control.ask(settings.daemon.socket, "log", {"name": name, "limit": limit})
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


def _ref(row: dict[str, Any]) -> str:
    if not row["name"]:
        return ""
    return f"{row['name']}@v{row['n']}" if row["n"] else str(row["name"])
