"""The arithmetic of a merge on a device: the same code on a GPU and on the processor, held to the same proof.

Where torch sees a GPU the tests run on both; else on the processor alone, and nothing is skipped for it.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weighbridge.adapters.merge import device, pays
from weighbridge.adapters.merge.preview import look
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
    """No GPU, one that others use, one that another merge has: numpy does the work, and the record says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.take("cuda") == (None, "torch sees no GPU here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (1, 10))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert device.take("cuda") == (None, "every GPU here is in use")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (95, 100))
    held = device._held(0)
    assert device.take("cuda") == (None, "every GPU here is in use")
    assert held is not None
    os.close(held)


def test_a_gpu_is_wanted_where_rank_and_size_make_it_pay(tmp_path: Path) -> None:
    """Ordinary ranks are bound by the disk; a GPU is asked for when the products alone would take long enough."""
    base = merging.wide_model(tmp_path / "base", shards=1, layers=1)
    plan = merging.plan_of(look([merging.wide_adapter(tmp_path / "adapter", base)], base))
    assert pays.operations(plan) == 2 * 8 * (2 * 256 * 256 + 256 * 1024)
    dev = tmp_path / "dev"
    dev.mkdir()
    assert pays.chosen(plan, "auto", 2, dev) is None
    (dev / "nvidia0").touch()
    assert pays.chosen(plan, "auto", 2, dev) is None
    steps = [step for step in plan.steps if step.factors]
    assert all(pays.seconds(plan, cores) < 1 for cores in (1, 64))
    assert len(steps) == 3
    assert (pays.chosen(plan, "cuda", 2, dev), pays.chosen(plan, "cpu", 2, dev)) == ("cuda", None)
