"""Packed models: the number of parameters is that of the weights, whatever the method, bits, group and shape."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters import packed_weights, quantization
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.inspect import inspect
from weighbridge_testlib import builders
from weighbridge_testlib.builders import TensorSpec
from weighbridge_testlib.packing import Method, config, layer

_PLAIN: dict[str, TensorSpec] = {
    "model.embed_tokens.weight": ("BF16", (32, 16), 0.5),
    "model.norm.weight": ("BF16", (16,), 1.0),
    "lm_head.weight": ("BF16", (32, 16), 0.5),
}
_PLAIN_COUNT = 32 * 16 * 2 + 16

METHODS = st.one_of(
    st.builds(Method, st.just("gptq"), st.sampled_from([2, 3, 4, 8]), st.sampled_from([32, 64]), st.just("")),
    st.builds(Method, st.just("gptq"), st.sampled_from([2, 4, 8]), st.just(32), st.just("no-order")),
    st.builds(Method, st.just("awq"), st.sampled_from([4, 8]), st.sampled_from([32, 64])),
    st.builds(Method, st.just("mlx"), st.sampled_from([2, 3, 4, 6, 8]), st.sampled_from([32, 64])),
    st.builds(Method, st.just("bitsandbytes"), st.just(4), st.just(64), st.sampled_from(["", "nested"])),
    st.builds(Method, st.just("bitsandbytes"), st.just(8), st.just(64)),
    st.builds(
        Method, st.just("compressed-tensors"), st.integers(2, 8), st.sampled_from([32, 64]), st.just("pack-quantized")
    ),
    st.builds(Method, st.just("compressed-tensors"), st.just(8), st.just(64), st.sampled_from(["int", "float"])),
    st.builds(Method, st.just("compressed-tensors"), st.just(4), st.just(16), st.just("nvfp4")),
    st.builds(Method, st.just("fp8"), st.just(8), st.just(128), st.sampled_from(["", "e5m2"])),
    st.builds(Method, st.just("mxfp4"), st.just(4), st.just(32)),
)
SIDES = st.integers(1, 5).map(lambda n: 64 * n)
WORD = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=8).filter(lambda w: "lora_" not in w)


def packed(folder: Path, tensors: dict[str, TensorSpec], **more: Any) -> Any:
    """Write a model and return what we say of it."""
    for path in folder.glob("*"):
        path.unlink()
    return inspect(builders.llama_model(folder, tensors=tensors, tokenizer=False, **more))


@given(
    method=METHODS, sides=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3), words=st.lists(WORD, min_size=3)
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packed_layers_count_as_the_weights_they_stand_for(
    tmp_path: Path, method: Method, sides: list[tuple[int, int]], words: list[str]
) -> None:
    """Each method, number of bits, group size, shape and name gives the exact number of weights, and no finding."""
    tensors = dict(_PLAIN)
    for i, (inner, outer) in enumerate(sides):
        tensors |= layer(method, f"model.layers.{i}.{words[i % len(words)]}.proj", inner, outer)
    found = packed(tmp_path, tensors, num_hidden_layers=len(sides), **config(method))
    assert [f.code for f in found.findings if f.severity != "note"] == []
    assert (found.outcome, found.kind) == ("accept", "quantized")
    assert (found.facts["quant_method"], found.facts["bits"]) == (method.name, method.bits)
    assert found.facts["param_count"] == _PLAIN_COUNT + sum(inner * outer for inner, outer in sides)


@given(bits=st.tuples(*[st.sampled_from([2, 4, 8])] * 2), odd=st.integers(1, 31))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layers_of_different_bits_are_counted_each_by_its_own(tmp_path: Path, bits: tuple[int, int], odd: int) -> None:
    """Mixed models, and rows that do not fill their last word, count right: the tensors tell it, not the config."""
    first, second = (f"model.layers.{i}.mlp.up_proj" for i in range(2))
    for name in ("gptq", "awq", "compressed-tensors"):
        one, two = (Method(name, each, 32, "pack-quantized") for each in bits)
        size = 64 if name != "compressed-tensors" else 64 + odd
        tensors = _PLAIN | layer(one, first, size, 64) | layer(two, second, size, 64)
        assert packed(tmp_path, tensors, **config(one)).facts["param_count"] == _PLAIN_COUNT + 2 * size * 64
    one, two = (Method("mlx", each, 32) for each in bits)
    table = config(one)
    table["quantization"][second] = {"bits": two.bits, "group_size": two.group}
    tensors = _PLAIN | layer(one, first, 128, 64) | layer(two, second, 128, 64)
    assert packed(tmp_path, tensors, **table).facts["param_count"] == _PLAIN_COUNT + 2 * 128 * 64


def test_mixed_groups_state_no_single_number_of_bits() -> None:
    """A config whose groups differ has no one number of bits; equal groups have theirs."""
    groups = {str(i): {"weights": {"num_bits": bits}} for i, bits in enumerate((4, 8))}
    table = {"quant_method": "compressed-tensors", "config_groups": groups}
    mixed = quantization.of({"quantization_config": table})
    assert mixed == ("compressed-tensors", None, "quantization_config")
    told = quantization.of({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    assert told is not None
    assert told.bits == 4


STRANGE: dict[str, dict[str, TensorSpec]] = {
    "exl2": {"q_weight": ("I32", (24, 64), None), "q_scale": ("I32", (2, 8), None), "q_scale_max": ("F16", (2,), 1.0)},
    "hqq": {"W_q": ("U8", (32, 64), None), "scale": ("F16", (64, 1), 1.0), "zero": ("F16", (64, 1), 1.0)},
    "quanto": {"weight._data": ("I8", (64, 64), None), "weight._scale": ("BF16", (64, 1), 1.0)},
    "aqlm": {
        "codes": ("I16", (8, 8, 1), None),
        "codebooks": ("F16", (1, 256, 1, 8), 1.0),
        "scales": ("F16", (8,), 1.0),
    },
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_packing_that_is_not_known_is_not_taken_for_plain_weights(tmp_path: Path, name: str) -> None:
    """Codes beside their scales are packed weights, in whatever tool's way: the config is no leftover."""
    tensors = _PLAIN | {f"model.layers.0.q_proj.{label}": spec for label, spec in STRANGE[name].items()}
    table = {"quant_method": name, "bits": 4}
    found = packed(tmp_path, tensors, num_hidden_layers=1, quantization_config=table)
    assert (found.outcome, found.kind, found.facts["quant_method"]) == ("accept", "quantized", name)
    told = {"quanto": 64 * 64 + _PLAIN_COUNT}  # one weight a byte; of the others nothing says how many they hold
    assert found.facts["param_count"] == told.get(name)
    (one,) = found.artifacts
    assert one.weights is not None
    assert one.weights.parameters == told.get(name)


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": ("U32", (16, 2)), "scales": ("BF16", (16, 1))},
        {"qweight": ("I32", (16, 2)), "g": ("BF16", (16,))},
        {"weight": ("U8", (16, 2)), "weight_scale": ("BF16", (16, 1))},
        {"weight_packed": ("I32", (16, 2)), "weight_scale": ("BF16", (16, 1))},
    ],
)
def test_words_of_a_width_that_nobody_states(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Packed words without a word on their bits leave the number of weights unknown."""
    names = {f"model.layers.0.q_proj.{label}": spec for label, spec in tensors.items()}
    table = {name: Tensor(name, dtype, shape, 0, 64) for name, (dtype, shape) in names.items()}
    assert packed_weights.parameters(table, None, {}, {}) is None


def test_integer_buffers_of_a_plain_model_are_no_packed_weights() -> None:
    """Positions, masks and relative indices beside floats do not make a model a packed one."""
    shapes = {
        "model.layers.0.q_proj.weight": ("BF16", (16, 16)),
        "model.layers.0.q_proj.bias": ("BF16", (16,)),
        "embeddings.position_ids": ("I64", (1, 512)),
        "encoder.attn.relative_position_index": ("I64", (49, 49)),
        "encoder.attn.relative_position_bias_table": ("F32", (169, 3)),
        "norm.num_batches_tracked": ("I64", ()),
    }
    tensors = {name: Tensor(name, dtype, shape, 0, 0) for name, (dtype, shape) in shapes.items()}
    assert not packed_weights.is_packed(tensors)


def test_a_config_that_says_quantized_over_plain_weights_is_refused_by_name(tmp_path: Path) -> None:
    """Plain weights under a config of every method are a leftover."""
    for name in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8", "hqq", "exl2"):
        told = (
            config(Method(name, 4, 32))
            if name not in {"hqq", "exl2"}
            else {"quantization_config": {"quant_method": name}}
        )
        found = packed(tmp_path, dict(builders.llama_tensors()), **told)
        assert [f.code for f in found.findings if f.severity == "block"] == ["quantization-leftover"]
