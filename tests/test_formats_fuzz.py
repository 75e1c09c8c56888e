"""Ten thousand mutated files for each container reader; FUZZ=100000 makes it a hundred thousand."""

import os
import pickle
import random
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from weighbridge.adapters.formats import dcp, gguf, onnx, opaque, readers, torch_legacy, torch_zip
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge.adapters.formats.select import select
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import safetensors_bytes
from weighbridge_testlib.containers import T, call, name
from weighbridge_testlib.mutation import memory_file, outcome, storm

pytestmark = pytest.mark.long

COUNT = int(os.environ.get("FUZZ", "10000"))
SLOWEST = 2.0
GROWTH = 300 << 20

STATE = {
    "state_dict": {
        "w": T("F32", (4, 2), 0.5),
        "turned": T("F32", (2, 4), None, (1, 2), 0, "0"),
        "h": T("BF16", (3,), 1.0),
    },
    "optimizer": {"state": {0: {"exp_avg": T("F32", (2,), 0.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "args": call(name("argparse", "Namespace")),
    "best": call(name("numpy._core.multiarray", "scalar"), call(name("numpy", "dtype"), "f8", False, True), bytes(8)),
    "words": ["a", ("b", 2**40, -3, 1.5, None, True)],
}
PICKLE = c.pickled(STATE, c.Storages().tensor)
GGUF = c.gguf(
    {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "bc"], "x": [1, 2], "y": 0.5},
    {"token_embd.weight": ("F16", (4, 32), None), "q": ("Q8_0", (2, 32), None)},
)
ONNX = c.onnx_model(
    [c.onnx_tensor("w", (2, 3), raw=bytes(24)), c.onnx_tensor("e", (2,), external={"location": "w.data"})],
    nodes=[c.onnx_node("MatMul", attributes=[c.field(1, "a") + c.field(5, c.onnx_tensor("k", (1,), raw=bytes(4)))])],
    inputs={"x": ["n", 3]},
)


def header(path: Path) -> Directory:
    """Read a safetensors file; a header that is not sound counts as a fault, as it does for whoever publishes."""
    directory = readers.read(path, "safetensors")
    if directory.blocked:
        raise FormatFault(directory.hazards[0].code, directory.hazards[0].message)
    return directory


def inside(data: bytes) -> bytes:
    """Put a pickle into a sound archive."""
    return c.torch_zip(data, more=[(f"data/{key}", bytes(32)) for key in range(4)])


def plain(data: bytes) -> bytes:
    """Leave the file as it is."""
    return data


CASES: dict[str, tuple[bytes, Callable[[Path], Directory], Callable[[bytes], bytes], str]] = {
    "safetensors": (
        safetensors_bytes({"w": ("F32", (4, 2), 0.5), "h": ("BF16", (3,), 1.0), "q": ("F8_E4M3", (8,), None)}),
        header, plain, "x.safetensors",
    ),
    "zip": (c.torch_zip(STATE), torch_zip.read, plain, "x.pt"),
    "pickle in a zip": (PICKLE, torch_zip.read, inside, "x.pt"),
    "protocol 4 in a zip": (pickle.dumps({"a": [1, 2.5, {"b": (None, b"c")}]}, 4), torch_zip.read, inside, "x.pt"),
    "legacy": (c.torch_legacy(STATE), torch_legacy.read, plain, "x.pth"),
    "dcp": (
        c.pickled(call(name("torch.distributed.checkpoint.metadata", "Metadata"), {"w": 1}, None, {})),
        dcp.read, plain, ".metadata",
    ),
    "gguf": (GGUF, gguf.read, plain, "x.gguf"),
    "onnx": (ONNX, onnx.read, plain, "x.onnx"),
    "opaque": (c.zipped([("config.json", b"{}"), ("metadata.json", b"{}")], align=0), opaque.read, plain, "x"),
}  # fmt: skip


@pytest.mark.timeout(0 if COUNT > 10_000 else 120)
@pytest.mark.parametrize("label", CASES)
def test_thousands_of_mutations_do_no_harm(tmp_path: Path, label: str) -> None:
    """Every mutation of a good file is a directory or one typed fault, in bounded time and memory."""
    seed, read, wrap, file = CASES[label]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    slowest, kinds = 0.0, {True: 0, False: 0}
    with memory_file() if file != dcp.METADATA else nullcontext(tmp_path / file) as path:
        for data in storm(seed, COUNT, random.Random(f"{label} 1")):
            start = time.process_time()
            directory = outcome(read, path, wrap(data))
            if directory is not None:
                select(directory)
            slowest = max(slowest, time.process_time() - start)
            kinds[directory is not None] += 1
    assert slowest < SLOWEST
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < GROWTH
    assert kinds[False] > COUNT // 20
