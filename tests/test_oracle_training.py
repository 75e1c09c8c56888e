"""Checkpoints of torch, Lightning, accelerate and torch.distributed: what comes out is what the tool itself loads."""

from pathlib import Path

import pytest

from weighbridge_testlib.oracle import ask
from weighbridge_testlib.oracle.cases import NAMED, TRAINING

pytestmark = pytest.mark.timeout(600)  # the first test waits until the tools have made every case


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what the training tools wrote and said."""
    return ask.built("training", tmp_path_factory)


@pytest.mark.parametrize("name", TRAINING)
def test_a_checkpoint_is_judged_as_its_tool_made_it(oracle: Path, name: str) -> None:
    """The table with the weights, the wrappers on its names, counts and dtypes are those of what was saved."""
    ask.judged(oracle / name)


@pytest.mark.parametrize(
    "name", sorted(set(TRAINING) - {"save-model", "save-model-shards", "save-state", "dcp-joined"})
)
def test_extraction_gives_the_state_that_was_saved(oracle: Path, name: str) -> None:
    """Each tensor equals torch.load, the tool's own converter or PEFT's adapter; none is left over or missing."""
    place = oracle / name
    ask.told(place)
    files = sorted((place / "out").glob("*.safetensors"))
    if ask.told(place)["due"] == ["adapter-inside"]:
        assert files[0].name == "adapter_model.safetensors"
        assert all(name.startswith("base_model.model.") for name in ask.listed(files))
    else:
        ask.same(files, place)


@pytest.mark.parametrize("name", NAMED)
def test_what_is_no_checkpoint_is_called_by_its_name(oracle: Path, name: str) -> None:
    """A rank's slices, programs, whole objects, exported graphs and optimizers are told apart from models."""
    assert ask.named(oracle / name).facts["publishable"] is False
