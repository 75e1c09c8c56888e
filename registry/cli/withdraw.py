"""`registry withdraw`: take a version back; its number stays taken, and its content does not rise again."""

import time
from collections.abc import Iterable
from typing import Final

import click

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.catalog_read import DAMAGE
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import Shelf, complete, copies
from weighbridge.registry.cli.output import Output, span
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.withdraw import GRACE
from weighbridge.registry.flow.withdraw import withdraw as take_back
from weighbridge.registry.refs import shown, split

SCHEMA: Final = "weighbridge/withdraw/1"


def _left(found: fresh.Opened, name: str, n: int, remotes: Iterable[RemoteSettings]) -> list[str]:
    """Return the other configured remotes that hold the version as far as the caches here know; nobody is asked."""
    shelf = Shelf(found.settings, found.catalog, found.registry.registry, time.time(), cached=False)
    try:
        row = shelf.view.version(name, n)
    except DAMAGE:
        return []
    every = [] if row is None else copies(shelf, row, remotes)[1:]
    return [str(copy["remote"]) for copy in every if copy["state"] == "committed"]


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
    'registry mirror'; those that are known here to hold it are named.
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
    settings = context.settings(config)
    chosen = context.choose_remote(settings, remote)
    with fresh.opened(chosen, out, ref=ref) as found:
        check_writer(found.registry)
        row = found.read(lambda catalog: catalog.version(name, n))
        first = take_back(
            found.remote, found.registry, name, n,
            who=fresh.whoami(chosen), why=reason.strip(), given_up=row is not None and row["state"] == "void",
        )  # fmt: skip
        fresh.catch_up(found)
        left = _left(found, name, n, settings.remotes.values())
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
                "copies": left,
            }
        )
        return
    if not first:
        out.talk("it was withdrawn before; what was said then stays")
    out.talk(f"its files stay on {chosen.name} for at least {span(GRACE)}", "dim")
    for mirror in left:
        out.talk(f"{mirror} still holds it and gives it to whoever asks there; to tell it:", "yellow")
        out.talk(f"  registry mirror {name}@v{n} --remote {chosen.word} --to {mirror}")
    if left:
        out.talk(f"its files there go with: registry purge {name}@v{n} --remote {left[0]}", "dim")
    out.say(f"{name}@v{n} withdrawn")
