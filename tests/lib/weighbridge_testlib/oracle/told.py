"""What a tool says of the files it wrote, and how it is kept beside them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from weighbridge.adapters import extract, extract_write

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class Told(NamedTuple):
    """A tool's word: the tensors it saved or loads, facts by the names of docs/facts.md, and the findings that are due.

    `artifact` and `kind` are what such a folder is, `kind` None for what is only taken out; `due` are the codes, other
    than notes, that are right here.
    """

    artifact: str
    kind: str | None
    tensors: Mapping[str, Any]
    facts: Mapping[str, Any] = {}
    due: tuple[str, ...] = ()


Make = Callable[[Path], Told]
"""Fill a folder that does not exist yet."""


def keep(place: Path, told: Told) -> None:
    """Write what a tool says beside the files it wrote."""
    sizes = {name: [DTYPES[t.dtype], list(t.shape)] for name, t in told.tensors.items()}
    table = {**told._asdict(), "tensors": sizes}
    (place / "told.json").write_text(json.dumps(table))
    apart = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in told.tensors.items()}
    save_file(apart, place / "want.safetensors")


def taken(place: Path, source: Path, *, adapter: bool = False) -> Path:
    """Extract a checkpoint as `registry extract` does, and return the new folder."""
    extract_write.write(extract.plan(source, adapter=adapter), place / "out")
    return place / "out"


def build(cases: Mapping[str, Make], folder: Path) -> None:
    """Make every case of a group."""
    torch.set_num_threads(1)
    for name, make in cases.items():
        place = folder / name
        place.mkdir(parents=True)
        torch.manual_seed(7)
        try:
            keep(place, make(place / "made"))
        except Exception as error:  # noqa: BLE001 - told by the test of the case
            (place / "failed.txt").write_text(f"{type(error).__name__}: {error}")
