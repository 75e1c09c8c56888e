"""`registry extract`: the weights of a checkpoint as safetensors, without torch."""

import re
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.adapters import extract as extraction
from weighbridge.adapters import extract_write
from weighbridge.adapters.target import free
from weighbridge.registry.cli import options, paths
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import UsageError
from weighbridge.registry.refs import shown

SCHEMA: Final = "weighbridge/extract/1"
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_DTYPES: Final = {
    "f64": "F64", "fp64": "F64", "float64": "F64", "f32": "F32", "fp32": "F32", "float32": "F32", "f16": "F16",
    "fp16": "F16", "float16": "F16", "half": "F16", "bf16": "BF16", "bfloat16": "BF16",
}  # fmt: skip


@click.command("extract")
@click.argument("checkpoint", metavar="CKPT", type=paths.PLACE)
@click.option("--to", "target", metavar="DIR", required=True, type=paths.PLACE, help="A new folder.")
@click.option("--key", metavar="NAME", help="The table that holds the model, where there are several.")
@click.option("--adapter", is_flag=True, help="Take the adapter's weights only, under PEFT's names.")
@click.option("--dtype", metavar="DTYPE", help="Convert floating weights: bf16, fp16, fp32 or fp64.")
@click.option("--keep-fp32", metavar="CLASSES", help="Layer classes that stay in fp32: norm,embed,head,router,...")
@click.option("--shard-size", metavar="SIZE", default="5GB", show_default=True, help="Largest shard; 0 for one file.")
@click.option("--dry-run", is_flag=True, help="Say what would come out, write nothing.")
@options.talking
def extract(
    *,
    checkpoint: Path,
    target: Path,
    key: str | None,
    adapter: bool,
    dtype: str | None,
    keep_fp32: str | None,
    shard_size: str,
    dry_run: bool,
    out: Output,
) -> None:
    """Take the weights out of CKPT and write them into DIR as safetensors, with what a loader needs beside them.

    CKPT is a torch file, a Lightning checkpoint, a model or adapter of pickles, a DeepSpeed ZeRO folder or a torch
    distributed checkpoint. No pickle is run. What is left behind is listed with its size.
    """
    if not (checkpoint.is_file() or checkpoint.is_dir()):
        raise paths.absent(checkpoint)
    free(target)
    limit = _bytes(shard_size)
    if keep_fp32 and dtype is None:
        raise UsageError("--keep-fp32 needs --dtype", fix="--dtype bf16 --keep-fp32 norm,embed")
    made = extraction.plan(checkpoint, key=key, adapter=adapter)
    wanted = None if dtype is None else _DTYPES.get(dtype.lower(), dtype)
    classes = [word.strip() for word in (keep_fp32 or "").split(",") if word.strip()]
    made = extract_write.with_dtype(made, wanted, classes)
    if dry_run:
        report = extract_write.Report([], {}, 0)
    else:
        with following(out) as follower:
            report = extract_write.write(made, target, shard_size=limit, progress=follower.total)
    _tell(made, report, target, out)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12})\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"'{shown(text)}' is no size", fix="--shard-size 5GB")
    number = int(match[1])
    unit = _UNITS[match[2].lower()]
    if match[3]:
        unit = 1024 ** "kmgt".find(match[2].lower()) * 1024 if match[2] else 1
    return number * unit or 1 << 62


def _tell(made: extraction.Extraction, report: extract_write.Report, target: Path, out: Output) -> None:
    total = sum(item.size for item in made.items)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "to": str(target),
        "artifact": made.artifact,
        "tensors": len(made.items),
        "bytes": total,
        "weights_key": made.weights_key,
        "weight_sets": list(made.sets),
        "stripped_prefix": made.prefix,
        "aliases": made.aliases,
        "dropped": made.dropped,
        "casts": report.casts,
        "overflowed": report.overflowed,
        "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in report.files],
    }
    if out.as_json:
        out.json(document)
        return
    for file in report.files:
        out.say(f"{target / file.path}  {size(file.size)}")
    out.talk(f"{len(made.items)} tensors, {size(total)}" + (f", from {made.weights_key}" if made.weights_key else ""))
    if made.prefix:
        out.talk(f"taken off every name: {made.prefix}")
    for name, owner in sorted(made.aliases.items()):
        out.talk(f"{name} is {owner} under another name and is stored once")
    for name, held in sorted(made.dropped.items()):
        out.talk(f"left behind: {name}" + (f"  {size(held)}" if held else ""))
    for label, changes in sorted(report.casts.items()):
        out.talk(f"{label}: " + ", ".join(f"{count} tensors {change}" for change, count in sorted(changes.items())))
    if report.overflowed:
        out.talk(f"{report.overflowed} values do not fit the new dtype and became infinite", style="yellow")
