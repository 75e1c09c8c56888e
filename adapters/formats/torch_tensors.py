"""From the inert tree of a torch pickle to its tensors: each one checked against the memory it claims."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.inert import Blob, RawTensor, Record, Storage, Symbol
from weighbridge.adapters.formats.protocol import RANK_LIMIT, SIZE_LIMIT, Entry, FormatFault, Hazard, Tensor, shown
from weighbridge.adapters.formats.torch_names import DTYPES, STORAGES, TENSOR_CLASSES, Kind, kind_of

TENSOR_LIMIT: Final = 250_000
DEPTH_LIMIT: Final = 64
NAME_LIMIT: Final = 1024

EXPANDED_LIMIT: Final = 1 << 20
"""Bytes of a tensor that repeats its memory (a stride of zero) and is still taken for an honest small buffer."""

SPREAD_LIMIT: Final = 4
"""Tensors that share memory may be this many times as large as that memory when each is written out."""

_SPREAD_FREE: Final = 64 << 20
_KINDS: Final[dict[str, Kind]] = {name: DTYPES[dtype] for name, dtype in STORAGES.items()}
_VALUE_LIMIT: Final = 256


class Collected(NamedTuple):
    """The tensors of a tree and what was noticed on the way; `objects` are the classes of whole modules."""

    tensors: tuple[Tensor, ...]
    entries: tuple[Entry, ...]
    hazards: list[Hazard]
    objects: list[str]


def collect(root: Any) -> Collected:
    """Return every tensor of an inert tree, in its order. Raises FormatFault where there are too many."""
    hazards: list[Hazard] = []
    tensors: list[Tensor] = []
    objects: list[str] = []
    for raw, name, group in _walk(root, objects):
        tensors.append(_tensor(raw, name, group, hazards))
        if len(tensors) > TENSOR_LIMIT:
            raise FormatFault("pickle-too-large", f"the file lists more than {TENSOR_LIMIT} tensors")
    hazards.extend(_spread(tensors))
    return Collected(tuple(tensors), tuple(_entries(root, tensors)), hazards, objects)


# --------------------------------------------------------------------------------------------------------------- walk


def _walk(root: Any, objects: list[str]) -> Iterator[tuple[RawTensor, str, tuple[str, ...]]]:
    """Yield tensors with their key and the way to their table; each container once, cycles and all."""
    if isinstance(root, RawTensor):
        yield root, "", ()
        return
    seen: set[int] = set()
    waiting: list[tuple[Any, tuple[str, ...], str]] = [(root, (), "")]
    while waiting:
        value, group, prefix = waiting.pop()
        if id(value) in seen or len(group) > DEPTH_LIMIT:
            continue
        seen.add(id(value))
        found: list[tuple[Any, tuple[str, ...], str]] = []
        if type(value) is Record:
            raw = _old_tensor(value)
            if raw is not None:
                yield raw, group[-1] if group else "", group[:-1]
            elif _is_module(value):
                if not prefix:
                    objects.append(value.symbol.full)
                found += _module(value, group, prefix)
            else:
                found += ((part, group, prefix) for part in (value.args, value.state, value.items))
        else:
            for key, item in _items(value):
                kind = type(item)
                if kind is RawTensor:
                    yield item, (prefix + key)[:NAME_LIMIT], group
                elif kind in _CONTAINERS:
                    found.append((item, (*group, (prefix + key)[:NAME_LIMIT]), ""))
        waiting.extend(reversed(found))


_CONTAINERS: Final = frozenset({dict, list, tuple, Record})


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, item in value.items():
            yield key if type(key) is str else _key(key), item
    elif type(value) in {list, tuple}:
        for index, item in enumerate(value):
            yield str(index), item


def _key(key: Any) -> str:
    if isinstance(key, (Symbol, Record)):
        return key.full if isinstance(key, Symbol) else key.symbol.full
    return str(key)[:NAME_LIMIT]


def _is_module(record: Record) -> bool:
    return type(record.state) is dict and "_modules" in record.state and "_parameters" in record.state


def _module(record: Record, group: tuple[str, ...], prefix: str) -> Iterator[tuple[Any, tuple[str, ...], str]]:
    """Yield the parts of a pickled module so that its tensors get the names its state dict would give them."""
    for part in ("_parameters", "_buffers"):
        table = record.state.get(part)
        if type(table) is dict:
            yield table, group, prefix
    children = record.state.get("_modules")
    if type(children) is dict:
        for key, child in children.items():
            if type(child) is Record and len(prefix) < NAME_LIMIT:
                yield child, group, f"{prefix}{_key(key)}."


def _old_tensor(record: Record) -> RawTensor | None:
    """Return the tensor that the oldest files make by giving an empty one its state."""
    if record.symbol.full in TENSOR_CLASSES and type(record.state) is tuple and len(record.state) >= 4:
        return RawTensor(*record.state[:4])
    return None


# -------------------------------------------------------------------------------------------------------------- tensors


def _tensor(raw: RawTensor, name: str, group: tuple[str, ...], hazards: list[Hazard]) -> Tensor:
    storage, shape, stride, offset = raw.storage, raw.shape, raw.stride, raw.offset
    kind = _kind(raw)
    special = raw.special or kind.unsupported
    if special == "quantized":
        special = kind.unsupported or "quantized"
    count = 1
    for side in shape if type(shape) is tuple else (-1,):
        if type(side) is not int or not 0 <= side < SIZE_LIMIT:
            return _broken(name, group, "tensor-invalid", "its shape is no list of sizes", hazards)
        count *= side
    if count >= SIZE_LIMIT or len(shape) > RANK_LIMIT:
        return _broken(name, group, "tensor-invalid", f"its shape asks for {count} elements", hazards)
    size = kind.size
    if kind.dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    if type(storage) is not Storage or raw.special == "meta":
        what = special or "no memory behind it"
        return Tensor(name, kind.dtype, shape, count * size, None, None, None, group, what)
    if raw.special and raw.stride is None:
        return Tensor(name, kind.dtype, shape, count * size, None, storage.key, None, group, special)
    if type(stride) is not tuple or len(stride) != len(raw.shape) or type(offset) is not int or offset < 0:
        return _broken(name, group, "tensor-invalid", "its strides do not fit its shape", hazards)
    last, plain, expected = offset, True, 1
    for side, step in zip(reversed(raw.shape), reversed(stride), strict=True):
        if type(step) is not int or not 0 <= step < SIZE_LIMIT:
            return _broken(name, group, "tensor-invalid", "its strides are no distances", hazards)
        if side != 1:
            last += (side - 1) * step
            plain = plain and step == expected
            expected *= side
    room = storage.count if raw.dtype is None else storage.count * _storage_size(storage) // size
    if count and last >= room:
        return _broken(
            name, group, "tensor-outside", f"it reaches to element {last + 1} of a storage of {room}", hazards
        )
    if count > room and count * size > EXPANDED_LIMIT:
        return _broken(
            name,
            group,
            "tensor-expanded",
            f"it claims {count * size} bytes and has {room * size}: its memory is repeated",
            hazards,
        )
    begin = None if storage.start is None else storage.start + offset * size
    fields = (name, kind.dtype, shape, count * size, begin, storage.key, None if plain else stride, group, special, "")
    return tuple.__new__(Tensor, fields)  # half the cost of calling the class


_UNKNOWN: Final = Kind("U8", 1, "an unknown dtype")


def _kind(raw: RawTensor) -> Kind:
    dtype = raw.dtype
    if dtype is not None:
        return kind_of(dtype.full if type(dtype) is Symbol else dtype) or _UNKNOWN
    if type(raw.storage) is Storage:
        return _KINDS.get(raw.storage.kind, _UNKNOWN)
    return _UNKNOWN


def _storage_size(storage: Storage) -> int:
    return _KINDS.get(storage.kind, _UNKNOWN).size


def _broken(name: str, group: tuple[str, ...], code: str, problem: str, hazards: list[Hazard]) -> Tensor:
    label = "/".join((*group, name))[:NAME_LIMIT]
    hazards.append(Hazard(code, "block", name, f"{shown(label)}: {problem}", {"bad_tensor": name, "problem": problem}))
    return Tensor(name, "U8", (), 0, None, None, None, group, problem)


def _spread(tensors: list[Tensor]) -> Iterator[Hazard]:
    """Say so where views of the same memory would be many times that memory when written out."""
    placed = [tensor for tensor in tensors if tensor.storage is not None and tensor.offset is not None]
    if len({tensor.storage for tensor in placed}) == len(placed):
        return
    first: dict[str | None, int] = {}
    last: dict[str | None, int] = {}
    written = 0
    seen: set[tuple[str | None, int, int]] = set()
    for tensor in placed:
        begin = tensor.offset or 0
        if (place := (tensor.storage, begin, tensor.nbytes)) not in seen:
            seen.add(place)
            written += tensor.nbytes
            first[tensor.storage] = min(first.get(tensor.storage, begin), begin)
            last[tensor.storage] = max(last.get(tensor.storage, 0), begin + tensor.nbytes)
    held = sum(end - first[key] for key, end in last.items())
    if written > SPREAD_LIMIT * held + _SPREAD_FREE:
        yield Hazard(
            "views-multiply",
            "block",
            "",
            f"views of {held} bytes of memory claim {written} bytes when each is written out",
            {"written_bytes": written, "held_bytes": held},
        )


# -------------------------------------------------------------------------------------------------------------- entries


def _entries(root: Any, tensors: list[Tensor]) -> Iterator[Entry]:
    """Yield the top-level entries that are no tensors themselves."""
    if type(root) is not dict:
        return
    counts: dict[str, list[int]] = {}
    for tensor in tensors:
        if tensor.group:
            row = counts.setdefault(tensor.group[0], [0, 0])
            row[0] += 1
            row[1] += tensor.nbytes
    for key, value in root.items():
        if type(value) is not RawTensor:
            name = key if type(key) is str else _key(key)
            count, size = counts.get(name, (0, 0))
            yield Entry(name, _what(value), count, size, value if _is_small(value) else None)


def _what(value: Any) -> str:
    for kind, word in _WORDS:
        if isinstance(value, kind):
            return word
    return "object"


_WORDS: Final[tuple[tuple[Any, str], ...]] = (
    (dict, "dict"),
    ((list, tuple), "list"),
    (bool, "flag"),
    ((int, float), "number"),
    (str, "text"),
    (type(None), "nothing"),
    ((bytes, Blob), "bytes"),
    (Symbol, "global"),
)


def _is_small(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and len(str(value)[: _VALUE_LIMIT + 1]) <= _VALUE_LIMIT
