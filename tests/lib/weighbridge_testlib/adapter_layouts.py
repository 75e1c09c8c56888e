"""Healthy LoRA adapters of any base, name, rank and pattern, and single defects in them, for the property tests.

written(adapter, folder)       fill a folder with a drawn adapter, and say what is in it
DEFECTS["rank-in-config"]      does one thing to it, and returns the codes that must be found
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

from weighbridge_testlib import builders
from weighbridge_testlib.builders import TensorSpec
from weighbridge_testlib.layouts import weights

PREFIX: Final = "base_model.model."
STACKS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "llama": ("model.layers.{}.", ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")),
    "gpt2": ("transformer.h.{}.", ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")),
    "neox": ("gpt_neox.layers.{}.", ("attention.query_key_value", "mlp.dense_h_to_4h")),
    "bert": ("bert.encoder.layer.{}.", ("attention.self.query", "attention.self.value", "intermediate.dense")),
    "t5": ("encoder.block.{}.", ("layer.0.SelfAttention.q", "layer.0.SelfAttention.v")),
    "seeing": ("vision_tower.vision_model.encoder.layers.{}.", ("self_attn.k_proj", "mlp.fc1")),
    "experts": ("model.layers.{}.block_sparse_moe.experts.3.", ("w1", "w2", "w3")),
    "hybrid": ("backbone.layers.{}.mixer.", ("in_proj", "out_proj")),
    "module": ("module.core.net.{}.", ("module.proj", "model.fc")),
}
"""Bases by the names of their layers; the last one uses wrappers' words as names of its own."""


class Adapter(NamedTuple):
    """An adapter that was drawn; `form` is how the config names its targets, `special` a rank of its own for one."""

    stack: str
    layers: int
    targets: int
    rank: int
    special: int | None
    alpha: float
    own_alpha: float | None
    form: str
    dtype: str
    suffix: str
    rslora: bool
    dora: bool
    step: int | None

    @property
    def names(self) -> list[str]:
        """Return the targets as people write them: the last part of the module's name."""
        return [part.rpartition(".")[2] for part in STACKS[self.stack][1][: self.targets]]

    @property
    def modules(self) -> list[str]:
        """Return every adapted module."""
        stem, parts = STACKS[self.stack]
        return [stem.format(i) + part for i in range(self.layers) for part in parts[: self.targets]]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return self.special if self.special is not None and module.endswith("." + self.names[0]) else self.rank


ADAPTERS: Final = st.builds(
    Adapter,
    stack=st.sampled_from(sorted(STACKS)),
    layers=st.integers(1, 3),
    targets=st.integers(1, 4),
    rank=st.integers(2, 9),
    special=st.one_of(st.none(), st.integers(1, 12)),
    alpha=st.sampled_from([1, 8, 16.0, 2.5]),
    own_alpha=st.one_of(st.none(), st.just(3)),
    form=st.sampled_from(["names", "whole-names", "pattern"]),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
    suffix=st.sampled_from(["safetensors", "bin"]),
    rslora=st.booleans(),
    dora=st.booleans(),
    step=st.sampled_from([None, None, 40]),
)


class Written(NamedTuple):
    """An adapter on disk: its folder and its tensors; `save` writes changed ones."""

    adapter: Adapter
    folder: Path
    tensors: dict[str, TensorSpec]

    @property
    def file(self) -> Path:
        """The weights."""
        return self.folder / f"adapter_model.{self.adapter.suffix}"

    def save(self, tensors: dict[str, TensorSpec]) -> None:
        """Write other weights."""
        self.file.write_bytes(weights(tensors, self.adapter.suffix))

    def config(self, **changes: Any) -> None:
        """Change the config in place."""
        path = self.folder / "adapter_config.json"
        builders.write_json(path, {**json.loads(path.read_text()), **changes})


def filled(dtype: str, shape: tuple[int, ...], value: float = 0.5) -> TensorSpec:
    """Return a tensor of one value."""
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return dtype, shape, builders.pack(dtype, (1,), value) * count


def written(adapter: Adapter, folder: Path) -> Written:
    """Fill a folder as PEFT's save_pretrained does, below a Trainer's checkpoint folder where there is a step."""
    place = folder / f"checkpoint-{adapter.step}" if adapter.step is not None else folder
    place.mkdir(parents=True)
    tensors: dict[str, TensorSpec] = {}
    for module in adapter.modules:
        rank = adapter.rank_of(module)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = filled(adapter.dtype, (rank, 16))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = filled(adapter.dtype, (24, rank))
        if adapter.dora:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = filled(adapter.dtype, (24,))
    it = Written(adapter, place, tensors)
    it.save(tensors)
    targets: Any = adapter.names
    if adapter.form == "whole-names":
        targets = adapter.modules
    elif adapter.form == "pattern":
        targets = rf".*\.({'|'.join(adapter.names)})"
    table = builders.lora_config(rank=adapter.rank, alpha=adapter.alpha, targets=targets)
    table |= {"use_rslora": adapter.rslora, "use_dora": adapter.dora}
    table["rank_pattern"] = {adapter.names[0]: adapter.special} if adapter.special is not None else {}
    table["alpha_pattern"] = {adapter.names[-1]: adapter.own_alpha} if adapter.own_alpha is not None else {}
    builders.write_json(place / "adapter_config.json", table)
    if adapter.step is not None:
        builders.write_json(place / "trainer_state.json", builders.trainer_state(adapter.step))
    return it


# -------------------------------------------------------------------------------------------------------------- defects

Codes = set[str]
Defect = Callable[[Written, int], Codes]


def _rank_in_config(it: Written, pick: int) -> Codes:
    """State another rank than the matrices have, patterns included."""
    other = it.adapter.rank + 1 + pick % 7
    special = it.adapter.special
    table = {it.adapter.names[0]: special + 1 + pick % 7} if special is not None else {}
    it.config(r=other, rank_pattern=table)
    return {"rank-mismatch"}


def _rank_of_one(it: Written, pick: int) -> Codes:
    """Give one module matrices of another rank."""
    module = it.adapter.modules[pick % len(it.adapter.modules)]
    rank = it.adapter.rank_of(module) + 1
    changed: dict[str, TensorSpec] = {
        f"{PREFIX}{module}.lora_A.weight": filled(it.adapter.dtype, (rank, 16)),
        f"{PREFIX}{module}.lora_B.weight": filled(it.adapter.dtype, (24, rank)),
    }
    it.save(it.tensors | changed)
    return {"rank-mismatch"}


def _other_targets(it: Written, pick: int) -> Codes:
    """Target a module that is not there instead of those that are."""
    targets: Any = [f"other_{pick}"] if it.adapter.form != "pattern" else rf".*\.other_{pick}"
    it.config(target_modules=targets)
    return {"target-stray", "target-without-weights"} if it.adapter.form != "pattern" else {"target-stray"}


def _excluded(it: Written, pick: int) -> Codes:
    """Exclude a module that has weights."""
    module = it.adapter.modules[pick % len(it.adapter.modules)]
    it.config(exclude_modules=[module] if pick % 2 else module.replace(".", r"\."))
    return {"target-stray"}


def _half(it: Written, pick: int) -> Codes:
    names = sorted(name for name in it.tensors if name.endswith(("lora_A.weight", "lora_B.weight")))
    gone = names[pick % len(names)]
    it.save({name: spec for name, spec in it.tensors.items() if name != gone})
    return {"lora-half-missing"}


def _cut(it: Written, pick: int) -> Codes:
    data = it.file.read_bytes()
    it.file.write_bytes(data[: len(data) - 1 - pick % 40])
    return {"file-short"} if it.adapter.suffix == "safetensors" else {"zip-cut"}


WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")


def _wrapped(it: Written, pick: int) -> Codes:
    """Leave a wrapper's segment at the start of the model, or inside every name."""
    segment = WRAPPERS[pick % len(WRAPPERS)]
    inside = pick // len(WRAPPERS) % 2

    def put(name: str) -> str:
        head, _, part = name.partition(".lora_")
        stem, _, last = head.rpartition(".")
        return f"{stem}.{segment}{last}.lora_{part}" if inside else name.replace(PREFIX, PREFIX + segment, 1)

    it.save({put(name): spec for name, spec in it.tensors.items()})
    return {"keys-wrapped"}


def _outside(it: Written, pick: int) -> Codes:
    """Leave what a wrapper around the whole PEFT model puts in front."""
    outer = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")[pick % 4]
    it.save({outer + name: spec for name, spec in it.tensors.items()})
    return {"keys-wrapped"}


def _bare(it: Written, _: int) -> Codes:
    it.save({name.removeprefix(PREFIX): spec for name, spec in it.tensors.items()})
    return {"keys-without-prefix"}


def _named(it: Written, pick: int) -> Codes:
    """Leave the adapter's name in the keys."""
    adapter = ("default", "german", "v2")[pick % 3]

    def put(name: str) -> str:
        stem, dot, last = name.rpartition(".")
        return f"{name}.{adapter}" if "magnitude" in last else f"{stem}.{adapter}{dot}{last}"

    it.save({put(name): spec for name, spec in it.tensors.items()})
    return {"keys-with-adapter-name"}


def _dora(it: Written, _: int) -> Codes:
    it.config(use_dora=not it.adapter.dora)
    return {"dora-mismatch"}


def _untrained(it: Written, _: int) -> Codes:
    zero = {
        name: filled(dtype, (shape[0], shape[1]), 0.0)
        for name, (dtype, shape, _) in it.tensors.items()
        if name.endswith("lora_B.weight")
    }
    it.save(it.tensors | zero)
    return {"lora-b-zero"}


def _diverged(it: Written, pick: int) -> Codes:
    names = sorted(it.tensors)
    name = names[pick % len(names)]
    dtype, shape, data = it.tensors[name]
    assert isinstance(data, bytes)
    bad = builders.pack(dtype, (1,), float("nan" if pick % 2 else "inf"))
    at = pick % (len(data) // len(bad)) * len(bad)
    it.save({**it.tensors, name: (dtype, shape, data[:at] + bad + data[at + len(bad) :])})
    return {"values-nan"}


def _no_base(it: Written, _: int) -> Codes:
    it.config(base_model_name_or_path=None)
    return {"base-unknown"}


def _no_config(it: Written, _: int) -> Codes:
    (it.folder / "adapter_config.json").unlink()
    return {"config-missing"}


def _no_weights(it: Written, _: int) -> Codes:
    it.file.unlink()
    return {"weights-missing"}


DEFECTS: Final[dict[str, Defect]] = {
    "rank-in-config": _rank_in_config,
    "rank-of-one": _rank_of_one,
    "other-targets": _other_targets,
    "excluded": _excluded,
    "half": _half,
    "cut": _cut,
    "wrapped": _wrapped,
    "outside": _outside,
    "bare": _bare,
    "named": _named,
    "dora": _dora,
    "untrained": _untrained,
    "diverged": _diverged,
    "no-base": _no_base,
    "no-config": _no_config,
    "no-weights": _no_weights,
}
"""Each does one thing to an adapter on disk, told by a number which one, and returns the codes that must be found."""
