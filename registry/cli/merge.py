"""`registry merge`: an adapter and its base become one model that any server loads, proven number by number."""

import os
import socket
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from weighbridge.adapters.license import cache_roots
from weighbridge.adapters.merge import behave, identity, outside, staging, start
from weighbridge.adapters.merge.preview import ARTIFACT, Look, look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.adapters.merge.values import DTYPES, WIDTH
from weighbridge.adapters.target import free
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import context, options, paths, sides
from weighbridge.registry.cli.catalogue import published_as
from weighbridge.registry.cli.inspect import EXIT, ordered, plain
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.cli.sides import Away, Goal, Side
from weighbridge.registry.errors import UsageError
from weighbridge.registry.flow import merged as papers
from weighbridge.registry.flow.merged import Parent
from weighbridge.registry.flow.rules import rules
from weighbridge.registry.refs import SUFFIX_ROOM, check_name
from weighbridge.registry.types import Finding, Receipt

SCHEMA: Final = "weighbridge/merge/1"
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}


@click.command("merge")
@click.argument("adapter", type=paths.WORD)
@click.option(
    "--base",
    type=paths.WORD,
    metavar="BASE",
    required=True,
    help="The base: a folder, name@v7, or an id in the Hub cache.",
)
@click.option(
    "--and", "others", multiple=True, metavar="ADAPTER", help="One more adapter, summed before the one rounding."
)
@click.option("--to", "target", metavar="DIR", type=paths.PLACE, help="The folder that will hold the result.")
@click.option("--name", metavar="NAME", help="Publish the result as NAME-merged-DTYPE [default: the adapter's name].")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="The precision of the result [default: the base's].")
@click.option("--dry-run", is_flag=True, help="Only say what would be merged and what stands against it.")
@click.option("--again", is_flag=True, help="Publish what was withdrawn, under a new number.")
@click.option("--unchanged", is_flag=True, help="Allow a result that equals the base after rounding.")
@click.option(
    "--behaviour", is_flag=True, help="Also run base, adapter and result, and compare what they compute (torch extra)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU where rank and size make it pay, and it is free; cuda: a GPU, or an error that says why not.",
)
@click.option(
    "--workers", type=click.IntRange(1, 64), metavar="N", help="Files written at once [default: by processors]."
)
@options.remote
@options.config
@options.talking
def merge(
    *,
    adapter: str,
    base: str,
    others: tuple[str, ...],
    target: Path | None,
    name: str | None,
    dtype: str | None,
    dry_run: bool,
    again: bool,
    unchanged: bool,
    behaviour: bool,
    device: str,
    workers: int | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> int | None:
    """Merge ADAPTER, a folder or name@v7, into a base model.

    With --to the result is a folder that appears whole or not at all; without it, or with --name, it is published as
    NAME-merged-DTYPE with its lineage. The weights are streamed: memory does not grow with the model, a merge that was
    killed goes on where it was, and every written file is read again and proven. With --dry-run nothing is written; of
    the weights headers, the adapter and parts of the base are read, published versions are fetched for it and removed
    again. It ends 0 when the merge can be made (warnings included), 5 when it is refused, 8 when a folder is not
    finished.
    """
    begun = time.monotonic()
    if target is not None:
        free(target)
    if not dry_run:  # what is missing is told before anything is fetched
        staging.installed()
        if behaviour:
            outside.installed(behave.NEEDS)
    shape = ["as", dtype or "", str(unchanged), name or ""]  # what else decides the result
    words = ["merge", adapter, *others, base, remote or "", config or "", *shape]
    with sides.scratch(words, dry_run=dry_run) as scratch:
        over = [sides.find(text, remote, config, out) for text in (adapter, *others)]
        below = sides.find(base, remote, config, out, hub=True)
        for one in over:
            sides.told_apart(one, adapter=True, fix="name the adapter; the model it is merged into is --base")
        sides.told_apart(below, adapter=False, fix="--base is the model that the adapter was trained on")
        wanted = name or (over[0].version.name if isinstance(over[0], Away) else None)
        if target is None and wanted is None and not dry_run:
            raise UsageError("where should the result go?", fix="--to DIR, --name NAME to publish it, or --dry-run")
        chosen = None
        if (name is not None or target is None) and not dry_run:  # a wrong name or remote is told before the work
            check_name(wanted or "", room=SUFFIX_ROOM)
            chosen = context.choose_remote(context.settings(config), remote)
        known = None
        if chosen is not None:
            known = _known(over, below, dtype, wanted=wanted or "", chosen=chosen, again=again)
            if known is not None and _is_there(known.goal, lambda: known.key, target, begun, out, behaviour=behaviour):
                return None
        found = [sides.fetched(one, scratch, remote, config, out) for one in over]
        under = sides.fetched(below, scratch, remote, config, out)
        sides.apart(target, *found, under)
        called = under.ref if under.parent is not None else None
        seen = look([side.path for side in found], under.path, dtype=dtype, weigh=dry_run, called=called)
        if dry_run:
            _show(seen, out)
            return EXIT[seen.outcome]
        unsure = identity.told(seen.facts.get("base_identity"), seen.findings) == identity.UNKNOWN
        if unsure and seen.planned is not None and not out.as_json:
            out.talk(f"warn: {identity.UNKNOWN}", "yellow")  # before the work, so that it can be stopped
        staging.allowed(seen)  # before anything is hashed
        place = target if target is not None else sides.result(scratch(), seen, start.RECORD)
        order_of = cache(partial(_order, seen, found, under, out, wanted=wanted or "", chosen=chosen, again=again))
        if chosen is not None and known is None:
            goal = Goal(papers.merged_name(wanted or "", _written(seen)), "merge", chosen, again)
            if _is_there(goal, lambda: order_of().key, target, begun, out, behaviour=behaviour):
                return None
        if not out.as_json and start.standing(seen, place) is None:
            _ahead(seen, behaviour=behaviour, out=out)
        with sides.stoppable(place, out), following(out) as follower:
            done = start.merge(
                seen,
                place,
                workers=workers,
                unchanged=unchanged,
                behaviour=behaviour,
                device=device,
                progress=follower.total,
            )
        receipt = None
        if chosen is not None:
            receipt = _publish(done, seen, order_of(), out)
        _tell(done, seen, receipt, time.monotonic() - begun, out, kept=target is not None)
    return None


class _Order(NamedTuple):
    """What a merge is published as, what of, and in which precision."""

    goal: Goal
    adapters: list[Parent]
    base: Parent
    dtype: str
    """As in `Look.precision`."""

    @property
    def key(self) -> str:
        """What names the merge by what it is made of."""
        return papers.derivation(self.adapters, self.base, self.dtype)


def _known(
    over: list[Side | Away], below: Side | Away, dtype: str | None, *, wanted: str, chosen: RemoteSettings, again: bool
) -> _Order | None:
    """Return how the result is published where published versions alone tell it: then none need be fetched for it.

    None where a folder is among them, or where the base's weights are of several precisions.
    """
    adapters = [one.parent for one in over if isinstance(one, Away)]
    if isinstance(below, Side) or len(adapters) < len(over):
        return None
    stored = [kind for kind in below.facts.weights.dtypes if kind in WIDTH]
    if len(stored) != 1:
        return None
    return _ordered(adapters, below.parent, DTYPES[dtype] if dtype else stored[0], wanted, chosen, again=again)


def _order(
    seen: Look, found: list[Side], under: Side, out: Output, *, wanted: str, chosen: RemoteSettings | None, again: bool
) -> _Order:
    """Return how the result of a merge that can be made is published; folders are hashed for it."""
    assert seen.base is not None
    assert chosen is not None
    adapters = [
        side.parent or Parent(ref=one.artifact, content=sides.content(one, out))
        for side, one in zip(found, seen.adapters, strict=True)
    ]
    beneath = under.parent
    if beneath is None:
        content = sides.content(seen.base, out)
        beneath = Parent(ref=content, content=content)
    order = _ordered(adapters, beneath, _written(seen), wanted, chosen, again=again)
    return order._replace(dtype=seen.precision)


def _written(seen: Look) -> str:
    """Return the precision of the result of a merge that can be made."""
    assert seen.planned is not None
    assert seen.planned.plan is not None
    return seen.planned.plan.dtype


def _ordered(
    adapters: list[Parent], base: Parent, dtype: str, wanted: str, chosen: RemoteSettings, *, again: bool
) -> _Order:
    """Return how a merge of some parents is published. Raises UsageError for a name that cannot be."""
    return _Order(Goal(papers.merged_name(wanted, dtype), "merge", chosen, again), adapters, base, dtype)


def _is_there(
    goal: Goal, key: Callable[[], str], target: Path | None, begun: float, out: Output, *, behaviour: bool
) -> bool:
    """Return whether nothing is left to do, and say so: the same merge was published before, and no folder is wanted.

    It counts as the same where it was compared, if that is asked for. Raises what stands against publishing it, also
    where a folder is wanted: better before the work than after.
    """
    there = sides.made_before(goal, key, target, out)
    if there is None or (behaviour and there.facts.get("behaviour") is None):
        return False
    sides.say_there(there, {"schema": SCHEMA, "artifact": ARTIFACT}, time.monotonic() - begun, out)
    return True


def _publish(done: Merged, seen: Look, order: _Order, out: Output) -> Receipt:
    """Publish a merged folder as a version of its own name."""
    goal = order.goal
    with sides.asking(goal.chosen) as ask:
        admission = papers.admit_merged(
            done, seen, order.adapters, order.base,
            name=goal.name, policy=rules([goal.chosen]), host=socket.gethostname(),
            caches=cache_roots(os.environ), ask=ask, published=partial(published_as, goal.chosen),
        )  # fmt: skip
    return sides.publish_made(goal, order.key, admission, out)


# ----------------------------------------------------------------------------------------------------------- the words


def _ahead(seen: Look, *, behaviour: bool, out: Output) -> None:
    """Say what will take its time and tells nothing meanwhile."""
    computed = (
        seen.planned is not None
        and seen.planned.plan is not None
        and any(step.computed for step in seen.planned.plan.steps)
    )
    if computed:
        out.talk("PEFT computes what only its own layers can; loading it takes a while")
    if behaviour:
        out.talk("once it is written, base, adapter and result are run to compare what they compute: a while")


def _document(seen: Look) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "outcome": seen.outcome,
        "artifact": ARTIFACT,
        "facts": seen.facts,
        "findings": seen.findings,
        "files": seen.files,
    }


def _show(seen: Look, out: Output) -> None:
    """Print what would be merged."""
    if out.as_json:
        out.json(plain({**_document(seen), "dry_run": True}))
        return
    facts = seen.facts
    out.say(
        f"{seen.outcome}: {facts.get('peft_type') or 'unknown'} adapter into {facts.get('architecture') or 'a model'}"
    )
    if seen.planned is not None and seen.planned.plan is not None:
        changed = len(facts.get("changed_tensors") or [])
        out.say(
            f"  {changed} of {facts.get('tensor_count')} tensors change, {len(seen.files)} files, "
            f"{size(sum(file.size for file in seen.files))} in {seen.planned.plan.dtype}"
        )
        share = facts.get("unchanged_share")
        if share is not None:
            out.say(f"  {share:.1%} of the touched elements would stay as they are")
        out.say(f"  {identity.told(facts.get('base_identity'), seen.findings)}")
    _findings(seen.findings, out)


def _tell(done: Merged, seen: Look, receipt: Receipt | None, seconds: float, out: Output, *, kept: bool) -> None:
    """Print where the result lies, and what was proven."""
    ref = f"{receipt.name}@v{receipt.n}" if receipt is not None else None
    if out.as_json:
        document = _document(seen) | sides.told(done, receipt, seconds, kept=kept)
        out.json(plain(document))
        return
    for finding in ordered(done.findings):
        if finding.severity != "note":
            out.talk(f"{finding.severity}: {finding.code}  {finding.message}", "yellow")
    proof = done.facts["proof"]
    if done.joined:
        out.talk("the same merge lies there already")
    if done.facts.get("device_wanted") is not None:
        out.talk(f"the products were made on {done.facts['device']}: {done.facts['device_told']}")
    whole = size(sum(file["size"] for file in done.files.values()))
    out.talk(
        f"{whole} in {seconds:.1f} s; {proof['tensors_copied']} tensors copied byte for byte, "
        f"{proof['tensors_changed']} changed, {proof['elements_checked']} elements checked"
    )
    if done.facts.get("behaviour") is not None:
        seen_apart = done.facts["behaviour"]
        out.talk(
            f"on fixed inputs {seen_apart['error']:.3g} away from base and adapter together, the base "
            f"{seen_apart['distance']:.3g}"
        )
    sides.say_version(receipt, out)
    out.say(ref or done.path)


def _findings(found: list[Finding], out: Output) -> None:
    for one in ordered(found):
        out.say()
        out.say_painted(f"  {out.paint(one.severity, _STYLES[one.severity])}  ", f"{one.code}  {one.subject}")
        out.say(f"         {one.message}")
        if one.fix:
            out.say(f"    fix: {one.fix}")
