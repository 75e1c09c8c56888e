"""`registry withdraw`: take a version back; its number stays taken, and its content does not rise again."""

from typing import Final

import click

from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.output import Output, span
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.withdraw import GRACE
from weighbridge.registry.flow.withdraw import withdraw as take_back
from weighbridge.registry.refs import shown, split

SCHEMA: Final = "weighbridge/withdraw/1"


@click.command("withdraw")
@click.argument("ref", metavar="NAME@vN", shell_complete=complete)
@click.option("--reason", required=True, metavar="TEXT", help="Why; everybody who asks for the version is told.")
@options.remote
@options.config
@options.talking
def withdraw(*, ref: str, reason: str, remote: str | None, config: str | None, out: Output) -> None:
    """Take a version back, and tell the team.

    From then on it is neither listed nor pulled nor published again by the daemon ('registry push --again' does). Its
    number stays taken and its manifest stays, for whoever used it; its files stay until 'registry purge'. A version
    that a tag stands on is not taken back: move the tag first. Mirrors learn of it with their next delivery, or by
    'registry mirror'.
    """
    name, n, _, _ = split(ref)
    if name is None or n is None:
        raise UsageError(
            f"'{shown(ref)}' names no version",
            why="what is taken back is named exactly",
            fix="registry withdraw NAME@v7",
        )
    if not reason.strip():
        raise UsageError("a withdrawal needs a reason", fix="--reason 'trained on the wrong data'")
    chosen = context.choose_remote(context.settings(config), remote)
    with fresh.opened(chosen, out, ref=ref) as found:
        check_writer(found.registry)
        first = take_back(found.remote, found.registry, name, n, who=fresh.whoami(), why=reason.strip())
        fresh.catch_up(found)
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "ref": f"{name}@v{n}",
                "name": name,
                "version": n,
                "remote": chosen.name,
                "reason": reason.strip(),
                "already": not first,
            }
        )
        return
    if not first:
        out.talk("it was withdrawn before; what was said then stays")
    out.talk(f"its files stay on {chosen.name} for at least {span(GRACE)}", "dim")
    out.say(f"{name}@v{n} withdrawn")
