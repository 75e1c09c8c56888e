"""`registry cast`: a model in another precision, streamed, every element rounded once and proven."""

import socket
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.adapters.merge import casting, staging
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.adapters.merge.values import DTYPES
from weighbridge.adapters.target import free
from weighbridge.registry.cli import context, options, paths, sides
from weighbridge.registry.cli.inspect import EXIT, ordered, plain
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.cli.sides import Away, Goal, Side
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow import recast
from weighbridge.registry.flow.merged import Parent
from weighbridge.registry.flow.rules import rules
from weighbridge.registry.types import Receipt

SCHEMA: Final = "weighbridge/cast/1"


@click.command("cast")
@click.argument("model", metavar="MODEL", type=paths.WORD)
@click.option("--dtype", type=click.Choice(list(DTYPES)), required=True, help="The precision of the result.")
@click.option("--keep-fp32", metavar="CLASSES", help="Layer classes that get fp32: norm,embed,head,router,...")
@click.option("--to", "target", metavar="DIR", type=paths.PLACE, help="The folder that will hold the result.")
@click.option("--name", metavar="NAME", help="Publish the result as NAME-DTYPE [default: the model's name].")
@click.option("--dry-run", is_flag=True, help="Only say what would be cast and what stands against it.")
@click.option("--again", is_flag=True, help="Publish what was withdrawn, under a new number.")
@click.option(
    "--workers", type=click.IntRange(1, 64), metavar="N", help="Files written at once [default: by processors]."
)
@options.remote
@options.config
@options.talking
def cast(
    *,
    model: str,
    dtype: str,
    keep_fp32: str | None,
    target: Path | None,
    name: str | None,
    dry_run: bool,
    again: bool,
    workers: int | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> int | None:
    """Give MODEL, a folder or name@v7, another precision.

    With --to the result is a folder that appears whole or not at all; without it, or with --name, it is published as
    NAME-DTYPE with its lineage. Every element is rounded once, to nearest; one that the precision cannot hold refuses
    the cast with the names of its tensors. A cast that was killed goes on where it was. With --dry-run nothing is
    written; of a large model only headers are read, a published version is fetched for it and removed again. It ends 0
    when the cast can be made, 5 when it is refused, 8 when the folder is not finished.
    """
    begun = time.monotonic()
    if target is not None:
        free(target)
    keep = sorted({word.strip() for word in (keep_fp32 or "").split(",") if word.strip()})
    casting.known(keep)
    if not dry_run:
        staging.installed()  # before anything is fetched
    words = ["cast", model, remote or "", config or "", dtype, *keep, "as", name or ""]
    with sides.scratch(words, dry_run=dry_run) as scratch:
        found = sides.find(model, remote, config, out)
        sides.told_apart(
            found, adapter=False, fix="merge it into its base, which casts as well: registry merge ... --dtype"
        )
        wanted = name or (found.version.name if isinstance(found, Away) else None)
        if target is None and wanted is None and not dry_run:
            raise UsageError("where should the result go?", fix="--to DIR, --name NAME to publish it, or --dry-run")
        chosen = None
        if (name is not None or target is None) and not dry_run:  # a wrong name or remote is told before the work
            called = recast.cast_name(wanted or "", dtype)
            chosen = context.choose_remote(context.settings(config), remote)

        goal = Goal(called, "cast", chosen, again) if chosen is not None else None
        away = found.parent if isinstance(found, Away) else None

        def key_of(parent: Parent) -> str:
            return recast.derivation(parent.content, dtype, keep)

        def ended(parent_of: Callable[[], Parent]) -> bool:
            return goal is not None and _is_there(goal, lambda: key_of(parent_of()), target, begun, out)

        if away is not None and ended(lambda: away):
            return None
        side = sides.fetched(found, scratch, remote, config, out)
        sides.apart(target, side)
        seen = casting.look(side.path, dtype=dtype, keep=keep)
        if dry_run:
            _show(seen, dtype, out)
            return EXIT[seen.outcome]
        staging.allowed(seen)  # before anything is hashed
        place = target if target is not None else sides.result(scratch(), seen, casting.RECORD)
        parent_of = cache(partial(_parent, away, seen, out))
        if away is None and ended(parent_of):
            return None
        with sides.stoppable(place, out), following(out) as follower:
            done = casting.cast(seen, place, workers=workers, progress=follower.total)
        receipt = None
        if goal is not None:
            parent = parent_of()
            receipt = _publish(done, seen, side, parent, key_of(parent), goal=goal, out=out)
        _tell(done, seen, receipt, time.monotonic() - begun, out, kept=target is not None)
    return None


def _parent(away: Parent | None, seen: Look, out: Output) -> Parent:
    """Return the side of a cast that can be made: the version that was fetched, or a folder, which is hashed."""
    assert seen.base is not None
    return away or Parent(ref=seen.base.base.id or seen.base.artifact, content=sides.content(seen.base, out))


def _is_there(goal: Goal, key: Callable[[], str], target: Path | None, begun: float, out: Output) -> bool:
    """Return whether nothing is left to do, and say so: the same cast was published before, and no folder is wanted.

    Raises what stands against publishing it, also where a folder is wanted: better before the work than after.
    """
    there = sides.made_before(goal, key, target, out)
    if there is not None:
        sides.say_there(there, {"schema": SCHEMA}, time.monotonic() - begun, out)
    return there is not None


def _publish(done: Merged, seen: Look, side: Side, parent: Parent, key: str, *, goal: Goal, out: Output) -> Receipt:
    """Publish a cast folder as a version of its own name."""
    admission = recast.admit_cast(
        done, seen, parent, side.facts, name=goal.name, policy=rules([goal.chosen]), host=socket.gethostname()
    )
    return sides.publish_made(goal, key, admission, out)


def _show(seen: Look, dtype: str, out: Output) -> None:
    """Print what would be cast."""
    if out.as_json:
        out.json(plain({**_document(seen), "dry_run": True}))
        return
    out.say(f"{seen.outcome}: {seen.facts.get('architecture') or 'a model'} to {dtype}")
    for label, count in sorted(seen.facts.get("cast", {}).items()):
        out.say(f"  {count} tensors {label}")
    for one in ordered(seen.findings):
        out.say(f"  {one.severity}  {one.code}  {one.message}")
        if one.fix:
            out.say(f"    fix: {one.fix}")


def _document(seen: Look) -> dict[str, Any]:
    return {"schema": SCHEMA, "outcome": seen.outcome, "facts": seen.facts, "findings": seen.findings}


def _tell(done: Merged, seen: Look, receipt: Receipt | None, seconds: float, out: Output, *, kept: bool) -> None:
    """Print where the result lies, and what was proven."""
    ref = f"{receipt.name}@v{receipt.n}" if receipt is not None else None
    if out.as_json:
        document = _document(seen) | sides.told(done, receipt, seconds, kept=kept)
        out.json(plain(document))
        return
    proof = done.facts["proof"]
    if done.joined:
        out.talk("the same cast lies there already")
    whole = size(sum(file["size"] for file in done.files.values()))
    out.talk(
        f"{whole} in {seconds:.1f} s; {proof['tensors_cast']} tensors cast, {proof['elements_exact']} of "
        f"{proof['elements_cast']} elements exactly, {proof['elements_to_zero']} to zero; "
        f"{proof['tensors_copied']} copied byte for byte"
    )
    sides.say_version(receipt, out)
    out.say(ref or done.path)
