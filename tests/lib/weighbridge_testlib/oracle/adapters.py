"""Adapters as PEFT saves them: every type it knows, and LoRA in every variant and every way of saving."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import peft
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file

from weighbridge_testlib.oracle.cases import ADAPTERS, KINDS, LORAS
from weighbridge_testlib.oracle.told import Make, Told, taken

BASE: Final = "example-org/tiny-base"
t: Any = transformers

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def llama(*, tied: bool = False) -> Any:
    """Return a tiny model with random weights that says it was loaded from BASE."""
    return _named(t.LlamaForCausalLM(t.LlamaConfig(**_SIZES, tie_word_embeddings=tied)))


def _named(model: Any) -> Any:
    model.name_or_path = model.config._name_or_path = BASE
    return model


def _experts() -> Any:
    return _named(t.MixtralForCausalLM(t.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)))


def _gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return _named(t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)))


def _resnet() -> Any:
    config = t.ResNetConfig(
        num_channels=3, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="bottleneck"
    )
    return _named(t.ResNetForImageClassification(config))


FAMILIES: Final[Mapping[str, Callable[[], Any]]] = {
    "experts": _experts,
    "fan-in": _gpt2,
    "convolution": _resnet,
    "tied": lambda: llama(tied=True),
    "classifier": lambda: _named(t.LlamaForSequenceClassification(t.LlamaConfig(**_SIZES, num_labels=3))),
    "tagger": lambda: _named(t.LlamaForTokenClassification(t.LlamaConfig(**_SIZES, num_labels=5))),
}
"""Bases of the cases that need another than the tiny Llama."""

_DUE: Final = {
    "pissa": ("base-mutated-at-start",),
    "olora": ("base-mutated-at-start",),
    # PEFT saves the frozen embedding or head along where it is a target.
    "embedding": ("base-inside-adapter",),
    "embedding-dora": ("base-inside-adapter",),
    "head": ("base-inside-adapter",),
}


_RANKED: Final = frozenset(
    {
        "ADALORA",
        "DELORA",
        "GLORA",
        "GRALORA",
        "HIRA",
        "LILY",
        "LOHA",
        "LOKR",
        "LORA",
        "PEANUT",
        "POLY",
        "PSOFT",
        "PVERA",
    }
    | {"RANDLORA", "SHIRA", "TINYLORA", "UNILORA", "VBLORA", "VERA"}
)
"""Types whose layers tell a rank that the config states; OFT and FROD find theirs in the base."""


def stir(adapted: Any) -> None:
    """Give every parameter of an adapter a value, as a training would: nothing stays zero."""
    for name, parameter in adapted.named_parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or "lora_" in name or "delta" in name):
            with torch.no_grad():
                parameter.add_(0.05 * torch.randn_like(parameter.float()).to(parameter.dtype))


def _facts(config: Any) -> dict[str, Any]:
    """Return what PEFT's own config object says."""
    kind = config.peft_type.value
    facts: dict[str, Any] = {
        "peft_type": kind, "base_model": config.base_model_name_or_path, "peft_version": peft.__version__,
        "unknown_fields": [], "legacy_fields": [],
    }  # fmt: skip
    targets = getattr(config, "target_modules", None)
    facts |= {"targets": sorted(targets)} if isinstance(targets, (set, list)) else {}
    facts |= {"target_pattern": targets} if isinstance(targets, str) else {}
    if kind in {"LORA", "LOHA", "LOKR"}:
        facts["alpha"] = getattr(config, "lora_alpha", None) or config.alpha
    if config.is_prompt_learning:
        facts["mergeable"] = False
    return facts


def _scaling(adapted: Any) -> dict[str, float]:
    """Return what PEFT multiplies B·A of each module with."""
    return {
        name.removeprefix("base_model.model."): float(module.scaling["default"])
        for name, module in adapted.named_modules()
        if isinstance(getattr(module, "scaling", None), dict) and "default" in module.scaling
    }


def _saved(adapted: Any, made: Path, **how: Any) -> Told:
    """Save an adapter, and return what PEFT says of it and reads from the file."""
    stir(adapted)
    adapted.save_pretrained(str(made), **how)
    config = adapted.peft_config["default"]
    kind = config.peft_type.value
    facts = _facts(config)
    scaling = set(_scaling(adapted).values())
    if kind in {"LORA", "LOHA", "LOKR"} and len(scaling) == 1:
        facts["scaling"] = scaling.pop()
    ranks = {module.r["default"] for module in adapted.modules() if isinstance(getattr(module, "r", None), dict)}
    if kind in _RANKED and len(ranks) == 1:
        facts["rank"] = ranks.pop()
    artifact = "lora-adapter" if kind == "LORA" else "peft-other"
    return Told(artifact, "adapter", load_file(made / "adapter_model.safetensors"), facts)


def _kind(name: str, made: Path) -> Told:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name)](task_type="CAUSAL_LM", **KINDS[name])
    return _saved(peft.get_peft_model(llama(), config), made)


def _lora(name: str, made: Path) -> Told:
    config = peft.LoraConfig(**{"task_type": None, **LORAS[name]})
    told = _saved(peft.get_peft_model(FAMILIES.get(name, llama)(), config), made)
    return told._replace(due=_DUE.get(name, ()))


# ------------------------------------------------------------------------------------------------------- ways of saving


def _adapted(**more: Any) -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(**{**LORAS["plain"], **more}))


def _bfloat16(made: Path) -> Told:
    return _saved(_adapted().to(torch.bfloat16), made)


def _pickle(made: Path) -> Told:
    """Save as PEFT did before safetensors; what we take out of it is loaded by PEFT again."""
    adapted = _adapted()
    told = _saved(adapted, made)
    for path in made.iterdir():
        path.unlink()
    adapted.save_pretrained(str(made), safe_serialization=False)
    again = peft.PeftModel.from_pretrained(llama(), str(taken(made.parent, made)))
    loaded = peft.get_peft_model_state_dict(again)
    assert loaded.keys() == told.tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in told.tensors.items())
    return told._replace(facts={**told.facts, "pickle_format": True})


def _resized(made: Path) -> Told:
    base = llama()
    base.resize_token_embeddings(70)
    return _saved(peft.get_peft_model(base, peft.LoraConfig(**LORAS["plain"])), made)


def _other_name(made: Path) -> Told:
    """Save a named adapter, which lies in a folder of its own."""
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(**LORAS["plain"]), adapter_name="german")
    stir(adapted)
    adapted.save_pretrained(str(made))
    return Told(
        "lora-adapter",
        "adapter",
        load_file(made / "german/adapter_model.safetensors"),
        _facts(adapted.peft_config["german"]),
    )


def _trainer(made: Path) -> Told:
    """Train with the real Trainer, which leaves a checkpoint with an adapter."""
    adapted = _adapted()
    stir(adapted)
    data = [{"input_ids": [1, 5, 9], "labels": [1, 5, 9], "attention_mask": [1, 1, 1]} for _ in range(4)]
    arguments = t.TrainingArguments(
        output_dir=str(made), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    t.Trainer(adapted, arguments, train_dataset=data).train()
    weights = load_file(made / "checkpoint-2/adapter_model.safetensors")
    facts = {**_facts(adapted.peft_config["default"]), "step": 2, "resumable": True}
    return Told("trainer-checkpoint+adapter", "adapter", weights, facts)


def _pruned(made: Path) -> Told:
    """Train AdaLoRA until it has taken ranks away, from some modules every one."""
    config = peft.AdaLoraConfig(
        **LORAS["plain"], init_r=6, target_r=1, total_step=12, tinit=1, tfinal=1, deltaT=1, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(llama(), config)
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-2)
    for step in range(12):
        words = torch.randint(0, 60, (2, 8))
        adapted(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        tuner: Any = adapted.base_model
        tuner.update_and_allocate(step)
        optimizer.zero_grad()
    adapted.save_pretrained(str(made))
    tensors = load_file(made / "adapter_model.safetensors")
    kept = {
        name.removeprefix("base_model.model.").removesuffix(".lora_E"): tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith("lora_E")
    }
    assert 0 in kept.values()
    facts = {**_facts(adapted.peft_config["default"]), "rank": 6, "rank_by_module": kept}
    return Told("peft-other", "adapter", tensors, facts)


_HOW: Final[dict[str, Make]] = {
    "bfloat16": _bfloat16,
    "pickle": _pickle,
    "resized": _resized,
    "named": _other_name,
    "trainer": _trainer,
    "pruned": _pruned,
}


def cases() -> dict[str, Make]:
    """Return every case of this group."""
    made: dict[str, Make] = {f"kind-{name}": partial(_kind, name) for name in KINDS}
    made |= {f"lora-{name}": partial(_lora, name) for name in LORAS}
    made |= {f"how-{name}": make for name, make in _HOW.items()}
    assert tuple(made) == ADAPTERS
    return made
