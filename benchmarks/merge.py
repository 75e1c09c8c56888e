"""Merge an adapter of rank 16 on all linear layers into a bf16 base, beside plain copying and beside PEFT.

Four ways over the same files, on one disk, in one run: `cp` of the base with fsync and then sha256 of the copy; the
streaming of the weights alone, as the command's child does it; `registry merge` whole, with its copy, element and
fidelity proof; PEFT's load, merge and save on the processor. Then the peak memory of the streaming at one, two and four
times a base, which may not grow with it.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from weighbridge_testlib import measure
from weighbridge_testlib.builders import (
    TensorSpec,
    index_of,
    llama_config,
    lora_adapter,
    pack,
    shard_names,
    write_json,
    write_safetensors,
)
from weighbridge_testlib.yard import BIN

HIDDEN = 2048
RANK = 16
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * 4 * HIDDEN * HIDDEN)

STREAM = """
import json, re, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weighbridge.adapters.merge import preview, stream
seen = preview.look([Path(sys.argv[1])], Path(sys.argv[2]), weigh=False)
plan, out = seen.planned.plan, Path(sys.argv[3])
out.mkdir()
begun = time.monotonic()
with stream.Files(plan) as files, ThreadPoolExecutor(3) as pool:
    look = stream.every(plan)
    list(pool.map(lambda f: stream.write(f, files, str(out / f.path), look, lambda _: None), plan.files))
took = time.monotonic() - begun
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10  # ours since exec
print(json.dumps({"seconds": took, "peak": peak}))
"""

PEFT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from peft import PeftModel
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[1]).merge_and_unload().save_pretrained(sys.argv[3])
"""


def shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """Return the weights of one layer."""
    stem = f"model.layers.{layer}."
    wide = {"gate_proj": (4 * HIDDEN, HIDDEN), "up_proj": (4 * HIDDEN, HIDDEN), "down_proj": (HIDDEN, 4 * HIDDEN)}
    found: dict[str, tuple[int, ...]] = {f"{stem}self_attn.{name}.weight": (HIDDEN, HIDDEN) for name in LINEAR[:4]}
    found |= {f"{stem}mlp.{name}.weight": shape for name, shape in wide.items()}
    return found | {f"{stem}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}


def build(folder: Path, layers: int, shards: int) -> Path:
    """Write a base; the numbers of its layers repeat, which nothing here can make use of."""
    folder.mkdir()
    random = np.random.default_rng(1)
    noise = (random.standard_normal(4 * HIDDEN * HIDDEN, np.float32) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    ends = {"model.embed_tokens.weight": (256, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (256, HIDDEN)}
    parts: list[tuple[str, dict[str, TensorSpec]]] = []
    for number, name in enumerate(shard_names(shards)):
        wanted: dict[str, tuple[int, ...]] = dict(ends) if number == 0 else {}
        for layer in range(number, layers, shards):
            wanted |= shapes(layer)
        tensors: dict[str, TensorSpec] = {
            key: ("BF16", shape, noise[: 2 * int(np.prod(shape))]) for key, shape in wanted.items()
        }
        write_safetensors(folder / name, tensors)
        parts.append((name, {key: (kind, shape, pack("U8", (1,), 0)) for key, (kind, shape, _) in tensors.items()}))
    index = index_of(parts)
    index["metadata"]["total_size"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    write_json(folder / "model.safetensors.index.json", index)
    write_json(
        folder / "config.json",
        llama_config(
            hidden_size=HIDDEN, vocab_size=256, num_hidden_layers=layers, intermediate_size=4 * HIDDEN,
            num_attention_heads=16, num_key_value_heads=16, head_dim=HIDDEN // 16, tie_word_embeddings=False,
        ),
    )  # fmt: skip
    return folder


def adapt(folder: Path, layers: int) -> Path:
    """Write an adapter for every linear layer."""
    random = np.random.default_rng(2)
    made: dict[str, TensorSpec] = {}
    for layer in range(layers):
        for name, shape in shapes(layer).items():
            if len(shape) == 2:
                for part, sides in (("lora_A", (RANK, shape[1])), ("lora_B", (shape[0], RANK))):
                    values = (random.standard_normal(sides, np.float32) * 0.02).tobytes()
                    made[f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"] = ("F32", sides, values)
    return lora_adapter(folder, tensors=made, rank=RANK, alpha=2 * RANK, targets=list(LINEAR))


def copied(base: Path, target: Path) -> float:
    """Copy the base, force it to disk, and hash the copy; return the seconds."""
    begun = time.monotonic()
    shutil.copytree(base, target)
    for path in target.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    for path in target.iterdir():
        with path.open("rb") as stream:
            hashlib.file_digest(stream, "sha256")
    return time.monotonic() - begun


def streamed(adapter: Path, base: Path, target: Path) -> Any:
    """Stream the weights in a process of its own; return its seconds and its peak memory."""
    command = [sys.executable, "-c", STREAM, str(adapter), str(base), str(target)]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # as the command's child is started
    return json.loads(subprocess.run(command, env=alone, capture_output=True, text=True, check=True).stdout)


def timed(command: list[str]) -> float:
    """Run a command; return the seconds."""
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return time.monotonic() - begun


def main() -> int:
    """Run all ways, best of `--rounds`, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the base")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    layers = max(4, (given.megabytes << 20) // LAYER_BYTES)
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        yard = Path(place)
        base, adapter, out = build(yard / "base", layers, 5), adapt(yard / "adapter", layers), yard / "out"
        size = sum(path.stat().st_size for path in base.iterdir())
        for _ in range(given.rounds):
            note("copy", copied(base, out))
            shutil.rmtree(out)
            note("stream", streamed(adapter, base, out)["seconds"])
            shutil.rmtree(out)
            note(
                "command", timed([str(BIN / "registry"), "merge", str(adapter), "--base", str(base), "--to", str(out)])
            )
            shutil.rmtree(out)
        if not given.no_peft:
            note("peft", timed([sys.executable, "-c", PEFT, str(adapter), str(base), str(out)]))
            shutil.rmtree(out)
        weights = sum(path.stat().st_size for path in adapter.iterdir())
        shutil.rmtree(base)
        peaks: list[int] = []
        small = adapt(yard / "small", 1)
        for times in (1, 2, 4):  # the adapter stays, only the base grows
            grown = build(yard / "grown", times * max(1, layers // 4), 1)
            peaks.append(streamed(small, grown, out)["peak"])
            shutil.rmtree(out)
            shutil.rmtree(grown)
    own = 4 * RANK * (4 * 2 * HIDDEN + 3 * 5 * HIDDEN)
    bars = {
        "stream_over_copy": (best["stream"] / best["copy"], 1.0),
        "peak_over_bound": (max(peaks) / ((400 << 20) + own), 1.0),
        "peak_growth": (peaks[-1] / peaks[0], 1.1),
    }
    if "peft" in best:
        bars["command_over_peft"] = (best["command"] / best["peft"], 1 / 3)
    return measure.report(
        "merge",
        bars,
        base_bytes=size,
        adapter_bytes=weights,
        seconds={name: round(value, 2) for name, value in best.items()},
        peak_bytes=peaks,
    )


if __name__ == "__main__":
    sys.exit(main())
