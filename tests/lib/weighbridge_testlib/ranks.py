"""What trainers leave when each rank writes a file of its own: DeepSpeed ZeRO folders, Megatron folders, rank files.

zero_folder(folder, {"w": (2, 3)}, world=2, stage=3)   returns {"w": [values]}, which the ranks hold together
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weighbridge_testlib.builders import gauss
from weighbridge_testlib.containers import T, call, name, torch_zip

Shapes = Mapping[str, tuple[int, ...]]


def flat(values: Sequence[float], length: int) -> T:
    """Return a flat fp32 tensor, padded with zeros."""
    return T("F32", (length,), [*values, *([0.0] * (length - len(values)))])


def cut(values: Sequence[float], world: int) -> list[list[float]]:
    """Return equal parts, the last one shorter."""
    part = math.ceil(len(values) / world)
    return [list(values[rank * part : (rank + 1) * part]) for rank in range(world)]


def zero_folder(
    folder: Path,
    shapes: Shapes,
    *,
    world: int = 2,
    stage: int = 2,
    tag: str = "global_step5",
    step: int = 5,
    lead: str = "",
    groups: int = 1,
    frozen: Shapes | None = None,
    buffers: Mapping[str, T] | None = None,
    shared: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Write a ZeRO checkpoint of some parameters and return the values of every tensor in it."""
    values = {label: gauss(step, label, math.prod(shape)) for label, shape in {**shapes, **(frozen or {})}.items()}
    names = list(shapes)
    parts = [names[i::groups] for i in range(groups)]
    listed = [{label: call(name("torch", "Size"), shapes[label]) for label in part} for part in parts]
    place = folder / tag
    place.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    flats = (_third if stage == 3 else _second)(values, parts, world)
    for rank in range(world):
        state: dict[str, Any] = {"zero_stage": stage}
        if stage == 3:
            state |= {"partition_count": world, "fp32_flat_groups": flats[rank]}
        else:
            state |= {"partition_count": [world] * groups, "single_partition_of_fp32_groups": flats[rank]}
        state["base_optimizer_state"] = {"state": {0: {"exp_avg": T("F32", (3,), 1.0)}}, "param_groups": []}
        body = torch_zip({"optimizer_state_dict": state, "ds_version": "0.16.5"})
        (place / f"{lead}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(body)
    for rank in range(world if stage == 3 else 1):
        table = _model(values, listed, frozen or {}, buffers or {}, shared or {}, rank, world, stage, step)
        file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        (place / file).write_bytes(torch_zip(table))
    return values


def _second(values: Mapping[str, list[float]], parts: Sequence[Sequence[str]], world: int) -> list[list[T]]:
    """Return the groups of every rank: each group is one flat tensor, cut into equal parts."""
    ranks: list[list[T]] = [[] for _ in range(world)]
    for part in parts:
        whole = [value for label in part for value in values[label]]
        length = math.ceil(len(whole) / (2 * world)) * 2
        whole += [0.0] * (length * world - len(whole))
        for rank in range(world):
            ranks[rank].append(flat(whole[rank * length : (rank + 1) * length], length))
    return ranks


def _third(values: Mapping[str, list[float]], parts: Sequence[Sequence[str]], world: int) -> list[list[T]]:
    """Return the groups of every rank: its padded part of each tensor, one after the other."""
    ranks: list[list[T]] = [[] for _ in range(world)]
    for part in parts:
        for rank in range(world):
            held: list[float] = []
            for label in part:
                mine = cut(values[label], world)[rank]
                held += mine + [0.0] * (math.ceil(len(values[label]) / world) - len(mine))
            ranks[rank].append(flat(held, len(held)))
    return ranks


def _model(  # noqa: PLR0917 - one place calls it
    values: Mapping[str, list[float]],
    listed: list[dict[str, Any]],
    frozen: Shapes,
    buffers: Mapping[str, T],
    shared: Mapping[str, str],
    rank: int,
    world: int,
    stage: int,
    step: int,
) -> dict[str, Any]:
    fragments = {
        label: T("BF16", (len(part),), part)
        for label in frozen
        for part in [cut(values[label], world)[rank] if stage == 3 else values[label]]
    }
    if stage != 3:
        fragments = {label: T("BF16", shape, values[label]) for label, shape in frozen.items()}
    return {
        "module": {**buffers, "a.weight": T("BF16", (0,), None)},
        "buffer_names": list(buffers),
        "param_shapes": listed,
        "frozen_param_shapes": {label: call(name("torch", "Size"), shape) for label, shape in frozen.items()} or None,
        "frozen_param_fragments": fragments or None,
        "shared_params": dict(shared),
        "global_steps": step,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.16.5",
        "ds_config": {"zero_optimization": {"stage": stage}},
    }


def megatron_folder(folder: Path, *, iteration: int, tp: int = 1, pp: int = 1) -> Path:
    """Write one iteration of a Megatron run and its tracker file."""
    place = folder / f"iter_{iteration:07d}"
    for t in range(tp):
        for p in range(pp):
            rank = place / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            rank.mkdir(parents=True)
            args = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            body = {
                "iteration": iteration,
                "checkpoint_version": 3.0,
                "args": args,
                "model": {"w": T("F32", (2, 2), 1.0)},
            }
            (rank / "model_optim_rng.pt").write_bytes(torch_zip(body))
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return place
