"""Healthy models of any shape and name, and single defects in them: what the property tests of layouts draw from.

written(model, folder)         fill a folder with a drawn model, and say what is in it
DEFECTS["missing-shard"]       does one thing to it, and returns the code that must be found
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

from weighbridge_testlib import builders
from weighbridge_testlib.builders import TensorSpec
from weighbridge_testlib.containers import T, torch_zip

_WORDS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Style(NamedTuple):
    """How a family names its tensors: the input table, a layer's matrices and norms, the norm at the end, the head."""

    table: str
    layer: str
    parts: tuple[str, ...]
    norms: tuple[str, ...]
    last: str
    head: str
    config: Mapping[str, Any]


STYLES: Final[dict[str, Style]] = {
    "llama": Style(
        "model.embed_tokens.weight",
        "model.layers.{}.",
        (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ),
        ("input_layernorm", "post_attention_layernorm"),
        "model.norm.weight",
        "lm_head.weight",
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    ),
    "gpt2": Style(
        "transformer.wte.weight",
        "transformer.h.{}.",
        ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        ("ln_1", "ln_2"),
        "transformer.ln_f.weight",
        "lm_head.weight",
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    ),
    "neox": Style(
        "gpt_neox.embed_in.weight",
        "gpt_neox.layers.{}.",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ("input_layernorm", "post_attention_layernorm"),
        "gpt_neox.final_layer_norm.weight",
        "embed_out.weight",
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]},
    ),
    "bert": Style(
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.{}.",
        ("attention.self.query", "attention.self.key", "attention.output.dense", "intermediate.dense"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
        "bert.pooler.dense.bias",
        "cls.predictions.decoder.weight",
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    ),
    "t5": Style(
        "shared.weight",
        "encoder.block.{}.",
        ("layer.0.SelfAttention.q", "layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"),
        ("layer.0.layer_norm", "layer.1.layer_norm"),
        "encoder.final_layer_norm.weight",
        "lm_head.weight",
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    ),
    "seeing": Style(
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.{}.",
        ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"),
        ("input_layernorm",),
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
        {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
    ),
}


class Model(NamedTuple):
    """A whole model that was drawn; `suffix` is safetensors or bin, `own` what a home-made class puts before names."""

    style: str
    layers: int
    hidden: int
    vocab: int
    dtype: str
    tied: bool
    shards: int
    suffix: str
    own: str
    step: int | None
    total: bool
    seed: int


class Written(NamedTuple):
    """A model on disk: its folder, its tensors, the file of each, the index if there is one, and its config."""

    model: Model
    folder: Path
    tensors: dict[str, TensorSpec]
    owners: dict[str, str]
    listing: Path | None

    @property
    def files(self) -> list[str]:
        """Names of the weight files, in order."""
        return sorted(set(self.owners.values()))

    def config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the config in place."""
        path = self.folder / "config.json"
        table = json.loads(path.read_text())
        change(table.get("text_config", table) if self.model.style == "seeing" else table)
        builders.write_json(path, table)


def tensors_of(model: Model) -> dict[str, TensorSpec]:
    """Return the tensors of a drawn model."""
    style, hidden = STYLES[model.style], model.hidden
    shapes: dict[str, tuple[int, ...]] = {style.table: (model.vocab, hidden)}
    for i in range(model.layers):
        stem = style.layer.format(i)
        shapes |= {f"{stem}{part}.weight": (hidden, hidden) for part in style.parts}
        shapes |= {f"{stem}{norm}.weight": (hidden,) for norm in style.norms}
    shapes[style.last] = (hidden,)
    if not model.tied:
        shapes[style.head] = (model.vocab, hidden)
    return {
        model.own + name: (model.dtype, shape, builders.pack(model.dtype, (1,), 0.25 + model.seed) * math.prod(shape))
        for name, shape in shapes.items()
    }


MODELS: Final = st.builds(
    Model,
    style=st.sampled_from(sorted(STYLES)),
    layers=st.integers(1, 4),
    hidden=st.sampled_from([8, 16, 24]),
    vocab=st.integers(20, 60),
    dtype=st.sampled_from(sorted(_WORDS)),
    tied=st.booleans(),
    shards=st.integers(1, 6),
    suffix=st.sampled_from(["safetensors", "bin"]),
    own=st.sampled_from(["", "", "backbone.", "inner.core."]),
    step=st.sampled_from([None, None, 7, 12000]),
    total=st.booleans(),
    seed=st.integers(0, 9),
).map(lambda model: model._replace(shards=min(model.shards, len(tensors_of(model)) - 1)))
"""Models in fewer shards than tensors, so that some shard holds two."""


def written(model: Model, folder: Path) -> Written:
    """Fill a folder as save_pretrained does, below a Trainer's checkpoint folder where the model has a step."""
    place = folder / f"checkpoint-{model.step}" if model.step is not None else folder
    place.mkdir(parents=True)
    tensors = tensors_of(model)
    stem = "model" if model.suffix == "safetensors" else "pytorch_model"
    names = builders.shard_names(model.shards, stem, model.suffix) if model.shards > 1 else [f"{stem}.{model.suffix}"]
    parts = list(zip(names, builders.split(tensors, model.shards), strict=True))
    for name, part in parts:
        (place / name).write_bytes(weights(part, model.suffix))
    index = None
    if model.shards > 1:
        table = builders.index_of(parts)
        if not model.total:
            del table["metadata"]["total_size"]
        index = builders.write_json(place / f"{stem}.{model.suffix}.index.json", table)
    inner = {"vocab_size": model.vocab, "num_hidden_layers": model.layers, "hidden_size": model.hidden}
    config = {**STYLES[model.style].config, "dtype": _WORDS[model.dtype], "tie_word_embeddings": model.tied}
    builders.write_json(place / "config.json", config | ({"text_config": inner} if model.style == "seeing" else inner))
    if model.step is not None:
        builders.write_json(place / "trainer_state.json", builders.trainer_state(model.step))
    return Written(model, place, tensors, {n: file for file, part in parts for n in part}, index)


def weights(tensors: Mapping[str, TensorSpec], suffix: str) -> bytes:
    """Return a safetensors file or the torch file of the same tensors."""
    if suffix == "safetensors":
        return builders.safetensors_bytes(tensors)
    return torch_zip({name: T(dtype, shape, data) for name, (dtype, shape, data) in tensors.items()})


# -------------------------------------------------------------------------------------------------------------- defects


def _missing(it: Written, pick: int) -> str:
    (it.folder / it.files[pick % len(it.files)]).unlink()
    return "shard-missing"


def _cut(it: Written, pick: int) -> str:
    path = it.folder / it.files[pick % len(it.files)]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 1 - pick % 15])  # no tensor is smaller than 16 bytes
    return "file-short" if it.model.suffix == "safetensors" else "zip-cut"


def _ghost(it: Written, pick: int) -> str:
    assert it.listing is not None
    table = json.loads(it.listing.read_text())
    names = sorted(it.tensors)
    name = names[pick % len(names)] + "_ghost"
    table["weight_map"][name] = it.files[pick % len(it.files)]
    builders.write_json(it.listing, table)
    return "tensor-missing"


def _stale(it: Written, pick: int) -> str:
    """Leave one shard of an earlier save with another number of shards."""
    stem = "model" if it.model.suffix == "safetensors" else "pytorch_model"
    count = it.model.shards + 1 + pick % 3
    names = builders.shard_names(count, stem, it.model.suffix)
    older = tensors_of(it.model._replace(seed=it.model.seed + 1))
    at = pick % count
    (it.folder / names[at]).write_bytes(weights(builders.split(older, count)[at], it.model.suffix))
    return "shards-stale"


def _vocabulary(it: Written, pick: int) -> str:
    it.config(lambda table: table.update(vocab_size=it.model.vocab + 1 + pick % 64))
    return "vocab-mismatch"


def _dtype(it: Written, pick: int) -> str:
    others = sorted(set(_WORDS) - {it.model.dtype})
    path = it.folder / "config.json"
    table = json.loads(path.read_text())
    builders.write_json(path, {**table, "dtype": _WORDS[others[pick % 2]]})
    return "dtype-mismatch"


def _in_company(it: Written) -> list[str]:
    """Return the tensors whose shard holds others too: without its only tensor a shard would be left out itself."""
    counts = Counter(it.owners.values())
    return sorted(name for name, file in it.owners.items() if counts[file] > 1)


def _unlisted(it: Written, pick: int) -> str:
    """Take a tensor out of the index, though a shard holds it."""
    assert it.listing is not None
    table = json.loads(it.listing.read_text())
    names = _in_company(it)
    del table["weight_map"][names[pick % len(names)]]
    builders.write_json(it.listing, table)
    return "tensor-unlisted"


def _misplaced(it: Written, pick: int) -> str:
    """Let the index put a tensor into another shard than the one that holds it."""
    assert it.listing is not None
    table = json.loads(it.listing.read_text())
    names = _in_company(it)
    name = names[pick % len(names)]
    table["weight_map"][name] = next(file for file in it.files if file != table["weight_map"][name])
    builders.write_json(it.listing, table)
    return "tensor-misplaced"


def _gone(it: Written, _: int) -> str:
    (it.folder / "config.json").unlink()
    return "config-missing"


Defect = Callable[[Written, int], str]

DEFECTS: Final[dict[str, Defect]] = {
    "missing-shard": _missing,
    "cut-shard": _cut,
    "ghost": _ghost,
    "stale-shard": _stale,
    "vocabulary": _vocabulary,
    "dtype": _dtype,
    "unlisted": _unlisted,
    "misplaced": _misplaced,
    "no-config": _gone,
}
"""Each does one thing to a model on disk, told by a number which one, and returns the code that must be found."""

INDEXED: Final = frozenset({"missing-shard", "ghost", "stale-shard", "unlisted", "misplaced"})
"""Defects that only a model of several shards can have."""
