"""`registry merge`: an adapter and its base become one model that any server loads, proven number by number."""

import time
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.adapters.merge import start
from weighbridge.adapters.merge.preview import ARTIFACT, Look, look
from weighbridge.adapters.merge.start import Merged
from weighbridge.adapters.merge.values import DTYPES
from weighbridge.registry.cli import options
from weighbridge.registry.cli.inspect import EXIT, ordered, plain
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import NotFoundError, UsageError
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

SCHEMA: Final = "weighbridge/merge/1"
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}


@click.command("merge")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option(
    "--base", metavar="DIR", required=True, type=click.Path(path_type=Path), help="The folder of the base model."
)
@click.option("--and", "others", multiple=True, metavar="DIR", type=click.Path(path_type=Path),
              help="Another adapter, summed before the one rounding; repeatable.")  # fmt: skip
@click.option(
    "--to", "target", metavar="DIR", type=click.Path(path_type=Path), help="The folder that will hold the result."
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="The precision of the result [default: the base's].")
@click.option("--dry-run", is_flag=True, help="Only say what would be merged and what stands against it.")
@click.option("--unchanged", is_flag=True, help="Allow a result that equals the base after rounding.")
@click.option(
    "--workers", type=click.IntRange(1, 64), metavar="N", help="Files written at once [default: by processors]."
)
@options.talking
def merge(
    *,
    adapter: Path,
    base: Path,
    others: tuple[Path, ...],
    target: Path | None,
    dtype: str | None,
    dry_run: bool,
    unchanged: bool,
    workers: int | None,
    out: Output,
) -> int | None:
    """Merge ADAPTER into a base model, into a folder that appears whole or not at all.

    The weights are streamed: memory does not grow with the model, a merge that was killed goes on where it was, and
    every written file is read again and proven. With --dry-run only headers are read; it ends 0 when the merge can be
    made (warnings included), 5 when it is refused, 8 when a folder is not finished.
    """
    if target is None and not dry_run:
        raise UsageError("where should the result go?", fix="--to DIR, or --dry-run to look first")
    for path in (adapter, *others, base):
        if not path.exists():
            raise NotFoundError(f"there is no {shown(str(path))}", fix="name a folder that exists")
    seen = look([adapter, *others], base, dtype=dtype, weigh=dry_run)
    if dry_run:
        _show(seen, out)
        return EXIT[seen.outcome]
    assert target is not None
    begun = time.monotonic()
    with following(out) as follower:
        done = start.merge(seen, target, workers=workers, unchanged=unchanged, progress=follower.total)
    _tell(done, seen, time.monotonic() - begun, out)
    return None


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
    _findings(seen.findings, out)


def _tell(done: Merged, seen: Look, seconds: float, out: Output) -> None:
    """Print where the result lies, and what was proven."""
    if out.as_json:
        document = _document(seen) | {
            "dry_run": False,
            "path": done.path,
            "joined": done.joined,
            "facts": done.facts,
            "findings": done.findings,
            "files": [{"path": path, **file} for path, file in sorted(done.files.items())],
            "seconds": round(seconds, 3),
        }
        out.json(plain(document))
        return
    for finding in ordered(done.findings):
        if finding.severity != "note":
            out.talk(f"{finding.severity}: {finding.code}  {finding.message}", "yellow")
    proof = done.facts["proof"]
    if done.joined:
        out.talk("the same merge lies there already")
    out.talk(
        f"{size(sum(file['size'] for file in done.files.values()))} in {seconds:.1f} s; {proof['tensors_copied']} "
        f"tensors copied byte for byte, {proof['tensors_changed']} changed, {proof['elements_checked']} elements checked"
    )
    out.say(done.path)


def _findings(found: list[Finding], out: Output) -> None:
    for one in ordered(found):
        out.say()
        out.say_painted(f"  {out.paint(one.severity, _STYLES[one.severity])}  ", f"{one.code}  {one.subject}")
        out.say(f"         {one.message}")
        if one.fix:
            out.say(f"    fix: {one.fix}")
