"""Which table of a checkpoint is the model, and what of its names belongs to wrappers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.prefixes import strip
from weighbridge.adapters.formats.select import Selection, select
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import llama_tensors
from weighbridge_testlib.containers import T, call, name

MODEL = {label: T("F32", shape, 0.5) for label, (_, shape, _) in llama_tensors().items()}
SMALL = {"weight": T("F32", (2, 2), 1.0), "bias": T("F32", (2,), 1.0)}
ADAM = {
    "state": {0: {"step": T("F32", (), 1.0), "exp_avg": T("F32", (2, 2), 0.0), "exp_avg_sq": T("F32", (2, 2), 0.0)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}


def chosen(tmp_path: Path, value: Any, key: str | None = None) -> Selection:
    """Write a checkpoint and select its weights."""
    path = tmp_path / "x.ckpt"
    path.write_bytes(c.torch_zip(value))
    return select(torch_zip.read(path), key=key)


def wrapped(prefix: str, tensors: dict[str, T] = MODEL) -> dict[str, T]:
    """Put a prefix before every name."""
    return {prefix + label: tensor for label, tensor in tensors.items()}


LAYOUTS: dict[str, tuple[Any, str, str | None, int]] = {
    "state dict alone": (MODEL, "flat", None, 21),
    "one tensor": (T("F32", (3,), 1.0), "tensor", None, 1),
    "embedding": ({"<cat>": T("F32", (768,), 1.0)}, "flat", None, 1),
    "model and optimizer": ({"model": MODEL, "optimizer": ADAM, "epoch": 3}, "one-table", "model", 21),
    "state_dict with rng": (
        {"state_dict": MODEL, "rng_state": T("U8", (16,), None), "iteration": 4}, "one-table", "state_dict", 21,
    ),
    "names nobody knows": ({"best": MODEL, "optim_g": ADAM, "step": 1}, "one-table", "best", 21),
    "table in a table": ({"checkpoint": {"state_dict": MODEL, "epoch": 1}}, "one-table", "checkpoint/state_dict", 21),
    "lightning": (
        {"pytorch-lightning_version": "2.6", "state_dict": wrapped("net."), "optimizer_states": [ADAM], "loops": {}},
        "lightning", "state_dict", 21,
    ),
    "deepspeed": ({"module": MODEL, "optimizer": None, "ds_version": "0.18"}, "one-table", "module", 21),
    "megatron": (
        {"model": {"language_model": {"embedding": SMALL, "encoder": SMALL}}, "iteration": 3}, "one-table", "model", 4,
    ),
    "raw and average": ({"state_dict": MODEL, "ema_state_dict": MODEL}, "raw-before-average", "state_dict", 21),
    "params and params_ema": ({"params_ema": SMALL, "params": SMALL}, "raw-before-average", "params", 2),
    "student and teacher": ({"student": MODEL, "teacher": MODEL}, "raw-before-average", "student", 21),
    "average alone": ({"model_ema": SMALL, "epoch": 1}, "one-table", "model_ema", 2),
    "known name beside a small one": ({"model": MODEL, "scale": {"mean": SMALL["bias"]}}, "known-name", "model", 21),
    "loose tensors beside a model": ({"state_dict": MODEL, "mean": SMALL["bias"]}, "one-table", "state_dict", 21),
}  # fmt: skip


@pytest.mark.parametrize("label", LAYOUTS)
def test_the_weights_are_found_by_content(tmp_path: Path, label: str) -> None:
    """Every layout people write gives its weights, and says by which rule."""
    value, rule, key, count = LAYOUTS[label]
    found = chosen(tmp_path, value)
    assert (found.rule, found.weights_key, len(found.weights)) == (rule, key, count)
    assert found.problem is None


@pytest.mark.parametrize(
    "value",
    [
        {"encoder": SMALL, "decoder": SMALL},
        {"generator": MODEL, "discriminator": MODEL},
        {"model": MODEL, "net": MODEL},
        {"state_dict": MODEL, "best_state_dict": MODEL},
    ],
)
def test_two_models_are_refused(tmp_path: Path, value: dict[str, Any]) -> None:
    """Where two tables could be the model, nothing is chosen; a person can name one."""
    found = chosen(tmp_path, value)
    assert found.rule == "ambiguous"
    assert found.tensors == ()
    assert found.problem is not None
    assert set(found.weight_sets) == set(value)
    named = chosen(tmp_path, value, key=min(value))
    assert named.rule == "named-by-caller"
    assert len(named.weights) == len(value[min(value)])
    assert chosen(tmp_path, value, key="nowhere").problem is not None


def test_training_state_alone_is_said(tmp_path: Path) -> None:
    """Optimizer, scheduler and generator files hold no weights, and say what they hold."""
    assert chosen(tmp_path, ADAM).rule == "optimizer-only"
    assert (
        chosen(tmp_path, {"optimizer_state_dict": {"fp32_flat_groups": [T("F32", (9,), 1.0)]}}).rule == "optimizer-only"
    )
    assert chosen(tmp_path, {"cpu": T("U8", (16,), None), "python": (1, 2)}).rule == "optimizer-only"
    assert chosen(tmp_path, {"last_epoch": 3, "base_lrs": [0.1]}).rule == "no-tensors"


def test_both_sets_of_weights_are_recorded(tmp_path: Path) -> None:
    """Raw and averaged weights: the raw ones are taken, both are named, the rest is dropped by name."""
    found = chosen(tmp_path, {"state_dict": MODEL, "ema_state_dict": MODEL, "optimizer": ADAM, "epoch": 2})
    assert found.weight_sets == ("state_dict", "ema_state_dict")
    assert found.dropped_top_keys == ("ema_state_dict", "optimizer", "epoch")


def test_tied_weights_have_one_owner(tmp_path: Path) -> None:
    """Names that share one whole tensor are stored once, under the embedding's name; views are no aliases."""
    tied = {
        "lm_head.weight": T("F32", (4, 2), 1.0, None, 0, "e"),
        "model.embed_tokens.weight": T("F32", (4, 2), None, None, 0, "e"),
        "model.rows": T("F32", (2, 2), None, None, 2, "e"),
        "model.turned": T("F32", (2, 4), None, (1, 2), 0, "e"),
    }
    found = chosen(tmp_path, {"model": tied})
    assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.names_in == 4
    assert [tensor.name for tensor in found.weights] == ["model.embed_tokens.weight", "model.rows", "model.turned"]


# ------------------------------------------------------------------------------------------------------------- prefixes

NAMES = tuple(MODEL)


@pytest.mark.parametrize(
    ("prefix", "lightning"),
    [
        ("module.", False),
        ("_orig_mod.", False),
        ("module._orig_mod.", False),
        ("_orig_mod.module.", False),
        ("_forward_module.", False),
        ("module.module.", False),
        ("model._orig_mod.", True),
        ("model._orig_mod.", False),
        ("net.", True),
        ("model.", True),
        ("_forward_module.model.", True),
    ],
)
def test_wrappers_come_off(prefix: str, lightning: bool) -> None:
    """Every wrapper's prefix comes off whole, and only it."""
    found = strip([prefix + label for label in NAMES], lightning=lightning)
    if prefix == "_forward_module.model.":
        assert found.prefix == "_forward_module."
        return
    assert found.prefix == prefix
    assert tuple(found.names.values()) == NAMES
    assert found.collisions == ()


def test_true_parts_of_a_name_stay() -> None:
    """`module`, `model` and `net` inside a name, or on all names of a plain file, are the model's own."""
    names = ["encoder.module.weight", "encoder.module.bias", "head.weight"]
    assert strip(names).prefix == ""
    assert tuple(strip(names).names.values()) == tuple(names)
    tied = [label for label in NAMES if label != "lm_head.weight"]
    assert strip(tied).prefix == ""
    assert strip(["net.weight", "net.bias"]).prefix == ""
    parts = ["encoder.weight", "decoder.weight"]
    assert tuple(strip(parts, lightning=True).names.values()) == tuple(parts)


def test_a_wrapper_inside_comes_out_and_collisions_are_named() -> None:
    """Segments that only wrappers write come out anywhere; two keys that would become one are named."""
    found = strip(["layers.0._fsdp_wrapped_module.w", "layers.1._checkpoint_wrapped_module._orig_mod.w"])
    assert tuple(found.names.values()) == ("layers.0.w", "layers.1.w")
    assert found.inner == ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
    clash = strip(["encoder._orig_mod.weight", "encoder.weight", "head.weight"])
    assert clash.collisions == ("encoder.weight",)


def test_losses_and_metrics_are_no_weights() -> None:
    """Entries of a criterion, a metric or an average ride along and are listed apart."""
    found = strip([f"model.{label}" for label in NAMES] + ["criterion.weight", "train_metric.total"], lightning=True)
    assert found.others == ("criterion.weight", "train_metric.total")
    assert found.prefix == "model."
    assert len(found.names) == 21
    assert strip(["loss.weight", "loss.bias"]).others == ()


@given(
    wrappers=st.lists(st.sampled_from(["module", "_orig_mod", "model", "net", "base"]), max_size=4),
    root=st.sampled_from(["", "model.", "module.", "transformer."]),
)
def test_a_base_teaches_the_prefix(wrappers: list[str], root: str) -> None:
    """With a base, exactly what stands before its names is taken, even where its own root is called model or module."""
    base = [f"{root}layers.{i}.weight" for i in range(3)] + [f"{root}norm.weight"]
    prefix = "".join(f"{word}." for word in wrappers)
    found = strip([prefix + label for label in base], base=base)
    assert found.prefix == prefix
    assert tuple(found.names.values()) == tuple(base)


def test_hostile_names_cost_little(tmp_path: Path) -> None:
    """Names made to slow a pattern down are passed over in no time."""
    value: dict[str, Any] = {"_" * 900 + str(i): {"w" + "_optimizer" * 80: SMALL["bias"]} for i in range(300)}
    value["x"] = {"y": call(name("collections", "OrderedDict"))}
    assert chosen(tmp_path, value).rule == "ambiguous"
