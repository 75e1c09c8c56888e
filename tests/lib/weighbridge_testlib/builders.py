"""Tiny training outputs written in plain Python: adapters, models, Trainer checkpoints and whole runs.

    write_safetensors(path, tensors)           one file
    lora_adapter(folder)                       what PEFT's save_pretrained leaves
    llama_model(folder, shards=3)              what transformers' save_pretrained leaves
    trainer_checkpoint(run, step=280)          run/checkpoint-280 with adapter or model and the training state
    run_root(folder, steps=(100, 200))         a run: the result at the root and its checkpoints

Every builder returns the folder it filled and makes the same bytes for the same arguments; another `seed` gives other
values under the same names and sizes.
"""

import json
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

VOCAB: Final = 32
HIDDEN: Final = 16
INTERMEDIATE: Final = 32
HEADS: Final = 2
HEAD_DIM: Final = 8
LAYERS: Final = 2

_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip

Data = bytes | float | Sequence[float] | None
"""Raw bytes, one value for every element, all the values, or None for zeros."""

TensorSpec = tuple[str, Sequence[int], Data]
"""dtype, shape, data."""


def pack(dtype: str, shape: Sequence[int], data: Data = None) -> bytes:
    """Return the bytes of one tensor."""
    count = 1
    for side in shape:
        count *= side
    if isinstance(data, bytes):
        return data
    if data is None:
        bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}.get(dtype)
        return bytes(count * bits // 8 if bits else count * _BYTES[dtype])
    values = [float(data)] * count if isinstance(data, (int, float)) else [float(v) for v in data]
    if len(values) != count:
        raise ValueError(f"{len(values)} values for {count} elements")
    if dtype == "BF16":
        raw = struct.pack(f"<{count}f", *values)
        return b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))
    code = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}
    if dtype not in {"F64", "F32", "F16"}:
        values = [int(v) for v in values]
    return struct.pack(f"<{count}{code[dtype]}", *values)


def gauss(seed: int, name: str, count: int, scale: float = 0.05) -> list[float]:
    """Return values that depend on seed and name alone."""
    source = random.Random(f"{seed}/{name}")
    return [source.gauss(0, scale) for _ in range(count)]


def safetensors_bytes(
    tensors: Mapping[str, TensorSpec],
    metadata: Mapping[str, str] | None = None,
    *,
    header: Mapping[str, Any] | None = None,
) -> bytes:
    """Return a safetensors file; entries in `header` replace header entries as they are, to build damaged ones.

    `metadata` None writes the usual `{"format": "pt"}`; an empty mapping writes none.
    """
    table: dict[str, Any] = {}
    notes = {"format": "pt"} if metadata is None else dict(metadata)
    if notes:
        table["__metadata__"] = notes
    body = bytearray()
    for name, (dtype, shape, data) in tensors.items():
        raw = pack(dtype, shape, data)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    table.update(header or {})
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def write_safetensors(path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> Path:
    """Write a safetensors file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write JSON and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
    return path


# ------------------------------------------------------------------------------------------------------------- adapters


def lora_tensors(
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: int = LAYERS,
    dtype: str = "F32",
    prefix: str = "base_model.model.model.",
    hidden: int = HIDDEN,
) -> dict[str, TensorSpec]:
    """Return the tensors of a PEFT LoRA, lora_B filled too."""
    widths = {"q_proj": hidden, "k_proj": HEAD_DIM, "v_proj": HEAD_DIM, "o_proj": hidden}
    tensors: dict[str, TensorSpec] = {}
    for layer in range(layers):
        for target in targets:
            block = "self_attn" if target in widths else "mlp"
            rows = widths.get(target, INTERMEDIATE if target in {"gate_proj", "up_proj"} else hidden)
            columns = INTERMEDIATE if target == "down_proj" else hidden
            stem = f"{prefix}layers.{layer}.{block}.{target}"
            for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                name = f"{stem}.{part}.weight"
                tensors[name] = (dtype, shape, gauss(seed, name, shape[0] * shape[1]))
    return tensors


def lora_config(
    *,
    rank: int = 4,
    alpha: float = 8,
    base: str | None = "example-org/tiny-base",
    targets: Any = ("q_proj", "v_proj"),
    **more: Any,
) -> dict[str, Any]:
    """Return an adapter_config.json as PEFT writes it; `more` adds or replaces fields."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": targets if isinstance(targets, str) or targets is None else list(targets),
        "modules_to_save": None,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
        "auto_mapping": None,
        "peft_version": "0.17.1",
        **more,
    }


def card(
    base: str | None = "example-org/tiny-base", license_id: str | None = "apache-2.0", body: str = "# tiny\n"
) -> str:
    """Return the text of a model card."""
    lines = ["---"]
    lines += [f"base_model: {base}"] if base else []
    lines += ["library_name: peft"]
    lines += [f"license: {license_id}"] if license_id else []
    return "\n".join([*lines, "---", "", body])


def lora_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    base: str | None = "example-org/tiny-base",
    dtype: str = "F32",
    targets: Sequence[str] = ("q_proj", "v_proj"),
    tensors: Mapping[str, TensorSpec] | None = None,
    readme: str | None = "",
    tokenizer: bool = False,
    **config: Any,
) -> Path:
    """Fill a folder as PEFT's save_pretrained does; `config` adds fields, `tensors` replaces the weights.

    `readme` is the card's text, "" for a usual one and None for no card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = lora_tensors(seed=seed, rank=rank, targets=targets, dtype=dtype) if tensors is None else tensors
    write_safetensors(folder / "adapter_model.safetensors", weights)
    write_json(
        folder / "adapter_config.json", lora_config(rank=rank, alpha=alpha, base=base, targets=targets, **config)
    )
    if readme is not None:
        (folder / "README.md").write_text(readme or card(base))
    if tokenizer:
        write_tokenizer(folder)
    return folder


# --------------------------------------------------------------------------------------------------------------- models


def llama_tensors(
    *, seed: int = 0, tied: bool = False, dtype: str = "BF16", vocab: int = VOCAB
) -> dict[str, TensorSpec]:
    """Return the tensors of the tiny Llama: 21 of them and 5,712 parameters, 20 and 5,200 when tied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        shapes |= {
            f"{stem}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{stem}self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
            f"{stem}self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
            f"{stem}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{stem}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{stem}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{stem}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{stem}input_layernorm.weight": (HIDDEN,),
            f"{stem}post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    tensors: dict[str, TensorSpec] = {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = (dtype, shape, gauss(seed, name, count, 0.2) if len(shape) > 1 else 1.0)
    return tensors


def llama_config(*, tied: bool = False, dtype: str = "bfloat16", vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    """Return the config.json of the tiny Llama; `more` adds or replaces fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        **more,
    }


def write_tokenizer(folder: Path, *, vocab: int = VOCAB, template: str | None = "{{ messages[0].content }}") -> Path:
    """Write tokenizer.json and its companions, and a chat template."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = special + [f"w{i}" for i in range(len(special), vocab)]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": word, "special": True} for i, word in enumerate(special)],
            "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
        },
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64})
    write_json(folder / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def shard_names(count: int, stem: str = "model", suffix: str = "safetensors") -> list[str]:
    """Return `model-00001-of-00003.safetensors` and its sisters."""
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.{suffix}" for i in range(count)]


def split(tensors: Mapping[str, TensorSpec], count: int) -> list[dict[str, TensorSpec]]:
    """Split tensors over shards, in order."""
    names = list(tensors)
    cuts = [round(i * len(names) / count) for i in range(count + 1)]
    return [{name: tensors[name] for name in names[cuts[i] : cuts[i + 1]]} for i in range(count)]


def index_of(parts: Iterable[tuple[str, Mapping[str, TensorSpec]]], **metadata: Any) -> dict[str, Any]:
    """Return the index of some shards, `total_size` counted unless it is given."""
    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in parts:
        for name, (dtype, shape, data) in tensors.items():
            weight_map[name] = file
            total += len(pack(dtype, shape, data))
    return {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}


def llama_model(
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 1,
    tied: bool = False,
    dtype: str = "BF16",
    tensors: Mapping[str, TensorSpec] | None = None,
    tokenizer: bool = True,
    readme: str | None = None,
    **config: Any,
) -> Path:
    """Fill a folder as transformers' save_pretrained does: one file, or shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = llama_tensors(seed=seed, tied=tied, dtype=dtype) if tensors is None else tensors
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights)
    else:
        parts = list(zip(shard_names(shards), split(weights, shards), strict=True))
        for file, part in parts:
            write_safetensors(folder / file, part)
        write_json(folder / "model.safetensors.index.json", index_of(parts))
    words = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    config.setdefault("dtype", words.get(dtype, "float32"))
    write_json(folder / "config.json", llama_config(tied=tied, **config))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3})
    if tokenizer:
        write_tokenizer(folder)
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder


# ------------------------------------------------------------------------------------------------------------- training


def trainer_state(
    step: int, *, max_steps: int | None = None, log_history: Sequence[Mapping[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a trainer_state.json as the Trainer writes it."""
    history = [{"loss": 1.5 - step / 1000, "step": step, "epoch": 1.0, "learning_rate": 1e-4}]
    return {
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 1.0,
        "global_step": step,
        "max_steps": step if max_steps is None else max_steps,
        "log_history": history if log_history is None else [dict(entry) for entry in log_history],
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "stateful_callbacks": {},
        **more,
    }


def deepspeed_state(folder: Path, *, step: int, ranks: int, stage: int = 2) -> Path:
    """Write what DeepSpeed leaves in a checkpoint: the tag folder, `latest` and the rebuild script."""
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        (tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"optimizer of a rank\n" * 4)
        if stage == 3:
            (tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").write_bytes(b"model part of a rank\n" * 4)
    if stage != 3:
        (tag / "mp_rank_00_model_states.pt").write_bytes(b"model states\n" * 4)
    (folder / "latest").write_text(f"global_step{step}")
    (folder / "zero_to_fp32.py").write_text("# rebuilds fp32 weights\n")
    return tag


def trainer_checkpoint(
    folder: Path,
    *,
    step: int,
    adapter: bool = True,
    deepspeed_ranks: int = 0,
    seed: int = 0,
    log_history: Sequence[Mapping[str, Any]] | None = None,
    max_steps: int | None = None,
    state: Mapping[str, Any] | None = None,
    ended: bool = True,
    **weights: Any,
) -> Path:
    """Fill `folder` (usually `run/checkpoint-280`) as the Trainer does, trainer_state.json last.

    `weights` goes to lora_adapter or llama_model; `state` adds fields to trainer_state.json, `ended=False` leaves the
    file, and with it the end mark, out.
    """
    if adapter:
        lora_adapter(folder, seed=seed, **weights)
    else:
        llama_model(folder, seed=seed, **weights)
    (folder / "training_args.bin").write_bytes(b"pickled arguments\n" * 4)
    if deepspeed_ranks:
        deepspeed_state(folder, step=step, ranks=deepspeed_ranks)
    else:
        (folder / "optimizer.pt").write_bytes(b"optimizer\n" * 64)
    (folder / "scheduler.pt").write_bytes(b"scheduler\n" * 8)
    if deepspeed_ranks > 1:
        for rank in range(deepspeed_ranks):
            (folder / f"rng_state_{rank}.pth").write_bytes(b"random state\n" * 4)
    else:
        (folder / "rng_state.pth").write_bytes(b"random state\n" * 4)
    if ended:
        document = trainer_state(step, max_steps=max_steps, log_history=log_history, **(state or {}))
        write_json(folder / "trainer_state.json", document)
    return folder


def run_root(
    folder: Path,
    *,
    steps: Sequence[int] = (100, 200),
    adapter: bool = True,
    result: bool = True,
    seed: int = 0,
    **checkpoint: Any,
) -> Path:
    """Fill a run: one checkpoint per step (seeds seed + 1, ...) and at the root the result, equal to the last one."""
    for number, step in enumerate(steps, start=1):
        trainer_checkpoint(
            folder / f"checkpoint-{step}",
            step=step,
            adapter=adapter,
            seed=seed + number,
            max_steps=max(steps),
            **checkpoint,
        )
    if result:
        last = seed + len(steps)
        if adapter:
            lora_adapter(folder, seed=last)
        else:
            llama_model(folder, seed=last)
        (folder / "training_args.bin").write_bytes(b"pickled arguments\n" * 4)
        write_json(folder / "all_results.json", {"epoch": 1.0, "train_loss": 1.2})
    return folder
