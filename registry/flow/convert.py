"""Weights on their way out that are no safetensors: never their files, always their tensors, under names loaders know.

pytorch_model-00001-of-00002.bin   -> model-00001-of-00002.safetensors
pytorch_model.bin.index.json       -> model.safetensors.index.json, names and sizes of what is written
adapter_model.bin                  -> adapter_model.safetensors
epoch=3.ckpt                       -> model.safetensors
global_step5/*_optim_states.pt     -> model-00001-of-00003.safetensors ..., model.safetensors.index.json
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from weighbridge.adapters import extract, extract_write, layout
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.items import single
from weighbridge.adapters.listing import File, Tree
from weighbridge.adapters.reading import Reader
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Made
from weighbridge.registry.hashing import content_digest, sha256_file
from weighbridge.registry.types import FileEntry, LineageEdge


class Converted(NamedTuple):
    """The files of an artifact after conversion; `transform` holds rewritten indexes, `inputs` what else is read."""

    files: list[SourceFile]
    made: dict[str, Made]
    transform: dict[str, bytes]
    lineage: list[LineageEdge]
    inputs: list[SourceFile] = []  # noqa: RUF012 - never written to


def convert(
    artifact: Artifact,
    files: Sequence[SourceFile],
    inputs: Sequence[SourceFile] = (),
    *,
    allowed: Mapping[str, str] | None = None,
    hashed: bool = True,
) -> Converted:
    """Return the files as they are published. Raises OSError, RefusedError.

    `inputs` are those of the artifact; what their parts turn out to be stops nothing where its code is `allowed`, which
    gives the reason that the finding then carries. Without `hashed` no source is read for its digest.
    """
    if inputs:
        return _assembled(artifact, files, inputs, allowed or {})
    pickles = {_within(path, artifact.relative) for path in artifact.convert}
    if not pickles:
        return Converted(list(files), {}, {}, [])
    alone = {path for path in pickles if artifact.kind == "model" and not layout.is_model_pickle(_name(path))}
    names = {path: "model.safetensors" if path in alone else new_name(path) for path in pickles}
    plain = bool(alone) or artifact.artifact == "textual-inversion"
    reader = Reader(Tree("", {}, {}), averaged=artifact.prefer_averaged)
    made: dict[str, Made] = {}
    owners: dict[str, str] = {}
    sizes = 0
    out: list[SourceFile] = []
    for file in files:
        if file.path not in pickles:
            out.append(file)
            continue
        items = single(File(file.path, file.source, file.size), reader, model=not plain)
        made[names[file.path]] = extract_write.converted(items)
        owners |= {item.name: names[file.path] for item in items}
        sizes += sum(item.size for item in items)
        out.append(msgspec.structs.replace(file, path=names[file.path]))
    transform: dict[str, bytes] = {}
    for i, file in enumerate(out):
        if file.role == "index" and file.path.endswith(".bin.index.json"):
            name = new_name(file.path.removesuffix(".index.json")) + ".index.json"
            out[i] = msgspec.structs.replace(file, path=name)
            transform[name] = _index(owners, sizes, Path(name).parent)
    return Converted(out, made, transform, [_edge([f for f in files if f.path in pickles], hashed=hashed)])


def _assembled(
    artifact: Artifact, files: Sequence[SourceFile], inputs: Sequence[SourceFile], allowed: Mapping[str, str]
) -> Converted:
    """Put the weights together out of rank files or pieces, in shards, with an index where there are several."""
    plan = extract.published(artifact)
    first = inputs[0]
    made_of = str(artifact.facts.get("assembled_from") or first.path)
    made, index = extract_write.contents(plan, made_of, allowed=allowed)
    out = list(files)
    out += [msgspec.structs.replace(first, path=name, role="weights") for name in made]
    transform: dict[str, bytes] = {}
    if index is not None:
        name = f"{plan.stem}.safetensors.index.json"
        transform[name] = index
        out.append(msgspec.structs.replace(first, path=name, role="index"))
    # No digest of the inputs: most of their bytes are the optimizer's, and would be read for that alone.
    edge = LineageEdge(relation="extracted-from", ref=made_of)
    return Converted(out, dict(made), transform, [edge], list(inputs))


def new_name(path: str) -> str:
    """Return the path under which loaders look for a pickle's tensors as safetensors."""
    folder, slash, name = path.rpartition("/")
    stem = name.rpartition(".")[0]
    if stem.startswith("pytorch_model"):
        stem = "model" + stem.removeprefix("pytorch_model")
    return f"{folder}{slash}{stem}.safetensors"


def _index(owners: dict[str, str], size: int, folder: Path) -> bytes:
    inside = "" if str(folder) == "." else f"{folder.as_posix()}/"
    weight_map = {name: path.removeprefix(inside) for name, path in sorted(owners.items()) if path.startswith(inside)}
    document = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return json.dumps(document, indent=2).encode() + b"\n"


def _edge(sources: Iterable[SourceFile], *, hashed: bool) -> LineageEdge:
    """Return the edge to what was converted: its names, and the digest of its bytes."""
    files = sorted(sources, key=lambda f: f.path)
    label = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    if not hashed:
        return LineageEdge(relation="converted-from", ref=label)
    entries = [FileEntry(path=f.path, size=f.size, sha256=sha256_file(Path(f.source)), role="weights") for f in files]
    return LineageEdge(relation="converted-from", ref=label, content=content_digest(entries))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _within(path: str, root: str) -> str:
    return path if root == "." else path.removeprefix(root + "/")
