"""Files that attack whoever reads them: live pickle payloads, zip tricks, header bombs. All of them are harmless acts.

A payload, loaded with plain pickle, makes the canary folder or imports the canary module; nothing else. `corpus` writes
one file per attack; hostile_run.py reads them all under an audit hook.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import Op, T, call, name, plain, text

CANARY_MODULE: Final = "weighbridge_canary_module"
"""A module whose import makes the canary folder; `corpus` writes it."""


class Attack(NamedTuple):
    """One file: which reader it is for, and whether the reader may still list it without a blocking hazard."""

    label: str
    reader: str
    data: bytes
    harmless: bool = False


WEIGHTS: Final = {"w": T("F32", (2, 3), 0.5), "b": T("F32", (3,), 0.25)}


# ------------------------------------------------------------------------------------------------------------- payloads


def _p4(body: bytes) -> bytes:
    return b"\x80\x04\x95" + struct.pack("<Q", len(body) + 1) + body + b"."


def _short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _stack_global(module: str, attribute: str) -> Op:
    return Op(_short(module) + _short(attribute) + b"\x93")


def live(canary: str) -> dict[str, bytes]:
    """Return pickles that make the canary when plain pickle loads them; the tests prove that they do."""
    command = f"mkdir {canary}"
    code = f"__import__('os').mkdir({canary!r})"
    module = call(name("builtins", "__import__"), "os")
    system = call(name("builtins", "getattr"), module, "system")
    partial = call(name("functools", "partial"), name("posix", "system"), command)
    path = call(name("pathlib", "Path"), canary)
    return {
        "global-reduce": c.pickled(call(name("posix", "mkdir"), canary)),
        "os-system": c.pickled(call(name("os", "system"), command)),
        "stack-global": _p4(call(_stack_global("posix", "mkdir"), canary)),
        "inst": b"(" + text(canary) + b"iposix\nmkdir\n.",
        "obj": b"(" + name("posix", "mkdir") + text(canary) + b"o.",
        "protocol-0": f"cposix\nmkdir\n(V{canary}\ntR.".encode(),
        "eval": c.pickled(call(name("builtins", "eval"), code)),
        "exec": c.pickled(call(name("builtins", "exec"), code)),
        "python-2-eval": c.pickled(call(name("__builtin__", "eval"), code)),
        "import-getattr": c.pickled(call(system, command)),
        "partial-called": c.pickled(call(partial)),
        "partial-built": c.pickled(
            call(
                Op(
                    call(name("functools", "partial"), name("builtins", "print"))
                    + plain((name("posix", "system"), (command,), Op(b"}"), None))
                    + b"b"
                )
            )
        ),
        "list-map": c.pickled(
            call(name("builtins", "list"), call(name("builtins", "map"), name("posix", "mkdir"), [canary]))
        ),
        "method-caller": c.pickled(call(call(name("operator", "methodcaller"), "mkdir", canary), module)),
        "attribute-getter": c.pickled(call(call(call(name("operator", "attrgetter"), "mkdir"), module), canary)),
        "subprocess": c.pickled(call(name("subprocess", "call"), ["mkdir", canary])),
        "module-import": c.pickled(name(CANARY_MODULE, "anything")),
        "import-module": c.pickled(call(name("importlib", "import_module"), CANARY_MODULE)),
        "nested-pickle": c.pickled(
            call(name("pickle", "loads"), call(name("_codecs", "encode"), f"cposix\nmkdir\n(V{canary}\ntR.", "latin1"))
        ),
        "popped": b"\x80\x02" + call(name("posix", "mkdir"), canary) + b"0}.",
        "popped-mark": b"\x80\x02(" + call(name("posix", "mkdir"), canary) + b"1}.",
        "in-a-key": c.pickled({call(name("posix", "mkdir"), canary): 1}),
        "in-a-state": c.pickled(
            Op(call(name("argparse", "Namespace")) + plain({"x": call(name("posix", "mkdir"), canary)}) + b"b")
        ),
        "dotted-name": _p4(call(_stack_global("logging", "os.mkdir"), canary)),
        "dotted-private-name": _p4(call(_stack_global("random", "_os.mkdir"), canary)),
        "dotted-method": _p4(call(_stack_global("pathlib", "Path.mkdir"), path)),
        "method-by-getattr": c.pickled(call(call(name("builtins", "getattr"), name("pathlib", "Path"), "mkdir"), path)),
        "file-by-io": c.pickled(call(name("_io", "open"), canary, "w")),
        "file-by-codecs": c.pickled(call(name("codecs", "open"), canary, "w")),
        "file-by-handler": c.pickled(call(name("logging", "FileHandler"), canary)),
        "file-by-zip": c.pickled(call(name("zipfile", "ZipFile"), canary, "w")),
        "timeit": c.pickled(call(name("timeit", "timeit"), code, "pass", Op(name("time", "time")), 1)),
        "framed": _p4(b"\x95" + struct.pack("<Q", 0) + call(_stack_global("posix", "mkdir"), canary)),
        "memo-swap": b"\x80\x02" + name("collections", "OrderedDict") + b"q\x000"
        + name("posix", "mkdir") + b"q\x000h\x00(" + text(canary) + b"tR.",
    }  # fmt: skip


def dead(canary: str) -> dict[str, bytes]:
    """Return pickles that name dangerous things in ways that need a library, a registry or another opcode to fire."""
    command = f"mkdir {canary}"
    popen = name("subprocess", "Popen")
    return {
        "newobj": b"\x80\x02" + popen + plain((["mkdir", canary],)) + b"\x81.",
        "newobj-ex": b"\x80\x04" + _stack_global("subprocess", "Popen") + plain((["mkdir", canary],)) + b"}\x92.",
        "copyreg-newobj": c.pickled(call(name("copyreg", "__newobj__"), popen, ["mkdir", canary])),
        "extension-1": b"\x80\x02\x82\x05)R.",
        "extension-4": b"\x80\x02\x84\x05\0\0\0)R.",
        "build-on-global": b"\x80\x02" + name("builtins", "dict") + plain({"x": 1}) + b"b.",
        "outside-object": b"P" + command.encode() + b"\n.",
        "out-of-band": b"\x80\x05\x97.",
        "torch-load": c.pickled(call(name("torch", "load"), canary)),
        "torch-hub": c.pickled(call(name("torch.hub", "load"), "a/b", "c")),
        "torch-jit": c.pickled(call(name("torch.jit", "load"), canary)),
        "numpy-load": c.pickled(call(name("numpy", "load"), canary)),
        "numpy-runstring": c.pickled(call(name("numpy.testing._private.utils", "runstring"), command, {})),
        "cloudpickle": c.pickled(call(name("cloudpickle.cloudpickle", "_make_function"), 1)),
        "marshal-function": c.pickled(
            call(name("types", "FunctionType"), call(name("marshal", "loads"), b"\xe3\0"), {})
        ),
        "socket": c.pickled(call(name("socket", "create_connection"), ("192.0.2.1", 9))),
        "ctypes": c.pickled(call(name("ctypes", "CDLL"), "libc.so.6")),
        "browser": c.pickled(call(name("webbrowser", "open"), "http://192.0.2.1/")),
        "remove-tree": c.pickled(call(name("shutil", "rmtree"), canary)),
        "dunder-walk": c.pickled(call(call(name("builtins", "getattr"), name("builtins", "object"), "__subclasses__"))),
        "no-identifier": b"\x80\x02cos;system\nx y\n)R.",
    }


# ------------------------------------------------------------------------------------------------------ hostile pickles


def bombs() -> dict[str, bytes]:
    """Return pickles that ask for much: memory, time, depth, or what cannot be."""
    deep_tuple = b"\x80\x02}N" + b"\x85" * 400_000 + b"Ns."
    laughs = b"\x80\x02]q\x00" + b"".join(b"](" + b"h\x00" * 8 + b"eq\x00" for _ in range(200)) + b"."
    numbers = b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for i in range(30_000))
    pairs = b"".join(plain((i * 65537, i * 8191)) + b"N" for i in range(60_000))
    return {
        "deep-tuple-key": deep_tuple,
        "deep-lists": b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b".",
        "deep-tuples": b"\x80\x02N" + b"\x85" * 2_000_000 + b".",
        "laughing-lists": laughs,
        "colliding-numbers": b"\x80\x02}(" + numbers + b"u.",
        "tuple-keys": b"\x80\x02}(" + pairs + b"u.",
        "many-dicts": b"\x80\x02" + b"}" * 6_000_000 + b".",
        "many-marks": b"\x80\x02" + b"(" * 6_000_000 + b".",
        "many-nothings": b"\x80\x02" + b"N" * 9_000_000 + b".",
        "many-memos": b"\x80\x02N" + b"\x94" * 8_500_000 + b".",
        "many-lists-of-one": b"\x80\x02" + b"]Na" * 2_500_000 + b".",
        "memo-far": b"\x80\x02Nr\xff\xff\xff\xff}.",
        "text-lies": b"\x80\x02X\xff\xff\xff\x7fabc.",
        "text-lies-64": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
        "bytes-lie-64": b"\x80\x04\x8e" + struct.pack("<Q", (1 << 64) - 1) + b"abc.",
        "number-of-megabytes": b"\x80\x02\x8b" + struct.pack("<I", 8 << 20) + bytes(8 << 20) + b".",
        "number-of-digits": b"L" + b"9" * 100_000 + b"L\n.",
        "line-without-end": b"c" + b"a" * 200_000,
        "empty-stack": b"\x80\x02R.",
        "mark-missing": b"\x80\x02t.",
        "memo-missing": b"\x80\x02h\x07.",
        "list-as-key": b"\x80\x02}]Ns.",
        "odd-items": b"\x80\x02}(NNNu.",
        "protocol-9": b"\x80\x09N.",
        "no-stop": b"\x80\x02N",
        "unknown-opcode": b"\x80\x02\xffN.",
        "call-of-number": b"\x80\x02K\x01)R.",
        "encode-again-and-again": b"\x80\x02" + name("_codecs", "encode") + b"q\x00" + text("x" * 60_000) + b"q\x01"
        + b"0" * 1 + b"h\x00h\x01\x85R0" * 100_000 + b"N.",
        "pairs-again-and-again": b"\x80\x02" + name("collections", "OrderedDict") + b"q\x000]("
        + plain((1, 2)) * 50_000 + b"eq\x010" + b"h\x00h\x01\x85R0" * 20_000 + b"N.",
        "attribute-chain": b"\x80\x02" + name("builtins", "getattr") + b"q\x000" + name("a", "B") + text("x" * 100)
        + b"q\x02" + b"0" + b"".join(b"q\x01h\x00h\x01h\x02\x86R" for _ in range(20_000)) + b".",
    }  # fmt: skip


def tensors() -> dict[str, bytes]:
    """Return torch files whose tensors claim what their memory does not hold."""
    big = 1 << 40

    def of(tensor: T) -> bytes:
        return c.torch_zip({"w": tensor})

    odd = c.Storages()
    float_shape = odd.tensor(T("F32", (2,), 0.0)).replace(plain((2,)), plain((2.0,)))
    views = {f"v{i}": T("F32", (1 << 20,), None, (1,), 0, "0") for i in range(3)}
    stepped = {f"s{i}": T("F32", ((1 << 20) - i,), None, (1,), i, "0") for i in range(1, 80)}
    return {
        "zero-stride": of(T("F32", (big, big // 4), 1.0, (0, 0), 0, "0", 1)),
        "zero-stride-honest-size": of(T("F32", (1 << 22,), 1.0, (0,), 0, "0", 1)),
        "stride-outside": of(T("F32", (2, 3), 1.0, (100, 1), 0, "0", 6)),
        "offset-outside": of(T("F32", (6,), 1.0, (1,), 3, "0", 6)),
        "negative-offset": of(T("F32", (2,), 1.0, (1,), -1, "0", 6)),
        "negative-stride": of(T("F32", (2,), 1.0, (-1,), 1, "0", 6)),
        "negative-shape": of(T("F32", (-2,), 1.0, (1,), 0, "0", 6)),
        "shape-overflow": of(T("F32", ((1 << 62), 4), 1.0, (0, 0), 0, "0", 1)),
        "shape-of-flags": c.torch_zip(c.pickled({"w": Op(float_shape.replace(plain((2.0,)), b"(\x88t"))})),
        "shape-of-floats": c.torch_zip(c.pickled({"w": Op(float_shape)})),
        "dimensions-100000": of(T("F32", (1,) * 100_000, 1.0)),
        "storage-named-twice": c.torch_zip(
            {"a": T("F32", (2,), 1.0, None, 0, "0"), "b": T("F64", (2,), 1.0, None, 0, "0")}
        ),
        "storage-huge": c.torch_zip(
            c.pickled({"w": Op(c.Storages().tensor(T("F32", (2,), 1.0)).replace(c.whole(2), c.whole(1 << 62), 1))})
        ),
        "views-multiply": c.torch_zip({**views, **stepped}),
        "storage-missing": c.torch_zip(c.pickled(WEIGHTS, c.Storages().tensor)),
        "storage-short": c.torch_zip(
            c.pickled({"w": T("F32", (4,), 1.0)}, c.Storages().tensor), more=[("data/0", b"\0" * 8)]
        ),
        "storage-deflated": c.torch_zip({"w": T("F32", (1 << 20,))}, compress=["data/0"]),
        "pickle-deflated": c.torch_zip(WEIGHTS, compress=["data.pkl"]),
        "self-containing": c.torch_zip(b"\x80\x02]q\x00h\x00a."),
        "persistent-tuple-key": c.torch_zip(
            b"\x80\x02("
            + text("storage")
            + name("torch", "FloatStorage")
            + b"N"
            + b"\x85" * 300_000
            + text("cpu")
            + b"K\1tQ."
        ),
        "storage-class-called": c.torch_zip(
            b"\x80\x02(" + text("storage") + call(name("os", "getcwd")) + text("0") + text("cpu") + b"K\1tQ."
        ),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- zips


def zips() -> dict[str, bytes]:
    """Return archives that two readers would understand differently, or that ask for much."""
    good = c.torch_zip(WEIGHTS)
    data = c.pickled({"w": 1})
    end = good.rfind(b"PK\5\6")
    count, size, start = struct.unpack("<HII", good[end + 10 : end + 20])
    first_record = start
    second_header = good.find(b"PK\3\4", 4)
    overlap = bytearray(good)
    second_record = good.find(b"PK\1\2", first_record + 4)
    overlap[second_record + 42 : second_record + 46] = struct.pack("<I", 0)
    renamed = bytearray(good)
    renamed[30:38] = b"otherone"
    encrypted = bytearray(good)
    encrypted[first_record + 8] |= 1
    outside = bytearray(good)
    outside[first_record + 42 : first_record + 46] = struct.pack("<I", len(good) - 10)
    long_member = bytearray(good)
    long_member[first_record + 20 : first_record + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    claim = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
    return {
        "duplicate-pickle": c.zipped([("a/data.pkl", data), ("a/data.pkl", c.pickled({}))]),
        "duplicate-by-case": c.zipped([("a/data.pkl", data), ("a/DATA.PKL", c.pickled({}))]),
        "members-overlap": bytes(overlap),
        "local-name-differs": bytes(renamed),
        "encrypted": bytes(encrypted),
        "header-outside": bytes(outside),
        "member-too-long": bytes(long_member),
        "bytes-before": b"PK\3\4" + good,
        "bytes-after": good + b"more",
        "bytes-inside": good[:end] + b"more" + good[end:],
        "two-ends": good[:-2] + struct.pack("<H", 22) + good[end:],
        "directory-cut": good[: start + size // 2] + good[end:],
        "count-lies": good[: end + 8] + struct.pack("<HH", count + 7, count + 7) + good[end + 12 :],
        "no-directory": good[:start],
        "only-an-end": good[end:],
        "wide-claims": b"PK\3\4" + wide + locator + claim,
        "wide-locator-lost": b"PK\3\4" + struct.pack("<4sIQI", b"PK\6\7", 0, 1 << 60, 1) + claim,
        "second-local-header-lost": good[:second_header] + b"XXXX" + good[second_header + 4 :],
        "name-climbs": c.zipped([("../../etc/data.pkl", data)]),
        "no-members": struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0),
        "pickle-checksum": good.replace(b"\x80\x02}(X", b"\x80\x02}(Y", 1),
    }


# -------------------------------------------------------------------------------------------------------------- headers


def headers() -> Iterator[Attack]:
    """Yield bombs and lies for the readers of other containers."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    yield Attack("gguf-tensors", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0))
    yield Attack("gguf-keys", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60))
    yield Attack("gguf-text", "gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + b"x")
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 50)
    yield Attack("gguf-array", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    nested = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50
    yield Attack("gguf-nested", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)
    empties = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1 << 20) + struct.pack("<IQ", 8, 0) * (1 << 20)
    yield Attack("gguf-empty-arrays", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + empties)
    texts = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 5 << 20) + bytes(8 * (5 << 20))
    yield Attack("gguf-empty-texts", "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + texts)
    dims = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 30)
    yield Attack("gguf-dimensions", "gguf", head + dims)
    shape = struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)
    yield Attack("gguf-overflow", "gguf", head + shape)
    yield Attack("gguf-alignment", "gguf", c.gguf({"general.alignment": 3}, {"w": ("F32", (4,), None)}))
    yield Attack("gguf-alignment-0", "gguf", c.gguf({"general.alignment": 0}, {"w": ("F32", (4,), None)}))
    yield Attack("gguf-short", "gguf", c.gguf({}, {"w": ("F32", (1 << 20,), b"")}))
    two = c.gguf({}, {"w": ("F32", (4,), None), "v": ("F32", (4,), None)})
    yield Attack("gguf-names-twice", "gguf", two.replace(b"v" + struct.pack("<I", 1), b"w" + struct.pack("<I", 1)))
    yield Attack(
        "onnx-path", "onnx", c.onnx_model([c.onnx_tensor("w", (2,), external={"location": "../../etc/passwd"})])
    )
    yield Attack(
        "onnx-absolute", "onnx", c.onnx_model([c.onnx_tensor("w", (2,), external={"location": "/etc/passwd"})])
    )
    yield Attack("onnx-shape", "onnx", c.onnx_model([c.onnx_tensor("w", ((1 << 62), 1 << 62))]))
    yield Attack("onnx-varint", "onnx", b"\x08" + b"\xff" * 64)
    yield Attack("onnx-fields", "onnx", c.field(1, 8) + c.field(7, b"\x10\x01" * 4_000_000))
    graph = b""
    for _ in range(40):
        graph = c.field(1, c.field(5, c.field(6, graph)))
    yield Attack("onnx-nested", "onnx", c.field(1, 8) + c.field(7, graph))
    objects = (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", 70)
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69)
        + b"\n"
    )
    yield Attack("npz-objects", "opaque", c.zipped([("w.npy", objects + c.pickled(1))], align=0))
    zeros = objects.replace(b"'|O'", b"'f8'") + bytes(64 << 20)
    yield Attack("npz-bomb", "opaque", c.zipped([("w.npy", zeros)], align=0, compress=["w.npy"]))
    yield Attack("hdf5-cut", "opaque", b"\x89HDF\r\n\x1a\n" + bytes(5) + b"\x08" + bytes(10) + b"\xff" * 60)
    yield Attack("tflite-outside", "opaque", struct.pack("<I", 1 << 30) + b"TFL3" + bytes(64))
    table = struct.pack("<HHHHHH", 12, 12, 0, 0, 4, 0) + struct.pack("<iII", 12, 4, 1 << 30)
    yield Attack("tflite-vector", "opaque", struct.pack("<I", 20) + b"TFL3" + table)
    yield Attack("flax-deep", "opaque", b"\x81\xa1a" * 200_000)
    yield Attack("flax-count", "opaque", b"\xdf\xff\xff\xff\xff\xa1a\xc0")
    yield Attack("tar-size", "opaque", _tar_header(b"77777777777\0"), harmless=True)
    yield Attack("gzip-bomb", "opaque", _gzip(bytes(32 << 20)), harmless=True)


def _tar_header(size: bytes) -> bytes:
    header = bytearray(512)
    header[:4] = b"name"
    header[124 : 124 + len(size)] = size
    header[257:263] = b"ustar\0"
    return bytes(header) + bytes(1024)


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


# --------------------------------------------------------------------------------------------------------------- corpus


def attacks(canary: str) -> Iterator[Attack]:
    """Yield every attack."""
    for label, data in {**live(canary), **dead(canary)}.items():
        named = label == "module-import"  # a class of somebody's package may be named; it is never imported
        yield Attack(f"zip-{label}", "torch_zip", c.torch_zip(data), harmless=named)
        yield Attack(f"pickle-{label}", "torch_legacy", data, harmless=named)
    for label in ("global-reduce", "popped", "module-import"):
        data = live(canary)[label]
        yield Attack(f"legacy-{label}", "torch_legacy", c.torch_legacy(data), harmless=label == "module-import")
        yield Attack(f"dcp-{label}", "dcp", data)
    carried = {"state_dict": WEIGHTS, "callbacks": call(name("posix", "mkdir"), canary)}
    yield Attack("rides-along", "torch_zip", c.torch_zip(carried))
    yield Attack("rides-along-legacy", "torch_legacy", c.torch_legacy(carried))
    yield Attack(
        "trailing-pickle", "torch_zip", c.torch_zip(c.pickled({}) + live(canary)["global-reduce"]), harmless=True
    )
    for label, data in bombs().items():
        yield Attack(f"bomb-{label}", "torch_zip", c.torch_zip(data), harmless=label in _READABLE)
    for label, data in tensors().items():
        yield Attack(f"tensor-{label}", "torch_zip", data, harmless=label in _READABLE)
    for label, data in zips().items():
        yield Attack(f"zip-{label}", "torch_zip", data)
    yield from headers()


_READABLE: Final = frozenset(
    (
        "memo-far",
        "laughing-lists",
        "deep-lists",
        "self-containing",
        "tuple-keys",
        "deep-tuples",
        "no-stop",
        "attribute-chain",
    )
)
"""Bombs that are cheap to pass over and then hold nothing: they may be listed as empty."""


def corpus(folder: Path, canary: Path) -> list[Attack]:
    """Write every attack as a file of its own, and the canary module; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{CANARY_MODULE}.py").write_text(f"import os\nos.makedirs({str(canary)!r}, exist_ok=True)\n")
    written = []
    for attack in attacks(str(canary)):
        place = folder / attack.label
        if attack.reader == "dcp":
            place.mkdir()
            place /= ".metadata"
        place.write_bytes(attack.data)
        written.append(attack._replace(data=b""))
    return written
