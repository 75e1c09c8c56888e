"""Checkpoints whose weights are in parts, with the tensors that must come out of them, as torch itself holds them.

parts.zero(folder, stage=3)        DeepSpeed's rank files           parts.pieces(folder, state)   torch's own writer
parts.same(found, wanted)          every tensor bit by bit
"""

import io
import itertools
import pickle
import struct
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weighbridge.adapters.formats import torch_zip
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


def zero_by_torch(folder: Path, held: Mapping[str, Any], *, world: int, stage: int) -> None:
    """Write what DeepSpeed's engine writes of fp32 weights, with torch.save itself: one group, cut over the ranks."""
    import torch  # noqa: PLC0415 - most users of this library do without

    def padded(flat: Any, length: int) -> Any:
        return torch.cat([flat, torch.zeros(length - flat.numel())])

    place = folder / "global_step3"
    place.mkdir(parents=True)
    flats = [tensor.reshape(-1) for tensor in held.values()]
    if stage == 3:
        shares = [-(-flat.numel() // world) for flat in flats]
        whole = [padded(flat, n * world).reshape(world, n) for flat, n in zip(flats, shares, strict=True)]
        ranks_ = [torch.cat([tensor[rank] for tensor in whole]) for rank in range(world)]
    else:
        joined = torch.cat(flats)
        share = -(-joined.numel() // (2 * world)) * 2
        ranks_ = list(padded(joined, share * world).reshape(world, share).clone())
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in held.items())]
    table: dict[str, Any] = {
        "module": {},
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "global_steps": 3,
    }
    table |= {"shared_params": {}, "dp_world_size": world, "mp_world_size": 1, "ds_version": "0.16.5"}
    for rank, flat in enumerate(ranks_):
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        count = world if stage == 3 else [world]
        optimizer = {"zero_stage": stage, "partition_count": count, key: [flat.clone()]}
        slots = {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 1e-4}]}
        body = {"optimizer_state_dict": optimizer | {"base_optimizer_state": slots}, "ds_version": "0.16.5"}
        torch.save(body, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            torch.save(table, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage != 3:
        torch.save(table, place / "mp_rank_00_model_states.pt")


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


def cut_pieces(folder: Path, held: Mapping[str, Any], cuts: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Write a distributed checkpoint as several ranks would, with torch's own records: every tensor cut along a grid.

    `cuts` gives, for each side of a tensor, where it is cut: tensor parallelism over rows and columns at once. Each
    piece goes into the file of another rank.
    """
    import torch  # noqa: PLC0415 - most users of this library do without
    from torch.distributed.checkpoint import metadata as m  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    bodies: dict[str, bytes] = {}
    for name, tensor in held.items():
        edges = [
            sorted({0, side, *at}) for side, at in zip(tensor.shape, cuts.get(name, [[]] * tensor.dim()), strict=True)
        ]
        chunks = []
        for rank, spans in enumerate(itertools.product(*(list(itertools.pairwise(edge)) for edge in edges))):
            piece = tensor[tuple(slice(a, b) for a, b in spans)]
            body = io.BytesIO()
            torch.save(piece.clone(memory_format=torch.contiguous_format), body)
            file = f"__{rank}_0.distcp"
            offsets, sizes = torch.Size([a for a, _ in spans]), piece.shape
            chunks.append(m.ChunkStorageMetadata(offsets, sizes))
            begin = len(bodies.get(file, b""))
            stored[m.MetadataIndex(name, offsets)] = _StorageInfo(file, begin, len(body.getvalue()))
            bodies[file] = bodies.get(file, b"") + body.getvalue()
        table[name] = m.TensorStorageMetadata(m.TensorProperties.create_from_tensor(tensor), tensor.shape, chunks)
    for file, raw in bodies.items():
        (folder / file).write_bytes(raw)
    with (folder / ".metadata").open("wb") as stream:
        pickle.dump(m.Metadata(table, {name: (name,) for name in held}, stored), stream)


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


def emptied(file: Path) -> None:
    """Fill the large tensors of a rank file with zeros, as a rank that never got its part leaves them."""
    raw = bytearray(file.read_bytes())
    for tensor in torch_zip.read(file).tensors:
        if tensor.nbytes > 1000 and tensor.offset is not None:
            raw[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    file.write_bytes(raw)
