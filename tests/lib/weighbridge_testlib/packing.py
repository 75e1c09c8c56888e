"""Packed linear layers as quantizers write them, without a byte of theirs: names, dtypes and shapes of each method.

layer(Gptq(bits=3, group=32), "model.layers.0.mlp.up_proj", 96, 64)   {name: spec}, which stand for 96 * 64 weights
"""

from typing import Any, NamedTuple

from weighbridge_testlib.builders import TensorSpec


class Method(NamedTuple):
    """A way of packing: its name in a config, the bits of a weight, weights that share a scale, and a variant."""

    name: str
    bits: int
    group: int
    twist: str = ""


def config(method: Method) -> dict[str, Any]:
    """Return what config.json says of a model packed like this."""
    if method.name == "mlx":
        return {"quantization": {"group_size": method.group, "bits": method.bits}}
    table: dict[str, Any] = {"quant_method": method.name}
    if method.name == "bitsandbytes":
        table |= {f"load_in_{method.bits}bit": True}
    elif method.name == "compressed-tensors":
        kind = "float" if method.twist in {"float", "nvfp4"} else "int"
        weights = {"num_bits": method.bits, "type": kind, "group_size": method.group}
        table |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "format": method.twist}
    elif method.name in {"gptq", "awq"}:
        table |= {"bits": method.bits, "group_size": method.group}
    return {"quantization_config": table}


def layer(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    """Return the tensors of one layer with `inner` inputs and `outer` outputs."""
    return _MAKERS[method.name](method, stem, inner, outer)


def words(count: int, bits: int) -> int:
    """Return the 32-bit words that hold some weights, the last one padded."""
    return -(-count * bits // 32)


def _gptq(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    groups = -(-inner // method.group)
    tensors: dict[str, TensorSpec] = {
        f"{stem}.qweight": ("I32", (words(inner, method.bits), outer), None),
        f"{stem}.qzeros": ("I32", (groups, words(outer, method.bits)), None),
        f"{stem}.scales": ("F16", (groups, outer), 1.0),
    }
    if method.twist != "no-order":
        tensors[f"{stem}.g_idx"] = ("I32", (inner,), None)
    return tensors


def _awq(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    groups = inner // method.group
    return {
        f"{stem}.qweight": ("I32", (inner, words(outer, method.bits)), None),
        f"{stem}.qzeros": ("I32", (groups, words(outer, method.bits)), None),
        f"{stem}.scales": ("F16", (groups, outer), 1.0),
    }


def _mlx(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    return {
        f"{stem}.weight": ("U32", (outer, inner * method.bits // 32), None),
        f"{stem}.scales": ("BF16", (outer, inner // method.group), 1.0),
        f"{stem}.biases": ("BF16", (outer, inner // method.group), 0.0),
    }


def _bitsandbytes(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    if method.bits == 8:
        return {
            f"{stem}.weight": ("I8", (outer, inner), None),
            f"{stem}.SCB": ("F32", (outer,), 1.0),
            f"{stem}.weight_format": ("U8", (), None),
        }
    blocks = -(-inner * outer // method.group)
    tensors: dict[str, TensorSpec] = {
        f"{stem}.weight": ("U8", (inner * outer // 2, 1), None),
        f"{stem}.weight.quant_map": ("F32", (16,), 1.0),
        f"{stem}.weight.quant_state.bitsandbytes__nf4": ("U8", (78,), None),
    }
    if method.twist != "nested":
        return tensors | {f"{stem}.weight.absmax": ("F32", (blocks,), 1.0)}
    return tensors | {
        f"{stem}.weight.absmax": ("U8", (blocks,), None),
        f"{stem}.weight.nested_absmax": ("F32", (-(-blocks // 256),), 1.0),
        f"{stem}.weight.nested_quant_map": ("F32", (256,), 1.0),
    }


def _compressed(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    groups = -(-inner // method.group)
    scale: dict[str, TensorSpec] = {f"{stem}.weight_scale": ("BF16", (outer, groups), 1.0)}
    if method.twist == "pack-quantized":
        shape = outer.to_bytes(8, "little") + inner.to_bytes(8, "little")
        return scale | {
            f"{stem}.weight_packed": ("I32", (outer, words(inner, method.bits)), None),
            f"{stem}.weight_shape": ("I64", (2,), shape),
            f"{stem}.weight_zero_point": ("I32", (words(outer, method.bits), groups), None),
        }
    if method.twist == "nvfp4":
        return {
            f"{stem}.weight_packed": ("U8", (outer, inner // 2), None),
            f"{stem}.weight_scale": ("F8_E4M3", (outer, groups), None),
            f"{stem}.weight_global_scale": ("F32", (1,), 1.0),
            f"{stem}.input_global_scale": ("F32", (1,), 1.0),
        }
    dtype = "F8_E4M3" if method.twist == "float" else "I8"
    return scale | {f"{stem}.weight": (dtype, (outer, inner), None), f"{stem}.input_scale": ("BF16", (1,), 1.0)}


def _fp8(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    blocks = (-(-outer // method.group), -(-inner // method.group))
    return {
        f"{stem}.weight": ("F8_E5M2" if method.twist == "e5m2" else "F8_E4M3", (outer, inner), None),
        f"{stem}.weight_scale_inv": ("F32", blocks, 1.0),
    }


def _mxfp4(method: Method, stem: str, inner: int, outer: int) -> dict[str, TensorSpec]:
    return {
        f"{stem}_blocks": ("U8", (outer, inner // method.group, method.group // 2), None),
        f"{stem}_scales": ("U8", (outer, inner // method.group), None),
    }


_MAKERS = {
    "gptq": _gptq,
    "awq": _awq,
    "mlx": _mlx,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
