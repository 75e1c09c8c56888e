"""An adapter's tensors against its config: rank, targets, lonely halves, empty and flat matrices, keys, riders, values.

Every check is a pure function from keys, shapes and config to findings and facts; `judge` runs them all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys, peft_config
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.keys import Key
from weighbridge.adapters.peft_types import KINDS
from weighbridge.adapters.whole import counted, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

Checked = tuple[dict[str, Any], list[Finding]]

LORA: Final = frozenset({"LORA", "ADALORA", ""})
"""Types whose file must hold pairs of LoRA matrices; the empty one stands for a missing config."""

ENDS: Final = frozenset(
    {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "tok_embeddings", "output", "shared"}
)
"""Modules at the ends of a language model, of which two can be one tensor."""

_ATTENTION: Final = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value", "c_attn", "Wqkv", "to_q"}
)
_NOT_EXACT: Final = ("use_qalora", "use_bdlora", "layer_replication", "megatron_config", "arrow_config")
"""Options whose matrices have other shapes than rank and layer say."""


class Loaded(NamedTuple):
    """An adapter file taken apart, beside its config; what every check looks at."""

    subject: str
    peft_type: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    parsed: list[Key]

    def is_empty(self, name: str) -> bool:
        """Return whether a tensor has no elements."""
        return 0 in self.tensors[name].shape

    def words(self, field: str) -> list[str]:
        """Return a field of the config that lists names, empty where it does not."""
        value = self.config.get(field)
        return [str(item) for item in value] if isinstance(value, list) else []


def load(tensors: Mapping[str, Tensor], config: Mapping[str, Any], subject: str, peft_type: str) -> Loaded:
    """Take the keys of an adapter file apart; `subject` is the file."""
    prefix = keys.parameter_prefix(peft_type)
    return Loaded(subject, peft_type, config, tensors, [keys.parse(name, prefix) for name in tensors])


def judge(it: Loaded) -> Checked:
    """Return the facts and findings of an adapter's matrices; what rides with them is judged by `riders`."""
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    checks = [emptiness, canonical, flatness, halves, ranks, targets, variants] if it.peft_type in LORA else [emptiness]
    for check in checks:
        more, faults = check(it)
        facts |= more
        found += faults
    facts["adapted_modules"] = len({key.module for key in it.parsed if key.part and key.part != "trainable_tokens"})
    return facts, found


def torchtune(subject: str) -> Finding:
    """Return the finding for an adapter in torchtune's own form.

    Its modules have other names than the base's, and for models with its own rotary embedding the rows of q and k stand
    in another order; which models those are is not in the files (torchtune's `tune_to_peft_adapter_weights`).
    """
    return findings.finding(
        "lora-dialect-torchtune",
        subject,
        f"{subject} holds an adapter in torchtune's own form (lora_a, lora_b): PEFT reads none of its names",
        "save with torchtune's Hugging Face checkpointer, which writes adapter_model.safetensors in PEFT's form",
    )


# --------------------------------------------------------------------------------------------------------- the checks


def emptiness(it: Loaded) -> Checked:
    """Find tensors without elements, and a file without tensors."""
    if not it.tensors:
        fault = findings.finding(
            "adapter-empty", it.subject, f"{it.subject} holds no tensors", "save the adapter again"
        )
        return {}, [fault]
    others = _of_other_types(it)
    if others:
        fault = findings.finding(
            "adapter-empty",
            it.subject,
            f"{it.subject} holds nothing of a {it.peft_type} adapter, which the config says it is: its names are those "
            f"of {others}; PEFT passes over all of them and serves the plain base",
            "put the adapter_config.json of the same save beside it",
        )
        return {}, [fault]
    kept = peft_config.ranks_kept(it.config)
    pruned = {key.name for key in it.parsed if key.part and kept.get(key.module) == 0}
    empty = sorted(name for name, tensor in it.tensors.items() if 0 in tensor.shape and name not in pruned)
    if not empty:
        return {}, []
    fault = findings.finding(
        "tensors-empty",
        it.subject,
        f"{len(empty)} of {len(it.tensors)} tensors have no elements ({some(empty)}): ungathered shards of a "
        "partitioned training; loaders fail much later with a size mismatch",
        "save again with all ranks gathered (stage3_gather_16bit_weights_on_model_save)",
        empty_tensors=empty,
    )
    return {"empty_tensors": empty}, [fault]


def _of_other_types(it: Loaded) -> str:
    """Return the types that the names belong to where none is of the config's own, "" where some are, or nothing is.

    Token rows ride along with every type. Source: the prefix by which each tuner of PEFT takes its parameters.
    """
    own = KINDS.get(it.peft_type)
    if own is None or own.prompt or not own.prefix or any(own.prefix in name for name in it.tensors):
        return ""
    known = {name: kind.prefix for name, kind in KINDS.items() if kind.prefix and name != "TRAINABLE_TOKENS"}
    return " or ".join(kind for kind, prefix in known.items() if any(f".{prefix}" in name for name in it.tensors))


def canonical(it: Loaded) -> Checked:
    """Find keys that the loader would not recognise."""
    lora = [key for key in it.parsed if key.part.startswith("lora_")]
    good = sum(keys.is_canonical(key) for key in lora)
    facts: dict[str, Any] = {"canonical_keys": good}
    found: list[Finding] = []
    wrappers = Counter(key.wrapper for key in lora if key.wrapper)
    for wrapper in sorted(wrappers):
        facts["bad_segment"] = wrapper
        found.append(
            findings.finding(
                "keys-wrapped",
                it.subject,
                f"{wrappers[wrapper]} of {len(lora)} keys hold the wrapper's segment '{wrapper}': PEFT ignores them "
                "silently and serves the plain base",
                f"take every '{wrapper}' out of the keys",
                bad_segment=wrapper,
                canonical_keys=good,
            )
        )
    bare = [key for key in lora if not key.prefixed]
    if bare:
        facts["missing_prefix"] = keys.PREFIX
        found.append(
            findings.finding(
                "keys-without-prefix",
                it.subject,
                f"{len(bare)} of {len(lora)} keys do not begin with '{keys.PREFIX}': PEFT ignores them silently",
                f"put '{keys.PREFIX}' in front of every key",
                missing_prefix=keys.PREFIX,
                canonical_keys=good,
            )
        )
    named = Counter(key.adapter for key in lora if key.adapter)
    for name in sorted(named):
        segment = name + "."
        facts["bad_segment"] = segment
        default = name == "default"
        found.append(
            findings.finding(
                "keys-with-adapter-name",
                it.subject,
                f"{named[name]} of {len(lora)} keys still hold the adapter's name '{segment}': "
                + (
                    "PEFT loads them only where the adapter is called default"
                    if default
                    else "PEFT ignores them silently"
                ),
                f"take '{segment}' out of every key",
                severity="warn" if default else "block",
                bad_segment=segment,
                canonical_keys=good,
            )
        )
    return facts, found


def flatness(it: Loaded) -> Checked:
    """Find LoRA matrices with fewer than two dimensions."""
    flat = sorted(
        key.name
        for key in it.parsed
        if key.part in _MATRICES
        and key.tail != "bias"
        and len(it.tensors[key.name].shape) < 2
        and not it.is_empty(key.name)
    )
    if not flat:
        return {}, []
    fault = findings.finding(
        "lora-flat",
        it.subject,
        f"{len(flat)} LoRA matrices have one dimension where two are expected: {some(flat)}",
        "save again with the parameters gathered and unflattened",
        flat_tensors=flat,
    )
    return {"flat_tensors": flat}, [fault]


_MATRICES: Final = {
    "lora_A": "lora_B",
    "lora_B": "lora_A",
    "lora_embedding_A": "lora_embedding_B",
    "lora_embedding_B": "lora_embedding_A",
}


def halves(it: Loaded) -> Checked:
    """Find one half of a LoRA without the other."""
    there = {key.name for key in it.parsed}
    lonely: dict[str, str] = {}
    for key in it.parsed:
        other = _MATRICES.get(key.part)
        if other is None or key.tail == "bias":
            continue
        head, _, rest = key.name.rpartition(key.part)
        twin = head + other + rest
        if twin not in there:
            lonely[key.name] = twin
    if not lonely:
        return {"missing_tensors": []}, []
    missing = sorted(lonely.values())
    fault = findings.finding(
        "lora-half-missing",
        it.subject,
        f"{some(sorted(lonely))} {'has' if len(lonely) == 1 else 'have'} no other half; missing: {some(missing)}",
        "save the adapter again",
        missing_tensors=missing,
    )
    return {"missing_tensors": missing}, [fault]


def ranks(it: Loaded) -> Checked:
    """Compare the rank that the matrices show with the one the config states, module by module."""
    shown: dict[str, dict[str, int]] = {}
    widths: set[int] = set()
    for key in it.parsed:
        shape = it.tensors[key.name].shape
        if key.part not in _MATRICES or key.tail == "bias" or len(shape) < 2 or it.is_empty(key.name):
            continue
        second = key.part in {"lora_B", "lora_embedding_B"}
        shown.setdefault(key.module, {})[key.part[-1]] = shape[1] if second else shape[0]
        if key.part == "lora_A" and key.module.rpartition(".")[2] in _ATTENTION:
            widths.add(shape[1])
    facts: dict[str, Any] = {}
    if not shown:
        return facts, []
    every = Counter(rank for pair in shown.values() for rank in pair.values())
    facts["ranks"] = sorted(every)
    facts["rank_from_shapes"] = every.most_common(1)[0][0]
    if len(widths) == 1:
        facts["hidden_size_from_shapes"] = widths.pop()
    stated = peft_config.number(it.config.get("r", peft_config.DEFAULT_RANK))
    table = peft_config.patterns(it.config, "rank_pattern")
    if stated is None or it.peft_type != "LORA" or any(it.config.get(option) for option in _NOT_EXACT):
        return facts, []
    if it.config.get("enable_lora"):
        fault = findings.finding(
            "lora-merged-linear",
            it.subject,
            "the matrices are in the old merged-linear layout (enable_lora): today's PEFT cannot merge them",
            "train again, or convert the adapter with the version that wrote it",
        )
        return {**facts, "mergeable": False}, [fault]
    wrong = {
        module: sorted(set(pair.values()))
        for module, pair in sorted(shown.items())
        if not all(
            any(_fits(rank, _expected(name, stated, table), it.config) for name in _parameters(module, it.config))
            for rank in pair.values()
        )
    }
    if not wrong:
        return facts, []
    module = next(iter(wrong))
    expected = _expected(_parameters(module, it.config)[0], stated, table)
    fault = findings.finding(
        "rank-mismatch",
        it.subject,
        f"{_says(it.config, expected)}, the matrices of {counted(len(wrong), 'module')} have rank "
        f"{', '.join(map(str, sorted({r for pair in wrong.values() for r in pair})))} (such as {module}): the adapter "
        "would not load, or be applied with another strength",
        "put the adapter_config.json of the same save beside the weights",
        rank=expected,
        rank_from_shapes=facts["rank_from_shapes"],
        modules=list(wrong)[:50],
    )
    return facts, [fault]


def _says(config: Mapping[str, Any], expected: float) -> str:
    stated = "r" in config or expected != peft_config.DEFAULT_RANK
    return f"the config says rank {expected:g}" if stated else f"the config states no rank and PEFT takes {expected:g}"


def _expected(module: str, stated: float, table: Mapping[str, int | float]) -> float:
    special = peft_config.in_pattern(table, module)
    return stated if special is None else special


def _parameters(module: str, config: Mapping[str, Any]) -> list[str]:
    """Return what the patterns are matched against: a module's name, or those of its target_parameters."""
    listed = config.get("target_parameters")
    named = [str(name) for name in listed] if isinstance(listed, list) else []
    mine = [f"{module}.{name.rpartition('.')[2]}" for name in named]
    return [one for one, name in zip(mine, named, strict=True) if f".{one}".endswith(f".{name}")] or [module]


def _fits(rank: int, expected: float, config: Mapping[str, Any]) -> bool:
    # Experts in one parameter (target_parameters) are stacked along the rank.
    return rank == expected or (bool(config.get("target_parameters")) and bool(expected) and rank % expected == 0)


def targets(it: Loaded) -> Checked:
    """Compare the modules that have weights with those the config targets; PEFT drops what it does not target."""
    listed = it.config.get("target_modules")
    if listed in (None, [], "all-linear") or it.config.get("target_parameters"):
        return {}, []
    modules = sorted(
        {key.module for key in it.parsed if key.part.startswith("lora_") and key.prefixed and not key.wrapper}
    )
    found: list[Finding] = []
    if isinstance(listed, str):
        verdicts = {module: keys.matches(listed, module) for module in modules}
        stray = [module for module, verdict in verdicts.items() if verdict is False or _left_out(it, module)]
        idle: list[str] = []
    elif isinstance(listed, list):
        names = [str(name) for name in listed]
        stray = [m for m in modules if not _ends_with(m, names) or _left_out(it, m)]
        idle = [name for name in names if not any(_ends_with(m, [name]) for m in modules)]
        # A target that is left out everywhere has no weights by intent; a pattern is not followed that far.
        without = it.words("exclude_modules")
        idle = [n for n in idle if not any(_ends_with(e, [n]) or _ends_with(n, [e]) for e in without)]
        idle = [] if isinstance(it.config.get("exclude_modules"), str) else idle
    else:
        return {}, []
    stray = _not_tied(it, modules, stray)
    if stray and modules:
        found.append(
            findings.finding(
                "target-stray",
                it.subject,
                f"{counted(len(stray), 'module')} with weights but no target of the config ({some(stray)}): PEFT "
                "ignores such weights silently",
                "put the adapter_config.json of the same save beside the weights",
                stray_modules=stray[:50],
            )
        )
    if idle and modules:
        found.append(
            findings.finding(
                "target-without-weights",
                it.subject,
                f"the config targets {some(idle)}, for which the file holds no weights",
                "check that the adapter was saved whole",
                idle_targets=idle,
            )
        )
    return {}, found


def _not_tied(it: Loaded, modules: Sequence[str], stray: Sequence[str]) -> list[str]:
    """Return what is left without the other end of a tied pair, which ensure_weight_tying adapts beside its target."""
    along = it.config.get("ensure_weight_tying") is True and any(
        module.rpartition(".")[2] in ENDS for module in modules if module not in stray
    )
    return [module for module in stray if not (along and module.rpartition(".")[2] in ENDS)]


def _ends_with(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith("." + name) for name in names)


def _left_out(it: Loaded, module: str) -> bool:
    """Return whether exclude_modules names a module that a target names (peft: check_target_module_exists)."""
    without = it.config.get("exclude_modules")
    if isinstance(without, str) and without:
        return keys.matches(without, module) is True
    return _ends_with(module, it.words("exclude_modules"))


def variants(it: Loaded) -> Checked:
    """Compare DoRA magnitudes, LoRA biases and trained token rows with what the config switches on."""
    every = it.parsed
    modules = {key.module for key in every if key.part == "lora_A"}
    magnitudes = {key.module for key in every if key.part == "lora_magnitude_vector"}
    biases = [key for key in every if key.part in {"lora_A", "lora_B"} and key.tail == "bias"]
    rows = sum(
        it.tensors[key.name].shape[0]
        for key in every
        if key.part == "trainable_tokens" and "delta" in key.name and it.tensors[key.name].shape
    )
    facts: dict[str, Any] = {"magnitude_tensors": len(magnitudes), "bias_tensors": len(biases)}
    found: list[Finding] = []
    if rows:
        facts["trained_token_rows"] = rows
        found.append(
            findings.finding(
                "token-rows",
                it.subject,
                f"{rows} trained embedding rows ride along; the vocabulary is unchanged",
                trained_token_rows=rows,
            )
        )
    dora = it.config.get("use_dora") is True
    without = sorted(modules - magnitudes)
    if dora and without:
        found.append(
            findings.finding(
                "dora-mismatch",
                it.subject,
                f"the config says DoRA, {counted(len(without), 'module')} without a magnitude vector: {some(without)}",
                "save the adapter again",
                missing_tensors=[f"{keys.PREFIX}{module}.lora_magnitude_vector" for module in without],
            )
        )
    elif magnitudes and it.config and not dora:
        found.append(
            findings.finding(
                "dora-mismatch",
                it.subject,
                f"{len(magnitudes)} magnitude vectors are there but the config does not say use_dora: PEFT drops them",
                "put the adapter_config.json of the same save beside the weights",
            )
        )
    return facts, found
