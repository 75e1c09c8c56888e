"""Merges that only PEFT's own layers compute: in the jail, with PEFT's bits, the same proof, and the same refusals."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from weighbridge.adapters import jail, worker
from weighbridge.adapters.jail import Held
from weighbridge.adapters.memory import Room
from weighbridge.adapters.merge import behave, job, outside, preview, staging, start
from weighbridge.adapters.merge.outside import Configs
from weighbridge.adapters.merge.preview import Look, look
from weighbridge.registry.errors import RefusedError, WeighbridgeError, describe
from weighbridge.registry.manifest import parse
from weighbridge_testlib import builders, merging
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.peft_families import EVERY, FAMILIES, REFUSED

_ORACLE = "weighbridge_testlib.peft_family_oracle"
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # the first test waits for all merges of both sides
WIDE = ("loha", "ia3-conv1d")
"""Cases that are merged to fp32, too."""

_LIB = str(Path(__file__).parent / "lib")


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every case merged by PEFT and by us; one process of a parallel run does it for all.

    The child's part of all cases runs in one jail, because loading the libraries takes longer than all the merges.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "families"
    with (shared / "families.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            folder.mkdir()
            done = subprocess.run(
                [sys.executable, "-m", _ORACLE, str(folder)],
                capture_output=True, text=True, env={**os.environ, **_QUIET, "PYTHONPATH": _LIB}, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
            _merge(folder)
            (folder / "ready").touch()
    return folder


def _merge(folder: Path) -> None:
    seen: dict[str, Look] = {}
    orders: dict[str, outside.Order] = {}
    for name in EVERY:
        place = folder / name
        adapters = sorted(place.glob("adapter?"))
        if (place / "failed.txt").exists():
            continue
        seen[name] = look(adapters, place / "base", weigh=False)
        if seen[name].outcome == "refuse":
            continue
        (place / "stage").mkdir()
        configs = Configs(place / "base" / "config.json", tuple(one / "adapter_config.json" for one in adapters))
        order = outside.ordered(merging.plan_of(seen[name]), place / "stage", needed=4 << 30, configs=configs)
        orders[name] = order._replace(request=order.request | {"workers": 1})
    policies = [order.policy for order in orders.values()]
    first = policies[0]
    policy = msgspec.structs.replace(
        first,
        workers=1,
        reads=tuple(path for policy in policies for path in policy.reads),
        writes=tuple(policy.writes[0] for policy in policies),
    )
    os.environ["PYTHONPATH"], kept = _LIB, os.environ.get("PYTHONPATH", "")
    try:
        told, held, _ = worker.jailed(
            f"{_ORACLE}:many", {"requests": {name: order.request for name, order in orders.items()}}, policy
        )
    finally:
        os.environ["PYTHONPATH"] = kept
    assert held == jail.able()
    for name in EVERY:
        place = folder / name
        if name in told:
            _finish(place, seen[name], told[name], held)
        elif name in seen:
            blocks = [one.message for one in seen[name].findings if one.severity == "block"]
            (place / "refused.txt").write_text("\n".join(blocks))


def _finish(place: Path, seen: Look, told: dict[str, Any], held: Held) -> None:
    """Carry out our part of a merge whose values were computed, or write why it was refused."""
    if "error" in told:
        (place / "refused.txt").write_text(json.dumps(told["error"]))
        return
    stage = place / "stage"
    try:
        computed = outside.settle(merging.plan_of(seen), stage, told["result"], held)
    except WeighbridgeError as error:
        (place / "refused.txt").write_text(json.dumps(describe(error)))
        return
    (stage / job.PLAN).write_bytes(msgspec.msgpack.encode(computed.plan))
    (stage / job.BUNDLE).write_bytes(msgspec.msgpack.encode(seen.bundle))
    result = job.run({"stage": str(stage), "plan": "test", "workers": 2}, lambda _: None)
    (place / "told.json").write_text(
        json.dumps(
            {**computed.facts, "proof": result["proof"], "fidelity": result["fidelity"], "still": computed.still}
        )
    )
    (stage / "out").rename(place / "merged")
    if place.name in WIDE:
        wide = look(sorted(place.glob("adapter?")), place / "base", dtype="fp32", weigh=False)
        computed = outside.settle(merging.plan_of(wide), stage, told["result"], held)
        (stage / job.PLAN).write_bytes(msgspec.msgpack.encode(computed.plan))
        (stage / job.BUNDLE).write_bytes(msgspec.msgpack.encode(wide.bundle))
        assert job.run({"stage": str(stage), "plan": "wide", "workers": 2}, lambda _: None)["proof"]["passed"]
        (stage / "out").rename(place / "wide")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_is_peft_s_merge_in_fp32_rounded_once(families: Path, name: str) -> None:
    """Every stored number is PEFT's fp32 one rounded to the base's dtype, and what the adapter leaves is the base's."""
    place = families / name
    for trouble in ("failed.txt", "refused.txt"):
        assert not (place / trouble).exists(), (place / trouble).read_text()
    ours, base = merging.tensors(place / "merged"), merging.tensors(place / "base")
    theirs = merging.tensors(place / "peft")
    if FAMILIES[name].untied:
        base["lm_head.weight"] = base["model.embed_tokens.weight"]
        assert json.loads((place / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert ours.keys() == base.keys() == theirs.keys()
    changed = []
    for key, (dtype, shape, raw) in ours.items():
        right = np.frombuffer(theirs[key][2], merging.KINDS[theirs[key][0]]).astype(merging.KINDS[dtype])
        assert theirs[key][:2] == ("F32" if dtype == "BF16" else dtype, shape)
        assert right.tobytes() == raw, f"{key} is not PEFT's"
        changed += [key] if raw != base[key][2] else []
    told = json.loads((place / "told.json").read_text())
    assert told["proof"]["passed"]
    assert told["proof"]["tensors_changed"] == len(changed) > 0
    assert told["proof"]["tensors_copied"] == len(base) - len(changed)
    assert told["still"] == []
    assert told["fidelity"]["cosine"] > 0.9


@pytest.mark.parametrize("name", WIDE)
def test_in_fp32_nothing_is_rounded(families: Path, name: str) -> None:
    """A result in fp32 holds the numbers that PEFT computed, bit by bit, and its config says so."""
    ours, theirs = merging.tensors(families / name / "wide"), merging.tensors(families / name / "peft")
    assert merging.differing(ours, theirs) == {}
    assert json.loads((families / name / "wide" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_merged_model_computes_what_base_and_adapter_do(families: Path, name: str) -> None:
    """On fixed inputs the merged model is a thousand times nearer to base and adapter than the base is."""
    seen = json.loads((families / name / "told.json").read_text())["behaviour"]
    assert seen["error"] < 1e-5
    assert seen["distance"] > 1000 * seen["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_peft_would_pass_over_is_refused(families: Path, name: str) -> None:
    """A missing, strange or wrong tensor, a layer without a target, an unknown model and a no-op are each refused."""
    place = families / name
    assert not (place / "failed.txt").exists(), (place / "failed.txt").read_text()
    assert not (place / "merged").exists()
    assert REFUSED[name][1] in (place / "refused.txt").read_text()


# --------------------------------------------------------------------------------------------------- around the child


def pair(tmp_path: Path, tensors: dict[str, builders.TensorSpec], model: dict[str, Any], **config: Any) -> Look:
    """Write a base and an adapter of some tensors, and look at the two."""
    builders.llama_model(tmp_path / "base", **model)
    builders.lora_adapter(tmp_path / "adapter", tensors=tensors, **config)
    return look([tmp_path / "adapter"], tmp_path / "base")


def scales(*modules: str, value: float = 1.25) -> dict[str, builders.TensorSpec]:
    """Return what IA3 learns for some layers of the builders' model."""
    return {f"base_model.model.{module}.ia3_l": ("F32", (16, 1), value) for module in modules}


_Q = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
_IA3: dict[str, Any] = {"peft_type": "IA3", "targets": ["q_proj"], "feedforward_modules": []}


def test_a_merge_by_peft_looks_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command merges in the jail and gives a whole model folder with proof and record, and takes it up again."""
    desk = Desk(tmp_path, monkeypatch)
    pair(tmp_path, scales(*_Q), {"shards": 2}, **_IA3)
    words = ("merge", "adapter", "--base", "base", "--to", "out", "--name", "tuned", "--json")
    told = conforms(desk.ok(*words).json, "merge")
    facts = told["facts"]
    assert (facts["peft_type"], facts["proof"]["passed"], facts["proof"]["tensors_changed"]) == ("IA3", True, 2)
    assert facts["jail"] == jail.able()._asdict()
    assert facts["behaviour"]["error"] < 1e-5
    assert 0 < facts["memory_peak"] < facts["memory_bytes"]
    assert facts["formula"].startswith(f"round(merge_and_unload() of PEFT {facts['merged_by']['peft']})")
    listed = {file["path"] for file in told["files"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == listed | {"merge.json"}
    assert str(tmp_path) not in (tmp_path / "out" / "merge.json").read_text()
    base, ours = merging.numbers(tmp_path / "base"), merging.numbers(tmp_path / "out")
    for name, values in base.items():
        factor = 1.25 if name.removesuffix(".weight") in _Q else 1.0
        right = (values.astype("f4") * np.float32(factor)).astype(merging.KINDS["BF16"]).astype("f8")
        assert np.array_equal(ours[name], right)
    assert conforms(desk.ok("inspect", "out", "--json").json, "inspect")["outcome"] == "accept"
    assert told["ref"] == "tuned-merged-bf16@v1"
    stored = parse((desk.root / "models" / "tuned-merged-bf16" / "v1" / "manifest.json").read_bytes()).facts
    assert (stored.kind, stored.adapter.peft_type if stored.adapter else None) == ("merged", "IA3")
    assert "merge-proven" in {one.code for one in stored.findings}
    again = desk.ok(*words).json
    assert (again["joined"], again["ref"]) == (True, told["ref"])
    assert not [path for path in tmp_path.iterdir() if ".merge-" in path.name]


def test_what_a_streamed_merge_computes_is_compared_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--behaviour has the result compared and tells the figures; where memory is short the merge stands, and warns."""
    desk = Desk(tmp_path, monkeypatch)
    builders.llama_model(tmp_path / "base", shards=2)
    builders.lora_adapter(tmp_path / "adapter")
    words = ("merge", "adapter", "--base", "base", "--behaviour", "--json")
    with monkeypatch.context() as patched:  # the child itself runs where a rule asks for it, by the same way
        patched.setattr(behave, "compare", lambda *_: merging.distances(0.01, 0.02))
        told = conforms(desk.ok(*words, "--to", "out", "--name", "sft").json, "merge")
    said = desk.ok("show", told["ref"]).out
    assert "and what it computes: 0.01 away from base and adapter together, the base 1\n" in said
    assert told["facts"]["behaviour"] == behave.facts(merging.distances(0.01, 0.02))
    (proven,) = [one for one in told["findings"] if one["code"] == "merge-proven"]
    assert "away from those of base and adapter together" in proven["message"]
    monkeypatch.setattr(behave, "available", lambda: Room(1 << 20, "MemAvailable"))
    short = desk.ok(*words, "--to", "other").json
    assert short["facts"]["behaviour"] is None
    assert "1048576 are free" in next(f["message"] for f in short["findings"] if f["code"] == "merge-not-compared")


def test_too_little_memory_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory does not hold the model in fp32, the dry run says so with both figures."""
    monkeypatch.setattr(preview, "available", lambda: Room(1 << 20, "MemAvailable"))
    seen = pair(tmp_path, scales(*_Q), {}, **_IA3)
    (one,) = [f for f in seen.findings if f.severity == "block"]
    assert one.code == "merge-memory-short"
    assert one.data["free_bytes"] == 1 << 20
    elements = sum(int(np.prod(shape)) for _, shape, _ in merging.tensors(tmp_path / "base").values())
    assert one.data["needed_bytes"] > 4 * elements
    with pytest.raises(RefusedError):
        start.merge(seen, tmp_path / "out")


def test_the_torch_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, transformers or PEFT there is one sentence with the command that mends it."""
    seen = pair(tmp_path, scales(*_Q), {}, **_IA3)
    monkeypatch.setattr(outside, "find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(WeighbridgeError) as caught:
        start.merge(seen, tmp_path / "out")
    assert caught.value.fix == "pip install 'weighbridge[torch]'"


@pytest.mark.parametrize(
    ("tensors", "model", "code", "words"),
    [
        (scales("lm_head"), {"tied": True, "is_encoder_decoder": True}, "merge-ambiguous", "share the embedding"),
        (scales("model.layers.7.mlp.up_proj"), {}, "merge-target-missing", "model.layers.7.mlp.up_proj.weight"),
        ({"base_model.model.score.weight": ("F32", (2, 16), 0.5)}, {}, "merge-tensor-unused", "score.weight"),
        (
            {"base_model.model.model.norm.weight": ("F32", (24,), 0.5)}, {}, "merge-shape-mismatch", "[16]",
        ),
        (
            {"base_model.model.lm_head.weight": ("F32", (40, 16), 0.5)}, {}, "merge-not-streamed", "vocabulary",
        ),
    ],
)  # fmt: skip
def test_what_peft_would_merge_wrong_is_refused_from_the_headers(
    tmp_path: Path, tensors: dict[str, builders.TensorSpec], model: dict[str, Any], code: str, words: str
) -> None:
    """Tied ends, layers and tensors the base lacks, other shapes and vocabularies are refused before PEFT is asked."""
    seen = pair(tmp_path, scales(*_Q) | tensors, model, **_IA3)
    blocks = {one.code: one.message for one in seen.findings if one.severity == "block"}
    assert words in blocks[code]
    assert seen.planned is None


def test_what_a_config_could_make_a_library_do_does_not_reach_it(tmp_path: Path) -> None:
    """Modules to import, code to load, kernels to fetch and a quantizer are left out of what the child reads."""
    acts = {
        "auto_map": {"AutoModel": "evil.Model"},
        "attn_implementation": "somebody/kernel",
        "quantization_config": {},
    }
    seen = pair(tmp_path, scales(*_Q), acts, **_IA3, megatron_config={"a": 1}, megatron_core="antigravity")
    (tmp_path / "stage").mkdir()
    configs = Configs(tmp_path / "base" / "config.json", (tmp_path / "adapter" / "adapter_config.json",))
    outside.ordered(merging.plan_of(seen), tmp_path / "stage", needed=1, configs=configs)
    view = tmp_path / "stage" / "view"
    texts = [path.read_text() for path in sorted(view.rglob("*.json"))]
    assert len(texts) == 2
    assert not any(word in text for text in texts for word in ("evil", "somebody", "antigravity", "quantization"))
    assert json.loads(texts[1])["hidden_size"] == 16
    assert {path.name for path in view.rglob("*") if path.is_symlink()} == {
        "model.safetensors", "adapter_model.safetensors",
    }  # fmt: skip


def test_several_adapters_are_not_given_to_peft_unless_dora_is_among_them(tmp_path: Path) -> None:
    """Types of PEFT's own layers are merged one at a time, with the advice how."""
    pair(tmp_path, scales(*_Q), {}, **_IA3)
    builders.lora_adapter(tmp_path / "second")
    seen = look([tmp_path / "adapter", tmp_path / "second"], tmp_path / "base")
    (one,) = [f for f in seen.findings if f.severity == "block"]
    assert (one.code, "one adapter at a time" in one.message) == ("merge-not-streamed", True)


ANSWER: dict[str, Any] = {
    "changed": [], "behaviour": {"error": 0.0, "distance": 1.0, "scale": 1.0}, "versions": {"peft": "0"},
}  # fmt: skip


def test_a_merge_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    """Where PEFT left every tensor as it is, which it tells nobody, we refuse; what was computed is used again."""
    seen = pair(tmp_path, scales(*_Q, value=1.0), {}, **_IA3)
    assert seen.bundle is not None
    identity = staging.plan_identity(merging.plan_of(seen), seen.bundle)
    stage = tmp_path / f".out.merge-{identity[:12]}"
    (stage / "home").mkdir(parents=True)
    (stage / "computed.json").write_text(json.dumps({"told": ANSWER, "held": jail.able()._asdict(), "peak": 1}))
    with pytest.raises(RefusedError) as caught:
        start.merge(seen, tmp_path / "out")
    assert caught.value.data["findings"][0].code == "merge-changes-nothing"
    assert "all 2 tensors" in str(caught.value.why)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    ("answer", "written", "words"),
    [
        (ANSWER | {"behaviour": {"error": 0.1, "distance": 1.0, "scale": 1.0}}, None, "away from base and adapter"),
        (ANSWER | {"behaviour": {"error": float("nan"), "distance": 1.0, "scale": 1.0}}, None, "nan"),
        (ANSWER | {"behaviour": "fine"}, None, "not understood"),
        (ANSWER, ("model.norm.weight", (16,)), "model.norm.weight, which the adapter is not for"),
        (ANSWER, (f"{_Q[0]}.weight", (8, 16)), "which the adapter is not for"),
    ],
)
def test_the_child_s_answer_is_not_believed(
    tmp_path: Path, answer: dict[str, Any], written: tuple[str, tuple[int, ...]] | None, words: str
) -> None:
    """Other outputs, a strange answer, a tensor nobody adapted or of another shape end the merge as unproven."""
    seen = pair(tmp_path, scales(*_Q), {}, **_IA3)
    folder = tmp_path / "stage" / "home" / "computed"
    folder.mkdir(parents=True)
    if written is not None:
        builders.write_safetensors(folder / "model.safetensors", {written[0]: ("F32", written[1], 0.5)})
    with pytest.raises(RefusedError) as caught:
        outside.settle(merging.plan_of(seen), tmp_path / "stage", answer, Held(7, True))
    assert caught.value.data["findings"][0].code == "merge-unproven"
    assert words in str(caught.value.why)


def test_a_weak_jail_is_a_finding_of_the_merge(tmp_path: Path) -> None:
    """Where the kernel could not confine the child, the result says so."""
    seen = pair(tmp_path, scales(*_Q), {}, **_IA3)
    (tmp_path / "stage" / "home").mkdir(parents=True)
    plan = merging.plan_of(seen)
    assert outside.settle(plan, tmp_path / "stage", ANSWER, Held(7, True)).findings == []
    (one,) = outside.settle(plan, tmp_path / "stage", ANSWER, Held(0, True)).findings
    assert (one.code, one.severity) == ("jail-weak", "warn")
