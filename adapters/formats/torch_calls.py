"""How an inert machine answers the calls of a torch pickle: tensors become descriptions, the rest stays a record."""

import struct
from collections.abc import Callable
from typing import Any, Final

from weighbridge.adapters.formats.deck import GLOBAL_LIMIT, Deck
from weighbridge.adapters.formats.inert import Blob, Call, RawTensor, Record, Symbol
from weighbridge.adapters.formats.protocol import RANK_LIMIT

_NUMPY: Final = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b",
    "u8": "<Q", "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip


def answers(deck: Deck) -> dict[str, Call]:
    """Return the answers by full name; those that copy pay from this deck's budget."""

    def scalar(full: str) -> Call:
        return lambda args: _scalar(deck, full, args)

    def table(args: Any) -> Any:
        return _dict(deck, args)

    return {
        **_PURE,
        "collections.OrderedDict": table,
        "collections.Counter": table,
        "collections.defaultdict": lambda args: _dict(deck, args[1:]),
        "_codecs.encode": lambda args: _encode(deck, args),
        "builtins.bytes": _bytes,
        "copyreg._reconstructor": _new,
        "copyreg.__newobj__": _new,
        "copyreg.__newobj_ex__": _new,
        "builtins.getattr": lambda args: _attribute(deck, args),
        "numpy.core.multiarray.scalar": scalar("numpy.core.multiarray.scalar"),
        "numpy._core.multiarray.scalar": scalar("numpy._core.multiarray.scalar"),
    }


def _tensor(args: Any) -> Any:
    return RawTensor(args[0], args[1], args[2], args[3])


def _tensor_v2(args: Any) -> Any:
    if len(args) > 6 and args[6]:
        return RawTensor(args[0], args[1], args[2], args[3], None, _flags(args[6]))
    return RawTensor(args[0], args[1], args[2], args[3])


def _tensor_v3(args: Any) -> Any:
    return RawTensor(args[0], args[1], args[2], args[3], args[6], _flags(args[7]) if len(args) > 7 else None)


def _flags(metadata: Any) -> str | None:
    """Return why the bytes are not the numbers: a tensor that is conjugated or negated when it is read."""
    if isinstance(metadata, dict):
        set_flags = [name for name in ("conj", "neg") if metadata.get(name)]
        return f"{set_flags[0]} view" if set_flags else None
    return None


def _first(args: Any) -> Any:
    return args[0] if args else Record(Symbol("torch.nn.parameter", "Parameter"), args)


def _size(args: Any) -> Any:
    sizes = args[0] if args else ()
    if not isinstance(sizes, (tuple, list)) or len(sizes) > RANK_LIMIT:
        raise ValueError("torch.Size is called with something else than sizes")
    return tuple(sizes)


def _sparse(args: Any) -> Any:
    layout, parts = args
    layout = str(layout).removeprefix("torch.")[:40]
    values, size = (parts[1], parts[2]) if layout == "sparse_coo" else (parts[2], parts[3])
    tensor = RawTensor(None, 0, size, None, values.dtype if isinstance(values, RawTensor) else None, layout)
    if isinstance(values, RawTensor):
        tensor.storage = values.storage
    return tensor


def _quantized(args: Any) -> Any:
    return RawTensor(args[0], args[1], args[2], args[3], None, "quantized")


def _meta(args: Any) -> Any:
    return RawTensor(None, 0, args[1], args[2], args[0], "meta")


def _nested(args: Any) -> Any:
    return RawTensor(None, 0, (), (), args[0].dtype if isinstance(args[0], RawTensor) else None, "nested")


def _wrapper(args: Any) -> Any:
    name = args[0].full if isinstance(args[0], Symbol) else "tensor subclass"
    return RawTensor(None, 0, args[2], args[3], args[1], name)


def _device(args: Any) -> Any:
    data = args[0]
    if not isinstance(data, RawTensor):
        return RawTensor(None, 0, (), (), args[1], "numpy array inside the pickle")
    if isinstance(args[1], Symbol) and data.dtype is None:
        data.dtype = args[1]
    return data


def _numpy_device(args: Any) -> Any:
    return RawTensor(None, 0, (), (), args[1], "numpy array inside the pickle")


def _subclass(args: Any) -> Any:
    rebuild, kind, inner = args[0], args[1], args[2]
    if isinstance(rebuild, Symbol) and rebuild.full in _TENSORS and isinstance(inner, tuple):
        rebuild.called = True
        tensor = _TENSORS[rebuild.full](inner)
        name = kind.full if isinstance(kind, Symbol) else "tensor subclass"
        plain = name in {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
        if isinstance(tensor, RawTensor) and not plain:
            tensor.special = tensor.special or name
        return tensor
    return Record(Symbol("torch._tensor", "_rebuild_from_type_v2"), args)


_TENSORS: Final[dict[str, Callable[[Any], Any]]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device,
    "torch._utils._rebuild_device_tensor_from_numpy": _numpy_device,
    "torch._utils._rebuild_xla_tensor": _numpy_device,
}

_PURE: Final[dict[str, Call]] = {
    **_TENSORS,
    "torch.nn.parameter.Parameter": _first,
    "torch._tensor._rebuild_from_type": _subclass,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Size": _size,
    "torch.serialization._get_layout": lambda args: str(args[0])[:40],
}


def _dict(deck: Deck, args: Any) -> Any:
    """OrderedDict(), OrderedDict(pairs) of old protocols, Counter(counts)."""
    table: dict[Any, Any] = {}
    if args and args[0] is not None:
        given = args[0]
        if isinstance(given, dict):
            deck.charge(100 * len(given))
            table.update(given)
        elif isinstance(given, (list, tuple)):
            deck.charge(100 * len(given))
            flat: list[Any] = []
            for pair in given:
                key, value = pair
                flat += (key, value)
            deck.put(table, flat)
        else:
            raise ValueError("a dict is made of something that has no pairs")
    return table


def _bytes(args: Any) -> Any:
    """Return no bytes, which old protocols store as a call without arguments."""
    return Record(Symbol("builtins", "bytes"), args) if args else b""


def _new(args: Any) -> Any:
    """Copyreg's helpers make an object of the class they are given: that class is what is called."""
    if args and isinstance(args[0], Symbol):
        args[0].called = True
        return Record(args[0], args[1:])
    return Record(Symbol("copyreg", "_reconstructor"), args)


def _encode(deck: Deck, args: Any) -> Any:
    """How bytes are stored in old protocols: as a text of one character per byte."""
    text = args[0]
    if isinstance(text, Blob):
        return text
    if not isinstance(text, str):
        raise TypeError("_codecs.encode is called with something else than a text")
    deck.charge(len(text) + 50)
    return text.encode("latin1", "replace")


def _attribute(deck: Deck, args: Any) -> Any:
    """getattr(Class, "name") is how old protocols store an enum's member or a nested class."""
    if len(args) == 2 and isinstance(args[0], Symbol) and isinstance(args[1], str):
        name = f"{args[0].name}.{args[1]}"
        if len(name) <= GLOBAL_LIMIT:
            return deck.symbol(args[0].module, name)
    deck.strange("looks up attributes of something that is no class")
    return Record(deck.symbol("builtins", "getattr"), args)


def _scalar(deck: Deck, full: str, args: Any) -> Any:
    """Return the number that a numpy scalar is, where its type is a plain one."""
    if len(args) == 2 and isinstance(args[0], Record) and isinstance(args[1], bytes):
        code = args[0].args[0] if isinstance(args[0].args, tuple) and args[0].args else None
        layout = _NUMPY.get(code) if isinstance(code, str) else None
        order = args[0].state[1] if isinstance(args[0].state, tuple) and len(args[0].state) > 1 else "<"
        if layout and struct.calcsize(layout) == len(args[1]):
            return struct.unpack((">" if order == ">" else "<") + layout[1], args[1])[0]
    module, _, name = full.rpartition(".")
    return Record(deck.symbol(module, name), args)
