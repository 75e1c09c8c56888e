"""Several checkpoint files in one folder: each is an artifact with its own step, metric, and best or last choice."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import checkpoint, structure
from weighbridge.adapters.inspect import inspect
from weighbridge.daemon.scan import Tree
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, parts
from weighbridge_testlib import containers as c
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.containers import T
from weighbridge_testlib.desk import Desk

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

MONITOR = "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min'}"


def lightning(file: Path, *, step: int, loss: float, best: str, seed: int = 0) -> dict[str, Any]:
    """Write what Lightning's ModelCheckpoint writes, and return the model's tensors."""
    state = parts.state(seed)
    callback = {
        "monitor": "val_loss", "best_model_score": torch.tensor(0.1), "best_model_path": f"/runs/lightning/{best}",
        "current_score": torch.tensor(loss), "dirpath": "/runs/lightning", "last_model_path": "",
    }  # fmt: skip
    body = {
        "epoch": 1, "global_step": step, "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"net.{name}": tensor for name, tensor in state.items()},
        "callbacks": {MONITOR: callback}, "optimizer_states": [], "lr_schedulers": [],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(body, file)
    return state


def row_of_three(bench: Bench) -> dict[str, dict[str, Any]]:
    """Save three checkpoints of a run, the middle one the best."""
    folder = bench.runs / "team/run"
    made = {}
    for step, loss, best in ((10, 0.5, 10), (20, 0.25, 20), (30, 0.75, 20)):
        file = folder / f"epoch=1-step={step}.ckpt"
        made[file.name] = lightning(file, step=step, loss=loss, best=f"epoch=1-step={best}.ckpt", seed=step)
    return made


def test_each_is_published(tmp_path: Path) -> None:
    """Under "all" every file becomes a version with its own step and metric, under the name of the run."""
    bench = Bench(tmp_path, publish=("all",))
    made = row_of_three(bench)
    bench.settle()
    bench.work()
    assert sorted(bench.versions()) == ["team-run@v1", "team-run@v2", "team-run@v3"]
    remote = open_directory(str(tmp_path / "remote"))
    told = [committed(remote, "team-run", n).facts.provenance for n in (1, 2, 3)]
    assert [one.step for one in told] == [10, 20, 30]
    assert [one.metrics["val_loss"] for one in told] == [0.5, 0.25, 0.75]
    for n, state in enumerate(made.values(), 1):
        parts.same(safetensors_torch.load_file(tmp_path / f"remote/models/team-run/v{n}/model.safetensors"), state)
    bench.catalog.close()


@pytest.mark.parametrize(
    ("best", "chosen"), [("val_loss:min", {"20", "30"}), ("val_loss:max", {"30"}), ("train_loss:min", {"30"})]
)
def test_best_and_last(tmp_path: Path, best: str, chosen: set[str]) -> None:
    """By default the best by the rule's metric and the greatest step are published; the rest is set aside."""
    bench = Bench(tmp_path, best=best)
    row_of_three(bench)
    bench.settle()
    bench.work()
    done = {Path(job.path).stem.rpartition("=")[2] for job in bench.store.jobs("state = 'done'")}
    aside = {Path(row["path"]).stem.rpartition("=")[2] for row in bench.store.skipped("reason = 'not-chosen'")}
    assert (done, aside) == (chosen, {"10", "20", "30"} - chosen)
    bench.catalog.close()


def test_best_as_the_trainer_says(tmp_path: Path) -> None:
    """Without a metric in the rule, what the callback called its best when it saved the file is published."""
    bench = Bench(tmp_path, publish=("best",))
    folder = bench.runs / "team/run"
    lightning(folder / "a.ckpt", step=10, loss=0.5, best="z.ckpt", seed=1)
    lightning(folder / "b.ckpt", step=20, loss=0.4, best="b.ckpt", seed=2)
    bench.settle()
    bench.work()
    assert bench.states() == {"b.ckpt": "done"}
    bench.catalog.close()


def test_a_new_file_disturbs_no_other(tmp_path: Path) -> None:
    """A checkpoint saved later is one more job; those beside it are not touched again, nor is one that went away."""
    bench = Bench(tmp_path, publish=("all",))
    folder = bench.runs / "team/run/checkpoints"
    lightning(folder / "a-step=10.ckpt", step=10, loss=0.5, best="", seed=1)
    bench.settle()
    bench.work()
    lightning(folder / "a-step=20.ckpt", step=20, loss=0.4, best="", seed=2)
    (folder / "a-step=10.ckpt").unlink()
    (new,) = bench.settle()
    assert Path(new.path).name == "a-step=20.ckpt"
    bench.work()
    assert sorted(bench.versions()) == ["team-run@v1", "team-run@v2"]
    bench.catalog.close()


def test_a_copy_under_another_name_is_the_same_version(tmp_path: Path) -> None:
    """`last.ckpt` beside the file it repeats does not become a second version."""
    bench = Bench(tmp_path, publish=("all",))
    folder = bench.runs / "team/run"
    lightning(folder / "epoch=1-step=10.ckpt", step=10, loss=0.5, best="")
    shutil.copy(folder / "epoch=1-step=10.ckpt", folder / "last.ckpt")
    bench.settle()
    bench.work()
    assert list(bench.versions()) == ["team-run@v1"]
    assert set(bench.states().values()) == {"done"}
    bench.catalog.close()


def test_papers_beside_it_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and tokenizer of the folder are published with each file, and `registry push FILE` takes them too."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    folder = tmp_path / "run"
    lightning(folder / "a.ckpt", step=1, loss=0.1, best="", seed=1)
    lightning(folder / "b.ckpt", step=2, loss=0.2, best="", seed=2)
    builders.write_json(folder / "config.json", builders.llama_config(dtype="float32"))
    builders.write_tokenizer(folder)
    said = desk.ok("push", folder / "b.ckpt", "--name", "medical", "--json").json
    names = {file["path"] for file in said["files"]}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not any(name.endswith(".ckpt") for name in names)


@pytest.mark.parametrize(
    ("change", "code"),
    [({"num_hidden_layers": 9}, "tensor-missing"), ({"vocab_size": 4096}, "vocab-mismatch"), ({}, None)],
)
def test_the_config_beside_it_is_compared(tmp_path: Path, change: dict[str, Any], code: str | None) -> None:
    """What would be published with a config is held against it, as weights in a model's folder are."""
    lightning(tmp_path / "last.ckpt", step=1, loss=0.1, best="")
    builders.write_json(tmp_path / "config.json", builders.llama_config(dtype="float32") | change)
    found = inspect(tmp_path)
    blocking = {f.code for f in found.findings if f.severity == "block"}
    assert blocking == ({code} if code else set())
    assert found.facts["architecture"] == "LlamaForCausalLM"


def test_the_watch_names_files(tmp_path: Path) -> None:
    """Each torch file of a folder that is no artifact itself is a candidate; what comes and goes is told."""
    run = tmp_path / "team/run"
    run.mkdir(parents=True)
    for name in ("a.ckpt", "b.pt", "notes.txt", "consolidated.00.pth", "rng_state.pth"):
        (run / name).write_bytes(b"x")
    tree = Tree(str(tmp_path))
    assert set(tree.scan().new) == {f"{run}/a.ckpt", f"{run}/b.pt", str(run)}
    listing = tree.look(f"{run}/a.ckpt")
    assert listing is not None
    assert [f.path for f in listing.files] == ["a.ckpt"]
    (run / "config.json").write_text("{}")
    (run / "b.pt").unlink()
    (run / "c.ckpt").write_bytes(b"x")
    later = tree.scan()
    assert (later.new, later.gone) == ([f"{run}/c.ckpt"], [f"{run}/b.pt"])
    assert f"{run}/a.ckpt" in later.changed
    listing = tree.look(f"{run}/a.ckpt")
    assert listing is not None
    assert [f.path for f in listing.files] == ["a.ckpt", "config.json"]
    assert tree.look(f"{run}/b.pt") is None


@pytest.mark.parametrize(
    "beside",
    [
        "adapter_model.safetensors",
        "model_index.json",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "__0_0.distcp",
    ],
)
def test_what_makes_the_folder_the_artifact(beside: str) -> None:
    """A config, an index or a whole model's file makes the folder one artifact; its torch files are none."""
    assert checkpoint.lone_files(["x.ckpt", "y.pt"]) == ["x.ckpt", "y.pt"]
    assert checkpoint.lone_files(["x.ckpt", "y.pt", beside]) == []


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    """A file that is cut is waited for, and so are papers beside it that do not parse yet."""
    file = tmp_path / "a.ckpt"
    lightning(file, step=1, loss=0.1, best="")
    assert structure.complete(file) is None
    (tmp_path / "config.json").write_text("{")
    assert structure.complete(file) == "config.json is not valid JSON yet"
    (tmp_path / "config.json").unlink()
    os.truncate(file, file.stat().st_size - 100)
    assert structure.complete(file) is not None


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    """Monitor, score and best come out of the callback's state; numbers at the top level count as metrics."""
    lightning(tmp_path / "x.ckpt", step=3, loss=0.5, best="x.ckpt")
    facts = inspect(tmp_path).facts
    assert facts["best_so_far"] is True
    assert facts["metrics"] == {"val_loss": 0.5}
    torch.save({"model": parts.state(), "val_acc": 0.75, "epoch": 3}, tmp_path / "x.ckpt")
    facts = inspect(tmp_path).facts
    assert "best_so_far" not in facts
    assert facts["metrics"] == {"val_acc": 0.75}


def test_a_folder_of_several_is_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry push` of the folder names the files, any of which can be pushed."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    folder = tmp_path / "run"
    for step in (1, 2):
        lightning(folder / f"step={step}.ckpt", step=step, loss=0.1, best="", seed=step)
    said = desk.registry("push", folder, "--name", "medical")
    assert said.code == 2
    assert "step=1.ckpt" in said.err
    assert "step=2.ckpt" in said.err


def test_each_holds_an_adapter(tmp_path: Path) -> None:
    """Beside an adapter_config.json every file gives its own adapter, and the folder is nothing besides."""
    bench = Bench(tmp_path, publish=("all",))
    folder = bench.runs / "team/run"
    builders.write_json(folder / "adapter_config.json", builders.lora_config())
    made = []
    for step in (1, 2):
        lora = {k: torch.randn(s) for k, (_, s, _) in builders.lora_tensors().items()}
        base = {f"base_model.model.{k}": v for k, v in parts.state(step).items()}
        torch.save({"state_dict": lora | base, "global_step": step}, folder / f"step={step}.ckpt")
        made.append(lora)
    assert {Path(job.path).name for job in bench.settle()} == {"step=1.ckpt", "step=2.ckpt"}
    bench.work()
    for n, lora in enumerate(made, 1):
        place = tmp_path / f"remote/models/team-run/v{n}"
        assert (place / "adapter_config.json").exists()
        parts.same(safetensors_torch.load_file(place / "adapter_model.safetensors"), lora)
    assert set(bench.states().values()) == {"done"}
    bench.catalog.close()


def test_what_older_ones_say_of_themselves(tmp_path: Path) -> None:
    """Up to Lightning 1.5 a callback's state stands under its class, which is never looked up."""
    key = c.name("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint")
    state = {"monitor": "Val/Acc", "current_score": T("F32", (), [0.75]), "best_model_path": "/home/x/last.ckpt"}
    body = {
        "state_dict": {"net.w": T("F32", (2, 2), 1.0)},
        "callbacks": {key: state},
        "pytorch-lightning_version": "1.4",
    }
    (tmp_path / "last.ckpt").write_bytes(c.torch_zip(body))
    facts = inspect(tmp_path).facts
    assert (facts["metrics"], facts["best_so_far"]) == ({"Val/Acc": 0.75}, True)
