"""Weight containers written byte by byte in plain Python: torch zip and legacy files, GGUF, ONNX. No torch needed.

    torch_zip({"state_dict": {"w": T("F32", (2, 2), [1, 2, 3, 4])}, "epoch": 3})   bytes of a .ckpt
    torch_legacy({"w": T("BF16", (4,), 1.0)})                                      bytes of an old .pth
    gguf({"general.architecture": "llama"}, {"blk.0.w": ("F32", (4, 4), None)})    bytes of a .gguf

What real torch makes of the torch files is compared in the tests where torch is installed.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge_testlib.builders import Data, pack

MAGIC: Final = 0x1950A86A20F9469CFC6C

STORAGES: Final = {
    "F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage",
    "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage", "U8": "ByteStorage",
    "BOOL": "BoolStorage", "C64": "ComplexFloatStorage", "C128": "ComplexDoubleStorage",
}  # fmt: skip
_SIZES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "C64": 8, "C128": 16}


class T(NamedTuple):
    """A tensor to write; tensors with the same `key` share one storage, which the first of them fills."""

    dtype: str
    shape: Sequence[int]
    data: Data = None
    stride: Sequence[int] | None = None
    offset: int = 0
    key: str | None = None
    room: int | None = None
    """Elements of the storage where they are not the shape's."""


class Op(bytes):
    """Opcodes that stand for one value, put into a pickle as they are."""


def text(value: str) -> bytes:
    """Return BINUNICODE of a text."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> Op:
    """Return GLOBAL."""
    return Op(f"c{module}\n{attribute}\n".encode())


def whole(value: int) -> bytes:
    """Return the shortest opcode of an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def call(function: bytes, *args: Any) -> Op:
    """Return REDUCE of a function with arguments."""
    return Op(function + b"(" + b"".join(map(plain, args)) + b"tR")


def plain(value: Any, tensor: Callable[[T], bytes] | None = None) -> bytes:
    """Return the opcodes of a value; tensors are written by `tensor`."""
    if isinstance(value, Op):
        return bytes(value)
    if isinstance(value, T):
        if tensor is None:
            raise TypeError("a tensor needs a container")
        return tensor(value)
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return whole(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return call(name("_codecs", "encode"), value.decode("latin1"), "latin1")
    if isinstance(value, Mapping):
        items = b"".join(plain(key, tensor) + plain(item, tensor) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, tuple):
        return b"(" + b"".join(plain(item, tensor) for item in value) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(plain(item, tensor) for item in value) + b"e"
    raise TypeError(f"no opcodes for a {type(value).__name__}")


def pickled(value: Any, tensor: Callable[[T], bytes] | None = None) -> bytes:
    """Return a whole pickle of protocol 2."""
    return b"\x80\x02" + plain(value, tensor) + b"."


class Storages:
    """The storages behind the tensors of one file, in the order in which they were met."""

    def __init__(self, *, legacy: bool = False) -> None:
        self.bytes: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self.legacy = legacy

    def tensor(self, tensor: T) -> bytes:
        """Return the opcodes that rebuild a tensor, and keep its bytes."""
        shape = tuple(tensor.shape)
        count = 1
        for side in shape:
            count *= side
        key = tensor.key if tensor.key is not None else str(len(self.bytes))
        if key not in self.bytes:
            self.counts[key] = count if tensor.room is None else tensor.room
            filled = shape if tensor.room is None else (tensor.room,)
            self.bytes[key] = pack_any(tensor.dtype, filled, tensor.data)
        stride: list[int] = []
        step = 1
        for side in reversed(shape):
            stride.insert(0, step)
            step *= side
        storage = ("storage", name("torch", STORAGES[tensor.dtype]), key, "cpu", self.counts[key])
        saved = Op(plain((*storage, None) if self.legacy else storage) + b"Q")
        strides = tuple(tensor.stride) if tensor.stride is not None else tuple(stride)
        hooks = call(name("collections", "OrderedDict"))
        return call(name("torch._utils", "_rebuild_tensor_v2"), saved, tensor.offset, shape, strides, False, hooks)


def pack_any(dtype: str, shape: Sequence[int], data: Data) -> bytes:
    """Return the bytes of one tensor, complex128 too."""
    if dtype == "C128" and not isinstance(data, bytes):
        count = 1
        for side in shape:
            count *= side
        return bytes(16 * count)
    return pack(dtype, shape, data)


def zipped(
    records: Iterable[tuple[str, bytes]], *, align: int = 64, comment: bytes = b"", compress: Iterable[str] = ()
) -> bytes:
    """Return a zip archive of stored records, each aligned as torch aligns them; names in `compress` are deflated."""
    body, directory = bytearray(), bytearray()
    packed = set(compress)
    count = 0
    for record, data in records:
        raw = record.encode("utf-8", "surrogateescape")
        stored, method = data, 0
        if record in packed:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            stored, method = packer.compress(data) + packer.flush(), 8
        crc, header = zlib.crc32(data), len(body)
        pad = -(header + 30 + len(raw) + 4) % align if align else 0
        extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad if align else b""
        sizes = (crc, len(stored), len(data))
        body += struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, method, 0, 0, *sizes, len(raw), len(extra)) + raw + extra
        body += stored
        directory += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, method, 0, 0, *sizes, len(raw), 0, 0, 0, 0, 0, header
        )
        directory += raw
        count += 1
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), len(comment))
    return bytes(body + directory + end + comment)


def torch_zip(
    value: Any,
    *,
    prefix: str = "archive",
    more: Iterable[tuple[str, bytes]] = (),
    compress: Iterable[str] = (),
    byteorder: bytes | None = b"little",
) -> bytes:
    """Return what torch.save writes; `more` adds records, `compress` names those (without prefix) to deflate."""
    storages = Storages()
    data = value if isinstance(value, bytes) else pickled(value, storages.tensor)
    records = [("data.pkl", data)]
    records += [("byteorder", byteorder)] if byteorder is not None else []
    records += [(f"data/{key}", raw) for key, raw in storages.bytes.items()]
    records += [*more, ("version", b"3\n")]
    return zipped(
        [(f"{prefix}/{record}", raw) for record, raw in records], compress=[f"{prefix}/{each}" for each in compress]
    )


def torch_legacy(value: Any, *, little: bool = True) -> bytes:
    """Return what torch.save wrote before version 1.6."""
    storages = Storages(legacy=True)
    body = value if isinstance(value, bytes) else pickled(value, storages.tensor)
    about = {"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    parts = [pickled(MAGIC), pickled(1001), pickled(about), body, pickled(list(storages.bytes))]
    parts += [struct.pack("<q", storages.counts[key]) + raw for key, raw in storages.bytes.items()]
    return b"".join(parts)


# ----------------------------------------------------------------------------------------------------------------- gguf

GGUF_TYPES: Final = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2)}


def gguf_value(value: Any, order: str = "<", version: int = 3) -> bytes:
    """Return type and bytes of a value of the header."""
    size = "Q" if version > 1 else "I"
    if isinstance(value, bool):
        return struct.pack(f"{order}I?", 7, value)
    if isinstance(value, int):
        return struct.pack(f"{order}II", 4, value) if 0 <= value < 1 << 32 else struct.pack(f"{order}Iq", 11, value)
    if isinstance(value, float):
        return struct.pack(f"{order}If", 6, value)
    if isinstance(value, str):
        raw = value.encode()
        return struct.pack(f"{order}I{size}", 8, len(raw)) + raw
    items = [gguf_value(item, order, version) for item in value]
    kind = items[0][:4] if items else struct.pack(f"{order}I", 8)
    return (
        struct.pack(f"{order}I", 9) + kind + struct.pack(f"{order}{size}", len(items)) + b"".join(i[4:] for i in items)
    )


def gguf(
    pairs: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int], bytes | None]],
    *,
    version: int = 3,
    order: str = "<",
    align: int = 32,
) -> bytes:
    """Return a GGUF file; shapes are given slowest dimension first."""
    size = "Q" if version > 1 else "I"

    def words(value: str) -> bytes:
        raw = value.encode()
        return struct.pack(f"{order}{size}", len(raw)) + raw

    head = b"GGUF" + struct.pack(f"{order}I{size}{size}", version, len(tensors), len(pairs))
    for key, value in pairs.items():
        head += words(key) + gguf_value(value, order, version)
    body = bytearray()
    for label, (dtype, shape, data) in tensors.items():
        kind, block, width = GGUF_TYPES[dtype]
        count = 1
        for side in shape:
            count *= side
        body += bytes(-len(body) % align)
        head += words(label) + struct.pack(f"{order}I{len(shape)}{size}", len(shape), *reversed(list(shape)))
        head += struct.pack(f"{order}IQ", kind, len(body))
        body += bytes(count // block * width) if data is None else data
    body += bytes(-len(body) % align)
    return head + bytes(-len(head) % align) + bytes(body)


# ----------------------------------------------------------------------------------------------------------------- onnx


def varint(value: int) -> bytes:
    """Return a number as protocol buffers write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    """Return one field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def onnx_tensor(
    label: str,
    shape: Sequence[int],
    code: int = 1,
    raw: bytes | None = None,
    external: Mapping[str, str] | None = None,
) -> bytes:
    """Return a TensorProto, with its bytes inside or outside."""
    message = b"".join(field(1, side) for side in shape) + field(2, code) + field(8, label)
    if external is not None:
        pairs = b"".join(field(13, field(1, key) + field(2, value)) for key, value in external.items())
        return message + pairs + field(14, 1)
    return message + field(9, raw if raw is not None else b"")


def onnx_model(
    tensors: Iterable[bytes],
    *,
    nodes: Iterable[bytes] = (),
    inputs: Mapping[str, Sequence[int | str]] | None = None,
    opset: int = 17,
    more: bytes = b"",
) -> bytes:
    """Return a ModelProto around some TensorProtos and NodeProtos."""
    graph = b"".join(field(1, node) for node in nodes) + field(2, "g") + b"".join(field(5, each) for each in tensors)
    for label, shape in (inputs or {}).items():
        sides = b"".join(field(1, field(1, side) if isinstance(side, int) else field(2, side)) for side in shape)
        graph += field(11, field(1, label) + field(2, field(1, field(1, 1) + field(2, sides))))
    return field(1, 8) + field(2, "tests") + field(7, graph) + field(8, field(2, opset)) + more


def onnx_node(kind: str, *, domain: str = "", attributes: Iterable[bytes] = ()) -> bytes:
    """Return a NodeProto."""
    message = field(4, kind) + b"".join(field(5, each) for each in attributes)
    return message + (field(7, domain) if domain else b"")


# -------------------------------------------------------------------------------------------------------------- reading


def materialise(path: Path, tensor: Any, size: int) -> bytes:
    """Return a plain copy of a listed tensor, element by element from where its directory says it lies."""
    data = path.read_bytes()
    begin = tensor.offset
    if tensor.stride is None:
        return data[begin : begin + tensor.nbytes]
    places = [0]
    for side, step in zip(tensor.shape, tensor.stride, strict=True):
        places = [place + index * step for place in places for index in range(side)]
    return b"".join(data[begin + place * size : begin + (place + 1) * size] for place in places)
