"""The scan is the truth: what it finds, what it asks when nothing happens, and links followed once."""

import os
import shutil
import time
from pathlib import Path

from weighbridge.daemon.scan import Tree
from weighbridge_testlib.builders import deepspeed_state, llama_model, lora_adapter, run_root


def test_a_scan_finds_candidates_at_any_depth(tmp_path: Path) -> None:
    """Every folder that may hold an artifact is found, the run's root among them."""
    run_root(tmp_path / "team/run", steps=(1, 2))
    lora_adapter(tmp_path / "run/a/b/c/d/checkpoint-7")
    (tmp_path / "empty").mkdir()
    found = Tree(str(tmp_path)).scan().new
    names = sorted(os.path.relpath(p, tmp_path) for p in found)
    assert names == ["run/a/b/c/d/checkpoint-7", "team/run", "team/run/checkpoint-1", "team/run/checkpoint-2"]


def test_an_idle_scan_asks_containers_only(tmp_path: Path) -> None:
    """With events at work, finished folders that are not young cost nothing."""
    for number in range(30):
        folder = lora_adapter(tmp_path / f"run/checkpoint-{number}")
        os.utime(folder, (time.time() - 7200,) * 2)
    tree = Tree(str(tmp_path))
    tree.scan()
    tree.scan(hinted=True)
    idle = tree.scan(hinted=True)
    assert idle.asked <= 3
    assert not idle.new
    assert not idle.changed
    full = tree.scan(full=True)
    assert full.asked >= 32


def test_without_events_young_folders_are_asked_at_every_scan(tmp_path: Path) -> None:
    """On a network file system one stat a folder finds a late file."""
    folder = lora_adapter(tmp_path / "run/final")
    tree = Tree(str(tmp_path))
    for _ in range(3):
        tree.scan()
    (folder / "tokenizer.json").write_text("{}")
    assert tree.scan().changed == [str(folder)]


def test_a_folder_made_anew_under_its_name_is_noticed(tmp_path: Path) -> None:
    """Deleted and made again between two scans: changed, not unchanged."""
    folder = lora_adapter(tmp_path / "run/final", seed=1)
    tree = Tree(str(tmp_path))
    tree.scan()
    tree.scan()
    before = tree.look(str(folder))
    shutil.rmtree(folder)
    lora_adapter(folder, seed=2)
    scan = tree.scan()
    assert str(folder) in scan.changed + scan.new
    assert tree.look(str(folder)) != before


def test_vanished_folders_are_named(tmp_path: Path) -> None:
    """Rotation takes folders away; everything below goes with them."""
    lora_adapter(tmp_path / "run/checkpoint-1")
    lora_adapter(tmp_path / "run/checkpoint-2")
    tree = Tree(str(tmp_path))
    tree.scan()
    shutil.rmtree(tmp_path / "run/checkpoint-1")
    assert tree.scan().gone == [str(tmp_path / "run/checkpoint-1")]
    shutil.rmtree(tmp_path / "run")
    assert tree.scan().gone == [str(tmp_path / "run/checkpoint-2")]


def test_a_missing_root_proves_nothing(tmp_path: Path) -> None:
    """An unmounted root makes no folder vanish, and what comes back is as it was."""
    root = tmp_path / "watched"
    lora_adapter(root / "run/checkpoint-1")
    tree = Tree(str(root))
    tree.scan()
    root.rename(tmp_path / "away")
    scan = tree.scan()
    assert tree.missing
    assert not scan.gone
    (tmp_path / "away").rename(root)
    assert not tree.scan().gone
    assert not tree.missing


def test_links_are_followed_once(tmp_path: Path) -> None:
    """An output folder on another disk is found through its link; `last`, loops and second links are no second ones."""
    disk = tmp_path / "disk2/real"
    lora_adapter(disk / "checkpoint-3")
    root = tmp_path / "watched"
    root.mkdir()
    (root / "run").symlink_to("../disk2/real")
    (disk / "last").symlink_to("checkpoint-3")
    (disk / "loop").symlink_to("..")
    (root / "again").symlink_to("../disk2/real")
    (root / "up").symlink_to("..")
    found = Tree(str(root)).scan().new
    assert [Path(p).name for p in found] == ["checkpoint-3"]


def test_a_link_whose_target_comes_later_is_found(tmp_path: Path) -> None:
    """A link to nothing is asked again at every scan."""
    root = tmp_path / "watched"
    root.mkdir()
    (root / "run").symlink_to("../disk2/real")
    tree = Tree(str(root))
    tree.scan()
    tree.scan()
    lora_adapter(tmp_path / "disk2/real/checkpoint-3")
    assert [Path(p).name for p in tree.scan().new] == ["checkpoint-3"]


def test_ignored_folders_are_never_entered(tmp_path: Path) -> None:
    """Patterns decide before descending; hidden folders and our own remotes are left alone."""
    for name in ("wandb/x", "tmp-checkpoint-5", ".hidden/x", "remote/models/x/v1", "run/checkpoint-1"):
        lora_adapter(tmp_path / name)
    tree = Tree(str(tmp_path), ("wandb/", "tmp-*"), (str(tmp_path / "remote"),))
    assert [Path(p).name for p in tree.scan().new] == ["checkpoint-1"]
    assert not any("remote" in p for p in tree.nodes)


def test_a_look_takes_in_what_belongs_to_the_artifact(tmp_path: Path) -> None:
    """Rank folders count for their checkpoint; checkpoints, logs and ignored names do not count for their run."""
    run = run_root(tmp_path / "run", steps=(1,))
    deepspeed_state(run / "checkpoint-1", step=1, ranks=2)
    (run / "runs").mkdir()
    (run / "runs/events.out.tfevents.1").write_text("x")
    (run / "notes.tmp").write_text("x")
    tree = Tree(str(tmp_path), ("*.tmp",))
    tree.scan()
    root = tree.look(str(run))
    checkpoint = tree.look(str(run / "checkpoint-1"))
    assert root is not None
    assert checkpoint is not None
    assert not [f.path for f in root.files if "/" in f.path or f.path == "notes.tmp"]
    assert "global_step1/zero_pp_rank_1_mp_rank_00_optim_states.pt" in {f.path for f in checkpoint.files}


def test_parts_of_a_model_are_no_artifacts_of_their_own(tmp_path: Path) -> None:
    """Other forms and rank folders inside a model belong to it."""
    model = llama_model(tmp_path / "run/model")
    llama_model(model / "original")
    (model / "onnx").mkdir()
    (model / "onnx/model.onnx").write_bytes(b"x")
    assert [Path(p).name for p in Tree(str(tmp_path)).scan().new] == ["model"]


def test_a_change_within_one_tick_of_the_clock_is_found_by_the_next_scan(tmp_path: Path) -> None:
    """A folder that just changed is listed once more, because its time may hide a second change."""
    run = tmp_path / "run"
    lora_adapter(run / "checkpoint-1")
    tree = Tree(str(tmp_path))
    tree.scan()
    tree.scan()
    lora_adapter(run / "checkpoint-2")
    moment = run.stat()
    tree.scan()
    lora_adapter(run / "checkpoint-3")
    os.utime(run, ns=(moment.st_atime_ns, moment.st_mtime_ns))
    assert str(run / "checkpoint-3") in tree.scan().new
