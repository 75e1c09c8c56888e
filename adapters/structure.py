"""Is a folder structurally whole right now? The daemon asks before it takes anything.

Names, JSON, headers and the directories of containers are read. Of weights in parts the rank files' own records and the
list of the pieces are, too, by the machine that runs nothing (formats/inert.py): they say what there must be.

An answer other than None is the reason to wait. It says nothing about whether the artifact is any good: that is
`inspect`'s business, and a folder that stays incomplete is judged there when the wait is over.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import layout, plan
from weighbridge.adapters.checkpoint import expected_end_mark
from weighbridge.adapters.families import assembled
from weighbridge.adapters.formats import gguf, safetensors, zipdir
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.source import contents, opened
from weighbridge.adapters.listing import read_tree
from weighbridge.adapters.reading import Place, Reader

JSON_LIMIT: Final = 64 << 20
"""Bytes of the largest JSON file that is read: the index of a model with a million tensors fits."""


def complete(path: Path | str, *, mark: bool = True) -> str | None:
    """Return why a folder, or a file that is one checkpoint, cannot be whole at this moment; None when it can.

    Looks at: staging names, files in progress (but for those of `layout.left_over`), the owed end mark, empty files and
    dangling links among the weights, the header of every safetensors file against its length, the directory of torch
    zip files, GGUF headers, a distributed checkpoint's pieces, DeepSpeed's rank files against the world they record,
    every shard an index names, an adapter's two halves, JSON that does not parse. With `mark` False an owed end mark is
    no reason: it only shortens a wait that quiet time ends too. Raises FileNotFoundError when the folder is gone.
    """
    folder = Path(path)
    if folder.is_file():
        return _file_complete(folder)
    with os.scandir(folder) as entries:
        stats = {entry.name: _stat(entry) for entry in entries if not entry.is_dir()}
    names = stats.keys()
    if layout.is_staging_name(folder.name):
        return f"the folder still has the staging name {folder.name}"
    writing = [name for name in names if layout.is_in_progress(name)]
    if writing:
        old = layout.left_over({name: stat.st_mtime_ns for name, stat in stats.items() if stat is not None})
        live = sorted(set(writing).difference(old))
        if live:
            return f"{live[0]} is still being written"
    for name in sorted(names):
        stat = stats[name]
        reason = _file_reason(folder, name, None if stat is None else stat.st_size)
        if reason:
            return reason
    if layout.is_sharded_state(names) and ".metadata" not in names:
        return ".metadata, which is written last, is not there yet"
    reason = _in_parts(folder, names)
    if reason is None:
        reason = _adapter_reason(names) or _model_reason(folder, names)
    if reason:
        return reason
    owed = expected_end_mark(names, folder.name) if mark else None
    return f"{owed} is not there yet" if owed else None


def _file_complete(path: Path) -> str | None:
    """Return why a file that is a checkpoint of its own cannot be whole, or the papers beside it."""
    with os.scandir(path.parent) as entries:
        stats = {e.name: _stat(e) for e in entries if e.name == path.name or (plan.is_paper(e.name) and not e.is_dir())}
    if path.name not in stats:
        raise FileNotFoundError(path)
    sizes = {name: None if stat is None else stat.st_size for name, stat in stats.items()}
    return next((why for name in sorted(sizes) if (why := _file_reason(path.parent, name, sizes[name]))), None)


def _in_parts(folder: Path, names: Collection[str]) -> str | None:
    """Return why rank files or pieces are not all there, "" where they are; None where the weights are not in parts."""
    if any(layout.is_weights_name(name) for name in names) or not _holds_parts(folder, names):
        return None
    found = assembled.probe(Place(Reader(read_tree(folder)), "."))
    if found is None:
        return None
    return next((f.message for f in found.findings if f.code in _UNFINISHED), "")


def _holds_parts(folder: Path, names: Collection[str]) -> bool:
    if layout.is_sharded_state(names) or any(layout.is_rank_name(name) for name in names):
        return True
    with os.scandir(folder) as entries:
        below = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    for entry in below:
        inside = os.listdir(entry.path)  # noqa: PTH208 - names of a folder of strings
        if any(map(layout.is_rank_name, inside)):
            return True
        if layout.is_fsdp_folder(entry.name) and layout.is_sharded_state(inside):
            return True
    return False


_UNFINISHED: Final = frozenset((
    "rank-file-missing", "metadata-missing", "metadata-damaged", "data-missing", "file-short", "file-empty",
    "tensor-missing", "tensor-incomplete", "zip-cut", "zip-damaged", "not-zip", "pickle-cut", "pickle-damaged",
    "record-missing", "record-short", "container-damaged",
))  # fmt: skip
"""What a rank that has not written its part yet looks like."""


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def _file_reason(folder: Path, name: str, size: int | None) -> str | None:
    is_json = name.endswith(".json")
    if not is_json and not layout.is_weights_name(name):
        return None
    if size is None:
        return f"{name} is a link to nothing"
    if size == 0:
        return f"{name} is empty"
    try:
        if name.endswith(".safetensors"):
            faults = safetensors.read(folder / name).faults
            return f"{name}: {faults[0].message}" if faults else None
        if is_json and size <= JSON_LIMIT:
            json.loads(contents(folder / name, JSON_LIMIT))
        if not is_json:
            return _container_reason(folder / name)
    except FileNotFoundError:
        return f"{name} has just vanished"
    except (ValueError, RecursionError):
        return f"{name} is not valid JSON yet"
    return None


def _container_reason(path: Path) -> str | None:
    """Return why a torch zip file or GGUF cannot be whole: its directory, or what its header asks for, is not there."""
    try:
        with opened(path) as source:
            head = source.head(4)
            if head == b"PK\3\4":
                zipdir.read(source)
            elif head == b"GGUF":
                short = next((h for h in gguf.read_from(source).hazards if h.code == "file-short"), None)
                return f"{path.name}: {short.message}" if short else None
    except FormatFault as fault:
        return f"{path.name}: {fault.message}"
    return None


def _adapter_reason(names: Any) -> str | None:
    pickled = any(name in names for name in layout.ADAPTER_PICKLES)
    weights = layout.ADAPTER_WEIGHTS in names
    config = layout.ADAPTER_CONFIG in names
    if (weights or pickled) and not config:
        return f"{layout.ADAPTER_CONFIG} is not there yet"
    if config and not weights and not pickled and not any(layout.is_weights_name(name) for name in names):
        return f"{layout.ADAPTER_WEIGHTS} is not there yet"
    return None


def _model_reason(folder: Path, names: Any) -> str | None:
    indexes = [name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
    listed: set[str] = set()
    for index in sorted(indexes):
        document = json.loads(contents(folder / index, JSON_LIMIT))
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(weight_map, dict):
            return f"{index} has no weight map yet"
        shards = sorted({str(file) for file in weight_map.values()})
        listed.update(shards)
        missing = [shard for shard in shards if shard not in names and not (folder / shard).is_file()]
        if missing:
            return f"{len(missing)} of {len(shards)} files that {index} names are not there yet, such as {missing[0]}"
    for name in sorted(names):
        shard = layout.shard_of(name)
        if shard is None or shard[3] != "safetensors" or name in listed:
            continue
        stem, _, count, _ = shard
        here = [n for n in names if (s := layout.shard_of(n)) and s[0] == stem and s[2] == count]
        if not indexes:
            return (
                f"{len(here)} of {count} shards are there"
                if len(here) < count
                else f"{stem}.safetensors.index.json is not there yet"
            )
    model = bool(indexes) or layout.MODEL_WEIGHTS in names
    return f"{layout.MODEL_CONFIG} is not there yet" if model and layout.MODEL_CONFIG not in names else None
