"""The arithmetic of a merge on a device: the same code on a GPU and on the processor, held to the same proof.

Where torch sees a GPU the tests run on both; else on the processor alone, and nothing is skipped for it.
"""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from weighbridge.adapters import jail
from weighbridge.adapters.merge import device, pays, reach, start
from weighbridge.adapters.merge.preview import Look, look
from weighbridge.adapters.merge.values import Magnitude
from weighbridge.registry import errors
from weighbridge_testlib import builders, merging

DEVICES = ["processor", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "stored", "more"),
    [
        (None, "BF16", {}),
        (None, "F16", {"alpha": 5}),
        ("fp32", "BF16", {}),
        ("bf16", "F32", {"dora": True}),
    ],
)
def test_a_device_gives_the_numbers_of_the_processor(
    tmp_path: Path, where: str, *, dtype: str | None, stored: str, more: dict[str, Any]
) -> None:
    """Every element is within the bound, and no further from numpy's than another order of sums; copies are copies."""
    base = merging.wide_model(tmp_path / "base", shards=2, layers=1, hidden=96, dtype=stored)
    adapter = merging.wide_adapter(tmp_path / "adapter", base)
    if more.get("dora"):
        add_magnitudes(adapter)
    _, right = merging.staged(adapter, base, tmp_path / "numpy", dtype=dtype)
    _, told = merging.staged(adapter, base, tmp_path / "torch", dtype=dtype, device=where)
    assert told["arithmetic"]["device"] == {"processor": "cpu", "cuda": "cuda:0"}[where]
    proof = told["proof"]
    assert (proof["passed"], proof["bound_violations"], proof["tensors_changed"]) == (True, 0, 3)
    ours, theirs = (merging.tensors(tmp_path / name / "out") for name in ("torch", "numpy"))
    touched = {name for name in ours if any(part in name for part in ("q_proj", "v_proj", "down_proj"))}
    assert set(merging.differing(ours, theirs)) <= touched
    sums, others = (merging.numbers(tmp_path / name / "out") for name in ("torch", "numpy"))
    for name in touched:
        # half a unit of the storage, as one of the two may fall on the other side of a tie, and what fp32 sums lose
        unit = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-20}[ours[name][0]]
        assert np.all(np.abs(sums[name] - others[name]) <= 2 * unit * np.abs(others[name]) + 1e-7)
    assert told["fidelity"]["elements"] == right["fidelity"]["elements"]
    assert told["fidelity"]["cosine"] == pytest.approx(right["fidelity"]["cosine"], abs=1e-3)


def add_magnitudes(adapter: Path) -> None:
    """Turn a LoRA folder into a DoRA one."""
    tensors = merging.tensors(adapter)
    made: dict[str, builders.TensorSpec] = dict(tensors)
    for name, (_, shape, _) in tensors.items():
        if name.endswith("lora_B.weight"):
            values = np.linspace(0.5, 2.0, shape[0], dtype="<f4")
            made[name.replace("lora_B.weight", "lora_magnitude_vector")] = ("F32", (shape[0],), values.tobytes())
    targets = ["q_proj", "v_proj", "down_proj"]
    builders.lora_adapter(adapter, tensors=made, rank=8, alpha=16, targets=targets, use_dora=True)


def test_a_tensor_in_several_stretches_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are sent several at once; where a tensor needs more than one sending, its rows meet their factors."""
    base = merging.wide_model(tmp_path / "base", shards=1, layers=1, hidden=512)
    adapter = merging.wide_adapter(tmp_path / "adapter", base)
    merging.staged(adapter, base, tmp_path / "once", device="processor")
    monkeypatch.setattr(device, "BLOCKS", 1)
    merging.staged(adapter, base, tmp_path / "many", device="processor")
    assert merging.tensors(tmp_path / "many" / "out") == merging.tensors(tmp_path / "once" / "out")


def test_single_precision_stays_single_precision() -> None:
    """An engine switches TF32 off, whatever was set before."""
    torch.backends.cuda.matmul.allow_tf32 = True
    device.Engine("cpu")
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


def test_without_a_free_gpu_the_processor_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, one that others use, one that another merge has: numpy does the work, or who asked for a GPU is told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in device.take("cuda-if-free", tmp_path)[1]
    with pytest.raises(errors.UsageError, match="cannot be made on a GPU"):
        device.take("cuda", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"GPU-{number}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (1, 10))
    assert device.take("cuda-if-free", tmp_path) == (None, "every GPU here is in use")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (95, 100))
    held = device._held(tmp_path, 0)
    assert held is not None
    with pytest.raises(errors.ConflictError, match="in use"):
        device.take("cuda", tmp_path)
    os.close(held)
    broken = RuntimeError("CUDA error: initialization error")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (_ for _ in ()).throw(broken))
    assert "initialization error" in device.take("cuda-if-free", tmp_path)[1]
    with pytest.raises(errors.UsageError, match="cannot be made on a GPU"):
        device.take("cuda", tmp_path)


@pytest.fixture
def pair(tmp_path: Path) -> Look:
    """Return a look at a small merge."""
    base = merging.wide_model(tmp_path / "base", shards=1, layers=1)
    return look([merging.wide_adapter(tmp_path / "adapter", base)], base)


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for /dev, without a GPU in it."""
    monkeypatch.setattr(pays, "DEV", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


def test_a_gpu_is_wanted_where_rank_and_size_make_it_pay(
    pair: Look, dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary ranks are bound by the disk; a GPU is asked for when the products alone would take long enough."""
    plan = merging.plan_of(pair)
    assert pays.operations(plan) == 2 * 8 * (2 * 256 * 256 + 256 * 1024)
    assert pays.chosen(plan, "auto", 2) == (None, "there is no NVIDIA GPU here")
    with pytest.raises(errors.UsageError, match="cannot be made on a GPU"):
        pays.chosen(plan, "cuda", 2)
    (dev / "nvidia0").touch()
    few = pays.chosen(plan, "auto", 2)
    assert few.device is None
    assert "a GPU pays from 12 s on" in few.why
    assert (pays.chosen(plan, "cuda", 2).device, pays.chosen(plan, "cpu", 2).device) == ("cuda", None)
    monkeypatch.setattr(pays, "_START", 0.0)
    assert pays.chosen(plan, "auto", 2).device == "cuda-if-free"


def test_what_a_gpu_would_not_do_is_not_sent_to_one(pair: Look, dev: Path) -> None:
    """Where PEFT computes, or norms of columns need two passes, auto is the processor and --device cuda is told so."""
    (dev / "nvidia0").touch()
    plan = merging.plan_of(pair)
    factor = next(step for step in plan.steps if step.factors)
    columns = msgspec.structs.replace(factor, magnitude=Magnitude(origin=factor.origin, columns=True))
    by_peft = msgspec.structs.replace(factor, factors=(), computed=True)
    for step, words in ((columns, "no product that a GPU does"), (by_peft, "PEFT's own merge")):
        one = msgspec.structs.replace(plan, files=(msgspec.structs.replace(plan.files[0], steps=(step,)),))
        assert pays.operations(one) == 0
        assert words in pays.chosen(one, "auto", 2).why
        with pytest.raises(errors.UsageError) as caught:
            pays.chosen(one, "cuda", 2)
        assert words in str(caught.value.why)


def test_a_merge_for_a_gpu_is_jailed_bounded_and_recorded(
    pair: Look, dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to a GPU is the way of every merge: jail, proof, record; one that is not free is told in the record."""
    (dev / "nvidia0").touch()
    monkeypatch.setattr(pays, "_START", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as a scheduler says that none is ours
    done = start.merge(pair, tmp_path / "out")
    assert (done.facts["jail"], done.facts["proof"]["passed"]) == (jail.able()._asdict(), True)
    assert (done.facts["device_wanted"], done.facts["device"]) == ("cuda", "cpu")
    assert "torch sees no GPU here" in done.facts["device_told"]
    record = json.loads((tmp_path / "out" / start.RECORD).read_text())
    assert record["arithmetic"]["device_told"] == done.facts["device_told"]
    (tmp_path / "out2").mkdir()
    with pytest.raises(errors.UsageError, match="cannot be made on a GPU"):
        start.merge(pair, tmp_path / "out2" / "out", device="cuda")
    assert not list((tmp_path / "out2").iterdir())


def test_the_jail_of_a_gpu_is_wider_by_what_the_driver_needs(dev: Path, tmp_path: Path) -> None:
    """Its devices, its choice of GPUs and its locks are let in, CUDA's memory is added; bounds of time stay."""
    (dev / "nvidia0").touch()
    (dev / "sda").touch()
    plain = jail.Policy(reads=("/in",), writes=("/stage",), memory=1 << 30, processor=60, clock=60)
    wide = reach.with_gpu(plain, tmp_path, {"CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "hush"})
    assert wide.devices == (str(dev / "nvidia0"),)
    assert (wide.writes, wide.variables) == (("/stage", str(tmp_path)), (("CUDA_VISIBLE_DEVICES", "3"),))
    assert wide.memory == plain.memory + reach.HOST
    assert (wide.clock, wide.processor) == (plain.clock, plain.processor)
    assert set(plain.reads) < set(wide.reads)


def test_the_locks_of_gpus_lie_in_a_folder_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one for all jobs, and a link that somebody put under its name is not followed: the processor does it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert reach.locks() == Path("/tmp", f"weighbridge-gpu-{os.geteuid()}")
    monkeypatch.setattr(reach, "SHARED", tmp_path)
    assert reach.locks() == reach.locks() == tmp_path / f"weighbridge-gpu-{os.geteuid()}"
    reach.locks().rmdir()
    (tmp_path / f"weighbridge-gpu-{os.geteuid()}").symlink_to("/etc")
    plain = jail.Policy(reads=(), writes=("/stage",), memory=1, processor=1, clock=1)
    with pytest.raises(errors.DeniedError):
        reach.let_in({"device": "cuda"}, plain, {})
    request, same = reach.let_in({"device": "cuda-if-free"}, plain, {})
    assert (request["device"], "is not ours" in request["device_why"], same) == (None, True, plain)
