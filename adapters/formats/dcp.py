"""Torch distributed checkpoints: a pickled `.metadata` that lists every tensor, and `.distcp` files with its pieces.

    .metadata       Metadata(state_dict_metadata, planner_data, storage_data), written last
    __0_0.distcp    pieces one after the other, each a small torch zip file

The pickle goes through the inert machine: torch's metadata classes are read as records, nothing is imported. A piece is
only believed where its file is there, long enough, and inside the folder.
"""

import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats import globals as judged
from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.inert import Record, Symbol, uncollected
from weighbridge.adapters.formats.machine import Machine
from weighbridge.adapters.formats.protocol import (
    RANK_LIMIT,
    SIZE_LIMIT,
    Directory,
    Entry,
    FormatFault,
    Hazard,
    Tensor,
    elements,
    shown,
)
from weighbridge.adapters.formats.source import opened
from weighbridge.adapters.formats.torch_calls import answers
from weighbridge.adapters.formats.torch_names import kind_of

METADATA: Final = ".metadata"
METADATA_LIMIT: Final = 128 << 20
CHUNK_LIMIT: Final = 1_000_000
NAME_LIMIT: Final = 1024

_OWN: Final = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.fsdp.")
_OWN_NAMES: Final = frozenset((
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
    "ShardMetadata", "ShardedTensorMetadata",
))  # fmt: skip
_MISSING_NAMED: Final = 8


class Chunk(NamedTuple):
    """One piece of a tensor: where it lies in the tensor, and which bytes of which file hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


class Checkpoint(NamedTuple):
    """A distributed checkpoint: its directory, and the pieces of every tensor by its whole name."""

    directory: Directory
    chunks: dict[str, tuple[Chunk, ...]]


def read(path: Path) -> Directory:
    """Return what one holds; `path` is its folder or its .metadata. Raises OSError, FormatFault."""
    return load(path).directory


def load(path: Path) -> Checkpoint:
    """Return the directory and the pieces of every tensor. Raises OSError, FormatFault."""
    folder = path.parent if path.name == METADATA else path
    try:
        with opened(folder / METADATA) as source:
            if source.length > METADATA_LIMIT:
                raise FormatFault(
                    "pickle-too-large", f".metadata has {source.length} bytes, the limit is {METADATA_LIMIT}"
                )
            data = source.at(0, source.length)
    except FileNotFoundError as error:
        raise FormatFault(
            "metadata-missing", "there is no .metadata, which is written last: the save did not end", file=METADATA
        ) from error
    machine = Machine()
    machine.calls = answers(machine)
    with uncollected():
        root = machine.run(data)
        return _Reading(folder, machine).checkpoint(root)


def item(path: Path, chunk: Chunk) -> Directory:
    """Return the directory of the torch file that holds one piece; `path` is the .distcp file. Raises FormatFault."""
    with opened(path) as source:
        return torch_zip.read_from(source.part(chunk.offset, chunk.length))


class _Reading:
    """One pass over the records of a .metadata."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.folder = folder
        self.machine = machine
        symbols = [s for s in machine.symbols.values() if not _own(s)]
        self.hazards = [*judged.hazards(symbols), *torch_zip.odd(machine)]
        self.foreign = judged.foreign(symbols)
        self.sizes: dict[str, int | None] = {}
        self.lost: dict[str, list[str]] = {}
        self.cut: dict[str, list[str]] = {}
        self.need: dict[str, int] = {}
        self.first: dict[str, Chunk] = {}

    def checkpoint(self, root: Any) -> Checkpoint:
        state = _state(root, "Metadata")
        table, stored, planned = (state.get(key) for key in ("state_dict_metadata", "storage_data", "planner_data"))
        if not isinstance(table, dict) or not isinstance(stored, dict):
            raise FormatFault("metadata-damaged", ".metadata lists no tensors or no storage")
        if len(stored) > CHUNK_LIMIT or len(table) > CHUNK_LIMIT:
            raise FormatFault("pickle-too-large", f".metadata lists more than {CHUNK_LIMIT} pieces")
        places = self._places(stored)
        planned = planned if isinstance(planned, dict) else {}
        tensors: list[Tensor] = []
        entries: list[Entry] = []
        chunks: dict[str, tuple[Chunk, ...]] = {}
        for name, entry in table.items():
            if type(name) is not str or len(name) > NAME_LIMIT or not isinstance(entry, Record):
                raise FormatFault("metadata-damaged", ".metadata holds an entry without a valid name or record")
            if entry.symbol.name == "TensorStorageMetadata":
                tensor, pieces = self._tensor(name, entry, places, planned.get(name))
                tensors.append(tensor)
                chunks[name] = pieces
            else:
                entries.append(Entry(name, "bytes"))
                self._file(places.get((name, ())), name)
        self.hazards += [*self._missing(), *self._short()]
        return Checkpoint(self._directory(tensors, entries, state), chunks)

    def _places(self, stored: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Chunk]:
        places: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for key, value in stored.items():
            index, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
            name, offsets = index.get("fqn"), index.get("offset")
            path, begin, length = info.get("relative_path"), info.get("offset"), info.get("length")
            where = _sizes(offsets) if offsets is not None else ()
            named = isinstance(name, str) and isinstance(path, str)
            if where is None or not named or not _count(begin) or not _count(length):
                raise FormatFault("metadata-damaged", ".metadata holds a piece without a valid place")
            places[(str(name), where)] = Chunk(where, (), str(path), int(begin or 0), int(length or 0))
        return places

    def _tensor(
        self, name: str, entry: Record, places: dict[tuple[str, tuple[int, ...]], Chunk], plan: Any
    ) -> tuple[Tensor, tuple[Chunk, ...]]:
        state = _state(entry, "TensorStorageMetadata")
        shape, listed = _sizes(state.get("size")), state.get("chunks")
        properties = state.get("properties")
        about = properties.state if isinstance(properties, Record) else None
        dtype = (
            about[0] if isinstance(about, tuple) and about else about.get("dtype") if isinstance(about, dict) else None
        )
        kind = kind_of(dtype.full) if isinstance(dtype, Symbol) else None
        if shape is None or not isinstance(listed, list) or kind is None:
            raise FormatFault("metadata-damaged", f"{shown(name)} has no valid size, dtype or pieces", bad_tensor=name)
        pieces: list[Chunk] = []
        covered = 0
        for piece in listed:
            about = _state(piece, "ChunkStorageMetadata")
            offsets, sizes = _sizes(about.get("offsets")), _sizes(about.get("sizes"))
            if offsets is None or sizes is None or len(offsets) != len(shape) or len(sizes) != len(shape):
                raise FormatFault("metadata-damaged", f"{shown(name)} has a piece of no valid size", bad_tensor=name)
            if any(at + side > whole for at, side, whole in zip(offsets, sizes, shape, strict=True)):
                self._block("tensor-outside", name, "a piece reaches out of the tensor")
            covered += elements(sizes)
            place = places.get((name, offsets))
            if place is None:
                self._block("tensor-missing", name, f"no file holds the piece at {list(offsets)}")
            else:
                pieces.append(place._replace(sizes=sizes))
                self._file(pieces[-1], name)
        if covered != elements(shape):
            self._block("tensor-incomplete", name, f"its pieces hold {covered} of {elements(shape)} elements")
        path = plan if isinstance(plan, tuple) and plan and all(type(part) in {str, int} for part in plan) else (name,)
        group, key = tuple(str(part) for part in path[:-1]), str(path[-1])
        file = pieces[0].file if len(pieces) == 1 else ""
        size = elements(shape) * kind.size
        return Tensor(key, kind.dtype, shape, size, None, None, None, group, kind.unsupported, file), tuple(pieces)

    # ---------------------------------------------------------------------------------------------------------- files

    def _file(self, chunk: Chunk | None, name: str) -> None:
        """Look once at every file, and at every piece against its length."""
        if chunk is None:
            return
        if chunk.file not in self.sizes:
            self.sizes[chunk.file] = self._size(chunk.file)
            self.first[chunk.file] = chunk
        size = self.sizes[chunk.file]
        if size is None:
            self.lost.setdefault(chunk.file, []).append(name)
        elif chunk.offset + chunk.length > size:
            self.need[chunk.file] = max(self.need.get(chunk.file, 0), chunk.offset + chunk.length)
            self.cut.setdefault(chunk.file, []).append(name)

    def _size(self, file: str) -> int | None:
        parts = file.split("/")
        if (
            not all(parts)
            or any(part in {".", ".."} or not part.isprintable() for part in parts)
            or len(file) > NAME_LIMIT
        ):
            self.hazards.append(
                Hazard("path-unsafe", "block", file, f"{shown(file)} leads out of the folder", {"unsafe_paths": [file]})
            )
            return None
        try:
            state = (self.folder / file).lstat()
            if stat.S_ISLNK(state.st_mode):
                state = (self.folder / file).stat()
        except OSError:
            return None
        return state.st_size if stat.S_ISREG(state.st_mode) else None

    def _missing(self) -> Iterator[Hazard]:
        for file, names in self.lost.items():
            yield Hazard(
                "data-missing",
                "block",
                file,
                f"{shown(file)} is not there; it holds {_named(names)}",
                {"file": file, "missing_tensors": sorted(set(names))},
            )

    def _short(self) -> Iterator[Hazard]:
        for file, names in self.cut.items():
            size, need = self.sizes[file] or 0, self.need[file]
            yield Hazard(
                "file-short",
                "block",
                file,
                f"{shown(file)} ends at {size}, its pieces need {need}; behind its end lie {_named(names)}",
                {
                    "file": file,
                    "file_bytes": size,
                    "expected_bytes": need,
                    "short_by": need - size,
                    "bad_tensor": names[0],
                    "cut_tensors": sorted(set(names)),
                },
            )

    def _block(self, code: str, name: str, problem: str, **data: Any) -> None:
        if len(self.hazards) < 1000:
            self.hazards.append(Hazard(code, "block", name, f"{shown(name)}: {problem}", {"bad_tensor": name, **data}))

    # --------------------------------------------------------------------------------------------------------- result

    def _directory(self, tensors: list[Tensor], entries: list[Entry], state: dict[Any, Any]) -> Directory:
        facts: dict[str, Any] = {
            "container": "dcp",
            "pickle_format": True,
            "distcp_files": sorted(self.sizes),
            "missing_files": sorted(self.lost),
            "key_prefix": _prefix(tensors),
            "foreign_globals": self.foreign,
            "unsupported": {t.name: t.unsupported for t in tensors if t.unsupported},
            "dcp_version": state.get("version") if isinstance(state.get("version"), str) else None,
            "item_format": self._item_format(),
        }
        return Directory("dcp", tuple(tensors), tuple(entries), tuple(self.hazards), facts)

    def _item_format(self) -> str | None:
        """Return what the first piece of the first file is, by its first bytes."""
        for file, chunk in self.first.items():
            size = self.sizes[file]
            if size is not None and chunk.offset + min(chunk.length, 9) <= size:
                with opened(self.folder / file) as source:
                    head = source.at(chunk.offset, min(chunk.length, 9))
                return "torch-zip" if head[:4] == b"PK\3\4" else "safetensors" if head[8:] == b"{" else "unknown"
        return None


def _named(names: Iterable[str]) -> str:
    """Return how many tensors these are, with the first few names; a tensor of several pieces counts once."""
    every = list(dict.fromkeys(names))
    listed = ", ".join(map(shown, every[:_MISSING_NAMED])) + (" ..." if len(every) > _MISSING_NAMED else "")
    return f"{len(every)} of the tensors: {listed}"


def _own(symbol: Symbol) -> bool:
    return symbol.module.startswith(_OWN) and symbol.name in _OWN_NAMES


def _state(value: Any, name: str) -> dict[Any, Any]:
    """Return the fields of a record of this class. Raises FormatFault for anything else."""
    if isinstance(value, Record) and value.symbol.name == name:
        if isinstance(value.state, dict):
            return value.state
        if value.state is None and isinstance(value.args, tuple):
            return dict(zip(_FIELDS.get(name, ()), value.args, strict=False))
    raise FormatFault("metadata-damaged", f".metadata holds something else than a {name}")


_FIELDS: Final = {
    "MetadataIndex": ("fqn", "offset", "index"),
    "_StorageInfo": ("relative_path", "offset", "length"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data"),
}


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, (tuple, list)) and len(value) <= RANK_LIMIT and all(_count(side) for side in value):
        shape = tuple(value)
        return shape if elements(shape) < SIZE_LIMIT else None
    return None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < SIZE_LIMIT


def _prefix(tensors: list[Tensor]) -> str:
    """Return the first word of the way to every tensor, with its dot, where all have the same."""
    first = {tensor.group[0] for tensor in tensors if tensor.group}
    if len(first) == 1 and all(tensor.group for tensor in tensors):
        return f"{first.pop()}."
    return ""
