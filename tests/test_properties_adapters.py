"""Adapters of any base, name, rank and pattern: the healthy stay healthy, and each single defect has its code."""

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.inspect import inspect
from weighbridge_testlib.adapter_layouts import ADAPTERS, DEFECTS, Adapter, written

house = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def emptied(folder: Path) -> Path:
    """Return a folder that does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@given(adapter=ADAPTERS)
@settings(house, max_examples=150)
def test_a_healthy_adapter_is_accepted_with_its_facts(tmp_path: Path, adapter: Adapter) -> None:
    """Whatever it adapts and however it was saved, it is accepted with its rank, strength, targets and counts."""
    it = written(adapter, emptied(tmp_path / "a"))
    found = inspect(it.folder)
    assert [f.code for f in found.findings if f.severity != "note"] == []
    assert (found.outcome, found.kind) == ("accept", "adapter")
    facts = found.facts
    scale = math.sqrt if adapter.rslora else float
    assert (facts["rank"], facts["alpha"]) == (adapter.rank, adapter.alpha)
    assert facts["scaling"] == pytest.approx(adapter.alpha / scale(adapter.rank))
    assert facts["ranks"] == sorted({adapter.rank_of(module) for module in adapter.modules})
    assert (facts["use_dora"], facts["use_rslora"]) == (adapter.dora, adapter.rslora)
    assert facts["adapted_modules"] == len(adapter.modules)
    assert facts["nonzero_lora_b"] == len(adapter.modules)
    assert facts["tensor_count"] == len(it.tensors)
    assert facts["param_count"] == sum(math.prod(shape) for _, shape, _ in it.tensors.values())
    if adapter.form != "pattern":
        assert facts["targets"] == (adapter.names if adapter.form == "names" else adapter.modules)
    if adapter.special is not None:
        assert facts["rank_by_module"] == {adapter.names[0]: adapter.special, "default": adapter.rank}


@pytest.mark.parametrize("defect", DEFECTS)
@given(adapter=ADAPTERS, pick=st.integers(0, 1000))
@settings(house)
def test_a_single_defect_is_found_with_its_code(tmp_path: Path, defect: str, adapter: Adapter, pick: int) -> None:
    """One thing that is wrong gives that thing's finding and no other, whatever the modules are called."""
    it = written(adapter, emptied(tmp_path / "a"))
    codes = DEFECTS[defect](it, pick)
    found = inspect(it.folder)
    assert {f.code for f in found.findings if f.severity != "note"} == codes
    assert found.outcome != "accept"
