"""Checkpoints whose weights are in parts, with the tensors that must come out of them, as torch itself holds them.

parts.zero(folder, stage=3)        DeepSpeed's rank files           parts.pieces(folder, state)   torch's own writer
parts.same(found, wanted)          every tensor bit by bit
"""

import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge_testlib import ranks
from weighbridge_testlib.builders import llama_tensors

MODEL = {label: tuple(shape) for label, (_, shape, _) in llama_tensors().items()}


def zero(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None, **how: Any) -> dict[str, Any]:
    """Write a ZeRO checkpoint and return its tensors."""
    import torch  # noqa: PLC0415 - most users of this library do without

    shapes = shapes or MODEL
    values = ranks.zero_folder(folder, shapes, **how)
    every = {**shapes, **(how.get("frozen") or {})}
    frozen = how.get("frozen") or {}
    tables = {name: torch.tensor(values[name], dtype=torch.float32).reshape(every[name]) for name in values}
    return {name: tensor.to(torch.bfloat16) if name in frozen else tensor for name, tensor in tables.items()}


def state(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Return a model's state, random."""
    import torch  # noqa: PLC0415 - most users of this library do without

    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in (shapes or MODEL).items()}


def pieces(folder: Path, held: Mapping[str, Any]) -> None:
    """Save a state with torch.distributed.checkpoint, in this process."""
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - most users do without

    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not initialised
        save(dict(held), checkpoint_id=str(folder))


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Assert that two tables hold the same tensors: names, dtypes, shapes and bits."""
    import torch  # noqa: PLC0415 - most users of this library do without

    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        mine = found[name]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
        plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert torch.equal(mine.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name


def poison(file: Path, near: float, value: float = float("nan")) -> None:
    """Put another fp32 value where a file holds one that is known, as a trainer that diverged would have."""
    raw = file.read_bytes()
    found = struct.pack("<f", near)
    assert raw.count(found) >= 1, "the file does not hold that value"
    file.write_bytes(raw.replace(found, struct.pack("<f", value), 1))
