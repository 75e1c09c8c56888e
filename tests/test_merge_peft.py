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
from weighbridge.adapters.merge import job, outside
from weighbridge.adapters.merge.outside import Configs
from weighbridge.adapters.merge.preview import Look, look
from weighbridge.registry.errors import WeighbridgeError, describe
from weighbridge_testlib import merging
from weighbridge_testlib.peft_families import EVERY, FAMILIES, REFUSED

_ORACLE = "weighbridge_testlib.peft_family_oracle"
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
pytestmark = pytest.mark.timeout(600)  # the first test waits for all merges of both sides
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
        told, held = worker.jailed(
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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_result_is_peft_s_merge_in_fp32_rounded_once(families: Path, name: str) -> None:
    """Every stored number is PEFT's fp32 one rounded to the base's dtype, and what the adapter leaves is the base's."""
    place = families / name
    for trouble in ("failed.txt", "refused.txt"):
        assert not (place / trouble).exists(), (place / trouble).read_text()
    ours, base = merging.tensors(place / "merged"), merging.tensors(place / "base")
    theirs = merging.tensors(place / "peft")
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
