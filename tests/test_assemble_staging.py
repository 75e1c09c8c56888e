"""While weights are put together: values that cannot be right, sources that change, kills; nothing of it is visible."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from weighbridge.adapters import extract_write
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.items import Item
from weighbridge.adapters.origins import InStretches, Stretch
from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.adapters.witness import Witness, look
from weighbridge.registry.errors import RefusedError, SourceChangedError, UsageError
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.manifest import seal
from weighbridge.registry.types import RunFacts
from weighbridge_testlib import kill, parts
from weighbridge_testlib.yard import BIN, Yard

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

RUN = RunFacts(project="medical", name="sft", id="run-1")
PART = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def admitted(folder: Path, *allowed: str) -> Admission:
    """Admit what a folder holds as the daemon does: staging looks at the values."""
    policy = Policy(allowed=tuple(Allowed(code=code, reason="checked") for code in allowed))
    return admit(inspect(folder, values=0).artifacts[0], name="medical-sft", run=RUN, policy=policy)


def stage(done: Admission, place: Path) -> staging.Bundle:
    """Stage an admission."""
    return staging.stage(done.files, place, transform=done.transform, made=done.made, inputs=done.inputs)


def poisoned(folder: Path, value: float) -> None:
    """Write a ZeRO checkpoint in which one value of the second rank is another."""
    values = parts.zero(folder, stage=3)
    middle = values["model.embed_tokens.weight"].reshape(-1)
    rank = folder / "global_step5" / PART
    parts.poison(rank, float(middle[len(middle) // 2 + 3]), value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_found_while_staging(tmp_path: Path, value: float) -> None:
    """Weights too large to look at beforehand are looked at while they are written; the stage is gone afterwards."""
    poisoned(tmp_path / "run", value)
    with pytest.raises(RefusedError) as refused:
        stage(admitted(tmp_path / "run"), tmp_path / "stage")
    (finding,) = refused.value.data["findings"]
    assert finding.code == "values-nan"
    assert "model.embed_tokens.weight" in finding.message
    assert not (tmp_path / "stage").exists()


def test_inspect_tells_it_of_small_ones(tmp_path: Path) -> None:
    """What can be looked at in a moment is told by inspect already."""
    poisoned(tmp_path / "run", float("nan"))
    found = inspect(tmp_path / "run")
    assert found.outcome == "refuse"
    assert "values-nan" in {f.code for f in found.findings}


@pytest.mark.parametrize("stage_of", [2, 3])
def test_a_rank_that_was_never_filled(tmp_path: Path, stage_of: int) -> None:
    """A rank's part of zeros alone is found while staging and named; a person may allow it."""
    parts.zero(tmp_path / "run", stage=stage_of, world=3)
    parts.emptied(tmp_path / "run/global_step5" / PART)
    with pytest.raises(RefusedError) as refused:
        stage(admitted(tmp_path / "run"), tmp_path / "stage")
    (finding,) = refused.value.data["findings"]
    assert (finding.code, finding.subject) == ("rank-part-zero", PART)
    done = admitted(tmp_path / "run", "rank-part-zero")
    bundle = stage(done, tmp_path / "stage")
    assert (tmp_path / "stage/model.safetensors").exists()
    (told,) = [f for f in bundle.findings if f.code == "rank-part-zero"]
    assert (told.severity, told.subject, told.message) == ("warn", PART, finding.message)
    assert told.data["empty_files"] == [PART]
    assert told.data["allowed"] == "checked"
    manifest = seal(bundle.files, staging.seen(bundle, done.facts))
    assert told in manifest.facts.findings


def test_the_reason_why_it_is_allowed(tmp_path: Path) -> None:
    """What a person wrote goes along with the finding; what nobody may allow stays what it is."""
    held = {"rank_0.pt": bytes(8), "rank_1.pt": struct.pack("<ff", 1.0, float("nan"))}
    for name, body in held.items():
        (tmp_path / name).write_bytes(body)
    origin = InStretches(tuple(Stretch(str(tmp_path / name), 0, 8) for name in held))
    witness = Witness("run", ["w"], allowed={"rank-part-zero": "frozen layers", "values-nan": "never mind"})
    look([Item("w", "F32", (4,), origin, "F32")], witness)
    by_code = {f.code: f for f in witness.findings()}
    assert by_code["rank-part-zero"].severity == "warn"
    assert by_code["rank-part-zero"].data["allowed"] == "frozen layers"
    assert by_code["values-nan"].severity == "block"
    with pytest.raises(RefusedError) as refused:
        witness.stop()
    assert [f.code for f in refused.value.data["findings"]] == ["values-nan"]


@pytest.mark.parametrize("kind", ["zero", "pieces"])
def test_an_input_that_changes(tmp_path: Path, kind: str) -> None:
    """Any file the weights are made from that is written again stops the job, whatever the result would be."""
    folder = tmp_path / "run"
    if kind == "zero":
        parts.zero(folder, stage=2)
        file = folder / "global_step5" / PART
    else:
        parts.pieces(folder, {"model": parts.state()})
        file = folder / ".metadata"
    done = admitted(folder)
    os.utime(file, (0, 0))
    with pytest.raises(SourceChangedError):
        stage(done, tmp_path / "stage")
    assert not (tmp_path / "stage").exists()


def test_never_without_a_copy(tmp_path: Path) -> None:
    """What is put together is never published straight from its sources."""
    parts.zero(tmp_path / "run", stage=2)
    done = admitted(tmp_path / "run")
    with pytest.raises(UsageError):
        staging.stage(done.files, None, mode="direct", made=done.made, inputs=done.inputs)


def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are cut into shards with an index, whose every line is true; the facts count the shards."""
    monkeypatch.setattr(extract_write.contents, "__kwdefaults__", {"allowed": None, "limit": 6000})
    wanted = parts.zero(tmp_path / "run", stage=3, world=3)
    done = admitted(tmp_path / "run")
    stage(done, tmp_path / "stage")
    index = json.loads((tmp_path / "stage/model.safetensors.index.json").read_text())
    found = {name: safetensors_torch.load_file(tmp_path / "stage" / name) for name in set(index["weight_map"].values())}
    parts.same({name: found[file][name] for name, file in index["weight_map"].items()}, wanted)
    assert index["metadata"]["total_size"] == 22848
    assert done.facts.weights.shards == len(found) > 2
    assert all(done.size_of(file) == (tmp_path / "stage" / file.path).stat().st_size for file in done.files)


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """SIGKILL while the weights are being written: nothing is visible, and the next passage publishes them whole."""
    reason = kill.available()
    if reason:
        pytest.skip(reason)
    with Yard(tmp_path) as yard:
        yard.configure(daemon={"scan": "200ms", "quiet": "200ms"})
        wanted = parts.zero(yard.runs / "team/run", stage=3, world=3)
        point = kill.Point("write", 30, after=False, shows="the weights: their tensors' parts are some sixty writes")
        killed = kill.kill([str(BIN / "registryd"), "once"], point, env=yard.env, cwd=yard.folder)
        assert killed.fired
        (torn,) = yard.remote.glob("models/*/_wb/stage/*/model.safetensors")
        assert 0 < torn.stat().st_size < 22848
        assert yard.check()["committed"] == {}
        again = yard.daemon_once()
        assert again.returncode == 0, again.stderr
        assert list(yard.check(contents=1)["committed"]) == ["team-run@v1"]
        parts.same(safetensors_torch.load_file(yard.remote / "models/team-run/v1/model.safetensors"), wanted)


STAGE = """
import sys
from pathlib import Path
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry.flow import stage
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.types import RunFacts
run = RunFacts(project="p", name="r", id="i")
done = admit(inspect(Path(sys.argv[1])).artifacts[0], name="m", run=run, policy=Policy())
stage.stage(done.files, Path(sys.argv[2]), transform=done.transform, made=done.made, inputs=done.inputs)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("zero", [2, 3])
def test_memory_and_torch_stay_out(tmp_path: Path, zero: int) -> None:
    """What torch.save wrote of 72 MB comes out bit by bit, with little memory and without torch."""
    held = {"a": torch.randn(3000, 4096), "b": torch.randn(1501, 4096), "c": torch.randn(3)}
    parts.zero_by_torch(tmp_path / "run", held, world=3, stage=zero)
    command = [sys.executable, "-c", STAGE, str(tmp_path / "run"), str(tmp_path / "stage")]
    peak, loaded = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    parts.same(safetensors_torch.load_file(tmp_path / "stage/model.safetensors"), held)
    assert int(peak) < 64 * 1024
    assert loaded == "False"
