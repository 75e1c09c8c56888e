"""An adapter against its config: rank, targets, keys, halves, riders, values, base."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders
from weighbridge_testlib.builders import TensorSpec, lora_tensors

FIRST_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def renamed(change: Any, **kwargs: Any) -> dict[str, TensorSpec]:
    """Return the usual tensors under changed names."""
    return {change(name): spec for name, spec in lora_tensors(**kwargs).items()}


@pytest.mark.parametrize(
    ("rank", "alpha", "targets"),
    [(4, 8, ("q_proj", "v_proj")), (16, 16, ("o_proj",)), (2, 1, ("gate_proj", "down_proj"))],
)
def test_whole_adapter(tmp_path: Path, rank: int, alpha: int, targets: tuple[str, ...]) -> None:
    """An adapter of any rank and targets is accepted with the facts of its config and its matrices."""
    found, codes = look(builders.lora_adapter(tmp_path, rank=rank, alpha=alpha, targets=targets))
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "lora-adapter", "adapter", set())
    facts = found.facts
    assert (facts["rank"], facts["alpha"], facts["scaling"]) == (rank, alpha, alpha / rank)
    assert (facts["rank_from_shapes"], facts["ranks"]) == (rank, [rank])
    assert facts["targets"] == list(targets)
    assert facts["adapted_modules"] == 2 * len(targets)
    assert facts["nonzero_lora_b"] == 2 * len(targets)
    assert facts["canonical_keys"] == facts["tensor_count"]


def test_weights_without_config(tmp_path: Path) -> None:
    """Weights alone are refused; the rank their shapes show is told, alpha is unknown."""
    folder = builders.lora_adapter(tmp_path, rank=8, readme=None)
    (folder / "adapter_config.json").unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"config-missing"})
    assert found.facts["missing_files"] == ["adapter_config.json"]
    assert (found.facts["rank_from_shapes"], found.facts["alpha"]) == (8, None)


def test_config_without_weights(tmp_path: Path) -> None:
    """A config alone is refused, naming the weights."""
    folder = builders.lora_adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"weights-missing"})
    assert found.facts["missing_files"] == ["adapter_model.safetensors"]
    assert found.facts["rank"] == 4


def test_rank_of_the_config_against_the_matrices(tmp_path: Path) -> None:
    """Another rank in the config than in the matrices is refused, both named."""
    found, codes = look(builders.lora_adapter(tmp_path, rank=8, alpha=16, tensors=lora_tensors(rank=4)))
    assert (found.outcome, codes) == ("refuse", {"rank-mismatch"})
    assert (found.facts["rank"], found.facts["rank_from_shapes"]) == (8, 4)


@pytest.mark.parametrize(
    "pattern", ["layers.1.self_attn.q_proj", r"layers\.1\..*q_proj", "model.layers.1.self_attn.q_proj"]
)
def test_rank_pattern_explains_another_rank(tmp_path: Path, pattern: str) -> None:
    """Ranks that rank_pattern explains are no mismatch, and the strength differs by module."""
    tensors = lora_tensors() | {
        name: spec for name, spec in lora_tensors(rank=8).items() if "layers.1.self_attn.q_proj" in name
    }
    found, codes = look(
        builders.lora_adapter(tmp_path, tensors=tensors, rank_pattern={pattern: 8}, alpha_pattern={pattern: 64})
    )
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["ranks"] == [4, 8]
    assert found.facts["scaling_by_module"] == {pattern: 8.0, "default": 2.0}
    assert found.facts["rank_by_module"] == {pattern: 8, "default": 4}


def test_rank_stabilised_strength(tmp_path: Path) -> None:
    """use_rslora divides by the square root of the rank."""
    found, _ = look(builders.lora_adapter(tmp_path, rank=16, alpha=16, use_rslora=True))
    assert found.facts["scaling"] == 4.0
    assert found.facts["use_rslora"] is True


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_one_half_without_the_other(tmp_path: Path, part: str) -> None:
    """A lonely half is refused, naming the key that is missing."""
    other = "lora_B" if part == "lora_A" else "lora_A"
    lost = FIRST_B.replace("lora_B", other)
    tensors = lora_tensors()
    del tensors[lost]
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"lora-half-missing"})
    assert found.facts["missing_tensors"] == [lost]


def test_tensors_of_other_ranks_were_not_gathered(tmp_path: Path) -> None:
    """Tensors of shape [0] are refused and listed, also those of saved modules."""
    tensors: dict[str, TensorSpec] = dict.fromkeys(lora_tensors(), ("F32", (0,), b""))
    tensors["base_model.model.lm_head.weight"] = ("F32", (0,), b"")
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors, modules_to_save=["lm_head"]))
    assert (found.outcome, codes) == ("refuse", {"tensors-empty"})
    assert found.facts["empty_tensors"] == sorted(tensors)


def test_empty_adapter_in_a_zero_checkpoint_can_be_rebuilt(tmp_path: Path) -> None:
    """Where the rank files beside an empty adapter are whole, the folder to rebuild it from is named."""
    tensors: dict[str, TensorSpec] = dict.fromkeys(lora_tensors(), ("F32", (0,), b""))
    builders.trainer_checkpoint(tmp_path / "checkpoint-7", step=7, deepspeed_ranks=2, tensors=tensors)
    found, _ = look(tmp_path / "checkpoint-7")
    assert found.facts["recoverable_from"] == "global_step7"


def test_flat_matrices(tmp_path: Path) -> None:
    """Matrices with one dimension are refused and listed."""
    tensors = {n: (d, (s[0] * s[1],), data) for n, (d, s, data) in lora_tensors().items()}
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"lora-flat"})
    assert found.facts["flat_tensors"] == sorted(tensors)


def test_file_without_tensors_and_without_matrices(tmp_path: Path) -> None:
    """An adapter of nothing, or of scalars alone, is refused."""
    found, codes = look(builders.lora_adapter(tmp_path / "a", tensors={}))
    assert (found.outcome, codes) == ("refuse", {"adapter-empty"})
    scalars: dict[str, TensorSpec] = {f"base_model.model.x.{i}.alpha": ("F32", (), 1.0) for i in range(3)}
    found, codes = look(builders.lora_adapter(tmp_path / "b", tensors=scalars))
    assert (found.outcome, codes) == ("refuse", {"adapter-empty"})


@pytest.mark.parametrize(
    ("change", "segment"),
    [
        (lambda n: n.replace("layers.", "_fsdp_wrapped_module.layers."), "_fsdp_wrapped_module."),
        (lambda n: n.replace("model.model.model", "model.model._orig_mod.model"), "_orig_mod."),
        (lambda n: "_orig_mod." + n, "_orig_mod."),
        (lambda n: "module." + n, "module."),
        (lambda n: n.replace("q_proj", "_checkpoint_wrapped_module.q_proj"), "_checkpoint_wrapped_module."),
        (lambda n: "base_model.model." + n, "base_model.model."),
    ],
)
def test_wrapper_names_in_the_keys(tmp_path: Path, change: Any, segment: str) -> None:
    """A wrapper's segment in the keys is refused and named, for PEFT ignores such keys without a word."""
    found, codes = look(builders.lora_adapter(tmp_path, tensors=renamed(change)))
    assert found.outcome == "refuse"
    assert "keys-wrapped" in codes
    assert found.facts["bad_segment"] == segment


def test_keys_without_prefix(tmp_path: Path) -> None:
    """Keys that lack PEFT's prefix are refused, naming what to put in front."""
    found, codes = look(builders.lora_adapter(tmp_path, tensors=renamed(lambda n: n.removeprefix("base_model.model."))))
    assert (found.outcome, codes) == ("refuse", {"keys-without-prefix"})
    assert found.facts["missing_prefix"] == "base_model.model."
    assert found.facts["canonical_keys"] == 0


@pytest.mark.parametrize(("name", "outcome"), [("default", "warn"), ("style", "refuse")])
def test_adapter_name_in_the_keys(tmp_path: Path, name: str, outcome: str) -> None:
    """An adapter's name left in the keys warns when it is `default`, which PEFT still loads, and refuses otherwise."""
    found, codes = look(
        builders.lora_adapter(tmp_path, tensors=renamed(lambda n: n.replace(".weight", f".{name}.weight")))
    )
    assert (found.outcome, codes) == (outcome, {"keys-with-adapter-name"})
    assert found.facts["bad_segment"] == f"{name}."
    assert found.facts["canonical_keys"] == 0


def test_weights_that_the_config_does_not_target(tmp_path: Path) -> None:
    """Weights for modules that are no target are refused: PEFT drops them silently."""
    tensors = lora_tensors(targets=("q_proj", "v_proj", "k_proj"))
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"target-stray"})


@pytest.mark.parametrize(("pattern", "right"), [("experts", True), (r"experts\.down_proj", False)])
def test_patterns_mean_a_parameter_by_its_whole_name(tmp_path: Path, pattern: str, *, right: bool) -> None:
    """Ranks of target_parameters are looked up as PEFT does it, by module and parameter."""
    module = "base_model.model.model.layers.0.mlp.experts"
    tensors = {f"{module}.lora_A.weight": ("F32", (8, 16), 0.5), f"{module}.lora_B.weight": ("F32", (16, 8), 0.5)}
    folder = builders.lora_adapter(
        tmp_path, tensors=tensors, targets=(), target_parameters=["mlp.experts.down_proj"], rank_pattern={pattern: 3}
    )
    assert look(folder)[1] == (set() if right else {"rank-mismatch"})


@pytest.mark.parametrize("tying", [True, False])
def test_the_other_end_of_a_tied_pair_is_no_stray(tmp_path: Path, *, tying: bool) -> None:
    """With ensure_weight_tying PEFT adapts and saves both ends where one is a target; without, it drops the other."""
    tensors = lora_tensors(targets=("q_proj",)) | {
        "base_model.model.model.embed_tokens.lora_embedding_A": ("F32", (4, 32), 0.5),
        "base_model.model.model.embed_tokens.lora_embedding_B": ("F32", (16, 4), 0.5),
        "base_model.model.lm_head.lora_A.weight": ("F32", (4, 16), 0.5),
        "base_model.model.lm_head.lora_B.weight": ("F32", (32, 4), 0.5),
    }
    found, codes = look(
        builders.lora_adapter(tmp_path, tensors=tensors, targets=("q_proj", "embed_tokens"), ensure_weight_tying=tying)
    )
    assert (found.outcome, codes) == (("accept", set()) if tying else ("refuse", {"target-stray"}))


def test_target_without_weights(tmp_path: Path) -> None:
    """A target for which nothing was saved warns."""
    tensors = lora_tensors(targets=("q_proj",))
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("warn", {"target-without-weights"})


@pytest.mark.parametrize("pattern", [r".*\.(q_proj|v_proj)", "all-linear", r".*layers\.\d+\.self_attn\.(q|v)_proj"])
def test_targets_as_a_pattern(tmp_path: Path, pattern: str) -> None:
    """Targets given as one text are taken as text, never letter by letter."""
    folder = builders.lora_adapter(tmp_path)
    builders.write_json(folder / "adapter_config.json", builders.lora_config(targets=pattern))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["target_pattern"] == pattern
    assert found.facts["adapted_modules"] == 4
    assert "targets" not in found.facts


@pytest.mark.parametrize("targets", ["(.*)*(.*)*(.*)*x", "(a|a|a){25}b", "(.*a){12}q"])
def test_a_pattern_made_to_explode_is_answered(tmp_path: Path, targets: str) -> None:
    """A pattern that a backtracking matcher never ends with is answered like any other: it covers no module here."""
    folder = builders.lora_adapter(tmp_path)
    builders.write_json(folder / "adapter_config.json", builders.lora_config(targets=targets))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"target-stray"})


def test_whole_modules_ride_along(tmp_path: Path) -> None:
    """Modules saved whole are told with their parameters and are no frozen base."""
    tensors = lora_tensors() | {"base_model.model.lm_head.weight": ("F32", (32, 16), 0.5)}
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors, modules_to_save=["lm_head"]))
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["full_modules"] == {"lm_head": 512}


def test_whole_module_that_was_not_saved(tmp_path: Path) -> None:
    """A module that was to be saved whole and is not there is refused; a head PEFT lists by itself is a note."""
    found, codes = look(builders.lora_adapter(tmp_path / "a", modules_to_save=["lm_head"]))
    assert (found.outcome, codes) == ("refuse", {"saved-module-missing"})
    tensors = lora_tensors() | {"base_model.model.score.weight": ("F32", (3, 16), 0.5)}
    found, codes = look(builders.lora_adapter(tmp_path / "b", tensors=tensors, modules_to_save=["classifier", "score"]))
    assert (found.outcome, codes) == ("accept", set())


def test_frozen_base_inside(tmp_path: Path) -> None:
    """An adapter that holds the whole base warns and counts both."""
    base = {f"base_model.model.{name}": spec for name, spec in builders.llama_tensors().items()}
    found, codes = look(builders.lora_adapter(tmp_path, tensors={**lora_tensors(), **base}))
    assert (found.outcome, codes) == ("warn", {"base-inside-adapter"})
    assert (found.facts["lora_tensors"], found.facts["base_tensors"]) == (8, 21)


def test_trained_token_rows(tmp_path: Path) -> None:
    """Single trained token rows are counted and are no fault."""
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    tensors = lora_tensors() | {name: ("F32", (3, 16), 0.1)}
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors, trainable_token_indices=[1, 2, 5]))
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["trained_token_rows"] == 3


def test_new_rows_in_a_side_file(tmp_path: Path) -> None:
    """New embedding rows in a file of their own warn, travel along and count as no tensors of the adapter."""
    folder = builders.lora_adapter(tmp_path)
    builders.write_safetensors(folder / "new_embeddings.safetensors", {"input_embeddings": ("F32", (5, 16), 0.1)})
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"side-file"})
    assert found.facts["side_files"] == ["new_embeddings.safetensors"]
    assert found.facts["extra_rows"] == 5
    assert found.facts["tensor_count"] == 8
    assert "new_embeddings.safetensors" in found.facts["inference_files"]


def test_dora(tmp_path: Path) -> None:
    """DoRA needs its magnitudes, and magnitudes need the config to say DoRA."""
    magnitudes: dict[str, TensorSpec] = {
        n.replace("lora_B.weight", "lora_magnitude_vector"): ("F32", (s[0],), 1.0)
        for n, (_, s, _) in lora_tensors().items()
        if "lora_B" in n
    }
    whole = {**lora_tensors(), **magnitudes}
    found, codes = look(builders.lora_adapter(tmp_path / "a", tensors=whole, use_dora=True))
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["magnitude_tensors"] == 4
    found, codes = look(builders.lora_adapter(tmp_path / "b", use_dora=True))
    assert (found.outcome, codes) == ("refuse", {"dora-mismatch"})
    found, codes = look(builders.lora_adapter(tmp_path / "c", tensors=whole))
    assert (found.outcome, codes) == ("refuse", {"dora-mismatch"})


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize(("value", "fact"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "inf")])
def test_nan_and_infinities(tmp_path: Path, dtype: str, value: float, fact: str) -> None:
    """NaN and infinities are counted per tensor and refused, in every float dtype."""
    tensors = lora_tensors(dtype=dtype)
    values = [0.5] * 64
    values[7] = values[60] = value
    tensors[FIRST_B] = (dtype, (16, 4), values)
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("refuse", {"values-nan"})
    assert found.facts[fact] == {FIRST_B: 2}


def test_largest_finite_values_are_no_infinities(tmp_path: Path) -> None:
    """The greatest finite numbers pass."""
    tensors = lora_tensors()
    tensors[FIRST_B] = ("F32", (16, 4), struct.pack("<f", 3.4028234663852886e38) * 64)
    assert look(builders.lora_adapter(tmp_path, tensors=tensors))[0].outcome == "accept"


def test_untrained_adapter(tmp_path: Path) -> None:
    """All lora_B zero warns; one of several is a note."""
    zero = {n: (d, s, None if "lora_B" in n else data) for n, (d, s, data) in lora_tensors().items()}
    found, codes = look(builders.lora_adapter(tmp_path / "a", tensors=zero))
    assert (found.outcome, codes) == ("warn", {"lora-b-zero"})
    assert found.facts["nonzero_lora_b"] == 0
    some = lora_tensors() | {FIRST_B: ("F32", (16, 4), None)}
    found, codes = look(builders.lora_adapter(tmp_path / "b", tensors=some))
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["nonzero_lora_b"] == 3


@pytest.mark.parametrize("world", [2, 4, 8])
def test_only_the_first_rank_was_gathered(tmp_path: Path, world: int) -> None:
    """The same zero share at the end of every lora_B warns with the number of ranks it suggests."""
    tensors = lora_tensors()
    for name, (dtype, shape, data) in list(tensors.items()):
        if "lora_B" in name and isinstance(data, list):
            kept = shape[0] // world * shape[1]
            tensors[name] = (dtype, shape, [*data[:kept], *([0.0] * (len(data) - kept))])
    found, codes = look(builders.lora_adapter(tmp_path, tensors=tensors))
    assert (found.outcome, codes) == ("warn", {"lora-b-partly-zero"})
    assert found.facts["zero_row_share_lora_b"] == 1 - 1 / world
    assert found.facts["suspected_world_size"] == world


@pytest.mark.parametrize("base", [None, "", "  "])
def test_base_that_is_not_named(tmp_path: Path, base: str | None) -> None:
    """An adapter that names no base warns, and the width its matrices show is told."""
    found, codes = look(builders.lora_adapter(tmp_path, base=base, readme=None))
    assert (found.outcome, codes) == ("warn", {"base-unknown"})
    assert found.facts["base_model"] is None
    assert found.facts["hidden_size_from_shapes"] == 16


@pytest.mark.parametrize(
    "base", ["/data/models/Tiny", "./models/tiny", "../tiny", "C:\\models\\tiny", "~/models/tiny", "a/b/c"]
)
def test_base_that_is_a_path(tmp_path: Path, base: str) -> None:
    """A base named by a path warns."""
    found, codes = look(builders.lora_adapter(tmp_path, base=base, readme=None))
    assert found.outcome == "warn"
    assert "base-local-path" in codes
    assert found.facts["base_is_local_path"] is True
    assert found.facts["base_model"] == base


@pytest.mark.parametrize(
    "base", ["org/tiny-bnb-4bit", "org/Tiny-GPTQ", "org/Tiny-7B-AWQ", "unsloth/x-unsloth-bnb-4bit", "o/t-8bit"]
)
def test_base_that_is_quantized(tmp_path: Path, base: str) -> None:
    """A base whose name says that it is quantized warns and a 16-bit name is proposed."""
    found, codes = look(builders.lora_adapter(tmp_path, base=base, readme=None))
    assert (found.outcome, codes) == ("warn", {"base-quantized"})
    assert found.facts["base_quantized"] is True


@pytest.mark.parametrize("base", ["org/tiny-base", "gpt2", "org/Quantum-7b", "org/bits-and-pieces"])
def test_base_that_is_not_quantized(tmp_path: Path, base: str) -> None:
    """Ordinary names are not taken for quantized ones."""
    assert look(builders.lora_adapter(tmp_path, base=base, readme=None))[0].outcome == "accept"


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_start_that_changed_the_base(tmp_path: Path, init: str) -> None:
    """A start method that changes the base warns."""
    found, codes = look(builders.lora_adapter(tmp_path, init_lora_weights=init))
    assert (found.outcome, codes) == ("warn", {"base-mutated-at-start"})
    assert found.facts["base_mutated_at_init"] is True


def test_fields_of_other_versions(tmp_path: Path) -> None:
    """Unknown fields warn, dropped ones are a note; both are listed."""
    found, codes = look(builders.lora_adapter(tmp_path / "a", from_the_future=1, use_magic=True))
    assert (found.outcome, codes) == ("warn", {"adapter-fields-unknown"})
    assert found.facts["unknown_fields"] == ["from_the_future", "use_magic"]
    found, codes = look(builders.lora_adapter(tmp_path / "b", enable_lora=None, merge_weights=False))
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["legacy_fields"] == ["enable_lora", "merge_weights"]


def test_other_peft_types(tmp_path: Path) -> None:
    """Other types are accepted by name without asking for LoRA matrices; prompts cannot be merged."""
    loha: dict[str, TensorSpec] = {
        f"base_model.model.model.layers.0.self_attn.q_proj.hada_w{i}_{p}": ("F32", (2, 2), 0.5)
        for i in (1, 2)
        for p in "ab"
    }
    builders.write_safetensors(tmp_path / "a" / "adapter_model.safetensors", loha)
    config = {"peft_type": "LOHA", "r": 2, "alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "o/b"}
    builders.write_json(tmp_path / "a" / "adapter_config.json", config)
    found, codes = look(tmp_path / "a")
    assert (found.outcome, found.artifact, codes) == ("accept", "peft-other", set())
    assert (found.facts["rank"], found.facts["alpha"]) == (2, 4)
    builders.write_safetensors(
        tmp_path / "b" / "adapter_model.safetensors", {"prompt_embeddings": ("F32", (4, 16), 0.1)}
    )
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4, "base_model_name_or_path": "o/b"}
    builders.write_json(tmp_path / "b" / "adapter_config.json", config)
    found, codes = look(tmp_path / "b")
    assert (found.outcome, found.artifact, codes) == ("accept", "peft-other", set())
    assert found.facts["mergeable"] is False
    assert found.facts["rank"] is None


def test_mlx_config_under_the_same_name(tmp_path: Path) -> None:
    """MLX-LM's adapter_config.json is another dialect, not a broken PEFT adapter."""
    config = {"fine_tune_type": "lora", "model": "o/b", "lora_parameters": {"rank": 4, "scale": 20.0}}
    builders.write_json(tmp_path / "adapter_config.json", config)
    builders.write_safetensors(tmp_path / "adapters.safetensors", {"model.x.lora_a": ("F32", (16, 4), 0.1)})
    found, _ = look(tmp_path)
    assert found.artifact == "mlx-lora"
    assert (found.facts["rank"], found.facts["base_model"]) == (4, "o/b")
    assert "adapter-type-missing" not in {f.code for f in found.findings}


def test_config_that_is_no_json(tmp_path: Path) -> None:
    """A damaged config is refused by name."""
    folder = builders.lora_adapter(tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"')
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"json-damaged"})
    assert found.facts["file"] == "adapter_config.json"


@pytest.mark.parametrize("value", [None, "8", [], {}, True, float("nan")])
def test_config_of_odd_values_never_breaks(tmp_path: Path, value: Any) -> None:
    """Whatever a config's fields hold, the answer is an answer."""
    folder = builders.lora_adapter(tmp_path)
    config = builders.lora_config()
    for key in config:
        changed = {**config, key: value}
        (folder / "adapter_config.json").write_text(json.dumps(changed))
        assert inspect(folder).outcome in {"accept", "warn", "refuse"}


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "IA3", "OFT", "VERA", "loha"])
def test_weights_of_another_type_are_no_adapter(tmp_path: Path, kind: str) -> None:
    """A config of another type beside LoRA's tensors loads none of them, so nothing is published as an adapter."""
    folder = builders.lora_adapter(tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": kind}))
    (artifact,) = inspect(folder).artifacts
    (found,) = [f for f in artifact.findings if f.severity == "block"]
    assert found.code == "adapter-empty"
    assert "LORA" in found.message
