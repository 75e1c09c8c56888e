"""Models of the real transformers: families, dtypes, shards, pickles and Trainer folders are what transformers says."""

from pathlib import Path

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge_testlib.oracle import ask
from weighbridge_testlib.oracle.cases import MODELS

_EVERY = "save-every-dtype"


pytestmark = pytest.mark.timeout(600)  # the first test waits until the tools have made every case


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what transformers wrote and said."""
    return ask.built("models", tmp_path_factory)


@pytest.mark.parametrize("name", [name for name in MODELS if name != _EVERY])
def test_a_model_of_transformers_is_accepted_with_its_facts(oracle: Path, name: str) -> None:
    """Architecture, ties, vocabulary, shards, counts and dtypes are those of the model that was saved."""
    found = ask.judged(oracle / name)
    if not found.facts.get("pickle_format") and not name.endswith("trainer"):
        assert ask.listed(ask.published(found)) == ask.told(oracle / name)["tensors"]


@pytest.mark.parametrize("name", ["save-pickle", "save-pickle-tied", "save-pickle-shards"])
def test_a_pickled_model_comes_out_as_transformers_loads_it(oracle: Path, name: str) -> None:
    """Extraction gives each tensor of the pickles, and transformers loaded the new folder with no key left over."""
    ask.told(oracle / name)
    ask.same(sorted((oracle / name / "out").glob("*.safetensors")), oracle / name)


def test_every_dtype_that_torch_stores_is_listed(oracle: Path) -> None:
    """Each dtype of safetensors that torch can write is read with its name, shape and number of elements."""
    place = oracle / _EVERY
    want = ask.told(place)["tensors"]
    assert ask.listed([place / "made/weights.safetensors"]) == want
    found = inspect(place / "made")
    assert {f.code for f in found.findings if f.code.startswith("config-")} == {"config-absent"}
    assert found.facts["dtype_histogram"] == {dtype: {"tensors": 1, "params": 8} for dtype, _ in want.values()}
