"""Weights in parts, published: the daemon and `registry push` put them together, tensor by tensor what torch holds."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import origins, structure
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.plan import Policy
from weighbridge.registry.cli.main import main
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.verify import verify_source
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.types import RunFacts
from weighbridge_testlib import builders, parts
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.yard import Yard

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
dcp_to_torch_save = pytest.importorskip("torch.distributed.checkpoint.format_utils").dcp_to_torch_save

RUN = RunFacts(project="medical", name="sft", id="run-1")


def loaded(folder: Path) -> dict[str, Any]:
    """Return what the library loads of a folder's safetensors files."""
    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(file)
    return tensors


def version(bench: Bench, name: str, n: int = 1) -> Path:
    """Return the folder of a version on the bench's remote."""
    return bench.place / "remote/models" / name / f"v{n}"


def facts(bench: Bench, name: str, n: int = 1) -> Any:
    """Return the sealed facts of a version."""
    return committed(open_directory(str(bench.place / "remote")), name, n).facts


def test_daemon_to_teammate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2, ZeRO-3 and distributed checkpoints go through the real daemon and come out of `registry pull` equal."""
    with Yard(tmp_path) as yard:
        second = parts.zero(yard.runs / "team/second/checkpoint-5", world=3, stage=2)
        builders.write_json(yard.runs / "team/second/checkpoint-5/config.json", builders.llama_config(dtype="float32"))
        builders.write_tokenizer(yard.runs / "team/second/checkpoint-5")
        third = parts.zero(yard.runs / "team/third", world=2, stage=3, tag="global_step7", step=7)
        state = parts.state()
        parts.pieces(yard.runs / "team/pieces/checkpoint-9/pytorch_model_fsdp_0", {"model": state})
        done = yard.daemon_once()
        assert done.returncode == 0, done.stderr
        for key, value in yard.env.items():
            monkeypatch.setenv(key, value)
        for name, wanted in (("team-second", second), ("team-third", third), ("team-pieces", state)):
            assert main(["pull", f"{name}@v1", str(tmp_path / name), "-q"]) == 0
            parts.same(loaded(tmp_path / name), wanted)
        files = {path.name for path in (tmp_path / "team-second").iterdir()}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files
        assert not any(name.endswith((".pt", ".distcp")) or name == "latest" for name in files)
        yard.check(contents=3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tag", ["global_step5", "pytorch_model"])
def test_where_deepspeed_writes(tmp_path: Path, stage: int, tag: str) -> None:
    """Below a numbered checkpoint, straight in the run, or as accelerate does it: one version, step and name right."""
    bench = Bench(tmp_path, publish=("all",))
    inner = parts.zero(bench.runs / "team/inner/checkpoint-5", stage=stage, tag=tag)
    outer = parts.zero(bench.runs / "team/outer", stage=stage, tag=tag)
    bench.settle()
    bench.work()
    assert set(bench.versions()) == {"team-inner@v1", "team-outer@v1"}
    parts.same(loaded(version(bench, "team-inner")), inner)
    parts.same(loaded(version(bench, "team-outer")), outer)
    assert facts(bench, "team-inner").provenance.step == 5
    bench.catalog.close()


def test_what_the_version_says_of_it(tmp_path: Path) -> None:
    """The manifest names what the weights were put together from, what was left behind, and the true tensor counts."""
    bench = Bench(tmp_path, publish=("all",))
    parts.zero(bench.runs / "team/run/checkpoint-5", world=2, stage=2)
    bench.settle()
    bench.work()
    told = facts(bench, "team-run")
    (edge,) = told.lineage
    assert (edge.relation, edge.content) == ("extracted-from", None)
    assert edge.ref == "DeepSpeed ZeRO-2, 2 ranks, global_step5"
    (note,) = [f for f in told.findings if f.code == "weights-assembled"]
    assert note.severity == "note"
    assert len(note.data["inputs"]) == 3
    assert (told.weights.tensors, told.weights.parameters, told.weights.bytes, told.weights.shards) == (
        21,
        5712,
        22848,
        1,
    )
    assert {left.reason for left in told.left_out} == {"resume-only"}
    bench.catalog.close()


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        (3, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        (3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        (2, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        (1, "mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_rank_waits_and_is_named(tmp_path: Path, stage: int, file: str) -> None:
    """A folder is not finished while a file of the recorded world is missing or cut; the reason names it."""
    folder = tmp_path / "checkpoint-5"
    parts.zero(folder, world=3, stage=stage)
    (folder / "trainer_state.json").write_text("{}")
    assert structure.complete(folder) is None
    rank = folder / "global_step5" / file
    body = rank.read_bytes()
    rank.write_bytes(body[: len(body) // 2])
    reason = structure.complete(folder)
    assert reason is not None
    assert file in reason
    rank.unlink()
    reason = structure.complete(folder)
    assert reason is not None
    assert file in reason
    rank.write_bytes(body)
    assert structure.complete(folder) is None


def test_a_missing_piece_waits_and_is_named(tmp_path: Path) -> None:
    """A distributed checkpoint is not finished while a file that .metadata names is missing or too short."""
    folder = tmp_path / "checkpoint-5"
    parts.pieces(folder / "pytorch_model_fsdp_0", {"model": parts.state()})
    assert structure.complete(folder) is None
    piece = next((folder / "pytorch_model_fsdp_0").glob("*.distcp"))
    body = piece.read_bytes()
    for rest in (body[:-100], None):
        piece.unlink()
        if rest is not None:
            piece.write_bytes(rest)
        reason = structure.complete(folder)
        assert reason is not None
        assert piece.name in reason


def test_the_preview_tells_the_same(tmp_path: Path) -> None:
    """`registryd once --dry-run` shows the files and sizes that are then published, and what is refused for what."""
    with Yard(tmp_path) as yard:
        parts.zero(yard.runs / "team/whole/checkpoint-5", stage=2)
        parts.zero(yard.runs / "team/torn/checkpoint-5", world=3, stage=3)
        gone = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
        (yard.runs / "team/torn/checkpoint-5/global_step5" / gone).unlink()
        for run, value in (("file", 1.0), ("broken", float("nan"))):
            folder = yard.runs / "team" / run
            folder.mkdir()
            state = parts.state() | {"model.norm.weight": torch.full((16,), value)}
            torch.save({"state_dict": state, "optimizer": {"state": torch.zeros(9999)}}, folder / "last.ckpt")
        hollow = yard.runs / "team/hollow/checkpoint-5"
        parts.zero(hollow, stage=2, world=2)
        parts.emptied(hollow / "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt")
        shown = yard.daemon_once("--dry-run", "--json", "--backfill")
        rows = {Path(row["path"]).parent.name: row for row in json.loads(shown.stdout)["artifacts"]}
        assert (rows["whole"]["publish"], rows["whole"]["kind"], rows["whole"]["step"]) == (True, "model", 5)
        assert gone in rows["torn"]["reason"]
        assert "NaN" in rows["broken"]["reason"]
        assert "zeros" in rows["hollow"]["reason"]
        assert [w["code"] for w in rows["file"]["warnings"]][:1] == ["config-absent"]
        assert not yard.remote.exists()
        yard.daemon_once("--backfill")
        remote = open_directory(str(yard.remote))
        assert {row["name"] for row in rows.values() if row["publish"]} == {"team-whole", "team-file"}
        for run in ("whole", "file"):
            manifest = committed(remote, f"team-{run}", 1)
            told = {(f["path"], f["size"], f["role"]) for f in rows[run]["files"]}
            assert told == {(f.path, f.size, f.role) for f in manifest.files if f.role != "card"}
            assert rows[run]["size"] == sum(size for _, size, _ in told)


def test_papers_of_the_run_go_along(tmp_path: Path) -> None:
    """Config and tokenizer that lie once in the run are published with each tag of it; a change of them is seen."""
    bench = Bench(tmp_path, publish=("all",))
    run = bench.runs / "team/run"
    parts.zero(run, tag="global_step5", step=5)
    parts.zero(run, tag="global_step7", step=7)
    builders.write_json(run / "config.json", builders.llama_config(dtype="float32"))
    builders.write_tokenizer(run)
    bench.settle()
    bench.work()
    assert sorted(bench.versions()) == ["team-run@v1", "team-run@v2"]
    for n, step in ((1, 5), (2, 7)):
        names = {path.name for path in version(bench, "team-run", n).iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
        told = facts(bench, "team-run", n)
        assert (told.provenance.step, told.weights.architecture) == (step, "LlamaForCausalLM")
        manifest = committed(open_directory(str(tmp_path / "remote")), "team-run", n)
        assert verify_source(run / f"global_step{step}", manifest).findings == []
    builders.write_json(run / "config.json", builders.llama_config(dtype="float32", rope_theta=5000.0))
    assert len(bench.settle()) == 2
    bench.catalog.close()


@pytest.mark.parametrize("band", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_pieces_cut_across_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, band: int) -> None:
    """Tensors cut over rows and columns by many ranks come out as torch's own converter joins them, band by band."""
    monkeypatch.setattr(origins, "BAND", band)
    shapes = {"square": (12, 10), "cube": (5, 6, 4), "row": (1, 40), "line": (17,), "scalar": (), "whole": (3, 4)}
    cuts = {"square": [[3, 7], [4]], "cube": [[2], [1, 5], [2]], "row": [[], [13]], "line": [[5, 6]]}
    held = {n: torch.arange(math.prod(s)).reshape(s).to(getattr(torch, dtype)) for n, s in shapes.items()}
    parts.cut_pieces(tmp_path / "run/step-5", held, cuts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "run/step-5", tmp_path / "joined.pt")
    parts.same(torch.load(tmp_path / "joined.pt"), held)
    done = admit(inspect(tmp_path / "run/step-5").artifacts[0], name="run", run=RUN, policy=Policy())
    staging.stage(done.files, tmp_path / "stage", transform=done.transform, made=done.made, inputs=done.inputs)
    parts.same(loaded(tmp_path / "stage"), held)


def test_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry push` of such a folder says beforehand what would be written, with its true sizes, and writes that."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    wanted = parts.zero(tmp_path / "run/checkpoint-5", stage=3, world=3)
    builders.write_json(tmp_path / "run/checkpoint-5/config.json", builders.llama_config(dtype="float32"))
    told = desk.ok("push", tmp_path / "run/checkpoint-5", "--name", "medical", "--dry-run", "--json").json
    assert not desk.root.joinpath("models").exists()
    done = desk.ok("push", tmp_path / "run/checkpoint-5", "--name", "medical", "--json").json
    assert done["ref"] == "medical@v1"
    assert (told["bytes"], told["files"]) == (done["bytes"], done["files"])
    place = desk.root / "models/medical/v1"
    assert all((place / file["path"]).stat().st_size == file["size"] for file in done["files"])
    parts.same(loaded(place), wanted)


@pytest.mark.parametrize("wrapper", ["_forward_module.", "module.", "model._orig_mod."])
def test_wrappers_are_taken_off(tmp_path: Path, wrapper: str) -> None:
    """What a strategy or compiler put in front of every name is taken off, as it is of a torch file; ties follow."""
    shapes = {wrapper + name: shape for name, shape in parts.MODEL.items()}
    shared = {f"{wrapper}lm_head.twin": f"{wrapper}model.norm.weight"}
    folder = tmp_path / "epoch=1-step=20.ckpt"
    held = parts.zero(folder, shapes, stage=2, tag="checkpoint", lead="bf16_", shared=shared)
    (one,) = inspect(folder).artifacts
    assert (one.facts["stripped_prefix"], one.facts["aliases"]) == (wrapper, {"lm_head.twin": "model.norm.weight"})
    done = admit(one, name="run", run=RUN, policy=Policy())
    staging.stage(done.files, tmp_path / "stage", transform=done.transform, made=done.made, inputs=done.inputs)
    parts.same(loaded(tmp_path / "stage"), {name: held[wrapper + name] for name in parts.MODEL})
