"""What the oracles are asked for, by name. Imports nothing heavy: the tests read it to know their own parameters."""

from typing import Any, Final

_TWO: Final = {"target_modules": ["q_proj", "v_proj"]}
_PROMPT: Final = {"num_virtual_tokens": 4}

KINDS: Final[dict[str, dict[str, Any]]] = {
    "ADALORA": {**_TWO, "total_step": 10, "init_r": 6, "target_r": 4},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": "self_attn"},
    "BEFT": _TWO,
    "BOFT": {**_TWO, "boft_block_size": 8},
    "C3A": {**_TWO, "block_size": 16},
    "CARTRIDGE": {**_PROMPT, "num_frozen_tokens": 1},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 1, 1]},
    "DEFT": _TWO,
    "DELORA": _TWO,
    "FOURIERFT": {**_TWO, "n_frequency": 20},
    "FROD": _TWO,
    "GLORA": _TWO,
    "GRALORA": _TWO,
    "HIRA": _TWO,
    "HRA": _TWO,
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LILY": _TWO,
    "LN_TUNING": {},
    "LOHA": {**_TWO, "alpha": 3},
    "LOKR": {**_TWO, "alpha": 3},
    "MISS": {**_TWO, "r": 8},
    "MULTITASK_PROMPT_TUNING": {**_PROMPT, "num_tasks": 2},
    "OFT": _TWO,
    "OSF": _TWO,
    "PEANUT": _TWO,
    "POLY": _TWO,
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": _TWO,
    "PVERA": _TWO,
    "P_TUNING": {**_PROMPT, "encoder_hidden_size": 8},
    "RANDLORA": _TWO,
    "ROAD": {**_TWO, "group_size": 8},
    "SHADOW": _TWO,
    "SHIRA": {**_TWO, "r": 2},
    "SUPERTUNING": _TWO,
    "TINYLORA": _TWO,
    "TRAINABLE_TOKENS": {"token_indices": [1, 5, 9], "target_modules": ["embed_tokens"]},
    "UNILORA": _TWO,
    "VBLORA": {**_TWO, "r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2},
    "VERA": _TWO,
    "WAVEFT": {**_TWO, "n_frequency": 20},
}
"""Every type of PEFT but LoRA itself (LORAS), X-LoRA (made of other adapters) and AdaMSS (asks for scikit-learn)."""

LORAS: Final[dict[str, dict[str, Any]]] = {
    "plain": _TWO,
    "alpha": {**_TWO, "r": 6, "lora_alpha": 9},
    "rslora": {**_TWO, "r": 16, "use_rslora": True},
    "dora": {**_TWO, "use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
    "pattern": {"target_modules": r".*\.(q|o)_proj"},
    "whole-names": {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]},
    "some-layers": {**_TWO, "layers_to_transform": [1], "layers_pattern": "layers"},
    "without": {"target_modules": ["q_proj", "v_proj", "o_proj"], "exclude_modules": ["o_proj"]},
    "rank-pattern": {**_TWO, "r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 12, "^model.layers.0.*v_proj": 2}},
    "alpha-pattern": {**_TWO, "alpha_pattern": {"v_proj": 5}},
    "biases": {**_TWO, "bias": "all"},
    "own-bias": {**_TWO, "lora_bias": True},
    "own-biases": {**_TWO, "bias": "lora_only"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding-dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head"]},
    "saved-modules": {**_TWO, "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved-norms": {**_TWO, "modules_to_save": ["input_layernorm"]},
    "tokens": {**_TWO, "trainable_token_indices": [3, 5, 40]},
    "tokens-named": {**_TWO, "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [1]}},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "replicated": {**_TWO, "layer_replication": [[0, 2], [1, 2]]},
    "pissa": {**_TWO, "init_lora_weights": "pissa"},
    "olora": {**_TWO, "init_lora_weights": "olora"},
    "gaussian": {**_TWO, "init_lora_weights": "gaussian"},
    "orthogonal": {**_TWO, "init_lora_weights": "orthogonal"},
    "bd": {
        **_TWO,
        "r": 8,
        "use_bdlora": {"target_modules_bd_a": ["v_proj"], "target_modules_bd_b": ["q_proj"], "nblocks": 2},
    },
    "alora": {**_TWO, "alora_invocation_tokens": [5, 6]},
    "tied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "fan-in": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "convolution": {"target_modules": ["convolution"], "modules_to_save": ["classifier.1"]},
    "classifier": {**_TWO, "task_type": "SEQ_CLS"},
    "tagger": {**_TWO, "task_type": "TOKEN_CLS"},
}
"""LoRA in its variants; the family of the base follows from the targets (adapters.FAMILIES)."""

HOW: Final = ("bfloat16", "pickle", "resized", "named", "trainer", "pruned")
"""LoRA saved in ways of its own."""

ADAPTERS: Final = (
    *(f"kind-{name}" for name in KINDS),
    *(f"lora-{name}" for name in LORAS),
    *(f"how-{name}" for name in HOW),
)

FAMILIES: Final = (
    "llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "neox", "falcon", "opt", "mixtral", "qwen3moe",
    "gptoss", "bert", "vit", "clip", "t5", "whisper", "llava", "qwen2vl", "resnet",
)  # fmt: skip
"""Kinds of models of transformers, each as tiny as its config allows (peft_oracle.model)."""

DTYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip

SAVES: Final = (
    "shards", "tied", "variant", "talking", "pickle", "pickle-tied", "pickle-shards", "trainer", "every-dtype",
)  # fmt: skip
"""Ways of saving a model; `every-dtype` is no model but one file with every dtype that safetensors and torch share."""

SCHEMES: Final[dict[str, dict[str, Any]]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4-zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int3": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "float8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}
"""Ways in which compressed-tensors packs a linear layer."""

MODELS: Final = (
    *(f"family-{name}" for name in FAMILIES),
    *(f"dtype-{name}" for name in ("float32", "float16", "bfloat16", "float64")),
    *(f"save-{name}" for name in SAVES),
    *(f"packed-{name}" for name in SCHEMES),
)

TRAINING: Final = (
    "plain", "legacy", "wrapped-ddp", "wrapped-compile", "wrapped-both", "averaged", "nested", "module-list",
    "lightning", "lightning-weights", "lightning-lora", "lightning-compiled",
    "save-model", "save-model-shards", "save-state", "save-state-pickle",
    "dcp", "dcp-flat", "dcp-two-ranks", "dcp-wrapped", "dcp-adapter", "dcp-fsdp", "dcp-gathered",
    "dcp-joined",
)  # fmt: skip
"""Checkpoints of torch, Lightning, accelerate and torch.distributed."""

NAMED: Final = ("dcp-slices", "script", "object", "exported", "optimizer")
"""What is called by its name and not taken apart."""

PICTURES: Final = (
    "pipeline", "pipeline-half", "pipeline-variant", "pipeline-pickle", "pipeline-shards", "component", "average",
    "diffusion", "lora-unet", "lora-both", "lora-bare", "lora-pickle", "lora-kohya", "lora-transformer", "lora-alone",
)  # fmt: skip
"""Pipelines, parts of them, and LoRA of diffusers."""
