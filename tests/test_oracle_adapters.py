"""Adapters of the real PEFT: each type, each variant of LoRA, each way of saving is accepted with PEFT's own facts."""

from pathlib import Path

import pytest

from weighbridge_testlib.oracle import ask
from weighbridge_testlib.oracle.cases import ADAPTERS

pytestmark = pytest.mark.timeout(600)  # the first test waits until the tools have made every case


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what PEFT wrote and said."""
    return ask.built("adapters", tmp_path_factory)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft_is_accepted_with_the_facts_peft_tells(oracle: Path, name: str) -> None:
    """Type, rank, strength, targets, base, counts and dtypes are PEFT's, and no warning is raised that is not due."""
    found = ask.judged(oracle / name)
    if not found.facts.get("pickle_format"):
        files = ask.published(found)
        assert ask.listed(files) == ask.told(oracle / name)["tensors"]


def test_a_pickled_adapter_comes_out_as_peft_loads_it(oracle: Path) -> None:
    """What is taken out of adapter_model.bin holds the tensors that PEFT saved; PEFT loaded it and found each one."""
    place = oracle / "how-pickle"
    ask.told(place)
    ask.same([place / "out/adapter_model.safetensors"], place)
    assert (place / "out/adapter_config.json").read_bytes() == (place / "made/adapter_config.json").read_bytes()
