"""The half-minute look at any folder: what is in it, is it whole, what would be published, what not and why.

Nothing here writes, runs or unpickles. Headers are read, tensors only of adapters and small models.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from weighbridge.adapters import (
    adapter_folder,
    checkpoint,
    inside,
    layout,
    listing,
    model_folder,
    paperwork,
    plan,
    recognise,
    runs,
    trainer,
)
from weighbridge.adapters.draft import WAITABLE, Draft
from weighbridge.adapters.families import (
    assembled,
    deepspeed,
    distributed,
    foreign,
    gguf_files,
    image_lora,
    mlx,
    pipeline,
    ranks,
    torch_files,
)
from weighbridge.adapters.inspection import Inspection
from weighbridge.adapters.plan import JudgedFile, Named
from weighbridge.adapters.reading import VALUES_LIMIT, Place, Reader
from weighbridge.adapters.whole import dead_link, file_name_unsafe, is_pointer, pointer_finding, some
from weighbridge.registry import findings
from weighbridge.registry.findings import outcome
from weighbridge.registry.refs import path_fault
from weighbridge.registry.types import Finding

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


def inspect(
    path: Path,
    *,
    ignore: Sequence[str] = (),
    caches: Sequence[Path] = (),
    alone: bool = False,
    values: int = VALUES_LIMIT,
    prefer_averaged: bool = False,
) -> Inspection:
    """Return what a folder, or a single file, holds.

    `ignore` are patterns of the watch rule; `caches` Hub caches that may hold bases, for their licences. With `alone`
    only the artifacts of the folder itself are judged, and those in folders below count as somebody else's. The values
    of an adapter, and of a whole model of up to `values` bytes, are looked at; whoever stages it next passes 0, for
    staging looks at all and nothing is read twice.
    With `prefer_averaged` a running average counts as the weights where a checkpoint holds both. Raises OSError when
    the path is gone or cannot be listed.
    """
    reader = Reader(tree_of(path, ignore), values, averaged=prefer_averaged)
    return judge(path, reader, caches=caches, alone=alone)


def judge(path: Path, reader: Reader, *, caches: Sequence[Path] = (), alone: bool = False) -> Inspection:
    """Return what `inspect` does, from the reader of a path's tree, which then holds what was read on the way."""
    tree = reader.tree
    folders = checkpoint.without_slices(list(checkpoint.candidates(iter(tree.folders.values()))))
    if alone:
        tree = _without(tree, [f.relative for f in folders if f.relative != "."])
        reader = Reader(tree, reader.values, averaged=reader.averaged)
        folders = [f for f in folders if f.relative == "."]
    drafts = _drafts(reader, path, folders)
    staging = runs.staging(tree)
    slices = _training_slices(drafts, reader)
    named = [d.named for d in drafts]
    files = plan.judge_files(tree.files, [*named, *slices])
    judged = list(zip(drafts, _own_files(drafts, files), strict=True))
    for draft, own in judged:
        _finish(draft, own, caches)
    return runs.assemble(os.fspath(path), reader, judged, files, staging)


def tree_of(path: Path, ignore: Sequence[str] = ()) -> listing.Tree:
    """Return the files that are looked at for a path, with the papers beside or above it. Raises OSError."""
    return _with_papers(listing.read_tree(path, ignore, goes_along), path)


def goes_along(own: str, name: str) -> bool:
    """Return whether a file beside a single one belongs to it: its config, tokenizer and papers, shards of its set.

    A config or an index stands for the whole set that it describes.
    """
    if checkpoint.is_lone_name(own):
        return plan.is_paper(name)
    if own in {layout.MODEL_CONFIG, layout.ADAPTER_CONFIG} or own.endswith(".index.json"):
        return plan.is_paper(name) or layout.is_weights_name(name)  # whoever names the config means the folder
    shard = layout.shard_of(own)
    if shard is None:
        return own.endswith(".safetensors") and plan.is_paper(name)
    stem, _, count, suffix = shard
    other = layout.shard_of(name)
    in_set = other is not None and (other[0], other[2], other[3]) == (stem, count, suffix)
    return in_set or name == f"{stem}.{suffix}.index.json" or (suffix == "safetensors" and plan.is_paper(name))


def _with_papers(tree: listing.Tree, path: Path) -> listing.Tree:
    """Return a tree with the papers of the folder above, where its weights are in parts and it has none itself."""
    in_parts = any(layout.is_rank_name(f.name) or distributed.is_piece(f.name) for f in tree.files.values())
    if path.is_file() or not in_parts:
        return tree
    folder = os.path.abspath(path)  # noqa: PTH100 - `.` has a folder above, too
    return listing.with_files(tree, checkpoint.papers_above(folder, tree.folders["."].names))


def _without(tree: listing.Tree, below: Sequence[str]) -> listing.Tree:
    """Return a tree without the folders of other artifacts."""
    gone = tuple(folder + "/" for folder in below)
    return listing.Tree(
        tree.root,
        {path: file for path, file in tree.files.items() if not path.startswith(gone)},
        {path: folder for path, folder in tree.folders.items() if not (path + "/").startswith(gone)},
    )


def _drafts(reader: Reader, path: Path, folders: Sequence[listing.Folder]) -> list[Draft]:
    """Return every artifact of the tree, judged, in walking order."""
    tree = reader.tree
    found: list[Draft] = []
    for folder in folders:
        place = Place(reader, folder.relative)
        found.extend(_parts(place))
    found += _zero_folders(reader, [d.place.folder for d in found])
    holders = {d.place.folder for d in found}
    for relative, folder in tree.folders.items():
        place = Place(reader, relative)
        name = _name(place, path)
        if relative in holders:
            continue
        state = trainer.is_trainer_folder(place.names, folder.dirs, name) or layout.TRAINER_STATE in place.names
        if state and not runs.under_staging(relative):
            inner = any(d.place.folder.startswith(relative + "/") for d in found)
            if not inner and not layout.is_resume_folder(name):
                found.append(_state_only(place))
    if not found:
        found += _parts(Place(reader, "."))
    for draft in found:
        _trainer(draft, path)
    return found


def _judge(part: recognise.Part, place: Place, *, several: bool = False) -> Draft:
    if part.kind in _BY_FILE:
        return _BY_FILE[part.kind](part, place, several)
    return _BY_PLACE[part.kind](place)


_BY_PLACE: Final[dict[str, Callable[[Place], Draft]]] = {
    "adapter": adapter_folder.judge,
    "mlx": mlx.judge,
    "model": model_folder.judge,
    "pipeline": pipeline.judge,
    "megatron": ranks.judge_megatron,
    "distributed": lambda place: assembled.alone(distributed.judge(place)),
}
_BY_FILE: Final[dict[str, Callable[[recognise.Part, Place, bool], Draft]]] = {
    "torch": lambda part, place, several: torch_files.judge(place, part.files[0], several=several),
    "ranks": lambda part, place, _: ranks.judge(place, part.files),
    "slices": lambda part, place, _: ranks.judge_slices(place, part.files),
    "gguf": lambda part, place, several: gguf_files.judge(place, part.files, several=several),
    "byte-parts": lambda part, place, _: gguf_files.judge_parts(place, part.artifact, part.files),
    "image-lora": lambda part, place, several: image_lora.judge(
        place, part.files[0], several=several, copies=tuple(f.path for f in part.files[1:])
    ),
    "foreign": lambda part, place, _: foreign.judge(place, part.artifact, part.files),
}


def _parts(place: Place) -> list[Draft]:
    """Return everything in one folder, judged; the newest first where there are several of a kind."""
    parts = recognise.parts(place)
    drafts = [_judge(part, place, several=len(parts) > 1) for part in parts]
    if len(drafts) > 1 and all(draft.alone for draft in drafts):
        drafts.sort(key=lambda draft: -1 if draft.step is None else draft.step, reverse=True)
    return drafts


def _zero_folders(reader: Reader, holders: Sequence[str]) -> list[Draft]:
    """Return the DeepSpeed folders without exported weights: of any other, the rank files only serve to go on."""
    drafts: list[Draft] = []
    for relative in reader.tree.folders:
        place = Place(reader, relative)
        parents = {relative, *runs.parents(relative)} if relative != "." else {"."}
        taken = {*holders, *(d.place.folder for d in drafts)}
        if runs.under_staging(relative) or taken & parents or not deepspeed.tags(place):
            continue
        prefix = "" if relative == "." else relative + "/"
        if not any(holder.startswith(prefix) for holder in holders if holder != "."):
            configured = layout.MODEL_CONFIG in place.names
            drafts.append(model_folder.judge(place) if configured else assembled.alone(deepspeed.judge(place)))
    return drafts


def _state_only(place: Place) -> Draft:
    """Return a draft for a trainer's folder without weights that could be published."""
    draft = Draft(place, "trainer-checkpoint", None, Named(root=place.folder))
    draft.trainer = True
    draft.findings.append(
        findings.finding(
            "no-artifact",
            place.folder,
            "training state, but no weights that could be published",
            "save the model or the adapter beside the state",
        )
    )
    return draft


def _name(place: Place, path: Path) -> str:
    if place.folder == ".":
        return os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 - `.` and `x/..` have names too
    return place.folder.rpartition("/")[2]


def _trainer(draft: Draft, path: Path) -> None:
    """Take in what a trainer left in the artifact's folder, and the step, which may stand in the folder above."""
    place = draft.place
    tree = place.reader.tree
    name = _name(place, path)
    dirs = tree.folders[place.folder].dirs
    draft.trainer = draft.trainer or trainer.is_trainer_folder(place.names, dirs, name)
    draft.end_mark = checkpoint.end_mark(place.names, name) is not None
    if draft.trainer:
        facts, found = trainer.judge(place, name)
        draft.add(facts, found)
        draft.step = facts.get("step") if facts.get("step") is not None else draft.step
        draft.facts["step"] = draft.step
        tag = facts.get("latest_tag") or (facts.get("tags") or [None])[-1]
        whole = not any(f.code in {"rank-state-missing", "latest-tag-missing"} for f in found)
        if draft.facts.get("empty_tensors") and tag in dirs and whole:
            draft.facts["recoverable_from"] = place.path(str(tag))
        return
    draft.add(*trainer.best(place))
    draft.step = draft.step if draft.step is not None else trainer.step_of_place(place, name)
    if draft.step is None and place.folder != ".":
        parent = place.folder.rpartition("/")[0] or "."
        above = Place(place.reader, parent)
        if parent in tree.folders and (
            layout.TRAINER_STATE in above.names or layout.is_checkpoint_name(_name(above, path))
        ):
            draft.step = trainer.step_of_place(above, _name(above, path))
    if draft.step is not None:
        draft.facts["step"] = draft.step


def _training_slices(drafts: Sequence[Draft], reader: Reader) -> list[Named]:
    """Return the bare weights of folders above an artifact as resume-only slices."""
    roots = {d.place.folder for d in drafts}
    found: list[Named] = []
    for relative in reader.tree.folders:
        prefix = "" if relative == "." else relative + "/"
        if relative in roots or not any(root.startswith(prefix) for root in roots if root != "."):
            continue
        slices = [
            f.path for f in reader.tree.inside(relative).values() if f.name.endswith(".safetensors") and f.link is None
        ]
        if slices:
            found.append(Named(root=relative, slices=tuple(slices)))
    return found


def _own_files(drafts: Sequence[Draft], files: Sequence[JudgedFile]) -> list[list[JudgedFile]]:
    """Return the judged files of each artifact: those below its folder and in no deeper artifact."""
    roots = {d.place.folder for d in drafts}
    by_root: dict[str, list[JudgedFile]] = {root: [] for root in roots}
    for one in files:
        owner = next((folder for folder in plan.folders(one.path) if folder in roots), None)
        if owner is not None:
            by_root[owner].append(one)
    own: list[list[JudgedFile]] = []
    for draft in drafts:
        rivals = [d for d in drafts if d is not draft and d.place.folder == draft.place.folder]
        taken = {p for d in rivals for p in (*d.named.weights, d.named.listing, *d.named.copies, *d.named.stale)}
        taken |= {d.config_path for d in rivals}
        own.append([f for f in by_root[draft.place.folder] if f.path not in taken])
    return own


def _finish(draft: Draft, files: list[JudgedFile], caches: Sequence[Path]) -> None:
    """Judge the files that would be published, read the papers, and settle what is a reason to wait."""
    place = draft.place
    tree = place.reader.tree
    named = {*draft.named.weights, draft.named.listing}
    for one in files:
        if not one.publish or (one.path in named and path_fault(one.path) is None):
            continue
        draft.findings.extend(_unusable(draft, one))
    if draft.needs_code:
        draft.findings.append(
            findings.finding(
                "remote-code",
                draft.config_path or place.folder,
                "the config names Python files (auto_map) without which the model cannot be loaded; remotes block that "
                "unless remote_code is allowed",
                "allow remote_code for the remote, or save the model with a class of the library",
            )
        )
    above = [Path(tree.folders[p].path) for p in runs.parents(place.folder) if p in tree.folders]
    if draft.kind is not None:
        papers = paperwork.read(draft, files, above, caches)
        draft.facts = {**papers.facts, **draft.facts}
        draft.findings.extend(papers.findings)
        for path in draft.named.weights[:1]:
            draft.findings.extend(paperwork.metadata(draft, path))
        draft.license = papers.license
    writing = _writing(draft)
    marks = [f.subject for f in draft.findings if f.code == "end-mark-missing"]
    if writing:
        draft.facts["in_progress"] = writing
        draft.findings.append(
            findings.finding(
                "still-writing",
                writing[0],
                f"{writing[0]} is still being written" + (f", and {len(writing) - 1} more" if len(writing) > 1 else ""),
                "wait; if nobody writes any more, delete it",
                in_progress=writing,
            )
        )
    commit = _COMMIT.search(tree.folders[place.folder].path)
    if commit is not None:
        draft.facts["commit"] = commit[1]
    if draft.kind not in {None, "adapter"}:
        draft.findings.extend(inside.told(Path(tree.folders[place.folder].path), draft.config_path or place.folder))
    draft.soften([*writing, *marks])
    draft.gather_pointers()
    draft.tell()
    draft.facts["publishable"] = draft.kind is not None and outcome(draft.findings) in {"accept", "warn"}


def _writing(draft: Draft) -> list[str]:
    """Return the files of the folder that are being written; what a dead save left beside whole weights is noted."""
    files = draft.place.names
    writing = {name for name in files if layout.is_in_progress(name)}
    if not writing:
        return []
    times = {name: Path(f.source).stat().st_mtime_ns for name, f in files.items() if f.link is None}
    torn = any(f.code in WAITABLE for f in draft.findings)
    old = set() if torn else writing.intersection(layout.left_over(times))
    if old:
        paths = [files[name].path for name in sorted(old)]
        draft.findings.append(
            findings.finding(
                "save-left-over",
                paths[0],
                f"{some(paths)} {'was' if len(paths) == 1 else 'were'} left over by a save that was broken off: all "
                "weights beside it are younger; it is not published",
                "delete it",
                left_over=paths,
            )
        )
    return sorted(files[name].path for name in writing - old)


def _unusable(draft: Draft, one: JudgedFile) -> list[Finding]:
    """Find a file that would be published and is a pointer, a dead link, badly named, empty, or not JSON."""
    place = draft.place
    file = place.reader.tree.files[one.path]
    if file.link is not None:
        return [dead_link(file.path, file.link)]
    inner = one.path if place.folder == "." else one.path.removeprefix(place.folder + "/")
    fault = path_fault(inner)
    if fault is not None:
        return [file_name_unsafe(one.path, fault)]
    if is_pointer(file, place.reader):
        return [pointer_finding(file, place.reader)]
    told = {f.subject for f in draft.findings}
    if file.path in told or one.role == plan.CARD_ROLE:
        return []
    if file.size == 0 and one.role in {"tokenizer", "config"}:
        return [
            findings.finding(
                "file-empty", file.path, f"{file.path}: the file is empty (0 bytes)", "save it again", file=file.path
            )
        ]
    if (
        file.name.endswith(".json")
        and place.reader.table(file) is None
        and not isinstance(place.reader.document(file), list)
    ):
        problem = getattr(place.reader.document(file), "problem", "it holds no JSON object")
        return [
            findings.finding(
                "json-damaged", file.path, f"{file.path} cannot be used: {problem}", "save it again", file=file.path
            )
        ]
    return []
