"""What may be in one folder, by names, configs and containers: adapter, model, pipeline, or something not read yet."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from weighbridge.adapters import layout, peft_config
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Place

PartKind = Literal["adapter", "mlx-adapter", "model", "pipeline", "container"]
_CONTAINER_ARTIFACTS: Final = {
    "gguf": "gguf",
    "ggml-legacy": "ggml",
    "torch-zip": "ckpt",
    "torch-legacy": "ckpt",
    "pickle": "ckpt",
    "torchscript": "torchscript",
    "onnx": "onnx",
    "tflite": "tflite",
    "hdf5": "hdf5",
    "npz": "npz",
}
_FOREIGN: Final = (".h5", ".msgpack", ".ot", ".onnx", ".tflite", ".gguf")


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
    mlx = (
        config is not None and "peft_type" not in config and ("fine_tune_type" in config or "lora_parameters" in config)
    )
    if mlx:
        found.append(Part("mlx-adapter", "mlx-lora"))
    elif has_config or adapter_files:
        found.append(Part("adapter", "lora-adapter"))
    pipeline = place.table(layout.PIPELINE_CONFIG)
    if pipeline is not None and "_class_name" in pipeline:
        found.append(Part("pipeline", "full-model"))
    elif _is_model(place, adapter=bool(found)):
        found.append(Part("model", "full-model"))
    return found or _containers(place)


def _is_model(place: Place, *, adapter: bool) -> bool:
    names = place.names
    own = [n for n in names if layout.is_weights_name(n) and not n.startswith("adapter_model.")]
    if any(n.endswith(".index.json") for n in own):
        return True
    if any(n == layout.MODEL_WEIGHTS or layout.is_model_pickle(n) for n in own):
        return True
    shards = [n for n in own if (s := layout.shard_of(n)) and s[3] in {"safetensors", "bin"}]
    if shards and not adapter:
        return True
    if layout.MODEL_CONFIG not in names or adapter:
        return False
    plain = [n for n in own if n.endswith((".safetensors", *_FOREIGN))]
    return bool(plain or shards) or not own


def pickled_weights(place: Place) -> list[File]:
    """Return the torch pickles of a model folder that hold weights by their names."""
    return [f for n, f in sorted(place.names.items()) if layout.is_model_pickle(n)]


def foreign_weights(place: Place) -> list[File]:
    """Return the same model's files for other frameworks, in the folder or in folders named after their form."""
    tree = place.reader.tree
    found = [f for n, f in sorted(place.names.items()) if n.endswith(_FOREIGN)]
    for name in tree.folders[place.folder].dirs:
        if layout.is_form_name(name):
            found += [f for f in tree.below(place.path(name)).values() if layout.is_weights_name(f.name)]
    return found


def _containers(place: Place) -> list[Part]:
    """Return one part per kind of container among the files that may hold weights."""
    groups: dict[str, list[File]] = {}
    for name, file in sorted(place.names.items()):
        if not layout.is_weights_name(name):
            continue
        if name.endswith(".distcp"):
            groups.setdefault("ckpt-dcp", []).append(file)
            continue
        kind = place.reader.container(file)
        if kind == "safetensors":
            groups.setdefault(_safetensors_dialect(place, file), []).append(file)
        elif kind in _CONTAINER_ARTIFACTS:
            groups.setdefault(_CONTAINER_ARTIFACTS[kind], []).append(file)
        elif kind in {"lfs-pointer", "empty", "dead-link"} or name.endswith(
            (".safetensors", ".ckpt", ".gguf", ".pth", ".pt")
        ):
            groups.setdefault("full-model" if name.endswith(".safetensors") else "ckpt", []).append(file)
    kinds: dict[str, PartKind] = {"full-model": "model", "lora-adapter": "adapter"}
    return [Part(kinds.get(artifact, "container"), artifact, tuple(files)) for artifact, files in groups.items()]


def _safetensors_dialect(place: Place, file: File) -> str:
    """Return what a lone safetensors file is by its keys: an image LoRA of some tool, or a model without a config."""
    names = place.reader.header(file).tensors.keys()
    if any(n.startswith(("lora_unet_", "lora_te", "lora_transformer_")) for n in names):
        return "kohya-lora"
    lora = any(
        ".lora_A." in n or ".lora_B." in n or ".lora_down." in n or ".lora.up." in n or ".lora_up." in n for n in names
    )
    if lora and not any(n.startswith("base_model.") for n in names):
        return "diffusers-lora"
    return "lora-adapter" if lora else "full-model"


def is_pointer(place: Place, file: File) -> bool:
    """Return whether a Git LFS pointer stands in for a file."""
    return file.link is None and file.size < sniff.HEAD and place.reader.container(file) == "lfs-pointer"


def mlx_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an MLX-LM adapter config states; its `scale` is the factor itself, not an alpha."""
    table = config.get("lora_parameters")
    lora = table if isinstance(table, dict) else {}
    base = config.get("model")
    return {
        "rank": peft_config.number(lora.get("rank")),
        "alpha": peft_config.number(lora.get("alpha")),
        "scaling": peft_config.number(lora.get("scale")),
        "base_model": base if isinstance(base, str) and base else None,
    }
