"""The tensors of a checkpoint as they would be written, each with the place its bytes come from.

One torch file or a row of them, DeepSpeed's rank files, a torch distributed checkpoint. Only directories are read here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weighbridge.adapters import torch_weights
from weighbridge.adapters.families import deepspeed, distributed, pickled, zero_parts
from weighbridge.adapters.formats import dcp
from weighbridge.adapters.formats.protocol import BITS, FormatFault, Tensor, elements
from weighbridge.adapters.formats.select import select
from weighbridge.adapters.listing import File
from weighbridge.adapters.origins import InFile, InPieces, InStretches, Origin, Stretch
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.torch_weights import Held
from weighbridge.registry import errors


class Item(NamedTuple):
    """One tensor to be written: its name, dtype and shape there, where its bytes come from and in which dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: Origin
    stored: str

    @property
    def size(self) -> int:
        """Bytes as written."""
        return elements(self.shape) * BITS[self.dtype] // 8


class Found(NamedTuple):
    """The tensors of a checkpoint, and what is left behind of it, with its bytes."""

    items: tuple[Item, ...]
    prefix: str = ""
    """What was taken off every name."""
    aliases: dict[str, str] = {}  # noqa: RUF012 - never written to
    dropped: dict[str, int] = {}  # noqa: RUF012 - never written to
    weights_key: str | None = None
    sets: tuple[str, ...] = ()


def in_parts(place: Place) -> Found:
    """Return the weights of a folder that lie in rank files, in pieces, or in its torch files. Raises RefusedError."""
    if deepspeed.tags(place):
        return zero(place)
    if distributed.folders(place):
        return pieces(place)
    return torch_files(list(place.names.values()), place.reader)


def torch_files(files: Sequence[File], reader: Reader, *, key: str | None = None, whole_names: bool = False) -> Found:
    """Return the weights of some torch files. Raises RefusedError."""
    items: list[Item] = []
    aliases: dict[str, str] = {}
    dropped: dict[str, int] = {}
    prefix: str = ""
    weights_key: str | None = None
    sets: tuple[str, ...] = ()
    for file in files:
        held = torch_weights.read(file, reader, key=key, whole_names=whole_names and key is None)
        _usable(file, held)
        assert held.selection is not None
        items += [_item(t, InFile(file.source, t, held.big_endian)) for t in held.places]
        aliases |= held.selection.aliases
        prefix = held.selection.stripped.prefix
        weights_key, sets = held.selection.weights_key, held.selection.weight_sets
        dropped |= _dropped(held)
    return Found(tuple(items), prefix, aliases, dropped, weights_key, sets)


def _usable(file: File, held: Held) -> None:
    found = [f for f in held.findings if f.severity == "block" and f.code != "keys-wrapped"]
    if found or not held.tensors:
        why = found[0].message if found else f"{file.path} holds no weights"
        fix = found[0].fix if found else None
        raise errors.RefusedError(f"no weights are taken out of {file.path}", why=why, fix=fix, findings=found)


def _item(tensor: Tensor, origin: Origin) -> Item:
    return Item(tensor.name, tensor.dtype, tensor.shape, origin, tensor.dtype)


def _dropped(held: Held) -> dict[str, int]:
    """Return every entry of a torch file that is left behind, with its bytes of tensors."""
    assert held.directory is not None
    assert held.selection is not None
    sizes = {entry.name: entry.nbytes for entry in held.directory.entries}
    table = {name: sizes.get(name, 0) for name in held.selection.dropped_top_keys}
    loose = {t.name: t.nbytes for t in held.selection.tensors}
    return table | {name: loose.get(name, 0) for name in held.selection.stripped.others}


def zero(place: Place) -> Found:
    """Return the weights of a DeepSpeed folder. Raises RefusedError."""
    deepspeed.judge(place)
    rebuilt = place.reader.notes.get(("zero", place.folder))
    if not isinstance(rebuilt, zero_parts.Rebuilt) or rebuilt.problem:
        raise errors.RefusedError(f"no weights are taken out of {place.folder}", why="its rank files do not fit")
    files = place.reader.tree.files
    items = [
        Item(
            planned.name,
            planned.dtype,
            planned.shape,
            InStretches(
                tuple(
                    Stretch(files[s.file].source, s.offset, s.length, BITS[planned.dtype] // 8 if s.big_endian else 1)
                    for s in planned.stretches
                )
            ),
            planned.dtype,
        )
        for planned in rebuilt.tensors
    ]
    return Found(tuple(items), aliases=rebuilt.aliases)


def pieces(place: Place) -> Found:
    """Return the weights of a distributed checkpoint. Raises RefusedError."""
    inner = distributed.folders(place)[0]
    folder = Path(place.reader.tree.folders[place.folder if inner == "." else place.path(inner)].path)
    try:
        loaded = dcp.load(folder)
    except FormatFault as error:
        raise errors.RefusedError(f"no weights are taken out of {place.folder}", why=error.message) from error
    chosen = select(loaded.directory, averaged=place.reader.averaged)
    way = tuple(chosen.weights_key.split("/")) if chosen.weights_key else ()
    whole = {
        ".".join((*t.group[len(way) :], t.name)): name
        for t, name in zip(loaded.directory.tensors, loaded.chunks, strict=True)
        if t.group[: len(way)] == way
    }
    items: list[Item] = []
    for tensor in chosen.tensors:
        name = chosen.stripped.names.get(tensor.name)
        if name is None or name in chosen.aliases:
            continue
        chunks = loaded.chunks[whole[tensor.name]]
        items.append(_item(tensor._replace(name=name), InPieces(str(folder), tensor.shape, tensor.dtype, chunks)))
    sizes: dict[str, int] = {}
    for t in loaded.directory.tensors:
        top = t.group[0] if t.group else t.name
        sizes[top] = sizes.get(top, 0) + t.nbytes
    dropped = {name: sizes.get(name, 0) for name in chosen.dropped_top_keys}
    if way:
        dropped |= {name: size for name, size in sizes.items() if name != way[0]}
    return Found(tuple(items), chosen.stripped.prefix, chosen.aliases, dropped, chosen.weights_key)


def single(file: File, reader: Reader, *, model: bool) -> tuple[Item, ...]:
    """Return the tensors of one torch file that is published as one safetensors file."""
    held = pickled.held(file, reader) if model else torch_weights.read(file, reader)
    if held is None or not held.sound:
        raise errors.RefusedError(f"{file.path} cannot be converted", why="not all of its tensors can be stored")
    return tuple(_item(t, InFile(file.source, t, held.big_endian)) for t in held.places)
