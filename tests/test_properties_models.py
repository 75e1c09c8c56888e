"""Models of any family, name, size, dtype and split: the healthy stay healthy, and each single defect has its code."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.inspect import inspect
from weighbridge_testlib.layouts import DEFECTS, INDEXED, MODELS, Model, written

house = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)


def emptied(folder: Path) -> Path:
    """Return a folder that does not exist."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@given(model=MODELS)
@settings(house, max_examples=100)
def test_a_healthy_model_is_accepted_with_its_facts(tmp_path: Path, model: Model) -> None:
    """Whatever its family, names, dtype, shards and suffix are, it is accepted and counted as it was written."""
    it = written(model, emptied(tmp_path / "m"))
    found = inspect(it.folder)
    assert [f.code for f in found.findings if f.severity != "note"] == []
    assert (found.outcome, found.kind) == ("accept", "model")
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape, _ in it.tensors.values()]
    facts = found.facts
    assert (facts["tensor_count"], facts["param_count"]) == (len(sizes), sum(sizes))
    assert facts["dtype_histogram"] == {model.dtype: {"tensors": len(sizes), "params": sum(sizes)}}
    assert (facts["config_vocab"], facts["embedding_rows"]) == (model.vocab, model.vocab)
    assert facts.get("step") == model.step
    assert {f.path for f in found.files if f.publish} >= {*it.files, "config.json"}
    if model.shards > 1:
        assert (facts["shards_expected"], facts["shards_found"]) == (model.shards, model.shards)


@pytest.mark.parametrize("defect", DEFECTS)
@given(model=MODELS, pick=st.integers(0, 1000))
@settings(house)
def test_a_single_defect_is_found_with_its_code(tmp_path: Path, defect: str, model: Model, pick: int) -> None:
    """One thing that is wrong gives that thing's finding and no other, whatever the model is called and cut into."""
    assume(model.shards > 1 or defect not in INDEXED)
    it = written(model, emptied(tmp_path / "m"))
    code = DEFECTS[defect](it, pick)
    found = inspect(it.folder)
    assert [f.code for f in found.findings if f.severity != "note"] == [code]
    assert found.outcome != "accept"
