"""Containers that are recorded and never opened further: what they are, and what they or the files beside them state.

tflite, hdf5 and Keras, npz, npy, flax-msgpack, Core ML, ncnn, TensorRT engines, ExecuTorch, ggml before GGUF, archives.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.formats import archives, flax, numpy_files, tflite, zipdir
from weighbridge.adapters.formats.protocol import Directory, Entry, FormatFault, Hazard, shown
from weighbridge.adapters.formats.source import Source, opened
from weighbridge.adapters.formats.wire import BYTES, VARINT, Walk

GGML: Final = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla (LoRA)", b"nsgg": "ggsn"}
"""First bytes of llama.cpp's and whisper.cpp's containers before GGUF."""

HDF5: Final = b"\x89HDF\r\n\x1a\n"
NCNN: Final = 7767517
ENGINE_SUFFIXES: Final = (".engine", ".plan", ".trt")

_ENGINE_MARKS: Final = (b"ftrt", b"ptrt")
_HEAD: Final = 4096
_SIDE_LIMIT: Final = 1 << 20
_BINDING: Final = (
    "tensorrt", "trt", "cuda", "cudnn", "compute_capability", "gpu", "sm", "arch", "device", "driver", "precision",
    "dtype", "max_batch_size", "max_input_len", "max_seq_len", "tp_size", "pp_size", "world_size", "quant", "version",
)  # fmt: skip
"""Words in a side config that say what an engine is bound to."""

_COREML_KINDS: Final = {
    200: "pipelineClassifier", 201: "pipelineRegressor", 202: "pipeline", 300: "glmRegressor",
    301: "supportVectorRegressor", 302: "treeEnsembleRegressor", 303: "neuralNetworkRegressor", 400: "glmClassifier",
    402: "treeEnsembleClassifier", 403: "neuralNetworkClassifier", 500: "neuralNetwork", 502: "mlProgram",
    556: "customModel", 900: "identity",
}  # fmt: skip


def read(path: Path) -> Directory:
    """Return what an opaque container is. Raises OSError, and FormatFault `not-recognised` where it is none of them."""
    if path.is_dir():
        return _coreml_package(path)
    with opened(path) as source:
        return read_from(source, path)


def read_from(source: Source, path: Path) -> Directory:
    """Return what an open one is; the files beside `path` are asked for what it does not say. Raises FormatFault."""
    head = source.head(_HEAD)
    if not head:
        raise FormatFault("file-empty", "the file is empty (0 bytes)", file_bytes=0)
    reader = _reader(head, path)
    if reader is None:
        raise FormatFault("not-recognised", "the content is of no kind that is known", file_bytes=source.length)
    return reader(source, path)


def _reader(head: bytes, path: Path) -> Callable[[Source, Path], Directory] | None:
    for fits, reader in (
        (head[4:8] == b"TFL3", lambda source, _: tflite.read_from(source)),
        (head[:8] == HDF5, _hdf5),
        (head[:6] == numpy_files.MAGIC, lambda source, _: numpy_files.read_npy(source)),
        (head[:4] == b"PK\3\4", _zip),
        (head[:4] in GGML, _ggml),
        (head[4:6] == b"ET" and head[6:8].isdigit(), _executorch),
        (head[:4] in _ENGINE_MARKS or path.suffix.lower() in ENGINE_SUFFIXES, _engine),
        (_is_ncnn(head), _ncnn),
        (archives.is_tar(head) or archives.packer(head) is not None, lambda source, _: archives.read_from(source)),
        (path.suffix.lower() == ".mlmodel" and head[:1] == b"\x08", _coreml),
        (_is_msgpack(head), lambda source, _: flax.read_from(source)),
    ):
        if fits:
            return reader
    return None


def _is_msgpack(head: bytes) -> bool:
    """Whether it is a map whose first key is a word."""
    if not (0x81 <= head[0] <= 0x8F or head[0] in {0xDE, 0xDF}):
        return False
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    code = head[at : at + 1]
    start, size = (
        (at + 2, head[at + 1] if len(head) > at + 1 else 0) if code == b"\xd9" else (at + 1, (code or b"\0")[0] & 31)
    )
    word = head[start : start + size]
    return bool(word) and (code == b"\xd9" or 0xA1 <= code[0] <= 0xBF) and len(word) == size and word.isascii()


# ----------------------------------------------------------------------------------------------------------------- hdf5


def _hdf5(source: Source, _: Path) -> Directory:
    """Read the superblock: where the file ends, and from version 3 whether a writer still has it open."""
    head = source.head(128)
    version = head[8] if len(head) > 8 else 255
    hazards: list[Hazard] = []
    if version in {0, 1} and len(head) >= 64:
        size, begin = head[13], 24 if version == 0 else 28
        base, end = (int.from_bytes(head[begin + i * size : begin + (i + 1) * size], "little") for i in (0, 2))
    elif version in {2, 3} and len(head) >= 48:
        size = head[9]
        base, end = (int.from_bytes(head[12 + i * size : 12 + (i + 1) * size], "little") for i in (0, 2))
        if version == 3 and head[11] & 1:
            hazards.append(Hazard("still-open", "warn", "", "a writer has not closed this file"))
    else:
        raise FormatFault("header-damaged", "the HDF5 superblock is not valid", file_bytes=source.length)
    if size not in {2, 4, 8}:
        raise FormatFault("header-damaged", "the HDF5 superblock is not valid", file_bytes=source.length)
    figures = {"file_bytes": source.length, "expected_bytes": base + end}
    if base + end > source.length:
        short = base + end - source.length
        text = f"short by {short} bytes: its header asks for {base + end}, it has {source.length}"
        hazards.append(Hazard("file-short", "block", "", text, {**figures, "short_by": short}))
    start = source.head(1 << 16)
    facts = {
        "container": "hdf5",
        "hdf5_version": version,
        "keras": b"keras_version" in start or b"layer_names" in start,
    }
    return Directory("hdf5", (), (), tuple(hazards), facts)


# ------------------------------------------------------------------------------------------------------------------ zip


def _zip(source: Source, _: Path) -> Directory:
    members = zipdir.read(source)
    if members and all(name.endswith(".npy") for name in members):
        return numpy_files.read_npz(source)
    entries = tuple(Entry(name, "file", 0, member.size) for name, member in list(members.items())[:10_000])
    facts: dict[str, Any] = {"container": "zip", "members": len(members)}
    if {"config.json", "metadata.json"} <= members.keys():
        facts |= {"container": "keras", **_keras(source, members["metadata.json"])}
    elif any(name.endswith("archive_format") for name in members):
        facts["container"] = "torch-export"
    elif any(name.startswith("MAR-INF/") for name in members):
        facts["container"] = "torchserve"
    return Directory(facts["container"], (), entries, (), facts)


def _keras(source: Source, member: zipdir.Member) -> dict[str, Any]:
    if member.method != zipdir.STORED or member.size > _SIDE_LIMIT:
        return {}
    table = _json(source.at(member.start, member.size))
    return {name: table[name] for name in ("keras_version", "date_saved") if isinstance(table.get(name), str)}


# ------------------------------------------------------------------------------------------------------ small and plain


def _ggml(source: Source, _: Path) -> Directory:
    head = source.head(48)
    kind = GGML[head[:4]]
    words = [int.from_bytes(head[i : i + 4], "little", signed=True) for i in range(4, len(head) - 3, 4)]
    facts: dict[str, Any] = {"container": "ggml-legacy", "magic": kind, "header": words}
    if head[:4] != b"lmgg" and words:
        facts["version"] = words[0]
    text = "this is ggml's container from before GGUF: a true file, which today's tools convert first"
    return Directory("ggml-legacy", (), (), (Hazard("ggml-legacy", "note", "", text),), facts)


def _executorch(source: Source, _: Path) -> Directory:
    return Directory("executorch", facts={"container": "executorch", "mark": source.head(8)[4:8].decode("ascii")})


def _is_ncnn(head: bytes) -> bool:
    return head[:4] == NCNN.to_bytes(4, "little") or head.startswith(str(NCNN).encode() + b"\n")


def _ncnn(source: Source, path: Path) -> Directory:
    head = source.head(_HEAD)
    facts: dict[str, Any] = {"container": "ncnn", "binary": head[:1] != b"7"}
    if not facts["binary"]:
        words = head.split(b"\n")[1].split() if b"\n" in head else []
        if len(words) != 2 or not all(word.isdigit() and len(word) < 10 for word in words):
            raise FormatFault("header-damaged", "the second line of the ncnn file has no two counts")
        facts |= {"layers": int(words[0]), "blobs": int(words[1])}
    weights = path.with_suffix(".bin")
    facts["weights_file"] = weights.name
    hazards: tuple[Hazard, ...] = ()
    if not weights.is_file():
        text = f"the weights {shown(weights.name)} are not beside it"
        hazards = (Hazard("data-missing", "block", weights.name, text, {"file": weights.name}),)
    return Directory("ncnn", (), (), hazards, facts)


# -------------------------------------------------------------------------------------------------------------- engines


def _engine(source: Source, path: Path) -> Directory:
    """Read what its makers wrote beside an engine: it fits one GPU architecture and one TensorRT version."""
    facts: dict[str, Any] = {"container": "tensorrt-engine", "binding": {}, "side_files": []}
    inside = _leading_json(source)
    facts["binding"] |= _binding(inside)
    for side in (path.with_name("config.json"), path.with_suffix(".json"), path.with_name("metadata.json")):
        table = _side(side)
        found = _binding(table)
        if found:
            facts["side_files"].append(side.name)
            facts["binding"] = {**found, **facts["binding"]}
    if source.head(4) not in _ENGINE_MARKS and not facts["binding"]:
        raise FormatFault("not-recognised", "only the suffix says that this is an engine", file_bytes=source.length)
    text = "a TensorRT engine runs only with the TensorRT version and GPU it was built for; keep what it was built from"
    return Directory("tensorrt-engine", (), (), (Hazard("not-portable", "warn", "", text, facts["binding"]),), facts)


def _leading_json(source: Source) -> dict[str, Any]:
    """Return the JSON text that some exporters put before the engine, with its length."""
    size = int.from_bytes(source.head(4), "little")
    if not 2 <= size <= 1 << 16 or size + 4 > source.length:
        return {}
    return _json(source.at(4, size))


def _side(path: Path) -> dict[str, Any]:
    try:
        with opened(path) as source:
            return _json(source.head(_SIDE_LIMIT)) if source.length <= _SIDE_LIMIT else {}
    except (OSError, FormatFault):
        return {}


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _binding(table: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in list(table.items())[:500]:
        name = f"{prefix}{key}"[:200]
        if isinstance(value, dict) and depth < 3:
            found |= _binding(value, f"{name}.", depth + 1)
        elif isinstance(value, (str, int, float)) and any(word in key.lower() for word in _BINDING):
            found[name] = value[:200] if isinstance(value, str) else value
    return dict(list(found.items())[:100])


# -------------------------------------------------------------------------------------------------------------- Core ML


def _coreml(source: Source, _: Path) -> Directory:
    walk = Walk(source)
    facts: dict[str, Any] = {"container": "coreml", "model_type": None}
    for field in walk.fields(0, source.length):
        if field.number == 1 and field.kind == VARINT:
            facts["specification_version"] = field.value
        elif field.number >= 200 and field.kind == BYTES:
            facts["model_type"] = _COREML_KINDS.get(field.number, f"field {field.number}")
    if facts["model_type"] is None:
        raise FormatFault("not-recognised", "the message holds no Core ML model", file_bytes=source.length)
    return Directory("coreml", facts=facts)


def _coreml_package(folder: Path) -> Directory:
    """Read a .mlpackage: a folder whose Manifest.json names the model and its weights."""
    table = _side(folder / "Manifest.json")
    items = table.get("itemInfoEntries")
    if not isinstance(items, dict):
        raise FormatFault("not-recognised", "the folder is no Core ML package")
    facts: dict[str, Any] = {"container": "coreml-package", "items": [], "missing_files": []}
    hazards: list[Hazard] = []
    root = table.get("rootModelIdentifier")
    for key, entry in list(items.items())[:100]:
        name = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        where = f"Data/{name}"
        facts["items"].append(where)
        if ".." in name.split("/") or name.startswith("/") or not name.isprintable():
            hazards.append(Hazard("path-unsafe", "block", name, f"{shown(name)} leads out of the package"))
        elif not (folder / where).exists():
            facts["missing_files"].append(where)
            hazards.append(Hazard("data-missing", "block", where, f"{shown(where)} is not there", {"file": where}))
        elif key == root and (folder / where).is_file():
            with opened(folder / where) as source:
                facts = {**_coreml(source, folder).facts, **facts}
    return Directory("coreml-package", (), (), tuple(hazards), facts)
