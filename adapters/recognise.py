"""What may be in one folder, by names, configs and containers: adapter, model, pipeline, torch files, GGUF, others."""

from typing import Final, Literal, NamedTuple

from weighbridge.adapters import keys, layout
from weighbridge.adapters.families import distributed, gguf_files, image_lora, mlx, pipeline, ranks
from weighbridge.adapters.formats import opaque, sniff
from weighbridge.adapters.formats.protocol import Directory
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Place

PartKind = Literal[
    "adapter", "mlx", "model", "pipeline", "torch", "ranks", "slices", "megatron", "distributed", "gguf", "byte-parts",
    "image-lora", "foreign",
]  # fmt: skip
_FOREIGN_KINDS: Final = frozenset((
    "onnx", "tflite", "hdf5", "npz", "ggml-legacy", "coreml", "ncnn", "tensorrt-engine", "executorch", "flax-msgpack",
    "keras", "torch-export", "torchserve", "npy", "tar", "coreml-package",
))  # fmt: skip
_FOREIGN_LABELS: Final = {"ggml-legacy": "ggml"}
_FOREIGN: Final = (".h5", ".msgpack", ".ot", ".onnx", ".tflite")
_TORCH_NAMES: Final = (".ckpt", ".pth", ".pt", ".th", ".bin", ".pkl")
_ABSENT: Final = frozenset({"lfs-pointer", "empty", "dead-link", "link-text", "unreadable"})


class Part(NamedTuple):
    """One thing in a folder and the artifact name it goes by until its files say more."""

    kind: PartKind
    artifact: str
    files: tuple[File, ...] = ()


def parts(place: Place) -> list[Part]:
    """Return what a folder may hold, best guess first, from names and small files."""
    names = place.names
    found: list[Part] = []
    config = place.table(layout.ADAPTER_CONFIG)
    has_config = layout.ADAPTER_CONFIG in names
    adapter_files = [n for n in (layout.ADAPTER_WEIGHTS, *layout.ADAPTER_PICKLES) if n in names]
    if mlx.is_config(config):
        found.append(Part("mlx", "mlx-lora"))
    elif has_config or adapter_files:
        found.append(Part("adapter", "lora-adapter"))
    slices = ranks.slices(place) if not found else ()
    cut = {file.name for file in slices}
    if cut and not any(layout.is_weights_name(n) and n not in cut for n in names):
        return [Part("slices", "rank-sharded", slices)]
    if pipeline.is_pipeline(place.table(layout.PIPELINE_CONFIG)):
        found.append(Part("pipeline", "full-model"))
    elif _is_model(place, adapter=bool(found)):
        found.append(Part("model", "full-model"))
    if not found and distributed.folders(place):
        return [Part("distributed", "ckpt-dcp")]
    if not found and slices:
        return [Part("slices", "rank-sharded", slices)]
    if not found and ranks.is_megatron(place.reader.tree.folders[place.folder].dirs):
        return [Part("megatron", "megatron")]
    return found or _containers(place)


def _is_model(place: Place, *, adapter: bool) -> bool:
    names = place.names
    own = [n for n in names if layout.is_weights_name(n) and not n.startswith("adapter_model.")]
    if any(n.endswith(".index.json") for n in own):
        return True
    if any(n == layout.MODEL_WEIGHTS or layout.is_model_pickle(n) for n in own):
        return True
    shards = [
        n for n in own if (s := layout.shard_of(n)) and s[3] in {"safetensors", "bin"} and ranks.rank_of(n) is None
    ]
    if shards and not adapter:
        return True
    if layout.MODEL_CONFIG not in names or adapter:
        return False
    plain = [n for n in own if n.endswith((".safetensors", *_FOREIGN))]
    return bool(plain or shards) or not own


def _containers(place: Place) -> list[Part]:
    """Return the parts of a folder without a config: each torch file, each GGUF, each LoRA file, by content."""
    names = {n: f for n, f in sorted(place.names.items()) if layout.is_weights_name(n)}
    parts: list[Part] = []
    cut: dict[str, list[File]] = {}
    for name in list(names):
        whole = layout.byte_part(name)
        if whole is not None:
            cut.setdefault(whole, []).append(names.pop(name))
    for files in ranks.groups({n: f for n, f in names.items() if n.endswith(_TORCH_NAMES)}).values():
        ordered = tuple(files[i] for i in sorted(files))
        parts.append(Part("ranks", "rank-sharded", ordered))
        for file in ordered:
            names.pop(file.name)
    gguf: dict[str, File] = {}
    models: list[File] = []
    loras: list[File] = []
    foreign: dict[str, list[File]] = {}
    for name, file in names.items():
        kind = place.reader.container(file)
        if kind == "gguf" or (kind in _ABSENT and name.endswith(".gguf")):
            gguf[name] = file
        elif kind == "safetensors":
            if not name.endswith(".safetensors"):  # loaders go by the name and fail
                parts.append(Part("torch", "ckpt", (file,)))
            else:
                header = place.reader.header(file)
                (loras if image_lora.dialect(header.tensors, header.metadata) else models).append(file)
        elif kind in sniff.PICKLED:
            if not _is_side_pickle(place, file):
                parts.append(Part("torch", "ckpt", (file,)))
        elif name.endswith(opaque.ENGINE_SUFFIXES):
            # Only what its maker wrote in or beside it tells an engine from somebody's plan.
            if isinstance(place.reader.directory(file), Directory):
                foreign.setdefault("tensorrt-engine", []).append(file)
        elif kind in _FOREIGN_KINDS or name.endswith((".onnx", ".tflite")):
            foreign.setdefault(_FOREIGN_LABELS.get(kind, kind), []).append(file)
        elif name.endswith(".safetensors"):
            models.append(file)
        elif kind in _ABSENT or name.endswith((".ckpt", ".pth", ".pt")):
            parts.append(Part("torch", "ckpt", (file,)))
    copies = image_lora.step_copies(loras)
    parts += [Part("gguf", "gguf", group) for group in gguf_files.sets(gguf)]
    parts += [Part("byte-parts", whole, tuple(files)) for whole, files in cut.items()]
    for file in loras:
        if file.path not in copies:
            mine = tuple(other for other in loras if copies.get(other.path) == file.path)
            parts.append(Part("image-lora", "diffusers-lora", (file, *mine)))
    if models:
        peft = any(keys.is_lora(place.reader.header(f).tensors) for f in models)
        parts.append(Part("adapter", "lora-adapter") if peft else Part("model", "full-model", tuple(models)))
    parts += [Part("foreign", kind, tuple(files)) for kind, files in foreign.items()]
    return parts


def _is_side_pickle(place: Place, file: File) -> bool:
    """Return whether a plain pickle holds no tensors at all: somebody's data, not weights."""
    if not file.name.endswith(".pkl"):
        return False
    directory = place.reader.directory(file)
    return isinstance(directory, Directory) and not directory.tensors and not directory.blocked
