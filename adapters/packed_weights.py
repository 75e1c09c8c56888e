"""How many weights packed tensors hold, read off the tensors that ride with them rather than off the bits of a config.

    GPTQ                  qweight (in*bits/32, out), scales (in/group, out), g_idx (in)
    AWQ                   qweight (in, out*bits/32), scales (in/group, out)
    compressed-tensors    weight_packed (out, in*bits/32), weight_shape = [out, in]; nvfp4: two weights a byte
    MLX                   weight (out, in*bits/32), scales (out, in/group), bits by module
    bitsandbytes          weight: two weights a byte, or int8 with SCB
    fp8                   weight as it is, with scales

A config gives one number of bits; mixed models pack each layer with its own, and rows are padded to whole words.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.reading import Reader
from weighbridge.adapters.weights import FLOATS, WeightSet
from weighbridge.adapters.whole import header_of

_SIDE = re.compile(
    r"\.(?:scales?|qzeros|g_idx|qweight_scale|weight_(?:scale|scale_inv|scale_2|zero_point|shape|g_idx|format)"
    r"|(?:weight|input|output|k|v|q)_global_scale|pre_quant_scale"
    r"|(?:input|output|k|v|q|act)_(?:scale|zero_point)|SCB|absmax|quant_map|nested_absmax|nested_quant_map"
    r"|quant_state(?:\..*)?|perm|biases)$"
    r"|\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)$"
    r"|\.weight\._(?:scale|shift)$|_scales$|\.zeros$"
)
_WORDS: Final = frozenset({"I32", "U32"})
_INTEGERS: Final = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_SHAPE: Final = ".weight_shape"
_RANK_LIMIT: Final = 8
_UNKNOWN: Final = -1


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether some weights are stored below 16 bits or packed into integers, in whatever way."""
    if {tensor.dtype for tensor in tensors.values()} <= set(FLOATS):
        return False  # most models, told without looking at each name
    if any(_logical(tensor, tensors, None, {}, {}) is not None for tensor in tensors.values()):
        return True
    return bool(_strange(tensors))


def _strange(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return modules without a weight whose integer matrices lie beside a float: some are another tool's packing."""
    codes = {n.rpartition(".")[0] for n, t in tensors.items() if t.dtype in _INTEGERS and len(t.shape) > 1}
    if not codes:
        return set()
    floats: set[str] = set()
    plain: set[str] = set()
    for name, tensor in tensors.items():
        if tensor.dtype in FLOATS:
            stem, _, last = name.rpartition(".")
            (plain if last == "weight" and len(tensor.shape) > 1 else floats).add(stem)
    return codes & (floats - plain)


def is_side(tensor: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is a scale, a zero point, an index or other help of packed weights."""
    if tensor.dtype == "F8_E8M0" or _SIDE.search(tensor.name) is None:
        return tensor.dtype == "F8_E8M0"
    if tensor.name.endswith(".biases"):
        return tensor.name.removesuffix(".biases") + ".scales" in tensors
    return True


def parameters(
    tensors: Mapping[str, Tensor], bits: int | None, modules: Mapping[str, int], stated: Mapping[str, int]
) -> int | None:
    """Return the logical number of weights, without scales, zeros and indices; None where no file tells it.

    `bits` are the config's and `modules` those of modules that differ; `stated` counts the weights of modules whose
    file says their shape (`shapes`). Nothing is guessed: one module of an unknown packing makes the number unknown.
    """
    total = 0
    strange = _strange(tensors)
    for tensor in tensors.values():
        if is_side(tensor, tensors):
            continue
        logical = _logical(tensor, tensors, bits, modules, stated)
        if logical is None and tensor.dtype in _INTEGERS and tensor.name.rpartition(".")[0] in strange:
            logical = _UNKNOWN
        if logical == _UNKNOWN:
            return None
        total += tensor.elements if logical is None else logical
    return total


def shapes(found: WeightSet, reader: Reader) -> dict[str, int]:
    """Return the elements of every module whose shape compressed-tensors keeps in `weight_shape`.

    Reads some 16 bytes a module. Raises OSError.
    """
    wanted: dict[str, list[str]] = {}
    for name, path in found.owners.items():
        if name.endswith(_SHAPE) and name in found.tensors:
            wanted.setdefault(path, []).append(name)
    stated: dict[str, int] = {}
    for path, names in wanted.items():
        header = header_of(reader.tree.files[path], reader)
        with Path(reader.tree.files[path].source).open("rb", buffering=0) as stream:
            for name in names:
                tensor = header.tensors.get(name)
                width = {"I64": 8, "I32": 4}.get(tensor.dtype) if tensor is not None else None
                if tensor is None or width is None or not 0 < tensor.elements <= _RANK_LIMIT:
                    continue
                stream.seek(header.data_start + tensor.begin)
                raw = stream.read(tensor.size)
                count = 1
                for at in range(0, len(raw), width):
                    count *= int.from_bytes(raw[at : at + width], "little", signed=True)
                if len(raw) == tensor.size and count > 0:
                    stated[name.removesuffix(_SHAPE)] = count
    return stated


def _logical(
    tensor: Tensor,
    tensors: Mapping[str, Tensor],
    bits: int | None,
    modules: Mapping[str, int],
    stated: Mapping[str, int],
) -> int | None:
    """Return how many weights a packed tensor holds, None for a plain one, _UNKNOWN where nothing tells it."""
    if tensor.dtype in FLOATS or is_side(tensor, tensors):
        return None
    stem, _, last = tensor.name.rpartition(".")
    own = modules.get(stem, bits)
    room = tensor.size * 8
    if last == "weight_packed" and 0 < stated.get(stem, 0) <= room:
        return stated[stem]
    if tensor.dtype in _WORDS:
        if last == "qweight":
            sides = _sides(tensor, stem, tensors)
            return sides if sides and sides <= room else room // own if own else _UNKNOWN
        if last != "weight_packed" and f"{stem}.scales" not in tensors:
            return None
        return room // own if own else _UNKNOWN
    if tensor.dtype == "U8":
        if last.endswith("_blocks") or f"{tensor.name}.absmax" in tensors:
            return room // (own if own and own < 8 else 4)  # mxfp4 and bitsandbytes keep two weights a byte
        if last in {"weight", "qweight", "weight_packed"}:
            return room // own if own else _UNKNOWN
        return None
    if tensor.dtype == "I8" or tensor.dtype.startswith(("F8_E4M3", "F8_E5M2", "F4", "F6")):
        return tensor.elements
    return None


def _sides(tensor: Tensor, stem: str, tensors: Mapping[str, Tensor]) -> int | None:
    """Return in * out of a GPTQ or AWQ matrix: the side that is not packed, and the other as its helpers have it."""
    scales, index = tensors.get(f"{stem}.scales"), tensors.get(f"{stem}.g_idx")
    if scales is None or len(scales.shape) != 2 or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    if columns == scales.shape[1]:
        return index.elements * columns if index is not None and len(index.shape) == 1 else None
    return rows * scales.shape[1] if columns < scales.shape[1] else None
