"""Extraction: every tensor equals what the tool's own loader gives, byte for byte, without that tool."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters import extract, extract_write, layers
from weighbridge.registry.errors import ConflictError, NotFoundError, RefusedError, UsageError
from weighbridge_testlib import builders, ranks
from weighbridge_testlib.builders import llama_tensors, lora_tensors

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def taken(
    path: Path, target: Path, *, shard_size: int = 1 << 40, dtype: str | None = None, keep: Any = (), **how: Any
) -> Any:
    """Extract, and return what the library loads of the result."""
    made = extract_write.with_dtype(extract.plan(path, **how), dtype, keep)
    extract_write.write(made, target, shard_size=shard_size)
    loaded: dict[str, Any] = {}
    for file in sorted(target.glob("*.safetensors")):
        loaded |= safetensors_torch.load_file(file)
    return loaded


def agree(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Assert that two tables hold the same tensors: names, dtypes, shapes and bytes."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        mine = ours[name]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
        plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert torch.equal(mine.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name


def model(dtype: Any = None, seed: int = 0) -> dict[str, Any]:
    """Return a model's tensors."""
    torch.manual_seed(seed)
    return {label: torch.randn(shape).to(dtype or torch.float32) for label, (_, shape, _) in llama_tensors().items()}


DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
          "float8_e4m3fn", "float8_e5m2"]  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True])
def test_every_dtype(tmp_path: Path, legacy: bool) -> None:
    """Whatever safetensors can hold comes out as torch loads it, from both formats of torch."""
    names = [d for d in DTYPES if not (legacy and d.startswith("float8"))]
    state = {name: (torch.randn(3, 5) * 4).to(getattr(torch, name)) for name in names}
    state["scalar"] = torch.tensor(2.5)
    state["none"] = torch.zeros(0, 4)
    torch.save(state, tmp_path / "all.pt", _use_new_zipfile_serialization=not legacy)
    agree(taken(tmp_path / "all.pt", tmp_path / "out"), state)


def test_views_take_only_their_own_elements(tmp_path: Path) -> None:
    """Transposed, sliced, stepped and expanded views come out as they look; a small one of much memory stays small."""
    base = torch.arange(240, dtype=torch.float32).reshape(4, 6, 10)
    large = torch.randn(1 << 20)
    state = {
        "turned": base.permute(2, 0, 1), "column": base[:, :, 3], "stepped": base.reshape(-1)[5:200:7],
        "row": base[2, 1], "expanded": torch.randn(3, 1).expand(3, 7), "transposed": torch.randn(5, 9).t(),
        "half": torch.randn(6, 6).to(torch.bfloat16).t()[1:4], "small": large[100:110],
    }  # fmt: skip
    torch.save(state, tmp_path / "views.pt")
    agree(taken(tmp_path / "views.pt", tmp_path / "out"), state)
    assert (tmp_path / "out/model.safetensors").stat().st_size < 8000


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_view(tmp_path: Path, shape: list[int], order: Any, dtype: str) -> None:
    """Any permutation of any slice of any tensor equals torch's own copy."""
    dims = list(range(len(shape)))
    order.shuffle(dims)
    whole = torch.arange(math.prod(shape) * 2).reshape([shape[0] * 2, *shape[1:]]).to(getattr(torch, dtype))
    state = {"v": whole[1::2].permute(dims), "w": whole}
    torch.save(state, tmp_path / "v.pt")
    out = tmp_path / "out"
    for old in [*out.glob("*"), *([out] if out.exists() else [])]:
        old.unlink() if old.is_file() else old.rmdir()
    agree(taken(tmp_path / "v.pt", out), state)


@pytest.mark.parametrize("limit", [64, 1000])
def test_views_larger_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A view that does not fit the buffer is read in parts, and is the same."""
    from weighbridge.adapters.formats import torch_bytes  # noqa: PLC0415 - only here it is touched

    monkeypatch.setattr(torch_bytes, "SPAN", limit)
    monkeypatch.setattr(torch_bytes, "BLOCK", 48)
    base = torch.randn(9, 8, 7)
    state = {"a": base.permute(2, 1, 0), "b": base[:, 1:6:2].transpose(0, 2), "c": torch.randn(40, 30).t(), "d": base}
    torch.save(state, tmp_path / "v.pt")
    agree(taken(tmp_path / "v.pt", tmp_path / "out"), state)


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    """Prefix taken off, ties stored once and told, everything else listed with its bytes."""
    state = {f"net.{label}": tensor for label, tensor in model().items()}
    state["net.lm_head.weight"] = state["net.model.embed_tokens.weight"]
    optimizer = {"state": {0: {"exp_avg": torch.zeros(10)}}, "param_groups": []}
    value = {"state_dict": state, "optimizer_states": [optimizer], "epoch": 1, "pytorch-lightning_version": "2.5"}
    torch.save(value, tmp_path / "last.ckpt")
    made = extract.plan(tmp_path / "last.ckpt")
    assert (made.prefix, made.weights_key) == ("net.", "state_dict")
    assert made.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert made.dropped == {"optimizer_states": 40, "epoch": 0, "pytorch-lightning_version": 0}
    loaded = taken(tmp_path / "last.ckpt", tmp_path / "out")
    agree(loaded, {k.removeprefix("net."): v for k, v in state.items() if k != "net.lm_head.weight"})


@pytest.mark.parametrize("limit", [1, 3000, 1 << 40])
def test_shards_and_their_index(tmp_path: Path, limit: int) -> None:
    """Shards are cut between tensors, and a loader that goes by the index finds every tensor where it says."""
    state = model(torch.bfloat16)
    torch.save(state, tmp_path / "m.pt")
    agree(taken(tmp_path / "m.pt", tmp_path / "out", shard_size=limit), state)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    if limit == 1:
        assert len(files) == len(state)
    if len(files) > 1:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
        for name, file in index["weight_map"].items():
            assert name in safetensors_torch.load_file(tmp_path / "out" / file)


def test_dtypes_by_class_of_layer(tmp_path: Path) -> None:
    """Floats are rounded as torch rounds them, the classes that are kept stay fp32, integers are left alone."""
    state = model() | {"model.position_ids": torch.arange(8)}
    torch.save(state, tmp_path / "m.pt")
    loaded = taken(tmp_path / "m.pt", tmp_path / "out", dtype="BF16", keep=("norm", "embed"))
    kept = {name for name in state if layers.layer_class(name) in {"norm", "embed"}}
    assert {"model.norm.weight", "model.embed_tokens.weight"} <= kept
    agree(loaded, {n: t if n in kept or not t.is_floating_point() else t.to(torch.bfloat16) for n, t in state.items()})


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16", "F64"])
def test_rounding(tmp_path: Path, source: str, target: str) -> None:
    """Halves round to even, and what became infinite is counted."""
    values = torch.tensor(
        [0.1, 1 + 2**-8, 1 + 3 * 2**-9, 70000.0, -1e-30, -0.0, 65504.0, 3.4e38, 1e300], dtype=torch.float64
    )
    values = values.to(getattr(torch, source))
    state = {"w": values[torch.isfinite(values)]}
    torch.save(state, tmp_path / "m.pt")
    made = extract_write.with_dtype(extract.plan(tmp_path / "m.pt"), target)
    report = extract_write.write(made, tmp_path / "out")
    wanted = state["w"].to(
        {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[target]
    )
    agree(safetensors_torch.load_file(tmp_path / "out/model.safetensors"), {"w": wanted})
    assert report.overflowed == int((torch.isfinite(state["w"]) & ~torch.isfinite(wanted)).sum())


# ---------------------------------------------------------------------------------------------------- folders of models


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pickled_model(tmp_path: Path, shards: int) -> None:
    """Shards of pickles become one model with the config and tokenizer beside it."""
    state = model(torch.float16)
    names = builders.shard_names(shards, "pytorch_model", "bin") if shards > 1 else ["pytorch_model.bin"]
    parts = list(zip(names, builders.split(state, shards), strict=True))
    (tmp_path / "in").mkdir()
    for name, part in parts:
        torch.save(part, tmp_path / "in" / name)
    if shards > 1:
        weight_map = {label: name for name, part in parts for label in part}
        builders.write_json(tmp_path / "in/pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})
    builders.write_json(tmp_path / "in/config.json", builders.llama_config(dtype="float16"))
    builders.write_tokenizer(tmp_path / "in")
    agree(taken(tmp_path / "in", tmp_path / "out"), state)
    assert (tmp_path / "out/config.json").exists()
    assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_adapter_out_of_a_whole_checkpoint(tmp_path: Path, wrapped: bool) -> None:
    """Only the adapter's tensors come out, under the names PEFT looks for."""
    torch.manual_seed(1)
    lora = {label: torch.randn(shape) for label, (_, shape, _) in lora_tensors().items()}
    inside = {k.replace(".weight", ".default.weight") if wrapped else k: v for k, v in lora.items()}
    outer = "module." if wrapped else ""
    base = {f"base_model.model.{label}": tensor for label, tensor in model().items()}
    torch.save({outer + k: v for k, v in {**inside, **base}.items()}, tmp_path / "full.pt")
    agree(taken(tmp_path / "full.pt", tmp_path / "out", adapter=True), lora)
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["adapter_model.safetensors"]
    assert list(extract.plan(tmp_path / "full.pt", adapter=True).dropped) == ["21 tensors of the base"]


# ----------------------------------------------------------------------------------------------------------- rank files


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_zero_to_full_weights(tmp_path: Path, stage: int, world: int, groups: int) -> None:
    """The rank files together are the fp32 weights that were partitioned, the frozen ones as they were stored."""
    shapes = {label: tuple(shape) for label, (_, shape, _) in llama_tensors().items()} | {"odd": (7, 3)}
    frozen = {"frozen.weight": (5, 4)}
    values = ranks.zero_folder(tmp_path / "run", shapes, world=world, stage=stage, groups=groups, frozen=frozen)
    wanted = {label: torch.tensor(values[label]).reshape(shape) for label, shape in shapes.items()}
    for label, shape in frozen.items():
        raw = bytearray(builders.pack("BF16", shape, values[label]))
        wanted[label] = torch.frombuffer(raw, dtype=torch.bfloat16).reshape(shape)
    agree(taken(tmp_path / "run", tmp_path / "out"), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [True, False])
def test_a_distributed_checkpoint(tmp_path: Path, nested: bool) -> None:
    """What torch.distributed.checkpoint saved comes out as it went in, without the optimizer."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = model()
    value: dict[str, Any] = {"model": state, "optimizer": {"exp_avg": torch.zeros(50)}} if nested else dict(state)
    dcp.save(value, checkpoint_id=tmp_path / "ck", no_dist=True)
    made = extract.plan(tmp_path / "ck")
    assert made.weights_key == ("model" if nested else None)
    agree(taken(tmp_path / "ck", tmp_path / "out"), state)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused(tmp_path: Path) -> None:
    """Nothing is guessed, dropped or overwritten: each refusal says why."""
    torch.save({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "c.pt")
    with pytest.raises(RefusedError, match="no weights are taken out"):
        extract.plan(tmp_path / "c.pt")
    torch.save({"generator": model(), "discriminator": model()}, tmp_path / "gan.pt")
    with pytest.raises(RefusedError):
        extract.plan(tmp_path / "gan.pt")
    agree(taken(tmp_path / "gan.pt", tmp_path / "g", key="generator"), model())
    with pytest.raises(NotFoundError):
        extract.plan(tmp_path / "gone.pt")
    with pytest.raises(UsageError):
        extract.plan(builders.llama_model(tmp_path / "model"))
    with pytest.raises(UsageError):
        extract.plan(tmp_path / "gan.pt", key="generator", adapter=True)
    made = extract.plan(tmp_path / "gan.pt", key="generator")
    with pytest.raises(ConflictError):
        extract_write.write(made, tmp_path / "g")
    theirs = tmp_path / "race" / "theirs"
    with pytest.raises(ConflictError, match="somebody else"):
        extract_write.write(made, theirs.parent, progress=lambda _count: theirs.mkdir(parents=True, exist_ok=True))
    assert not list(tmp_path.glob(".race.*"))
    with pytest.raises(UsageError):
        extract_write.with_dtype(made, "F7")
    with pytest.raises(UsageError):
        extract_write.with_dtype(made, "F16", ["nose"])


def test_a_source_that_is_cut_leaves_nothing(tmp_path: Path) -> None:
    """A file that becomes shorter while it is read ends in an error, and no half result is seen."""
    torch.save(model(), tmp_path / "m.pt")
    made = extract.plan(tmp_path / "m.pt")
    with (tmp_path / "m.pt").open("r+b") as stream:
        stream.truncate(9000)
    with pytest.raises(Exception, match="could not be read"):
        extract_write.write(made, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]


def test_the_command(tmp_path: Path) -> None:
    """`registry extract` writes the folder and reports prefix, aliases, dropped entries and digests."""
    torch.save({"state_dict": {f"module.{k}": v for k, v in model().items()}, "epoch": 2}, tmp_path / "m.ckpt")
    run = [str(Path(sys.executable).parent / "registry"), "extract", str(tmp_path / "m.ckpt"), "--to"]
    done = subprocess.run(
        [*run, str(tmp_path / "out"), "--json", "--shard-size", "8KB"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tensors"], report["stripped_prefix"], report["dropped"]) == (21, "module.", {"epoch": 0})
    assert {f["path"] for f in report["files"]} == {p.name for p in (tmp_path / "out").iterdir()}
    again = subprocess.run([*run, str(tmp_path / "out")], capture_output=True, check=False)
    assert again.returncode == 7


def test_memory_stays_flat(tmp_path: Path) -> None:
    """A checkpoint of 128 MB with a large transposed view is written with little memory, and fast."""
    big = torch.full((4096, 8192), 0.5)  # what lies in memory by chance may be NaN, and is refused
    torch.save({"a": big[:16], "b": big.t()[:4096]}, tmp_path / "big.pt")
    del big
    code = (
        "import sys; from pathlib import Path; from weighbridge.adapters import extract, extract_write\n"
        "made = extract.plan(Path(sys.argv[1])); extract_write.write(made, Path(sys.argv[2]))\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.pt"), str(tmp_path / "out")], capture_output=True, check=True
    )
    assert int(done.stdout) < 200 * 1024
