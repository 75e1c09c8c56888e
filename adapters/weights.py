"""What a set of tensors amounts to: tensors, parameters, bytes, dtypes, and the logical size of packed weights."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.registry.types import DtypeCount, Finding, WeightsFacts

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
CONFIG_DTYPES: Final = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "half": "F16"}
_SIDE = re.compile(
    r"\.(?:scales?|qzeros|g_idx|qweight_scale|weight_(?:scale|scale_inv|scale_2|zero_point|shape|g_idx|format)"
    r"|(?:input|output|k|v|q|act)_(?:scale|zero_point)|SCB|absmax|quant_map|nested_absmax|nested_quant_map"
    r"|quant_state(?:\..*)?|perm|biases)$"
    r"|\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)$"
    r"|_scales$|\.zeros$"
)


@dataclass(frozen=True)
class WeightSet:
    """The weights of a folder as they would be published; `tensors` holds each one once, from the file that owns it."""

    files: tuple[str, ...]
    """Paths of the weight files that are there, sorted."""
    index: str | None
    tensors: dict[str, Tensor]
    owners: dict[str, str]
    facts: dict[str, Any]
    findings: list[Finding]
    copies: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Weight files that are neither: side files, unknown ones."""
    metadata: dict[str, str] | None = None
    sound: bool = True
    """Every file of the set is there and whole."""


def histogram(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    """Return {dtype: {tensors, params}} of stored elements."""
    table: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = table.setdefault(tensor.dtype, {"tensors": 0, "params": 0})
        row["tensors"] += 1
        row["params"] += tensor.elements
    return table


def main_dtype(tensors: Iterable[Tensor]) -> str | None:
    """Return the dtype that holds most bytes."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether some weights are stored below 16 bits or packed into integers."""
    return any(_logical(tensor, None, tensors) is not None for tensor in tensors.values())


def parameters(tensors: Mapping[str, Tensor], *, bits: int | None = None, packed: bool = False) -> int:
    """Return the number of parameters: for packed weights the logical one, without scales, zeros and indices."""
    if not packed:
        return sum(tensor.elements for tensor in tensors.values())
    total = 0
    for tensor in tensors.values():
        if not is_side(tensor, tensors):
            logical = _logical(tensor, bits, tensors)
            total += tensor.elements if logical is None else logical
    return total


def is_side(tensor: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is a scale, a zero point, an index or other help of packed weights."""
    if tensor.dtype == "F8_E8M0" or _SIDE.search(tensor.name) is None:
        return tensor.dtype == "F8_E8M0"
    if tensor.name.endswith(".biases"):
        return tensor.name.removesuffix(".biases") + ".scales" in tensors
    return True


def _logical(tensor: Tensor, bits: int | None, tensors: Mapping[str, Tensor]) -> int | None:
    """Return how many weights a packed tensor holds, None for a plain one; without `bits` the stored elements."""
    if tensor.dtype in FLOATS or is_side(tensor, tensors):
        return None
    stem, _, last = tensor.name.rpartition(".")
    if tensor.dtype in {"I32", "U32"}:
        if last not in {"qweight", "weight_packed"} and f"{stem}.scales" not in tensors:
            return None
        return tensor.elements * 32 // bits if bits else tensor.elements
    if tensor.dtype == "U8":
        blocks = last.endswith("_blocks") or last in {"weight", "qweight", "weight_packed"}
        return tensor.elements * 8 // (bits if bits and bits < 8 else 4) if blocks else None
    if tensor.dtype == "I8" or tensor.dtype.startswith(("F8_E4M3", "F8_E5M2", "F4", "F6")):
        return tensor.elements
    return None


def summary(
    tensors: Mapping[str, Tensor], *, bits: int | None = None, packed: bool = False, shards: int = 1
) -> tuple[dict[str, Any], WeightsFacts]:
    """Return the tensor facts of a set under their fact names, and the same for a manifest."""
    table = histogram(tensors.values())
    count = parameters(tensors, bits=bits, packed=packed)
    size = sum(tensor.size for tensor in tensors.values())
    facts = {
        "tensor_count": len(tensors),
        "param_count": count,
        "payload_bytes": size,
        "dtype_histogram": table,
    }
    weights = WeightsFacts(
        format="safetensors",
        shards=shards,
        tensors=len(tensors),
        parameters=count,
        bytes=size,
        dtypes={dtype: DtypeCount(tensors=row["tensors"], parameters=row["params"]) for dtype, row in table.items()},
    )
    return facts, weights
