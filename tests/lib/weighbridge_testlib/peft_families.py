"""Adapters that only PEFT's own layers can merge, by name: what the oracle builds, what the tests ask."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_LAYERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
_SQUARE = ["q_proj", "o_proj"]
_WORLD = 2


class Family(NamedTuple):
    """A type's config class in PEFT and its fields, on a tiny model; `inner` names fields whose value is a config."""

    kind: str
    fields: dict[str, Any]
    model: str = "llama"
    inner: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType({})
    twist: str = ""
    adapters: int = 1
    untied: bool = False
    """PEFT's own merge would change both ends of a tied pair: it is asked for on a model whose ends were parted."""


def _on(*targets: str, **fields: Any) -> dict[str, Any]:
    return {"target_modules": list(targets or _LAYERS), **fields}


_LORA = _on(r=4, lora_alpha=8)
FAMILIES: dict[str, Family] = {
    "loha": Family("LoHaConfig", _on(r=4, alpha=8)),
    "lokr": Family("LoKrConfig", _on(r=4, alpha=8)),
    "lokr-both": Family("LoKrConfig", _on(r=2, alpha=8, decompose_both=True, decompose_factor=4)),
    "ia3": Family("IA3Config", _on(feedforward_modules=["down_proj"])),
    "oft": Family("OFTConfig", _on(r=0, oft_block_size=4)),
    "oft-coft": Family("OFTConfig", _on(r=0, oft_block_size=4, coft=True, eps=0.3, block_share=True)),
    "boft": Family("BOFTConfig", _on(boft_block_size=4)),
    "boft-butterfly": Family("BOFTConfig", _on("q_proj", boft_block_size=4, boft_n_butterfly_factor=2)),
    "hra": Family("HRAConfig", _on(r=4)),
    "vera": Family("VeraConfig", _on(*_SQUARE, r=8)),
    "vera-seeded": Family("VeraConfig", _on(*_SQUARE, r=8, save_projection=False)),
    "adalora": Family("AdaLoraConfig", _on(init_r=4, target_r=4, total_step=10, lora_alpha=8)),
    "kasa": Family("LoraConfig", _LORA, inner={"kasa_config": ("KasaConfig", {})}),
    "bdlora": Family(
        "LoraConfig",
        _on("q_proj", "o_proj", r=4, lora_alpha=8),
        inner={
            "use_bdlora": (
                "BdLoraConfig",
                {
                    "target_modules_bd_a": ["o_proj"],
                    "target_modules_bd_b": ["q_proj"],
                    "nblocks": _WORLD,
                    "match_strict": True,
                },
            )
        },
    ),
    "monteclora": Family("LoraConfig", _LORA, inner={"monteclora_config": ("MontecloraConfig", {})}),
    "fourierft": Family("FourierFTConfig", _on(n_frequency=50)),
    "waveft": Family("WaveFTConfig", _on(*_SQUARE, n_frequency=50)),
    "c3a": Family("C3AConfig", _on(block_size=8)),
    "delora": Family("DeloraConfig", _on(r=4)),
    "deft": Family("DeftConfig", _on(r=4)),
    "frod": Family("FrodConfig", _on(*_SQUARE)),
    "glora": Family("GloraConfig", _on(r=4)),
    "gralora": Family("GraloraConfig", _on(r=4, alpha=8, gralora_k=2)),
    "hira": Family("HiraConfig", _on(r=4)),
    "layernorms": Family("LNTuningConfig", _on("input_layernorm", "norm")),
    "miss": Family("MissConfig", _on(r=4)),
    "miss-bat": Family("MissConfig", _on(r=4, init_weights="bat")),
    "osf": Family("OSFConfig", _on(effective_rank=4)),
    "peanut": Family("PeanutConfig", _on(r=4)),
    "psoft": Family("PsoftConfig", _on(r=4)),
    "pvera": Family("PveraConfig", _on(*_SQUARE, r=8)),
    "randlora": Family("RandLoraConfig", _on(r=4, randlora_alpha=8)),
    "road": Family("RoadConfig", _on(group_size=8)),
    "shira": Family("ShiraConfig", _on(r=4)),
    "supertuning": Family("SupertuningConfig", _on(r=4)),
    "tinylora": Family("TinyLoraConfig", _on(r=2, u=8)),
    "unilora": Family("UniLoraConfig", _on(r=4, theta_d_length=64)),
    "vblora": Family("VBLoRAConfig", _on(r=4, num_vectors=16, vector_length=8, topk=2)),
    "vblora-top": Family(
        "VBLoRAConfig", _on(r=4, num_vectors=16, vector_length=8, topk=2, save_only_topk_weights=True)
    ),
    "two-doras": Family("LoraConfig", {**_LORA, "use_dora": True}, adapters=2),
    # other models: biases, Conv1D, renamed modules, whole modules beside, convolutions, encoder and decoder
    "ia3-biases": Family("IA3Config", _on("q_proj", "v_proj", "down_proj", feedforward_modules=["down_proj"]), "qwen2"),
    "road-biases": Family("RoadConfig", _on("q_proj", group_size=8), "qwen2"),
    "beft-biases": Family("BeftConfig", _on("q_proj", "v_proj"), "qwen2"),
    "ia3-conv1d": Family("IA3Config", _on("c_attn", "c_fc", feedforward_modules=["c_fc"], fan_in_fan_out=True), "gpt2"),
    "vera-conv1d": Family("VeraConfig", _on("c_attn", r=4, fan_in_fan_out=True), "gpt2"),
    "oft-saved-head": Family("OFTConfig", _on("query", r=0, oft_block_size=4, modules_to_save=["classifier"]), "bert"),
    "loha-vision": Family("LoHaConfig", _on("q_proj", "fc1", r=4), "vit"),
    "lokr-experts": Family("LoKrConfig", _on("q_proj", "v_proj", r=4), "mixtral"),
    "loha-convolution": Family("LoHaConfig", _on("convolution", r=4), "resnet"),
    "loha-tied-head": Family("LoHaConfig", _on("q_proj", "lm_head", r=4), "qwen2", untied=True),
    "doras-tied-embedding": Family(
        "LoraConfig", _on("q_proj", "embed_tokens", r=4, use_dora=True), "qwen2", adapters=2, untied=True
    ),
    "oft-tied-saved-head": Family(
        "OFTConfig", _on("q_proj", r=0, oft_block_size=4, modules_to_save=["lm_head"]), "qwen2", untied=True
    ),
    "unilora-saved-head": Family(
        "UniLoraConfig", _on("query", r=4, theta_d_length=64, modules_to_save=["classifier"]), "bert"
    ),
    "hra-seq2seq": Family("HRAConfig", _on("q", "wi", r=4), "t5"),
}
"""What is merged right: the bits of PEFT's merge in fp32, rounded once."""

REFUSED: dict[str, tuple[Family, str]] = {
    "a tensor is missing": (Family("LoHaConfig", _on(r=4), twist="missing"), "does not hold"),
    "a tensor is strange": (Family("IA3Config", _on("q_proj", feedforward_modules=[]), twist="strange"), "takes"),
    "another shape": (Family("HRAConfig", _on(r=4), twist="shape"), "size mismatch"),
    "an unknown model": (Family("LoKrConfig", _on(r=4), twist="unknown"), "never run"),
    "names transformers does not find": (Family("LoHaConfig", _on(r=4), twist="renamed"), "finds no value"),
    "another layer": (Family("LoHaConfig", _on("q_proj", r=4), twist="targets"), "takes"),
}
"""What the child or its parent refuses, with some of the words."""

EVERY: dict[str, Family] = FAMILIES | {name: family for name, (family, _) in REFUSED.items()}
