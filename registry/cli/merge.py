"""`registry merge`: an adapter and its base become one model that any server loads, proven number by number."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from weighbridge.adapters import license  # noqa: A004 - the module is about licences
from weighbridge.adapters.merge import start
from weighbridge.adapters.merge.preview import ARTIFACT, Look, look
from weighbridge.adapters.merge.start import Merged
from weighbridge.adapters.merge.values import DTYPES
from weighbridge.adapters.plan import Policy
from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import context, fresh, options, paths
from weighbridge.registry.cli.inspect import EXIT, ordered, plain
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import NotFoundError, UsageError, WeighbridgeError
from weighbridge.registry.flow import merged as papers
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.merged import Parent
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.flow.pull import checked_manifest, pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.refs import shown
from weighbridge.registry.types import BaseFacts, Finding, Owner, Provenance, Receipt

SCHEMA: Final = "weighbridge/merge/1"
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}


class _Side(NamedTuple):
    """One side of a merge: where it lies, and what is known of it where it is a published version."""

    path: Path
    ref: str
    name: str | None = None
    content: str | None = None
    provenance: Provenance | None = None
    base: BaseFacts = BaseFacts()


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
@click.option("--unchanged", is_flag=True, help="Allow a result that equals the base after rounding.")
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
    unchanged: bool,
    workers: int | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> int | None:
    """Merge ADAPTER, a folder or name@v7, into a base model.

    With --to the result is a folder that appears whole or not at all; without it, or with --name, it is published as
    NAME-merged-DTYPE with its lineage. The weights are streamed: memory does not grow with the model, a merge that was
    killed goes on where it was, and every written file is read again and proven. With --dry-run only headers are read;
    it ends 0 when the merge can be made (warnings included), 5 when it is refused, 8 when a folder is not finished.
    """
    begun = time.monotonic()
    with _sides([adapter, *others], base, remote, config, out) as (sides, under, scratch):
        wanted = name or sides[0].name
        if target is None and wanted is None and not dry_run:
            raise UsageError("where should the result go?", fix="--to DIR, --name NAME to publish it, or --dry-run")
        seen = look([side.path for side in sides], under.path, dtype=dtype, weigh=dry_run)
        if dry_run:
            _show(seen, out)
            return EXIT[seen.outcome]
        place = target if target is not None else scratch() / "result"
        with following(out) as follower:
            done = start.merge(seen, place, workers=workers, unchanged=unchanged, progress=follower.total)
        receipt = None
        if name is not None or target is None:
            assert wanted is not None
            chosen = context.choose_remote(context.settings(config), remote)
            receipt = _publish(done, seen, sides, under, wanted=wanted, chosen=chosen, out=out)
        _tell(done, seen, receipt, time.monotonic() - begun, out)
    return None


# ---------------------------------------------------------------------------------------------------------- two sides


@contextmanager
def _sides(
    adapters: list[str], base: str, remote: str | None, config: str | None, out: Output
) -> Iterator[tuple[list[_Side], _Side, Any]]:
    """Find both sides of a merge; what has to be fetched lies in a scratch folder until the command has succeeded."""
    words = "\0".join([*adapters, base, remote or ""])
    place = Path(cache_dir(os.environ), "merge", sha256_bytes(words.encode("utf-8", "surrogateescape"))[:16])

    def scratch() -> Path:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def side(text: str, *, hub: bool) -> _Side:
        if Path(text).exists():
            return _Side(Path(text), text)
        cached = license.cache_folder(text, None, license.cache_roots(os.environ)) if hub and is_repo_id(text) else None
        if cached is not None:
            return _Side(cached, text)
        if "/" in text or text.startswith((".", "~")):
            raise NotFoundError(
                f"there is no {shown(text)}",
                why="it is no folder here" + (", and not in the Hub cache" if hub else ""),
                fix="name a folder that exists, or a version such as name@v7",
            )
        return _fetched(text, scratch(), remote, config, out)

    found = [side(text, hub=False) for text in adapters]
    under = side(base, hub=True)
    yield found, under, scratch
    shutil.rmtree(place, ignore_errors=True)


def _fetched(ref: str, scratch: Path, remote: str | None, config: str | None, out: Output) -> _Side:
    """Return a published version as a folder."""
    chosen = context.choose_remote(context.settings(config), remote)
    with fresh.opened(chosen, out, ref=ref) as opened:
        version = opened.resolve(ref)
        place = scratch / f"{version.name}@v{version.n}"
        with following(out) as follower:
            pull(
                opened.remote,
                version.name,
                version.n,
                place,
                manifest_sha256=version.manifest,
                card_sha256=version.card,
                begin=follower.begin,
                progress=follower.moved,
            )
        manifest = checked_manifest(opened.remote, version.name, version.n, version.manifest)
    facts = manifest.facts
    return _Side(place, version.ref, version.name, version.content, facts.provenance, facts.base)


def _publish(
    done: Merged, seen: Look, sides: list[_Side], under: _Side, *, wanted: str, chosen: RemoteSettings, out: Output
) -> Receipt:
    """Publish a merged folder as a version of its own name."""
    assert seen.base is not None
    dtype = str(done.facts["written_dtype"])
    name = papers.merged_name(wanted, dtype)
    adapters = [
        Parent(ref=side.ref if side.content else one.artifact, content=side.content or papers.content_of(one),
               provenance=side.provenance, base=side.base)
        for side, one in zip(sides, seen.adapters, strict=True)
    ]  # fmt: skip
    recorded = seen.adapters[0].base.id
    beneath = Parent(
        ref=under.ref if under.content else recorded or seen.base.artifact,
        content=under.content or papers.content_of(seen.base),
    )
    policy = Policy(
        paths=chosen.paths,  # type: ignore[arg-type]
        unknown_license=chosen.unknown_license,  # type: ignore[arg-type]
        deny_licenses=chosen.deny_licenses,
        remote_code=chosen.remote_code,  # type: ignore[arg-type]
    )
    admission = papers.admit_merged(done, seen, adapters, beneath, name=name, policy=policy, host=socket.gethostname())
    untold: list[WeighbridgeError] = []
    opened = context.connect(chosen)
    try:
        owner = Owner(host=socket.gethostname(), daemon=f"merge by {fresh.whoami()}")
        registry = fresh.registry_of(chosen, opened, writer=owner.daemon)
        with following(out) as follower:
            candidate = prepare(
                opened,
                name,
                admission.files,
                admission.facts,
                transform=admission.transform,
                made=admission.made,
                derivation=papers.derivation(adapters, beneath, dtype),
                progress=follower.total,
            )
            try:
                receipt = publish(
                    opened, chosen.name, registry, candidate, owner, untold=untold.append, progress=follower.total
                )
            except BaseException:
                staging.discard(candidate.bundle)
                raise
    finally:
        opened.close()
    fresh.published(chosen, receipt, untold, out)
    return receipt


# ----------------------------------------------------------------------------------------------------------- the words


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


def _tell(done: Merged, seen: Look, receipt: Receipt | None, seconds: float, out: Output) -> None:
    """Print where the result lies, and what was proven."""
    ref = f"{receipt.name}@v{receipt.n}" if receipt is not None else None
    if out.as_json:
        document = _document(seen) | {
            "dry_run": False,
            "path": done.path,
            "ref": ref,
            "joined": done.joined or (receipt is not None and receipt.joined),
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
    whole = size(sum(file["size"] for file in done.files.values()))
    out.talk(
        f"{whole} in {seconds:.1f} s; {proof['tensors_copied']} tensors copied byte for byte, "
        f"{proof['tensors_changed']} changed, {proof['elements_checked']} elements checked"
    )
    out.say(ref or done.path)


def _findings(found: list[Finding], out: Output) -> None:
    for one in ordered(found):
        out.say()
        out.say_painted(f"  {out.paint(one.severity, _STYLES[one.severity])}  ", f"{one.code}  {one.subject}")
        out.say(f"         {one.message}")
        if one.fix:
            out.say(f"    fix: {one.fix}")
