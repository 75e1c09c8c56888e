"""Models and adapters in other clothes: pickled shards, GGUF, ONNX, pipelines, byte parts; copies that agree or not."""

from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import TensorSpec, llama_tensors, lora_tensors, write_json, write_safetensors
from weighbridge_testlib.containers import T


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def torch_of(tensors: dict[str, TensorSpec], **more: Any) -> bytes:
    """Return the torch file of some tensors."""
    return c.torch_zip({**{label: T(dtype, shape, data) for label, (dtype, shape, data) in tensors.items()}, **more})


def pickled_model(folder: Path, *, shards: int = 1, dtype: str = "BF16", tied: bool = False) -> Path:
    """Write a model as transformers did before safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llama_tensors(dtype=dtype, tied=tied)
    names = builders.shard_names(shards, "pytorch_model", "bin") if shards > 1 else ["pytorch_model.bin"]
    parts = list(zip(names, builders.split(tensors, shards), strict=True))
    for name, part in parts:
        (folder / name).write_bytes(torch_of(part))
    if shards > 1:
        write_json(folder / "pytorch_model.bin.index.json", builders.index_of(parts))
    words = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    write_json(folder / "config.json", builders.llama_config(tied=tied, dtype=words[dtype]))
    return folder


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pickled_model(tmp_path: Path, shards: int, dtype: str, tied: bool) -> None:
    """A model of pickles is judged like one of safetensors: counts, index, config; and its tensors can go out."""
    found, codes = look(pickled_model(tmp_path, shards=shards, dtype=dtype, tied=tied))
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "full-model", "model", set())
    facts = found.facts
    assert (facts["tensor_count"], facts["param_count"]) == ((20, 5200) if tied else (21, 5712))
    assert facts["pickle_format"] is True
    assert len(found.artifacts[0].convert) == shards
    if shards > 1:
        assert (facts["shards_expected"], facts["shards_found"]) == (shards, shards)
        assert facts["index_total_size"] == facts["payload_bytes"]


def test_a_pickled_model_that_is_not_whole(tmp_path: Path) -> None:
    """A missing shard, a shard cut short and a tensor in no shard refuse by name."""
    folder = pickled_model(tmp_path / "a", shards=3)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"shard-missing"})
    assert found.facts["missing_files"] == ["pytorch_model-00002-of-00003.bin"]
    folder = pickled_model(tmp_path / "b", shards=3)
    shard = folder / "pytorch_model-00003-of-00003.bin"
    shard.write_bytes(shard.read_bytes()[:-100])
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"zip-cut"})
    assert found.facts["file"] == shard.name


def test_shared_names_in_an_index(tmp_path: Path) -> None:
    """An index that lists both names of a tied pair is right, though the tensor is there once."""
    shared = {
        "model.embed_tokens.weight": T("F32", (32, 16), 1.0, None, 0, "e"),
        "lm_head.weight": T("F32", (32, 16), None, None, 0, "e"),
    }
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(c.torch_zip(shared))
    weight_map = dict.fromkeys(shared, "pytorch_model-00001-of-00001.bin")
    write_json(tmp_path / "pytorch_model.bin.index.json", {"metadata": {"total_size": 4096}, "weight_map": weight_map})
    write_json(tmp_path / "config.json", {"model_type": "other", "architectures": ["OtherModel"], "vocab_size": 32})
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["tensor_count"] == 1
    assert found.facts["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_wrapped_names_in_a_model_folder(tmp_path: Path) -> None:
    """A loader that goes by name would find nothing: refused, with the segment named."""
    folder = pickled_model(tmp_path)
    tensors = {f"module.{label}": spec for label, spec in llama_tensors().items()}
    (folder / "pytorch_model.bin").write_bytes(torch_of(tensors))
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "keys-wrapped" in codes
    assert found.facts["bad_segment"] == "module."


@pytest.mark.parametrize("same", [True, False])
def test_pickles_beside_safetensors(tmp_path: Path, same: bool) -> None:
    """A second copy is left out when it agrees; two sets of values under one name refuse, naming both."""
    builders.llama_model(tmp_path, seed=1)
    (tmp_path / "pytorch_model.bin").write_bytes(torch_of(llama_tensors(seed=1 if same else 2)))
    found, codes = look(tmp_path)
    if same:
        assert (found.outcome, codes) == ("warn", {"copies-extra"})
        assert found.facts["extra_full_copies"] == ["pytorch_model.bin"]
    else:
        assert (found.outcome, codes) == ("refuse", {"copies-extra", "copies-disagree"})
        assert found.facts["conflicting_files"] == ["model.safetensors", "pytorch_model.bin"]
    assert found.facts["values_equal"] is same


@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickled_adapter(tmp_path: Path, name: str, rank: int) -> None:
    """An adapter of an old PEFT is read whole: counts, rank, strength, values."""
    builders.lora_adapter(tmp_path, rank=rank, alpha=2 * rank)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / name).write_bytes(torch_of(lora_tensors(rank=rank)))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    facts = found.facts
    assert (facts["tensor_count"], facts["rank_from_shapes"], facts["scaling"]) == (8, rank, 2.0)
    assert (facts["nonzero_lora_b"], facts["pickle_format"]) == (4, True)


def test_adapter_copies_that_disagree(tmp_path: Path) -> None:
    """Two files of one adapter with other values refuse; equal ones are one adapter."""
    builders.lora_adapter(tmp_path, seed=0)
    (tmp_path / "adapter_model.bin").write_bytes(torch_of(lora_tensors(seed=0)))
    assert look(tmp_path)[0].outcome == "accept"
    (tmp_path / "adapter_model.bin").write_bytes(torch_of(lora_tensors(seed=5)))
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("refuse", {"copies-disagree"})
    assert found.facts["conflicting_files"] == ["adapter_model.bin", "adapter_model.safetensors"]


# ----------------------------------------------------------------------------------------------------------------- GGUF


def test_gguf_models(tmp_path: Path) -> None:
    """Plain ones are models, packed ones quantized, several in a folder stand side by side."""
    (tmp_path / "f16.gguf").write_bytes(c.gguf({"general.architecture": "llama"}, {"w": ("F16", (4, 4), None)}))
    found, _ = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind) == ("accept", "gguf", "model")
    assert (found.facts["tensor_count"], found.facts["architecture"]) == (1, "llama")
    (tmp_path / "q4.gguf").write_bytes(c.gguf({"general.architecture": "llama"}, {"w": ("Q4_0", (2, 32), None)}))
    found, _ = look(tmp_path)
    assert (found.outcome, found.artifact, [a.kind for a in found.artifacts]) == (
        "accept",
        "gguf",
        ["model", "quantized"],
    )
    assert found.artifacts[1].facts["param_count"] == 64


@pytest.mark.parametrize("count", [2, 4])
def test_split_gguf(tmp_path: Path, count: int) -> None:
    """The parts of a split are one model, and a missing part is named."""
    for i in range(count):
        body = c.gguf({"general.architecture": "llama", "split.count": count}, {f"w{i}": ("F32", (4, 4), None)})
        (tmp_path / f"tiny-{i + 1:05d}-of-{count:05d}.gguf").write_bytes(body)
    found, codes = look(tmp_path)
    assert (found.outcome, found.facts["tensor_count"], codes) == ("accept", count, set())
    (tmp_path / f"tiny-00002-of-{count:05d}.gguf").unlink()
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("refuse", "gguf", {"split-part-missing"})
    assert found.facts["missing_files"] == [f"tiny-00002-of-{count:05d}.gguf"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["x.gguf.part1of3", "x.gguf.part3of3"], ["x.gguf.part2of3"]),
        (["x.safetensors.part-aa", "x.safetensors.part-ac"], ["x.safetensors.part-ab"]),
        (["x.gguf-split-a", "x.gguf-split-b"], []),
    ],
)
def test_byte_parts(tmp_path: Path, names: list[str], missing: list[str]) -> None:
    """A file cut into bytes is no weights file before it is joined; holes are named."""
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF" + bytes(60))
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("refuse", {"split-part-missing" if missing else "byte-parts"})
    assert found.facts["missing_files"] == missing


# ------------------------------------------------------------------------------------------------ other runtimes' files


def test_onnx_with_its_data(tmp_path: Path) -> None:
    """An ONNX model goes with the files its tensors lie in; without them it refuses."""
    (tmp_path / "model.onnx").write_bytes(c.onnx_model([c.onnx_tensor("w", (2, 2), raw=bytes(16))]))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "onnx", "model", set())
    assert (found.facts["tensor_count"], found.facts["initializers"]) == (1, 1)


def test_recorded_and_never_opened(tmp_path: Path) -> None:
    """A container of another runtime is called what it is, and nothing of it is published."""
    (tmp_path / "whisper.bin").write_bytes(b"lmgg" + bytes(64))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "ggml", None, set())
    assert {f.code for f in found.findings} >= {"recorded-only", "ggml-legacy"}


@pytest.mark.parametrize("name", ["weights.pt", "model.ckpt", "best.bin"])
def test_safetensors_under_another_suffix(tmp_path: Path, name: str) -> None:
    """A container inside another suffix is called what it is."""
    write_safetensors(tmp_path / name, {"w": ("F32", (2, 2), 1.0)})
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("refuse", {"suffix-lies"})
    assert found.facts["true_formats"] == {name: "safetensors"}


# ------------------------------------------------------------------------------------------------------------ pipelines


def pipeline(folder: Path, *, pickled: bool = False) -> Path:
    """Write a diffusers pipeline."""
    parts = {"unet": ["diffusers", "UNet2DConditionModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    parts["scheduler"] = ["diffusers", "EulerDiscreteScheduler"]
    write_json(folder / "model_index.json", {"_class_name": "TinyPipeline", "safety_checker": [None, None], **parts})
    write_json(folder / "unet/config.json", {"_class_name": "UNet2DConditionModel"})
    write_json(folder / "scheduler/scheduler_config.json", {"_class_name": "EulerDiscreteScheduler"})
    write_json(folder / "tokenizer/tokenizer_config.json", {})
    tensors: dict[str, TensorSpec] = {"conv.weight": ("F32", (4, 4), 0.5)}
    if pickled:
        (folder / "unet/diffusion_pytorch_model.bin").write_bytes(torch_of(tensors))
    else:
        write_safetensors(folder / "unet/diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    return folder


@pytest.mark.parametrize("pickled", [False, True])
def test_a_pipeline(tmp_path: Path, pickled: bool) -> None:
    """A pipeline is one artifact: its components' weights and their configs go together."""
    found, codes = look(pipeline(tmp_path, pickled=pickled))
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "full-model", "model", set())
    suffix = "bin" if pickled else "safetensors"
    assert set(found.facts["inference_files"]) == {
        "model_index.json", f"unet/diffusion_pytorch_model.{suffix}", "unet/config.json",
        "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip
    assert found.facts["tensor_count"] == 1


def test_a_pipeline_without_a_component(tmp_path: Path) -> None:
    """A component that the pipeline names and that is not there refuses; a variant twin is left out."""
    folder = pipeline(tmp_path)
    weights = folder / "unet/diffusion_pytorch_model.safetensors"
    (folder / "unet/diffusion_pytorch_model.fp16.safetensors").write_bytes(weights.read_bytes())
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"copies-extra"})
    assert found.facts["extra_full_copies"] == ["unet/diffusion_pytorch_model.fp16.safetensors"]
    (folder / "unet/diffusion_pytorch_model.fp16.safetensors").unlink()
    weights.unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"weights-missing"})
    assert found.facts["missing_files"] == ["unet/diffusion_pytorch_model.safetensors"]
