"""Tiny models and adapters for merges, by name: what the oracle builds, what the tests ask. Imports nothing heavy."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A model, an adapter and what is asked: `bits` of PEFT's merge, or the `logits` of the model with its adapter."""

    family: str
    lora: dict[str, Any]
    dtype: str = "bfloat16"
    ask: str = "bits"
    save: Mapping[str, Any] = MappingProxyType({})
    twist: str = ""


_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FUSED: dict[str, Any] = {"save_original_format": False}

CASES: dict[str, Case] = {
    "llama": Case("llama", {"target_modules": _LLAMA, "r": 8}, save={"max_shard_size": "30KB"}),
    "llama-fp16": Case("llama", {"target_modules": _LLAMA, "r": 8}, dtype="float16"),
    "llama-fp32": Case("llama", {"target_modules": _LLAMA, "r": 4, "lora_alpha": 3}, dtype="float32"),
    "llama-dora": Case("llama", {"target_modules": _LLAMA, "use_dora": True}, dtype="float32"),
    "llama-dora-bf16": Case("llama", {"target_modules": _LLAMA, "use_dora": True, "r": 8}),
    "llama-embedding": Case("llama", {"target_modules": ["embed_tokens", "lm_head"]}, dtype="float32"),
    "llama-embedding-dora": Case("llama", {"target_modules": ["embed_tokens"], "use_dora": True}, dtype="float32"),
    "llama-resized": Case("llama", {"target_modules": _LLAMA}, twist="resize"),
    "llama-parameter": Case("llama", {"target_modules": [], "target_parameters": ["q_proj.weight"]}, dtype="float32"),
    "qwen2-patterns": Case(
        "qwen2",
        {
            "target_modules": _LLAMA,
            "r": 6,
            "rank_pattern": {"layers.1.self_attn.q_proj": 12, "down_proj": 3},
            "alpha_pattern": {"o_proj": 5, "layers.0.*.up_proj": 20},
        },
    ),
    "qwen2-rslora": Case("qwen2", {"target_modules": _LLAMA, "r": 16, "use_rslora": True}),
    "qwen2-bias": Case("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "qwen2-bias-all": Case("qwen2", {"target_modules": ["o_proj"], "bias": "all"}),
    "qwen2-tokens": Case("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 40]}),
    "qwen2-saved-head": Case("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "qwen2-tied-head": Case("qwen2", {"target_modules": ["lm_head", "q_proj"]}, dtype="float32", ask="logits"),
    "qwen2-tied-embedding": Case("qwen2", {"target_modules": ["embed_tokens"]}, dtype="float32", ask="logits"),
    "qwen3": Case("qwen3", {"target_modules": _LLAMA}),
    "mistral": Case("mistral", {"target_modules": _LLAMA, "r": 32}),
    "gemma3": Case("gemma3", {"target_modules": _LLAMA}),
    "gemma3-tied-head": Case("gemma3", {"target_modules": ["lm_head"]}, dtype="float32", ask="logits"),
    "phi3": Case("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gpt2": Case("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2-dora": Case(
        "gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}, dtype="float32"
    ),
    "neox": Case("neox", {"target_modules": ["query_key_value", "dense", "lm_head"]}),
    "falcon": Case("falcon", {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "bloom": Case("bloom", {"target_modules": ["query_key_value", "dense"], "lora_bias": True}),
    "mamba": Case("mamba", {"target_modules": ["in_proj", "x_proj"]}),
    "mamba-tied-embedding": Case("mamba", {"target_modules": ["embeddings"]}, dtype="float32", ask="logits"),
    "dinov2": Case("dinov2", {"target_modules": ["q_proj", "o_proj", "fc1"]}),
    "opt": Case("opt", {"target_modules": ["q_proj", "v_proj", "fc1"]}),
    "mixtral": Case("mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}, dtype="float32"),
    "mixtral-fused": Case(
        "mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}, dtype="float32", save=FUSED
    ),
    "mixtral-v4": Case("mixtral", {"target_modules": ["w1", "w2", "w3"]}, dtype="float32", twist="per-expert"),
    "mixtral-v4-fused": Case(
        "mixtral", {"target_modules": ["w1", "w2", "w3"]}, dtype="float32", save=FUSED, twist="per-expert"
    ),
    "qwen3moe": Case("qwen3moe", {"target_modules": ["v_proj"], "target_parameters": _EXPERTS}, dtype="float32"),
    "qwen3moe-one": Case(
        "qwen3moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, dtype="float32", save=FUSED
    ),
    "gptoss": Case(
        "gptoss",
        {"target_modules": ["q_proj"], "target_parameters": _EXPERTS},
        dtype="float32",
    ),
    "bert": Case("bert", {"target_modules": ["query", "value", "dense"], "modules_to_save": ["classifier"]}),
    "vit": Case("vit", {"target_modules": ["q_proj", "v_proj", "fc1"], "modules_to_save": ["classifier"]}),
    "clip": Case("clip", {"target_modules": ["q_proj", "fc2"]}),
    "t5": Case("t5", {"target_modules": ["q", "v", "wi"]}),
    "whisper": Case("whisper", {"target_modules": ["q_proj", "out_proj"]}),
    "llava": Case("llava", {"target_modules": ["q_proj", "down_proj"]}),
    "qwen2vl": Case("qwen2vl", {"target_modules": ["q_proj", "qkv", "down_proj"]}),
    "resnet": Case("resnet", {"target_modules": ["convolution"]}, dtype="float32", ask="near"),
}
"""Every case by name; `near` asks for closeness, where the library's own kernel sums in another order."""

BEHAVED = ("qwen2-tied-head", "gpt2", "vit")
"""Cases of which base, adapter and result are run and compared, too."""
