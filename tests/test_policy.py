"""What a rule publishes and under which name, and which run a folder belongs to."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.adapters import run_identity
from weighbridge.adapters.run_place import same_place
from weighbridge.config.settings import GB, WatchRule
from weighbridge.daemon.policy import Item, Later, Publish, Skip, averages, decide, fill, named
from weighbridge.registry import disk
from weighbridge.registry.refs import NAME_MAX, SUFFIX_ROOM, name_fault

ROOT = "/runs"


def rule(**values: Any) -> WatchRule:
    """Return a rule with some values."""
    return WatchRule(ROOT)._replace(**values)


def item(step: int | None, kind: str = "model", size: int = 1, metric: float | None = None, **more: bool) -> Item:
    """Return one artifact of a run."""
    return Item(f"/runs/r/checkpoint-{step}", kind, step, size, metric, **more)


def verdict(one: Item, others: list[Item], of: WatchRule, *, now: float = 1000.0, at: float | None = None) -> str:
    """Return the kind of the verdict, and the reason where it is set aside."""
    found = decide(one, others, of, now=now, published_at=at)
    return found.reason if isinstance(found, Skip) else type(found).__name__.lower()


def test_by_default_every_small_adapter_is_published() -> None:
    """Adapters up to 1 GB all go, whatever else is in the run."""
    assert verdict(item(1, "adapter", GB), [item(2, "adapter")], rule()) == "publish"


def test_by_default_large_things_go_only_as_best_or_last() -> None:
    """Full models and large adapters are thinned to the best and the last."""
    assert verdict(item(1), [item(2)], rule()) == "not-chosen"
    assert verdict(item(2), [item(1)], rule()) == "publish"
    assert verdict(item(1, "adapter", GB + 1), [item(2, "adapter")], rule()) == "not-chosen"


def test_last_is_compared_as_numbers_and_within_one_kind() -> None:
    """checkpoint-1000 comes after checkpoint-200; an adapter does not make a model old."""
    last = rule(publish=("last",))
    assert verdict(item(1000), [item(200)], last) == "publish"
    assert verdict(item(200), [item(1000)], last) == "not-chosen"
    assert verdict(item(200), [item(1000, "adapter")], last) == "publish"


def test_a_result_comes_after_every_checkpoint() -> None:
    """What has no step is the result at the end."""
    last = rule(publish=("last",))
    assert verdict(item(None), [item(1000)], last) == "publish"
    assert verdict(item(1000), [item(None)], last) == "not-chosen"


def test_what_was_not_judged_yet_may_be_the_last() -> None:
    """A newer sibling of unknown kind keeps an old one back."""
    assert verdict(item(1), [item(2, "")], rule(publish=("last",))) == "not-chosen"


@pytest.mark.parametrize(("best", "values", "chosen"), [("loss:min", (3, 1, 2), 1), ("f1:max", (0.1, 0.3, 0.2), 1)])
def test_best_goes_by_the_rules_metric(best: str, values: tuple[float, ...], chosen: int) -> None:
    """The smallest or the greatest value wins, as the rule says."""
    items = [item(number, metric=value) for number, value in enumerate(values)]
    of = rule(publish=("best",), best=best)
    found = [verdict(one, [o for o in items if o is not one], of) for one in items]
    assert [number for number, word in enumerate(found) if word == "publish"] == [chosen]


def test_best_without_a_metric_is_what_the_trainer_says() -> None:
    """A rule that names no metric follows trainer_state.json; NaN is never the best."""
    of = rule(publish=("best",))
    assert verdict(item(1, best_hint=True), [item(2)], of) == "publish"
    assert verdict(item(1), [], of) == "not-chosen"
    assert verdict(item(1, metric=float("nan")), [], rule(publish=("best",), best="loss:min")) == "not-chosen"


def test_manual_and_too_large_are_set_aside() -> None:
    """Manual publishes nothing by itself; a size limit holds for everything."""
    assert verdict(item(1, "adapter"), [], rule(publish=("manual",))) == "manual"
    assert verdict(item(1, "adapter", 11), [], rule(publish=("all",), max_bytes=10)) == "max-bytes"
    assert verdict(item(1), [item(2)], rule(publish=("all",))) == "publish"


def test_the_interval_thins_checkpoints_and_never_delays_a_result() -> None:
    """A last checkpoint waits for its turn; the result at the end goes at once."""
    of = rule(min_interval=600.0)
    found = decide(item(2), [], of, now=1000.0, published_at=900.0)
    assert isinstance(found, Later)
    assert found.until == 1500.0
    assert isinstance(decide(item(2), [], of, now=1500.0, published_at=900.0), Publish)
    assert isinstance(decide(item(None), [], of, now=1000.0, published_at=900.0), Publish)
    assert verdict(item(2, "adapter"), [], of, at=999.0) == "publish"


@pytest.mark.parametrize(
    ("template", "project", "run", "name"),
    [
        ("{project}-{run}", "medical", "sft-0412", "medical-sft-0412"),
        ("{project}-{run}", "sft-0412", "sft-0412", "sft-0412"),
        ("team-{project}-{run}", "sft", "sft", "team-sft"),
        ("{run}", "a", "b", "b"),
        ("{project}", "a", "a", "a"),
        ("{project}-{run}", "Größe", "lauf 1", "Groe-lauf-1"),
    ],
)
def test_names_come_from_the_template(template: str, project: str, run: str, name: str) -> None:
    """A run right under the root is named once; what a name cannot hold is replaced."""
    assert fill(template, project=project, run=run) == name


@given(project=st.text(min_size=1, max_size=120), run=st.text(min_size=1, max_size=120))
def test_every_folder_name_gives_a_valid_name_with_room_for_a_suffix(project: str, run: str) -> None:
    """Whatever people call their folders, the name passes the validator of every door."""
    assert name_fault(fill("{project}-{run}", project=project, run=run), room=SUFFIX_ROOM) is None


def test_a_second_kind_gets_a_suffix() -> None:
    """A name has one kind for ever."""
    kinds = {"sft": "adapter"}
    assert named("sft", "adapter", kinds.get) == "sft"
    assert named("sft", "model", kinds.get) == "sft-model"
    assert named("new", "model", kinds.get) == "new"
    kinds["x" * NAME_MAX] = "adapter"
    assert len(named("x" * NAME_MAX, "quantized", kinds.get)) == NAME_MAX


@pytest.mark.parametrize(
    ("path", "above", "run", "project"),
    [
        ("/runs/medical/sft/checkpoint-280", False, "/runs/medical/sft", "medical"),
        ("/runs/medical/sft", False, "/runs/medical/sft", "medical"),
        ("/runs/medical/sft/final", False, "/runs/medical/sft", "medical"),
        ("/runs/sft/checkpoint-280", False, "/runs/sft", "sft"),
        ("/runs/sft", False, "/runs/sft", "sft"),
        ("/runs/model", False, "/runs/model", "model"),
        ("/runs/checkpoint-5", False, "/runs", "runs"),
        ("/runs", False, "/runs", "runs"),
        ("/runs/sft/odd-name", True, "/runs/sft", "sft"),
        ("/runs/sft/odd-name", False, "/runs/sft/odd-name", "sft"),
        ("/runs/a/b/c/d/checkpoint-7", False, "/runs/a/b/c/d", "a"),
        ("/runs/a/b/model/checkpoint-7", False, "/runs/a/b", "a"),
        ("/runs/a/run/model_ema", False, "/runs/a/run", "a"),
        ("/runs/a/run/ema-final/checkpoint-3", False, "/runs/a/run", "a"),
        ("/runs/model_ema", False, "/runs/model_ema", "model_ema"),
        ("/runs/a/test-ema-0.99", False, "/runs/a/test-ema-0.99", "a"),
        ("/runs/a/run/epoch_3", False, "/runs/a/run", "a"),
        ("/runs/a/run/epoch=3-step=200", False, "/runs/a/run", "a"),
    ],
)
def test_a_folder_belongs_to_its_run(path: str, above: bool, run: str, project: str) -> None:
    """Numbered and conventional folders belong to the folder above; the project is the first one under the root."""
    found = run_identity.run_of("/runs", path, above_is_artifact=above)
    assert (found.path, found.project) == (run, project)


def test_a_run_made_anew_keeps_its_place_and_gets_another_start(tmp_path: Path) -> None:
    """The place owns the name; the start tells the runs apart for `latest`."""
    run = tmp_path / "run"
    (run / "checkpoint-1").mkdir(parents=True)
    os.utime(run / "checkpoint-1", (1_700_000_000, 1_700_000_000))
    first = run_identity.identity(str(run), "")
    shutil.rmtree(run)
    (run / "checkpoint-1").mkdir(parents=True)
    second = run_identity.identity(str(run), "")
    assert first != second
    assert same_place(first, second)
    assert not same_place(first, run_identity.identity(str(tmp_path), ""))
    assert run_identity.began_at(first) == 1_700_000_000


@pytest.mark.parametrize("mtime", [0, 4102444800])
def test_file_times_that_cannot_be_are_no_beginning(tmp_path: Path, mtime: int) -> None:
    """A run with files of 1970 or of the future began now."""
    (tmp_path / "checkpoint-1").mkdir()
    os.utime(tmp_path / "checkpoint-1", (mtime, mtime))
    began = run_identity.began_at(run_identity.identity(str(tmp_path), ""))
    assert began is not None
    assert 1_700_000_000 < began < 4102444800


def test_hosts_that_share_a_file_system_agree_on_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system the place is the server's, on a local disk the machine's."""
    table = f"36 25 0:32 / {tmp_path} rw - nfs4 server:/export rw\n"
    shared = run_identity.place(f"{tmp_path}/run", table)
    local = run_identity.place(f"{tmp_path}/run", "")
    monkeypatch.setattr(run_identity, "machine", lambda: "another")
    assert run_identity.place(f"{tmp_path}/run", table) == shared
    assert run_identity.place(f"{tmp_path}/run", "") != local


@pytest.fixture
def births(tmp_path: Path) -> None:
    """Skip where the file system tells no time of birth."""
    if disk.born_ns(tmp_path) is None:
        pytest.skip("this file system tells no time of birth")


@pytest.mark.usefixtures("births")
def test_a_folder_made_anew_is_told_from_the_one_before(tmp_path: Path) -> None:
    """Also where the file system gives it the number of the one that was deleted, as ext4 does."""
    run = tmp_path / "run"
    keys = []
    for _ in range(20):
        run.mkdir()
        keys.append(run_identity.key(str(run)))
        (run / "checkpoint-1").mkdir()
        assert run_identity.is_same(keys[-1], run_identity.key(str(run)))  # what comes into it changes nothing
        run.rename(tmp_path / "moved")
        (tmp_path / "moved").rename(run)
        assert run_identity.is_same(keys[-1], run_identity.key(str(run)))
        shutil.rmtree(run)
    assert len(set(keys)) == 20
    assert not any(run_identity.is_same(one, other) for at, one in enumerate(keys) for other in keys[:at])


@pytest.mark.usefixtures("births")
def test_without_a_time_of_birth_the_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that tells none, or told none when the run was first seen, makes no run another one."""
    known = run_identity.key(str(tmp_path))
    monkeypatch.setattr(disk, "born_ns", lambda _: None)
    bare = run_identity.key(str(tmp_path))
    assert bare != known
    assert run_identity.is_same(bare, known)
    assert run_identity.is_same(known, bare)
    assert not run_identity.is_same(bare, run_identity.key(str(tmp_path.parent)))


@pytest.mark.usefixtures("births")
def test_a_birth_is_when_the_folder_was_made(tmp_path: Path) -> None:
    """To the second, whatever is written later; what is not there has none."""
    before = time.time()
    run = tmp_path / "run"
    run.mkdir()
    born = disk.born_ns(run)
    assert born is not None
    assert before - 2 < born / 1e9 < time.time() + 2
    os.utime(run, (0, 0))
    assert disk.born_ns(run) == born
    assert disk.born_ns(tmp_path / "none") is None


def test_identities_that_people_choose_must_be_equal() -> None:
    """A sidecar's id is compared as it is."""
    assert same_place("sft-0412", "sft-0412")
    assert not same_place("sft-0412", "sft-0413")
    assert run_identity.began_at("sft-0412") is None


def test_an_average_that_nobody_publishes_is_not_preferred() -> None:
    """Of several averages any that goes is reason enough; what is dropped is dropped whatever became of the others."""
    beside = ["model.pt", "model_ema.pt", "model_swa.pt"]
    prefer, drop = rule(ema="prefer"), rule(ema="drop")
    assert "model_ema.pt" in str(averages("model.pt", beside, prefer, averaged=False))
    assert "model_swa.pt" in str(averages("model.pt", beside, prefer, averaged=False, lost={"model_ema.pt"}))
    assert averages("model.pt", beside, prefer, averaged=False, lost=set(beside[1:])) is None
    assert averages("model_ema.pt", beside, drop, averaged=False, lost={"model.pt"}) is not None
