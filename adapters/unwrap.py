"""An adapter's tensors out of the state of a whole wrapped model, under the names of a PEFT adapter file.

What belongs to an adapter, and how its names are written, is `get_peft_model_state_dict` of peft 0.21: LoRA matrices
without the adapter's name, modules that were saved whole under the module's own name, biases where the config asks.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys

DEFAULT: Final = "default"
"""The adapter that is meant where a state holds several: the one PEFT makes unless somebody names another."""

_SAVED: Final = ".modules_to_save."
_LORA_TYPES: Final = frozenset({"LORA", "ADALORA", ""})


class Unwrapped(NamedTuple):
    """Name in the state -> name in the adapter's file; `problem` says why there is no such table."""

    names: dict[str, str]
    problem: str | None = None


def unwrap(names: Collection[str], config: Mapping[str, Any]) -> Unwrapped:
    """Return the adapter's tensors among some names; `config` is the adapter_config.json beside them."""
    kind = config.get("peft_type")
    if kind is not None and str(kind).upper() not in _LORA_TYPES:
        return Unwrapped({}, f"how a {kind} adapter is taken out of a whole checkpoint is not known")
    if keys.is_torchtune(names):
        return Unwrapped({}, "its names are torchtune's own (lora_a, lora_b), which PEFT does not read")
    parsed = {name: key for name in names if (key := keys.parse(name)).part}
    adapters = {key.adapter for key in parsed.values() if key.adapter}
    adapters |= {_adapter_of(name) for name in names if _SAVED in name}
    chosen = DEFAULT if DEFAULT in adapters else min(adapters, default="")
    if len(adapters) > 1 and chosen != DEFAULT:
        return Unwrapped({}, f"it holds several adapters ({', '.join(sorted(adapters))}), none of which is the default")
    table = {name: canonical(name) for name, key in parsed.items() if key.adapter in {chosen, ""}}
    for name in names:
        if _SAVED in name and _adapter_of(name) == chosen:
            head, _, rest = _plain(name).partition(_SAVED)
            table[name] = f"{keys.PREFIX}{head}.{rest.partition('.')[2]}"
    table |= _biases(names, parsed, str(config.get("bias") or "none"))
    twice = sorted(name for name, count in Counter(table.values()).items() if count > 1)
    if twice:
        return Unwrapped({}, f"two of its tensors would both be {twice[0]}")
    return Unwrapped(table)


def canonical(name: str) -> str:
    """Return an adapter's key as PEFT writes it: without wrappers and adapter name, with the prefix."""
    key = keys.parse(name)
    if not key.part:
        return name
    if key.part == "trainable_tokens":
        head, marker, rest = _plain(name).partition("trainable_tokens_")
        return f"{keys.PREFIX}{head}{marker}{rest.partition('.')[0]}"
    tail = f".{key.tail}" if key.tail and key.part != "lora_magnitude_vector" else ""
    return f"{keys.PREFIX}{key.module}.{key.part}{tail}"


def _biases(names: Collection[str], parsed: Mapping[str, keys.Key], asked: str) -> dict[str, str]:
    """Return the biases that were trained along: all of them, or those of the adapted layers."""
    if asked == "none":
        return {}
    copies = (_SAVED, ".original_module.")
    loose = [n for n in names if n.endswith(".bias") and n not in parsed and not any(part in n for part in copies)]
    found = {name: _plain(name) for name in loose}
    if asked == "lora_only":
        adapted = {f"{key.module}.bias" for key in parsed.values()}
        found = {name: plain for name, plain in found.items() if plain.replace(".base_layer.", ".") in adapted}
    return {name: keys.PREFIX + plain for name, plain in found.items()}


def _adapter_of(name: str) -> str:
    return name.partition(_SAVED)[2].partition(".")[0]


def _plain(name: str) -> str:
    """Return a name without wrappers and without PEFT's prefix."""
    key = keys.parse(name)
    plain = name
    for segment in keys.WRAPPERS:
        plain = plain.removeprefix(segment).replace(f".{segment}", ".")
    at = plain.find(keys.PREFIX) if key.prefixed else -1
    return plain[at + len(keys.PREFIX) :] if at >= 0 else plain
