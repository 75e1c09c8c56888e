"""What a passage lists when it did not end well, and how people name and give up a merge."""

import logging
import threading
from pathlib import Path

import pytest

from weighbridge.daemon import problems
from weighbridge.daemon.folders import Folders
from weighbridge.daemon.ledger import StoreLedger
from weighbridge.daemon.watch import Hints
from weighbridge.registry import errors, findings
from weighbridge_testlib.merge_bench import MergeBench

REF = "team-run-1@v1"


def watched(bench: MergeBench) -> Folders:
    """Return the watch as a new process begins it, over the database of the bench."""
    ledger = StoreLedger(bench.store, bench.state, lambda: None)
    return Folders([bench.rule], ledger, Hints(threading.Event()), quiet=60.0, scan=60.0)


def told(bench: MergeBench, folders: Folders) -> list[errors.WeighbridgeError]:
    """Return the problems of a bench."""
    return problems.found(folders, bench.store, bench.merges, bench.homes, "w.toml")


def refuse(bench: MergeBench, step: int) -> Path:
    """Leave a checkpoint that is refused: a file of it is shorter than its header says."""
    folder = bench.adapter(step, seed=step)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    bench.publish(folder)
    return folder


def test_everything_that_stands_in_the_way_is_listed(tmp_path: Path) -> None:
    """Two refused folders, a merge that was given up and a copy that waits: a line each, the first decides."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    (merge,) = bench.merges.merges()
    bench.merges.advance(merge, "blocked", reason="it cannot be", findings="[]")
    refused = [refuse(bench, step) for step in (6, 7)]
    bench.store.deliver("copy", "team", "team-run-1", 1)
    folders = watched(bench)
    folders.step()
    every = told(bench, folders)
    assert [one.exit_code for one in every] == [5, 5, 5, 8]
    one = problems.together(every)
    assert one is not None
    assert (one.exit_code, one.what) == (5, "4 things are not done")
    lines = (one.why or "").split("\n")
    assert len(lines) == 4
    assert [str(folder) in line for folder, line in zip(refused, lines, strict=False)] == [True, True]
    assert f"--cancel {REF}" in lines[2]
    assert f"{REF} is published on team" in lines[3]
    assert len(one.data["problems"]) == 4
    assert problems.together([]) is None
    assert problems.together(every[:1]) is every[0]
    bench.catalog.close()


@pytest.mark.parametrize(("state", "code"), [("blocked", 5), ("diverged", 7)])
def test_a_copy_that_was_refused_is_no_success(tmp_path: Path, state: str, code: int) -> None:
    """What a mirror refuses, or holds otherwise, is told, and ends as any refusal or conflict."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    for merge in bench.merges.merges():
        bench.merges.advance(merge, "done")
    bench.store.deliver("copy", "team", "team-run-1", 1)
    bench.store.delivered("copy", "team-run-1", 1, state=state, reason="it cannot be")
    folders = watched(bench)
    folders.step()
    (one,) = told(bench, folders)
    assert (one.exit_code, one.why) == (code, "it cannot be")
    assert REF in one.what
    bench.catalog.close()


@pytest.mark.parametrize("away", [True, False])
def test_a_copy_that_waits_has_a_code_of_its_own(tmp_path: Path, away: bool) -> None:
    """A mirror that gives no answer ends 6, one whose turn has not come 8."""
    bench = MergeBench(tmp_path)
    bench.homes.health["copy"] = bench.homes.health["team"]
    bench.store.deliver("copy", "team", "team-run-1", 1)
    if away:
        bench.homes.failed("copy", errors.UnreachableError("it is away"))
    (one,) = told(bench, watched(bench))
    assert one.exit_code == (6 if away else 8)
    bench.catalog.close()


def test_what_was_deleted_while_nobody_watched_is_no_problem_any_more(tmp_path: Path) -> None:
    """A refused folder that is gone at the first scan of a new process is forgotten; one that is there is not."""
    bench = MergeBench(tmp_path)
    gone, stays = refuse(bench, 6), refuse(bench, 7)
    for path in [*gone.iterdir(), gone]:
        path.unlink() if path.is_file() else path.rmdir()
    folders = watched(bench)
    assert len(told(bench, folders)) == 2
    folders.step()
    (one,) = told(bench, folders)
    assert str(stays) in one.what
    bench.catalog.close()


def test_nothing_is_forgotten_under_a_root_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A root that is not mounted proves nothing; the log tells of it once, and once when it is back."""
    bench = MergeBench(tmp_path)
    refuse(bench, 6)
    away = bench.runs.rename(tmp_path / "away")
    folders = watched(bench)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            folders.request_scan(full=True, now=True)
            folders.step()
        assert [r.getMessage() for r in caplog.records if "root" in r.getMessage()] == ["watched root is not there"]
        assert sorted(one.exit_code for one in told(bench, folders)) == [3, 5]
        away.rename(bench.runs)
        for _ in range(2):
            folders.request_scan(full=True, now=True)
            folders.step()
    assert [r.getMessage() for r in caplog.records if "root" in r.getMessage()][1:] == ["watched root is there again"]
    assert [one.exit_code for one in told(bench, folders)] == [5]
    bench.catalog.close()


def test_a_merge_that_was_refused_is_given_up(tmp_path: Path) -> None:
    """Cancelling ends what is blocked, too, and with it the problem."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    (merge,) = bench.merges.merges()
    found = findings.finding("merge-not-made", merge.ref, "it cannot be")
    bench.merging._setbacks.block(merge, found, "it cannot be")
    folders = watched(bench)
    assert len(told(bench, folders)) == 1
    assert [m.state for m in bench.merging.cancel("team-run-1")] == ["cancelled"]
    assert told(bench, folders) == []
    bench.catalog.close()


def test_a_merge_is_named_by_its_name_where_that_is_clear(tmp_path: Path) -> None:
    """A name means the one version whose merge is not over; two are listed, and other words are told what to write."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    assert [m.ref for m in bench.merges.find("team-run-1")] == [REF]
    bench.publish(bench.adapter(6, seed=6))
    with pytest.raises(errors.UsageError, match="several versions") as several:
        bench.merges.find("team-run-1")
    assert several.value.why == "team-run-1@v1, team-run-1@v2"
    for merge in bench.merges.find("team-run-1@v2"):
        bench.merges.advance(merge, "done")
    assert [m.ref for m in bench.merges.find("team-run-1")] == [REF]
    with pytest.raises(errors.UsageError) as tag:
        bench.merges.find("team-run-1:prod")
    assert "team-run-1@vN" in (tag.value.fix or "")
    with pytest.raises(errors.NotFoundError) as version:
        bench.merges.find("team-run-1@v9")
    assert "team-run-1@v1 (wanted)" in (version.value.why or "")
    with pytest.raises(errors.NotFoundError):
        bench.merges.find("nobody")
    bench.catalog.close()
