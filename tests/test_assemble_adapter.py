"""Adapters taken out of whole wrapped models: what PEFT itself would have saved, name by name and bit by bit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import Policy
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.types import RunFacts
from weighbridge_testlib import builders, parts
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import lora_tensors
from weighbridge_testlib.peft_wrapped import CASES

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("peft")

RUN = RunFacts(project="medical", name="sft", id="run-1")


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case of the real PEFT, made once."""
    folder = tmp_path_factory.mktemp("wrapped")
    command = [sys.executable, "-W", "ignore", "-m", "weighbridge_testlib.peft_wrapped", str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return folder


def only(folder: Path) -> Artifact:
    """Return the one artifact of a folder that can be published."""
    (found,) = [one for one in inspect(folder).artifacts if one.kind is not None]
    return found


def staged(folder: Path, place: Path) -> Admission:
    """Admit and stage what a folder holds."""
    done = admit(only(folder), name="medical-sft", run=RUN, policy=Policy())
    staging.stage(done.files, place, transform=done.transform, made=done.made, inputs=done.inputs)
    return done


@pytest.mark.parametrize("form", ["lightning", "pieces", "plain"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_what_peft_would_have_saved(tmp_path: Path, wrapped: Path, case: str, form: str) -> None:
    """Matrices, magnitudes, whole modules, rows and biases come out as `save_pretrained` writes them; no base does."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(wrapped / case / "adapter/adapter_config.json", folder)
    state: dict[str, Any] = torch.load(wrapped / case / "whole.pt")
    if form == "lightning":
        table = {f"model.{key}": value for key, value in state.items()}
        whole = {"state_dict": table, "global_step": 12, "epoch": 1, "pytorch-lightning_version": "2.5"}
        torch.save(whole, folder / "epoch=1-step=12.ckpt")
    elif form == "pieces":
        parts.pieces(folder / "pytorch_model_fsdp_0", {"model": state})
    else:
        torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}}, folder / "full_weights.pt")
    done = staged(folder, tmp_path / "stage")
    found = safetensors_torch.load_file(tmp_path / "stage/adapter_model.safetensors")
    parts.same(found, safetensors_torch.load_file(wrapped / case / "adapter/adapter_model.safetensors"))
    assert {path.name for path in (tmp_path / "stage").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert done.facts.kind == "adapter"
    assert done.facts.weights.tensor_digest is not None
    assert {edge.relation for edge in done.facts.lineage} >= {"extracted-from"}
    if form == "lightning":
        assert done.facts.provenance.step == 12


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_in_rank_files(tmp_path: Path, stage: int) -> None:
    """Beside its config, the adapter of a ZeRO checkpoint is published by the daemon and the frozen base is not."""
    bench = Bench(tmp_path, publish=("all",))
    lora = {k.replace(".weight", ".default.weight"): tuple(s) for k, (_, s, _) in lora_tensors().items()}
    folder = bench.runs / "team/run/checkpoint-5"
    values = parts.zero(folder, lora, stage=stage, frozen={f"base_model.model.{k}": v for k, v in parts.MODEL.items()})
    builders.write_json(folder / "adapter_config.json", builders.lora_config())
    bench.settle()
    bench.work()
    assert list(bench.versions()) == ["team-run@v1"]
    found = safetensors_torch.load_file(tmp_path / "remote/models/team-run/v1/adapter_model.safetensors")
    parts.same(found, {k.replace(".default.", "."): values[k] for k in lora})
    (job,) = bench.store.jobs()
    assert job.kind == "adapter"
    assert (job.size or 0) < 1792 + 2000  # the base has 11,424
    bench.catalog.close()


def test_without_its_config(tmp_path: Path) -> None:
    """An adapter beside its base and no config: nothing is published, and the finding says what is missing."""
    bench = Bench(tmp_path, publish=("all",))
    lora = {k: tuple(s) for k, (_, s, _) in lora_tensors().items()}
    parts.zero(bench.runs / "team/run/checkpoint-5", lora, frozen=parts.MODEL)
    bench.settle()
    bench.work()
    assert bench.versions() == {}
    (row,) = bench.store.skipped()
    assert "adapter_config.json" in row["why"]
    bench.catalog.close()


def test_a_matrix_that_changes_nothing_is_told(tmp_path: Path) -> None:
    """The values of an adapter that is taken out are looked at like those of any other."""
    state = {k: torch.zeros(s) if "lora_B" in k else torch.ones(s) for k, (_, s, _) in lora_tensors().items()}
    builders.write_json(tmp_path / "adapter_config.json", builders.lora_config())
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    assert "lora-b-zero" in {f.code for f in only(tmp_path).findings}


def test_an_adapter_that_does_not_come_out(tmp_path: Path) -> None:
    """Several adapters of which none is the default are not guessed at."""
    state = {
        k.replace(".weight", f".{name}.weight"): torch.ones(s)
        for name in ("style", "tone")
        for k, (_, s, _) in lora_tensors().items()
    }
    builders.write_json(tmp_path / "adapter_config.json", builders.lora_config())
    torch.save(state, tmp_path / "last.ckpt")
    (found,) = [f for f in inspect(tmp_path).findings if f.code == "adapter-not-taken-out"]
    assert "style, tone" in found.message


TUNE = {
    f"layers.{layer}.attn.{module}.lora_{half}.weight": (4, 16) if half == "a" else (16, 4)
    for layer in range(2)
    for module in ("q_proj", "output_proj")
    for half in ("a", "b")
}


@pytest.mark.parametrize("file", ["adapter_0.pt", "adapter_model.pt"])
@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("base", [True, False])
def test_torchtunes_own_form(tmp_path: Path, file: str, config: bool, base: bool) -> None:
    """Lower-case lora_a and lora_b are an adapter that only torchtune reads: told, and never published as a model."""
    shapes = TUNE | ({"layers.0.attn.q_proj.weight": (16, 16), "norm.scale": (16,)} if base else {})
    torch.save({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / file)
    if config:
        builders.write_json(tmp_path / "adapter_config.json", builders.lora_config())
    found = inspect(tmp_path)
    assert found.outcome == "refuse"
    (told,) = [f for f in found.findings if f.code == "lora-dialect-torchtune"]
    assert "checkpointer" in (told.fix or "")


def test_beside_peft_form(tmp_path: Path) -> None:
    """The tool's own file beside the same adapter in PEFT's form is a copy: the adapter is published from the other."""
    builders.lora_adapter(tmp_path)
    torch.save({name: torch.ones(shape) for name, shape in TUNE.items()}, tmp_path / "adapter_model.pt")
    one = only(tmp_path)
    assert (one.kind, one.outcome) == ("adapter", "accept")
    assert [f.path for f in one.files if f.publish and f.role == "weights"] == ["adapter_model.safetensors"]


def test_a_wrapped_checkpoint_without_its_config(tmp_path: Path) -> None:
    """A whole wrapped model is no model that anything could load, so it is not published as one."""
    state = {f"base_model.model.{k}": v for k, v in parts.state().items()}
    state |= {k: torch.ones(s) for k, (_, s, _) in lora_tensors().items()}
    torch.save({"state_dict": state}, tmp_path / "last.ckpt")
    found = inspect(tmp_path)
    assert [one.kind for one in found.artifacts] == [None]
    (told,) = [f for f in found.findings if f.code == "adapter-inside"]
    assert "adapter_config.json" in (told.fix or "")
