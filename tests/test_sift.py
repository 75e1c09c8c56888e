"""Values looked at while their bytes pass: the same verdict as an array library gives, whatever the blocks."""

import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.sift import Sieve, Sieves
from weighbridge.registry import errors
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Mode, seen, stage
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import (
    TensorSpec,
    llama_model,
    llama_tensors,
    lora_config,
    safetensors_bytes,
    write_json,
)
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.publishing import write_files
from weighbridge_testlib.shelf import facts

KINDS: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "C64": "<c8",
}
"""Every dtype of safetensors that has NaN, and what the array library calls it."""

LARGEST = {"BF16": b"\x7f\x7f", "F16": b"\xff\x7b", "F32": b"\xff\xff\x7f\x7f", "F64": b"\xff" * 6 + b"\xef\x7f"}
"""The largest finite number of each: its high byte is the one of NaN, but for F16."""


def blocks(body: bytes, source: random.Random) -> Iterator[bytearray]:
    """Cut a file into blocks of any size, most of them odd."""
    at = 0
    while at < len(body):
        size = source.choice((1, 3, 7, 8, 64, 1000, 70_001))
        yield bytearray(body[at : at + size])
        at += size


def sifted(body: bytes, source: random.Random) -> Sieve:
    """Let a file pass a sieve, block by block; each block is overwritten afterwards."""
    sieve = Sieve()
    for block in blocks(body, source):
        sieve.see(block)
        block[:] = b"\xff" * len(block)
    return sieve


def truth(dtype: str, raw: bytes) -> tuple[bool, bool]:
    """Return whether the array library sees NaN, and infinities."""
    values = np.frombuffer(raw, dtype=KINDS[dtype])
    if dtype != "C64":
        with np.errstate(invalid="ignore"):
            values = values.astype("f8")
    return bool(np.isnan(values).any()), bool(np.isinf(values).any())


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_bytes_are_judged_as_an_array_library_judges_them(data: st.DataObject) -> None:
    """Random bytes in random dtypes, cut anywhere: the same tensors are broken, and what is said of them is true.

    Nothing is looked for behind the first block that is broken, so of NaN and infinities one may go untold.
    """
    source = random.Random(data.draw(st.integers(0, 1 << 30)))
    tensors: dict[str, TensorSpec] = {}
    for number in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from(sorted(KINDS)))
        count = data.draw(st.sampled_from((0, 1, 2, 3, 40, 999)))
        width = np.dtype(KINDS[dtype]).itemsize
        raw = bytearray(source.randbytes(count * width))
        if data.draw(st.booleans()):  # most numbers small, so that some tensors are sound
            raw[width - 1 :: width] = b"\x3c" * count
            raw[3::8] = b"\x3c" * len(raw[3::8]) if dtype == "C64" else raw[3::8]
        tensors[f"t{number}"] = (dtype, (count,), bytes(raw))
    sieve = sifted(safetensors_bytes(tensors), source)
    wanted = {name: truth(dtype, cast("bytes", raw)) for name, (dtype, _, raw) in tensors.items()}
    assert {*sieve.nan, *sieve.inf} == {name for name, either in wanted.items() if any(either)}
    assert set(sieve.nan) <= {name for name, (nan, _) in wanted.items() if nan}
    assert set(sieve.inf) <= {name for name, (_, inf) in wanted.items() if inf}
    assert sieve.problem == ""


@pytest.mark.parametrize("dtype", sorted(KINDS))
def test_one_bad_number_is_found_wherever_it_lies(dtype: str) -> None:
    """A single NaN among 90,000 numbers is found at either end and in the middle; without it nothing is said."""
    width = np.dtype(KINDS[dtype]).itemsize
    good = np.full(90_000, 1.5 if dtype != "F8_E8M0" else 2, dtype=KINDS[dtype]).tobytes()
    bad = np.array([np.nan], dtype=KINDS[dtype]).tobytes()
    for place in (None, 0, 44_444, 89_999):
        raw = bytearray(good)
        if place is not None:
            raw[place * width : (place + 1) * width] = bad
        body = safetensors_bytes(
            {"a": ("F32", (3,), 1.0), "b": (dtype, (90_000,), bytes(raw)), "c": ("F16", (1,), 1.0)}
        )
        sieve = sifted(body, random.Random(width))
        assert set(sieve.nan) == (set() if place is None else {"b"})
        assert (sieve.inf, sieve.problem) == ({}, "")


@pytest.mark.parametrize("dtype", sorted(LARGEST))
def test_the_largest_number_is_a_number(dtype: str) -> None:
    """A tensor of nothing but the largest finite number, as attention masks are, is sound."""
    body = safetensors_bytes({"mask": (dtype, (70_000,), LARGEST[dtype] * 70_000)})
    sieve = sifted(body, random.Random(1))
    assert (sieve.nan, sieve.inf, sieve.problem) == ({}, {}, "")


def test_only_whole_matrices_of_zeros_are_told() -> None:
    """A zero matrix is told; a vector, an integer table, a LoRA's matrix and one with a single number are not."""
    tensors: dict[str, TensorSpec] = {
        "model.a.weight": ("BF16", (300, 300), None),
        "model.a.bias": ("BF16", (300,), None),
        "model.a.g_idx": ("I32", (300, 2), None),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": ("F32", (30, 4), None),
        "model.b.weight": ("F32", (3, 3), [0, 0, 0, 0, 1, 0, 0, 0, 0]),
        "model.c.weight": ("F8_E4M3", (8, 8), None),
    }
    assert sifted(safetensors_bytes(tensors), random.Random(2)).zero == ["model.a.weight", "model.c.weight"]


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_file_that_ends_early_was_not_looked_at(cut: int) -> None:
    """A cut file never counts as sound: the sieve says that it did not see the values."""
    body = safetensors_bytes({"a": ("F32", (4, 4), 1.0)})
    assert sifted(body[:cut], random.Random(3)).problem != ""
    assert sifted(body, random.Random(3)).problem == ""


def test_a_damaged_header_was_not_looked_at() -> None:
    """Where the list cannot be trusted, nothing is said about values but that they were not looked at."""
    bad = {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}
    sieve = sifted(safetensors_bytes({"a": ("F32", (4,), float("nan"))}, header={"b": bad}), random.Random(4))
    assert sieve.nan == {}
    assert "F99" in sieve.problem


# ---------------------------------------------------------------------------------------------------------- in staging


def model(*, nan: bool = False, zero: bool = False) -> dict[str, bytes]:
    """Return two shards of 3 MB, the second with a NaN far behind."""
    values = bytearray(b"\x00\x3c" * 1_500_000)
    sound = safetensors_bytes({"model.layers.0.w": ("BF16", (1000, 1500), bytes(values))})
    if nan:
        values[-6:-4] = b"\xc0\x7f"
    other: dict[str, TensorSpec] = {"model.layers.1.w": ("BF16", (1000, 1500), bytes(values))}
    if zero:
        other["model.layers.1.dead"] = ("BF16", (64, 64), None)
    return {"config.json": b"{}", "model-1.safetensors": sound, "model-2.safetensors": safetensors_bytes(other)}


@pytest.mark.parametrize("mode", ["copy", "auto", "direct"])
def test_staging_refuses_nan_and_names_the_tensor(tmp_path: Path, mode: Mode) -> None:
    """A NaN that no header shows ends the publication in every mode, and leaves nothing in the stage."""
    place = tmp_path / "staging" / "a"
    with pytest.raises(errors.RefusedError) as caught:
        stage(write_files(tmp_path / "run", model(nan=True)), place, mode=mode)
    (found,) = caught.value.data["findings"]
    assert (found.code, found.subject, found.data["nan"]) == (
        "values-nan",
        "model-2.safetensors",
        {"model.layers.1.w": 1},
    )
    assert not place.exists()


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards=st.integers(2, 9), data=st.data())
def test_every_broken_shard_is_named(tmp_path: Path, shards: int, data: st.DataObject) -> None:
    """However many shards hold NaN or infinities, a look and the staging name each file, its tensors and how many."""
    bad = sorted(data.draw(st.sets(st.integers(1, shards), min_size=1)))
    value = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    names = {i: f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)}
    for i, name in names.items():
        tensors: dict[str, TensorSpec] = {f"l.{i}.w": ("F32", (4,), [1.0, 2.0, 3.0, value if i in bad else 4.0])}
        (folder / name).write_bytes(safetensors_bytes(tensors))
    write_json(folder / "model.safetensors.index.json", {"weight_map": {f"l.{i}.w": n for i, n in names.items()}})
    write_json(folder / "config.json", {"model_type": "own"})
    wanted = [names[i] for i in bad]
    (seen_,) = [f for f in inspect(folder).findings if f.code == "values-nan"]
    sizes = {n: (folder / n).stat().st_size for n in names.values()}
    files = [SourceFile(path=n, source=str(folder / n), size=size, role="weights") for n, size in sizes.items()]
    with pytest.raises(errors.RefusedError) as caught:
        stage(files, folder / "staged")
    (staged,) = caught.value.data["findings"]
    for one in (seen_, staged):
        assert (one.subject, one.data["broken_files"]) == (wanted[0], wanted)
        assert f"{len(bad)} of {shards} files" in one.message
        assert {*one.data.get("nan", {}), *one.data.get("inf", {})} == {f"l.{i}.w" for i in bad}


@pytest.mark.parametrize("mode", ["copy", "auto", "direct"])
def test_staging_tells_what_else_it_saw(tmp_path: Path, mode: Mode) -> None:
    """Zero matrices and weights that cannot be judged are recorded with the version."""
    files = {**model(zero=True), "model.gguf": b"GGUF not looked at"}
    written = [
        msgspec.structs.replace(file, role="weights") if file.path.endswith(".gguf") else file
        for file in write_files(tmp_path / "run", files)
    ]
    bundle = stage(written, tmp_path / "staging" / "a", mode=mode)
    told = {f.code: f for f in seen(bundle, facts()).findings}
    assert told["values-zero"].data == {"zero_tensors": ["model.layers.1.dead"]}
    assert told["values-unread"].data == {"unread_files": ["model.gguf"]}
    assert "values-nan" not in told


def test_sound_weights_cost_no_word(tmp_path: Path) -> None:
    """A sound model says nothing at all."""
    bundle = stage(write_files(tmp_path / "run", model()), tmp_path / "staging" / "a")
    assert bundle.findings == []


def diverged() -> dict[str, TensorSpec]:
    """Return the tensors of the tiny Llama, one of them with a NaN in its last row."""
    tensors = llama_tensors()
    name = "model.layers.1.mlp.down_proj.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, [*cast("list[float]", data)[:-1], float("nan")])
    return tensors


def test_push_refuses_a_diverged_model_and_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry push` of a model with one NaN ends with 5 and the tensor's name; no version, no stage is left."""
    desk = Desk(tmp_path, monkeypatch)
    said = desk.registry("push", llama_model(desk.folder / "full", tensors=diverged()), "--name", "full", "--json")
    assert said.code == 5
    assert "model.layers.1.mlp.down_proj.weight" in said.error["why"]
    assert not [path for path in desk.root.rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize("staging", ["auto", "direct"])
def test_the_daemon_blocks_a_diverged_model(tmp_path: Path, staging: Any) -> None:
    """A model with one NaN becomes a blocked job that says so, never a claim; the sound one beside it is published."""
    bench = Bench(tmp_path)
    bench.intake._settings = bench.intake._settings._replace(staging=staging)
    llama_model(bench.runs / "team/bad/checkpoint-1", tensors=diverged())
    llama_model(bench.runs / "team/good/checkpoint-1")
    bench.settle()
    bench.work()
    (job,) = bench.store.jobs("state = 'blocked'")
    assert [f.code for f in job.findings_list if f.severity == "block"] == ["values-nan"]
    assert list(bench.versions()) == ["team-good@v1"]
    bench.catalog.close()


SECONDS = {
    f"base_model.model.layers.{i}.{name}.lora_{half}{tail}": shape
    for i in range(2)
    for name in ("q_proj", "up_proj")
    for half, shape, tail in (("A", (4, 24), ".weight"), ("B", (24, 4), ".weight"), ("embedding_B", (24, 4), ""))
}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(dtype=st.sampled_from(["F32", "BF16", "F16"]), data=st.data())
def test_staging_tells_of_an_adapter_what_a_look_tells(tmp_path: Path, dtype: str, data: st.DataObject) -> None:
    """Second halves that are zero, wholly, in part or by ranks: staging says it in the same words as `inspect`."""
    world = data.draw(st.sampled_from([None, 1, 2, 4]))
    width = 4 if dtype == "F32" else 2
    tensors: dict[str, TensorSpec] = {}
    for name, shape in SECONDS.items():
        share = world or data.draw(st.sampled_from([0, 1, 3]))
        alive = b"\x01" * (math.prod(shape) * width // share) if share else b""
        alive = b"\x01" * (math.prod(shape) * width) if "lora_A" in name else alive
        tensors[name] = (dtype, shape, alive.ljust(math.prod(shape) * width, b"\0"))
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    write_json(folder / "adapter_config.json", lora_config(targets=["q_proj", "up_proj"]))
    looked, left = inspect(folder), inspect(folder, values=0)
    bundle = stage(write_files(folder / "run", {"adapter_model.safetensors": safetensors_bytes(tensors)}), folder / "s")
    codes = {"lora-b-zero", "lora-b-some-zero", "lora-b-partly-zero"}
    wanted = [f for f in looked.findings if f.code in codes]
    assert [f for f in bundle.findings if f.code in codes] == wanted
    assert not [f for f in left.findings if f.code in codes]
    assert (looked.facts["values_checked"], left.facts["values_checked"]) == (True, False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("lora_unet_down_q.lora_down.weight", "lora_unet_down_q.lora_up.weight"),
        ("unet.down.processor.to_q_lora.down.weight", "unet.down.processor.to_q_lora.up.weight"),
        ("model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"),
    ],
    ids=["kohya", "diffusers", "mlx"],
)
@pytest.mark.parametrize("alive", [False, True])
def test_staging_reads_the_values_of_other_tools_loras(tmp_path: Path, first: str, second: str, alive: bool) -> None:
    """An untrained LoRA of an image tool or of MLX is told by a look with values, else by staging, never by both."""
    name = "adapters.safetensors" if second.endswith("lora_b") else "style.safetensors"
    down, up = ((24, 4), (4, 24)) if second.endswith("lora_b") else ((4, 24), (24, 4))
    body = safetensors_bytes({first: ("F32", down, 0.5), second: ("F32", up, 0.5 if alive else 0.0)})
    write_files(tmp_path / "run", {name: body})
    if second.endswith("lora_b"):
        write_json(tmp_path / "run" / "adapter_config.json", {"fine_tune_type": "lora", "lora_parameters": {"rank": 4}})
    told = [f.code for f in inspect(tmp_path / "run").findings]
    left = [f.code for f in inspect(tmp_path / "run", values=0).findings]
    passed = [f.code for f in stage(write_files(tmp_path / "run", {name: body}), tmp_path / "s").findings]
    assert [codes.count("lora-b-zero") for codes in (told, left, passed)] == [not alive, 0, not alive]
    assert "values-zero" not in passed


def test_only_weights_are_sifted() -> None:
    """Other files pass unseen, and nothing is said about them."""
    sieves = Sieves()
    assert sieves.over("tokenizer.json", "tokenizer") is None
    assert sieves.findings() == []
