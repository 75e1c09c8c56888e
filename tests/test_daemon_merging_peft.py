"""Merges by rule of the types that only PEFT's own layers compute: memory first, then the line of every merge."""

import json
from pathlib import Path

import numpy as np
import pytest

from weighbridge.adapters import jail
from weighbridge.adapters.memory import Room
from weighbridge.adapters.merge import batch, children, outside
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, merging
from weighbridge_testlib.merge_bench import MergeBench

QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_a_rule_merges_what_only_peft_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, with both figures, while the memory is short; what PEFT computed is then proven and published."""
    bench = MergeBench(tmp_path)
    base = bench.base()
    scales: dict[str, builders.TensorSpec] = {
        f"base_model.model.{QUERY.removesuffix('.weight')}.ia3_l": ("F32", (16, 1), 1.5)
    }
    bench.publish(bench.adapter(5, peft_type="IA3", targets=["q_proj"], feedforward_modules=[], tensors=scales))
    with monkeypatch.context() as patched:
        patched.setattr(children, "available", lambda: Room(1 << 20, "MemAvailable"))
        for _ in range(40):  # it is tried again and again while it waits
            (merge,) = bench.merge_all(rounds=1)
            if merge.shown == "waiting":
                break
    assert (merge.shown, "here are 1048576 (MemAvailable)" in str(merge.reason)) == ("waiting", True)
    stage = Path(str(merge.stage))
    begun = batch.memory(stage)
    assert begun > 1 << 30
    wanted = (merging.numbers(base)[QUERY] * 1.5).astype("<f4")
    answer = {
        "changed": [QUERY],
        "behaviour": {"error": 0.0, "distance": 1.0, "scale": 1.0},
        "versions": {"peft": "0"},
    }
    (stage / "home" / "computed").mkdir(parents=True)  # what a child has computed that was killed right after
    builders.write_safetensors(
        stage / "home" / "computed" / "model.safetensors", {QUERY: ("F32", (16, 16), wanted.tobytes())}
    )
    (stage / outside.RECORD).write_text(json.dumps({"told": answer, "held": jail.able()._asdict(), "peak": 1}))
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_name) == ("done", "team-run-1-merged-bf16")
    ours = merging.numbers(tmp_path / "remote" / "models" / "team-run-1-merged-bf16" / "v1")
    right = wanted.astype(merging.KINDS["BF16"]).astype("f8")
    assert np.array_equal(ours[QUERY], right)
    facts = committed(open_directory(str(tmp_path / "remote")), "team-run-1-merged-bf16", 1).facts
    (proven,) = [one for one in facts.findings if one.code == "merge-proven"]
    assert proven.data["formula"].startswith("round(merge_and_unload() of PEFT 0)")
    assert proven.data["merged_by"] == {"peft": "0"}
