"""A model against its config: dtype, vocabulary, head, layers, leftovers, quantization, generation, values."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.adapters import fit, quantization, values
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders
from weighbridge_testlib.builders import TensorSpec, llama_tensors


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def test_facts_of_a_whole_model(tmp_path: Path) -> None:
    """Architecture, dtype, tying and template are told."""
    facts = look(builders.llama_model(tmp_path))[0].facts
    assert facts["architecture"] == "LlamaForCausalLM"
    assert (facts["tied"], facts["config_dtype"], facts["has_chat_template"]) == (False, "bfloat16", True)
    assert facts["dtype_histogram"] == {"BF16": {"tensors": 21, "params": 5712}}
    assert (facts["missing_files"], facts["missing_tensors"]) == ([], [])


def test_tied_model_lacks_no_head(tmp_path: Path) -> None:
    """A tied model needs no head of its own; an untied one does."""
    found, codes = look(builders.llama_model(tmp_path / "a", tied=True))
    assert (found.outcome, codes, found.facts["tied"]) == ("accept", set(), True)
    assert found.facts["tensor_count"] == 20
    found, codes = look(builders.llama_model(tmp_path / "b", tensors=llama_tensors(tied=True)))
    assert (found.outcome, codes) == ("refuse", {"tensor-missing"})
    assert found.facts["missing_tensors"] == ["lm_head.weight"]


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_tensor_that_the_architecture_needs(tmp_path: Path, name: str) -> None:
    """A tensor that every model of the family has is missed even without an index."""
    tensors = llama_tensors()
    del tensors[name]
    found, codes = look(builders.llama_model(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"tensor-missing"})
    assert found.facts["missing_tensors"] == [name]


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    """Layers that the config counts and the file lacks are named."""
    found, _ = look(builders.llama_model(tmp_path, num_hidden_layers=3))
    assert found.outcome == "refuse"
    assert len(found.facts["missing_tensors"]) == 9


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_torn_first_layer_alone_is_no_model(tmp_path: Path, kept: int) -> None:
    """However little is left of the one layer that is there, the others are missed."""
    tensors = llama_tensors()
    layer = [name for name in tensors if ".layers.0." in name]
    left = {n: t for n, t in tensors.items() if ".layers." not in n or n in layer[:kept]}
    found, codes = look(builders.llama_model(tmp_path, tensors=left))
    assert (found.outcome, codes) == ("refuse", {"tensor-missing"})
    assert f"model.layers.1.{layer[0].partition('.layers.0.')[2]}" in found.facts["missing_tensors"]


FAMILIES = {
    "llama": ("num_hidden_layers", "model.layers.{}.mlp.up_proj.weight", "model.embed_tokens.weight"),
    "gpt2": ("n_layer", "h.{}.mlp.c_fc.weight", "wte.weight"),
    "bert": (
        "num_hidden_layers",
        "bert.encoder.layer.{}.output.dense.weight",
        "bert.embeddings.word_embeddings.weight",
    ),
    "mpt": ("n_layers", "transformer.blocks.{}.ffn.up_proj.weight", "transformer.wte.weight"),
    "somebody-s": ("num_layers", "trunk.block_{}.weight", "trunk.embed.weight"),
}


@pytest.mark.parametrize("family", FAMILIES)
@given(count=st.integers(1, 40), data=st.data())
@settings(deadline=None, max_examples=25)
def test_layers_of_which_nothing_is_left(family: str, count: int, data: st.DataObject) -> None:
    """A model torn down to its embedding is told in every family; single layers that are gone, in known ones."""
    key, name, rest = FAMILIES[family]
    there = data.draw(st.sets(st.integers(0, count - 1)))
    names = [rest, *(name.format(i) for i in there)]
    tensors = {name: Tensor(name, "F32", (64, 8), 0, 0) for name in names}
    _, found = fit.layers({"model_type": family, key: count}, tensors, "config.json")
    gone = sorted(set(range(count)) - there) if family != "somebody-s" or not there else []
    assert [f.data["missing_layers"] for f in found] == ([gone] if gone else [])


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_without_any_layer(tmp_path: Path, packed: bool) -> None:
    """Embedding, norm and head alone are no model, whether the rest would be packed or not."""
    tensors = {n: t for n, t in llama_tensors().items() if ".layers." not in n}
    more: dict[str, Any] = {}
    if packed:
        tensors["lm_head.qweight"] = ("I32", (2, 32), None)
        tensors["lm_head.scales"] = ("F16", (1, 32), 1.0)
        more = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    found, codes = look(builders.llama_model(tmp_path, tensors=tensors, **more))
    assert (found.outcome, codes) == ("refuse", {"tensor-missing"})
    assert found.facts["missing_layers"] == [0, 1]


@pytest.mark.parametrize(
    "tensors",
    [
        ["w", "s"],
        ["rnn.weight_ih_l0", "embed.weight"],
        ["stack.attention.wq", "embed_tokens.weight"],
        ["embed.weight", "fc2.bias"],
    ],
)
def test_layers_that_are_counted_another_way(tensors: list[str]) -> None:
    """What numbers or stacks its layers in its own way, or names nothing as models do, is not second-guessed."""
    table = {name: Tensor(name, "F32", (3, 8, 8), 0, 0) for name in tensors}
    assert fit.layers({"model_type": "own", "num_hidden_layers": 3}, table, "config.json") == ({}, [])


def test_unknown_family_is_not_second_guessed(tmp_path: Path) -> None:
    """Families whose layers differ are not judged by one layer."""
    tensors = llama_tensors()
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    found, _ = look(builders.llama_model(tmp_path, tensors=tensors, model_type="mixed", architectures=["MixedModel"]))
    assert found.outcome == "accept"


@pytest.mark.parametrize(("dtype", "declared"), [("F32", "bfloat16"), ("BF16", "float32"), ("F16", "bfloat16")])
def test_dtype_that_the_config_does_not_tell(tmp_path: Path, dtype: str, declared: str) -> None:
    """Config and weights of two dtypes warn, both named; the old field is read too."""
    for field in ("dtype", "torch_dtype"):
        folder = builders.llama_model(tmp_path / field, tensors=llama_tensors(dtype=dtype))
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        builders.write_json(folder / "config.json", {**config, field: declared})
        found, codes = look(folder)
        assert (found.outcome, codes) == ("warn", {"dtype-mismatch"})
        assert found.facts["config_dtype"] == declared


def test_norms_in_full_precision_are_no_mismatch(tmp_path: Path) -> None:
    """A few tensors in another dtype do not make the model one of that dtype."""
    tensors = llama_tensors()
    tensors["model.norm.weight"] = ("F32", (16,), 1.0)
    assert look(builders.llama_model(tmp_path, tensors=tensors))[0].outcome == "accept"


def test_vocabulary_of_the_config(tmp_path: Path) -> None:
    """A vocab_size that is not the embedding's rows is refused, also inside text_config."""
    found, codes = look(builders.llama_model(tmp_path / "a", vocab_size=36))
    assert (found.outcome, codes) == ("refuse", {"vocab-mismatch"})
    assert (found.facts["config_vocab"], found.facts["embedding_rows"]) == (36, 32)
    folder = builders.llama_model(tmp_path / "b")
    config = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["XForConditionalGeneration"],
        "model_type": "x",
        "text_config": {**config, "vocab_size": 40},
    }
    builders.write_json(folder / "config.json", outer)
    assert look(folder)[1] == {"vocab-mismatch"}


@pytest.mark.parametrize(("entries", "codes"), [(32, set()), (20, set()), (33, {"tokenizer-beyond-vocab"})])
def test_tokenizer_against_the_embedding(tmp_path: Path, entries: int, codes: set[str]) -> None:
    """A tokenizer that can emit an id without a row warns; fewer ids than rows are ordinary padding."""
    folder = builders.llama_model(tmp_path)
    builders.write_tokenizer(folder, vocab=entries)
    found, seen = look(folder)
    assert seen == codes
    assert found.facts["tokenizer_entries"] == entries


@pytest.mark.parametrize(
    ("document", "entries"),
    [
        ({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}, (2, 1)),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7}]}, (2, 7)),
        ({"model": {}}, None),
        ({}, None),
        ({"added_tokens": "x"}, None),
    ],
)
def test_entries_of_a_tokenizer(document: dict[str, Any], entries: tuple[int, int] | None) -> None:
    """Ids are counted for every kind of vocabulary, added tokens included."""
    assert fit.tokenizer_entries(document) == entries


def test_leftover_of_quantization(tmp_path: Path) -> None:
    """A config that still says quantized over plain weights is refused."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found, codes = look(builders.llama_model(tmp_path, quantization_config=config))
    assert (found.outcome, found.artifact, codes) == ("refuse", "full-model", {"quantization-leftover"})
    assert found.facts["leftover"] == "quantization_config"


def quantized(kind: str) -> tuple[dict[str, TensorSpec], dict[str, Any], int]:
    """Return tensors, quantization config and logical parameters of a tiny packed model."""
    stem = "model.layers.0.q"
    if kind in {"gptq", "awq"}:
        tensors: dict[str, TensorSpec] = {
            f"{stem}.qweight": ("I32", (2, 16), bytes(128)), f"{stem}.qzeros": ("I32", (1, 2), bytes(8)),
            f"{stem}.scales": ("F16", (1, 16), 1.0), f"{stem}.g_idx": ("I32", (16,), bytes(64)),
        }  # fmt: skip
        return tensors, {"quant_method": kind, "bits": 4, "group_size": 16}, 256
    if kind == "bitsandbytes":
        tensors = {
            f"{stem}.weight": ("U8", (128, 1), bytes(128)), f"{stem}.weight.absmax": ("F32", (4,), 1.0),
            f"{stem}.weight.quant_map": ("F32", (16,), 1.0),
            f"{stem}.weight.quant_state.bitsandbytes__nf4": ("U8", (50,), bytes(50)),
        }  # fmt: skip
        return tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}, 256
    if kind == "fp8":
        tensors = {
            f"{stem}.weight": ("F8_E4M3", (16, 16), bytes(256)),
            f"{stem}.weight_scale_inv": ("F32", (1, 1), 1.0),
        }
        return tensors, {"quant_method": "fp8"}, 256
    if kind == "mxfp4":
        tensors = {f"{stem}_blocks": ("U8", (2, 4, 16), bytes(128)), f"{stem}_scales": ("U8", (2, 4), bytes(8))}
        return tensors, {"quant_method": "mxfp4"}, 256
    tensors = {
        f"{stem}.weight": ("U32", (16, 2), bytes(128)), f"{stem}.scales": ("BF16", (16, 1), 1.0),
        f"{stem}.biases": ("BF16", (16, 1), 0.0),
    }  # fmt: skip
    return tensors, {"group_size": 16, "bits": 4}, 256


@pytest.mark.parametrize(
    ("kind", "bits"), [("gptq", 4), ("awq", 4), ("bitsandbytes", 4), ("fp8", 8), ("mxfp4", 4), ("mlx", 4)]
)
def test_packed_weights(tmp_path: Path, kind: str, bits: int) -> None:
    """Packed weights are a quantized artifact with method, bits and the logical number of parameters."""
    tensors, config, logical = quantized(kind)
    folder = builders.llama_model(tmp_path, tensors=tensors, quantization_config=config, num_hidden_layers=1)
    found, codes = look(folder)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "quantized", "quantized", set())
    assert (found.facts["quant_method"], found.facts["bits"]) == (kind, bits)
    assert found.facts["param_count"] == logical


def test_quantize_config_of_two_tools() -> None:
    """quantize_config.json is GPTQ's with bits and group size, and Optimum's ONNX export's without."""
    assert quantization.of({}, {"bits": 4, "group_size": 128}) == ("gptq", 4, "quantize_config.json")
    assert quantization.of({}, {"per_channel": True, "reduce_range": True}) is None


def test_model_that_was_never_merged(tmp_path: Path) -> None:
    """Adapter names inside a whole model are refused and counted."""
    tensors = {f"base_model.model.{n.replace('q_proj.', 'q_proj.base_layer.')}": s for n, s in llama_tensors().items()}
    found, codes = look(builders.llama_model(tmp_path, tensors={**tensors, **builders.lora_tensors()}))
    assert (found.outcome, codes) == ("refuse", {"not-merged"})
    assert (found.facts["base_layer_keys"], found.facts["lora_keys"]) == (2, 8)


@pytest.mark.parametrize(
    ("config", "clash"),
    [
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, ["temperature", "top_p"]),
        ({"temperature": 0.7}, ["temperature"]),
        ({"top_k": 20, "min_p": 0.1}, ["top_k", "min_p"]),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}, []),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}, []),
        ({"length_penalty": 2.0}, ["length_penalty"]),
        ({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}, []),
        ({"temperature": None}, []),
    ],
)
def test_generation_settings(tmp_path: Path, config: dict[str, Any], clash: list[str]) -> None:
    """Settings without the mode they belong to warn by name; consistent ones pass."""
    folder = builders.llama_model(tmp_path)
    builders.write_json(folder / "generation_config.json", config)
    found, codes = look(folder)
    assert sorted(found.facts.get("conflicting_fields", [])) == sorted(clash)
    assert codes == ({"generation-conflict"} if clash else set())


def test_header_without_format(tmp_path: Path) -> None:
    """A header that does not say its format warns."""
    folder = builders.llama_model(tmp_path)
    builders.write_safetensors(folder / "model.safetensors", llama_tensors(), metadata={})
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"format-metadata-missing"})
    assert found.facts["metadata_format"] is None


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_half_a_model(tmp_path: Path, missing: str) -> None:
    """A model without its config, or a config without weights, is refused by the name of what is missing."""
    folder = builders.llama_model(tmp_path)
    (folder / missing).unlink()
    found, _ = look(folder)
    assert (found.outcome, found.artifact) == ("refuse", "full-model")
    assert found.facts["missing_files"] == [missing]


def test_nan_in_a_model(tmp_path: Path) -> None:
    """NaN in a small model is found and counted."""
    tensors = llama_tensors()
    values_ = [0.1] * 256
    values_[3] = math.nan
    tensors["model.layers.0.self_attn.q_proj.weight"] = ("BF16", (16, 16), values_)
    found, codes = look(builders.llama_model(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"values-nan"})
    assert found.facts["nan"] == {"model.layers.0.self_attn.q_proj.weight": 1}


def test_empty_tensor_in_a_model(tmp_path: Path) -> None:
    """A tensor without elements is refused by name."""
    tensors = llama_tensors() | {"model.layers.0.extra.weight": ("BF16", (0, 16), b"")}
    found, _ = look(builders.llama_model(tmp_path, tensors=tensors, model_type="x"))
    assert found.outcome == "refuse"
    assert found.facts["empty_tensors"] == ["model.layers.0.extra.weight"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ["", '{"a": ', "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 9\n"]
)
def test_small_files_that_cannot_be_used(tmp_path: Path, name: str, text: str) -> None:
    """A file that would be published and is empty, cut or a pointer is refused by name."""
    folder = builders.llama_model(tmp_path)
    (folder / name).write_text(text)
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert codes <= {"file-empty", "json-damaged", "lfs-pointer"}
    assert any(f.subject == name for f in found.findings if f.severity == "block")


FLOATS = {"F64": "d", "F32": "f", "F16": "e"}


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FLOATS)),
    numbers=st.lists(st.floats(width=16) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]), max_size=40),
    repeat=st.sampled_from([1, 700]),
)
def test_special_values_are_counted_as_struct_reads_them(dtype: str, numbers: list[float], repeat: int) -> None:
    """NaN and infinities are counted exactly, few or many, as a plain decoder counts them."""
    every = numbers * repeat
    block = struct.pack(f"<{len(every)}{FLOATS[dtype]}", *every)
    assert values.special(dtype, block) == (sum(map(math.isnan, every)), sum(map(math.isinf, every)))


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=400).filter(lambda b: len(b) % 2 == 0))
def test_special_bfloat16(raw: bytes) -> None:
    """Any two bytes as a bfloat16 are judged as the float32 they widen to."""
    wide = [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]
    assert values.special("BF16", raw) == (sum(map(math.isnan, wide)), sum(map(math.isinf, wide)))


@pytest.mark.parametrize(
    ("dtype", "raw", "expected"),
    [
        ("F8_E4M3", b"\x7f\xff\x7e\x00", (2, 0)),
        ("F8_E5M2", b"\x7c\xfc\x7d\xff\x7b", (2, 2)),
        ("F8_E8M0", b"\xff\x7f", (1, 0)),
        ("I32", b"\xff" * 8, (0, 0)),
    ],
)
def test_special_values_of_small_dtypes(dtype: str, raw: bytes, expected: tuple[int, int]) -> None:
    """One-byte floats have their own marks; integers have none."""
    assert values.special(dtype, raw) == expected
