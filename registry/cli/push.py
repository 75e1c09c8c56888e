"""`registry push`: publish a folder as a new version, without a daemon."""

import os
from pathlib import Path

import click

from weighbridge.config.settings import EMA
from weighbridge.registry.cli import context, options, paths
from weighbridge.registry.cli.ahead import begin
from weighbridge.registry.cli.output import Output
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.errors import UsageError
from weighbridge.registry.shell import load


@click.command("push")
@click.argument("path", type=paths.PLACE)
@click.option("--name", metavar="NAME", help="The name [default: the one in the run's weighbridge.yaml].")
@click.option(
    "--kind", type=click.Choice(["adapter", "model", "quantized"]), help="Which one, where PATH holds several."
)
@click.option(
    "--ema",
    type=click.Choice(EMA),
    default="keep",
    show_default=True,
    help="Averaged weights (EMA, SWA), as in a watch rule: beside the raw ones keep them, prefer them, or drop them.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be published, and what left out and why.")
@click.option("--share", is_flag=True, help="Publish under a name that another run began.")
@click.option("--again", is_flag=True, help="Publish what was withdrawn, under a new number.")
@click.option(
    "--adopt", is_flag=True, help="Hub: take over a repository with somebody else's files, or one that lost versions."
)
@click.option("--allow", "codes", multiple=True, metavar="CODE", help="Publish in spite of this finding; repeatable.")
@click.option("--reason", metavar="TEXT", help="Why; needed with --allow, stands on the card.")
@options.remote
@options.config
@options.talking
def push(
    *,
    path: Path,
    name: str | None,
    kind: str | None,
    ema: str,
    dry_run: bool,
    share: bool,
    again: bool,
    adopt: bool,
    codes: tuple[str, ...],
    reason: str | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> None:
    """Publish what PATH holds as a new version of NAME, and print it.

    The folder is checked like everything the daemon publishes: structure first, then secrets, licence and paths by the
    remote's rules. The end mark of a trainer is not waited for: whoever says "publish this" has seen that it ended. The
    same bytes keep the number they have. Ends 5 when it is refused, 8 when files are still being written.
    """
    if path.name in {"", ".."}:  # the names of a folder and of what lies beside it are facts of a checkpoint
        path = Path(os.path.realpath(path))
    codes = tuple(dict.fromkeys(codes))
    given = tuple((code, reason or "checked by hand") for code in codes)
    wish = Wish(path, name, kind, ema, given, share, again, adopt, remote, config)
    if codes and not reason:
        raise UsageError("--allow needs a reason", fix=wish.command())
    for code in codes:
        load("weighbridge.registry.flow.allowance:check_code")(code)
    settings = context.settings(config)
    chosen = context.choose_remote(settings, remote)
    if dry_run:
        load("weighbridge.registry.cli.pushing:dry")(wish, chosen, out)
        return
    go = load("weighbridge.registry.cli.pushing:go")  # before the copy, which needs much of it, too
    looker = begin(wish, chosen)
    opened = None
    try:
        opened = context.connect(chosen)
        ask = None
        if opened.properties.commits:
            # Begun before anything else, what uploads loads its part of the library while we look at the folder.
            hub = load("weighbridge.registry.remotes.commits:of")(opened)
            hub.ready()
            ask = hub.model
        if looker is not None:
            looker.listen(ask)
        go(wish, chosen, opened, looker, out)
    finally:
        if looker is not None:
            looker.end()
        if opened is not None:
            opened.close()
