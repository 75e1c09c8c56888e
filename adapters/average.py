"""A running average in a file or folder of its own, held against the raw weights beside it: names and shapes only."""

import os
from collections.abc import Mapping
from pathlib import Path

from weighbridge.adapters import shards, torch_weights
from weighbridge.adapters.families import assembled, pickled
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.formats.select import Shape, uncovered
from weighbridge.adapters.listing import read_tree
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.whole import header_of, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding


def partial(average: Path, raw: Path) -> Finding | None:
    """Return the finding for an average that lacks tensors of the raw weights, None for one that has them all.

    Where one of the two holds no weights that can be read, nothing is said: that is told by its own judgement.
    """
    try:
        mine, theirs = shapes(average), shapes(raw)
    except OSError:
        return None
    lacking = uncovered(mine, theirs) if mine and theirs else ()
    if not lacking:
        return None
    name, other = os.path.basename(average), os.path.basename(raw)  # noqa: PTH119 - a name may end in anything
    return findings.finding(
        "average-partial",
        name,
        f"{name} is an average of a part of the model only, without {some(lacking)}, which {other} holds",
        "let the trainer average every tensor, buffers included",
        severity="block",
        uncovered=list(lacking),
    )


def shapes(path: Path) -> Mapping[str, Shape]:
    """Return the shapes of a checkpoint's weights by name, second names of one tensor included. Raises OSError."""
    place = Place(Reader(read_tree(path)), ".")
    if path.is_dir():
        found = shards.weight_set(place) or pickled.weight_set(place)
        if found is not None:
            held = {name: tensor.shape for name, tensor in found.tensors.items()}
            return held | _second(found.facts.get("aliases"), held)
        other = assembled.probe(place)
        tensors = other.tensors if other is not None else {}
        aliases = other.facts.get("aliases") if other is not None else {}
        held = {name: tensor.shape for name, tensor in tensors.items()}
        return held | _second(aliases, held)
    file = place.names.get(path.name)
    if file is None:
        return {}
    if place.reader.container(file) not in sniff.PICKLED:
        return {name: tensor.shape for name, tensor in header_of(file, place.reader).tensors.items()}
    read = torch_weights.read(file, place.reader)
    held = {name: tensor.shape for name, tensor in read.tensors.items()}
    return held | _second(read.facts.get("aliases"), held)


def _second(aliases: object, held: Mapping[str, Shape]) -> dict[str, Shape]:
    table = aliases if isinstance(aliases, dict) else {}
    return {name: held[owner] for name, owner in table.items() if owner in held}
