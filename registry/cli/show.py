"""`registry show`: everything that is known of one version, from the cache once its manifest was fetched."""

import time
from collections.abc import Iterator
from typing import Any, Final

import click

from weighbridge.registry.catalog_read import Row
from weighbridge.registry.cli import context, options
from weighbridge.registry.cli.catalogue import Shelf, complete, public, reading
from weighbridge.registry.cli.catalogue import copies as copies_of
from weighbridge.registry.cli.output import Output, age, short, size
from weighbridge.registry.shell import load

SCHEMA: Final = "weighbridge/show/1"
_TYPES: Final = {"LORA": "LoRA", "IA3": "IA3", "LOHA": "LoHa", "LOKR": "LoKr", "ADALORA": "AdaLoRA"}


@click.command("show")
@click.argument("ref", shell_complete=complete)
@click.option("--step", type=int, metavar="N", help="The version of a plain name that was made at this training step.")
@click.option("--copies", is_flag=True, help="Ask every configured remote whether it holds this version.")
@options.remote
@options.offline
@options.config
@options.listing
def show(
    *, ref: str, step: int | None, copies: bool, remote: str | None, offline: bool, config: str | None, out: Output
) -> None:
    """Show everything known about one version, and which remotes hold it.

    REF is name@v7, name:tag, name (its latest version) or @sha256:<8 or more hex digits>. Of the remotes that are not
    read, the last look counts; a level of verification is that of `push`, `pull`, `mirror` or `verify` from here.
    """
    settings = context.settings(config)
    chosen = context.choose_remote(settings, remote)
    if copies and not offline:
        load("weighbridge.registry.cli.fresh:look_everywhere")(settings.remotes.values(), out)

    def describe(shelf: Shelf, row: Row, text: str | None, out: Output) -> None:
        tell(shelf, row, text, copies_of(shelf, row, settings.remotes.values()), out)

    def look(shelf: Shelf) -> bool:
        row = shelf.view.find(ref, step)
        text = shelf.view.document(row["manifest"]) if row is not None and row["manifest"] else None
        if row is None or text is None:
            if not offline:
                return False
            row = row or load("weighbridge.registry.cli.fresh:offline")(shelf, ref, step)
        describe(shelf, row, text, out)
        return True

    if not reading(chosen, out, look, offline=offline):
        load("weighbridge.registry.cli.fresh:fetched")(chosen, ref, step, out, describe)


def tell(shelf: Shelf, row: Row, text: str | None, copies: list[dict[str, Any]], out: Output) -> None:
    """Print one version and its copies; without its manifest's text what the catalogue knows."""
    told = public(row, shelf.remote.name)
    told["where"] = [copy["remote"] for copy in copies if copy["state"] == "committed"] or told["where"]
    manifest: dict[str, Any] | None = load("json:loads")(text) if text is not None else None
    if out.as_json:
        out.json({"schema": SCHEMA, **shelf.known(), "version": told, "copies": copies, "manifest": manifest})
        return
    if out.fmt == "name":
        out.say(told["ref"])
        return
    wide = out.fmt == "wide"
    tags = f"   tags: {', '.join(row['tags'])}" if row["tags"] else ""
    out.say(f"{told['ref']}   {row['kind']}, {row['state']}{tags}")
    for label, words in [*_facts(row, told, copies, wide=wide), *(_details(manifest, wide=wide) if manifest else ())]:
        out.say(f"{label:<10}{words}")
    if manifest is None:
        out.talk("its manifest was never fetched here: run it once without --offline")
    if shelf.cached:
        out.talk(f"from {shelf.remote.name}{shelf.age()}", "dim")


def _facts(row: Row, told: dict[str, Any], copies: list[dict[str, Any]], *, wide: bool) -> Iterator[tuple[str, str]]:
    """Yield what the catalogue knows."""
    digest = row["content"] if wide else f"sha256:{short(row['content'])}   (full with -o wide)"
    yield "digest", digest
    if wide:
        yield "manifest", f"sha256:{row['manifest']}"
    made = [f"{told['created_at']} ({age(row['created_at'], time.time())} ago)"] if told["created_at"] else []
    made += [f"by {row['owner']}"] if row["owner"] else []
    made += [f"run {row['run']}"] if row["run"] else []
    made += [f"step {row['step']}"] if row["step"] is not None else []
    yield "created", ", ".join(made) or "unknown"
    shown = [copy for at, copy in enumerate(copies) if wide or not at or copy["state"] not in {"absent", "unknown"}]
    for at, copy in enumerate(shown):
        yield "" if at else "copies", f"{copy['remote']}   {copy['location']}{_standing(copy, first=not at)}"


def _standing(copy: dict[str, Any], *, first: bool) -> str:
    """Return how a copy stands: the level at which it was verified and when, or why it is none."""
    words = [] if copy["state"] == "committed" or first else [copy["state"]]
    if copy["verified"] and copy["state"] == "committed":
        words.append(f"{copy['verified']} at {copy['verified_at']}")
    return f"   ({', '.join(words)})" if words else ""


def _details(manifest: dict[str, Any], *, wide: bool) -> Iterator[tuple[str, str]]:
    """Yield what the manifest says."""
    told = manifest["provenance"]
    base, license_, weights = manifest["base"], manifest["license"], manifest["weights"]
    yield "base", _with(_at(base.get("id"), base.get("revision"), wide=wide), base.get("evidence"))
    words = license_.get("id") or "unknown"
    source = ": ".join(str(w) for w in (license_.get("source"), license_.get("evidence")) if w)
    yield "license", _with(words, source)
    dtypes = ", ".join(f"{name} {count['tensors']}" for name, count in sorted(weights.get("dtypes", {}).items()))
    files = "1 file" if weights["shards"] == 1 else f"{weights['shards']} files"
    known = weights["parameters"]
    count = "number of parameters unknown" if known is None else f"{_millions(known)} parameters"
    yield "weights", f"{files}, {weights['tensors']} tensors, {dtypes}, {count}"
    if manifest.get("adapter"):
        yield "adapter", _adapter(manifest["adapter"])
    best = told.get("best")
    if best:
        at = f" at step {best['step']}" if best.get("step") is not None else ""
        yield "best", f"{best['metric']} {_number(best['value'])}{at}"
    if told.get("metrics"):
        yield (
            "metrics",
            ", ".join(f"{key} {_number(value)}" for key, value in list(told["metrics"].items())[: None if wide else 6]),
        )
    code = told.get("code")
    if code:
        dirty = " (with changes that are not committed)" if code.get("dirty") else ""
        yield "code", f"{_at(code.get('remote'), code.get('commit'), wide=wide)}{dirty}"
    data = [_at(d.get("id"), d.get("revision"), wide=wide) for d in told.get("data") or []]
    if data:
        yield "data", ", ".join(data)
    if told.get("host"):
        yield "host", str(told["host"])
    if told.get("purpose"):
        yield "purpose", str(told["purpose"])
    for edge in manifest.get("lineage") or []:
        yield "lineage", f"{edge['relation']} {edge['ref']}" + (f" {edge['content']}" if edge.get("content") else "")
    yield from _files(manifest, wide=wide)
    findings = manifest.get("findings") or []
    yield from _proven(findings)
    yield "checks", ", ".join(_counted(findings)) if findings else "ok"
    for finding in findings:
        if wide or finding["severity"] != "note":
            yield "", f"{finding['severity']} {finding['code']} {finding['subject']}: {finding['message']}"
            reason = (finding.get("data") or {}).get("allowed")
            if reason:
                yield "", f"     allowed: {reason}"


def _proven(findings: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Say how far a merge was proven: by its elements, and by what it computes where that was compared."""
    for one in findings:
        if one["code"] == "merge-proven":
            seen = (one.get("data") or {}).get("behaviour") or {}
            apart = [seen[name] for name in ("error", "distance") if isinstance(seen.get(name), int | float)]
            told = "what it computes was not compared with base and adapter"
            if len(apart) == 2:
                told = "and what it computes: {:.3g} away from base and adapter together, the base {:.3g}".format(
                    *apart
                )
            yield "proven", f"its elements; {told}"


def _files(manifest: dict[str, Any], *, wide: bool) -> Iterator[tuple[str, str]]:
    files = manifest["files"]
    shown = files if wide else files[:20]
    room = max(len(file["path"]) for file in shown)
    for at, file in enumerate(shown):
        digest = file["sha256"] if wide else short(file["sha256"])
        yield "" if at else "files", f"{file['path']:<{room}}  {size(file['size']):>8}  {digest}"
    if len(files) > len(shown):
        yield "", f"and {len(files) - len(shown)} more (-o wide)"
    reasons: dict[str, list[str]] = {}
    for left in manifest.get("left_out") or []:
        reasons.setdefault(left["reason"], []).append(f"{left['path']} {size(left['size'])}")
    for at, (reason, names) in enumerate(reasons.items()):
        some = names if wide else names[:6]
        more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
        yield "" if at else "left out", f"{', '.join(some)}{more} ({reason})"


def _adapter(adapter: dict[str, Any]) -> str:
    kind = str(adapter["peft_type"])
    words = [_TYPES.get(kind, kind)]
    words += [
        f"{key}={_number(adapter[field])}" for key, field in (("r", "rank"), ("alpha", "alpha")) if adapter.get(field)
    ]
    words += adapter.get("variants") or []
    targets = adapter.get("targets")
    if targets:
        words.append("targets " + (targets if isinstance(targets, str) else " ".join(targets)))
    return ", ".join([" ".join(words[:3]), *words[3:]])


def _counted(findings: list[dict[str, Any]]) -> Iterator[str]:
    for severity in ("block", "warn", "note"):
        number = sum(finding["severity"] == severity for finding in findings)
        if number:
            word = "allowed block" if severity == "block" else "warning" if severity == "warn" else "note"
            yield f"{number} {word}{'' if number == 1 else 's'}"


def _millions(count: int) -> str:
    for limit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= limit:
            return f"{count / limit:.3g} {letter}"
    return f"{count:,}"


def _number(value: Any) -> str:
    """Return a metric with six digits, as the card has it; the manifest keeps them all."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _at(name: str | None, revision: str | None, *, wide: bool) -> str:
    if not name:
        return f"@ {revision}" if revision else "unknown"
    return f"{name} @ {revision if wide else revision[:12]}" if revision else name


def _with(words: str, evidence: str | None) -> str:
    return f"{words}   ({evidence})" if evidence else words
