"""Weights for other runtimes: ONNX with its data files, and what is recorded with its facts and never opened further.

TFLite, Core ML, ncnn, TensorRT engines, HDF5 and Keras, npz, Flax, ExecuTorch, ggml from before GGUF, archives.
"""

from typing import Any, Final

from weighbridge.adapters import torch_weights, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import pickled
from weighbridge.adapters.formats import readers
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import DtypeCount, WeightsFacts

_ABSENT: Final = frozenset({"lfs-pointer", "link-text", "dead-link", "empty"})
_SMALL: Final = 200


def judge(place: Place, artifact: str, files: tuple[File, ...]) -> Draft:
    """Return the files of one foreign kind of a folder as a draft."""
    draft = Draft(place, artifact, None, Named(root=place.folder, weights=tuple(f.path for f in files)))
    take(draft, files)
    read = [d for f in files if isinstance(d := draft.place.reader.notes.get(("foreign", f.path)), Directory)]
    if artifact == "onnx" and len(read) == len(files):
        _onnx(draft, files, read)
    elif read:
        draft.findings.append(recorded(files, artifact))
    return draft


def onnx(draft: Draft, files: tuple[File, ...]) -> bool:
    """Take ONNX files as the weights of a model folder that has no others; False where they are something else."""
    reader = draft.place.reader
    graphs = tuple(f for f in files if f.link is None and f.size and reader.container(f) == "onnx")
    rest = [f for f in files if f not in graphs]
    if not graphs or any(f.name.endswith(".onnx") for f in rest):
        return False
    take(draft, graphs)
    read = [d for f in graphs if isinstance(d := reader.notes.get(("foreign", f.path)), Directory)]
    if len(read) == len(graphs):
        draft.artifact = "onnx"
        _onnx(draft, graphs, read)
    return True


def take(draft: Draft, files: tuple[File, ...]) -> None:
    """Put what foreign files say of themselves into a draft: their facts, by file where there are several."""
    reader = draft.place.reader
    table: dict[str, dict[str, Any]] = {}
    for file in files:
        kind = "dead-link" if file.link is not None else reader.container(file)
        if kind in _ABSENT:
            draft.findings.append(pickled.absent(file, reader, kind))
            continue
        directory = reader.directory(file)
        if isinstance(directory, FormatFault):
            draft.findings.append(readers.fault(directory, file.path))
            continue
        reader.notes["foreign", file.path] = directory
        draft.findings += readers.findings(directory, file.path)
        table[file.path] = {**directory.facts, "file_bytes": file.size}
    if len(table) == 1:
        facts = next(iter(table.values()))
        draft.facts |= {key: value for key, value in facts.items() if key not in draft.facts and _is_small(value)}
    elif table:
        draft.facts["containers"] = table
        kinds = {facts["container"] for facts in table.values()}
        if len(kinds) == 1:
            draft.facts.setdefault("container", kinds.pop())


def _is_small(value: Any) -> bool:
    return not isinstance(value, (dict, list, tuple)) or len(value) <= _SMALL


def recorded(files: tuple[File, ...], what: str) -> Any:
    """Return the note that a container is recorded with its facts and not published."""
    return findings.finding(
        "recorded-only",
        files[0].path,
        f"{some(f.path for f in files)}: {what}, recorded with its facts and not published",
        "publish the checkpoint that it was made from",
    )


def _onnx(draft: Draft, files: tuple[File, ...], read: list[Directory]) -> None:
    """Count an ONNX model's initializers; the data files that it names are part of it."""
    tensors: list[Tensor] = []
    place = draft.place
    data: list[str] = []
    for file, directory in zip(files, read, strict=True):
        tensors += [t._replace(name=f"{file.name}:{t.name}") for t in directory.tensors]
        folder = "" if file.folder == "." else f"{file.folder}/"
        data += [f"{folder}{t.file}" for t in directory.tensors if t.file]
    known = place.reader.tree.files
    beside = sorted({path for path in data if path in known})
    draft.named = Named(root=place.folder, weights=tuple(dict.fromkeys([*(f.path for f in files), *beside])))
    counted, _ = weights.summary(torch_weights.header_tensors([t for t in tensors if t.dtype != "STRING"]))
    draft.facts |= counted
    if beside:
        draft.facts["data_files"] = beside
    if not all(d.container == "onnx" for d in read):
        return
    draft.kind = "model"
    draft.weights = WeightsFacts(
        format="onnx",
        shards=len(files),
        tensors=counted["tensor_count"],
        parameters=counted["param_count"],
        bytes=counted["payload_bytes"],
        dtypes={
            dtype: DtypeCount(tensors=row["tensors"], parameters=row["params"])
            for dtype, row in counted["dtype_histogram"].items()
        },
    )
