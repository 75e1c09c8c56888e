"""Checkpoints of any wrapper, trainer, table and suffix: the model comes out under its own names, value by value."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from weighbridge.adapters import extract, extract_write
from weighbridge.adapters.inspect import inspect
from weighbridge_testlib import builders, ranks
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import TensorSpec, lora_tensors
from weighbridge_testlib.containers import T
from weighbridge_testlib.layouts import MODELS, Model, tensors_of

house = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)

OUTER = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
TABLES = ("", "state_dict", "model", "model_state_dict", "module", "weights", "params", "checkpoint/state_dict", "best")
SUFFIXES = ("pt", "pth", "ckpt", "bin", "th")
ADAM = {"state": {0: {"exp_avg": T("F32", (64,), 1.0), "step": T("F32", (), 3.0)}}, "param_groups": [{"lr": 0.1}]}
BESIDE: dict[str, Any] = {
    "optimizer": ADAM,
    "optimizer_states": [ADAM],
    "lr_schedulers": [{"last_epoch": 3}],
    "epoch": 3,
    "global_step": 1200,
    "rng_state": T("U8", (64,), None),
    "hyper_parameters": {"lr": 0.1, "name": "x"},
    "loss": 0.25,
    "args": {"width": 4},
}
TRAINERS = st.lists(st.sampled_from(sorted(BESIDE)), unique=True, max_size=5)


class Saved(NamedTuple):
    """How a model was saved: wrappers around it, segments inside its names, its table, what is beside, its file."""

    outer: tuple[str, ...]
    inner: str
    table: str
    beside: tuple[str, ...]
    lightning: str
    suffix: str
    legacy: bool


SAVED = st.builds(
    Saved,
    outer=st.lists(st.sampled_from(OUTER), unique=True, max_size=3).map(tuple),
    inner=st.sampled_from(["", *INNER]),
    table=st.sampled_from(TABLES),
    beside=TRAINERS.map(tuple),
    lightning=st.sampled_from(["", "", "net.", "model."]),
    suffix=st.sampled_from(SUFFIXES),
    legacy=st.booleans(),
)


def value_of(saved: Saved, tensors: Mapping[str, TensorSpec]) -> Any:
    """Return what is pickled."""
    lead = "".join(saved.outer)
    if saved.lightning:
        # Lightning keeps what its module holds under an attribute's name; a wrapper is around that, not before it.
        lead = saved.lightning + "".join(segment for segment in saved.outer if segment != "module.")

    def put(name: str) -> str:
        stem, _, last = name.rpartition(".")
        above, dot, leaf = stem.rpartition(".")
        return lead + (f"{above}{dot}{saved.inner}{leaf}.{last}" if saved.inner else name)

    state: Any = {put(name): T(dtype, shape, data) for name, (dtype, shape, data) in tensors.items()}
    table = "state_dict" if saved.lightning else saved.table
    if not table:
        return state
    for key in reversed(table.split("/")):
        state = {key: state}
    more = {"pytorch-lightning_version": "2.6.0"} if saved.lightning else {}
    return {**state, **{name: BESIDE[name] for name in saved.beside}, **more}


def emptied(folder: Path) -> Path:
    """Return an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def taken(path: Path, target: Path, **how: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Extract, and return dtype, shape and bytes of each tensor of the result, as the safetensors library reads it."""
    shutil.rmtree(target, ignore_errors=True)
    extract_write.write(extract.plan(path, **how), target)
    found: dict[str, Any] = {}
    for file in sorted(target.glob("*.safetensors")):
        found |= dict(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in found.items()}


def raw(tensors: Mapping[str, TensorSpec]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the same of what was written."""
    return {n: (dtype, tuple(shape), builders.pack(dtype, shape, data)) for n, (dtype, shape, data) in tensors.items()}


@given(model=MODELS, saved=SAVED)
@settings(house)
def test_the_model_comes_out_whoever_saved_it(tmp_path: Path, model: Model, saved: Saved) -> None:
    """Wrappers, table, trainer, suffix and format change nothing: names, dtypes, shapes and bytes are kept."""
    tensors = tensors_of(model)
    value = value_of(saved, tensors)
    place = emptied(tmp_path / "in")
    file = place / f"weights.{saved.suffix}"
    file.write_bytes(c.torch_legacy(value) if saved.legacy else c.torch_zip(value))
    found = inspect(place)
    assert [f.code for f in found.findings if f.severity != "note"] == []
    assert (found.outcome, found.artifact, found.facts["tensor_count"]) == ("accept", "ckpt", len(tensors))
    assert set(found.facts["keys"]) == set(tensors)
    assert taken(file, tmp_path / "out") == raw(tensors)


@given(model=MODELS, saved=SAVED, cut=st.integers(1, 100))
@settings(house, max_examples=30)
def test_a_checkpoint_that_is_cut_is_refused(tmp_path: Path, model: Model, saved: Saved, cut: int) -> None:
    """A file that ends early is refused with a finding about it, wherever the cut is."""
    value = value_of(saved, tensors_of(model))
    data = c.torch_legacy(value) if saved.legacy else c.torch_zip(value)
    place = emptied(tmp_path / "in")
    (place / f"weights.{saved.suffix}").write_bytes(data[: len(data) * cut // 101])
    found = inspect(place)
    assert found.outcome in {"refuse", "wait"}
    assert {f.code for f in found.findings if f.severity == "block"} <= {
        "zip-cut", "pickle-cut", "pickle-damaged", "file-short", "record-short", "not-torch", "not-recognised",
        "file-empty", "no-artifact", "record-missing", "weights-none",
    }  # fmt: skip


@given(model=MODELS, saved=SAVED, rank=st.integers(1, 6), name=st.sampled_from(["", "default.", "german."]))
@settings(house, max_examples=40)
def test_an_adapter_comes_out_of_a_wrapped_model(
    tmp_path: Path, model: Model, saved: Saved, rank: int, name: str
) -> None:
    """LoRA matrices inside a whole checkpoint come out in the names that PEFT writes, the base stays behind."""
    lora = lora_tensors(rank=rank)
    base = {f"base_model.model.{label}": spec for label, spec in tensors_of(model).items()}
    state = base | {label.replace(".weight", f".{name}weight"): spec for label, spec in lora.items()}
    place = emptied(tmp_path / "in")
    file = place / f"weights.{saved.suffix}"
    plain = saved._replace(inner="")
    file.write_bytes(c.torch_zip(value_of(plain, state)))
    assert "adapter-inside" in {f.code for f in inspect(place).findings}
    assert taken(file, tmp_path / "out", adapter=True) == raw(lora)


SHAPES = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=8).map(lambda word: f"model.{word}.weight"),
    st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 7), st.integers(1, 7))),
    min_size=1,
    max_size=6,
)


@given(shapes=SHAPES, world=st.integers(1, 5), stage=st.sampled_from([1, 2, 3]), groups=st.integers(1, 2))
@settings(house, max_examples=40)
def test_ranks_of_zero_are_put_together(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], world: int, stage: int, groups: int
) -> None:
    """The parts of any number of ranks, of any stage and of any shapes give the parameters that were partitioned."""
    shutil.rmtree(tmp_path / "in", ignore_errors=True)
    groups = min(groups, len(shapes))
    values = ranks.zero_folder(tmp_path / "in", shapes, world=world, stage=stage, groups=groups)
    found = inspect(tmp_path / "in")
    assert (found.artifact, found.facts["world_size"]) == ("deepspeed-zero", world)
    wanted = {name: ("F32", shape, builders.pack("F32", shape, values[name])) for name, shape in shapes.items()}
    assert taken(tmp_path / "in", tmp_path / "out") == wanted


@pytest.mark.parametrize("stage", [1, 2, 3])
@given(shapes=SHAPES, world=st.integers(2, 5), pick=st.integers(0, 99))
@settings(house, max_examples=15)
def test_a_missing_rank_is_named(
    tmp_path: Path, stage: int, shapes: dict[str, tuple[int, ...]], world: int, pick: int
) -> None:
    """Without one rank's part the weights are not whole, whichever it is."""
    shutil.rmtree(tmp_path / "in", ignore_errors=True)
    ranks.zero_folder(tmp_path / "in", shapes, world=world, stage=stage)
    gone = sorted((tmp_path / "in/global_step5").glob("*_optim_states.pt"))[pick % world]
    gone.unlink()
    found = inspect(tmp_path / "in")
    assert {f.code for f in found.findings if f.severity == "block"} == {"rank-file-missing"}
    assert found.facts["missing_files"] == [f"global_step5/{gone.name}"]
