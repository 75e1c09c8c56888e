"""`registry inspect`: the half-minute look at any folder, for people on one screen and for programs as JSON."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from weighbridge.adapters import inspection as values
from weighbridge.adapters.inspect import inspect as look
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.plan import JudgedFile
from weighbridge.registry.cli import options, paths
from weighbridge.registry.cli.output import Column, Output, line, size, write
from weighbridge.registry.errors import utf8
from weighbridge.registry.types import Finding

EXIT: Final = {"accept": 0, "warn": 0, "refuse": 5, "wait": 8}
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}
_VERDICT: Final = {"accept": "green", "warn": "yellow", "refuse": "red", "wait": "yellow"}
_ORDER: Final = ("block", "warn", "note")
_NAMES_SHOWN: Final = 6
_ARTIFACTS_SHOWN: Final = 6
_ALIKE: Final = 3
"""Findings of one code that differ in more than their subject and are still told one by one."""


@click.command("inspect")
@click.argument("path", type=paths.PLACE)
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
        raise paths.absent(path) from error
    if not found.artifacts and not path.exists():
        raise paths.absent(path)  # a link to nothing, under a name that is none of weights
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
    wide = out.fmt == "wide"
    verdict = out.paint(found.outcome, _VERDICT[found.outcome])
    out.say_painted(f"{verdict}  ", f"{found.path}: {_label(found)}")
    for title, what in rows(found):
        out.say(f"  {title:<9} {what}")
    for one, subjects, alike in grouped(found, apart=wide):
        out.say()
        about = subjects[0] if len(subjects) == 1 else f"{len(subjects)} times: {_names(subjects, all_=wide)}"
        out.say_painted(f"  {out.paint(one.severity, _STYLES[one.severity])}  ", f"{one.code}  {about}")
        out.say(f"         {one.message}" + ("" if alike else f" (one of {len(subjects)}; -o wide tells each)"))
        if one.fix:
            out.say(f"    fix: {one.fix}")
    if wide:
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
        lines.append(("holds", f"{len(found.artifacts)} artifacts"))
        lines += [("", text) for text in _holds(found.artifacts)]
    if result is not None:
        lines.append(("what", what(result)))
        lines.append(("weights", weights(result)))
        if result.kind is not None and result.unread:
            lines.append(("values", result.unread))
        if result.step is not None or result.resumable is not None:
            lines.append(("training", training(result)))
    missing = facts.get("missing_files") or []
    lines.append(("missing", _names(missing) if missing else "nothing"))
    if result is not None and result.kind is not None:
        licence = result.license.id or "unknown"
        lines.append(("licence", licence + (f" ({result.license.evidence})" if result.license.evidence else "")))
    lines.append(("publish", _published(found)))
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
    count = one.facts.get("param_count")
    parameters = f"{count:,}" if isinstance(count, int) else "unknown"
    return (
        f"safetensors{shards}: {one.weights.tensors} tensors, {parameters} parameters, {dtypes}, "
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


def grouped(found: Inspection, *, apart: bool = False) -> list[tuple[Finding, list[str], bool]]:
    """Return findings, the gravest first, each with its subjects: what is said of many checkpoints is said once.

    Findings of one code are told together when their sentences differ by their subject alone, or, unless `apart`, when
    they are many; the last item tells whether the one sentence holds for every subject.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in ordered(found.findings):
        pattern = one.message.replace(one.subject, "*")
        groups.setdefault((one.severity, one.code, one.fix or "", pattern), []).append(one)
    number = Counter(key[:3] for key in groups)
    merged: dict[tuple[str, ...], list[Finding]] = {}
    for key, same in groups.items():
        many = number[key[:3]] > _ALIKE and not apart
        merged.setdefault(key[:3] if many else key, []).extend(same)
    return [(same[0], _subjects(same, found.artifacts), key in groups) for key, same in merged.items()]


def _subjects(same: Sequence[Finding], artifacts: Sequence[Artifact]) -> list[str]:
    """Return what findings are about; where a name alone does not tell which artifact, the artifacts."""
    subjects = list(dict.fromkeys(one.subject for one in same))
    if len(subjects) == len(same):
        return sorted(subjects, key=_natural)
    owners = [one.relative for one in artifacts if any(finding in same for finding in one.findings)]
    return sorted(owners, key=_natural) if len(owners) >= len(subjects) else subjects


def _label(found: Inspection) -> str:
    where = f" in {found.artifact_root}" if found.artifact_root != "." else ""
    return f"{found.artifact or 'nothing known'}{where}"


def _holds(artifacts: Sequence[Artifact]) -> list[str]:
    """Return a line for each artifact, and where they are many one for each sort of them."""
    if len(artifacts) <= _ARTIFACTS_SHOWN:
        return [_short(one) for one in sorted(artifacts, key=lambda a: _natural(a.relative))]
    sorts: dict[tuple[str, str], list[str]] = {}
    for one in artifacts:
        sorts.setdefault((one.outcome, one.artifact), []).append(one.relative)
    return [
        f"{outcome:<6} {len(names)} x {artifact}: {_span(sorted(names, key=_natural))}"
        for (outcome, artifact), names in sorts.items()
    ]


def _published(found: Inspection) -> str:
    """Return what would be published: of one artifact its files, of several how many files each has."""
    if len(found.artifacts) == 1 and found.artifacts[0].kind is None:
        return "nothing of it"
    if len(found.artifacts) <= 1:
        listed = _files([f for f in found.files if f.publish])
        made = found.facts.get("assembled_from")
        if made:
            listed = f"the weights, put together from {made} as safetensors" + (f"; {listed}" if listed else "")
        elif found.artifacts and found.artifacts[0].convert:
            listed += " (pickles as the safetensors of their tensors)"
        later = {"refuse": "nothing as it stands; once mended ", "wait": "nothing yet; when finished "}
        return later.get(found.outcome, "") + listed if listed else "nothing"
    able = [one for one in found.artifacts if one.kind is not None and one.outcome in {"accept", "warn"}]
    every = len(found.artifacts)
    if not able:
        return f"nothing as it stands: none of the {every} artifacts is fit"
    each = {
        one.relative: [f for f in one.files if f.publish] for one in sorted(able, key=lambda a: _natural(a.relative))
    }
    told = [f"{where} ({_counted(files)})" for where, files in each.items()]
    count = f"{every} artifacts" if len(able) == every else f"{len(able)} of {every} artifacts"
    return f"{count}, together {_counted([f for files in each.values() for f in files])}: {_span(told)}"


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts checkpoint-200 before checkpoint-1000."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _span(names: Sequence[str]) -> str:
    """Return a list of names in order, its middle left out where it is long."""
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:2])} ... {names[-1]}"


def _short(one: Artifact) -> str:
    step = f", step {one.step}" if one.step is not None else ""
    return f"{one.outcome:<6} {one.relative}: {one.artifact}{step}"


def _names(names: Sequence[str], *, all_: bool = False) -> str:
    shown = ", ".join(names if all_ else names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN and not all_ else "")


def _files(files: Sequence[JudgedFile]) -> str:
    if not files:
        return ""
    names = Counter(f.path.rpartition("/")[2] for f in files)
    if len(names) < len(files):  # the same files of several checkpoints
        return f"{_counted(files)}: {_names([n if c == 1 else f'{n} x{c}' for n, c in names.items()])}"
    return f"{_counted(files)}: {_names([f.path for f in files])}"


def _counted(files: Sequence[JudgedFile]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}, {size(sum(f.size for f in files))}"
