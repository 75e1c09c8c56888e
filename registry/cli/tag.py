"""`registry tag`: move a tag, remove it, or show where tags stand and stood."""

from typing import Any, Final

import click
import msgspec

from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.output import Column, Output
from weighbridge.registry.errors import NotFoundError, UsageError
from weighbridge.registry.flow import tags
from weighbridge.registry.flow.resolve import unknown
from weighbridge.registry.refs import shown, split
from weighbridge.registry.types import TagMove

SCHEMA_MOVE: Final = "weighbridge/tag-move/1"
SCHEMA_MOVES: Final = "weighbridge/tag-moves/1"
SCHEMA_TAGS: Final = "weighbridge/tags/1"

_MOVES: Final = (
    Column("seq", right=True),
    Column("from", show=lambda n: "-" if n is None else f"v{n}"),
    Column("to", show=lambda n: "removed" if n is None else f"v{n}"),
    Column("when"),
    Column("who"),
    Column("why", shrink=True),
)
_TAGS: Final = (Column("tag"), Column("version", show=lambda n: f"v{n}"))


@click.command("tag")
@click.argument("ref", shell_complete=complete)
@click.argument("tag", required=False)
@click.option("--delete", is_flag=True, help="Remove the tag; its history stays.")
@click.option("--why", metavar="TEXT", help="Why, for the tag's history.")
@options.remote
@options.config
@options.listing
def tag(
    *,
    ref: str,
    tag: str | None,
    delete: bool,
    why: str | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> None:
    """Move TAG to the version that REF means; without TAG, show where tags stand.

    'registry tag NAME@v7 prod' moves it, 'registry tag NAME prod --delete' removes it, 'registry tag NAME:prod' lists
    every move of it, 'registry tag NAME' lists the tags of a name. Of two who move a tag at once, one is told who won.
    """
    chosen = context.choose_remote(context.settings(config), remote)
    name, n, own, digest = split(ref)
    if delete:
        if n is not None or digest is not None or name is None:
            raise UsageError("--delete takes a name and a tag", fix="registry tag NAME TAG --delete")
        tag = tag if tag is not None else own if own != "latest" or ":" in ref else None
        if tag is None:
            raise UsageError("which tag?", fix=f"registry tag {shown(name)} TAG --delete")
    with fresh.opened(chosen, out, ref=ref if tag is None or delete else None) as found:
        if delete:
            assert name is not None
            assert tag is not None
            told(tags.move(found.remote, found.registry, name, tag, None, fresh.whoami(chosen), why), out)
        elif tag is not None:
            version = found.resolve(ref)
            moved = tags.move(found.remote, found.registry, version.name, tag, version.n, fresh.whoami(chosen), why)
            told(moved, out)
        elif name is not None and own is not None and ":" in ref and own != "latest":
            history(tags.history(found.remote, name, own), name, own, out)
            return
        elif name is not None and own is not None:
            known, standings = found.read(lambda catalog: (catalog.name(name) is not None, catalog.tags(name)))
            if not known:
                raise unknown(found.remote, found.catalog, name)
            standing(name, standings, out)
            return
        else:
            raise UsageError("which tag?", fix=f"registry tag {shown(ref)} TAG")
        fresh.catch_up(found)


def told(move: TagMove, out: Output) -> None:
    """Print one move."""
    if out.as_json:
        out.json({**msgspec.to_builtins(move), "schema": SCHEMA_MOVE})
    elif out.fmt == "name":
        out.say(f"{move.name}:{move.tag}")
    elif move.to is None:
        out.say(f"{move.name}:{move.tag} removed (was v{move.from_})")
    else:
        before = f" (was v{move.from_})" if move.from_ is not None and move.from_ != move.to else ""
        out.say(f"{move.name}:{move.tag} -> v{move.to}{before}")


def history(moves: list[TagMove], name: str, tag: str, out: Output) -> None:
    """Print the moves of one tag, oldest first."""
    if not moves:
        raise NotFoundError(f"{name} has no tag '{shown(tag)}'", fix=f"registry tag {name}")
    rows: list[dict[str, Any]] = [msgspec.to_builtins(move) for move in moves]
    for row in rows:
        row["ref"] = f"{name}@v{row['to']}" if row["to"] is not None else "-"
        del row["schema"], row["name"], row["tag"], row["nonce"]
    out.rows(rows, _MOVES, schema=SCHEMA_MOVES, into="moves", extra={"name": name, "tag": tag})


def standing(name: str, found: dict[int, list[str]], out: Output) -> None:
    """Print where each tag of a name stands; `latest`, which is worked out, among them."""
    rows = [{"tag": word, "version": n, "ref": f"{name}@v{n}"} for n, words in sorted(found.items()) for word in words]
    rows.sort(key=lambda row: str(row["tag"]))
    out.rows(rows, _TAGS, schema=SCHEMA_TAGS, into="tags", name="tag", extra={"name": name})
