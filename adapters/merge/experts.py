"""Experts of a mixture: one file tensor for each, or all in one; matrices for each, or all in one pair.

    file      experts.3.gate_proj.weight [I, H]    or   experts.gate_up_proj [E, 2I, H], experts.down_proj [E, H, I]
    adapter   experts.3.gate_proj.lora_A [r, H]    or   experts.base_layer.lora_A [E*r, H], experts.lora_A [E*r, I]

In the second form of the adapter the names of the parameters are not in the keys: the one that the model registers
first is wrapped innermost. lora_A counts the expert slowest, lora_B [out, E*r] counts it fastest. Whether a tensor is
stored [out, in] or [in, out] shows in its shape, where it is square in the family; what stays open is refused.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from weighbridge.adapters.merge.adapter import Part
from weighbridge.adapters.merge.names import Names
from weighbridge.adapters.merge.values import Factor, Origin

_REGISTERED: Final = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "down_proj", "down_proj_bias")
"""Parameters of expert modules in the order in which the models register them."""

_TRANSPOSED: Final = frozenset({"gpt_oss", "aria", "aria_text", "llama4", "llama4_text", "openai_privacy_filter"})
"""Families that store experts [in, out]."""

_HALVES: Final = ("gate_proj", "up_proj")


class Landing(NamedTuple):
    """A tensor of the base and a product that lands on it; `columns` is its width seen as a matrix."""

    target: str
    factor: Factor
    columns: int


class Refusal(NamedTuple):
    """Why the tensors of a module cannot be placed: a code of the findings, and a sentence."""

    code: str
    message: str
    data: Mapping[str, Any] = MappingProxyType({})


def parameter_of(part: Part, layers: int, config: Mapping[str, Any]) -> str | Refusal:
    """Return the name of the parameter that a wrapper of an expert module adapts, by the order of the wrappers."""
    listed = config.get("target_parameters")
    wanted = [str(name) for name in listed] if isinstance(listed, list) else []
    leaves = {name.rpartition(".")[2] for name in wanted}
    mine = [leaf for leaf in leaves if any(f".{part.module}.{leaf}".endswith("." + name) for name in wanted)]
    if not mine and layers == 2:
        mine = ["gate_up_proj", "down_proj"]  # an adapter of the older layout that PEFT has stacked
    known = [leaf for leaf in _REGISTERED if leaf in mine]
    if len(mine) != layers or (len(known) != layers and layers > 1):
        return Refusal(
            "merge-ambiguous",
            f"{part.module} has {layers} pairs of matrices; target_parameters ({', '.join(sorted(mine)) or 'none'}) do "
            "not tell which parameter each belongs to",
        )
    return (known or mine)[layers - 1 - part.layer]


class Onto(NamedTuple):
    """What the matrices of experts are placed on, and by which rules."""

    names: Names
    places: Mapping[str, Origin]
    config: Mapping[str, Any]
    """The adapter's."""
    model_type: str


def stacked(part: Part, leaf: str, scale: float, rank: int, onto: Onto) -> list[Landing] | Refusal:
    """Place the pair of matrices that holds all experts of one parameter."""
    assert part.a is not None
    assert part.b is not None
    names, places, config, model_type = onto
    a, b = part.a, part.b
    if len(a.shape) != 2 or len(b.shape) != 2:
        return Refusal("merge-shape-mismatch", f"the matrices of {part.module} are no matrices")
    fused = names.find(f"{part.module}.{leaf}").name
    if fused is not None and len(places[fused].shape) == 3:
        experts, first, second = places[fused].shape
    else:
        counted = _per_expert(part.module, leaf, names, places)
        if isinstance(counted, Refusal):
            return counted
        experts, first, second = counted
    if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
        return Refusal(
            "merge-shape-mismatch",
            f"{part.module}.{leaf}: {experts} experts of rank {rank} need {experts * rank} rows of lora_A, here are "
            f"{a.shape[0]}",
        )
    swap = _orientation((first, second), a.shape[1], b.shape[0], config, model_type)
    if isinstance(swap, Refusal):
        return Refusal(swap.code, f"{part.module}.{leaf}: {swap.message}", swap.data)
    common: dict[str, Any] = {"a": a, "b": b, "scale": scale, "swap": swap, "experts": experts}
    if fused is not None:
        return [Landing(fused, Factor(**common, expert=e, at=e * first, rows=first), second) for e in range(experts)]
    landings: list[Landing] = []
    for e in range(experts):
        if leaf != "gate_up_proj":
            name = names.find(f"{part.module}.{e}.{leaf}.weight").name
            assert name is not None
            landings.append(Landing(name, Factor(**common, expert=e, rows=first), second))
            continue
        for half, piece in enumerate(_HALVES):
            name = names.find(f"{part.module}.{e}.{piece}.weight").name
            assert name is not None
            landings.append(Landing(name, Factor(**common, expert=e, skip=half * first // 2, rows=first // 2), second))
    return landings


def single(part: Part, scale: float, onto: Onto) -> list[Landing] | None:
    """Place the matrices of one expert's own layer on a tensor that holds all experts; None: it is not that case."""
    assert part.a is not None
    assert part.b is not None
    names, places, _, model_type = onto
    plain = part.module.replace(".block_sparse_moe.", ".mlp.")
    stem, _, leaf = plain.rpartition(".")
    leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(leaf, leaf)
    owner, _, number = stem.rpartition(".")
    if not number.isdecimal() or not owner.endswith("experts") or model_type in _TRANSPOSED:
        return None
    fused = names.find(f"{owner}.{'gate_up_proj' if leaf in _HALVES else leaf}").name
    if fused is None or len(places[fused].shape) != 3 or int(number) >= places[fused].shape[0]:
        return None
    _, first, second = places[fused].shape
    rows = first // 2 if leaf in _HALVES else first
    if part.b.shape[0] != rows or part.a.shape[1] != second:
        return None
    at = int(number) * first + (rows if leaf == "up_proj" else 0)
    return [Landing(fused, Factor(a=part.a, b=part.b, scale=scale, at=at, rows=rows), second)]


def _per_expert(module: str, leaf: str, names: Names, places: Mapping[str, Origin]) -> tuple[int, int, int] | Refusal:
    """Return (experts, rows, columns) that a parameter would have, from the tensors of the single experts."""
    pieces = _HALVES if leaf == "gate_up_proj" else (leaf,)
    count = 0
    shapes: set[tuple[int, ...]] = set()
    while True:
        found = [names.find(f"{module}.{count}.{piece}.weight").name for piece in pieces]
        if None in found:
            break
        shapes |= {places[name].shape for name in found if name is not None}
        count += 1
    if not count:
        return Refusal("merge-target-missing", f"the base has no {module}.{leaf}")
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        return Refusal("merge-ambiguous", f"the experts of {module} have different shapes")
    rows, columns = next(iter(shapes))
    return count, rows * len(pieces), columns


def _orientation(
    stored: tuple[int, int], a_width: int, b_height: int, config: Mapping[str, Any], model_type: str
) -> bool | Refusal:
    """Return whether a parameter is stored [in, out], as seen from its matrices."""
    plain, swapped = stored == (b_height, a_width), stored == (a_width, b_height)
    if not plain and not swapped:
        return Refusal(
            "merge-shape-mismatch",
            f"the matrices need {[b_height, a_width]}, each expert has {list(stored)}",
            {"needs": [b_height, a_width], "has": list(stored)},
        )
    if plain and swapped:
        if model_type in _TRANSPOSED:
            return True
        if _version(config) < (0, 19):
            return Refusal(
                "merge-ambiguous",
                "it is square, and before PEFT 0.19 such parameters were read the other way round; the adapter does "
                "not say that a later version wrote it",
            )
        return False
    return swapped


def _version(config: Mapping[str, Any]) -> tuple[int, int]:
    digits = [part for part in str(config.get("peft_version") or "").split(".")[:2] if part.isdecimal()]
    return (int(digits[0]), int(digits[1])) if len(digits) == 2 else (0, 0)
