"""Does a model fit its config: dtype, vocabulary, tied head, layers, leftovers of other work, generation settings.

Every check is a pure function of the config and the headers; `judge` runs those that need no whole set.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from weighbridge.adapters import keys, packed_weights, weights
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.quantization import Quantization
from weighbridge.adapters.whole import counted, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

Checked = tuple[dict[str, Any], list[Finding]]

_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared|token_embedding|token_embd)\.weight$"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output|output_projection|head)\.weight$")
_LAYER = re.compile(r"(?P<stem>.*?\blayers\.)(?P<i>[0-9]{1,5})\.(?P<rest>.+)")
_UNIFORM: Final = frozenset(
    {
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "granite",
        "cohere", "smollm3", "stablelm", "starcoder2", "internlm2", "seed_oss", "glm", "glm4", "helium", "arcee",
    }
)  # fmt: skip
"""Families whose decoder layers all hold the same tensors, so that one layer tells what another lacks."""

_NUMBERED: Final = _UNIFORM | frozenset(
    {
        "bert", "big_bird", "biogpt", "bloom", "camembert", "codegen", "cohere2", "ctrl", "data2vec-text", "deberta-v2",
        "deepseek_v2", "deepseek_v3", "distilbert", "electra", "ernie", "ernie4_5", "exaone4", "falcon", "falcon_h1",
        "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granitemoe", "hunyuan_v1_dense", "jamba",
        "lfm2", "longformer", "mamba", "minimax", "mixtral", "mpnet", "mpt", "nemotron", "nomic_bert", "olmoe", "opt",
        "persimmon", "phi", "qwen2_moe", "qwen3_moe", "qwen3_next", "recurrent_gemma", "roberta", "roformer", "rwkv",
        "xglm", "xlm-roberta", "xlnet",
    }
)  # fmt: skip
"""Families with tensors under every number from 0 to the count of layers: state dicts of transformers 5.24."""

_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUMBER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.([0-9]{1,5})\.")
_OUTSIDE = re.compile(r"embed|(?:^|\.)(?:wte|shared|lm_head|score|norm|final_layer_norm|ln_f|norm_f)(?:\.|$)")
"""Names of what lies before and behind the layers."""

_OTHER_TOWER = re.compile(r"(?:^|[._])(?:vision|visual|image|audio|speech)")

_SAMPLING: Final[dict[str, Any]] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 50, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "min_p": None, "top_h": None,
}  # fmt: skip
_BEAMS: Final[dict[str, Any]] = {"early_stopping": False, "length_penalty": 1.0, "diversity_penalty": 0.0}
"""Fields that only mean something in one mode of generation, with the value that says nothing."""


def judge(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], quantized: Quantization | None, subject: str
) -> Checked:
    """Return the facts and findings of a model's headers against its config; `subject` is the config's path."""
    inner = text_config(config)
    architectures = config.get("architectures")
    declared = inner.get("dtype") or inner.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    facts: dict[str, Any] = {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "tied": tied if isinstance(tied, bool) else None,
        "config_dtype": declared if isinstance(declared, str) else None,
    }
    found: list[Finding] = []
    if not tensors:
        return facts, found
    packed = packed_weights.is_packed(tensors)
    for more, extra in (
        adapter_left_inside(tensors, subject),
        leftover(quantized, tensors, subject, packed=packed),
        dtype(facts["config_dtype"], tensors, subject, packed=packed),
        vocabulary(inner, tensors, subject),
    ):
        facts |= more
        found += extra
    return facts, found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model: itself, or its text_config."""
    inner = config.get("text_config")
    if isinstance(inner, dict) and "vocab_size" not in config:
        return {**{k: v for k, v in config.items() if k in {"dtype", "torch_dtype", "tie_word_embeddings"}}, **inner}
    return config


def adapter_left_inside(tensors: Mapping[str, Tensor], subject: str) -> Checked:
    """Find adapter weights and base_layer names inside what claims to be a whole model."""
    lora = [name for name in tensors if ".lora_" in name or name.startswith("lora_")]
    base = [name for name in tensors if ".base_layer." in name]
    prefixed = sum(name.startswith("base_model.model.") for name in tensors)
    if not lora and not base and not prefixed:
        return {}, []
    fault = findings.finding(
        "not-merged",
        subject,
        f"the weights still hold {counted(len(lora), 'LoRA tensor')} and {counted(len(base), 'base_layer name')}"
        + (f", and {prefixed} names begin with base_model.model." if prefixed else "")
        + ": this is no merged model, a loader fills it with random weights",
        "merge the adapter (merge_and_unload), then save",
        base_layer_keys=len(base),
        lora_keys=len(lora),
    )
    return {"base_layer_keys": len(base), "lora_keys": len(lora)}, [fault]


def leftover(quantized: Quantization | None, tensors: Mapping[str, Tensor], subject: str, *, packed: bool) -> Checked:
    """Find a config that says quantized over weights that are not."""
    if quantized is None or packed:
        return {}, []
    dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
    fault = findings.finding(
        "quantization-leftover",
        subject,
        f"{quantized.field} ({quantized.method}) is left in the config, though no tensor is packed (all {dtypes}): "
        "loaders then ask for the quantization library",
        f"take {quantized.field} out of config.json",
        leftover=quantized.field,
    )
    return {"leftover": quantized.field}, [fault]


def dtype(declared: str | None, tensors: Mapping[str, Tensor], subject: str, *, packed: bool) -> Checked:
    """Compare the dtype the config claims with the one most bytes are in."""
    wanted = weights.CONFIG_DTYPES.get((declared or "").removeprefix("torch."))
    main = weights.main_dtype(tensors.values())
    if wanted is None or packed or main is None or main == wanted or main not in weights.FLOATS:
        return {}, []
    fault = findings.finding(
        "dtype-mismatch",
        subject,
        f"the config says {declared}, the weights are {main}: loaders convert without a word, and the size is not what "
        "the config suggests",
        "save again in the wanted dtype, or correct the config",
        config_dtype=declared,
        main_dtype=main,
    )
    return {}, [fault]


def vocabulary(config: Mapping[str, Any], tensors: Mapping[str, Tensor], subject: str) -> Checked:
    """Compare vocab_size with the rows of the input embedding."""
    vocab = config.get("vocab_size")
    tables = [t for name, t in tensors.items() if _EMBEDDING.search(name) and len(t.shape) == 2]
    rows = tables[0].shape[0] if tables else None
    facts: dict[str, Any] = {"config_vocab": vocab if isinstance(vocab, int) else None, "embedding_rows": rows}
    if not isinstance(vocab, int) or rows is None or rows == vocab:
        return facts, []
    fault = findings.finding(
        "vocab-mismatch",
        subject,
        f"the config says vocab_size {vocab}, {tables[0].name} has {rows} rows: loading fails with a size mismatch",
        f"set vocab_size to {rows}, or resize the embedding",
        config_vocab=vocab,
        embedding_rows=rows,
    )
    return facts, [fault]


def required(config: Mapping[str, Any], tensors: Mapping[str, Tensor], subject: str) -> Checked:
    """Find tensors that every model of a known family has and this one lacks, and layers of which nothing is there."""
    if any(".lora_" in name or ".base_layer." in name or name.startswith("base_model.") for name in tensors):
        return {}, []  # told as not merged
    facts, found = ({}, []) if packed_weights.is_packed(tensors) else _uniform(config, tensors, subject)
    return (facts, found) if found else layers(config, tensors, subject)


def layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor], subject: str) -> Checked:
    """Find layers that the config counts and of which no file holds a single tensor, however they are packed.

    Of families that are not known only a model without any layer is told, where no name counts anything. Where no name
    is one that models give an embedding, a norm, a head or a layer, names tell nothing.
    """
    inner = text_config(config)
    count = next((n for key in _COUNTS if isinstance(n := inner.get(key), int) and not isinstance(n, bool)), 0)
    if not tensors or not 0 < count <= _LAYER_LIMIT:
        return {}, []
    mine = [_bare(name) for name in tensors if inner is config or not _OTHER_TOWER.search(name)]
    numbers = {int(match[1]) for name in mine if (match := _NUMBER.search(name)) is not None}
    if not numbers and not any(_OUTSIDE.search(name) for name in mine):
        return {}, []
    known = str(inner.get("model_type")) in _NUMBERED
    if known:
        missing = [i for i in range(count) if i not in numbers]
    else:
        counted_on = any(any(map(str.isdigit, name)) for name in mine) or any(
            len(t.shape) > 1 and t.shape[0] == count and not _EMBEDDING.search(name) for name, t in tensors.items()
        )
        missing = [] if counted_on else list(range(count))
    if not missing:
        return {}, []
    which = "any of them" if len(missing) == count else f"{counted(len(missing), 'layer')} ({some(map(str, missing))})"
    fault = findings.finding(
        "tensor-missing",
        subject,
        f"the config counts {counted(count, 'layer')}, and no file holds a tensor of {which}; a loader fills in random "
        "values",
        "save the model again",
        missing_layers=missing,
    )
    return {}, [fault]


def _bare(name: str) -> str:
    """Return a name without the segments of wrappers, which may stand between a layer and its number."""
    for segment in keys.WRAPPERS:
        name = name.replace(segment, "")
    return name


def _uniform(config: Mapping[str, Any], tensors: Mapping[str, Tensor], subject: str) -> Checked:
    """Find what one layer of a family has and another lacks, and embedding, last norm and head."""
    architectures = config.get("architectures")
    causal = isinstance(architectures, list) and str(architectures[:1]).endswith("ForCausalLM']")
    if str(config.get("model_type")) not in _UNIFORM or not causal:
        return {}, []
    held: dict[int, set[str]] = {}
    stem = ""
    for name in tensors:
        match = _LAYER.fullmatch(name)
        if match is not None:
            stem = match["stem"]
            held.setdefault(int(match["i"]), set()).add(match["rest"])
    every = set().union(*held.values()) if held else set()
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or not 0 < count <= _LAYER_LIMIT or not held:
        return {}, []
    if len(every) < _LAYER_SIZE and len(held) >= count:
        return {}, []  # every layer is there, and none of them tells what the others lack
    root = stem.removesuffix("layers.")
    missing = [f"{stem}{i}.{rest}" for i in range(count) for rest in sorted(every - held.get(i, set()))]
    if not any(_EMBEDDING.search(name) for name in tensors):
        missing.append(f"{root}embed_tokens.weight")
    if root and f"{root}norm.weight" not in tensors and any("norm" in rest for rest in every):
        missing.append(f"{root}norm.weight")
    if config.get("tie_word_embeddings") is False and not any(_HEAD.search(name) for name in tensors):
        missing.append("lm_head.weight")
    if not missing:
        return {}, []
    fault = findings.finding(
        "tensor-missing",
        subject,
        f"no file holds {counted(len(missing), 'tensor')} that the architecture needs: {some(missing)}; "
        "a loader fills in random values",
        "save the model again",
        missing_tensors=sorted(missing),
    )
    return {"missing_tensors": sorted(missing)}, [fault]


_LAYER_SIZE: Final = 7
_LAYER_LIMIT: Final = 1000


def generation(config: Mapping[str, Any], subject: str) -> Checked:
    """Find generation settings that exclude each other; transformers refuses or warns when it saves them."""
    clash: list[str] = []
    if config.get("do_sample") is not True:
        clash += [name for name, idle in _SAMPLING.items() if config.get(name, idle) not in (None, idle)]
    if config.get("num_beams") in (None, 1):
        clash += [name for name, idle in _BEAMS.items() if config.get(name, idle) not in (None, idle)]
    if not clash:
        return {}, []
    fault = findings.finding(
        "generation-conflict",
        subject,
        f"{subject} sets {', '.join(clash)} without the mode they belong to (do_sample is "
        f"{config.get('do_sample', 'not set')}): the library refuses to save it again",
        "set do_sample to true, or drop the fields",
        conflicting_fields=clash,
    )
    return {"conflicting_fields": clash}, [fault]


def tokenizer_entries(document: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (entries, highest id) of a tokenizer.json, added tokens included; None where it states none."""
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: set[int] = set()
    if isinstance(vocab, dict):
        ids.update(value for value in vocab.values() if isinstance(value, int))
    elif isinstance(vocab, list):
        ids.update(range(len(vocab)))
    added = document.get("added_tokens")
    if isinstance(added, list):
        ids.update(t["id"] for t in added if isinstance(t, dict) and isinstance(t.get("id"), int))
    return (len(ids), max(ids)) if ids else None


def tokenizer(entries: int, highest: int, rows: int | None, subject: str) -> Checked:
    """Compare the ids a tokenizer can emit with the rows of the embedding."""
    facts = {"tokenizer_entries": entries}
    if rows is None or highest < rows:
        return facts, []
    fault = findings.finding(
        "tokenizer-beyond-vocab",
        subject,
        f"the tokenizer can emit id {highest}, the embedding has {rows} rows: such a token breaks inference",
        "resize the embedding to the tokenizer, or drop the added tokens",
        tokenizer_entries=entries,
        embedding_rows=rows,
    )
    return facts, [fault]
