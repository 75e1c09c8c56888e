"""An artifact beside its base: what the merge's comparison says of an adapter; names, shapes and papers of a model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import layout
from weighbridge.adapters import license as licences
from weighbridge.adapters.diagnose.papers import Papers, papers, table
from weighbridge.adapters.formats.prefixes import strip
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge import base as bases
from weighbridge.adapters.merge import preview
from weighbridge.registry.errors import UsageError
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.types import Finding

_SAME_LIMIT: Final = 64 << 20
"""Bytes of a model that are compared with its base's."""


class Against(NamedTuple):
    """A base and how an artifact stands to it; names and shapes are told for whole models only."""

    root: Path
    told_by: str
    """How we know that it is the base."""
    findings: tuple[Finding, ...] = ()
    """What the comparison of an adapter found, under the codes of merging."""
    prefix: str = ""
    """What is in front of every name and not in front of the base's."""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    """Tensors of other shapes: (ours, the base's)."""
    same: bool | None = None
    """Every tensor holds the base's bytes; None where that was not looked at."""
    main_dtype: str | None = None
    """The dtype of most of the base's bytes."""
    papers: Papers = Papers()
    """The base's own template and special tokens."""


def find_base(artifact: Artifact, given: str | None, environ: Mapping[str, str]) -> tuple[Path, str] | None:
    """Return the base's folder and how we know: as given, by the adapter's config, or from the Hub's cache there.

    Raises UsageError where what was given is an adapter.
    """
    caches = licences.cache_roots(environ)
    if given is not None:
        folder = Path(given)
        if folder.is_dir():
            return _no_adapter(folder), "--base"
        cached = licences.cache_folder(given, None, caches) if is_repo_id(given) else None
        return (_no_adapter(cached), "--base, from the Hub cache") if cached is not None else None
    named = artifact.facts.get("base_model")
    local = licences.local_base(named)
    if local is not None:
        return local, "the config names it"
    if isinstance(named, str) and is_repo_id(named):
        cached = licences.cache_folder(named, artifact.base.revision, caches)
        if cached is not None:
            return cached, "the config names it, the Hub cache has it"
    return None


def _no_adapter(folder: Path) -> Path:
    names = {path.name for path in folder.iterdir()}
    if layout.ADAPTER_CONFIG not in names or layout.is_whole_model(names):
        return folder
    named = table(folder / layout.ADAPTER_CONFIG).get("base_model_name_or_path")
    known = f", which it calls {named}" if isinstance(named, str) and named else ""
    raise UsageError(
        f"{folder} is an adapter, and --base takes the model that an adapter is put on",
        why=f"{layout.ADAPTER_CONFIG} lies in it and no whole model",
        fix=f"name the base of that adapter{known}: --base FOLDER, or its id in the Hub cache",
    )


def _unusable(base: Path) -> str:
    """Return why a folder is no base that could be compared."""
    seen = inspect(base, values=0)
    blocked = [f for f in seen.findings if f.severity == "block"]
    if any(one.kind == "adapter" for one in seen.artifacts):
        return "it is an adapter itself, and no whole model"
    if blocked:
        return blocked[0].message
    return f"it holds {seen.artifact or 'nothing known'}, and no whole model in safetensors"


def compare(artifact: Artifact, tensors: Mapping[str, Tensor], base: Path, told_by: str) -> Against | str:
    """Return how an artifact stands to a base, else why it could not be told. Raises nothing of the disk."""
    try:
        if artifact.kind == "adapter" or "lora" in artifact.artifact:
            seen = preview.look([Path(artifact.root)], base, weigh=False)
            kept = tuple(f for f in seen.findings if f.code.startswith("merge-"))
            faulty = any(f.severity == "block" and f.subject.split("/")[0] == "base" for f in seen.findings)
            if seen.base is None or (faulty and not kept):
                return _unusable(base)
            counted = seen.base.weights
            sizes = {dtype: count.parameters for dtype, count in counted.dtypes.items()} if counted is not None else {}
            main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
            return Against(base, told_by, kept, main_dtype=main, papers=papers(base))
        model = bases.read(base)
        return _unusable(base) if model is None else _models(artifact, tensors, model, told_by)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _models(artifact: Artifact, tensors: Mapping[str, Tensor], base: bases.Base, told_by: str) -> Against:
    theirs = base.weights.tensors
    stripped = strip(list(tensors), base=set(theirs)) if tensors else None
    prefix = stripped.prefix if stripped is not None else ""
    ours = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    tied = base.tied or artifact.facts.get("tied") is True
    heads = {name for name in {*ours, *theirs} if any(part in bases.HEADS for part in name.split(".")[-2:-1])}
    excused = heads if tied else set()
    shared = ours.keys() & theirs.keys()
    return Against(
        base.root,
        told_by,
        prefix=prefix,
        missing=tuple(sorted(theirs.keys() - ours.keys() - excused)) if tensors else (),
        extra=tuple(sorted(ours.keys() - theirs.keys() - excused)) if tensors else (),
        shapes={n: (ours[n].shape, theirs[n].shape) for n in sorted(shared) if ours[n].shape != theirs[n].shape},
        same=_same(artifact, base) if shared and len(shared) == len(theirs) else None,
        papers=papers(base.root),
    )


def _same(artifact: Artifact, base: bases.Base) -> bool | None:
    """Return whether every tensor holds the base's bytes; None for what is too large, or no safetensors."""
    mine = bases.read(Path(artifact.root))
    if mine is None or os.path.realpath(mine.root) == os.path.realpath(base.root):
        return None
    if sum(tensor.size for tensor in mine.weights.tensors.values()) > _SAME_LIMIT:
        return None
    return all(_bytes(mine, name) == _bytes(base, name) for name in mine.places)


def _bytes(model: bases.Base, name: str) -> tuple[Any, ...] | None:
    place = model.places.get(name)
    tensor = model.weights.tensors.get(name)
    if place is None or tensor is None:
        return None
    with Path(model.sources[place.file].path).open("rb") as stream:
        stream.seek(place.at)
        return place.dtype, place.shape, stream.read(tensor.size)
