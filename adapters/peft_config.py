"""What an adapter_config.json says: type, rank, strength, targets, base, and which of its fields nobody knows."""

import math
import re
import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from weighbridge.adapters import keys
from weighbridge.adapters.peft_types import ALL_FIELDS, COMMON_FIELDS, KINDS, LEGACY_FIELDS
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts, Finding

SCALED: Final = frozenset({"LORA", "LOHA", "LOKR"})
DEFAULT_RANK: Final = 8
"""What LoraConfig takes where no rank is stated."""

_DEFAULT_ALPHA: Final = 8
_MUTATING: Final = re.compile(r"pissa(?:_niter_[0-9]+)?|olora|corda|loftq|lora_ga", re.IGNORECASE)
_QUANTIZED: Final = re.compile(
    r"(?:^|[-_./])(?:bnb[-_]?[48]bit|[2-8]bits?|gptq|awq|gguf|exl[23]|int[48]|nf4|fp4|mxfp4|nvfp4|aqlm|hqq|eetq|quip|autoround"
    r"|w[48]a(?:4|8|16)|q[2-8](?:_[0-9a-z]+)*|quantized)(?=$|[-_./])",
    re.IGNORECASE,
)
_QUANT_SUFFIX: Final = re.compile(
    r"(?:[-_.](?:unsloth|bnb|[2-8]bits?|bnb[48]bit|gptq|awq|gguf|int[48]|nf4|fp4|mxfp4|nvfp4|aqlm|hqq|eetq|mlx|autoround"
    r"|w[48]a(?:4|8|16)|q[2-8](?:_[0-9a-z]+)*|quantized))+$",
    re.IGNORECASE,
)
_CACHE_PATH: Final = re.compile(
    r"(?:.*[/\\])?models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+?)[/\\]snapshots[/\\](?P<commit>[0-9a-f]{40})(?:[/\\].*)?"
)
_PLAIN: Final = string.ascii_letters + string.digits + "_"
_HINTS: Final = ("base_model", "base_model_name", "model_name_or_path", "base_model_path", "model")


def number(value: Any) -> int | float | None:
    """Return a finite JSON number of at most 64 bits, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    fits = abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)
    return value if fits else None


def is_local(base: str) -> bool:
    """Return whether a base's name is a path on somebody's disk rather than a Hub id."""
    return (
        base.startswith(("/", "./", "../", "~", "file:", "\\"))
        or "\\" in base
        or re.match(r"[A-Za-z]:", base) is not None
        or base.strip("/").count("/") > 1
        or base in {".", ".."}
    )


def is_quantized(base: str) -> bool:
    """Return whether a base's name says that its weights are quantized."""
    return _QUANTIZED.search(base) is not None


def alpha_of(config: Mapping[str, Any]) -> int | float | None:
    """Return lora_alpha or its kin: the field that bears the type's own name, as randlora_alpha does."""
    for key in ("lora_alpha", "alpha", f"{str(config.get('peft_type') or '').lower()}_alpha"):
        if key in config:
            return number(config[key])
    return None


def rank_of(config: Mapping[str, Any]) -> int | float | None:
    """Return the rank that the layers have at their start.

    AdaLoRA ignores `r` and starts with `init_r`; OFT writes 0 where the block size gives the number of blocks.
    """
    adaptive = str(config.get("peft_type") or "").upper() == "ADALORA" and "init_r" in config
    return number(config.get("init_r" if adaptive else "r")) or None


def strength(rank: float | None, alpha: float | None, *, stabilised: bool) -> float | None:
    """Return what B·A is multiplied with."""
    if not rank or rank < 0 or alpha is None:
        return None
    return alpha / math.sqrt(rank) if stabilised else alpha / rank


def patterns(config: Mapping[str, Any], key: str) -> dict[str, int | float]:
    """Return rank_pattern or alpha_pattern without what is no number."""
    table = config.get(key)
    if not isinstance(table, dict):
        return {}
    return {str(name): value for name, raw in table.items() if (value := number(raw)) is not None}


def ranks_kept(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the rank that AdaLoRA left each module: rank_pattern says of every singular value whether it is kept."""
    table = config.get("rank_pattern")
    if str(config.get("peft_type") or "").upper() != "ADALORA" or not isinstance(table, dict):
        return {}
    return {
        str(name).removesuffix(".lora_E"): sum(kept)
        for name, kept in table.items()
        if isinstance(kept, list) and all(isinstance(one, bool) for one in kept)
    }


@lru_cache(maxsize=4096)
def _tail(pattern: str) -> str:
    """Return letters and digits with which everything ends that a pattern matches; none where that is not plain."""
    if any(mark in pattern for mark in ("|", "\\", "(?")):
        return ""
    return pattern[len(pattern.rstrip(_PLAIN)) :]


def in_pattern(table: Mapping[str, int | float], module: str) -> int | float | None:
    """Return the value of the first pattern that a module's path ends with, as PEFT looks it up."""
    for pattern, value in table.items():
        if not module.endswith(_tail(pattern)):
            continue  # most of a table of many, without compiling each
        if keys.matches(rf"(.*\.)?({pattern})", module):
            return value
    return None


def read(config: Mapping[str, Any], subject: str) -> tuple[dict[str, Any], AdapterFacts, BaseFacts, list[Finding]]:
    """Return the facts of a PEFT config, the same for a manifest, the base, and what is odd about them."""
    peft_type = str(config.get("peft_type") or "").upper()
    rank, alpha = rank_of(config), alpha_of(config)
    stabilised = config.get("use_rslora") is True
    scaling = strength(rank, alpha, stabilised=stabilised) if peft_type in SCALED else None
    targets = config.get("target_modules")
    listed = [str(t) for t in targets] if isinstance(targets, list) else None
    pattern = targets if isinstance(targets, str) else None
    variants = [name for field, name in _VARIANTS.items() if config.get(field)]
    found: list[Finding] = []
    facts: dict[str, Any] = {
        "peft_type": peft_type or None,
        "rank": rank,
        "alpha": alpha,
        "scaling": scaling,
        "peft_version": config.get("peft_version"),
        "use_dora": config.get("use_dora") is True,
        "use_rslora": stabilised,
        **_by_module(config, rank, alpha, stabilised=stabilised),
    }
    if listed is not None:
        facts["targets"] = listed
    if pattern is not None:
        facts["target_pattern"] = pattern
    if peft_type == "LORA" and alpha is None and rank:
        facts["assumed_scaling"] = strength(rank, _DEFAULT_ALPHA, stabilised=stabilised)
        found.append(
            findings.finding(
                "alpha-unknown",
                subject,
                f"{subject} does not state lora_alpha; PEFT then takes {_DEFAULT_ALPHA}",
                "write the lora_alpha of the training into the config",
                assumed_scaling=facts["assumed_scaling"],
            )
        )
    base, base_facts = _base(config, subject, found)
    facts |= base_facts
    facts |= _fields(config, peft_type, subject, found)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and _MUTATING.fullmatch(init):
        facts["base_mutated_at_init"] = True
        found.append(
            findings.finding(
                "base-mutated-at-start",
                subject,
                f"the adapter was started with {init}, which changed the base: added to the untouched base it computes "
                "something else",
                "convert it (path_initial_model_for_weight_conversion), or publish the changed base with it",
                base_mutated_at_init=True,
                init_lora_weights=init,
            )
        )
    if KINDS.get(peft_type) and KINDS[peft_type].prompt:
        facts["mergeable"] = False
    adapter = AdapterFacts(
        peft_type=peft_type or "unknown",
        rank=rank,
        alpha=alpha,
        scaling=scaling,
        targets=listed if listed is not None else pattern,
        variants=variants,
    )
    return facts, adapter, base, found


_VARIANTS: Final = {
    "use_dora": "dora",
    "use_rslora": "rslora",
    "use_qalora": "qalora",
    "use_bdlora": "bdlora",
    "lora_bias": "lora-bias",
    "layer_replication": "layer-replication",
    "target_parameters": "target-parameters",
    "trainable_token_indices": "trainable-tokens",
    "modules_to_save": "modules-to-save",
    "alora_invocation_tokens": "alora",
    "rank_pattern": "rank-pattern",
    "alpha_pattern": "alpha-pattern",
}


def _by_module(
    config: Mapping[str, Any], rank: float | None, alpha: float | None, *, stabilised: bool
) -> dict[str, Any]:
    kept = ranks_kept(config)
    if kept:
        return {"rank_by_module": kept}
    ranks, alphas = patterns(config, "rank_pattern"), patterns(config, "alpha_pattern")
    facts: dict[str, Any] = {}
    if ranks:
        facts["rank_by_module"] = {**ranks, "default": rank}
    if ranks or alphas:
        own = {
            name: strength(ranks.get(name, rank), alphas.get(name, alpha), stabilised=stabilised)
            for name in {**ranks, **alphas}
        }
        facts["scaling_by_module"] = {**own, "default": strength(rank, alpha, stabilised=stabilised)}
    return facts


def _base(config: Mapping[str, Any], subject: str, found: list[Finding]) -> tuple[BaseFacts, dict[str, Any]]:
    raw = config.get("base_model_name_or_path")
    base = raw.strip() if isinstance(raw, str) and raw.strip() else None
    revision = config.get("revision") if isinstance(config.get("revision"), str) else None
    evidence = f"{subject.rpartition('/')[2]}:base_model_name_or_path"
    facts: dict[str, Any] = {"base_model": base}
    if base is None:
        hint = next((config[key] for key in _HINTS if isinstance(config.get(key), str) and config[key]), None)
        if hint is not None:
            facts["base_model_hint"] = hint
        found.append(
            findings.finding(
                "base-unknown",
                subject,
                f"{subject} does not name its base model" + (f"; another field says {hint}" if hint else ""),
                "write base_model_name_or_path, or name the base in weighbridge.yaml",
                base_model_hint=hint,
            )
        )
        return BaseFacts(relation="adapter"), facts
    cached = _CACHE_PATH.fullmatch(base)
    if cached is not None:
        facts |= {"base_model_hint": f"{cached['owner']}/{cached['name']}", "commit": cached["commit"]}
        revision = revision or cached["commit"]
        evidence += " (a Hub cache path)"
    if is_local(base):
        facts["base_is_local_path"] = True
        found.append(
            findings.finding(
                "base-local-path",
                subject,
                f"the base is named by a path, {base}: nobody else can resolve it"
                + (f"; the path tells {facts['base_model_hint']}" if cached else ""),
                "write the base's Hub id, or name it in weighbridge.yaml",
                base_is_local_path=True,
                local_paths=[base],
            )
        )
    if is_quantized(base):
        facts["base_quantized"] = True
        plain = _QUANT_SUFFIX.sub("", base)
        proposal = f"; the 16-bit one may be {plain}" if plain != base and plain else ""
        found.append(
            findings.finding(
                "base-quantized",
                subject,
                f"the base {base} is a quantized repository: a merge needs the 16-bit base{proposal}",
                "name the base the quantized one was made from",
                base_quantized=True,
                proposed_base=plain if proposal else None,
            )
        )
    named = facts["base_model_hint"] if cached else base
    return BaseFacts(id=named, revision=revision, relation="adapter", evidence=evidence), facts


def _fields(config: Mapping[str, Any], peft_type: str, subject: str, found: list[Finding]) -> dict[str, Any]:
    kind = KINDS.get(peft_type)
    legacy: list[str] = []
    unknown: list[str] = []
    if kind is not None:
        strange = config.keys() - COMMON_FIELDS - kind.fields
        legacy = sorted(strange & (LEGACY_FIELDS | ALL_FIELDS))
        unknown = sorted(strange - (LEGACY_FIELDS | ALL_FIELDS))
    if unknown:
        found.append(
            findings.finding(
                "adapter-fields-unknown",
                subject,
                f"{subject} has fields that PEFT does not know: {', '.join(unknown[:8])}; it ignores them",
                "check what the fields do; a newer or another PEFT wrote them",
                unknown_fields=unknown,
            )
        )
    if peft_type and kind is None:
        found.append(
            findings.finding(
                "peft-type-unknown", subject, f"PEFT type {peft_type} is not known here; it is only kept and hashed"
            )
        )
    if legacy:
        found.append(
            findings.finding(
                "adapter-fields-legacy",
                subject,
                f"{subject} has fields that PEFT does not keep for {peft_type} any more: {', '.join(legacy)}",
                legacy_fields=legacy,
            )
        )
    return {"unknown_fields": unknown, "legacy_fields": legacy}
