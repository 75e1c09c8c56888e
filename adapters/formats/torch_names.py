"""The names a torch file may hold: storages, dtypes in safetensors' spelling, and what torch's safe loading allows."""

from typing import Any, Final, NamedTuple


class Kind(NamedTuple):
    """An element type of torch: our name, bytes of one element, and why safetensors cannot hold it, if so."""

    dtype: str
    size: int
    unsupported: str | None = None


DTYPES: Final[dict[str, Kind]] = {
    "float64": Kind("F64", 8),
    "float32": Kind("F32", 4),
    "float16": Kind("F16", 2),
    "bfloat16": Kind("BF16", 2),
    "int64": Kind("I64", 8),
    "int32": Kind("I32", 4),
    "int16": Kind("I16", 2),
    "int8": Kind("I8", 1),
    "uint8": Kind("U8", 1),
    "bool": Kind("BOOL", 1),
    "uint16": Kind("U16", 2),
    "uint32": Kind("U32", 4),
    "uint64": Kind("U64", 8),
    "float8_e4m3fn": Kind("F8_E4M3", 1),
    "float8_e5m2": Kind("F8_E5M2", 1),
    "float8_e4m3fnuz": Kind("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": Kind("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": Kind("F8_E8M0", 1),
    "float4_e2m1fn_x2": Kind("F4", 1),
    "complex64": Kind("C64", 8),
    "complex32": Kind("C32", 4, "complex32"),
    "complex128": Kind("C128", 16, "complex128"),
    "qint8": Kind("I8", 1, "qint8"),
    "quint8": Kind("U8", 1, "quint8"),
    "qint32": Kind("I32", 4, "qint32"),
    "quint4x2": Kind("U8", 1, "quint4x2"),
    "quint2x4": Kind("U8", 1, "quint2x4"),
    "bits8": Kind("U8", 1, "bits8"),
    "bits16": Kind("U16", 2, "bits16"),
    "bits1x8": Kind("U8", 1, "bits1x8"),
    "bits2x4": Kind("U8", 1, "bits2x4"),
    "bits4x2": Kind("U8", 1, "bits4x2"),
    **{f"{sign}int{bits}": Kind("U8", 1, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)},
}
"""By the name after `torch.`."""

STORAGES: Final[dict[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
"""Dtype of every storage class; an untyped storage is counted in bytes."""

STORAGE_MODULES: Final = ("torch", "torch.cuda", "torch.storage", "torch.xpu", "torch.npu", "torch.mlu")

_TENSORS: Final = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")

TENSOR_CLASSES: Final = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.tensor.Tensor", "torch.nn.parameter.Parameter"}
    | {f"{module}.{name}Tensor" for module in ("torch", "torch.cuda") for name in _TENSORS}
)
"""Classes whose objects are tensors."""

_REBUILDS: Final = (
    "parameter", "parameter_with_state", "qtensor", "tensor", "tensor_v2", "tensor_v3", "sparse_tensor",
    "meta_tensor_no_storage", "nested_tensor", "wrapper_subclass", "device_tensor_from_numpy",
    "device_tensor_from_cpu_tensor",
)  # fmt: skip

TORCH_ALLOWED: Final = frozenset(
    {f"torch.{name}" for name in DTYPES}
    | {f"{module}.{name}" for module in ("torch", "torch.cuda") for name in STORAGES if name != "UntypedStorage"}
    | {"torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
    | {f"torch._utils._rebuild_{name}" for name in _REBUILDS}
    | (TENSOR_CLASSES - {"torch._tensor.Tensor", "torch.tensor.Tensor"})
    | {f"torch.{place}.{name}Tensor" for place in ("sparse", "cuda.sparse") for name in _TENSORS if name != "Bool"}
    | {f"torch.per_{part}" for part in ("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric")}
    | {"torch.per_channel_affine_float_qparams", "torch._tensor._rebuild_from_type_v2"}
    | {"torch.Size", "torch.device", "torch.serialization._get_layout"}
)
"""What torch's safe loading allows of torch itself."""

SAFE_LOADING: Final = (
    TORCH_ALLOWED
    | {"collections.OrderedDict", "collections.Counter"}
    | {"_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex"}
)
"""Everything that torch's safe loading allows."""


def kind_of(dtype: Any) -> Kind | None:
    """Return the kind of a torch dtype by its full name."""
    return DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
