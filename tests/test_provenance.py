"""Where a model came from: only what lies on disk, every number safe, no token and no unasked-for path."""

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weighbridge_testlib.builders as build
from weighbridge.adapters import code_state, history, provenance, recipes, sidecar
from weighbridge.registry import manifest
from weighbridge.registry.types import BestFacts, Provenance, RunFacts

RUN = RunFacts(project="medical", name="sft-0412", id="run-1")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


def through_json(told: Provenance) -> Any:
    """Return a provenance as it stands in a manifest."""
    return json.loads(manifest.canonical(told))


def test_a_checkpoint_tells_step_epoch_metrics_and_best(tmp_path: Path) -> None:
    """What the trainer wrote is read: step, epoch, last loss, last evaluation, the best with its metric and step."""
    log = [
        {"loss": 2.0, "step": 10, "epoch": 0.1, "learning_rate": 1e-4},
        {"eval_loss": 1.5, "eval_runtime": 3.0, "step": 10, "epoch": 0.1},
        {"loss": 1.0, "step": 20, "epoch": 0.2},
        {"eval_loss": 0.9, "eval_samples_per_second": 7.0, "step": 20, "epoch": 0.2},
    ]
    folder = build.trainer_checkpoint(
        tmp_path / "checkpoint-20",
        step=20,
        log_history=log,
        state={"best_metric": 0.9, "best_model_checkpoint": "/home/lw/run/checkpoint-20", "epoch": 0.2},
    )
    told = provenance.gather(folder, RUN, adapter_config={"peft_version": "0.17.1"}, host="trainer-03")
    assert (told.step, told.epoch, told.host) == (20, 0.2, "trainer-03")
    assert told.metrics == {"loss": 1.0, "eval_loss": 0.9}
    assert told.best == BestFacts(metric="eval_loss", value=0.9, step=20)
    assert told.log_history == log
    assert told.history == "training.json"
    assert told.training["max_steps"] == 20
    assert told.packages == {"peft": "0.17.1"}
    assert told.code is None
    assert "/home" not in repr(told)


def test_nothing_on_disk_gives_nothing(tmp_path: Path) -> None:
    """Without a trainer state, a card and a recipe every fact is absent; our own packages are not the trainer's."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    told = provenance.gather(folder, RUN)
    assert (told.step, told.epoch, told.best, told.history, told.code, told.purpose) == (None,) * 6
    assert (told.metrics, told.training, told.data, told.packages, told.log_history) == ({}, {}, [], {}, [])
    assert told.created_at is not None


def test_a_result_at_the_root_has_the_history_of_its_last_checkpoint(tmp_path: Path) -> None:
    """Checkpoints are compared as numbers; the step of another folder is not taken for the root's own."""
    run = build.run_root(tmp_path / "run", steps=(90, 100))
    (run / "trainer_state.json").unlink(missing_ok=True)
    told = provenance.gather(run, RUN)
    assert told.step is None
    assert [e["step"] for e in told.log_history] == [100]
    assert provenance.gather(run, RUN, step=100).step == 100


@pytest.mark.parametrize(("evaluations", "losses"), [(0, 5000), (100, 5000), (256, 10), (900, 900), (3, 0)])
def test_a_long_history_keeps_evaluations_and_the_ends(evaluations: int, losses: int) -> None:
    """At most 256 points, evaluations first, losses evenly, first and last always, order kept."""
    entries: list[dict[str, Any]] = [{"loss": 1.0, "step": i} for i in range(losses)]
    entries += [{"eval_loss": 1.0, "step": i} for i in range(evaluations)]
    entries.sort(key=lambda e: e["step"])
    kept = history.thinned(entries)
    assert len(kept) == min(256, len(entries))
    assert [e["step"] for e in kept] == sorted(e["step"] for e in kept)
    told = sum(history.is_evaluation(e) for e in kept)
    assert told == min(evaluations, 256)
    if losses and evaluations < 250:
        steps = [e["step"] for e in kept if "loss" in e]
        assert (steps[0], steps[-1]) == (0, losses - 1)


def test_endless_epochs_and_huge_numbers_are_safe() -> None:
    """The largest integer means "until the data ends"; what no 64-bit reader holds is text; NaN is a word."""
    state = history.parse(
        {
            "global_step": 100_000,
            "epoch": math.nan,
            "num_train_epochs": 9223372036854775807,
            "max_steps": 100_000,
            "total_flos": 10**40,
            "best_metric": math.inf,
            "best_model_checkpoint": "./checkpoint-98000",
            "log_history": [
                {"loss": math.nan, "step": 1},
                {"eval_x": 10**30, "step": 2},
                {"deep": {"a": 1}},
                "x",
                None,
            ],
        }
    )
    assert state.step == 100_000
    assert state.epoch == "NaN"
    assert state.settings["max_steps"] == 100_000
    assert "num_train_epochs" not in state.settings
    assert state.best == BestFacts(metric="unknown", value="Infinity", step=98000)
    assert state.history[0] == {"loss": "NaN", "step": 1}
    assert state.metrics["loss"] == "NaN"
    json.loads(manifest.canonical(msgspec.to_builtins(state.best)))


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "global_step",
                "epoch",
                "best_metric",
                "best_global_step",
                "best_model_checkpoint",
                "log_history",
                "max_steps",
            ]
        ),
        NUMBERS | st.lists(st.dictionaries(st.sampled_from(["loss", "eval_a", "step", "x"]), NUMBERS), max_size=6),
    )
)
def test_no_trainer_state_makes_the_reader_fail(document: dict[str, Any]) -> None:
    """Any value under any name gives facts that a manifest can hold."""
    state = history.parse(document)
    json.loads(manifest.canonical([dict(state.metrics), list(state.history), dict(state.settings), state.epoch]))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"log_history": 5, "global_step": "x"}'])
def test_a_broken_trainer_state_is_none(tmp_path: Path, body: bytes) -> None:
    """A file that is no state is passed over without a word."""
    (tmp_path / "trainer_state.json").write_bytes(body)
    told = provenance.gather(tmp_path, RUN)
    assert told.step is None


RECIPE = """
model_name_or_path: /home/lw/models/Qwen2.5-7B   # local
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: medical_llm, acme/notes
output_dir: saves/x
per_device_train_batch_size: 1
learning_rate: 1.0e-4
bf16: true
hub_token: {token}
report_to: none
"""


def test_a_recipe_gives_settings_and_data_but_no_path_and_no_token(tmp_path: Path) -> None:
    """Only known names are taken from a LLaMA-Factory recipe; local bases, tokens and outputs stay where they are."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    token = "hf_" + "aBcDeFgHiJ" * 4
    (folder / "sft.yaml").write_text(RECIPE.replace("{token}", token))
    told = provenance.gather(folder, RUN)
    assert told.training == {
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "q_proj,v_proj",
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "bf16": True,
    }
    assert told.data == [{"name": "medical_llm", "source": "sft.yaml"}, {"id": "acme/notes", "source": "sft.yaml"}]
    assert "/home" not in repr(told)
    assert token not in repr(told)


def test_axolotl_and_argument_files_are_read(tmp_path: Path) -> None:
    """Sections, lists of data sets and JSON arguments are read; a YAML without settings is none."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    (folder / "axolotl.yml").write_text(
        "base_model: x/y\ndatasets:\n- path: acme/alpaca\n  type: alpaca\n- path: ./local.jsonl\nmicro_batch_size: 2\n"
        "lr_scheduler: cosine\nadapter: qlora\n"
    )
    (folder / "mergekit.yaml").write_text("slices: []\nmerge_method: slerp\n")
    build.write_json(folder / "training_args.json", {"seed": 7, "optim": "adamw", "logging_dir": "/home/lw/x"})
    told = provenance.gather(folder, RUN)
    assert told.training == {
        "micro_batch_size": 2,
        "lr_scheduler": "cosine",
        "adapter": "qlora",
        "seed": 7,
        "optim": "adamw",
    }
    assert told.data == [{"id": "acme/alpaca", "source": "axolotl.yml"}]


CARD = """---
license: mit
datasets: [acme/notes, /home/lw/x.json]
---
# x

### Training hyperparameters

The following hyperparameters were used during training:
- learning_rate: 5e-05
- lr_scheduler_type: cosine
- output_dir: /home/lw/out

### Framework versions

- PEFT 0.11.1
- Transformers 4.41.2
- Pytorch 2.3.0+cu121
"""


def test_a_trainers_card_tells_settings_packages_and_data(tmp_path: Path) -> None:
    """The tables of a generated card are evidence; requirements.txt adds pinned versions."""
    folder = build.lora_adapter(tmp_path / "a", readme=CARD)
    (folder / "requirements.txt").write_text("trl==0.9.4\nnumpy>=2\n# x==1\npeft==9.9\n")
    told = provenance.gather(folder, RUN)
    assert told.training == {"learning_rate": 5e-05, "lr_scheduler_type": "cosine"}
    assert told.packages == {"peft": "0.11.1", "transformers": "4.41.2", "torch": "2.3.0+cu121", "trl": "0.9.4"}
    assert told.data == [{"id": "acme/notes", "source": "README.md"}]


def test_results_files_give_metrics(tmp_path: Path) -> None:
    """all_results.json holds for a result without a state; speeds are no metrics."""
    folder = build.lora_adapter(tmp_path / "a", readme=None)
    build.write_json(
        folder / "all_results.json", {"eval_loss": 1.5, "train_loss": 1.7, "eval_runtime": 2.0, "epoch": 3.0}
    )
    assert provenance.gather(folder, RUN).metrics == {"eval_loss": 1.5, "train_loss": 1.7}


def test_the_sidecar_wins(tmp_path: Path) -> None:
    """Owner, data and purpose that a person wrote stand before what was found."""
    folder = build.lora_adapter(tmp_path / "a", readme=CARD)
    note = sidecar.parse(b"owner: lw\ndata: acme/other@v3\npurpose: triage of notes\nid: my-run\n")
    told = provenance.gather(folder, RUN, note)
    assert (told.owner, told.purpose) == ("lw", "triage of notes")
    assert told.data == [{"id": "acme/other", "revision": "v3"}]


def git(folder: Path, url: str, *, packed: bool = False, head: str = "ref: refs/heads/main\n") -> Path:
    """Lay out the files of a repository by hand."""
    place = folder / ".git"
    (place / "refs" / "heads").mkdir(parents=True)
    (place / "HEAD").write_text(head)
    if packed:
        (place / "packed-refs").write_text(f"# pack-refs with: peeled\n{COMMIT} refs/heads/main\n")
    else:
        (place / "refs" / "heads" / "main").write_text(COMMIT + "\n")
    (place / "config").write_text(
        f'[core]\n\tbare = false\n\tfsmonitor = touch /tmp/never\n[remote "origin"]\n\turl = {url}\n'
    )
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_the_code_above_a_run_is_recorded(tmp_path: Path, packed: bool) -> None:
    """Commit, branch and remote of the repository a run lies in; whether it was dirty stays unknown."""
    repo = git(
        tmp_path / "repo", "https://lw:" + "tok3nTOK3N" + "@git.example.org/acme/x.git?private_token=y", packed=packed
    )
    folder = build.lora_adapter(repo / "out" / "run1")
    told = provenance.gather(folder, RUN)
    assert told.code == {
        "remote": "https://git.example.org/acme/x.git",
        "commit": COMMIT,
        "branch": "main",
        "dirty": None,
        "source": ".git",
    }


def test_the_sidecar_names_the_code_and_a_noted_commit_wins(tmp_path: Path) -> None:
    """`code` points at another folder, a worktree too; a commit the training wrote down stands before today's head."""
    repo = git(tmp_path / "repo", "git@git.example.org:acme/x.git")
    tree = tmp_path / "tree"
    tree.mkdir()
    inner = repo / ".git" / "worktrees" / "tree"
    inner.mkdir(parents=True)
    (inner / "HEAD").write_text("ref: refs/heads/main\n")
    (inner / "commondir").write_text("../..\n")
    (tree / ".git").write_text(f"gitdir: {inner}\n")
    folder = build.lora_adapter(tmp_path / "run")
    told = code_state.of_run(folder, str(tree))
    assert told is not None
    assert (told["commit"], told["remote"]) == (COMMIT, "git.example.org:acme/x.git")
    (folder / "git_hash.txt").write_text("f" * 40)
    noted = code_state.of_run(folder, str(tree))
    assert noted is not None
    assert (noted["commit"], noted["source"]) == ("f" * 40, "git_hash.txt")


@pytest.mark.parametrize("head", ["ref: refs/heads/../../../secret\n", "not a commit\n", "", "ref: refs/heads/none\n"])
def test_odd_repositories_tell_nothing(tmp_path: Path, head: str) -> None:
    """A head that leads nowhere, or out of the repository, is no state."""
    git(tmp_path, "x", head=head)
    assert code_state.of_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("https://user:secret@host.test/a/b.git", "https://host.test/a/b.git"),
        ("https://ghp_x@github.com/a/b", "https://github.com/a/b"),
        ("https://a:b@c:d@host.test/x#frag", "https://host.test/x"),
        ("ssh://git@host.test:22/a/b", "ssh://host.test:22/a/b"),
        ("git@github.com:a/b.git", "github.com:a/b.git"),
        ("/srv/git/x.git", None),
        ("file:///srv/git/x", None),
        ("../x", None),
    ],
)
def test_remotes_lose_every_credential(url: str, clean: str | None) -> None:
    """User, password, token and query are taken off; a path of this machine is no remote."""
    assert code_state.clean_remote(url) == clean


def test_redaction_takes_names_and_paths_away(tmp_path: Path) -> None:
    """Where paths may not go, neither do host, user name and values with a path; a declared owner stays."""
    told = provenance.gather(build.lora_adapter(tmp_path / "a"), RUN, host="h")
    told = msgspec.structs.replace(
        told,
        training={"a": "/home/lw/x", "seed": 1},
        data=[{"id": "acme/x", "path": "/data/x/y"}, {"id": "/home/lw/y"}],
        purpose="see /home/lw/notes",
        code={"remote": "x.test:a", "commit": COMMIT},
    )
    assert provenance.redact(told, keep_paths=True) == told
    public = provenance.redact(told, keep_paths=False, declared_owner="lw")
    assert (public.owner, public.host, public.purpose) == ("lw", None, None)
    assert public.training == {"seed": 1}
    assert public.data == [{"id": "acme/x"}]
    assert public.code == {"remote": "x.test:a", "commit": COMMIT}
    assert provenance.redact(told, keep_paths=False).owner is None


def test_times_follow_the_files(tmp_path: Path) -> None:
    """The end of writing is the newest file, the beginning at the latest the oldest one; odd clocks do no harm."""
    folder = build.lora_adapter(tmp_path / "a")
    for i, file in enumerate(sorted(folder.iterdir())):
        os.utime(file, (1_700_000_000 + i, 1_700_000_000 + i))
    assert provenance.newest(folder) == "2023-11-14T22:13:22.000Z"
    assert provenance.earliest(folder) == "2023-11-14T22:13:20.000Z"
    assert provenance.moment(1e20) is None
    assert provenance.gather(folder, RUN, created_at="2026-01-01T00:00:00Z").created_at == "2026-01-01T00:00:00Z"


def test_a_provenance_fits_into_a_manifest(tmp_path: Path) -> None:
    """Everything that is gathered survives canonical JSON."""
    folder = build.trainer_checkpoint(tmp_path / "c", step=5, log_history=[{"loss": math.inf, "step": 1}])
    assert through_json(provenance.gather(folder, RUN))["log_history"] == [{"loss": "Infinity", "step": 1}]


@given(st.text(max_size=300))
def test_no_recipe_makes_the_reader_fail(text: str) -> None:
    """Any text as card body gives settings and packages or none."""
    recipes.training([], text)
    recipes.packages([], [None], "### Framework versions\n" + text)


def test_a_git_link_in_a_circle_is_no_state(tmp_path: Path) -> None:
    """Links that lead back to themselves, in the place of the folder or of what `.git` names, hold no Git state."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / ".git").write_text("gitdir: loop\n")
    assert code_state.of_folder(tmp_path) is None
    assert code_state.of_folder(tmp_path / "loop") is None
