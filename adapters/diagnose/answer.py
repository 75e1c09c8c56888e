"""Why does this folder not load, or not work? Causes that are really in these files, worst first, and what is not."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import layout, license, shards  # noqa: A004 - the module is about licences
from weighbridge.adapters.diagnose import against
from weighbridge.adapters.diagnose import text as texts
from weighbridge.adapters.diagnose.against import Against
from weighbridge.adapters.diagnose.container import CUT, DAMAGED
from weighbridge.adapters.diagnose.papers import papers
from weighbridge.adapters.diagnose.rule import STAGES, Case, Cause, Evidence, Rule
from weighbridge.adapters.diagnose.symptoms import SYMPTOMS
from weighbridge.adapters.diagnose.table import RULES
from weighbridge.adapters.diagnose.text import Text
from weighbridge.adapters.families import pickled
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.inspect import judge, tree_of
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.reading import VALUES_LIMIT, Place, Reader
from weighbridge.adapters.whole import header_of
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Value

SCHEMA: Final = "weighbridge/diagnose/1"
_GRAVITY: Final = {"block": 0, "warn": 1, "note": 2}
_DATA_LIMIT: Final = 50
COMPARED: Final = 8
"""Artifacts of one folder that are compared with their base: each time the base's headers are read."""

_TORN: Final = frozenset(
    {*CUT, *DAMAGED, "lfs-pointer", "link-dangling", "shard-missing", "suffix-lies", "index-damaged", "index-missing"}
)
_TABLES: Final = (layout.MODEL_CONFIG, layout.ADAPTER_CONFIG, "quantize_config.json", "tokenizer.json")


class Said(Value, frozen=True):
    """A symptom that a text shows, with the line it was found in, and whether a cause here explains it."""

    symptom: str
    title: str
    line: int
    text: str
    means: str
    explained: bool


class Diagnosis(Value, frozen=True):
    """The answer; `said` is None where no text was given, `unsure` lists what was not looked at."""

    path: str
    artifact: str | None
    kind: str | None
    outcome: str
    """found, nothing, or wait: the folder is not finished."""
    said: list[Said] | None
    lines: int
    """Lines of the text; 0 without one."""
    cut: bool
    """The middle of a long text was left out."""
    base: str | None
    causes: list[Cause]
    unsure: list[str]


def diagnose(
    path: Path,
    text: str | None = None,
    *,
    base: str | None = None,
    ignore: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Return the causes of failures that are in a folder or file; with a text those that explain it come first.

    `base` is a folder or a Hub id whose cache is here; without it the base that an adapter names is looked for.
    Raises OSError when the path is gone, NotFoundError for a base that was asked for and is nowhere, UsageError where
    an adapter was named as the base.
    """
    world = os.environ if environ is None else environ
    reader = Reader(tree_of(path, ignore))
    seen = judge(path, reader, caches=license.cache_roots(world))
    told = texts.read(text) if text is not None else None
    said = {} if told is None else _said(told)
    causes: list[Cause] = []
    unsure: list[str] = []
    bases: list[str] = []
    compared_with: list[str] = []
    for one in seen.artifacts or [_unknown(seen)]:
        case = _case(path, one, seen, reader, told)
        where = against.find_base(one, base, world)
        if where is None and base is not None:
            raise errors.NotFoundError(
                f"there is no base {base}", why="it is no folder here, and not in the Hub cache", fix="--base FOLDER"
            )
        compared = _compared(case, where, unsure) if len(compared_with) < COMPARED else None
        if compared is not None:
            compared_with.append(one.relative)
        elif where is not None and len(compared_with) >= COMPARED:
            unsure.append(f"the base beside all but {COMPARED} of the artifacts: name one artifact to compare it")
        if compared is not None and str(compared.root) not in bases:
            bases.append(str(compared.root))
        case = case._replace(against=compared)
        causes += [cause for rule in RULES for cause in _causes(rule, case, said)]
        unsure += _unsure(case)
    causes = _sorted(_once(causes))
    explained = {name for cause in causes for name in cause.explains}
    answers = [
        Said(
            symptom=name, title=SYMPTOMS[name].title, line=line.number, text=line.shown[: texts.SHOWN],
            means=SYMPTOMS[name].means, explained=name in explained,
        )
        for name, line in sorted(said.items(), key=lambda item: (item[0] not in explained, -item[1].number))
    ]  # fmt: skip
    return Diagnosis(
        path=os.fspath(path),
        artifact=seen.artifact,
        kind=seen.kind,
        outcome=_outcome(causes),
        said=None if told is None else answers,
        lines=0 if told is None else told.total,
        cut=told is not None and told.cut,
        base=bases[0] if bases else None,
        causes=causes,
        unsure=list(dict.fromkeys(unsure)),
    )


def _said(told: Text) -> dict[str, texts.Line]:
    """Return the symptoms that a text shows, each with the last line that says so."""
    found = {
        name: texts.find(told, (*symptom.says, *symptom.words) if told.short else symptom.says)
        for name, symptom in SYMPTOMS.items()
    }
    return {name: line for name, line in found.items() if line is not None}


def _outcome(causes: Iterable[Cause]) -> str:
    """Return what the causes add up to; a fault that waits is no fault where it is the only one."""
    counted = [cause for cause in causes if cause.severity != "note" or cause.explains]
    if not counted:
        return "nothing"
    waits = all(cause.finding is not None and findings.CODES[cause.finding].waits for cause in counted)
    return "wait" if waits else "found"


# ------------------------------------------------------------------------------------------------------------- the case


def _case(path: Path, one: Artifact, seen: Inspection, reader: Reader, told: Text | None) -> Case:
    """Return what the rules look at: findings of this artifact, and those of the whole that name its folder."""
    top = path if path.is_dir() else path.parent
    place = Place(reader, one.relative if one.relative in reader.tree.folders else ".")
    tensors, owners = _tensors(one, place)
    own = {id(f) for a in seen.artifacts for f in a.findings}
    shared = [f for f in seen.findings if id(f) not in own and f not in one.findings and _about(f.subject, one, seen)]
    tables: dict[str, Mapping[str, Any]] = {}
    for name in _TABLES:
        document = place.table(name)
        if document is not None:
            tables[name] = document
    folder = Path(one.root)
    own_papers = papers(folder)
    if own_papers.template is not None:
        tables["papers/template"] = {"text": own_papers.template}
    if own_papers.special:
        tables["papers/special"] = dict(own_papers.special)
    config_name = one.config.rpartition("/")[2] if one.config is not None else layout.MODEL_CONFIG
    return Case(
        top=top,
        artifact=one,
        findings=(*one.findings, *shared),
        config=tables.get(config_name, place.table(config_name) or {}),
        tensors=tensors,
        owners=owners,
        names=frozenset(place.names),
        tables=tables,
        against=None,
        text=told,
        whole=not any(f.code in _TORN for f in one.findings),
    )


def _unknown(seen: Inspection) -> Artifact:
    """Return a folder in which nothing was recognised as if it were an artifact, so that its findings are judged."""
    return Artifact(
        root=os.fspath(Path(seen.path).absolute()),
        relative=".",
        artifact="unknown",
        kind=None,
        outcome=seen.outcome,
        facts=seen.facts,
        findings=seen.findings,
        files=seen.files,
    )


def _about(subject: str, one: Artifact, seen: Inspection) -> bool:
    """Return whether a finding of the whole folder is told with this artifact: by its path, else with the first one."""
    owners = [a for a in seen.artifacts if subject == a.relative or subject.startswith(f"{a.relative}/")]
    return one is owners[0] if owners else one in seen.artifacts[:1]


def _tensors(one: Artifact, place: Place) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of an artifact from the headers, and the file that holds each; nothing is loaded."""
    files = place.reader.tree.files
    named = [f.path for f in one.files if f.role == "weights" and f.path in files]
    plain = [path for path in named if path.endswith(".safetensors")]
    if plain or not named:
        if one.kind in {"model", "quantized", "merged", None} and one.file is None:
            found = shards.weight_set(place)
            if found is not None and found.tensors:
                return found.tensors, found.owners
        tensors: dict[str, Tensor] = {}
        owners: dict[str, str] = {}
        for path in plain:
            header = header_of(files[path], place.reader)
            tensors |= header.tensors
            owners |= dict.fromkeys(header.tensors, path)
        return tensors, owners
    tensors, owners = {}, {}
    for path in named if one.weights is not None and one.weights.tensors else ():
        held = pickled.held(files[path], place.reader)
        if held is not None:
            tensors |= held.tensors
            owners |= dict.fromkeys(held.tensors, path)
    return tensors, owners


def _compared(case: Case, where: tuple[Path, str] | None, unsure: list[str]) -> Against | None:
    if where is None:
        if case.is_adapter and case.artifact.kind == "adapter":
            unsure.append("the base: name it with --base DIR to compare shapes, vocabulary and template")
        return None
    found = against.compare(case.artifact, case.tensors, *where)
    if isinstance(found, str):
        unsure.append(f"the base in {where[0]}: {found}")
        return None
    return found


def _why_not(case: Case) -> str:
    """Return why the values of an artifact's weights were not looked at."""
    held = case.artifact.weights.bytes if case.artifact.weights is not None else 0
    if held > VALUES_LIMIT:
        return f"{held} bytes are more than the {VALUES_LIMIT} that are read here; what is published is read whole"
    if not case.whole or any(f.severity == "block" for f in case.findings):
        return "the files are not sound, as told above"
    return "they could not be read"


def _unsure(case: Case) -> list[str]:
    """Return what was not looked at."""
    told: list[str] = []
    if case.facts.get("values_checked") is False:
        told.append(f"the values of the weights: {_why_not(case)}")
    there = any(f.role == "weights" for f in case.artifact.files)
    if there and not case.tensors and case.artifact.kind is not None:
        told.append("the names and shapes of the tensors: they could not be read")
    return told


# ----------------------------------------------------------------------------------------------------------- the causes


def _causes(rule: Rule, case: Case, said: Mapping[str, texts.Line]) -> list[Cause]:
    """Return the causes one rule finds; an explanation only where the text asks for it."""
    explains = [name for name in rule.symptoms if name in said]
    found: list[Cause] = []
    for one in rule.find(case):
        severity = one.severity or rule.severity
        if severity == "note" and not explains:
            continue
        found.append(_cause(rule, case, one, explains))
    return found


def _cause(rule: Rule, case: Case, one: Evidence, explains: list[str]) -> Cause:
    return Cause(
        rule=rule.name,
        severity=one.severity or rule.severity,
        stage=rule.stage,
        artifact_root=case.artifact.relative,
        subject=one.subject,
        message=one.message,
        fix=one.fix or rule.remedy,
        commands=list(one.commands),
        finding=one.finding,
        explains=explains,
        data={key: value[:_DATA_LIMIT] if isinstance(value, list) else value for key, value in one.data.items()},
    )


def _once(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes without those that say the same of the same thing twice."""
    found: dict[tuple[str, ...], Cause] = {}
    for cause in causes:
        found.setdefault((cause.rule, cause.artifact_root, cause.subject, cause.message), cause)
    return list(found.values())


def _sorted(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes: those that explain the text, the gravest, and those a loader meets first."""
    return sorted(causes, key=lambda c: (not c.explains, _GRAVITY[c.severity], STAGES.index(c.stage), c.subject))


def document(found: Diagnosis) -> dict[str, Any]:
    """Return the JSON object of `registry diagnose --json` (docs/schemas/diagnose.schema.json)."""
    return {
        "schema": SCHEMA,
        "path": found.path,
        "artifact": found.artifact,
        "kind": found.kind,
        "outcome": found.outcome,
        "base": found.base,
        "error": None if found.said is None else {"lines": found.lines, "cut": found.cut, "symptoms": found.said},
        "causes": found.causes,
        "not_looked_at": found.unsure,
    }
