"""Merges for tests: carried out in this process, and files read back as bytes and numbers."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.merge import behave, job
from weighbridge.adapters.merge.preview import Look, look
from weighbridge.adapters.merge.values import Plan
from weighbridge_testlib import builders

Array = npt.NDArray[Any]
KINDS: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I64": "<i8"}

_MAIN = "from weighbridge.registry.cli.main import main; raise SystemExit(main())"


def staged(
    adapter: Path, base: Path, stage: Path, *, dtype: str | None = None, device: str | None = None
) -> tuple[Look, dict[str, Any]]:
    """Carry out a merge here, without a child process; the result lies in `stage`/out."""
    seen = look([adapter], base, dtype=dtype, weigh=False)
    write_plan(seen, stage)
    request = {"stage": str(stage), "plan": "test", "workers": 2, "device": device}
    return seen, job.run(request, lambda _: None)


def distances(merged: float, noise: float | None, base: float = 1.0) -> behave.Distances:
    """Return distances of a model with outputs up to 1."""
    near, cost, far = (behave.Apart(x, x * x / 2, x * x / 4) for x in (merged, noise or 0.0, base))
    return behave.Distances(near, far, cost if noise is not None else None, 1.0)


def write_plan(seen: Look, stage: Path) -> None:
    """Make a new staging folder with what a child process reads there."""
    assert seen.planned is not None, [f.message for f in seen.findings]
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    (stage / job.PLAN).write_bytes(msgspec.msgpack.encode(seen.planned.plan))
    (stage / job.BUNDLE).write_bytes(msgspec.msgpack.encode(seen.bundle))


def plan_of(seen: Look) -> Plan:
    """Return the plan of a merge that can be made."""
    assert seen.planned is not None
    assert seen.planned.plan is not None
    return seen.planned.plan


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return (dtype, shape, bytes) of every tensor in a folder's safetensors files."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, raw = safetensors.read(path), path.read_bytes()
        assert not header.faults, header.faults
        for one in header.tensors.values():
            start = header.data_start
            found[one.name] = (one.dtype, one.shape, raw[start + one.begin : start + one.end])
    return found


def numbers(folder: Path) -> dict[str, Array]:
    """Return every floating tensor of a folder in double precision."""
    return {
        name: np.frombuffer(raw, KINDS[dtype]).reshape(shape).astype(np.float64)
        for name, (dtype, shape, raw) in tensors(folder).items()
        if dtype in KINDS
    }


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of different elements of each tensor that differs, bit by bit; -1: another dtype or shape."""
    found: dict[str, int] = {}
    for name in ours.keys() | theirs.keys():
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None or mine[:2] != other[:2]:
            found[name] = -1
        elif mine[2] != other[2]:
            wide = safetensors.BITS[mine[0]] // 8
            pairs = zip(range(0, len(mine[2]), wide), range(0, len(other[2]), wide), strict=True)
            found[name] = sum(mine[2][i : i + wide] != other[2][k : k + wide] for i, k in pairs)
    return found


def wide_model(folder: Path, *, shards: int = 6, layers: int = 6, hidden: int = 256, dtype: str = "BF16") -> Path:
    """Fill a folder with a Llama of some megabytes, for merges that take long enough to be disturbed."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        shapes |= {
            f"{stem}self_attn.{name}.weight": (hidden, hidden) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        shapes |= {f"{stem}mlp.{name}.weight": (4 * hidden, hidden) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{stem}mlp.down_proj.weight": (hidden, 4 * hidden), f"{stem}input_layernorm.weight": (hidden,)}
        shapes[f"{stem}post_attention_layernorm.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (64, hidden)}
    random = np.random.default_rng(3)
    made: dict[str, builders.TensorSpec] = {
        name: (dtype, shape, (random.standard_normal(shape) * 0.05).astype(KINDS[dtype]).tobytes())
        for name, shape in shapes.items()
    }
    return builders.llama_model(
        folder, tensors=made, shards=shards, dtype=dtype, tokenizer=False, hidden_size=hidden, vocab_size=64,
        num_hidden_layers=layers, intermediate_size=4 * hidden,
    )  # fmt: skip


def wide_adapter(folder: Path, base: Path, targets: Sequence[str] = ("q_proj", "v_proj", "down_proj")) -> Path:
    """Fill a folder with an adapter for some layers of a model, taken from its shapes."""
    random = np.random.default_rng(4)
    made: dict[str, builders.TensorSpec] = {}
    for name, (_, shape, _) in tensors(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for part, sides in (("lora_A", (8, shape[1])), ("lora_B", (shape[0], 8))):
                values = (random.standard_normal(sides) * 0.05).astype("<f4").tobytes()
                made[f"base_model.model.{module}.{part}.weight"] = ("F32", sides, values)
    return builders.lora_adapter(folder, tensors=made, rank=8, alpha=16, targets=list(targets))


@contextmanager
def command(*arguments: str | Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `registry` as a process of its own; it is killed on the way out."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
