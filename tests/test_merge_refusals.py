"""Merges that are refused: each names what stands against it and what to do, and nothing appears anywhere."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.merge import staging, start
from weighbridge.adapters.merge.preview import look
from weighbridge.registry.errors import ConflictError, DiskFullError, RefusedError
from weighbridge.registry.types import Finding
from weighbridge_testlib import builders, merging

PREFIX = "base_model.model."
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def found(tmp_path: Path, code: str) -> Finding:
    """Return the blocking finding of a code for the pair under a folder; every other finding must not block."""
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    blocks = [one for one in seen.findings if one.severity == "block"]
    assert seen.outcome == "refuse"
    assert seen.facts["mergeable"] is False
    assert {one.code for one in blocks} == {code}, [one.message for one in blocks]
    with pytest.raises(RefusedError):
        start.merge(seen, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    return blocks[0]


def pair(
    tmp_path: Path, tensors: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **config: Any
) -> None:
    """Write a base and an adapter; `tensors` replaces the adapter's, `model` goes to the base's builder."""
    builders.llama_model(tmp_path / "base", **(model or {}))
    builders.lora_adapter(tmp_path / "adapter", tensors=tensors, **config)


def matrices(module: str, rows: int, columns: int, rank: int = 4) -> dict[str, builders.TensorSpec]:
    """Return a pair of matrices."""
    return {
        f"{module}.lora_A.weight": ("F32", (rank, columns), builders.gauss(1, module, rank * columns)),
        f"{module}.lora_B.weight": ("F32", (rows, rank), builders.gauss(2, module, rank * rows)),
    }


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "merge-impossible", "not expressible as weights"),
        ({"alora_invocation_tokens": [1, 2]}, "merge-impossible", "invocation tokens"),
        ({"use_qalora": True, "qalora_group_size": 2}, "merge-impossible", "QALoRA"),
        ({"arrow_config": {"top_k": 2}}, "merge-impossible", "Arrow"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "merge-layers-replicated", "one layer of the base"),
        ({"init_lora_weights": "pissa"}, "merge-base-changed", "changed the base"),
        ({"init_lora_weights": "pissa_niter_16"}, "merge-base-changed", "pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "merge-base-changed", "olora"),
        ({"init_lora_weights": "corda"}, "merge-base-changed", "corda"),
        ({"init_lora_weights": "loftq"}, "merge-base-changed", "loftq"),
        ({"peft_type": "LILY"}, "merge-impossible", "LILY"),
        ({"peft_type": "SOMETHING_NEW"}, "merge-not-streamed", "SOMETHING_NEW"),
        ({"enable_lora": [True, False]}, "merge-not-streamed", "merged-linear"),
    ],
)
def test_what_an_adapter_is_can_forbid_the_merge(tmp_path: Path, config: dict[str, Any], code: str, words: str) -> None:
    """Types and options that no weights can stand for, or that this version does not merge, are refused by name."""
    pair(tmp_path, **config)
    if config.get("peft_type") in {"PROMPT_TUNING", "LILY"}:
        name = {"PROMPT_TUNING": "prompt_embeddings", "LILY": f"{Q0}.lily_A"}[config["peft_type"]]
        builders.write_safetensors(tmp_path / "adapter" / "adapter_model.safetensors", {name: ("F32", (4, 16), 0.5)})
    one = found(tmp_path, code)
    assert words in one.message
    assert one.fix


@pytest.mark.parametrize("start_method", ["eva", "gaussian", "orthogonal", True, False])
def test_start_methods_that_leave_the_base_alone_are_merged(tmp_path: Path, start_method: Any) -> None:
    """EVA, gaussian and orthogonal starts are plain LoRA once saved."""
    pair(tmp_path, init_lora_weights=start_method)
    assert look([tmp_path / "adapter"], tmp_path / "base").outcome == "accept"


@pytest.mark.parametrize(
    ("quantized", "dtype", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "I32", "quantize the result again"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "U8", "16-bit"),
        ({"quant_method": "fp8"}, "F8_E4M3", "16-bit"),
    ],
)
def test_a_quantized_base_is_refused(tmp_path: Path, quantized: dict[str, Any], dtype: str, words: str) -> None:
    """A base of packed codes is refused by its method, with the base that would do."""
    tensors = builders.llama_tensors()
    for name in [n for n in tensors if ".mlp." in n or ".self_attn." in n]:
        stem = name.removesuffix(".weight")
        shape = tensors.pop(name)[1]
        tensors[f"{stem}.qweight" if dtype == "I32" else name] = (dtype, (shape[0] // 8 or 1, shape[1]), None)
        tensors[f"{stem}.scales" if dtype == "I32" else f"{stem}.weight_scale"] = ("BF16", (1, shape[1]), 1.0)
    builders.llama_model(tmp_path / "base", tensors=tensors, quantization_config=quantized)
    builders.lora_adapter(tmp_path / "adapter")
    one = found(tmp_path, "merge-base-quantized")
    assert one.data["quant_method"] == quantized["quant_method"]
    assert words in str(one.fix)


def test_the_wrong_shape_names_both_shapes_and_the_recorded_base(tmp_path: Path) -> None:
    """An adapter for another size is refused with the shapes on both sides and the base it was trained on."""
    pair(tmp_path, tensors=builders.lora_tensors(hidden=24))
    one = found(tmp_path, "merge-shape-mismatch")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert one.data["shape_mismatch"][name] == [[24, 24], [16, 16]]
    assert "example-org/tiny-base" in one.message


def test_another_architecture_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    """A module the base does not have is named, with the names it has that are most like it."""
    pair(tmp_path, tensors=matrices(f"{PREFIX}transformer.h.0.attn.c_attn", 48, 16), targets=["c_attn"])
    one = found(tmp_path, "merge-target-missing")
    assert "transformer.h.0.attn.c_attn.weight" in one.message
    assert one.data["nearest"]


def test_a_tensor_that_nothing_takes_is_an_error(tmp_path: Path) -> None:
    """A saved head that the base does not have is never dropped in silence."""
    tensors = builders.lora_tensors() | {f"{PREFIX}score.weight": ("F32", (2, 16), 0.5)}
    pair(tmp_path, tensors=tensors, modules_to_save=["score"])
    one = found(tmp_path, "merge-tensor-unused")
    assert f"{PREFIX}score.weight" in one.message


def test_a_bias_without_a_home_is_refused_once(tmp_path: Path) -> None:
    """lora_bias on a base without biases cannot be merged; all of them are counted in one finding."""
    tensors = builders.lora_tensors()
    for name in [n for n in tensors if "lora_B" in n]:
        tensors[name.replace("weight", "bias")] = ("F32", tensors[name][1][:1], 0.5)
    pair(tmp_path, tensors=tensors, lora_bias=True)
    one = found(tmp_path, "merge-bias-homeless")
    assert one.data["bias_tensors"] == 4
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    assert sum(f.code == "merge-bias-homeless" for f in seen.findings) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """NaN and infinities in an adapter are named before anything is written."""
    tensors = builders.lora_tensors()
    name = f"{Q0}.lora_B.weight"
    tensors[name] = ("F32", (16, 4), [value] + [0.1] * 63)
    pair(tmp_path, tensors=tensors)
    assert name in found(tmp_path, "values-nan").message


def test_a_truncated_shard_of_the_base_is_refused(tmp_path: Path) -> None:
    """A base file that is shorter than its header says stops the merge, with the missing bytes."""
    pair(tmp_path, model={"shards": 3})
    path = tmp_path / "base" / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    one = found(tmp_path, "file-short")
    assert one.data["short_by"] == 40
    assert one.subject == "base/model-00002-of-00003.safetensors"


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_another_base_of_the_same_shape_is_seen_by_the_adapter_s_copy(tmp_path: Path, dtype: str) -> None:
    """An adapter on an embedding carries the base's; where it differs from this base, it is the wrong one."""
    tensors: dict[str, builders.TensorSpec] = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": ("F32", (4, 32), builders.gauss(1, "a", 128)),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": ("F32", (16, 4), builders.gauss(1, "b", 64)),
    }
    base = builders.llama_tensors(dtype="BF16")["model.embed_tokens.weight"]
    raw = builders.pack(*base)
    wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
    copy = f"{PREFIX}model.embed_tokens.base_layer.weight"
    pair(
        tmp_path,
        tensors=tensors | {copy: (dtype, (32, 16), raw if dtype == "BF16" else wide)},
        targets=["embed_tokens"],
    )
    right = look([tmp_path / "adapter"], tmp_path / "base")
    assert (right.outcome, right.facts["base_identity"]) == ("accept", "copies")
    other = bytearray(raw)
    other[1] ^= 1
    spoilt = (
        bytes(other) if dtype == "BF16" else b"".join(b"\0\0" + bytes(other[i : i + 2]) for i in range(0, len(raw), 2))
    )
    builders.lora_adapter(
        tmp_path / "adapter", tensors=tensors | {copy: (dtype, (32, 16), spoilt)}, targets=["embed_tokens"]
    )
    one = found(tmp_path, "merge-base-differs")
    assert one.data["differing_elements"] == 1
    assert one.data["tensor"] == "model.embed_tokens.weight"


def test_another_id_in_the_cache_is_a_warning(tmp_path: Path) -> None:
    """A base out of a Hub cache tells its id and commit; where the adapter records others, that is shown."""
    snapshot = tmp_path / "models--acme--other" / "snapshots" / ("a" * 40)
    base = builders.llama_model(snapshot)
    adapter = builders.lora_adapter(tmp_path / "adapter")
    seen = look([adapter], base)
    assert [one.code for one in seen.findings if one.severity == "warn"] == ["merge-base-other"]
    right = tmp_path / "models--example-org--tiny-base" / "snapshots" / ("b" * 40)
    shutil.copytree(base, right)
    assert look([adapter], right).outcome == "accept"
    assert look([adapter], base).facts["base_identity"] is None
    assert look([adapter], right).facts["base_identity"] == "id"
    builders.lora_adapter(adapter, revision="b" * 40)
    assert look([adapter], right).facts["base_identity"] == "commit"
    builders.lora_adapter(adapter, revision="c" * 40)
    assert [one.code for one in look([adapter], right).findings if one.severity == "warn"] == ["merge-base-other"]


def test_a_tokenizer_beyond_the_embedding_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """An adapter whose tokenizer has grown, without the rows for it, does not fit this base."""
    pair(tmp_path)
    builders.write_tokenizer(tmp_path / "adapter", vocab=40)
    one = found(tmp_path, "merge-tokenizer-beyond")
    assert (one.data["adapter_vocab"], one.data["base_vocab"]) == (40, 32)


@pytest.mark.parametrize(("head", "code"), [(True, "merge-tokenizer-missing"), (False, "merge-vocabulary-torn")])
def test_a_grown_vocabulary_needs_both_ends_and_a_tokenizer(tmp_path: Path, head: bool, code: str) -> None:
    """New rows in one end of an untied pair, or without the tokenizer that uses them, make no model."""
    tensors = builders.lora_tensors()
    tensors[f"{PREFIX}model.embed_tokens.weight"] = ("F32", (40, 16), 0.5)
    if head:
        tensors[f"{PREFIX}lm_head.weight"] = ("F32", (40, 16), 0.5)
    else:
        builders.write_tokenizer(tmp_path / "adapter", vocab=40)
    pair(tmp_path, tensors=tensors)
    one = found(tmp_path, code)
    assert one.data["adapter_vocab"] == 40


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder, decoder and head"),
        ({"architectures": ["RobertaForMaskedLM"]}, "what the head of RobertaForMaskedLM is called"),
    ],
)
@pytest.mark.parametrize("end", ["lm_head", "model.embed_tokens"])
def test_ends_that_would_part_under_unknown_names_are_refused(
    tmp_path: Path, config: dict[str, Any], words: str, end: str
) -> None:
    """Where more than one module shares the embedding, or the head has a name of its own, nothing is untied."""
    tensors = matrices(f"{PREFIX}{end}", 32, 16) if end == "lm_head" else embedded(end)
    pair(tmp_path, tensors=tensors, targets=[end.rpartition(".")[2]], model={"tied": True} | config)
    assert words in found(tmp_path, "merge-ambiguous").message


def embedded(module: str) -> dict[str, builders.TensorSpec]:
    """Return a pair of matrices on the tiny model's embedding."""
    return {
        f"{PREFIX}{module}.lora_embedding_A": ("F32", (4, 32), builders.gauss(1, "a", 128)),
        f"{PREFIX}{module}.lora_embedding_B": ("F32", (16, 4), builders.gauss(1, "b", 64)),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_that_encoder_and_decoder_share_takes_no_matrices(tmp_path: Path, *, tied: bool) -> None:
    """An adapter on `shared` computes nothing in the model that trained it: merged, it would change three modules."""
    model = builders.llama_tensors(tied=tied)
    model["shared.weight"] = model.pop("model.embed_tokens.weight")
    pair(
        tmp_path,
        tensors=embedded("shared"),
        targets=["shared"],
        model={"tensors": model, "tied": tied, "is_encoder_decoder": True},
    )
    assert "changes one of them" in found(tmp_path, "merge-ambiguous").message


def test_trained_rows_under_a_head_with_matrices_are_refused(tmp_path: Path) -> None:
    """Rows of a tied embedding and matrices on its head lie upon each other in an order that no file tells."""
    tensors = matrices(f"{PREFIX}lm_head", 32, 16)
    tensors[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = ("F32", (1, 16), 0.5)
    pair(tmp_path, tensors=tensors, targets=["lm_head"], trainable_token_indices=[3], model={"tied": True})
    assert "trained rows of model.embed_tokens.weight" in found(tmp_path, "merge-ambiguous").message


def test_a_saved_head_under_trained_rows_is_no_copy_of_the_base(tmp_path: Path) -> None:
    """PEFT wraps the tied head twice then and cannot run it; nothing says that the base is another one."""
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": ("F32", (1, 16), 0.5)}
    head = {"lm_head.token_adapter.base_layer.weight": ("F32", (32, 16), 0.25)}
    tensors = builders.lora_tensors() | {f"{PREFIX}{name}": spec for name, spec in (rows | head).items()}
    pair(tmp_path, tensors=tensors, modules_to_save=["lm_head"], trainable_token_indices=[3], model={"tied": True})
    told = found(tmp_path, "merge-ambiguous")
    assert "modules_to_save" in told.message
    assert "trainable_token_indices" in str(told.fix)


def test_square_experts_of_an_old_adapter_are_not_guessed(tmp_path: Path) -> None:
    """Where neither shape nor version tells how experts in one parameter are stored, nothing is merged."""
    tensors = builders.llama_tensors()
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = ("BF16", (2, 16, 16), 0.5)
    module = f"{PREFIX}model.layers.0.mlp.experts"
    config: dict[str, Any] = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    pair(
        tmp_path, tensors=matrices(module, 16, 16, rank=8), model={"tensors": tensors}, peft_version="0.18.0", **config
    )
    assert "square" in found(tmp_path, "merge-ambiguous").message
    builders.lora_adapter(
        tmp_path / "adapter", tensors=matrices(module, 16, 16, rank=8), peft_version="0.21.2", **config
    )
    assert look([tmp_path / "adapter"], tmp_path / "base").outcome == "accept"


def test_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    """A file with two named adapters does not say which one is meant."""
    tensors: dict[str, builders.TensorSpec] = {}
    for name in ("one", "two"):
        for key, value in matrices(Q0, 16, 16).items():
            tensors[key.replace(".weight", f".{name}.weight")] = value
    pair(tmp_path, tensors=tensors, targets=["q_proj"])
    assert "several adapters" in found(tmp_path, "merge-ambiguous").message


def test_wrapped_keys_are_read_and_told(tmp_path: Path) -> None:
    """Keys with a wrapper's segment, which loaders pass over, are merged and named in a warning."""
    tensors = {f"_orig_mod.{name}": value for name, value in builders.lora_tensors().items()}
    pair(tmp_path, tensors=tensors)
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    assert seen.outcome == "warn"
    assert len(seen.facts["changed_tensors"]) == 4


def test_a_base_in_another_container_is_refused(tmp_path: Path) -> None:
    """A GGUF file is no base: the merge is made in safetensors and converted afterwards."""
    builders.lora_adapter(tmp_path / "adapter")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    assert seen.outcome == "refuse"
    assert seen.facts["mergeable"] is False


def test_values_beyond_the_precision_are_refused(tmp_path: Path) -> None:
    """A base whose values do not fit fp16 is not merged into infinities."""
    tensors = builders.llama_tensors(dtype="F32")
    tensors["model.norm.weight"] = ("F32", (16,), 1e6)
    pair(tmp_path, model={"tensors": tensors, "dtype": "F32"})
    seen = look([tmp_path / "adapter"], tmp_path / "base", dtype="fp16")
    with pytest.raises(RefusedError) as caught:
        start.merge(seen, tmp_path / "out")
    assert "model.norm.weight" in str(caught.value.why)
    assert not (tmp_path / "out").exists()


def test_a_merge_that_equals_the_base_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """An adapter that rounding swallows whole is no merge; with leave, it is one that says so."""
    small = {n: (d, s, 1e-9 if "lora_B" in n else v) for n, (d, s, v) in builders.lora_tensors().items()}
    pair(tmp_path, tensors=small)
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    with pytest.raises(RefusedError) as caught:
        start.merge(seen, tmp_path / "out")
    assert [one.code for one in caught.value.data["findings"]] == ["merge-changes-nothing"]
    assert not (tmp_path / "out").exists()
    done = start.merge(seen, tmp_path / "out", unchanged=True)
    assert "merge-update-lost" in {one.code for one in done.findings}
    assert merging.tensors(tmp_path / "out") == merging.tensors(tmp_path / "base")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is an error with both numbers, and no folder appears."""
    pair(tmp_path)
    monkeypatch.setattr(staging, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFullError) as caught:
        start.merge(look([tmp_path / "adapter"], tmp_path / "base"), tmp_path / "out")
    assert caught.value.data["free_bytes"] == 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    "fill", [lambda p: (p / "notes.txt").write_text("mine"), lambda p: (p / "config.json").mkdir()]
)
def test_a_target_that_holds_something_else_is_left_alone(tmp_path: Path, fill: Callable[[Path], Any]) -> None:
    """Nothing is written into, or over, a folder that is not ours."""
    pair(tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    fill(target)
    before = sorted(p.name for p in target.iterdir())
    with pytest.raises(ConflictError):
        start.merge(look([tmp_path / "adapter"], tmp_path / "base"), target)
    assert sorted(p.name for p in target.iterdir()) == before


def test_a_config_of_another_adapter_is_refused_by_its_rank(tmp_path: Path) -> None:
    """A config whose rank is not that of the matrices would give another strength: it is refused."""
    pair(tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 8}))
    assert look([tmp_path / "adapter"], tmp_path / "base").outcome == "refuse"
