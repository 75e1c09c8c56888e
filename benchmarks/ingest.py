"""Publish a 1 GiB checkpoint to a directory remote, beside `dvc add` + `dvc push` and beside a bare copy with sha256.

Three ways with the same bytes on the same disk, in changing order: `registry push`; `dvc add` and `dvc push` into a
fresh repository without Git; one pass that copies, hashes and forces each file to disk. Where dvc is not installed its
part is skipped and said so. Virtual disks write fast for a while and slowly afterwards, so the disk rests before each.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from weighbridge_testlib import measure
from weighbridge_testlib.builders import (
    TensorSpec,
    index_of,
    llama_config,
    pack,
    shard_names,
    write_json,
    write_safetensors,
    write_tokenizer,
)
from weighbridge_testlib.yard import BIN, Yard

MEGABYTE = 1 << 20


def build(folder: Path, megabytes: int, shards: int) -> int:
    """Write a checkpoint of random BF16 weights; return its bytes."""
    columns = 2048
    rows = megabytes * MEGABYTE // shards // (2 * columns)
    parts: list[tuple[str, dict[str, TensorSpec]]] = []
    for i, name in enumerate(shard_names(shards)):
        body = measure.noise(i, rows * columns, "BF16")
        tensors: dict[str, TensorSpec] = {f"model.layers.{i}.mlp.up_proj.weight": ("BF16", (rows, columns), body)}
        write_safetensors(folder / name, tensors)
        parts.append((name, {key: (dtype, shape, pack("U8", (1,), 0)) for key, (dtype, shape, _) in tensors.items()}))
    index = index_of(parts)
    index["metadata"]["total_size"] = 2 * rows * columns * shards
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", llama_config())
    write_tokenizer(folder)
    return sum(p.stat().st_size for p in folder.iterdir())


def push(yard: Yard, source: Path, rest: float) -> float:
    """Publish with an empty remote."""
    shutil.rmtree(yard.remote, ignore_errors=True)
    shutil.rmtree(yard.cache, ignore_errors=True)

    def work() -> None:
        done = yard.push(source, "bench")
        if done.returncode:
            raise SystemExit(f"registry push failed: {done.stderr[-1000:]}")

    return measure.timed(work, rest)


def dvc(base: Path, source: Path, rest: float) -> float | None:
    """Add and push with an empty cache and an empty remote; None without dvc."""
    program = BIN / "dvc"
    if not program.exists():
        return None
    repository = base / "dvc"
    shutil.rmtree(repository, ignore_errors=True)
    repository.mkdir()
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(base), "DVC_NO_ANALYTICS": "1"}

    def call(*arguments: str) -> None:
        subprocess.run(
            [str(program), *arguments], cwd=repository, env=environment, check=True, capture_output=True, timeout=600
        )

    call("init", "--no-scm", "-q")
    call("remote", "add", "-d", "store", str(repository / "store"))
    shutil.copytree(source, repository / "data")

    def work() -> None:
        call("add", "-q", "data")
        call("push", "-q")

    seconds = measure.timed(work, rest)
    shutil.rmtree(repository)
    return seconds


def single_pass(base: Path, source: Path, rest: float) -> float:
    """Copy, hash and force to disk, one file after the other."""
    target = base / "copy"
    seconds = measure.timed(lambda: measure.single_pass(source, target), rest)
    shutil.rmtree(target)
    return seconds


def main() -> int:
    """Measure in turns and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=12, help="seconds before each measurement (default 12)")
    parser.add_argument("--directory", type=Path, help="the disk to measure on (default: the temporary folder)")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"push": [], "dvc": [], "single_pass": []}
    with tempfile.TemporaryDirectory(prefix="wb-ingest-", dir=options.directory) as folder, Yard(Path(folder)) as yard:
        base, source = Path(folder), Path(folder) / "checkpoint"
        size = build(source, options.megabytes, options.shards)
        single_pass(base, source, 0)  # once unmeasured: the source is in the page cache for everybody
        ways: list[tuple[str, Callable[[], float | None]]] = [
            ("push", lambda: push(yard, source, options.rest)),
            ("single_pass", lambda: single_pass(base, source, options.rest)),
            ("dvc", lambda: dvc(base, source, options.rest)),
        ]
        for turn in range(options.rounds):
            for name, way in ways[turn % 3 :] + ways[: turn % 3]:  # nobody is always the first on a rested disk
                seconds = way()
                times[name] += [seconds] if seconds is not None else []
        yard.check(contents=1, closed=True, swept=0.0)
    best = {name: min(values) for name, values in times.items() if values}
    bars = {"push_over_single_pass": (best["push"] / best["single_pass"], 1.3)}
    if "dvc" in best:
        bars["push_over_dvc"] = (best["push"] / best["dvc"], 0.45)
    return measure.report(
        "ingest",
        bars,
        bytes=size,
        seconds={name: [round(v, 3) for v in values] for name, values in times.items()},
        skipped=[] if "dvc" in best else ["SKIPPED dvc: not installed"],
    )


if __name__ == "__main__":
    sys.exit(main())
