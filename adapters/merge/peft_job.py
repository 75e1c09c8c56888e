"""PEFT's own merge, inside the jailed child process: load, compare, merge in fp32, write what became of it.

The base and the adapter lie in two folders that hold nothing else. Every tensor of the model is hashed before the
adapter is put on and after it was merged, so that exactly what PEFT changed is known and written; the rest of the
result is copied from the base's files by who asked for this.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import peft
import torch
import transformers

from weighbridge.registry import errors

_transformers: Any = transformers
BASE: Final = "base"
RESULT: Final = "computed"
_SEED: Final = 20
_TOKENS: Final = 24
_SHARD: Final = "2GB"
_FAULTS: Final = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError,
                  ValueError)  # fmt: skip
"""What libraries raise for inputs they do not take; what the jail forbids is an OSError and goes its own way."""


def run(request: dict[str, Any], tell: Callable[[int], None]) -> dict[str, Any]:
    """Merge the adapters in `request["view"]` into the base there; write the changed tensors to `request["home"]`.

    Raises RefusedError where transformers does not know the model, where PEFT does not take every tensor of the
    adapter, or cannot merge it.
    """
    begin(request["workers"])
    view, home = Path(request["view"]), Path(request["home"])
    model, unread = load_base(view / BASE)
    if request["untied"]:
        unread -= _part(model)
    before = digests(model)
    tell(sum(p.numel() * p.element_size() for p in model.parameters()))
    inputs = fixed_inputs(model)
    plain = outputs_of(model, inputs)
    adapted = put_on(model, [view / f"adapter{number}" for number in range(request["adapters"])])
    wanted = outputs_of(adapted, inputs)
    try:
        merged = adapted.merge_and_unload(adapter_names=list(adapted.peft_config))
    except _FAULTS as error:
        raise _refused("PEFT cannot merge this adapter", error) from error
    got = outputs_of(merged, inputs)
    after = digests(merged)
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise errors.RefusedError(
            "PEFT's merge left another model than the base",
            why=f"tensors that only one of them has: {', '.join(odd[:4])}",
        )
    changed = sorted(name for name, digest in after.items() if before[name] != digest)
    random = sorted(unread.intersection(changed))
    if random:
        raise errors.RefusedError(
            "transformers cannot load the base",
            why=f"it finds no value for {', '.join(random[:4])} in the base's files, which the adapter is for",
            fix="save the base again with the transformers that is installed, then merge",
        )
    written = {name: tensor for name, tensor in merged.state_dict().items() if name in set(changed)}
    tell(sum(tensor.numel() * tensor.element_size() for tensor in written.values()))
    if written:
        merged.save_pretrained(str(home / RESULT), state_dict=written, max_shard_size=_SHARD)
    return {
        "changed": changed,
        "behaviour": _behaviour(plain, wanted, got),
        "versions": {
            "peft": peft.__version__,
            "torch": str(torch.__version__),
            "transformers": _transformers.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "workers": request["workers"],
        },
    }


def begin(workers: int) -> None:
    """Keep the libraries quiet, without gradients, and on so many threads."""
    warnings.simplefilter("ignore")
    _transformers.logging.set_verbosity_error()
    _transformers.logging.disable_progress_bar()
    torch.set_num_threads(workers)
    torch.set_grad_enabled(mode=False)


def load_base(folder: Path) -> tuple[Any, frozenset[str]]:
    """Return a model in fp32, and its tensors that the folder's files did not give a value to. Raises RefusedError."""
    config = _transformers.PretrainedConfig.get_config_dict(str(folder))[0]
    names = config.get("architectures") or []
    kind: Any = getattr(_transformers, str(names[0]), None) if names else None
    known = isinstance(kind, type) and issubclass(kind, _transformers.PreTrainedModel)
    if not known:
        raise errors.RefusedError(
            "transformers does not know this model",
            why=f"the base names {', '.join(map(str, names)) or 'no architecture'}; code of its own is never run",
            fix="merge it with PEFT where that code is trusted, and publish the result",
        )
    try:
        model, told = kind.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except _FAULTS as error:
        raise _refused("transformers cannot load the base", error) from error
    wrong = [*told.get("mismatched_keys", ()), *told.get("error_msgs", ())]
    if wrong:
        raise errors.RefusedError("transformers cannot load the base", why=str(wrong[0])[:500])
    return model.eval(), frozenset(told.get("missing_keys", ()))


def _part(model: Any) -> frozenset[str]:
    """Give the head, which was loaded apart from the embedding, the embedding's values; return its tensors' names."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight.shape != embedding.weight.shape or head.weight is embedding.weight:
        raise errors.RefusedError(
            "embedding and head of this model cannot part",
            why="transformers holds them as one tensor, and the adapter changes one of them",
            fix="serve the adapter beside its base",
        )
    head.weight.copy_(embedding.weight)
    return frozenset(name for name, parameter in model.named_parameters() if parameter is head.weight)


def put_on(model: Any, folders: Sequence[Path]) -> Any:
    """Put the adapters on the model; every one of their tensors must be taken, and none be missing.

    Raises RefusedError.
    """
    adapted: Any = None
    try:
        for folder in folders:
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            if adapted is None:
                adapted = peft.PeftModel.from_pretrained(
                    model, str(folder), adapter_name=folder.name, config=config, torch_device="cpu"
                )
            # Loading for a second time tells what was not taken, which the first one keeps to itself.
            told = adapted.load_adapter(str(folder), adapter_name=folder.name, torch_device="cpu")
            _taken(adapted, told)
        if len(folders) > 1:
            adapted.base_model.set_adapter([folder.name for folder in folders])
    except _FAULTS as error:
        raise _refused("PEFT cannot load this adapter", error) from error
    return adapted.eval()


def _taken(adapted: Any, told: Any) -> None:
    missing = _missing(adapted, told.missing_keys)
    for words, names in (("nothing takes", told.unexpected_keys), ("the adapter does not hold", missing)):
        if names:
            raise errors.RefusedError(
                "PEFT does not take the adapter as it is",
                why=f"{words} {', '.join(sorted(names)[:4])}" + (f" and {len(names) - 4} more" if names[4:] else ""),
                fix="save it again with the PEFT it was trained with, then merge",
            )


def _missing(adapted: Any, names: Sequence[str]) -> list[str]:
    """Return the parameters that nothing was loaded into; those that are another name of one that was do not count."""
    held = dict(adapted.named_parameters(remove_duplicate=False)) | dict(adapted.named_buffers(remove_duplicate=False))
    loaded = {tensor.data_ptr() for name, tensor in held.items() if name not in names}
    return [name for name in names if name not in held or held[name].data_ptr() not in loaded]


def _refused(what: str, error: Exception) -> errors.RefusedError:
    words = " ".join(str(error).split()) or type(error).__name__
    return errors.RefusedError(what, why=words[:500], fix="look at the adapter and at the base it was trained on")


def digests(model: Any) -> dict[str, str]:
    """Return the sha256 of every tensor of a model, by its name there."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _digest(tensor: Any) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    return hashlib.sha256(flat.numpy()).hexdigest()


# ------------------------------------------------------------------------------------------------------------ behaviour


def fixed_inputs(model: Any) -> dict[str, Any] | None:
    """Return fixed inputs that a model of tokens or of images can be run with, None for any other."""
    config = model.config
    generator = torch.Generator().manual_seed(_SEED)
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        vocabulary = int(getattr(config.get_text_config(), "vocab_size", 0) or 0)
        if not vocabulary:
            return None
        ids = torch.randint(vocabulary, (1, _TOKENS), generator=generator)
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    if name == "pixel_values":
        part = getattr(config, "vision_config", config)
        side, channels = getattr(part, "image_size", 64), getattr(part, "num_channels", 3)
        if isinstance(side, int):
            return {"pixel_values": torch.rand((1, channels, side, side), generator=generator)}
    return None


def outputs_of(model: Any, inputs: Mapping[str, Any] | None) -> Any:
    """Return the first output of a model, None where it cannot be run with such inputs."""
    if inputs is None:
        return None
    try:
        return model(**inputs)[0].float()
    except _FAULTS:
        return None


def _behaviour(plain: Any, wanted: Any, got: Any) -> dict[str, float] | None:
    """Return the distances of the outputs: merged from base and adapter together, and those from the base alone."""
    if plain is None or wanted is None or got is None or not wanted.numel():
        return None
    return {
        "error": float((got - wanted).abs().max()),
        "distance": float((wanted - plain).abs().max()),
        "scale": float(wanted.abs().max()),
    }
