"""Torch distributed checkpoints written byte by byte: `.metadata` as torch pickles it, and the files with pieces."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import Op, T, call, name, plain

META: Final = "torch.distributed.checkpoint.metadata"
FILES: Final = "torch.distributed.checkpoint.filesystem"


def record(module: str, kind: str, state: Any) -> Op:
    """Return the opcodes of an object of torch's metadata, made and given its state as pickle does."""
    return Op(name(module, kind) + b")\x81" + plain(state) + b"b")


def size(*sides: int) -> Op:
    """Return torch.Size."""
    return call(name("torch", "Size"), tuple(sides))


def metadata(
    tensors: Mapping[str, Any],
    *,
    plan: Mapping[str, tuple[str, ...]] | None = None,
    more: Any = None,
) -> bytes:
    """Return a .metadata: name -> (shape, pieces of (offsets, sizes, file, offset, length))."""
    table, stored = {}, {}
    layout = call(name("torch.serialization", "_get_layout"), "torch.strided")
    for label, (shape, pieces) in tensors.items():
        memory = call(name(META, "_MEM_FORMAT_ENCODING"), 0)
        about = record(META, "TensorProperties", (name("torch", "float32"), layout, False, memory, False))
        chunks = [record(META, "ChunkStorageMetadata", {"offsets": size(*o), "sizes": size(*s)}) for o, s, *_ in pieces]
        table[label] = record(
            META, "TensorStorageMetadata", {"properties": about, "size": size(*shape), "chunks": chunks}
        )
        for offsets, _, file, begin, length in pieces:
            index = record(META, "MetadataIndex", {"fqn": label, "offset": size(*offsets), "index": 0})
            stored[index] = record(FILES, "_StorageInfo", {"relative_path": file, "offset": begin, "length": length})
    state = {"state_dict_metadata": table, "planner_data": plan, "storage_data": stored, "version": "1.0.0"}
    return c.pickled(record(META, "Metadata", {**state, **({"storage_meta": more} if more is not None else {})}))


def folder(place: Path, data: bytes, files: Mapping[str, bytes]) -> Path:
    """Write a checkpoint folder, in place of what is there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / ".metadata").write_bytes(data)
    for label, content in files.items():
        (place / label).write_bytes(content)
    return place


def small(place: Path, *, rows: int = 4, files: int = 2) -> Path:
    """Write a checkpoint of two tensors whose rows are cut over the files."""
    part = rows // files
    piece = c.torch_zip(T("F32", (part, 4), 0.5))
    names = [f"__{i}_0.distcp" for i in range(files)]
    table = {
        f"model.{label}": (
            (part * files, 4),
            [((i * part, 0), (part, 4), file, n * len(piece), len(piece)) for i, file in enumerate(names)],
        )
        for n, label in enumerate(("w", "v"))
    }
    plan = {"model.w": ("model", "w"), "model.v": ("model", "v")}
    return folder(place, metadata(table, plan=plan), dict.fromkeys(names, piece + piece))
