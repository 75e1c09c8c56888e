"""What becomes a version and under which name: runs, kinds, the rule's choice and the sidecar."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry.flow import tags
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Give a bench that publishes everything."""
    found = Bench(tmp_path, publish=("all",))
    yield found
    found.catalog.close()


def test_a_name_belongs_to_its_first_run(tmp_path: Path) -> None:
    """Another run under the same name is a finding, not a mixture - unless the rule shares it."""
    for share, kinds in ((False, ["blocked", "done"]), (True, ["done", "done"])):
        place = tmp_path / str(share)
        place.mkdir()
        bench = Bench(place, publish=("all",), name="same", share=share)
        lora_adapter(bench.runs / "team/one/checkpoint-1", seed=1)
        lora_adapter(bench.runs / "team/two/checkpoint-1", seed=2)
        bench.settle()
        bench.work()
        assert sorted(job.state for job in bench.store.jobs()) == kinds
        if not share:
            (blocked,) = bench.store.jobs("state = 'blocked'")
            assert blocked.findings_list[0].code == "name-taken"
            assert "share = true" in (blocked.findings_list[0].fix or "")
        bench.catalog.close()


def test_a_run_made_anew_goes_on_under_its_name(bench: Bench) -> None:
    """The same output folder trained again keeps its name and counts as another run."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1", seed=1)
    bench.settle()
    bench.work()
    shutil.rmtree(run)
    bench.store.gone(str(run / "checkpoint-1"))
    time.sleep(1.1)
    lora_adapter(run / "checkpoint-1", seed=2)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 2
    first, second = sorted(bench.store.jobs("state = 'done'"), key=lambda job: job.n or 0)
    assert first.run_id != second.run_id


def test_a_second_kind_of_one_run_gets_its_own_name(bench: Bench) -> None:
    """An adapter and a full model of one run never share a name."""
    lora_adapter(bench.runs / "team/run/checkpoint-1")
    llama_model(bench.runs / "team/run/checkpoint-2")
    bench.settle()
    bench.work()
    assert sorted(bench.versions()) == ["team-run-model@v1", "team-run@v1"]


def test_a_folder_with_two_artifacts_becomes_two_versions(bench: Bench) -> None:
    """A whole model and an adapter side by side are published apart."""
    folder = llama_model(bench.runs / "team/run/final")
    lora_adapter(folder, readme=None)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 2, bench.store.jobs()
    assert {job.part for job in bench.store.jobs("state = 'done'")} == {"adapter", "model"}


def test_a_backlog_is_thinned_before_it_is_published(tmp_path: Path) -> None:
    """Of five full checkpoints that settled together only best and last go, and the others say why."""
    bench = Bench(tmp_path, best="eval_loss:min")
    for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0), (400, 2.5), (1000, 2.2)):
        trainer_checkpoint(
            bench.runs / f"team/run/checkpoint-{step}", step=step, adapter=False, seed=step,
            log_history=[{"eval_loss": loss, "step": step, "epoch": 1.0}],
        )  # fmt: skip
    bench.settle()
    bench.work()
    done = {job.step for job in bench.store.jobs("state = 'done'")}
    assert done == {200, 1000}
    assert {row["step"] for row in bench.store.skipped("reason = 'not-chosen'")} == {100, 300, 400}
    best = tags.current(open_directory(str(tmp_path / "remote")), "team-run", "best")
    assert best is not None
    assert best.to == next(job.n for job in bench.store.jobs("step = 200"))
    bench.catalog.close()


def test_when_the_last_one_is_broken_the_one_before_it_is_published(tmp_path: Path) -> None:
    """A checkpoint that was not chosen because of a broken newer one is judged again."""
    bench = Bench(tmp_path, publish=("last",))
    trainer_checkpoint(bench.runs / "team/run/checkpoint-1", step=1, adapter=False, seed=1)
    broken = trainer_checkpoint(bench.runs / "team/run/checkpoint-2", step=2, adapter=False, seed=2)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    bench.settle()
    bench.work()
    assert [job.step for job in bench.store.jobs("state = 'done'")] == [1]
    assert [job.step for job in bench.store.jobs("state = 'blocked'")] == [2]
    bench.catalog.close()


def test_the_sidecar_wins_over_the_rule(bench: Bench) -> None:
    """Name and publish: false come from the run's weighbridge.yaml; taken back, the run is taken up again."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1")
    (run / "weighbridge.yaml").write_text("publish: false\n")
    bench.settle()
    bench.work()
    assert not bench.versions()
    assert [row["reason"] for row in bench.store.skipped()] == ["sidecar"]
    bench.intake.papers_changed()
    assert bench.store.skipped()
    (run / "weighbridge.yaml").write_text("name: medical-sft\nowner: lw\n")
    bench.intake.papers_changed()
    bench.work()
    assert list(bench.versions()) == ["medical-sft@v1"]


def test_a_broken_sidecar_blocks_until_it_is_mended(bench: Bench) -> None:
    """It may have said publish: false, so nothing goes before it can be read."""
    run = bench.runs / "team/run"
    lora_adapter(run / "checkpoint-1")
    (run / "weighbridge.yaml").write_text("name: [unclosed\n")
    bench.settle()
    bench.work()
    assert bench.states() == {"checkpoint-1": "blocked"}
    (run / "weighbridge.yaml").write_text("name: mended\n")
    bench.intake.papers_changed()
    bench.work()
    assert list(bench.versions()) == ["mended@v1"]


def test_a_checkpoint_whose_mark_never_came_is_published_after_its_rest(bench: Bench) -> None:
    """trainer_state.json is missing, the weights are whole: at rest it is taken all the same."""
    trainer_checkpoint(bench.runs / "team/run/checkpoint-7", step=7, ended=False)
    bench.settle()
    bench.work()
    (job,) = bench.store.jobs("state = 'done'")
    assert job.step == 7


def test_without_a_metric_the_trainers_own_best_gets_the_tag(tmp_path: Path) -> None:
    """`best` follows trainer_state.json: of two checkpoints the trainer called best the later step counts."""
    bench = Bench(tmp_path, publish=("all",))
    for step, best in ((300, 200), (200, 200), (100, 100)):
        folder = trainer_checkpoint(bench.runs / f"team/run/checkpoint-{step}", step=step, seed=step)
        state = json.loads((folder / "trainer_state.json").read_text())
        state |= {"best_metric": 1.0 / best, "best_global_step": best}
        state["best_model_checkpoint"] = f"/elsewhere/run/checkpoint-{best}"
        (folder / "trainer_state.json").write_text(json.dumps(state))
        bench.settle()
        bench.work()
    best_tag = tags.current(open_directory(str(tmp_path / "remote")), "team-run", "best")
    assert best_tag is not None
    assert best_tag.to == next(job.n for job in bench.store.jobs("step = 200"))
    bench.catalog.close()
