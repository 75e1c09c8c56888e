"""The real PEFT as the judge of the merges it makes itself: tiny models, adapters, and its own merge in fp32 of each.

    python -m weighbridge_testlib.peft_family_oracle FOLDER   CASE/base, CASE/adapter0, CASE/peft, CASE/told.json

Run as a process of its own. Inside a jail, `many` carries out the child's part of all cases, one after the other.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from weighbridge.adapters.merge import peft_job
from weighbridge.registry.errors import WeighbridgeError, describe
from weighbridge_testlib.peft_families import EVERY, Family
from weighbridge_testlib.peft_oracle import model

_peft: Any = peft
_transformers: Any = transformers


def many(request: dict[str, Any], tell: Callable[[int], None]) -> dict[str, Any]:
    """Carry out some requests of the child's task; what one of them raises is its answer."""
    told: dict[str, Any] = {}
    for name, one in request["requests"].items():
        try:
            told[name] = {"result": peft_job.run(one, tell)}
        except WeighbridgeError as error:
            told[name] = {"error": describe(error)}
    return told


def _config(family: Family) -> Any:
    inner = {field: getattr(_peft, kind)(**fields) for field, (kind, fields) in family.inner.items()}
    return getattr(_peft, family.kind)(**family.fields, **inner)


def _loaded(folder: Path, *, untied: bool = False) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = getattr(_transformers, name)
    if not untied:
        return kind.from_pretrained(folder, dtype=torch.float32).eval()
    parted = kind.from_pretrained(folder, dtype=torch.float32, tie_word_embeddings=False).eval()
    parted.get_output_embeddings().weight.data = parted.get_input_embeddings().weight.data.clone()
    return parted


def _stirred(adapted: Any) -> None:
    """Give every trainable number a value that is not the one it starts with."""
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def build(place: Path, family: Family) -> None:
    """Write base and adapters, merge them in fp32 with PEFT, and write what came of it and how the model behaves."""
    torch.manual_seed(11)
    model(family.model).to(torch.bfloat16).save_pretrained(place / "base", max_shard_size="60KB")
    folders = [place / f"adapter{number}" for number in range(family.adapters)]
    for folder in folders:
        adapted = _peft.get_peft_model(_loaded(place / "base"), _config(family))
        if family.twist != "still":
            _stirred(adapted)
        adapted.save_pretrained(str(folder))
    if family.twist:
        _twist(place, family.twist)
        return
    parted = _loaded(place / "base", untied=family.untied)
    loaded = _peft.PeftModel.from_pretrained(parted, folders[0], adapter_name="0")
    for number, folder in enumerate(folders[1:], 1):
        loaded.load_adapter(str(folder), adapter_name=str(number))
    if folders[1:]:
        loaded.base_model.set_adapter([str(number) for number in range(len(folders))])
    merged = loaded.eval().merge_and_unload(adapter_names=[str(number) for number in range(len(folders))])
    merged.save_pretrained(place / "peft")


def _twist(place: Path, twist: str) -> None:
    weights = place / "adapter0" / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(iter(sorted(tensors)))
    if twist == "missing":
        del tensors[first]
    elif twist == "strange":
        tensors[first + "_other"] = tensors[first].clone()
    elif twist == "shape":
        tensors[first] = tensors[first][:-1].clone()
    elif twist == "targets":
        tensors |= {name.replace("q_proj", "k_proj"): tensor.clone() for name, tensor in tensors.items()}
    elif twist == "renamed":
        shards = sorted((place / "base").glob("*.safetensors*"))
        every = {name: tensor for path in shards if path.suffix != ".json" for name, tensor in load_file(path).items()}
        for path in shards:
            path.unlink()
        renamed = {name.replace("model.", "model.text_model.", 1): tensor for name, tensor in every.items()}
        save_file(renamed, place / "base" / "model.safetensors", {"format": "pt"})
    elif twist == "unknown":
        path = place / "base" / "config.json"
        stated = json.loads(path.read_text())
        path.write_text(json.dumps({**stated, "architectures": ["OurOwnForCausalLM"]}))
    save_file(tensors, weights, {"format": "pt"})


def main(folder: Path) -> None:
    """Build every case; one that fails leaves its error in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the threads of two processes would wait for each other
    for name, family in EVERY.items():
        place = folder / name
        place.mkdir(parents=True)
        try:
            build(place, family)
        except Exception as error:  # noqa: BLE001 - told to the test of the case
            (place / "failed.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
