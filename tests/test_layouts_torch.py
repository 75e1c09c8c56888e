"""Torch files outside of model folders: what comes out of them, whatever the trainer, the wrapper and the name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters import structure
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import llama_tensors, lora_tensors, write_json
from weighbridge_testlib.containers import T, call, name

MODEL = {label: T("F32", shape, data) for label, (_, shape, data) in llama_tensors(dtype="F32").items()}
ADAM = {"state": {0: {"exp_avg": T("F32", (2,), 0.0)}}, "param_groups": [{"lr": 0.1}]}


def look(folder: Path, label: str, value: Any, *, legacy: bool = False) -> tuple[Inspection, set[str]]:
    """Write one torch file and return the answer with its codes without notes."""
    folder.mkdir(exist_ok=True)
    (folder / label).write_bytes(c.torch_legacy(value) if legacy else c.torch_zip(value))
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def wrapped(prefix: str, inner: str = "") -> dict[str, T]:
    """Return the model's tensors under wrapped names."""
    table = {}
    for label, tensor in MODEL.items():
        head, dot, rest = label.partition(".layers.")
        table[prefix + (f"{head}.layers.{inner}{rest}" if dot else label)] = tensor
    return table


LIGHTNING = {
    "pytorch-lightning_version": "2.5.0",
    "epoch": 3,
    "global_step": 70,
    "optimizer_states": [ADAM],
    "loops": {},
}
SHAPES: dict[str, tuple[Any, str, str | None]] = {
    "state dict": (MODEL, "", None),
    "ddp": (wrapped("module."), "module.", None),
    "compile": (wrapped("_orig_mod."), "_orig_mod.", None),
    "ddp of compile": (wrapped("module._orig_mod."), "module._orig_mod.", None),
    "fsdp": (wrapped("_fsdp_wrapped_module."), "_fsdp_wrapped_module.", None),
    "lightning": ({**LIGHTNING, "state_dict": wrapped("net.")}, "net.", "state_dict"),
    "lightning and compile": (
        {**LIGHTNING, "state_dict": wrapped("model._orig_mod.")}, "model._orig_mod.", "state_dict",
    ),
    "loop": ({"model_state_dict": MODEL, "optimizer_state_dict": ADAM, "epoch": 3}, "", "model_state_dict"),
    "loop under model": ({"model": wrapped("module."), "optimizer": ADAM, "step": 70}, "module.", "model"),
    "deepspeed engine": ({"module": MODEL, "optimizer": None, "global_steps": 70}, "", "module"),
}  # fmt: skip


@pytest.mark.parametrize("file", ["model.pt", "epoch=1-step=70.ckpt", "best.pth", "weights_070.bin", "last.th"])
@pytest.mark.parametrize("label", SHAPES)
def test_the_same_model_comes_out(tmp_path: Path, label: str, file: str) -> None:
    """Whoever saved it, 21 tensors come out under the model's own names, and the way there is told."""
    value, prefix, key = SHAPES[label]
    found, codes = look(tmp_path, file, value)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "ckpt", "model", set())
    facts = found.facts
    assert (facts["tensor_count"], facts["param_count"], facts["payload_bytes"]) == (21, 5712, 22848)
    assert (facts["stripped_prefix"], facts["weights_key"]) == (prefix, key)
    assert set(facts["keys"]) == set(MODEL)
    assert facts["pickle_format"] is True
    assert facts["publishable"] is True


@pytest.mark.parametrize("inner", ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."])
def test_wrappers_inside_names(tmp_path: Path, inner: str) -> None:
    """Segments that only wrappers write are taken out of the middle of a name as well."""
    found, _ = look(tmp_path, "m.pt", wrapped("", inner))
    assert found.outcome == "accept"
    assert found.facts["tensor_count"] == 21
    assert found.facts["stripped_inner"] == [inner]


def test_the_old_format_is_read_too(tmp_path: Path) -> None:
    """A file from before torch 1.6 gives the same tensors and its container's name."""
    found, _ = look(tmp_path, "model.pth", {"model": MODEL, "iteration": 9}, legacy=True)
    assert (found.outcome, found.facts["container"], found.facts["tensor_count"]) == ("accept", "torch-legacy", 21)
    assert found.facts["step"] == 9


def test_two_sets_warn_and_say_which_was_taken(tmp_path: Path) -> None:
    """Raw weights go before an average, and both are named."""
    found, codes = look(tmp_path, "last.ckpt", {"state_dict": MODEL, "ema_state_dict": MODEL, "optimizer": ADAM})
    assert (found.outcome, codes) == ("warn", {"weight-sets"})
    assert found.facts["weight_sets"] == ["state_dict", "ema_state_dict"]
    assert found.facts["weights_key"] == "state_dict"


def test_ambiguous_tables_are_not_guessed(tmp_path: Path) -> None:
    """Two networks of one size in one file are named, and none is taken."""
    found, codes = look(tmp_path, "gan.pt", {"generator": MODEL, "discriminator": MODEL})
    assert (found.outcome, found.kind, codes) == ("refuse", None, {"weights-ambiguous"})
    assert found.facts["weight_sets"] == ["generator", "discriminator"]


def test_optimizer_state_alone(tmp_path: Path) -> None:
    """A file of training state is called what it is."""
    found, codes = look(tmp_path, "state.pt", ADAM)
    assert (found.outcome, found.artifact, codes) == ("refuse", "optimizer-only", {"weights-none"})


def test_names_that_collide(tmp_path: Path) -> None:
    """Two keys that would get one name refuse, and the name is told."""
    value = {"encoder.weight": T("F32", (2, 2), 1.0), "encoder._orig_mod.weight": T("F32", (2, 2), 2.0)}
    found, codes = look(tmp_path, "model.pt", value)
    assert (found.outcome, codes) == ("refuse", {"names-collide"})
    assert found.facts["collisions"] == ["encoder.weight"]


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    """A complex128 weight refuses; the same in the optimizer is nobody's business."""
    odd = {**MODEL, "phase": T("C128", (2,), None)}
    found, codes = look(tmp_path / "a", "model.pt", odd)
    assert (found.outcome, codes) == ("refuse", {"tensor-unstorable"})
    assert found.facts["unsupported"] == {"phase": "complex128"}
    assert found.facts["dtype_histogram"]["C128"] == {"tensors": 1, "params": 2}
    state = {"state": {0: {"exp_avg": T("C128", (2,), None)}}, "param_groups": []}
    found, codes = look(tmp_path / "b", "model.pt", {"model": MODEL, "optimizer": state})
    assert (found.outcome, codes) == ("accept", set())


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN in a torch file is found as in any other, in views too."""
    storage = T("F32", (2, 3), [1, 2, 3, 4, float("nan"), 6], (1, 2), 0, "s")
    found, codes = look(tmp_path, "m.pt", {**MODEL, "turned": storage})
    assert (found.outcome, codes) == ("refuse", {"values-nan"})
    assert found.facts["nan"] == {"turned": 1}


def test_code_is_refused_and_named(tmp_path: Path) -> None:
    """A payload beside sound weights refuses with the global's name, and the tensors are still listed."""
    value = {"state_dict": MODEL, "x": call(name("posix", "system"), "true")}
    found, codes = look(tmp_path, "m.ckpt", value)
    assert (found.outcome, codes) == ("refuse", {"runs-code"})
    assert found.facts["foreign_globals"] == ["posix.system"]
    assert found.facts["tensor_count"] == 21


def test_several_checkpoints_of_one_folder(tmp_path: Path) -> None:
    """Each file is an artifact of its own, the newest first, and equal ones are told."""
    for step in (200, 1000):
        (tmp_path / f"step={step}.ckpt").write_bytes(c.torch_zip({"state_dict": MODEL, "global_step": step}))
    (tmp_path / "last.ckpt").write_bytes((tmp_path / "step=1000.ckpt").read_bytes())
    found = inspect(tmp_path)
    assert (found.outcome, found.artifact) == ("accept", "run-folder")
    assert sorted(found.facts["artifacts"]) == ["last.ckpt", "step=1000.ckpt", "step=200.ckpt"]
    assert found.artifacts[0].step == 1000
    assert sorted(found.facts["same_bytes"]) == ["last.ckpt", "step=1000.ckpt"]
    assert [f.path for f in found.artifacts[-1].files if f.publish] == ["step=200.ckpt"]


def test_adapter_weights_without_a_config(tmp_path: Path) -> None:
    """LoRA matrices alone are no model: what is missing is their config, and their rank is told."""
    tensors = {
        label.replace(".weight", ".default.weight"): T("F32", shape, data)
        for label, (_, shape, data) in lora_tensors(rank=6).items()
    }
    (tmp_path / "checkpoint-3").mkdir()
    write_json(tmp_path / "checkpoint-3/trainer_state.json", {"global_step": 3, "max_steps": 3, "log_history": []})
    found, codes = look(tmp_path / "checkpoint-3", "pytorch_model_fsdp.bin", tensors)
    assert (found.outcome, found.artifact, codes) == ("refuse", "trainer-checkpoint", {"config-missing"})
    assert found.facts["rank_from_shapes"] == 6
    assert found.facts["missing_files"] == ["adapter_config.json"]


def test_adapter_beside_its_base(tmp_path: Path) -> None:
    """A checkpoint of a wrapped model says how many tensors are the adapter's."""
    lora = {label: T("F32", shape, data) for label, (_, shape, data) in lora_tensors().items()}
    base = {f"base_model.model.{label}": tensor for label, tensor in MODEL.items()}
    found, codes = look(tmp_path, "model.pt", {**lora, **base})
    assert (found.outcome, codes) == ("warn", {"adapter-inside"})
    assert (found.facts["lora_tensors"], found.facts["base_tensors"]) == (8, 21)


@pytest.mark.parametrize("token", ["<cat>", "<birb-style>", "*"])
def test_textual_inversion(tmp_path: Path, token: str) -> None:
    """The vector of a new word is no model and no checkpoint without a model."""
    found, codes = look(tmp_path, "learned_embeds.bin", {token: T("F32", (768,), 1.0)})
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "textual-inversion", "adapter", set())
    assert (found.facts["tokens"], found.facts["dimensions"]) == ([token], [768])


def test_somebodys_data_beside_a_run(tmp_path: Path) -> None:
    """A pickle without tensors is not taken for weights."""
    (tmp_path / "vocab.pkl").write_bytes(c.pickled({"a": 1}))
    assert inspect(tmp_path).findings[0].code == "no-artifact"
    (tmp_path / "model.pt").write_bytes(c.torch_zip(MODEL))
    found = inspect(tmp_path)
    assert (found.outcome, len(found.artifacts)) == ("accept", 1)


MIXTURES = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(["", "module.", "_orig_mod.", "module._orig_mod.", "_forward_module."]),
        "key": st.sampled_from([None, "state_dict", "model", "model_state_dict", "net", "weights"]),
        "dtype": st.sampled_from(["F32", "BF16", "F16", "F64"]),
        "tied": st.booleans(),
        "legacy": st.booleans(),
        "layers": st.integers(1, 3),
    }
)


@given(mixture=MIXTURES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture(tmp_path: Path, mixture: dict[str, Any]) -> None:
    """Names, wrappers, dtypes, ties and formats in any combination give the counts that were put in."""
    dtype, tied, layers, key = (mixture[each] for each in ("dtype", "tied", "layers", "key"))
    shared = {
        "shared.weight": T(dtype, (8, 4), 0.5, None, 0, "e"),
        "lm_head.weight": T(dtype, (8, 4), None, None, 0, "e"),
    }
    own = {f"layers.{i}.proj.weight": T(dtype, (4, 4), 0.25) for i in range(layers)}
    table = {mixture["prefix"] + label: tensor for label, tensor in {**(shared if tied else {}), **own}.items()}
    value = table if key is None else {key: table, "optimizer": ADAM}
    for old in tmp_path.iterdir():
        old.unlink()
    found, codes = look(tmp_path, "x.pt", value, legacy=mixture["legacy"])
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["tensor_count"] == layers + tied
    assert found.facts["names_in"] == layers + 2 * tied
    assert found.facts["aliases"] == ({"lm_head.weight": "shared.weight"} if tied else {})
    assert found.facts["dtype_histogram"] == {dtype: {"tensors": layers + tied, "params": 16 * layers + 32 * tied}}


def test_a_torch_file_that_is_still_written(tmp_path: Path) -> None:
    """Without its directory at the end a zip file cannot be whole: the daemon waits."""
    body = c.torch_zip(MODEL)
    (tmp_path / "last.ckpt").write_bytes(body[:-200])
    assert structure.complete(tmp_path) is not None
    (tmp_path / "last.ckpt").write_bytes(body)
    assert structure.complete(tmp_path) is None
