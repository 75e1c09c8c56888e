"""`registry ls`: names and versions, from the cached catalogue."""

import time
from typing import Final

import click

from weighbridge.registry.catalog_read import SORTS, Row
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.catalogue import Shelf, complete, public, reading
from weighbridge.registry.cli.output import Column, Output, age, short, size
from weighbridge.registry.errors import NotFoundError, UsageError
from weighbridge.registry.refs import shown
from weighbridge.registry.shell import load

SCHEMA: Final = "weighbridge/ls/1"
KINDS: Final = ("adapter", "model", "quantized", "merged")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

COLUMNS: Final = (
    Column("name", shrink=True),
    Column("version", show=lambda n: f"v{n}"),
    Column("tags", shrink=True),
    Column("state", wide=True),
    Column("owner", shrink=True, spare=2),
    Column("kind"),
    Column("base", show=lambda base: "-" if base is None else str(base).rpartition("/")[2], shrink=True, spare=4),
    Column("license", shrink=True, spare=3),
    Column("checks"),
    Column("step", right=True, wide=True),
    Column("run", wide=True),
    Column("where", shrink=True, spare=1),
    Column("size", show=size, right=True),
    Column("age", right=True),
    Column("content", "DIGEST", show=short, wide=True),
)


@click.command("ls")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete)
@click.option("--all", "every", is_flag=True, help="Every version of every name, unfinished, void and withdrawn too.")
@click.option("-n", "--limit", type=click.IntRange(min=0), metavar="N", help="At most N rows, 0 for all [default: 50].")
@click.option("--kind", type=click.Choice(KINDS), help="One kind only.")
@click.option("--base", metavar="WORD", help="Only what has this word in its base model.")
@click.option(
    "--license", "licensed", metavar="WORD", help="Only what has this word in its licence; 'unknown' for none."
)
@click.option("--since", metavar="AGE", help="Only what is younger: 12h, 7d, or a date.")
@click.option("--sort", metavar="KEY[:asc]", help=f"Order: {', '.join(SORTS)} [default: age].")
@options.remote
@options.offline
@options.config
@options.listing
def ls(
    *,
    names: tuple[str, ...],
    every: bool,
    limit: int | None,
    kind: str | None,
    base: str | None,
    licensed: str | None,
    since: str | None,
    sort: str | None,
    remote: str | None,
    offline: bool,
    config: str | None,
    out: Output,
) -> None:
    """List names and versions, the newest first.

    Without NAME the latest version of each name; with NAMEs (patterns such as 'med*' too) all their versions.
    """
    chosen = context.choose_remote(context.settings(config), remote)
    key, _, way = (sort or "age").partition(":")
    if key not in SORTS or way not in {"", "asc", "desc"}:
        raise UsageError(f"cannot sort by '{shown(key)}'", fix=f"--sort {'|'.join(SORTS)}, with :asc behind it or not")
    # Ages grow downwards and names upwards: the order people mean when they say neither.
    ascending = way == "asc" or (not way and key in {"name", "owner", "kind", "base"})
    cut = (None if every else 50) if limit is None else limit or None
    youngest = None if since is None else _moment(since)

    def look(shelf: Shelf) -> None:
        rows = shelf.view.listing(
            names,
            every=every,
            kind=kind,
            base=base,
            licensed=licensed,
            since=youngest,
            sort=key,
            ascending=ascending,
            limit=None if cut is None else cut + 1,
        )
        more = cut is not None and len(rows) > cut
        show(shelf, rows[:cut] if more else rows, names, out, more=more, every=every)

    reading(chosen, out, look, offline=offline)


def show(shelf: Shelf, rows: list[Row], names: tuple[str, ...], out: Output, *, more: bool, every: bool) -> None:
    """Print rows and, for people, a line of totals."""
    if not rows:
        for name in names:
            if not name or not shelf.view.names(name):
                fix = f"registry show {shown(name)}" if "@" in name or ":" in name else "registry ls"
                raise NotFoundError(f"there is no name '{shown(name)}'", why=_near(name, shelf), fix=fix)
    now = time.time()
    told = [public(row, shelf.remote.name) for row in rows]
    # What --all adds differs from the rest by its state alone.
    columns = tuple(column._replace(wide=False) if every and column.key == "state" else column for column in COLUMNS)
    if out.as_json or out.fmt == "name":
        out.rows(told, COLUMNS, schema=SCHEMA, into="versions", extra=shelf.known() | {"more": more})
        return
    if not told:
        out.rows(told, columns, schema=SCHEMA, into="versions")
        there = bool(shelf.view.names())
        words = "nothing that is published fits" if there else "nothing is published yet"
        words += " that you may see" if not there and shelf.remote.url.startswith("hf://") else ""
        rest = "; --all lists what was withdrawn, given up or is unfinished" if there and not every else ""
        out.talk(f"{words} on {shelf.remote.name}{shelf.age()}{rest}", "dim")
        return
    for row, seen in zip(told, rows, strict=True):
        row["age"] = age(seen["created_at"], now)
    out.rows(told, columns, schema=SCHEMA, into="versions")
    totals = shelf.view.registry()
    line = f"{_count(totals['names'], 'name')}, {_count(totals['versions'], 'version')}, {size(totals['bytes'])}"
    out.talk(f"{line} on {shelf.remote.name}{shelf.age()}", "dim")
    if more:
        out.talk("there is more: -n 0 for all, --all for every version, or name one", "dim")


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _near(name: str, shelf: Shelf) -> str | None:
    near = load("weighbridge.config.nearest:nearest")(name, shelf.view.names())
    return f"did you mean '{near}'?" if near else None


def _moment(text: str) -> float:
    """Return the moment that `7d` or a date means. Raises UsageError."""
    if text[-1:] in _UNITS and text[:-1].isdecimal():
        return time.time() - int(text[:-1]) * _UNITS[text[-1]]
    found: float | None = load("weighbridge.registry.times:seconds")(text)
    if found is None:
        raise UsageError(f"'{shown(text)}' is no age", fix="--since 12h, 7d, 8w, or a date such as 2026-11-29")
    return found
