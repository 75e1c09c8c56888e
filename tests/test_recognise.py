"""What a folder is: checkpoints, results, runs, staging, links, other containers; and what the daemon asks by names."""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import checkpoint, layout, listing, structure
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders


def look(folder: Path, **options: Any) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder, **options)
    return found, {f.code for f in found.findings if f.severity != "note"}


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_trainer_checkpoint(tmp_path: Path, adapter: bool, ranks: int) -> None:
    """A Trainer checkpoint with adapter or model, with or without DeepSpeed, is named as such with its step."""
    folder = tmp_path / "checkpoint-280"
    builders.trainer_checkpoint(folder, step=280, adapter=adapter, deepspeed_ranks=ranks)
    found, codes = look(tmp_path)
    kind = "adapter" if adapter else "full-model"
    assert (found.outcome, found.artifact, codes) == ("accept", f"trainer-checkpoint+{kind}", set())
    assert found.facts["step"] == 280
    assert found.facts["artifact_root"] == "checkpoint-280"
    assert found.facts["resumable"] is True
    if ranks:
        assert (found.facts["optim_ranks_expected"], found.facts["optim_ranks_found"]) == (ranks, ranks)
        assert found.facts["latest_tag"] == "global_step280"
    direct, _ = look(folder)
    assert direct.artifact == found.artifact
    assert direct.artifact_root == "."


def test_missing_rank_of_deepspeed(tmp_path: Path) -> None:
    """A missing optimizer rank warns and names the file: the adapter can go, the training cannot go on."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-9", step=9, deepspeed_ranks=6)
    (folder / "global_step9" / "zero_pp_rank_5_mp_rank_00_optim_states.pt").unlink()
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("warn", {"rank-state-missing"})
    assert found.facts["missing_files"] == ["checkpoint-9/global_step9/zero_pp_rank_5_mp_rank_00_optim_states.pt"]
    assert (found.facts["optim_ranks_expected"], found.facts["optim_ranks_found"]) == (6, 5)
    assert (found.facts["resumable"], found.facts["publishable"]) == (False, True)


def test_missing_model_state_of_zero_3(tmp_path: Path) -> None:
    """Under ZeRO-3 every rank has a model part too, and a missing one is named."""
    folder = builders.lora_adapter(tmp_path / "checkpoint-5")
    builders.deepspeed_state(folder, step=5, ranks=3, stage=3)
    builders.write_json(folder / "trainer_state.json", builders.trainer_state(5))
    (folder / "global_step5" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    found, _ = look(folder)
    assert found.facts["zero_stage"] == 3
    assert found.facts["missing_files"] == ["global_step5/zero_pp_rank_1_mp_rank_00_model_states.pt"]


def test_latest_that_names_no_folder(tmp_path: Path) -> None:
    """A `latest` that names an absent tag warns with both names."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-9", step=9, deepspeed_ranks=2)
    (folder / "latest").write_text("global_step11\n")
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"latest-tag-missing"})
    assert (found.facts["latest_tag"], found.facts["tags"]) == ("global_step11", ["global_step9"])
    assert found.facts["resumable"] is False


def test_checkpoint_without_its_end_mark_waits(tmp_path: Path) -> None:
    """A Trainer checkpoint that lacks trainer_state.json is not finished."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-9", step=9, ended=False)
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("wait", {"end-mark-missing"})
    assert found.facts["missing_files"] == ["checkpoint-9/trainer_state.json"]
    assert structure.complete(folder) == "trainer_state.json is not there yet"
    assert structure.complete(folder, mark=False) is None


def test_short_file_in_an_unfinished_checkpoint_waits(tmp_path: Path) -> None:
    """A file that is short in a checkpoint without end mark is still being written, not damaged."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-9", step=9, ended=False)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert look(folder)[0].outcome == "wait"
    builders.write_json(folder / "trainer_state.json", builders.trainer_state(9))
    assert look(folder)[0].outcome == "refuse"


def test_folder_named_like_a_checkpoint_with_an_adapter_alone(tmp_path: Path) -> None:
    """checkpoint-5 with nothing of a trainer inside owes no end mark and is an adapter with a step."""
    builders.lora_adapter(tmp_path / "checkpoint-5")
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    assert found.facts["step"] == 5


@pytest.mark.parametrize(
    ("best", "exists"),
    [
        ("/old/place/out/checkpoint-10", True),
        ("out/checkpoint-20", True),
        ("/scratch/x/checkpoint-30", False),
        ("C:\\runs\\checkpoint-30", False),
    ],
)
def test_best_checkpoint(tmp_path: Path, best: str, exists: bool) -> None:
    """A best checkpoint counts as there when a folder of its name lies beside, wherever the run has moved."""
    for step in (10, 20):
        builders.trainer_checkpoint(tmp_path / f"checkpoint-{step}", step=step, state={"best_model_checkpoint": best})
    found, codes = look(tmp_path / "checkpoint-20")
    assert found.facts["best_model_checkpoint_exists"] is exists
    assert codes == (set() if exists else {"best-checkpoint-gone"})


def test_state_without_weights(tmp_path: Path) -> None:
    """Training state alone is a trainer's checkpoint in which nothing can be published."""
    builders.write_json(tmp_path / "trainer_state.json", builders.trainer_state(12030))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("refuse", "trainer-checkpoint", {"no-artifact"})
    assert found.facts["step"] == 12030


def test_adapter_one_level_deeper(tmp_path: Path) -> None:
    """An adapter that a callback saved inside the checkpoint takes its step from the folder above."""
    builders.lora_adapter(tmp_path / "checkpoint-10" / "adapter_model")
    builders.write_json(tmp_path / "checkpoint-10" / "trainer_state.json", builders.trainer_state(10))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    assert (found.facts["artifact_root"], found.facts["step"]) == ("checkpoint-10/adapter_model", 10)


def test_named_adapter(tmp_path: Path) -> None:
    """An adapter that PEFT saved under its own name is found with that name."""
    builders.lora_adapter(tmp_path / "out" / "style")
    (tmp_path / "out" / "README.md").write_text(builders.card())
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    assert (found.facts["artifact_root"], found.facts["adapter_name"]) == ("out/style", "style")


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("adapter", [True, False])
def test_run_root(tmp_path: Path, adapter: bool) -> None:
    """A run with a result and checkpoints lists all of them; the root is the result and equal bytes are told."""
    builders.run_root(tmp_path / "run", steps=(100, 1000, 200), adapter=adapter)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "run-folder", set())
    every = ["run", "run/checkpoint-100", "run/checkpoint-1000", "run/checkpoint-200"]
    assert sorted(found.facts["artifacts"]) == sorted(every)
    assert found.artifact_root == "run"
    assert sorted(found.facts["same_bytes"]) == ["run", "run/checkpoint-200"]
    assert found.facts["newest"] == "run/checkpoint-1000"


def test_steps_are_numbers(tmp_path: Path) -> None:
    """The newest checkpoint is the one with the greatest number, not the last in the alphabet."""
    builders.run_root(tmp_path, steps=(9000, 10000), result=False)
    assert look(tmp_path)[0].facts["newest"] == "checkpoint-10000"


def test_checkpoints_of_two_runs(tmp_path: Path) -> None:
    """Checkpoints with other configs come from another run: the highest step need not be the newest result."""
    builders.trainer_checkpoint(tmp_path / "checkpoint-700", step=700, rank=4)
    builders.trainer_checkpoint(tmp_path / "checkpoint-100", step=100, rank=8)
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("warn", {"runs-mixed"})
    assert (found.facts["distinct_runs"], found.facts["newest_by_step"]) == (2, "checkpoint-700")


def test_histories_that_contradict_each_other(tmp_path: Path) -> None:
    """Two checkpoints whose logs differ at the same step come from two runs, even under one config."""
    for step, loss in ((100, 1.0), (200, 2.0)):
        log = [{"step": 50, "loss": loss}, {"step": step, "loss": 0.5}]
        builders.trainer_checkpoint(tmp_path / f"checkpoint-{step}", step=step, log_history=log)
    assert look(tmp_path)[0].facts["distinct_runs"] == 2


def test_extended_run_is_one_run(tmp_path: Path) -> None:
    """A run taken up again for more steps stays one run, and the order of targets says nothing."""
    builders.trainer_checkpoint(tmp_path / "checkpoint-100", step=100, max_steps=100, targets=("q_proj", "v_proj"))
    builders.trainer_checkpoint(tmp_path / "checkpoint-200", step=200, max_steps=200, targets=("v_proj", "q_proj"))
    assert look(tmp_path)[0].outcome == "accept"


def test_broken_checkpoint_makes_the_run_refuse(tmp_path: Path) -> None:
    """A run is as good as its worst artifact; the others say so themselves."""
    builders.run_root(tmp_path, steps=(1, 2))
    weights = tmp_path / "checkpoint-1" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found, _ = look(tmp_path)
    assert found.outcome == "refuse"
    assert {a.relative: a.outcome for a in found.artifacts} == {
        ".": "accept", "checkpoint-1": "refuse", "checkpoint-2": "accept",
    }  # fmt: skip


def test_alone_looks_at_the_folder_itself(tmp_path: Path) -> None:
    """Asked alone, a run root is judged without its checkpoints."""
    builders.run_root(tmp_path, steps=(1, 2))
    (tmp_path / "checkpoint-1" / "adapter_model.safetensors").write_bytes(b"")
    found, codes = look(tmp_path, alone=True)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    assert not any(f.path.startswith("checkpoint-") for f in found.files)


def test_reference_adapter(tmp_path: Path) -> None:
    """A reference adapter in a folder of the result is a second artifact, the root is the result."""
    builders.lora_adapter(tmp_path)
    builders.lora_adapter(tmp_path / "reference", seed=1)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "lora-adapter", set())
    assert found.facts["artifacts"] == [".", "reference"]


def test_model_and_adapter_in_one_folder(tmp_path: Path) -> None:
    """A model and an adapter in one folder warn: they are two artifacts."""
    builders.llama_model(tmp_path, shards=2)
    builders.lora_adapter(tmp_path)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("warn", "full-model+adapter", {"artifacts-share-folder"})
    assert found.facts["kinds"] == ["full-model", "lora-adapter"]
    assert (found.facts["rank"], found.facts["shards_expected"]) == (4, 2)
    adapter, model = sorted(found.artifacts, key=lambda a: str(a.kind))
    assert "config.json" not in [f.path for f in adapter.files]
    assert "adapter_config.json" not in [f.path for f in model.files]


def test_slices_above_a_consolidated_model(tmp_path: Path) -> None:
    """A trainer's slices above a consolidated model are resume-only, the model below is the artifact."""
    builders.llama_model(tmp_path / "model" / "consolidated", shards=2)
    for rank in (1, 2):
        name = f"shard-0000{rank}-model-00001-of-00001.safetensors"
        builders.write_safetensors(tmp_path / "model" / name, {"x": ("F32", (4,), 1.0)})
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "full-model", set())
    assert found.facts["artifact_root"] == "model/consolidated"
    assert len(found.facts["resume_only_files"]) == 2
    assert [p.name for p in checkpoint.find(tmp_path)] == ["consolidated"]


# ------------------------------------------------------------------------------------------------ staging, links, names


@pytest.mark.parametrize(
    "name",
    [
        "tmp-checkpoint-500",
        "checkpoint-600-tmp",
        "checkpoint-7.tmp",
        ".run.staging-ab12cd34",
        "x.incomplete",
        "tmp_checkpoint-1",
    ],
)
def test_staging_names(tmp_path: Path, name: str) -> None:
    """A folder under a staging name is waited for, and what is finished beside it is named."""
    builders.lora_adapter(tmp_path / name)
    builders.trainer_checkpoint(tmp_path / "checkpoint-400", step=400)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("wait", "run-folder", {"staging-name"})
    assert (found.facts["staging"], found.facts["accepted"]) == ([name], ["checkpoint-400"])
    assert [p.name for p in checkpoint.find(tmp_path)] == ["checkpoint-400"]
    assert look(tmp_path / name)[0].outcome == "wait"
    assert structure.complete(tmp_path / name) == f"the folder still has the staging name {name}"


@pytest.mark.parametrize(
    "name", ["checkpoint-500", "high-temp", "template", "my-tmpl", "attempt-1", "final", "partial-freeze"]
)
def test_names_that_are_not_staging(name: str) -> None:
    """Ordinary names are not taken for staging ones."""
    assert not layout.is_staging_name(name)


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    """A linked root is followed, `last` is no second artifact, a loop does not hang."""
    builders.trainer_checkpoint(tmp_path / "disk" / "run" / "checkpoint-5", step=5)
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched" / "run").symlink_to(tmp_path / "disk" / "run")
    (tmp_path / "disk" / "run" / "last").symlink_to("checkpoint-5")
    (tmp_path / "disk" / "run" / "loop").symlink_to("..")
    found, codes = look(tmp_path / "watched")
    assert codes == set()
    assert [a.relative for a in found.artifacts] == ["run/checkpoint-5"]
    assert [os.path.relpath(p, tmp_path / "watched") for p in checkpoint.find(tmp_path / "watched")] == [
        "run/checkpoint-5"
    ]


def test_walk_of_a_tree_full_of_loops_is_finite(tmp_path: Path) -> None:
    """Every directory is walked once however many links lead to it."""
    for name in "abc":
        (tmp_path / name).mkdir()
        for other in "abc":
            (tmp_path / name / f"to-{other}").symlink_to(tmp_path / other)
        (tmp_path / name / "up").symlink_to(tmp_path)
    assert sorted(f.relative for f in listing.walk(tmp_path)) == [".", "a", "b", "c"]


@pytest.mark.parametrize(
    ("pattern", "hidden"),
    [("wandb/", True), ("wandb", True), ("wan*", True), ("a/wandb", True), ("*.tmp", False), ("b/wandb", False)],
)
def test_ignore_patterns(tmp_path: Path, pattern: str, hidden: bool) -> None:
    """A pattern hides folders by name, by path from the root, or with wildcards, before they are entered."""
    builders.lora_adapter(tmp_path / "a" / "wandb")
    assert (checkpoint.find(tmp_path, [pattern]) == []) is hidden


def test_file_in_progress_is_seen_despite_an_ignore_pattern(tmp_path: Path) -> None:
    """Ignoring *.tmp does not hide that somebody is still writing."""
    folder = builders.lora_adapter(tmp_path)
    (folder / "adapter_model.safetensors.tmp").write_bytes(b"x")
    found, codes = look(folder, ignore=["*.tmp"])
    assert (found.outcome, codes) == ("wait", {"still-writing"})
    assert found.facts["in_progress"] == ["adapter_model.safetensors.tmp"]


def test_nothing_known(tmp_path: Path) -> None:
    """A folder of other things and an empty one are refused without a guess."""
    (tmp_path / "notes.txt").write_text("hello")
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("refuse", None, {"no-artifact"})
    (tmp_path / "empty").mkdir()
    assert look(tmp_path / "empty")[0].outcome == "refuse"


# ---------------------------------------------------------------------------------------------------------- containers


CONTAINERS: dict[str, bytes] = {
    "gguf": b"GGUF\x03\0\0\0" + bytes(24),
    "ggml-legacy": b"lmgg" + bytes(32),
    "tflite": b"\x1c\0\0\0TFL3" + bytes(32),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(32),
    "onnx": b"\x08\x07\x12\x07pytorch" + bytes(8),
    "pickle": b"\x80\x04}\x94.",
    "torch-legacy": bytes.fromhex("80028a0a6cfc9c46f9206aa850192e80028d"),
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12\n",
    "link-text": b"../../blobs/abc",
    "empty": b"",
    "unknown": b"hello world, this is text",
}


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_container_by_content(tmp_path: Path, name: str) -> None:
    """A container is told by its bytes, whatever its suffix."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTAINERS[name])
    assert sniff.container(path) == name


@pytest.mark.parametrize(
    ("members", "name"),
    [
        (["m/data.pkl", "m/data/0"], "torch-zip"),
        (["m/data.pkl", "m/constants.pkl", "m/code/__torch__.py"], "torchscript"),
        (["a.npy"], "npz"),
    ],
)
def test_zip_containers(tmp_path: Path, members: list[str], name: str) -> None:
    """The kinds of zip are told apart by what is in them, without opening a member."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, b"x")
    assert sniff.container(path) == name
    path.write_bytes(path.read_bytes()[:-10])
    assert sniff.container(path) == "torch-zip"


def test_safetensors_by_content(tmp_path: Path) -> None:
    """A safetensors file is known under any suffix."""
    path = builders.write_safetensors(tmp_path / "weights.bin", {"x": ("F32", (1,), 1.0)})
    assert sniff.container(path) == "safetensors"


@pytest.mark.parametrize("suffix", ["gguf", "pt", "ckpt", "onnx"])
def test_a_damaged_container_of_another_kind(tmp_path: Path, suffix: str) -> None:
    """Another container of which only the first bytes are sound is refused, never taken for a sound one."""
    content = {"gguf": "gguf", "pt": "pickle", "ckpt": "torch-legacy", "onnx": "onnx"}[suffix]
    (tmp_path / f"model.{suffix}").write_bytes(CONTAINERS[content])
    found, codes = look(tmp_path)
    assert found.outcome == "refuse"
    assert codes
    assert found.kind is None


def test_card_metadata_named_like_a_pipeline(tmp_path: Path) -> None:
    """model_index.json without a class name does not make a pipeline."""
    builders.llama_model(tmp_path)
    builders.write_json(tmp_path / "model_index.json", {"name": "tiny", "size": "50M"})
    assert look(tmp_path)[0].artifact == "full-model"


# ------------------------------------------------------------------------------------------------- asked by the daemon


def test_candidate_by_names() -> None:
    """Names alone tell whether a folder may hold an artifact."""
    assert checkpoint.is_candidate(["adapter_config.json"])
    assert checkpoint.is_candidate(["model-00001-of-00002.safetensors"])
    assert checkpoint.is_candidate(["model.safetensors.index.json"])
    assert checkpoint.is_candidate(["epoch=3.ckpt"])
    assert not checkpoint.is_candidate(["optimizer.pt", "rng_state_0.pth", "trainer_state.json", "training_args.bin"])
    assert not checkpoint.is_candidate(["README.md", "tokenizer.json", "log.txt"])


def test_end_marks() -> None:
    """A checkpoint ends with trainer_state.json, a root save with training_args.bin."""
    assert checkpoint.end_mark(["trainer_state.json"], "checkpoint-5") == "trainer_state.json"
    assert checkpoint.end_mark(["training_args.bin"], "checkpoint-5") is None
    assert checkpoint.end_mark(["training_args.bin", "adapter_model.safetensors"], "run") == "training_args.bin"
    assert checkpoint.end_mark(["model.safetensors"], "run") is None


@pytest.mark.parametrize("shards", [1, 3])
def test_every_prefix_of_a_save_is_incomplete(tmp_path: Path, shards: int) -> None:
    """However far a writer has come, structure says that the model is not whole until its last byte is there."""
    whole = builders.llama_model(tmp_path / "whole", shards=shards, tokenizer=False)
    order = sorted(whole.glob("*.safetensors")) + sorted(whole.glob("*.index.json")) + [whole / "config.json"]
    part = tmp_path / "part"
    part.mkdir()
    for file in order:
        stored = file.read_bytes().rstrip(b"\n")
        for cut in (0, 5, len(stored) // 2, len(stored) - 1):
            (part / file.name).write_bytes(stored[:cut])
            assert structure.complete(part) is not None, (file.name, cut)
        (part / file.name).write_bytes(stored)
    assert structure.complete(part) is None


def test_every_prefix_of_an_adapter_is_incomplete(tmp_path: Path) -> None:
    """An adapter is whole only with both halves, in whichever order they are written."""
    whole = builders.lora_adapter(tmp_path / "whole", readme=None)
    names = ["adapter_config.json", "adapter_model.safetensors"]
    for number, order in enumerate((names, names[::-1])):
        part = tmp_path / f"part{number}"
        part.mkdir()
        for name in order:
            stored = (whole / name).read_bytes()
            (part / name).write_bytes(stored[: len(stored) // 2])
            assert structure.complete(part) is not None
            (part / name).write_bytes(stored)
        assert structure.complete(part) is None


def test_structure_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A folder that has vanished raises, so that nobody takes it for whole."""
    with pytest.raises(FileNotFoundError):
        structure.complete(tmp_path / "gone")


def test_many_folders_are_found_quickly(tmp_path: Path) -> None:
    """Names of a hundred runs are enough; nothing is opened."""
    for run in range(40):
        folder = tmp_path / f"run-{run}" / f"checkpoint-{run}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").touch(mode=0o000)
        (folder / "optimizer.pt").touch()
    assert len(checkpoint.find(tmp_path)) == 40
