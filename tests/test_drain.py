"""`registryd drain PATH`: 0 only when everything under the path is confirmed, with a daemon and without one."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.settings import WatchRule
from weighbridge.daemon import drain as draining
from weighbridge.daemon.folders import Folders
from weighbridge.daemon.jobstore import JobStore
from weighbridge.daemon.ledger import StoreLedger
from weighbridge.daemon.lock import StateLock
from weighbridge.daemon.scan import Scan
from weighbridge.daemon.watch import Hints
from weighbridge.registry.catalog import Catalog
from weighbridge_testlib.builders import lora_adapter, run_root, trainer_checkpoint
from weighbridge_testlib.yard import BIN, Yard, until

pytestmark = pytest.mark.long


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard with the product's own policy and a short quiet time."""
    with Yard(tmp_path) as found:
        found.configure(daemon={"quiet": "1s", "scan": "2s"}, watch={"publish": None, "backfill": None})
        yield found


def drain(yard: Yard, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `registryd drain`."""
    return yard.run([str(BIN / "registryd"), "drain", str(path), *more])


@pytest.mark.parametrize("running", [True, False])
def test_everything_is_confirmed_when_it_returns(yard: Yard, running: bool) -> None:
    """What is under the path is a version at that moment, whether a daemon runs or not."""
    if running:
        with yard.daemon():
            run_root(yard.runs / "team/run", steps=(1, 2))
            done = drain(yard, yard.runs / "team/run", "--deadline", "60s")
            assert done.returncode == 0, done.stderr
            assert len(yard.check(closed=True)["committed"]) == 2
    else:
        run_root(yard.runs / "team/run", steps=(1, 2))
        done = drain(yard, yard.runs / "team/run", "--deadline", "60s")
        assert done.returncode == 0, done.stderr
        assert len(yard.check(closed=True, state=True)["committed"]) == 2
    assert sorted(done.stdout.split()) == ["team-run@v1", "team-run@v2"]


def test_what_stood_there_before_the_first_start_is_taken_too(yard: Yard) -> None:
    """An explicit wish for everything under a path goes before the rule about old runs."""
    run_root(yard.runs / "team/old", steps=(1,), result=False)
    lora_adapter(yard.runs / "team/other/checkpoint-1", seed=7)
    with yard.daemon():
        time.sleep(3)
        yard.check(contents=0)
        done = drain(yard, yard.runs / "team/old", "--deadline", "60s", "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["schema"] == "weighbridge/drain/1"
        assert told["published"] == ["team-old@v1"]
        yard.check(contents=1)


def test_a_scan_that_was_under_way_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved behind the eyes of a running scan is found by the next one, and the drain waits for that."""
    runs = tmp_path / "runs"
    runs.mkdir()
    catalog = Catalog.open(None, durable=False)
    store = JobStore(catalog)
    hints = Hints(threading.Event())
    folders = Folders([WatchRule(str(runs), backfill=True)], StoreLedger(store, tmp_path, lambda: None), hints)
    tree = folders.roots[str(runs)].tree
    inner = tree.scan
    asked: list[draining.Asked] = []

    def scan(**options: Any) -> Scan:
        found = inner(**options)
        if not asked:
            asked.append(draining.begin(folders, store, str(runs)))
            lora_adapter(runs / "run/checkpoint-1")
        return found

    monkeypatch.setattr(tree, "scan", scan)
    folders.step()

    def standing() -> dict[str, Any]:
        folders.step()
        return draining.standing(folders, store, asked[0])

    assert not draining.standing(folders, store, asked[0])["done"]
    until(lambda: standing()["waiting"], 10, "the checkpoint to be waited for")
    assert not standing()["done"]
    catalog.close()


def test_a_deadline_that_passes_ends_8_and_says_what_is_missing(yard: Yard) -> None:
    """An unfinished checkpoint is named with its reason."""
    folder = lora_adapter(yard.runs / "team/run/checkpoint-1")
    (folder / "adapter_config.json").unlink()
    for running in (False, True):
        if running:
            with yard.daemon():
                done = drain(yard, yard.runs, "--deadline", "6s")
        else:
            done = drain(yard, yard.runs, "--deadline", "6s")
        assert done.returncode == 8
        assert "adapter_config.json" in done.stderr
        assert str(folder) in done.stderr


def test_a_blocked_artifact_is_no_success(yard: Yard) -> None:
    """What will never be confirmed ends 5 at once, not after the deadline."""
    folder = lora_adapter(yard.runs / "team/run/checkpoint-1")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"]})
    )
    with yard.daemon():
        begun = time.monotonic()
        done = drain(yard, yard.runs, "--deadline", "60s")
        assert done.returncode == 5, done.stderr
        assert time.monotonic() - begun < 30
        assert str(folder) in done.stderr


def test_a_checkpoint_that_is_being_written_is_waited_for(yard: Yard) -> None:
    """The drain begins in the middle of a save and ends behind its publication."""
    whole = trainer_checkpoint(yard.folder / "whole", step=9, tokenizer=True)
    folder = yard.runs / "team/run/checkpoint-9"
    folder.mkdir(parents=True)

    def save() -> None:
        for path in sorted(whole.iterdir(), key=lambda p: (p.name == "trainer_state.json", p.name)):
            (folder / path.name).write_bytes(path.read_bytes())
            time.sleep(0.3)

    with yard.daemon():
        writer = threading.Thread(target=save)
        writer.start()
        time.sleep(0.5)
        done = drain(yard, yard.runs / "team/run", "--deadline", "60s")
        writer.join()
        assert done.returncode == 0, done.stderr
        files = {p.name for p in (yard.remote / "models/team-run/v1").iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files


def test_an_empty_path_is_drained_and_a_foreign_one_refused(yard: Yard) -> None:
    """Nothing to do is success; a path that nobody watches is a mistake."""
    (yard.runs / "team/empty").mkdir(parents=True)
    assert drain(yard, yard.runs / "team/empty", "--deadline", "20s").returncode == 0
    gone = drain(yard, yard.runs / "team/nope", "--deadline", "20s")
    assert gone.returncode == 3
    assert "is not there" in gone.stderr
    foreign = drain(yard, yard.folder / "elsewhere", "--deadline", "20s")
    assert foreign.returncode == 2
    assert "is not watched" in foreign.stderr
    odd = drain(yard, yard.runs, "--deadline", "soon")
    assert odd.returncode == 2
    assert "span of time" in odd.stderr


def test_a_home_that_is_away_is_no_success(yard: Yard) -> None:
    """Without the home's confirmation the drain ends 8 and the bytes are kept."""
    with yard.daemon():
        lora_adapter(yard.runs / "team/one/checkpoint-1", seed=1)
        assert drain(yard, yard.runs, "--deadline", "60s").returncode == 0
        hidden = yard.remote.with_name("away")
        yard.remote.rename(hidden)
        yard.remote.mkdir()  # what is left where something was mounted
        lora_adapter(yard.runs / "team/two/checkpoint-1", seed=2)
        done = drain(yard, yard.runs, "--deadline", "4s")
        assert done.returncode == 8, (done.returncode, done.stdout, done.stderr)
        assert not [path for path in yard.remote.rglob("*") if path.is_file()], "nothing is written there"
        shutil.rmtree(yard.remote)
        hidden.rename(yard.remote)
        again = drain(yard, yard.runs, "--deadline", "60s")
        assert again.returncode == 0, again.stderr
    yard.check(contents=2, closed=True, state=True)


def test_a_daemon_that_is_still_starting_is_waited_for(yard: Yard) -> None:
    """While another process holds the state and nobody listens yet, drain keeps asking instead of giving up."""
    run_root(yard.runs / "team/run", steps=(1,), result=False)
    yard.state.mkdir(mode=0o700, exist_ok=True)
    lock = StateLock(yard.state).acquire()
    threading.Timer(2, lock.release).start()
    done = drain(yard, yard.runs / "team/run", "--deadline", "60s")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["team-run@v1"]


def test_a_daemon_that_never_listens_ends_8(yard: Yard) -> None:
    """A state that stays held until the deadline is "not finished", with the reason, and no conflict."""
    yard.state.mkdir(mode=0o700, exist_ok=True)
    with StateLock(yard.state):
        done = drain(yard, yard.runs, "--deadline", "1s")
    assert done.returncode == 8
    assert "another daemon works on" in done.stderr
