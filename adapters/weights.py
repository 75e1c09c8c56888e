"""What a set of tensors amounts to: tensors, parameters, bytes, dtypes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.registry.types import DtypeCount, Finding, WeightsFacts

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
CONFIG_DTYPES: Final = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "half": "F16"}


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


def summary(tensors: Mapping[str, Tensor], *, shards: int = 1) -> tuple[dict[str, Any], WeightsFacts]:
    """Return the tensor facts of a set under their fact names, and the same for a manifest; each element counts."""
    table = histogram(tensors.values())
    count = sum(tensor.elements for tensor in tensors.values())
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
