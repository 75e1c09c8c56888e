"""`registry purge`: delete the files of a version that was taken back, when its grace is over."""

from typing import Final

import click

from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow import withdraw
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.refs import shown, split
from weighbridge.registry.times import spelled

SCHEMA: Final = "weighbridge/purge/1"


@click.command("purge")
@click.argument("ref", metavar="NAME@vN", shell_complete=complete)
@click.option("--yes", is_flag=True, help="Delete them; without it, only say what would be deleted.")
@options.remote
@options.config
@options.talking
def purge(*, ref: str, yes: bool, remote: str | None, config: str | None, out: Output) -> None:
    """Say which files of a withdrawn version would be deleted, or delete them with --yes.

    Only payload goes, seven days after the withdrawal by the store's clock (before that it ends 8), and never while a
    tag stands on the version. Its manifest, its claim and the mark stay. Each remote is purged by itself.
    """
    name, n, _, _ = split(ref)
    if name is None or n is None:
        raise UsageError(
            f"'{shown(ref)}' names no version", why="what is deleted is named exactly", fix="registry purge NAME@v7"
        )
    chosen = context.choose_remote(context.settings(config), remote)
    with fresh.opened(chosen, out, ref=ref) as found:
        if found.remote.properties.commits:
            raise UsageError(
                f"{chosen.name} deletes no files of a version",
                why="its versions are commits, and a repository keeps its history",
                fix="delete the repository there, if all of it is to go",
            )
        check_writer(found.registry)
        files = withdraw.payload(found.remote, name, n)
        count = sum(stat.size for stat in files)
        left = withdraw.wait(found.remote, name, n)
        due = spelled(found.remote.now() + left)
        if yes:
            withdraw.purge(found.remote, name, n)
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "ref": f"{name}@v{n}",
                "name": name,
                "version": n,
                "remote": chosen.name,
                "dry_run": not yes,
                "files": len(files),
                "bytes": count,
            }
        )
        return
    number = "1 file" if len(files) == 1 else f"{len(files)} files"
    what = f"{number}, {size(count)} of {name}@v{n} on {chosen.name}"
    out.say(f"{what} deleted" if yes else f"{what} would be deleted (with --yes{f', after {due}' if left else ''})")
