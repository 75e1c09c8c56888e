"""`registry inspect`: the half-minute look at any folder, for people on one screen and for programs as JSON."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from weighbridge.adapters import inspection as values
from weighbridge.adapters.inspect import inspect as look
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.plan import JudgedFile
from weighbridge.registry.cli import options
from weighbridge.registry.cli.output import Column, Output, line, size, write
from weighbridge.registry.errors import NotFoundError
from weighbridge.registry.refs import utf8
from weighbridge.registry.types import Finding

EXIT: Final = {"accept": 0, "warn": 0, "refuse": 5, "wait": 8}
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}
_VERDICT: Final = {"accept": "green", "warn": "yellow", "refuse": "red", "wait": "yellow"}
_ORDER: Final = ("block", "warn", "note")
_NAMES_SHOWN: Final = 6
_ARTIFACTS_SHOWN: Final = 12


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Names to pass over, as in a watch rule; repeatable.")
@options.listing
def inspect(path: Path, ignore: tuple[str, ...], out: Output) -> int:
    """Say what PATH holds: adapter or model, whole or not, what would be published, what not and why.

    Nothing is changed, run or unpickled. Ends 0 when it can be published (warnings included), 5 when it is refused, 8
    when it is not finished. With -o wide every file is listed with its reason.
    """
    try:
        found = look(path, ignore=ignore)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no {path}", fix="name a folder or a file that exists") from error
    if out.fmt == "json":
        out.json(plain(values.document(found)))
    elif out.fmt == "jsonl":
        write("".join(line(plain(one)) + "\n" for one in found.artifacts))
    elif out.fmt == "name":
        for one in found.artifacts:
            out.say(one.relative)
    else:
        show(found, out)
    return EXIT[found.outcome]


def plain(value: Any) -> Any:
    """Return a value as plain JSON types; bytes of a path that are no UTF-8 are replaced by their numbers."""
    return _spelled(msgspec.to_builtins(value, str_keys=True))


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, dict):
        return {utf8(key): _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, (list, tuple)) else value


def show(found: Inspection, out: Output) -> None:
    """Print the one-screen view: what it is, what would be published, what not, and every finding with its fix."""
    verdict = out.paint(found.outcome, _VERDICT[found.outcome])
    out.say_painted(f"{verdict}  ", f"{found.path}: {_label(found)}")
    for title, what in rows(found):
        out.say(f"  {title:<9} {what}")
    for one in ordered(found.findings):
        out.say()
        out.say_painted(f"  {out.paint(one.severity, _STYLES[one.severity])}  ", f"{one.code}  {one.subject}")
        out.say(f"         {one.message}")
        if one.fix:
            out.say(f"    fix: {one.fix}")
    if out.fmt == "wide":
        out.say()
        out.table(
            [plain(f) for f in found.files],
            [
                Column("path"),
                Column("size", show=size, right=True),
                Column("role"),
                Column("publish"),
                Column("reason"),
            ],
        )


def rows(found: Inspection) -> list[tuple[str, str]]:
    """Return the titled lines of the view."""
    facts = found.facts
    result = next((a for a in found.artifacts if a.relative == found.artifact_root), None)
    lines: list[tuple[str, str]] = []
    if len(found.artifacts) > 1:
        shown = [_short(a) for a in found.artifacts[:_ARTIFACTS_SHOWN]]
        rest = len(found.artifacts) - len(shown)
        lines.append(("holds", f"{len(found.artifacts)} artifacts"))
        lines += [("", text) for text in shown]
        if rest > 0:
            lines.append(("", f"and {rest} more"))
    if result is not None:
        lines.append(("what", what(result)))
        lines.append(("weights", weights(result)))
        if result.step is not None or result.resumable is not None:
            lines.append(("training", training(result)))
    missing = facts.get("missing_files") or []
    lines.append(("missing", _names(missing) if missing else "nothing"))
    if result is not None and result.kind is not None:
        licence = result.license.id or "unknown"
        lines.append(("licence", licence + (f" ({result.license.evidence})" if result.license.evidence else "")))
    listed = _files([f for f in found.files if f.publish])
    later = {"refuse": "nothing as it stands; once mended ", "wait": "nothing yet; when finished "}.get(
        found.outcome, ""
    )
    lines.append(("publish", later + listed if listed else "nothing"))
    for reason in sorted({f.reason for f in found.files if f.reason}):
        lines.append(("left out", f"{reason}: {_files([f for f in found.files if f.reason == reason])}"))
    return lines


def what(one: Artifact) -> str:
    """Return in words what an artifact is: full or delta, of which family, on which base."""
    facts = one.facts
    if one.kind == "adapter":
        parts = [f"a delta: {facts.get('peft_type') or 'unknown'} adapter"]
        if facts.get("rank") is not None:
            parts.append(f"rank {facts['rank']}")
        if facts.get("scaling") is not None:
            parts.append(f"strength {facts['scaling']:g}")
        targets = facts.get("targets") or facts.get("target_pattern")
        if targets:
            parts.append(f"on {_names(targets) if isinstance(targets, list) else targets}")
        return f"{', '.join(parts)}; base {facts.get('base_model') or 'unknown'}"
    if one.kind is not None:
        packed = f", {facts.get('quant_method')} {facts.get('bits') or '?'} bit" if one.kind == "quantized" else ""
        return f"a whole model: {facts.get('architecture') or 'unknown architecture'}{packed}"
    return f"{one.artifact}: recognised, cannot be published as it is"


def weights(one: Artifact) -> str:
    """Return in words how the weights are stored."""
    if one.weights is None or not one.weights.tensors:
        return "torch pickles" if one.facts.get("pickle_format") else "none that could be read"
    dtypes = ", ".join(f"{dtype} x{count.tensors}" for dtype, count in one.weights.dtypes.items())
    shards = f" in {one.weights.shards} shards" if one.weights.shards > 1 else ""
    return (
        f"safetensors{shards}: {one.weights.tensors} tensors, {one.facts.get('param_count')} parameters, {dtypes}, "
        f"{size(one.weights.bytes)}"
    )


def training(one: Artifact) -> str:
    """Return in words what training state is there."""
    step = f"step {one.step}" if one.step is not None else "step unknown"
    if one.resumable is None:
        return f"{step}; no training state here"
    return f"{step}; training can go on from here" if one.resumable else f"{step}; training cannot go on from here"


def ordered(found: Iterable[Finding]) -> list[Finding]:
    """Return findings, the gravest first."""
    return sorted(found, key=lambda f: _ORDER.index(f.severity))


def _label(found: Inspection) -> str:
    where = f" in {found.artifact_root}" if found.artifact_root != "." else ""
    return f"{found.artifact or 'nothing known'}{where}"


def _short(one: Artifact) -> str:
    step = f", step {one.step}" if one.step is not None else ""
    return f"{one.outcome:<6} {one.relative}: {one.artifact}{step}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _files(files: Sequence[JudgedFile]) -> str:
    if not files:
        return ""
    total = size(sum(f.size for f in files))
    return f"{len(files)} file{'' if len(files) == 1 else 's'}, {total}: {_names([f.path for f in files])}"
