"""Put the artifacts of one folder together: which one is the result, what they share, what is still being staged."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import layout, trainer
from weighbridge.adapters.draft import LIST_FACTS, Draft
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.listing import Tree
from weighbridge.adapters.plan import CARD_ROLE, JudgedFile
from weighbridge.adapters.reading import Reader
from weighbridge.registry import findings
from weighbridge.registry.findings import outcome, strictest
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.types import Finding

SAME_LIMIT: Final = 1 << 30
"""Bytes up to which artifacts of one folder are compared by content."""

_OWN_NAME: Final = frozenset({"deepspeed-zero", "ckpt-dcp", "megatron", "rank-sharded"})
"""Artifacts that keep their name inside a trainer's folder."""

_ADAPTERS: Final = frozenset({"lora-adapter", "peft-other"})
_UNION: Final = (*LIST_FACTS, "local_paths", "secret_files", "extra_full_copies")


def staging(tree: Tree) -> list[str]:
    """Return the folders that still have a staging name, hidden ones included; one inside another is not told."""
    found: list[str] = []
    for relative, folder in tree.folders.items():
        if under_staging(relative):
            continue
        prefix = "" if relative == "." else relative + "/"
        found.extend(prefix + name for name in folder.dirs if layout.is_staging_name(name))
    return sorted(found)


def under_staging(relative: str) -> bool:
    """Return whether a folder is one under a staging name, or lies in one."""
    return any(layout.is_staging_name(name) for name in relative.split("/"))


def parents(folder: str) -> list[str]:
    """Return the folders above one, nearest first, the inspected root last."""
    found: list[str] = []
    while folder != ".":
        folder = folder.rpartition("/")[0] or "."
        found.append(folder)
    return found


def assemble(
    path: str,
    reader: Reader,
    judged: Sequence[tuple[Draft, list[JudgedFile]]],
    files: list[JudgedFile],
    waiting: list[str],
) -> Inspection:
    """Return the answer for the inspected folder out of its judged artifacts."""
    artifacts = [_artifact(draft, own) for draft, own in judged]
    drafts = [draft for draft, _ in judged]
    own: list[Finding] = []
    facts: dict[str, Any] = {}
    inside = Path(os.path.realpath(path)).name
    names = [*waiting, *([inside] if layout.is_staging_name(inside) else [])]
    if names:
        facts["staging"] = waiting
        done = [a.relative for a in artifacts if a.outcome in {"accept", "warn"}]
        facts["accepted"] = done
        own.append(
            findings.finding(
                "staging-name",
                names[0],
                f"still under the name that trainers write under: {', '.join(names[:4])}",
                "wait; the trainer renames the folder when it is done",
                staging=waiting,
                accepted=done,
            )
        )
    if not artifacts and not names:
        own.append(
            findings.finding(
                "no-artifact",
                ".",
                f"{inside} holds no weights of a known kind: nothing of it can be published"
                if Path(path).is_file()
                else f"{_told(files)} in {inside or path}: nothing here can be published",
                "name a file with weights, or the folder of the model",
            )
        )
    own += _mixed(drafts, facts) + _shared(artifacts, facts) + _same(reader, artifacts, facts)
    result = _result(artifacts)
    if result is not None:
        facts = {**result.facts, **facts}
        if len(artifacts) > 1:
            facts |= _union(artifacts)
            facts["artifacts"] = [a.file or a.relative for a in artifacts]
            facts.setdefault("missing_files", [])
        elif result.relative != ".":
            facts["artifact_root"] = result.relative
            _adapter_name(result, facts)
    if len([a for a in artifacts if a.step is not None]) > 1:
        newest = _newest(artifacts)
        facts.setdefault("newest", newest.file or newest.relative)
        if facts.get("distinct_runs", 1) > 1:
            facts["newest_by_step"] = facts.pop("newest")
    facts |= {
        "inference_files": [f.path for f in files if f.publish],
        "resume_only_files": [f.path for f in files if f.reason == "resume-only"],
        "left_out": [f.path for f in files if not f.publish and f.reason != "resume-only"],
    }
    every = [*own, *(f for a in artifacts for f in a.findings)]
    label = _label(artifacts, drafts, waiting)
    return Inspection(
        path=path,
        artifact_root=result.relative if result is not None else ".",
        outcome=strictest([outcome(own), *(a.outcome for a in artifacts)]),
        artifact=label,
        kind=result.kind if result is not None else None,
        facts=facts,
        findings=every,
        files=files,
        artifacts=artifacts,
    )


def _artifact(draft: Draft, own: list[JudgedFile]) -> Artifact:
    place = draft.place
    inference = [f.path for f in own if f.publish]
    return Artifact(
        root=place.reader.tree.folders[place.folder].path,
        relative=place.folder,
        artifact=_prefixed(draft),
        kind=draft.kind,
        outcome=outcome(draft.findings),
        facts={
            **draft.facts,
            "inference_files": inference,
            "resume_only_files": [f.path for f in own if f.reason == "resume-only"],
        },
        findings=draft.findings,
        files=own,
        weights=draft.weights,
        adapter=draft.adapter,
        base=draft.base,
        license=draft.license,
        config=draft.config_path,
        step=draft.step,
        end_mark=draft.end_mark,
        resumable=draft.facts.get("resumable"),
        needs_code=draft.needs_code,
        file=draft.alone,
        convert=list(draft.convert),
        inputs=list(draft.inputs),
        prefer_averaged=place.reader.averaged,
        sources=_sources(draft, own),
    )


def _sources(draft: Draft, own: Iterable[JudgedFile]) -> dict[str, str]:
    place = draft.place
    root = place.reader.tree.folders[place.folder].path
    files = place.reader.tree.files
    usual = {f.path: str(Path(root) / _within(f.path, place.folder)) for f in own}
    return {path: files[path].source for path, here in usual.items() if files[path].source != here}


def _prefixed(draft: Draft) -> str:
    if not draft.trainer or draft.artifact == "trainer-checkpoint" or draft.artifact in _OWN_NAME:
        return draft.artifact
    if draft.kind is None:
        return "trainer-checkpoint"
    return "trainer-checkpoint+" + ("adapter" if draft.kind == "adapter" else "full-model")


def _told(files: Sequence[JudgedFile]) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


# ------------------------------------------------------------------------------------------------- several artifacts


def _label(artifacts: Sequence[Artifact], drafts: Sequence[Draft], waiting: Sequence[str]) -> str | None:
    """Return the artifact name of the whole folder."""
    if waiting and (artifacts or len(waiting) > 1):
        return "run-folder"
    if not artifacts:
        return "run-folder" if waiting else None
    if len(artifacts) == 1:
        return artifacts[0].artifact
    folders = {a.relative for a in artifacts}
    names = {a.artifact for a in artifacts}
    if len(folders) == 1 and len(names) == 1 and len({a.step for a in artifacts}) == 1:
        return names.pop()  # several files of one kind side by side
    kinds = {a.kind for a in artifacts}
    if len(folders) == 1 and kinds == {"adapter", "model"}:
        return "full-model+adapter"
    trained = any(d.trainer or d.step is not None for d in drafts)
    apart = not any(_above(a.relative, b.relative) for a in artifacts for b in artifacts)
    pair = len(artifacts) == 2 and kinds in ({"adapter", "model"}, {"adapter", "quantized"})
    if pair and apart and not trained:
        return "base+adapter"
    top = _result(artifacts)
    nested = top is not None and all(a is top or _above(top.relative, a.relative) for a in artifacts)
    if top is not None and nested and not trained and all(a.artifact in _ADAPTERS for a in artifacts):
        return top.artifact
    return "run-folder"


def _above(outer: str, inner: str) -> bool:
    return outer != inner and (outer == "." or inner.startswith(outer + "/"))


def _result(artifacts: Sequence[Artifact]) -> Artifact | None:
    """Return the result: the artifact above the others, else the newest; an adapter before the model beside it."""
    if not artifacts:
        return None
    tops = [a for a in artifacts if all(a.relative == b.relative or _above(a.relative, b.relative) for b in artifacts)]
    if tops:
        return min(tops, key=lambda a: a.kind != "adapter")
    usable = [a for a in artifacts if a.kind is not None] or list(artifacts)
    return _newest(usable)


def _newest(artifacts: Sequence[Artifact]) -> Artifact:
    return max(artifacts, key=lambda a: (a.step if a.step is not None else -1, a.relative))


def _union(artifacts: Iterable[Artifact]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    every = list(artifacts)
    for name in _UNION:
        union = list(dict.fromkeys(value for artifact in every for value in artifact.facts.get(name) or []))
        if union or name in LIST_FACTS:
            facts[name] = union
    return facts


def _shared(artifacts: Sequence[Artifact], facts: dict[str, Any]) -> list[Finding]:
    """Find a whole model and an adapter in one folder."""
    by_folder: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        by_folder.setdefault(artifact.relative, []).append(artifact)
    found: list[Finding] = []
    for folder, group in by_folder.items():
        if len(group) < 2 or any(a.file is not None for a in group):
            continue
        kinds = sorted(a.artifact.removeprefix("trainer-checkpoint+") for a in group)
        kinds = ["lora-adapter" if k == "adapter" else k for k in kinds]
        facts["kinds"] = kinds
        for other in group:
            for key in ("shards_expected", "shards_found", "index_total_size", "architecture"):
                if key in other.facts:
                    facts[key] = other.facts[key]
        found.append(
            findings.finding(
                "artifacts-share-folder",
                folder,
                f"{' and '.join(kinds)} share one folder and are published apart: transformers would load the "
                "model and put the adapter on top of it a second time",
                "save them in folders of their own",
                kinds=kinds,
            )
        )
    return found


def _mixed(drafts: Sequence[Draft], facts: dict[str, Any]) -> list[Finding]:
    """Find checkpoints of several runs side by side."""
    siblings: dict[str, list[Draft]] = {}
    for draft in drafts:
        if draft.step is not None and draft.place.folder != ".":
            siblings.setdefault(draft.place.folder.rpartition("/")[0] or ".", []).append(draft)
    for group in siblings.values():
        if len(group) < 2:
            continue
        count = trainer.count_runs((d.config, d.place.table(layout.TRAINER_STATE)) for d in group)
        if count < 2:
            continue
        newest = max(group, key=lambda d: d.step or -1).place.folder
        facts["distinct_runs"] = count
        return [
            findings.finding(
                "runs-mixed",
                newest,
                f"the checkpoints come from {count} runs (their configs or max_steps differ), so the highest step, "
                f"{newest}, need not be the newest result",
                "name the checkpoint you mean, or move the earlier run away",
                distinct_runs=count,
                newest_by_step=newest,
            )
        ]
    return []


def _same(reader: Reader, artifacts: Sequence[Artifact], facts: dict[str, Any]) -> list[Finding]:
    """Find artifacts with the same content."""
    groups: dict[tuple[Any, ...], list[Artifact]] = {}
    for artifact in artifacts:
        shape = tuple(
            sorted(
                ("" if f.path == artifact.file else _within(f.path, artifact.relative), f.size)
                for f in payload(artifact.files)
            )
        )
        if shape and artifact.kind is not None and any(f.role == "weights" for f in payload(artifact.files)):
            groups.setdefault(shape, []).append(artifact)
    found: list[Finding] = []
    for group in groups.values():
        size = sum(f.size for a in group for f in payload(a.files))
        if len(group) < 2 or size > SAME_LIMIT:
            continue
        by_content: dict[tuple[str, ...], list[str]] = {}
        for artifact in group:
            by_content.setdefault(_content(reader, artifact), []).append(artifact.file or artifact.relative)
        for same in by_content.values():
            if len(same) > 1:
                facts["same_bytes"] = [*facts.get("same_bytes", []), *same]
                found.append(
                    findings.finding(
                        "same-bytes",
                        same[0],
                        f"{', '.join(same)} hold the same bytes and are stored once",
                        same_bytes=same,
                    )
                )
    return found


def payload(files: Iterable[JudgedFile]) -> list[JudgedFile]:
    """Return the files that are payload: published, and not the card."""
    return [f for f in files if f.publish and f.role != CARD_ROLE]


def _within(path: str, root: str) -> str:
    return path if root == "." else path.removeprefix(root + "/")


def _content(reader: Reader, artifact: Artifact) -> tuple[str, ...]:
    try:
        return tuple(sorted(sha256_file(Path(reader.tree.files[f.path].source)) for f in payload(artifact.files)))
    except OSError:
        return (artifact.file or artifact.relative,)


def _adapter_name(artifact: Artifact, facts: dict[str, Any]) -> None:
    """Tell the name PEFT gave an adapter, where it saved it in a folder of that name beside the card."""
    name = artifact.relative.rpartition("/")[2]
    plain = artifact.kind == "adapter" and artifact.step is None and not layout.is_checkpoint_name(name)
    if plain and name not in {"adapter", "adapter_model", "lora", "peft", "final", "output", "outputs"}:
        facts["adapter_name"] = name
