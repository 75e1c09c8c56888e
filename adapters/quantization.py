"""Is a model quantized, how, and with how many bits: from its config and, where that is old, from a file beside it."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_BITS_FIELDS: Final = ("bits", "w_bit", "weight_bits", "num_bits", "nbits")
_BY_METHOD: Final = {"mxfp4": 4, "nvfp4": 4, "fp8": 8, "fbgemm_fp8": 8, "finegrained_fp8": 8, "eetq": 8, "bitnet": 2}
_IN_NAME = re.compile(r"(?:int|uint|nf|fp|w)([1-8])")


class Quantization(NamedTuple):
    """How weights are said to be packed; `bits` None where nothing states them."""

    method: str
    bits: int | None
    field: str
    """Where it is said: a field of config.json or a file."""


def of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Quantization | None:
    """Return how a model says it is quantized; `beside` is quantize_config.json where there is one."""
    for field in ("quantization_config", "compression_config"):
        table = config.get(field) or _text(config).get(field)
        if isinstance(table, dict) and table:
            method = table.get("quant_method")
            if not isinstance(method, str):
                mlx = "group_size" in table and "bits" in table
                bnb = table.get("load_in_4bit") or table.get("load_in_8bit")
                method = "bitsandbytes" if bnb else "mlx" if mlx else "unknown"
            return Quantization(method.lower(), _bits(table, method.lower()), field)
    own = config.get("quantization")
    if isinstance(own, dict) and "group_size" in own:
        return Quantization("mlx", _bits(own, "mlx"), "quantization")
    # AutoGPTQ wrote bits and group_size; a file of the same name by Optimum's ONNX export has neither.
    if beside is not None and _number(beside.get("bits")) and "group_size" in beside:
        return Quantization("gptq", _bits(beside, "gptq"), "quantize_config.json")
    return None


def by_module(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the bits of modules that MLX packs otherwise than the rest: its table has an entry of theirs by name."""
    table = config.get("quantization") or config.get("quantization_config")
    if not isinstance(table, dict):
        return {}
    return {
        str(name): value
        for name, own in table.items()
        if isinstance(own, dict) and (value := _number(own.get("bits"))) is not None
    }


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _bits(table: Mapping[str, Any], method: str) -> int | None:
    for field in _BITS_FIELDS:
        value = _number(table.get(field))
        if value:
            return value
    if table.get("load_in_4bit") is True:
        return 4
    if table.get("load_in_8bit") is True:
        return 8
    groups = table.get("config_groups")
    if isinstance(groups, dict):
        told = {
            _number(weights.get("num_bits"))
            for group in groups.values()
            if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict)
        }
        if told - {None}:
            return told.pop() if len(told) == 1 else None  # mixed: no one number is true
    if method in _BY_METHOD:
        return _BY_METHOD[method]
    for field in ("quant_type", "format", "weights", "quant_algo"):
        match = _IN_NAME.search(str(table.get(field, "")).lower())
        if match:
            return int(match[1])
    return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 16 else None
