"""Weights in one file per rank: DeepSpeed, distributed checkpoints, Megatron and plain rank files, complete or not."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders, ranks
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import llama_tensors, lora_tensors
from weighbridge_testlib.containers import T

MODEL = {label: tuple(shape) for label, (_, shape, _) in llama_tensors().items()}


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_complete_zero_folder(tmp_path: Path, stage: int, world: int, groups: int) -> None:
    """Shapes, stage and world come from the rank files; the weights are counted as they would come out."""
    ranks.zero_folder(tmp_path / "run", MODEL, world=world, stage=stage, groups=groups)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "deepspeed-zero", set())
    facts = found.facts
    assert (facts["zero_stage"], facts["world_size"]) == (stage, world)
    assert (facts["tensor_count"], facts["param_count"], facts["payload_bytes"]) == (21, 5712, 22848)
    assert facts["step"] == 5


@pytest.mark.parametrize("lead", ["", "bf16_", "fp16_"])
def test_a_checkpoint_that_is_a_folder(tmp_path: Path, lead: str) -> None:
    """Lightning's DeepSpeed strategy writes a folder named like a file, with a tag of its own name."""
    ranks.zero_folder(tmp_path / "epoch=1-step=20.ckpt", MODEL, lead=lead, tag="checkpoint")
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "deepspeed-zero", set())
    assert found.facts["artifact_root"] == "epoch=1-step=20.ckpt"


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        (2, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (2, "mp_rank_00_model_states.pt"),
        (3, "zero_pp_rank_2_mp_rank_00_model_states.pt"),
        (3, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_rank(tmp_path: Path, stage: int, file: str) -> None:
    """A file that the recorded world asks for is named, also where its rank is the last one."""
    ranks.zero_folder(tmp_path / "run", MODEL, world=3, stage=stage)
    (tmp_path / "run/global_step5" / file).unlink()
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact) == ("refuse", "deepspeed-zero")
    assert "rank-file-missing" in codes
    assert found.facts["missing_files"] == [f"run/global_step5/{file}"]


def test_ranks_of_an_earlier_run(tmp_path: Path) -> None:
    """Files beyond the recorded world are left over and do not disturb."""
    ranks.zero_folder(tmp_path / "run", MODEL, world=2)
    tag = tmp_path / "run/global_step5"
    shutil.copy(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("warn", {"shards-stale"})
    assert found.facts["stale_files"] == ["run/global_step5/zero_pp_rank_2_mp_rank_00_optim_states.pt"]
    assert found.facts["tensor_count"] == 21


@pytest.mark.parametrize("stage", [2, 3])
def test_adapter_and_frozen_base(tmp_path: Path, stage: int) -> None:
    """Both sizes are told: what a whole rebuild gives and what the adapter alone is."""
    lora = {label: tuple(shape) for label, (_, shape, _) in lora_tensors(rank=2).items()}
    ranks.zero_folder(tmp_path / "run", lora, stage=stage, frozen=MODEL)
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("warn", {"adapter-inside"})
    assert (found.facts["lora_tensors"], found.facts["base_tensors"]) == (8, 21)
    assert found.facts["dtype_histogram"]["BF16"]["tensors"] == 21


def test_buffers_and_shared_names(tmp_path: Path) -> None:
    """Buffers come out as they are stored, a shared name is an alias."""
    ranks.zero_folder(
        tmp_path, MODEL, buffers={"rope.inv_freq": T("F32", (4,), 1.0)}, shared={"head.weight": "model.norm.weight"}
    )
    found, _ = look(tmp_path)
    assert found.facts["tensor_count"] == 22
    assert found.facts["aliases"] == {"head.weight": "model.norm.weight"}


def test_the_tag_folder_itself(tmp_path: Path) -> None:
    """Pointed at the tag folder, the answer is the same."""
    ranks.zero_folder(tmp_path, MODEL)
    found, _ = look(tmp_path / "global_step5")
    assert (found.outcome, found.artifact, found.facts["tensor_count"]) == ("accept", "deepspeed-zero", 21)


def test_beside_an_exported_adapter(tmp_path: Path) -> None:
    """Where the weights were exported, rank files only serve to go on."""
    builders.lora_adapter(tmp_path / "checkpoint-5")
    ranks.zero_folder(tmp_path / "checkpoint-5", MODEL)
    found, _ = look(tmp_path)
    assert found.artifact == "trainer-checkpoint+adapter"


# ------------------------------------------------------------------------------------------------------------- Megatron


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_megatron(tmp_path: Path, tp: int, pp: int) -> None:
    """A complete iteration is recognised with its sizes; one rank less refuses and names the folder."""
    place = ranks.megatron_folder(tmp_path, iteration=10, tp=tp, pp=pp)
    found, _ = look(tmp_path)
    assert found.artifact == "megatron"
    assert found.outcome == ("warn" if tp * pp > 1 else "accept")
    assert (found.facts["step"], found.facts["tensor_parallel_size"], found.facts["missing_dirs"]) == (10, tp, [])
    if tp > 1:
        gone = max(place.iterdir())
        shutil.rmtree(gone)
        found, codes = look(tmp_path)
        assert (found.outcome, codes) == ("refuse", {"rank-file-missing"})
        assert found.facts["missing_dirs"] == [f"iter_0000010/{gone.name}"]


# ----------------------------------------------------------------------------------------------------------- rank files


@pytest.mark.parametrize(
    "pattern",
    ["model_world_size_3_rank_{}.pt", "rank{}.pth", "model-rank-{}-of-3.bin", "mp_rank_0{}.pt", "consolidated.0{}.pth"],
)
def test_plain_rank_files(tmp_path: Path, pattern: str) -> None:
    """Files that count ranks are one set, never joined by guessing; a hole is named."""
    for rank in range(3):
        (tmp_path / pattern.format(rank)).write_bytes(c.torch_zip({"w": T("F32", (2, 2), 1.0)}))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("refuse", "rank-sharded", {"rank-files"})
    assert found.facts["world_size"] == 3
    (tmp_path / pattern.format(1)).unlink()
    found, codes = look(tmp_path)
    assert codes == {"rank-files", "rank-file-missing"}
    assert found.facts["missing_files"] == [pattern.format(1)]


def test_one_file_is_no_set(tmp_path: Path) -> None:
    """A single file that happens to be called rank 0 is a checkpoint like any other."""
    (tmp_path / "consolidated.00.pth").write_bytes(c.torch_zip({"w": T("F32", (2, 2), 1.0)}))
    assert look(tmp_path)[0].artifact == "ckpt"


@pytest.mark.parametrize("gone", [None, "shard-00002-model-00001-of-00002.safetensors"])
def test_slices_in_safetensors_are_no_model(tmp_path: Path, gone: str | None) -> None:
    """A rank's part of each tensor is told as such, a missing rank by its file; beside a model they are state."""
    for rank in (1, 2, 3):
        for part in (1, 2):
            name = f"shard-{rank:05d}-model-{part:05d}-of-00002.safetensors"
            if name != gone:
                builders.write_safetensors(tmp_path / name, {f"w.{part}": ("F32", (2, 4), 0.5)})
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind) == ("refuse", "rank-sharded", None)
    assert codes == ({"rank-files"} if gone is None else {"rank-files", "rank-file-missing"})
    assert found.facts["world_size"] == 3
    assert found.facts["missing_files"] == ([] if gone is None else [gone])
    builders.llama_model(tmp_path, shards=2)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "full-model", set())
    assert not any(f.publish for f in found.files if f.path.startswith("shard-"))


# ---------------------------------------------------------------------------------------------- distributed checkpoints


def saved(folder: Path, value: Any) -> None:
    """Save a distributed checkpoint with torch itself."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    tensors = {
        key: {label: torch.full(shape, 0.5) for label, shape in table.items()} if isinstance(table, dict) else table
        for key, table in value.items()
    }
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    """The model's table is found beside an optimizer's, and every data file is named."""
    saved(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL, "optimizer": {"state": (3,)}})
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "ckpt-dcp", set())
    assert (found.facts["tensor_count"], found.facts["key_prefix"]) == (21, "model.")
    gone = next((tmp_path / "pytorch_model_fsdp_0").glob("*.distcp"))
    gone.unlink()
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("refuse", {"data-missing"})
    assert found.facts["missing_files"] == [f"pytorch_model_fsdp_0/{gone.name}"]
    (tmp_path / "pytorch_model_fsdp_0/.metadata").unlink()
    assert look(tmp_path)[0].outcome in {"wait", "refuse"}


def test_data_files_without_metadata_wait(tmp_path: Path) -> None:
    """The metadata is written last: without it the save has not ended."""
    (tmp_path / "__0_0.distcp").write_bytes(b"PK\3\4")
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("wait", "ckpt-dcp", {"metadata-missing"})
    assert found.facts["missing_files"] == [".metadata"]


# ------------------------------------------------------------------------------------- tensor-parallel safetensors

NAMED = [
    "rank{}.safetensors", "model-rank-{}-part-0.safetensors", "model_tp{}.safetensors", "model.mp_rank_0{}.safetensors",
    "model-tp0{}-of-04.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("gone", [None, 1])
def test_a_rank_s_part_as_safetensors(tmp_path: Path, name: str, config: bool, gone: int | None) -> None:
    """Parts of tensors are told as parts, never as copies of each other, and the finding says what to do instead."""
    cut = {n: (d, (s[0] // 2, *s[1:]), None) for n, (d, s, _) in builders.llama_tensors().items() if len(s) > 1}
    for rank in {0, 1, 2, 3} - {gone}:
        (tmp_path / name.format(rank)).write_bytes(builders.safetensors_bytes(cut))
    if config:
        builders.write_json(tmp_path / "config.json", builders.llama_config())
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind) == ("refuse", "rank-sharded", None)
    assert codes == ({"rank-files"} if gone is None else {"rank-files", "rank-file-missing"})
    assert found.facts["world_size"] == 4
    assert found.facts["missing_files"] == ([] if gone is None else [name.format(gone)])
    assert all(f.fix for f in found.findings if f.severity == "block")


def test_torch_s_own_slices_beside_a_config(tmp_path: Path) -> None:
    """A config beside them makes no model of them, and the finding names the function that joins them."""
    builders.write_json(tmp_path / "config.json", builders.llama_config())
    for rank in (1, 2):
        (tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors").write_bytes(
            builders.safetensors_bytes({"w": ("F32", (2, 2), None)})
        )
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("refuse", {"rank-files"})
    (told,) = [f for f in found.findings if f.code == "rank-files"]
    assert "consolidate_safetensors_files" in str(told.fix)


@pytest.mark.parametrize(
    "names", [["lora_rank4.safetensors", "lora_rank8.safetensors"], ["epoch-0.safetensors", "epoch-1.safetensors"]]
)
def test_numbers_that_count_no_ranks(tmp_path: Path, names: list[str]) -> None:
    """The rank of an adapter, and the number of a checkpoint, are no ranks of a machine."""
    for name in names:
        (tmp_path / name).write_bytes(builders.safetensors_bytes({"w": ("F32", (2, 2), None)}))
    assert inspect(tmp_path).artifact != "rank-sharded"
