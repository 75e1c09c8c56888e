"""Torch pickles on their way out: their tensors are published as safetensors, with an edge to what they came from."""

import json
from pathlib import Path

import pytest

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry.errors import RefusedError, SourceChangedError, UsageError
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.convert import new_name
from weighbridge.registry.flow.publish import prepare, sealed
from weighbridge.registry.flow.verify import verify_source
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.types import RunFacts
from weighbridge_testlib import builders
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import llama_tensors, lora_tensors
from weighbridge_testlib.containers import T

RUN = RunFacts(project="medical", name="sft", id="run-1")


def torch_of(tensors: dict[str, builders.TensorSpec]) -> bytes:
    """Return the torch file of some tensors."""
    return c.torch_zip({label: T(dtype, shape, data) for label, (dtype, shape, data) in tensors.items()})


def admitted(folder: Path) -> Admission:
    """Admit what a folder holds."""
    found = inspect(folder)
    return admit(found.artifacts[0], name="medical-sft", run=RUN, policy=Policy())


def values(path: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor of a safetensors file."""
    header = safetensors.read(path)
    assert not header.faults
    raw = path.read_bytes()[header.data_start :]
    return {label: raw[t.begin : t.end] for label, t in header.tensors.items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pickled_model(tmp_path: Path, shards: int) -> None:
    """Each shard becomes one of safetensors with the same tensors, and the index is written anew."""
    folder, tensors = tmp_path / "m", llama_tensors()
    folder.mkdir()
    names = builders.shard_names(shards, "pytorch_model", "bin") if shards > 1 else ["pytorch_model.bin"]
    parts = list(zip(names, builders.split(tensors, shards), strict=True))
    for name, part in parts:
        (folder / name).write_bytes(torch_of(part))
    if shards > 1:
        builders.write_json(folder / "pytorch_model.bin.index.json", builders.index_of(parts))
    builders.write_json(folder / "config.json", builders.llama_config())
    done = admitted(folder)
    bundle = staging.stage(done.files, tmp_path / "stage", transform=done.transform, made=done.made)
    assert not any(f.path.endswith(".bin") for f in bundle.files)
    staged = tmp_path / "stage"
    held: dict[str, bytes] = {}
    for file in staged.glob("*.safetensors"):
        held |= values(file)
    assert held == {label: builders.pack(dtype, shape, data) for label, (dtype, shape, data) in tensors.items()}
    if shards > 1:
        index = json.loads((staged / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == 11424
    assert inspect(staged).outcome == "accept"
    edge = next(e for e in done.facts.lineage if e.relation == "converted-from")
    assert edge.content is not None
    assert edge.content.startswith("sha256:")


def test_an_adapter_and_a_checkpoint(tmp_path: Path) -> None:
    """An adapter's pickle and a bare checkpoint go under the names loaders look for."""
    builders.lora_adapter(tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").unlink()
    (tmp_path / "a/adapter_model.bin").write_bytes(torch_of(lora_tensors()))
    done = admitted(tmp_path / "a")
    assert {f.path for f in done.files} == {"adapter_config.json", "adapter_model.safetensors"}
    assert done.facts.weights.tensor_digest is not None
    assert {e.relation for e in done.facts.lineage} == {"adapter-of", "converted-from"}
    (tmp_path / "b").mkdir()
    (tmp_path / "b/epoch=3.ckpt").write_bytes(torch_of({f"module.{k}": v for k, v in llama_tensors().items()}))
    done = admitted(tmp_path / "b")
    staging.stage(done.files, tmp_path / "stage", made=done.made)
    assert values(tmp_path / "stage/model.safetensors").keys() == llama_tensors().keys()


def test_the_same_tensors_have_the_same_digest(tmp_path: Path) -> None:
    """A pickled adapter and its safetensors twin agree in the digest of their tensors."""
    builders.lora_adapter(tmp_path / "a")
    twin = admitted(tmp_path / "a").facts.weights.tensor_digest
    (tmp_path / "a/adapter_model.safetensors").unlink()
    (tmp_path / "a/adapter_model.bin").write_bytes(torch_of(lora_tensors()))
    assert admitted(tmp_path / "a").facts.weights.tensor_digest == twin


def test_a_source_that_changes(tmp_path: Path) -> None:
    """A pickle that is written while it is converted stops the job; nothing is staged, nothing goes out direct."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/x.ckpt").write_bytes(torch_of(llama_tensors()))
    done = admitted(tmp_path / "m")
    with pytest.raises(UsageError):
        staging.stage(done.files, None, mode="direct", made=done.made)
    (tmp_path / "m/x.ckpt").write_bytes(torch_of(llama_tensors(seed=9)))
    with pytest.raises(SourceChangedError):
        staging.stage(done.files, tmp_path / "stage", made=done.made)
    assert not (tmp_path / "stage").exists()


def test_a_refused_pickle_is_not_converted(tmp_path: Path) -> None:
    """What a check blocks does not get so far."""
    (tmp_path / "x.ckpt").write_bytes(
        c.torch_zip({"w": T("F32", (2,), 1.0), "x": c.call(c.name("posix", "system"), "true")})
    )
    with pytest.raises(RefusedError):
        admitted(tmp_path)


def test_sealed_and_compared_with_its_source(tmp_path: Path) -> None:
    """A candidate is sealed over the converted bytes; the source folder is not called drifted for them."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m/x.ckpt").write_bytes(torch_of(llama_tensors()))
    done = admitted(tmp_path / "m")
    (tmp_path / "remote").mkdir()
    remote = DirectoryRemote(tmp_path / "remote")
    first = prepare(remote, "medical-sft", done.files, done.facts, made=done.made)
    second = prepare(remote, "medical-sft", done.files, done.facts, made=done.made)
    assert first.content == second.content
    manifest = sealed(first)
    assert [f.path for f in manifest.files] == ["model.safetensors"]
    assert verify_source(tmp_path / "m", manifest).findings == []


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"),
        ("unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.safetensors"),
        ("text_encoder/pytorch_model.bin", "text_encoder/model.safetensors"),
        ("adapter_model.bin", "adapter_model.safetensors"),
        ("learned_embeds.bin", "learned_embeds.safetensors"),
    ],
)
def test_names(path: str, wanted: str) -> None:
    """The new name is the one that the loader of the old name looks for."""
    assert new_name(path) == wanted


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "weights.pt"])
@pytest.mark.parametrize("trainer", [True, False])
def test_one_file_for_a_whole_model(tmp_path: Path, name: str, trainer: bool) -> None:
    """A whole state in one file of any name becomes model.safetensors, in a trainer's folder too, with the config."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / name).write_bytes(torch_of(llama_tensors()))
    builders.write_json(folder / "config.json", builders.llama_config())
    if trainer:
        builders.write_json(folder / "trainer_state.json", {"global_step": 5, "log_history": []})
        (folder / "scheduler.pt").write_bytes(b"x")
    done = admitted(folder)
    bundle = staging.stage(done.files, tmp_path / "stage", transform=done.transform, made=done.made)
    assert {f.path for f in bundle.files} == {"config.json", "model.safetensors"}
    assert values(tmp_path / "stage/model.safetensors").keys() == llama_tensors().keys()
