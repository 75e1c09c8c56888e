"""What `registry inspect` and `registry extract` cost: CPU by tensors and by bytes, torch's own reader, a bare copy.

*model*: a mixture of experts of over 100,000 tensors in 100 shards, once and again. *growth*: one model of few tensors
in 1, 4 and 16 GB. *directory*: the list of a torch file's tensors beside `torch.load(mmap=True)` of the same file, in
turns in one process, so that imports count on neither side. *extract*: torch zip to safetensors by the command, beside
one pass of copy + sha256 + fsync over the same bytes. The weights of the first two are holes: headers alone are read.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from weighbridge_testlib import measure
from weighbridge_testlib.builders import llama_config, shard_names, write_json, write_tokenizer
from weighbridge_testlib.yard import BIN, Yard

HIDDEN, WIDTH = 64, 32
CPU_MAX = 2.0
DIRECTORY_BAR, EXTRACT_BAR, GROWTH_BAR = 0.25, 1.5, 1.25
MEMORY_MAX = 200 << 20
Shapes = dict[str, tuple[int, ...]]


def experts(layers: int, count: int) -> Shapes:
    """Return the names and shapes of a mixture of experts."""
    shapes: Shapes = {"model.embed_tokens.weight": (256, HIDDEN)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{stem}.{norm}.weight"] = (HIDDEN,)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{stem}.self_attn.{part}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{stem}.block_sparse_moe.gate.weight"] = (count, HIDDEN)
        for expert in range(count):
            inner = f"{stem}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{inner}.w1.weight": (WIDTH, HIDDEN), f"{inner}.w3.weight": (WIDTH, HIDDEN)}
            shapes[f"{inner}.w2.weight"] = (HIDDEN, WIDTH)
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (256, HIDDEN)}


def plain(gigabytes: int) -> Shapes:
    """Return the names and shapes of 48 matrices that fill so many GB in BF16."""
    columns = 8192
    rows = gigabytes * 1_000_000_000 // (48 * 2 * columns)
    shapes: Shapes = {f"model.layers.{i}.mlp.up_proj.weight": (rows, columns) for i in range(48)}
    return {"model.embed_tokens.weight": (256, HIDDEN), **shapes}


def sparse(folder: Path, shapes: Shapes, shards: int) -> int:
    """Write a model of BF16 weights that are holes; return its bytes by length."""
    folder.mkdir(parents=True)
    names = list(shapes)
    each = -(-len(names) // shards)
    files = shard_names(shards) if shards > 1 else ["model.safetensors"]
    weight_map, total = {}, 0
    for number, file in enumerate(files):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names[number * each : (number + 1) * each]:
            size = 2
            for side in shapes[name]:
                size *= side
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        total += at
    if shards > 1:
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    config = llama_config() | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 256}
    write_json(folder / "config.json", config | {"hidden_size": HIDDEN, "tie_word_embeddings": shards == 1})
    write_tokenizer(folder)
    return total


def look(yard: Yard, folder: Path, rounds: int) -> list[measure.Cost]:
    """Inspect a folder so many times, once unmeasured before."""
    command = [str(BIN / "registry"), "inspect", str(folder)]
    done = yard.run([*command, "--json"])
    if done.returncode:
        raise SystemExit(f"{folder.name} is not accepted: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return [measure.cost(command, env=yard.env, cwd=yard.folder) for _ in range(rounds)]


def by_torch(yard: Yard, *arguments: object) -> dict[str, list[float]]:
    """Run torch's side as a process of its own: its memory would count as that of every command started from here."""
    done = yard.run([sys.executable, str(Path(__file__).with_name("torch_side.py")), *map(str, arguments)])
    if done.returncode:
        raise SystemExit(f"torch_side.py ended with {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def extract(yard: Yard, file: Path, options: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Return the wall seconds of the command and of a bare copy, in turns, and the command's peak memory."""
    target, copy = yard.folder / "extracted", yard.folder / "copy"
    command = [str(BIN / "registry"), "extract", str(file), "--to", str(target)]
    times: dict[str, list[float]] = {"extract": [], "single_pass": []}
    peak = 0
    measure.single_pass(file.parent, copy)  # once unmeasured: the source is in the page cache for both
    shutil.rmtree(copy)
    for _ in range(options.rounds):
        costs: list[measure.Cost] = []
        times["extract"].append(
            measure.timed(lambda: costs.append(measure.cost(command, env=yard.env, cwd=yard.folder)), options.rest)  # noqa: B023
        )
        if costs[0].code:
            raise SystemExit(f"registry extract ended with {costs[0].code}")
        peak = max(peak, costs[0].peak)
        shutil.rmtree(target)
        times["single_pass"].append(measure.timed(lambda: measure.single_pass(file.parent, copy), options.rest))
        shutil.rmtree(copy)
    return times, peak


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=554, help="in each of 60 layers (default 554: 100,143 tensors)")
    parser.add_argument("--tensors", type=int, default=3000, help="in the torch file whose list is read")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the torch file that is extracted")
    parser.add_argument("--rest", type=float, default=5, help="seconds before each timed copy (default 5)")
    parser.add_argument("--directory", type=Path, help="the disk to measure on (default: the temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-inspect-", dir=options.directory) as base, Yard(Path(base)) as yard:
        del yard.env["PYTHONDONTWRITEBYTECODE"]
        shapes = experts(60, options.experts)
        sparse(yard.folder / "many", shapes, 100)
        many = look(yard, yard.folder / "many", options.rounds)
        growth: dict[int, list[measure.Cost]] = {}
        for gigabytes in (1, 4, 16):
            sparse(yard.folder / f"{gigabytes}-gb", plain(gigabytes), 1)
            growth[gigabytes] = look(yard, yard.folder / f"{gigabytes}-gb", options.rounds)
        small = yard.folder / "list.pt"
        listed = by_torch(yard, small, options.tensors, 1, 2 * options.rounds)
        large = yard.folder / "torch" / "pytorch_model.bin"
        large.parent.mkdir()
        by_torch(yard, large, max(1, options.megabytes // 32), 8192, 0)
        taken, peak = extract(yard, large, options)
        size = large.stat().st_size
    cpu = {gigabytes: statistics.median(c.cpu for c in costs) for gigabytes, costs in growth.items()}
    best = {name: min(values) for name, values in (listed | taken).items()}
    return measure.report(
        "inspection",
        {
            "cpu_seconds_of_100_shards": (statistics.median(c.cpu for c in many), CPU_MAX),
            "cpu_16_gb_over_1_gb": (cpu[16] / cpu[1], GROWTH_BAR),
            "list_over_torch_load_mmap": (best["weighbridge"] / best["torch_load_mmap"], DIRECTORY_BAR),
            "extract_over_single_pass": (best["extract"] / best["single_pass"], EXTRACT_BAR),
            "extract_peak_bytes": (peak, MEMORY_MAX),
        },
        tensors=len(shapes),
        cpu_seconds={"many": [round(c.cpu, 2) for c in many], **{f"{g}_gb": round(s, 3) for g, s in cpu.items()}},
        peak_bytes_many=max(c.peak for c in many),
        list_ms={name: round(1000 * best[name], 2) for name in listed},
        extracted_bytes=size,
        seconds={name: [round(v, 3) for v in values] for name, values in taken.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
