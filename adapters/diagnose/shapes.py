"""Rules of shapes: config against tensors, vocabulary, rank, and what the text itself says about a tensor."""

from collections.abc import Iterable
from typing import Any, Final

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.parts import tensor_slices
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.diagnose.text import Mismatch, mismatches
from weighbridge.registry.types import Finding

_STAGE: Final = "config"
_SHOWN: Final = 4


def _vocabulary(case: Case, one: Finding) -> tuple[str, ...]:
    rows = one.data.get("embedding_rows")
    return (commands.set_fields(case.path(one.subject), {"vocab_size": rows}),) if isinstance(rows, int) else ()


def _resize(case: Case, one: Finding) -> tuple[str, ...]:
    entries = one.data.get("tokenizer_entries")
    if not isinstance(entries, int):
        return ()
    target = commands.beside(case.folder, "resized")
    return (
        commands.python(
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"m, t = M.from_pretrained({str(case.folder)!r}), T.from_pretrained({str(case.folder)!r}); "
            f"m.resize_token_embeddings(len(t)); m.save_pretrained({str(target)!r}); t.save_pretrained({str(target)!r})"
        ),
    )


def _rank(case: Case, one: Finding) -> tuple[str, ...]:
    """Set the rank the matrices show, where all of them show one and the strength stays a matter of the config."""
    rank = one.data.get("rank_from_shapes")
    if isinstance(rank, int) and case.facts.get("ranks") == [rank] and case.artifact.config is not None:
        return (commands.set_fields(case.path(case.artifact.config), {"r": rank}),)
    return ()


def _against_config(case: Case) -> Iterable[Evidence]:
    """Compare the sides of the known matrices with the sizes in the config."""
    if case.is_adapter or not case.tensors or case.facts.get("quant_method") or tensor_slices(case) is not None:
        return
    wrong: dict[str, tuple[str, int, int]] = {}
    for name, tensor in case.tensors.items():
        for at, field in _SIDES.get(_last(name), ()):
            wanted = case.config.get(field)
            if not isinstance(wanted, int) or isinstance(wanted, bool) or len(tensor.shape) <= at:
                continue
            if tensor.shape[at] not in {wanted, 0}:
                wrong.setdefault(field, (name, tensor.shape[at], wanted))
    for field, (name, stored, wanted) in sorted(wrong.items()):
        yield Evidence(
            case.artifact.config or "config.json",
            f"the config says {field} {wanted}, {name} has {stored}: the config is not of these weights",
            (commands.set_fields(case.path(case.artifact.config or "config.json"), {field: stored}),),
            data={"field": field, "config": wanted, "stored": stored, "tensor": name},
        )


def _layers(case: Case) -> Iterable[Evidence]:
    """Compare the number of layers in the names with the one in the config."""
    stated = case.config.get("num_hidden_layers")
    if case.is_adapter or not isinstance(stated, int) or not case.tensors or not case.whole:
        return
    numbers = {int(n) for name in case.tensors if (n := _layer(name)) is not None}
    if not numbers or max(numbers) + 1 == stated or len(numbers) != max(numbers) + 1:
        return
    count = len(numbers)
    path = case.artifact.config or "config.json"
    # Weights that lost their last layers look like a config of another model; who edits it publishes half a model.
    mends = (commands.set_fields(case.path(path), {"num_hidden_layers": count}),) if count > stated else ()
    yield Evidence(
        path,
        f"the config says num_hidden_layers {stated}, the names count {count} layers: "
        + (
            f"{count - stated} layers of the file are not used"
            if count > stated
            else f"{stated - count} layers would be made up; fetch the weights again from where they were saved, "
            "unless the config is of another model"
        ),
        mends,
        data={"config": stated, "stored": count},
    )


def _in_text(case: Case) -> Iterable[Evidence]:
    """Look up the tensors that the text complains about, and say on which side the other shape is."""
    if case.text is None:
        return
    for one in mismatches(case.text)[:_SHOWN]:
        name = _stored_name(case, one)
        if name is None:
            continue
        shape = case.tensors[name].shape
        if shape != one.stored:
            continue
        yield Evidence(
            case.owners.get(name, name),
            f"{name} is {_sides(shape)} in these files, as line {one.number} says, and the model that was built wants "
            f"{_sides(one.wanted)}: {_meaning(name, one)}",
            data={"tensor": name, "stored": list(shape), "wanted": list(one.wanted)},
        )


def _stored_name(case: Case, one: Mismatch) -> str | None:
    """Return the name in the file of a name in a text: PEFT puts the adapter's name into it."""
    if one.name in case.tensors:
        return one.name
    plain = one.name.replace(".default.", ".")
    if plain in case.tensors:
        return plain
    ends = [name for name in case.tensors if one.name.endswith(f".{name}") or name.endswith(f".{one.name}")]
    return ends[0] if len(ends) == 1 else None


def _meaning(name: str, one: Mismatch) -> str:
    last = name.split(".")
    if 0 in one.stored or not one.stored:
        return "the file holds none of it"
    if any(part.startswith("lora_") for part in last):
        at = 0 if "lora_A" in name else -1
        if len(one.wanted) == len(one.stored) and one.wanted[at] != one.stored[at]:
            return f"the rank of the file is {one.stored[at]}, of the config {one.wanted[at]}"
        return "the base is another one than the adapter was trained on"
    if any(part in _TABLES for part in last) and one.wanted[1:] == one.stored[1:]:
        return f"the vocabulary of the file has {one.stored[0]} rows, the model's {one.wanted[0]}"
    return "the config, or the class that was built, belongs to another model"


def _sides(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _last(name: str) -> str:
    """Return the module that a weight belongs to."""
    return name.split(".")[-2] if name.endswith(".weight") and "." in name.removesuffix(".weight") else ""


def _layer(name: str) -> str | None:
    """Return the layer's number in a name of a decoder, None where it has none."""
    parts = name.split(".")
    if any(part in {"encoder", "vision_tower", "visual", "vision_model"} for part in parts):
        return None
    for word in ("layers", "h", "blocks"):
        if word in parts[:-1]:
            number = parts[parts.index(word) + 1]
            return number if number.isdigit() and len(number) < 5 else None
    return None


_TABLES: Final = frozenset(
    {"embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "tok_embeddings"}
)
_SIDES: Final[dict[str, tuple[tuple[int, str], ...]]] = {
    "embed_tokens": ((1, "hidden_size"),),
    "gate_proj": ((0, "intermediate_size"), (1, "hidden_size")),
    "up_proj": ((0, "intermediate_size"), (1, "hidden_size")),
    "down_proj": ((0, "hidden_size"), (1, "intermediate_size")),
    "q_proj": ((1, "hidden_size"),),
    "k_proj": ((1, "hidden_size"),),
    "v_proj": ((1, "hidden_size"),),
    "o_proj": ((0, "hidden_size"),),
    "input_layernorm": ((0, "hidden_size"),),
    "post_attention_layernorm": ((0, "hidden_size"),),
}
"""Module -> (side, field of the config): as the decoders of transformers name them."""


def plain_text_model(case: Case) -> bool:
    """Return whether the config describes one decoder whose sizes hold for every layer."""
    config: Any = case.config
    return not any(
        isinstance(config.get(key), dict) for key in ("text_config", "vision_config", "audio_config")
    ) and not any(
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
    )


RULES: Final = (
    linked(
        "vocabulary-differs", _STAGE, "block", ("size-mismatch", "id-out-of-range"), ("vocab-mismatch",),
        "the config's vocab_size is not the number of embedding rows",
        "set vocab_size to the rows that are there",
        _vocabulary,
    ),
    linked(
        "ids-beyond-rows", _STAGE, "warn", ("id-out-of-range", "garbage-output"), ("tokenizer-beyond-vocab",),
        "the tokenizer can emit ids for which the embedding has no row",
        "resize the embedding to the tokenizer",
        _resize,
    ),
    linked(
        "rank-differs", _STAGE, "block", ("size-mismatch", "garbage-output"), ("rank-mismatch",),
        "the adapter's config states another rank than its matrices have, so its strength is another one, too",
        "put the adapter_config.json of the same save beside the weights",
        _rank,
    ),
    Rule(
        "config-of-another", _STAGE, "block", ("size-mismatch", "shards-disagree"),
        "sizes in the config are not those of the tensors",
        "put the config of the same save beside the weights",
        lambda case: _against_config(case) if plain_text_model(case) else (),
    ),
    Rule(
        "layers-differ", _STAGE, "block", ("missing-keys", "unexpected-keys", "garbage-output"),
        "the config counts other layers than the names do",
        "put the config of the same save beside the weights",
        lambda case: _layers(case) if plain_text_model(case) else (),
    ),
    Rule(
        "shape-in-text", _STAGE, "note", ("size-mismatch",),
        "the tensor that the text names has that shape in these files, so the other side is wrong",
        "build the model that the files belong to: their own config, their own base",
        _in_text,
    ),
)  # fmt: skip
