"""Merges by rule whose results are run and compared: what is told, set apart or made in fp32, and what a kill costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import worker
from weighbridge.adapters.merge import batch, behave, outside
from weighbridge.adapters.merge.staging import OUT
from weighbridge.config.settings import SlurmSettings
from weighbridge.daemon.executors import slurm_words
from weighbridge.daemon.executors.protocol import Work
from weighbridge.registry import errors
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.types import Facts
from weighbridge_testlib.merge_bench import MergeBench
from weighbridge_testlib.merging import distances

RIGHT, WRONG = distances(0.01, 0.02), distances(0.5, 0.01)


def comparing(place: Path, shards: int = 1, **of_rule: str) -> MergeBench:
    """Return a bench with a published adapter and its base, whose merges are compared."""
    bench = MergeBench(place, **of_rule)
    bench.settings = bench.settings._replace(behaviour=True)
    bench.restart()
    bench.base(shards=shards)
    bench.publish(bench.adapter(5))
    return bench


def facts_of(place: Path, name: str) -> Facts:
    """Return what the manifest of a merged version says."""
    return committed(open_directory(str(place / "remote")), name, 1).facts


@pytest.mark.parametrize(
    ("seen", "retry", "end"),
    [
        (RIGHT, "never", ("done",)),
        ("no room", "never", ("done", "merge-not-compared")),
        (WRONG, "never", ("quarantined",)),
        (distances(float("nan"), 0.01), "never", ("quarantined",)),
        (WRONG, "fp32", ("quarantined",)),  # in fp32 it is wrong as well
    ],
)
def test_a_result_by_rule_is_compared_where_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: behave.Distances | str, retry: str, end: tuple[str, ...]
) -> None:
    """Figures reach the manifest, a result that computes something else is set apart, a missing comparison warns."""
    state, *warned = end
    monkeypatch.setattr(behave, "compare", lambda *_: seen)
    bench = comparing(tmp_path, merge_retry=retry)
    (merge,) = bench.merge_all()
    assert merge.state == state
    if state == "quarantined":
        (told,) = json.loads(merge.findings)
        assert (told["code"], told["data"]["behaviour"]["distance"]) == ("merge-unproven", 1.0)
        assert set(bench.versions()) == {"team-run-1@v1"}
        apart = [path.name.split(".")[1] for path in (tmp_path / "scratch").glob("jobs/team/*/.*-failed")]
        assert sorted(apart) == ["merged-bf16", "merged-fp32"][: 1 + (retry == "fp32")]
        return
    facts = facts_of(tmp_path, "team-run-1-merged-bf16")
    assert [one.code for one in facts.findings if one.code == "merge-not-compared"] == warned
    (proven,) = [one for one in facts.findings if one.code == "merge-proven"]
    assert proven.data["behaviour"] == (behave.facts(RIGHT) if not warned else None)
    card = (tmp_path / "remote/models/team-run-1-merged-bf16/v1/README.md").read_text()
    assert ("0.01 away from those of base and adapter together, the base's 1" in card) == (not warned)


def test_what_a_precision_was_too_coarse_for_is_made_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With merge_retry = "fp32" a result that failed its comparison is made again, and published where it passes."""
    monkeypatch.setattr(behave, "compare", lambda _, plan, *__: RIGHT if plan.dtype == "F32" else WRONG)
    bench = comparing(tmp_path, merge_retry="fp32")
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_name) == ("done", "team-run-1-merged-fp32")
    assert set(bench.versions()) == {"team-run-1@v1", "team-run-1-merged-fp32@v1"}


def written(stage: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of the weights that a merge has written."""
    files = {path.name: path.stat() for path in (stage / OUT).glob("*.safetensors")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in files.items()}


@pytest.mark.long
def test_a_killed_comparison_does_not_cost_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was merged keeps its bytes when the comparison's child is ended; the next try really runs all three."""
    real = worker.jailed
    died: list[dict[str, tuple[int, int]]] = []

    def dying(task: str, *arguments: Any, **options: Any) -> worker.Ended:
        if task == behave.TASK and not died:
            (stage,) = (tmp_path / "scratch").glob("jobs/team/*/.merged-bf16.merge-*")
            died.append(written(stage))
            raise errors.WeighbridgeError("the child process did not finish", why="it was ended by SIGKILL")
        return real(task, *arguments, **options)

    monkeypatch.setattr(worker, "jailed", dying)
    bench = comparing(tmp_path, shards=2)
    bench.round()
    bench.round()
    (stage,) = (tmp_path / "scratch").glob("jobs/team/*/.merged-bf16.merge-*")
    assert died == [written(stage)]
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries) == ("done", 2)
    (proven,) = [f for f in facts_of(tmp_path, "team-run-1-merged-bf16").findings if f.code == "merge-proven"]
    assert proven.data["kept_files"] == sorted(died[0])
    seen = proven.data["behaviour"]
    assert 0 < seen["error"] < seen["noise"] < seen["distance"]
    assert seen["kl"]["merged"] < seen["kl"]["base"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errors.MemoryShortError("the work ran out of memory", why="3 bytes are free"), "3 bytes are free"),
        (errors.LimitError("the child used too much", why="an hour"), "an hour"),
        (None, "the torch extra is not installed"),
    ],
)
def test_a_job_of_a_cluster_compares_as_far_as_its_node_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: errors.WeighbridgeError | None, why: str
) -> None:
    """The job asks for the memory of the comparison, makes it where it is made, and answers why it was not made."""
    real = worker.jailed

    def short(task: str, *arguments: Any, **options: Any) -> worker.Ended:
        if task == behave.TASK and error is not None:
            raise error
        return real(task, *arguments, **options)

    monkeypatch.setattr(worker, "jailed", short)
    if error is None:
        monkeypatch.setattr(outside, "find_spec", lambda _: None)
    bench = comparing(tmp_path)
    monkeypatch.setattr(bench.executors["local"], "submit", lambda _: "7")
    bench.round()
    (merge,) = bench.merges.merges()
    stage = Path(str(merge.stage))
    work = Work(key=merge.key, stage=str(stage), memory=batch.memory(stage))
    (asked,) = [
        word for word in slurm_words.options(SlurmSettings(), work, name="n", log="l", folder="f") if "--mem" in word
    ]
    assert int(asked.removeprefix("--mem=").removesuffix("M")) > 1024 + (3 * outside.LIBRARIES // 2 >> 20)
    assert batch.main([str(stage)]) == 0
    answer = batch.answer(stage, merge.key, str(merge.plan))
    assert answer is not None
    assert answer.result is not None
    assert why in answer.result["compared"]["why"]
