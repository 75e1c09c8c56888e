"""Take the weights out of a checkpoint as safetensors: torch files, pickled models, ZeRO folders, distributed ones.

Nothing is loaded and nothing is run: the readers say where each tensor's bytes lie, and they are streamed from there
into new files, cut into shards on tensor bounds. What is left behind is listed with its size, never dropped silently.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import items, layout, torch_weights, unwrap
from weighbridge.adapters.families import deepspeed, distributed
from weighbridge.adapters.inspect import goes_along, inspect
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.items import Item
from weighbridge.adapters.listing import File, Tree, read_tree
from weighbridge.adapters.reading import Place, Reader, table_at
from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

NOT_NEEDED: Final = frozenset({"config-missing", "weights-ambiguous", "keys-wrapped", "end-mark-missing"})
"""Findings that forbid to publish and not to take tensors out."""

_SIDE_ROLES: Final = frozenset({"tokenizer", "config", "license"})


class Extraction(NamedTuple):
    """What would be written, and what is left behind."""

    artifact: str
    items: tuple[Item, ...]
    stem: str
    """Name of the weights file without suffix: model or adapter_model."""
    prefix: str
    """What was taken off every name."""
    aliases: dict[str, str]
    dropped: dict[str, int]
    """Entries left behind, with their bytes of tensor data."""
    beside: dict[str, str]
    """Config, tokenizer and licence files to copy: name there -> source."""
    findings: list[Finding]
    weights_key: str | None = None
    sets: tuple[str, ...] = ()


def plan(path: Path, *, key: str | None = None, adapter: bool = False) -> Extraction:
    """Return how the weights come out of a file or folder; `key` names the table, `adapter` takes adapter weights only.

    Raises NotFoundError, RefusedError where something stands against it, UsageError where there is nothing to take out.
    """
    try:
        found = inspect(path)
    except FileNotFoundError as error:
        raise errors.NotFoundError(f"there is no {shown(str(path))}", fix="name a checkpoint that exists") from error
    one = _one(found, path)
    blocks = [f for f in one.findings if f.severity == "block" and f.code not in NOT_NEEDED]
    if blocks:
        raise errors.RefusedError(
            f"no weights are taken out of {shown(str(path))}",
            why=blocks[0].message,
            fix=blocks[0].fix,
            findings=blocks,
        )
    reader = Reader(read_tree(path, (), goes_along))
    place = Place(reader, one.relative)
    kind = one.artifact.removeprefix("trainer-checkpoint+")
    if not one.convert and (deepspeed.tags(place) or distributed.folders(place)):
        made = _of(items.in_parts(place))
    else:
        files = [reader.tree.files[p] for p in one.convert] or _torch_files(place, one.file)
        if not files:
            raise errors.UsageError(
                f"there is nothing to take out of {shown(str(path))}",
                why=f"it holds {one.artifact}: its weights are not in torch files, nor in parts",
                fix=f"registry push {shown(str(path))} --name NAME publishes what it holds as it is",
            )
        whole_names = kind in {"full-model", "quantized", "adapter", "peft-other"}
        made = _of(items.torch_files(files, reader, key=key, whole_names=whole_names))
    beside = {
        f.path.rpartition("/")[2]: reader.tree.files[f.path].source
        for f in one.files
        if f.role in _SIDE_ROLES and f.publish and f.path in reader.tree.files
    }
    made = made._replace(beside=beside, findings=[f for f in one.findings if f.severity != "block"])
    mine, others = torch_weights.lora_split([item.name for item in made.items])
    if adapter or (mine and not others):
        return _adapter(made, shown(str(path)), _config(beside.get(layout.ADAPTER_CONFIG)))
    return made._replace(artifact="adapter", stem="adapter_model") if one.kind == "adapter" and mine else made


def published(artifact: Artifact) -> Extraction:
    """Return how the weights of an artifact come out that is published as what its `inputs` amount to.

    Raises OSError, RefusedError where they cannot be put together (any more).
    """
    inside = "" if artifact.relative == "." else artifact.relative + "/"
    inputs = {path.removeprefix(inside) for path in artifact.inputs}
    whole = read_tree(artifact.root)
    # Nothing but the inputs that were judged: another tag, another file beside them is somebody else's.
    tree = Tree(whole.root, {path: file for path, file in whole.files.items() if path in inputs}, whole.folders)
    made = _of(items.in_parts(Place(Reader(tree, averaged=artifact.prefer_averaged), ".")))
    if artifact.kind != "adapter":
        return made
    config = None if artifact.config is None else str(Path(artifact.root, artifact.config.removeprefix(inside)))
    return _adapter(made, artifact.root, _config(config))


def _of(found: items.Found) -> Extraction:
    return Extraction(
        artifact="model",
        items=found.items,
        stem="model",
        prefix=found.prefix,
        aliases=found.aliases,
        dropped=found.dropped,
        beside={},
        findings=[],
        weights_key=found.weights_key,
        sets=found.sets,
    )


def _config(source: str | None) -> dict[str, Any]:
    return (table_at(Path(source)) if source is not None else None) or {}


def _one(found: Inspection, path: Path) -> Any:
    """Return the artifact that is meant: the one of the folder itself, else the only one."""
    able = [a for a in found.artifacts if a.artifact != "trainer-checkpoint" or a.convert] or list(found.artifacts)
    here = [a for a in able if a.relative == "."] or able
    if len(here) == 1:
        return here[0]
    if not here:
        raise errors.UsageError(
            f"there is nothing to take out of {shown(str(path))}",
            why=found.findings[0].message if found.findings else "no weights of a known layout are in it",
            fix=f"registry inspect {shown(str(path))}",
        )
    raise errors.UsageError(
        f"{shown(str(path))} holds several checkpoints",
        why=", ".join(a.file or a.relative for a in here[:8]),
        fix=f"registry extract {shown(str(path))}/{shown(here[0].file or here[0].relative)} --to DIR",
    )


def _torch_files(place: Place, alone: str | None) -> list[File]:
    """Return the torch files of a folder whose weights cannot be published as they are, but can be taken out."""
    if alone is not None:
        return [place.reader.tree.files[alone]]
    return [
        f
        for n, f in sorted(place.names.items())
        if layout.is_weights_name(n)
        and not n.endswith((".safetensors", ".json"))
        and place.reader.container(f) in {"torch-zip", "torch-legacy", "pickle"}
    ][:1]


def _adapter(made: Extraction, subject: str, config: Mapping[str, Any]) -> Extraction:
    """Keep the adapter weights of a checkpoint, under the names PEFT gives them in a file of their own."""
    found = unwrap.unwrap([item.name for item in made.items], config)
    if found.problem is not None:
        raise errors.RefusedError(
            f"no adapter is taken out of {subject}",
            why=found.problem,
            fix="save the one that is meant with save_pretrained",
        )
    if not found.names:
        raise errors.UsageError(
            f"{subject} holds no adapter weights", fix="leave --adapter away: the model's weights come out"
        )
    taken = tuple(item._replace(name=found.names[item.name]) for item in made.items if item.name in found.names)
    others = [item for item in made.items if item.name not in found.names]
    base = sum(item.size for item in others)
    dropped = {**made.dropped, f"{len(others)} tensors of the base": base} if others else made.dropped
    return made._replace(artifact="adapter", items=taken, stem="adapter_model", dropped=dropped)


def shards(held: Sequence[Item], limit: int) -> list[list[Item]]:
    """Return the tensors in shards of at most `limit` bytes, cut between tensors; a larger tensor has its own."""
    parts: list[list[Item]] = []
    size = 0
    for item in held:
        if not parts or (size + item.size > limit and size):
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.size
    return parts


def names_of(parts: Sequence[Sequence[Item]], stem: str) -> list[str]:
    """Return the file name of every shard."""
    count = len(parts)
    if count <= 1:
        return [f"{stem}.safetensors"] * count
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index(parts: Sequence[Sequence[Item]], names: Sequence[str]) -> Mapping[str, Any]:
    """Return the index of some shards."""
    weight_map = {item.name: name for part, name in zip(parts, names, strict=True) for item in part}
    total = sum(item.size for part in parts for item in part)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def walk(parts: Sequence[Sequence[Item]]) -> Iterator[Item]:
    """Yield every tensor of some shards."""
    for part in parts:
        yield from part
