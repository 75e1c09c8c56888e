"""`registry allow`: publish a blocked folder in spite of one finding; the reason stands on the card."""

import getpass
import os
import socket
from typing import Any

import click

from weighbridge.registry import control
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.output import Output
from weighbridge.registry.errors import NotFoundError
from weighbridge.registry.flow.allowance import QUARANTINE, check_code


@click.command("allow")
@click.argument("path")
@click.option("--code", required=True, metavar="CODE", help="The finding, as `registry status` names it.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; it is recorded and stands on the card.")
@options.config
@options.talking
def allow(path: str, code: str, reason: str, config: str | None, out: Output) -> None:
    """Allow one finding for everything at or under PATH, and try again what it blocked.

    Findings about integrity (a short shard, a wrong hash) and secrets cannot be allowed. Asks the running daemon.
    """
    check_code(code, also=QUARANTINE)
    settings = context.settings(config)
    whole = os.path.abspath(path)  # noqa: PTH100 - links stay: folders are watched under their names
    if not os.path.lexists(whole):
        raise NotFoundError(f"{whole} is not there", fix="name a folder that registry status lists")
    given = {"path": whole, "code": code, "reason": reason, "who": f"{_user()}@{socket.gethostname()}"}
    told: Any = control.ask(settings.daemon.socket, "allow", given)
    if out.as_json:
        out.json({"schema": "weighbridge/allow/1", **told})
        return
    again = told["retried"]
    out.say(f"{code} is allowed under {told['path']}")
    out.talk(f"{again} blocked {'artifact is' if again == 1 else 'artifacts are'} tried again", "dim")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
