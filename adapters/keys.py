"""Take the keys of an adapter file apart: module, LoRA part, adapter name, wrapper segments, prefix.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    |--- prefix ---||------------ module ----------| |-part-| rest

PEFT loads by exact name and ignores, without a word, whatever does not match; so a key in another form is a finding.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from weighbridge.adapters import patterns
from weighbridge.adapters.peft_types import KINDS, LEGACY_KINDS

PREFIX: Final = "base_model.model."
WRAPPERS: Final = (
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
    "_forward_module.",
    "_ddp_params_and_buffers.",
)
"""Segments that torch's wrappers put anywhere into a name."""

_LORA = re.compile(
    r"(?:(?P<module>.*)\.)?(?P<part>lora_(?:A|B|a(?=\.weight$)|b(?=\.weight$)|E|ranknum|embedding_A|embedding_B|magnitude_vector|bias))(?:\.(?P<rest>.+))?"
)
_TOKENS = re.compile(r"(?:(?P<module>.*)\.)?(?:token_adapter\.)?trainable_tokens_(?:delta|original)(?:\.(?P<rest>.+))?")
_TAILS: Final = frozenset({"weight", "bias"})
_PLAIN: Final = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_E", "lora_ranknum"})
_OUTER: Final = ("module.", "model.base_model.", "_orig_mod.", "base_model.base_model.", "student.", "policy.")


class Key(NamedTuple):
    """One key of an adapter file; `part` is empty for a whole saved weight, `module` has no prefix."""

    name: str
    module: str
    part: str
    tail: str
    adapter: str
    """The adapter's name where the key holds it, which PEFT takes out on saving."""
    wrapper: str
    """The segment that must be taken out, with its dot."""
    prefixed: bool


def parse(name: str, prefix: str = "lora_") -> Key:
    """Return the parts of a key; `prefix` begins the parameters of the adapter's type."""
    wrapper = next((segment for segment in WRAPPERS if _has(name, segment)), "")
    plain = name
    for segment in WRAPPERS:
        plain = _without(plain, segment)
    prefixed = plain.startswith(PREFIX)
    if not prefixed:
        for outer in _OUTER:
            if plain.startswith(outer) and plain[len(outer) :].startswith("base_model."):
                wrapper, plain, prefixed = wrapper or outer, plain[len(outer) :], True
                break
    twice = PREFIX + PREFIX
    if plain.startswith(twice):
        wrapper, plain = wrapper or PREFIX, plain[len(PREFIX) :]
    module_path = plain.removeprefix(PREFIX)
    part, tail, adapter, module = _split(module_path, prefix)
    return Key(name, module, part, tail, adapter, wrapper, prefixed)


def _split(path: str, prefix: str) -> tuple[str, str, str, str]:
    """Return (part, tail, adapter name, module)."""
    match = _LORA.fullmatch(path)
    if match is not None:
        module, part, rest = match["module"] or "", match["part"], match["rest"] or ""
        segments = rest.split(".") if rest else []
        tail = segments.pop() if segments and segments[-1] in _TAILS else ""
        return part, tail, ".".join(segments), module
    match = _TOKENS.fullmatch(path)
    if match is not None:
        return "trainable_tokens", "", match["rest"] or "", match["module"] or ""
    if prefix != "lora_":
        segments = path.split(".")
        for at, segment in enumerate(segments):
            if segment.startswith((prefix, prefix.split("_", maxsplit=1)[0] + "_")):
                return segment, ".".join(segments[at + 1 :]), "", ".".join(segments[:at])
    return "", path.rpartition(".")[2], "", path.rpartition(".")[0]


def is_canonical(key: Key) -> bool:
    """Return whether a LoRA key is in the form PEFT writes."""
    if key.wrapper or key.adapter or not key.prefixed or not key.part:
        return False
    return bool(key.tail) or key.part in _PLAIN or not key.part.startswith("lora_")


def parameter_prefix(peft_type: str) -> str:
    """Return the prefix of a type's parameters, `lora_` for an unknown type."""
    kind = KINDS.get(peft_type)
    return kind.prefix if kind else LEGACY_KINDS.get(peft_type, "lora_")


def is_lora(names: Iterable[str]) -> bool:
    """Return whether some keys look like a LoRA of PEFT's making."""
    return any(".lora_A." in f".{name}." or "lora_embedding_A" in name for name in names)


def is_torchtune(names: Iterable[str]) -> bool:
    """Return whether some keys are those of a LoRA in torchtune's own form: `layers.0.attn.q_proj.lora_a.weight`."""
    return any(name.endswith((".lora_a.weight", ".lora_b.weight")) for name in names)


def matches(pattern: str, module: str) -> bool | None:
    """Return whether a regular expression of a config covers a module's whole path; None where it is not tried."""
    return patterns.pattern(pattern).matches(module)


def _has(name: str, segment: str) -> bool:
    return name.startswith(segment) or f".{segment}" in name


def _without(name: str, segment: str) -> str:
    return name.removeprefix(segment).replace(f".{segment}", ".")
