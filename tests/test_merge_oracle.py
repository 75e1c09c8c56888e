"""Merges against the real PEFT: bit by bit where it merges right, by the model's own output where it does not."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from weighbridge.adapters.merge import behave
from weighbridge_testlib import merging
from weighbridge_testlib.merge_cases import BEHAVED, CASES

_ORACLE = "weighbridge_testlib.peft_oracle"
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every case built by PEFT and merged by us; one process of a parallel run does it for all."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "oracle"
    with (shared / "oracle.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            folder.mkdir()
            _ask("build", folder)
            for name in CASES:
                _merge(folder / name)
            _ask("logits", folder)
            (folder / "ready").touch()
    return folder


def _ask(command: str, folder: Path) -> None:
    here = Path(__file__).parent / "lib"
    done = subprocess.run(
        [sys.executable, "-m", _ORACLE, command, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, **_QUIET, "PYTHONPATH": str(here)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _merge(place: Path) -> None:
    if (place / "failed.txt").exists():
        return
    try:
        _, result = merging.staged(place / "adapter", place / "base", place / "stage")
    except Exception as error:  # noqa: BLE001 - told by the test of the case
        (place / "failed.txt").write_text(f"our merge: {type(error).__name__}: {error}")
        return
    (place / "proof.json").write_text(json.dumps(result["proof"]))
    (place / "stage" / "out").rename(place / "merged")


def _place(oracle: Path, name: str) -> Path:
    failed = oracle / name / "failed.txt"
    assert not failed.exists(), failed.read_text()
    assert json.loads((oracle / name / "proof.json").read_text())["passed"]
    return oracle / name


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ask == "bits"])
def test_the_bits_are_those_of_peft(oracle: Path, name: str) -> None:
    """Every element of every tensor equals PEFT's own merge, and something was changed."""
    place = _place(oracle, name)
    ours = merging.tensors(place / "merged")
    assert merging.differing(ours, merging.tensors(place / "peft")) == {}
    base = merging.tensors(place / "base")
    assert any(base.get(key) != value for key, value in ours.items())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ask == "logits"])
def test_a_tied_end_that_changes_gives_the_output_of_the_unmerged_model(oracle: Path, name: str) -> None:
    """Where PEFT's merge would change both ends of a tied pair, the merged model computes what base and adapter do."""
    told = json.loads((_place(oracle, name) / "error.json").read_text())
    assert told["error"] < 1e-5
    assert told["base"] > 0.1, "an adapter that changes nothing would pass"
    config = json.loads((oracle / name / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", BEHAVED)
def test_what_the_merged_model_computes_is_told_from_a_merge_that_changes_nothing(oracle: Path, name: str) -> None:
    """Base, adapter and result are run: a right merge passes, outputs as far away as the base's do not."""
    told = json.loads((_place(oracle, name) / "behaviour.json").read_text())
    seen = msgspec.convert(told["distances"], behave.Distances)
    assert behave.wrong(seen) is None
    assert seen.merged.largest < 0.05 * seen.base.largest
    still = msgspec.structs.replace(seen, merged=seen.base)
    assert "away from base and adapter together" in str(behave.wrong(still))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ask == "near"])
def test_convolutions_agree_with_peft_to_the_last_place(oracle: Path, name: str) -> None:
    """A convolution is PEFT's up to one rounding in single precision: its kernels for few channels sum otherwise."""
    place = _place(oracle, name)
    ours, theirs = merging.tensors(place / "merged"), merging.tensors(place / "peft")
    off = merging.differing(ours, theirs)
    assert all(len(ours[key][1]) == 4 for key in off)
    mine, other = merging.numbers(place / "merged"), merging.numbers(place / "peft")
    assert all(abs(mine[key] - other[key]).max() < 1e-7 for key in off)


def test_untouched_files_are_the_base_byte_for_byte(oracle: Path) -> None:
    """Where no dtype and no shape changes, index, headers and the split into shards are the base's."""
    place = _place(oracle, "llama")
    index = "model.safetensors.index.json"
    assert (place / "merged" / index).read_bytes() == (place / "base" / index).read_bytes()
    for path in sorted((place / "base").glob("*.safetensors")):
        length = int.from_bytes(path.read_bytes()[:8], "little") + 8
        assert (place / "merged" / path.name).read_bytes()[:length] == path.read_bytes()[:length]
    assert len(list((place / "merged").glob("*.safetensors"))) > 1


def test_a_grown_vocabulary_comes_with_its_config_and_tokenizer(oracle: Path) -> None:
    """An adapter saved with a larger embedding gives a model of that size, with the tokenizer that speaks it."""
    merged = _place(oracle, "llama-resized") / "merged"
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == 70
    assert merging.tensors(merged)["lm_head.weight"][1] == (70, 32)
    vocabulary = json.loads((merged / "tokenizer.json").read_text())["model"]["vocab"]
    assert max(vocabulary.values()) == 69
