"""Weights beside no config.json: one rule for every container, by the names under which they lie."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.adapters import layout
from weighbridge.adapters.inspect import inspect
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, parts
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import llama_tensors, safetensors_bytes

torch = pytest.importorskip("torch")


def safe(file: Path) -> None:
    """Write the tiny model as safetensors."""
    file.write_bytes(safetensors_bytes(llama_tensors(), metadata={"format": "pt"}))


def pickled(file: Path) -> None:
    """Write the tiny model as a torch file."""
    torch.save(parts.state(), file)


def lightning(file: Path) -> None:
    """Write the tiny model as Lightning does."""
    torch.save({"pytorch-lightning_version": "2.5.0", "state_dict": parts.state(), "epoch": 1}, file)


def pieces(file: Path) -> None:
    """Write the tiny model as pieces of a distributed checkpoint, into a folder."""
    parts.pieces(file, {"model": parts.state()})


def ranks(file: Path) -> None:
    """Write the tiny model as DeepSpeed's ranks do."""
    parts.zero(file)


OWN: list[tuple[str, Callable[[Path], None]]] = [
    ("last.ckpt", lightning), ("weights.pt", pickled), ("net.bin", pickled), ("pytorch_model_fsdp.bin", pickled),
    ("weights.safetensors", safe), ("epoch-3.safetensors", safe), ("pytorch_model_fsdp_0", pieces), ("step-7", pieces),
    ("zero", ranks),
]  # fmt: skip
OWED: list[tuple[str, Callable[[Path], None]]] = [
    ("model.safetensors", safe), ("model.fp16.safetensors", safe), ("model_1.safetensors", safe),
    ("pytorch_model.bin", pickled),
]  # fmt: skip


@pytest.mark.parametrize(("name", "write"), OWED)
def test_a_library_s_names_owe_a_config(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    """Weights that a library looks for through their config are refused without it, safetensors and pickles alike."""
    write(tmp_path / name)
    found = inspect(tmp_path)
    told = {f.code for f in found.findings if f.severity == "block"}
    assert (found.outcome, told) == ("refuse", {"config-missing"})
    assert found.facts["missing_files"] == ["config.json"]


@pytest.mark.parametrize(("name", "write"), OWN)
def test_a_tool_s_own_names(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    """What a training tool names its own way is taken in, and that no config says what it is stands in a finding."""
    write(tmp_path / name)
    found = inspect(tmp_path)
    told = {f.code: f.severity for f in found.findings if f.code.startswith("config-")}
    assert (found.kind, told, found.facts["missing_files"]) == ("model", {"config-absent": "note"}, [])
    builders.write_json(tmp_path / found.artifact_root / "config.json", builders.llama_config(dtype="float32"))
    again = inspect(tmp_path)
    assert not {f.code for f in again.findings if f.code.startswith("config-")}


def test_a_damaged_config_beside_a_torch_file(tmp_path: Path) -> None:
    """A config that cannot be read would go along, so it is refused, as in a model's folder."""
    lightning(tmp_path / "last.ckpt")
    (tmp_path / "config.json").write_text("{")
    found = inspect(tmp_path)
    assert (found.outcome, {f.code for f in found.findings if f.severity == "block"}) == ("refuse", {"json-damaged"})


def test_a_version_without_a_config_carries_the_warning(tmp_path: Path) -> None:
    """The daemon publishes such weights, and the version itself warns of it."""
    bench = Bench(tmp_path, publish=("all",))
    (bench.runs / "team/run").mkdir(parents=True)
    lightning(bench.runs / "team/run/last.ckpt")
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 1
    version = committed(open_directory(str(tmp_path / "remote")), "team-run", 1)
    assert {f.severity for f in version.facts.findings if f.code == "config-absent"} == {"warn"}
    bench.catalog.close()


@pytest.mark.parametrize(
    ("name", "owed"),
    [
        ("model-00001-of-00002.safetensors", True), ("pytorch_model-00001-of-00003.bin", True),
        ("ft-model-00001-of-00001.safetensors", True), ("model.safetensors.index.json", True),
        ("diffusion_pytorch_model.fp16.safetensors", True), ("remodel.safetensors", False), ("model.pt", False),
        ("pytorch_model_fsdp.bin", False), ("__0_0.distcp", False),
    ],
)  # fmt: skip
def test_names(name: str, owed: bool) -> None:
    """Indexes, shards and the libraries' own names owe a config, nothing else does."""
    assert layout.owes_config([name]) is owed
