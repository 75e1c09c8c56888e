"""`registry cast`: another precision on the streaming engine, rounded once, proven, published with its lineage."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weighbridge.adapters.merge import block, casting, job, proof
from weighbridge.registry import errors
from weighbridge.registry.flow import recast
from weighbridge.registry.layout import MARKER
from weighbridge.registry.manifest import canonical, parse
from weighbridge_testlib import builders, merging, packing
from weighbridge_testlib.desk import Desk, conforms

HALF = np.dtype("<f2")
BRAIN = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a model in bf16 as a folder."""
    desk = Desk(tmp_path, monkeypatch)
    builders.llama_model(tmp_path / "model", readme=builders.card(None, "apache-2.0"))
    return desk


def carried(folder: Path, stage: Path, dtype: str, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """Carry out a cast in this process; the result lies in `stage`/out."""
    seen = casting.look(folder, dtype=dtype, keep=keep)
    merging.write_plan(seen, stage)
    return job.run({"stage": str(stage), "plan": "test", "workers": 2}, lambda _: None)


def one_tensor(values: Any, dtype: str, folder: Path) -> Path:
    """Fill a folder with a model whose final norm holds some values, all else zeros and ones of the same dtype."""
    tensors = builders.llama_tensors(dtype=dtype)
    kind = merging.KINDS[dtype]
    shape = tensors["model.norm.weight"][1]
    whole = np.ones(shape, kind)
    whole[: len(values)] = np.asarray(values, "<f8").astype(kind)
    tensors["model.norm.weight"] = (dtype, shape, whole.tobytes())
    return builders.llama_model(folder, tensors=tensors, dtype=dtype)


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "bf16"), ("BF16", "fp16"), ("F16", "bf16"), ("F64", "bf16")])
def test_every_element_is_the_original_rounded_once(tmp_path: Path, stored: str, dtype: str) -> None:
    """Whatever the dtypes are, each number is the nearest one, and the proof says how many were looked at."""
    base = builders.llama_model(tmp_path / "model", tensors=builders.llama_tensors(dtype=stored), dtype=stored)
    told = carried(base, tmp_path / "stage", dtype)
    ours, theirs = merging.tensors(tmp_path / "stage" / "out"), merging.numbers(base)
    kind = {"bf16": BRAIN, "fp16": HALF}[dtype]
    for name, (told_dtype, shape, raw) in ours.items():
        assert proof.nearest(theirs[name], np.frombuffer(raw, kind).reshape(shape), told_dtype).all()
    count = sum(values.size for values in theirs.values())
    seen = told["proof"]
    assert (seen["passed"], seen["tensors_cast"], seen["tensors_copied"]) == (True, len(ours), 0)
    assert (seen["elements_cast"], seen["roundings_checked"]) == (count, count)


def test_doubles_are_not_rounded_twice() -> None:
    """A double just above a tie of bf16 rounds up, though single precision would see a tie and round to even."""
    value = 1 + 2.0**-8 + 2.0**-40
    assert float(block.rounded(np.array([[value, -value, 1 + 2.0**-8]]), "BF16")[0, 0]) == 1 + 2.0**-7
    random = np.random.default_rng(1).standard_normal((64, 64)) * 2.0 ** np.arange(-70, 58, 2)
    assert proof.nearest(random, block.rounded(random, "BF16"), "BF16").all()


def test_the_proof_sees_a_number_that_is_not_the_nearest() -> None:
    """Cut instead of rounded, a tie to the odd one, one bit off beside zero: each is told, the right ones are not."""
    exact = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1.005, 0.0, 2.0**-135, 65519.0])
    right = exact.astype(np.float32).astype(BRAIN)
    assert proof.nearest(exact, right, "BF16").all()
    bits = right.view(np.uint16)
    for change in (1, 0xFFFF):
        assert not proof.nearest(exact, (bits + np.uint16(change)).view(BRAIN), "BF16")[[0, 1, 2, 4, 5]].any()
    assert not proof.nearest(np.array([2.0**-134 * 1.1]), np.zeros(1, BRAIN), "BF16").any()
    assert proof.nearest(np.array([65519.0]), np.array([65504.0], HALF), "F16").all()
    assert not proof.nearest(np.array([65521.0]), np.array([65504.0], HALF), "F16").any()


def test_what_the_precision_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    """fp16 ends at 65,504: tensors that go beyond refuse the cast with their names, and nothing is left behind."""
    base = one_tensor([7e4, -2e5], "BF16", tmp_path / "model")
    with pytest.raises(errors.RefusedError) as caught:
        casting.cast(casting.look(base, dtype="fp16"), tmp_path / "out")
    assert list(caught.value.data["tensors"]) == ["model.norm.weight"]
    assert "model.norm.weight (up to 1.997e+05)" in str(caught.value.why)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    kept = carried(base, tmp_path / "stage", "fp16", ("norm",))
    assert kept["proof"]["passed"]


def test_layers_can_stay_in_single_precision(tmp_path: Path) -> None:
    """--keep-fp32 names classes of layers; those are written in fp32, all others in the precision asked for."""
    base = builders.llama_model(tmp_path / "model")
    carried(base, tmp_path / "stage", "fp16", ("embed", "norm"))
    found = {name: dtype for name, (dtype, _, _) in merging.tensors(tmp_path / "stage" / "out").items()}
    assert {dtype for name, dtype in found.items() if "norm" in name or "embed" in name} == {"F32"}
    assert {dtype for name, dtype in found.items() if "proj" in name} == {"F16"}
    with pytest.raises(errors.UsageError):
        casting.look(base, dtype="fp16", keep=["norms"])


def test_numbers_that_vanish_are_counted(tmp_path: Path) -> None:
    """What is too small for fp16 becomes zero, which is right, and the record says how many did."""
    base = one_tensor([1e-30, 2.0**-24, 2.0**-26], "F32", tmp_path / "model")
    seen = carried(base, tmp_path / "stage", "fp16")["proof"]
    assert seen["elements_to_zero"] == 2
    assert seen["elements_exact"] < seen["elements_cast"]


def test_what_cannot_be_cast_is_refused_with_words(tmp_path: Path) -> None:
    """Packed weights, an adapter, a model that has the precision already: each with its reason, before a byte moves."""
    method = packing.Method("gptq", 4, 128)
    tensors = builders.llama_tensors()
    for name in [n for n in tensors if ".mlp." in n or ".self_attn." in n]:
        stem, (outer, inner) = name.removesuffix(".weight"), tensors.pop(name)[1]
        tensors |= packing.layer(method, stem, inner, outer)
    packed = builders.llama_model(tmp_path / "packed", tensors=tensors, **packing.config(method))
    adapter = builders.lora_adapter(tmp_path / "adapter")
    model = builders.llama_model(tmp_path / "model")
    told = [casting.look(folder, dtype="fp16").findings[0] for folder in (packed, adapter)]
    told.append(casting.look(model, dtype="bf16").findings[0])
    assert [one.code for one in told] == ["cast-impossible", "cast-impossible", "cast-changes-nothing"]
    assert "quantized (gptq)" in told[0].message
    assert (told[1].message.partition(" holds ")[0], "registry merge" in str(told[1].fix)) == ("adapter", True)
    with pytest.raises(errors.RefusedError, match="this cast is refused"):
        casting.cast(casting.look(packed, dtype="fp16"), tmp_path / "out")


def test_a_version_is_cast_and_published_with_its_lineage(desk: Desk) -> None:
    """The result has a name that ends in its precision, the original's licence and origin, and an edge to it."""
    pushed = desk.ok("push", "model", "--name", "chat", "--json").json
    told = conforms(desk.ok("cast", "chat@v1", "--dtype", "fp16", "--json").json, "cast")
    assert (told["ref"], told["facts"]["cast"]) == ("chat-fp16@v1", {"BF16 to F16": 21})
    again = conforms(desk.ok("cast", "chat@v1", "--dtype", "fp16", "--json").json, "cast")
    assert (again["ref"], again["joined"], again["facts"]["proof"]) == ("chat-fp16@v1", True, told["facts"]["proof"])
    (desk.root / "models" / "chat" / "v1" / "model.safetensors").unlink()  # nor is what it was made of fetched
    said = desk.ok("cast", "chat@v1", "--dtype", "fp16").err
    assert ("it is there already, as chat-fp16@v1" in said, "tensors cast" in said) == (True, False)
    stored = (desk.root / "models" / "chat-fp16" / "v1" / "manifest.json").read_bytes()
    facts = parse(stored).facts
    (edge,) = facts.lineage
    assert (edge.relation, edge.ref, edge.content) == ("cast-from", "chat@v1", pushed["content"])
    assert (facts.kind, facts.license.id) == ("model", "apache-2.0")
    (proven,) = [one for one in facts.findings if one.code == "cast-proven"]
    assert proven.data["proof"]["passed"]
    assert proven.data["proof"]["elements_cast"] > 0
    assert desk.ok("verify", "chat-fp16@v1").code == 0


def test_a_folder_is_cast_into_a_folder(desk: Desk) -> None:
    """--to makes a folder whose config says what was written, with a record that names no place of this machine."""
    assert desk.ok("cast", "model", "--dtype", "fp32", "--dry-run").out.startswith("accept: LlamaForCausalLM to fp32")
    desk.ok("cast", "model", "--dtype", "fp32", "--to", "out")
    config = json.loads((desk.folder / "out" / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} & {"float32"}
    theirs, ours = merging.numbers(desk.folder / "model"), merging.numbers(desk.folder / "out")
    assert all((ours[name] == values).all() for name, values in theirs.items())
    text = (desk.folder / "out" / casting.RECORD).read_text()
    assert str(desk.folder) not in text
    assert json.loads(text)["facts"]["proof"]["elements_exact"] == sum(values.size for values in theirs.values())
    seen = conforms(desk.ok("inspect", "out", "--json").json, "inspect")
    assert seen["outcome"] == "accept"
    assert desk.registry("cast", "out", "--dtype", "fp32", "--dry-run").code == 5
    assert desk.registry("cast", "model", "--dtype", "fp16").code == 2


@pytest.mark.parametrize("place", ["model", "model/sub", "."])
def test_a_result_never_lies_in_its_source(desk: Desk, place: str) -> None:
    """Neither the source itself, nor a folder in it, nor one around it is taken; the fix names none to remove."""
    before = sorted(desk.folder.rglob("*"))
    said = desk.registry("cast", "model", "--dtype", "fp32", "--to", desk.folder / place)
    assert said.code == 2
    assert "remove" not in said.err
    assert sorted(desk.folder.rglob("*")) == before


def test_what_may_not_be_published_is_told_before_the_work_also_where_a_folder_is_wanted(desk: Desk) -> None:
    """With --to and --name a withdrawal refuses the cast of a folder or a version before a file is written or fetched.

    What is only there already does not end it: the folder is made.
    """
    desk.ok("push", "model", "--name", "m")
    for model in ("model", "m@v1"):
        words = ("cast", model, "--dtype", "fp32", "--name", "c", "--to", "out")
        ref = desk.ok("cast", model, "--dtype", "fp32", "--name", "c", "--again").out.strip()
        assert (desk.ok(*words).out.strip(), (desk.folder / "out" / casting.RECORD).is_file()) == (ref, True)
        shutil.rmtree(desk.folder / "out")
        desk.ok("withdraw", ref, "--reason", "wrong data")
        said = desk.registry(*words)
        assert (said.code, "registry cast ... --again" in said.err) == (7, True), said.err
        assert [*desk.folder.glob("*out*"), *(desk.cache / "merge").glob("*")] == []


@pytest.mark.parametrize(("option", "word"), [("--name", "Bad Name"), ("--remote", "nope"), ("--keep-fp32", "norms")])
def test_what_cannot_be_published_is_told_before_the_work(desk: Desk, option: str, word: str) -> None:
    """A name or a class of layers that is none, or a remote that is not there, costs no cast and fetches nothing."""
    desk.ok("push", "model", "--name", "m")
    (desk.root / "models" / "m" / "v1" / "model.safetensors").unlink()
    said = desk.registry("cast", "m@v1", "--dtype", "fp32", "--to", "out", "--name", "m", option, word)
    assert said.code == 2
    assert not (desk.folder / "out").exists()


def test_only_the_same_cast_is_found_again() -> None:
    """Its original, the precision and the classes that get fp32, in any order, are what a cast is made of."""
    keep = ["norm", "embed"]
    asked = [("one", "fp16", []), ("two", "fp16", []), ("one", "bf16", []), ("one", "fp16", keep[:1])]
    keys = [recast.derivation(*one) for one in (*asked, ("one", "fp16", keep))]
    assert len(set(keys)) == len(keys)
    assert recast.derivation("one", "fp16", keep[::-1]) == keys[-1]


def test_a_remote_that_takes_no_writes_is_told_before_the_work(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be written, or a registry of one other writer, costs no cast; what is there is found."""
    words = ("cast", "model", "--dtype", "fp32", "--name")
    desk.ok(*words, "there")
    marker, access = desk.root / MARKER, os.access
    shared = marker.read_bytes()
    marker.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(desk.root) and access(path, mode))
        closed = desk.registry(*words, "new", "--to", "out")
        assert "it is there already" in desk.ok(*words, "there").err
    marker.write_bytes(canonical(json.loads(shared) | {"mode": "single-writer", "writer": "another"}))
    theirs = [desk.registry(*words, name, "--to", "out") for name in ("new", "there")]
    assert "it is there already" in desk.ok(*words, "there").err
    assert (closed.code, "cannot be written" in closed.err) == (errors.DeniedError.exit_code, True)
    assert [(one.code, "it is another" in one.err) for one in theirs] == [(7, True)] * 2
    assert [*desk.folder.glob("*out*"), *(desk.root / "models").glob("new*")] == []


def test_a_cast_that_was_cut_goes_on_with_what_was_finished(tmp_path: Path) -> None:
    """Files that the journal lists are kept, the others written again, and the bytes are those of the first time."""
    base = builders.llama_model(tmp_path / "base", shards=3)
    first = carried(base, tmp_path / "stage", "fp16")
    journal = tmp_path / "stage" / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    again = job.run({"stage": str(tmp_path / "stage"), "plan": "test", "workers": 2}, lambda _: None)
    assert (len(again["kept"]), again["files"], again["proof"]) == (2, first["files"], first["proof"])
