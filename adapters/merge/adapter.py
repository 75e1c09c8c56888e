"""An adapter taken apart for a merge: its modules with their matrices, whole tensors, token rows - and what forbids it.

...self_attn.q_proj.lora_A.weight                      a module's matrices
...embed_tokens.lora_embedding_A                       the same of an embedding
...experts.base_layer.lora_A.weight                    experts in one parameter, the inner of two wrappers
...embed_tokens.base_layer.weight                      the base's own tensor: shows whether the base is the right one
...embed_tokens.token_adapter.trainable_tokens_delta   trained rows
...classifier.weight                                   a tensor that replaces the base's
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys, peft_config
from weighbridge.adapters.formats.safetensors import Header
from weighbridge.adapters.merge.values import WIDTH, Origin
from weighbridge.adapters.peft_types import KINDS
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

STREAMED: Final = frozenset({"LORA", "TRAINABLE_TOKENS"})
"""Types whose merge is written block by block."""

_NOT_WEIGHTS: Final = frozenset({"ADAPTION_PROMPT", "CARTRIDGE", "LILY", "POLY", "SHADOW", "XLORA", "MIXED"})
"""Types that compute something no set of weights can stand for, besides those that learn a prompt."""

_CHANGES_BASE: Final = re.compile(r"pissa(?:_niter_[0-9]+)?|olora|corda|loftq|lora_ga", re.IGNORECASE)
_ROUTED: Final = {
    "alora_invocation_tokens": "aLoRA acts from its invocation tokens on only",
    "arrow_config": "Arrow chooses between adapters for every token",
    "use_qalora": "QALoRA pools the input of its layers",
}
_OTHER_PRODUCTS: Final = {"kasa_config": "KaSA", "use_bdlora": "BD-LoRA", "monteclora_config": "MonteCLoRA"}
"""Options of LoRA with a product of their own, which PEFT's layers know."""

_LEGACY: Final = {"enable_lora": "the old merged-linear layout"}
"""Options that PEFT has dropped."""

_WRAPPERS: Final = re.compile(r"\.(?:base_layer|modules_to_save(?:\.[^.]+)?|token_adapter|original_module)(?=\.|$)")

_REPEAT: Final = ".modules_to_save."


class Part(NamedTuple):
    """The tensors of one adapted module; `layer` counts the wrappers inside it, for experts in one parameter."""

    module: str
    layer: int
    tensors: dict[str, Origin]
    """By part: lora_A, lora_B, lora_embedding_A, lora_embedding_B, magnitude, bias."""

    @property
    def embedding(self) -> bool:
        """It adapts an embedding, whose matrices are stored the other way round."""
        return "lora_embedding_A" in self.tensors

    @property
    def a(self) -> Origin | None:
        """The matrix that comes first."""
        return self.tensors.get("lora_embedding_A") or self.tensors.get("lora_A")

    @property
    def b(self) -> Origin | None:
        """The matrix that comes second."""
        return self.tensors.get("lora_embedding_B") or self.tensors.get("lora_B")


class Adapter(NamedTuple):
    """One adapter; names are full parameter names of the base model, without PEFT's prefix."""

    file: str
    config: Mapping[str, Any]
    parts: dict[tuple[str, int], Part]
    whole: dict[str, Origin]
    copies: dict[str, Origin]
    rows: dict[str, Origin]
    tensors: int

    def flag(self, name: str) -> bool:
        """Return whether an option is switched on."""
        return bool(self.config.get(name))


def read(folder: Path, weights: str, header: Header, config: Mapping[str, Any], file: int) -> Adapter:
    """Return an adapter; `file` is the number of its weights file among the sources.

    Raises ValueError where two keys mean the same tensor.
    """
    peft_type = str(config.get("peft_type") or "").upper()
    prefix = "lora_" if peft_type == "TRAINABLE_TOKENS" else keys.parameter_prefix(peft_type)
    found = Adapter(str(folder / weights), config, {}, {}, {}, {}, len(header.tensors))
    for name, origin in _origins(header, file).items():
        _sort_in(found, keys.parse(name, prefix), origin)
    return found


def unsorted(folder: Path, weights: str, header: Header, config: Mapping[str, Any], file: int) -> Adapter:
    """Return an adapter that PEFT itself will read: all its tensors are whole ones, by their keys in the file."""
    return Adapter(str(folder / weights), config, {}, _origins(header, file), {}, {}, len(header.tensors))


def _origins(header: Header, file: int) -> dict[str, Origin]:
    return {
        one.name: Origin(file=file, at=header.data_start + one.begin, dtype=one.dtype, shape=one.shape, name=one.name)
        for one in header.tensors.values()
    }


def _sort_in(found: Adapter, key: keys.Key, origin: Origin) -> None:
    if key.part == "trainable_tokens":
        if "trainable_tokens_delta" in key.name:
            _once(found.rows, _plain(key.module), origin)
        else:
            _once(found.copies, f"{_plain(key.module)}.trainable_tokens_original", origin)
    elif key.part.startswith("lora_"):
        layer = len(re.findall(r"\.base_layer(?=\.|$)", key.module))
        module = _plain(key.module)
        part = found.parts.setdefault((module, layer), Part(module, layer, {}))
        kind = "magnitude" if key.part == "lora_magnitude_vector" else key.part
        kind = f"{kind}.bias" if key.tail == "bias" else kind
        _once(part.tensors, kind, origin)
    else:
        module = _plain(key.module)
        name = f"{module}.{key.tail}" if module else key.tail
        # What a saved module stands for is saved, too, where PEFT saves the embeddings of a vocabulary that has grown.
        original = key.module.endswith(".original_module")
        copied = original or (key.module.endswith(".base_layer") and key.tail != "bias")
        repeated = found.whole.get(name) if not copied else None
        if repeated is not None and (_REPEAT in repeated.name) != (_REPEAT in origin.name):
            # Then it repeats the saved module itself; the loader takes the one under the plain name.
            found.whole[name] = repeated if _REPEAT in origin.name else origin
            return
        _once(found.copies if copied else found.whole, name, origin)


def _plain(module: str) -> str:
    return _WRAPPERS.sub("", module)


def _once(table: dict[str, Origin], key: str, origin: Origin) -> None:
    if key in table:
        raise ValueError(f"{origin.name} and {table[key].name} mean the same tensor")
    table[key] = origin


# ----------------------------------------------------------------------------------------------------------- strength


def scale_of(config: Mapping[str, Any], module: str) -> tuple[float, int]:
    """Return (what B·A is multiplied with, rank) of a module by the config's patterns. Raises ValueError.

    The division is made once in double precision, as PEFT does it.
    """
    rank = _looked_up(config, "rank_pattern", module, config.get("r"))
    alpha = _looked_up(config, "alpha_pattern", module, peft_config.alpha_of(config))
    alpha = 8 if alpha is None else alpha  # what PEFT takes where nothing is stated
    if rank is None or rank <= 0 or rank != int(rank):
        raise ValueError(f"the rank of {module} is not stated")
    return (alpha / math.sqrt(rank) if config.get("use_rslora") is True else alpha / rank), int(rank)


def _looked_up(config: Mapping[str, Any], field: str, module: str, otherwise: Any) -> int | float | None:
    for pattern, value in peft_config.patterns(config, field).items():
        verdict = keys.matches(rf"(.*\.)?({pattern})", module)
        if verdict is None:
            raise ValueError(f"the pattern {pattern!r} of {field} is not tried: it could run for ever")
        if verdict:
            return value
    return peft_config.number(otherwise)


def token_indices(config: Mapping[str, Any], module: str) -> list[int] | None:
    """Return the rows that the trained tokens of an embedding belong to."""
    value = config.get("trainable_token_indices")
    if value is None:
        value = config.get("token_indices")
    if isinstance(value, dict):
        value = next((v for k, v in value.items() if module == k or module.endswith("." + str(k))), None)
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return value


def needs_peft(config: Mapping[str, Any]) -> str | None:
    """Return what in a config only the layers of PEFT itself can merge, None where blocks of rows suffice."""
    peft_type = str(config.get("peft_type") or "").upper()
    if peft_type not in STREAMED:
        return peft_type
    return next((name for field, name in _OTHER_PRODUCTS.items() if config.get(field)), None)


def by_peft(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether PEFT itself makes this merge: a type of its layers, or DoRA among several adapters.

    DoRA scales what base and matrices add up to, so that with another adapter there is no sum to be rounded once.
    """
    return any(map(needs_peft, configs)) or (len(configs) > 1 and any(one.get("use_dora") for one in configs))


# ----------------------------------------------------------------------------------------------------------- refusals


def refusals(config: Mapping[str, Any], subject: str) -> list[Finding]:
    """Return what in an adapter's config forbids the merge, or this way of merging, in the words of docs/merging.md."""
    peft_type = str(config.get("peft_type") or "").upper()
    found: list[Finding] = []
    kind = KINDS.get(peft_type)
    if peft_type in _NOT_WEIGHTS or (kind is not None and kind.prompt):
        return [_impossible(subject, f"{peft_type} is not expressible as weights: it acts beside them")]
    if kind is None:
        return [
            findings.finding(
                "merge-not-streamed",
                subject,
                f"{peft_type or 'an adapter without a type'} is not known here: neither we nor PEFT can merge it",
                "merge it with the tool it was trained with, and publish the result",
                peft_type=peft_type or None,
            )
        ]
    found += [_impossible(subject, why) for field, why in _ROUTED.items() if config.get(field)]
    if config.get("layer_replication"):
        found.append(
            findings.finding(
                "merge-layers-replicated",
                subject,
                "layer_replication lets one layer of the base stand for several, each with matrices of its own: merged "
                "into the base as it is, they would all fall on one",
                "expand the base's layers first, then merge",
                mergeable=False,
            )
        )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and _CHANGES_BASE.fullmatch(init):
        found.append(
            findings.finding(
                "merge-base-changed",
                subject,
                f"the adapter was started with {init}, which changed the base: added to the untouched base it computes "
                "something else",
                "save it again with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
                base_mutated_at_init=True,
                mergeable=False,
            )
        )
    for field, name in _LEGACY.items():
        if config.get(field):
            found.append(
                findings.finding(
                    "merge-not-streamed",
                    subject,
                    f"{name} ({field}) multiplies its matrices in another way, which today's PEFT does not know",
                    "merge it with the PEFT it was trained with, and publish the result",
                )
            )
    return found


def alone(config: Mapping[str, Any], subject: str) -> list[Finding]:
    """Return why an adapter cannot be summed with others before the one rounding."""
    name = needs_peft(config)
    if name is None:
        return []
    return [
        findings.finding(
            "merge-not-streamed",
            subject,
            f"{name} is merged by PEFT itself, one adapter at a time, and not summed with others",
            "merge the adapters one after the other, with --dtype fp32 until the last",
        )
    ]


def _impossible(subject: str, why: str) -> Finding:
    return findings.finding(
        "merge-impossible",
        subject,
        f"{why}; there is nothing to merge",
        "serve the adapter beside its base",
        mergeable=False,
    )


def computable(origin: Origin) -> bool:
    """Return whether a tensor's dtype is one the arithmetic handles."""
    return origin.dtype in WIDTH
