"""Weights of a model or adapter folder that are torch pickles (.bin): judged like safetensors, published as such."""

from collections.abc import Mapping
from typing import Any, Final

from weighbridge.adapters import layout, torch_weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.formats import safetensors, sniff
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.safetensors import Header
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.shards import Form, chosen
from weighbridge.adapters.torch_weights import Held
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import dead_link, pointer_finding, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_ABSENT: Final = frozenset({"lfs-pointer", "link-text", "dead-link", "empty"})


def named(place: Place) -> list[File]:
    """Return the pickles of a model folder that hold weights by their names, and their index."""
    return [f for n, f in sorted(place.names.items()) if layout.is_model_pickle(n)]


def weight_set(place: Place) -> WeightSet | None:
    """Return the set of pickles in a model folder, chosen and checked as a loader would; None where there is none."""
    here = {n: f for n, f in place.names.items() if layout.is_model_pickle(n) and not n.endswith(".index.json")}
    if not here and not any(n.endswith(".bin.index.json") for n in place.names):
        return None
    return chosen(place, here, FORM)


def held(file: File, reader: Reader) -> Held | None:
    """Return what a pickle of a model folder holds, under the names it has there; None where it is no torch file."""
    if _kind(file, reader) not in sniff.PICKLED:
        return None
    key = ("pickled", file.path)
    if key not in reader.notes:
        reader.notes[key] = torch_weights.read(file, reader, whole_names=True)
    known: Held = reader.notes[key]
    return known


def _kind(file: File, reader: Reader) -> str:
    return "dead-link" if file.link is not None else reader.container(file)


def header(file: File, reader: Reader) -> Header:
    """Return the tensors of a pickle as a safetensors header would list them."""
    found = held(file, reader)
    return Header(file.size, 0, dict(found.tensors) if found is not None else {}, None)


def faults(file: File, reader: Reader) -> list[Finding]:
    """Return what is wrong with a file that should be a torch pickle."""
    kind = _kind(file, reader)
    if kind in _ABSENT:
        return [absent(file, reader, kind)]
    found = held(file, reader)
    return found.findings if found is not None else [lying([(file, kind)])]


def absent(file: File, reader: Reader, kind: str) -> Finding:
    """Return the finding for a pointer, a link to nothing or an empty file."""
    if kind == "lfs-pointer":
        return pointer_finding(file, reader)
    if kind == "empty":
        return findings.finding(
            "file-empty",
            file.path,
            f"{file.path}: the file is empty (0 bytes)",
            "save or copy the file again",
            file=file.path,
            file_bytes=0,
        )
    target = file.link if file.link is not None else reader.head(file).decode("utf-8", "replace")
    return dead_link(file.path, target)


def lying(files: list[tuple[File, str]]) -> Finding:
    """Return the finding for files that are named like torch pickles and are something else."""
    table = {file.path: kind for file, kind in files}
    path = min(table)
    return findings.finding(
        "suffix-lies",
        path,
        f"{some(f'{name} is {kind}' for name, kind in sorted(table.items()))}, no torch pickle: loaders go by "
        "the name and fail",
        "give it its true suffix",
        file=path,
        container=table[path],
        true_formats=table,
    )


def _aliases(file: File, reader: Reader) -> Mapping[str, str]:
    found = held(file, reader)
    return found.selection.aliases if found is not None and found.selection is not None else {}


FORM: Final = Form(".bin", "pytorch_model.bin", "pytorch_model.bin.index.json", header, faults, _aliases)
"""How transformers names, indexes and reads pickles."""


# ------------------------------------------------------------------------------------------------------- beside, after


def converted(draft: Draft, paths: tuple[str, ...]) -> None:
    """Note that pickles are published as safetensors."""
    files = draft.place.reader.tree.files
    draft.convert = paths
    draft.facts["pickle_format"] = True
    for path in paths:
        found = held(files[path], draft.place.reader)
        if found is not None:
            names = draft.facts.get("foreign_globals", [])
            more = [name for name in found.facts.get("foreign_globals", []) if name not in names]
            draft.facts["foreign_globals"] = names + more
            safe = bool(found.facts.get("weights_only_loadable"))
            draft.facts["weights_only_loadable"] = safe and draft.facts.get("weights_only_loadable", True)
    draft.findings.append(
        findings.finding(
            "weights-converted",
            paths[0],
            f"{some(paths)}: torch pickles; what is published are their tensors, as safetensors, names and values "
            "unchanged",
            converted=list(paths),
        )
    )


def same_as(ours: Mapping[str, tuple[str, tuple[int, ...], str]], theirs: list[File], reader: Reader) -> bool | None:
    """Return whether some pickles together hold these tensors; None where that cannot be said."""
    mine: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for file in theirs:
        found = held(file, reader)
        if found is None or not found.sound or found.selection is None:
            return None
        try:
            table = torch_weights.digests(file, found)
        except (OSError, FormatFault):
            return None
        aliases = found.selection.aliases
        mine |= table | {name: table[owner] for name, owner in aliases.items() if owner in table}
    shared = ours.keys() & mine.keys()
    if any(ours[name][:2] != mine[name][:2] for name in shared):
        return None if all(ours[name][1] == mine[name][1] for name in shared) else False
    return bool(shared) and ours.keys() <= mine.keys() and all(ours[name] == mine[name] for name in ours)


def size_of(tensors: Mapping[str, safetensors.Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.size for tensor in tensors.values())


def disagree(paths: list[str]) -> Finding:
    """Return the finding for copies that should be the same weights and are not."""
    data: dict[str, Any] = {"conflicting_files": sorted(paths), "values_equal": False}
    return findings.finding(
        "copies-disagree",
        paths[0],
        f"{some(sorted(paths))} should be the same weights and hold different values; only one can be right",
        "delete the one that is not the result",
        **data,
    )
