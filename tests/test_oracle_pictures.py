"""Pipelines and LoRA of the real diffusers: accepted with the components, ranks and strengths that diffusers knows."""

from pathlib import Path

import pytest

from weighbridge_testlib.oracle import ask
from weighbridge_testlib.oracle.cases import PICTURES

pytestmark = pytest.mark.timeout(600)  # the first test waits until the tools have made every case


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what diffusers wrote and said."""
    return ask.built("pictures", tmp_path_factory)


@pytest.mark.parametrize("name", PICTURES)
def test_what_diffusers_saves_is_accepted_with_its_facts(oracle: Path, name: str) -> None:
    """Components, counts and dtypes of a pipeline, and rank and strength of a LoRA module by module, are diffusers'."""
    found = ask.judged(oracle / name)
    if name.startswith("lora-") and not found.facts.get("pickle_format"):
        assert ask.listed(ask.published(found)) == ask.told(oracle / name)["tensors"]


def test_a_pickled_lora_comes_out_as_torch_loads_it(oracle: Path) -> None:
    """Extraction gives the tensors of pytorch_lora_weights.bin under their own names."""
    place = oracle / "lora-pickle"
    ask.told(place)
    ask.same(sorted((place / "out").glob("*.safetensors")), place)
