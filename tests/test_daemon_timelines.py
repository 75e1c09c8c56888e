"""What trainers do over time, acted out against a running daemon: what must be published is, and nothing else."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import control
from weighbridge_testlib.builders import llama_model, lora_adapter, run_root, trainer_checkpoint
from weighbridge_testlib.yard import Yard, until

pytestmark = pytest.mark.long


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard with the defaults of the product but for its pace."""
    with Yard(tmp_path) as found:
        found.configure(
            daemon={"quiet": "1s", "scan": "2s"},
            watch=dict.fromkeys(("publish", "min_interval", "backfill", "name")),
        )
        yield found


def sources(yard: Yard) -> Mapping[str, int]:
    """Return how many versions came from each folder, by its path under the root."""
    found: dict[str, int] = {}
    for event in control.ask(str(yard.socket), "log", {"limit": 10_000}):
        if event["event"] == "done":
            name = os.path.relpath(event["path"], yard.runs)
            found[name] = found.get(name, 0) + 1
    return found


def comes_out(yard: Yard, wanted: Mapping[str, int], *, seconds: float = 30, then: float = 3.0) -> None:
    """Wait for exactly these folders, and see that nothing more comes."""
    until(lambda: sources(yard) == wanted, seconds, f"{dict(wanted)}, there is {sources(yard)}; {yard.log_tail(800)}")
    time.sleep(then)
    assert sources(yard) == wanted
    yard.check(contents=sum(wanted.values()), closed=True, state=True)


def test_many_checkpoints_in_a_deep_folder_at_once(yard: Yard) -> None:
    """Filled faster than watches can be added: all are found."""
    with yard.daemon():
        for number in range(1, 25):
            lora_adapter(yard.runs / f"run/a/b/c/d/checkpoint-{number}", seed=number)
        comes_out(yard, {f"run/a/b/c/d/checkpoint-{n}": 1 for n in range(1, 25)})


def test_a_burst_beside_a_checkpoint(yard: Yard) -> None:
    """Thousands of small files do not hide the one that matters."""
    cache = yard.runs / "run/cache"
    cache.mkdir(parents=True)
    with yard.daemon():
        for number in range(5000):
            (cache / f"{number}.tmp").touch()
        lora_adapter(yard.runs / "run/checkpoint-5")
        comes_out(yard, {"run/checkpoint-5": 1})


def test_a_file_that_grows_with_pauses(yard: Yard) -> None:
    """Nothing is published before the last part, however long the writer rests."""
    whole = lora_adapter(yard.folder / "whole", readme=None)
    body = (whole / "adapter_model.safetensors").read_bytes()
    folder = yard.runs / "run/checkpoint-7"
    folder.mkdir(parents=True)
    with yard.daemon():
        shutil.copyfile(whole / "adapter_config.json", folder / "adapter_config.json")
        for part in range(4):
            with (folder / "adapter_model.safetensors").open("ab") as stream:
                stream.write(body[part * len(body) // 4 : (part + 1) * len(body) // 4])
            if part < 3:
                time.sleep(2)
                assert not yard.look()[0]["claims"]
        comes_out(yard, {"run/checkpoint-7": 1})


def test_shards_with_stalls_then_a_late_tokenizer(yard: Yard) -> None:
    """One version with the tokenizer, and at no moment a part of one."""
    yard.configure(daemon={"quiet": "3s", "scan": "2s"}, watch={"publish": "all"})
    whole = llama_model(yard.folder / "whole", shards=3)
    folder = yard.runs / "run/final"
    folder.mkdir(parents=True)
    partial: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen = yard.remote.glob("models/*/v*/manifest.json")
            partial.extend(str(one) for one in seen if not (one.parent / "tokenizer.json").exists())
            time.sleep(0.02)

    with yard.daemon():
        watcher = threading.Thread(target=look)
        watcher.start()
        for name in [
            *sorted(p.name for p in whole.glob("*.safetensors")),
            "config.json",
            "model.safetensors.index.json",
        ]:
            body = (whole / name).read_bytes()
            for half in (body[: len(body) // 2], body[len(body) // 2 :]):
                with (folder / name).open("ab") as stream:
                    stream.write(half)
                time.sleep(0.4)
        time.sleep(2)
        shutil.copyfile(whole / "tokenizer.json", folder / "tokenizer.json")
        comes_out(yard, {"run/final": 1})
        over.set()
        watcher.join()
    assert not partial


@pytest.mark.parametrize("late", ["tokenizer.json", "chat_template.jinja"])
def test_a_file_that_comes_after_publication(yard: Yard, late: str) -> None:
    """A second version supersedes the first, with a finding that names it."""
    folder = lora_adapter(yard.runs / "run/final")
    shutil.rmtree(folder)
    with yard.daemon():
        lora_adapter(folder)
        until(lambda: sources(yard), 20, "the first version")
        (folder / late).write_text("{}" if late.endswith("json") else "{{ messages }}")
        comes_out(yard, {"run/final": 2})
    manifest = (yard.remote / "models/run/v2/manifest.json").read_text()
    assert '"code":"late-file"' in manifest
    assert "run@v1" in manifest


def test_a_folder_deleted_and_made_again(yard: Yard) -> None:
    """Other bytes under the same path: two versions."""
    with yard.daemon():
        folder = lora_adapter(yard.runs / "run/final", seed=1)
        until(lambda: sources(yard), 20, "the first version")
        shutil.rmtree(folder)
        time.sleep(0.2)
        lora_adapter(folder, seed=2)
        comes_out(yard, {"run/final": 2})


def test_a_folder_deleted_and_made_again_with_the_same_bytes(yard: Yard) -> None:
    """The same bytes keep their number."""
    with yard.daemon():
        folder = lora_adapter(yard.runs / "run/final", seed=1)
        until(lambda: sources(yard), 20, "the first version")
        shutil.rmtree(folder)
        time.sleep(1.5)
        lora_adapter(folder, seed=1)
        time.sleep(6)
        yard.check(contents=1, closed=True, state=True)


def test_links_to_other_disks_and_to_the_last(yard: Yard) -> None:
    """Followed once; `last` is no second artifact; a loop does not hang."""
    disk = yard.folder / "disk2/real"
    lora_adapter(disk / "checkpoint-3")
    with yard.daemon():
        (yard.runs / "run").symlink_to(disk)
        (disk / "last").symlink_to("checkpoint-3")
        (disk / "loop").symlink_to("..")
        comes_out(yard, {"run/checkpoint-3": 1})


def test_file_times_from_another_age(yard: Yard) -> None:
    """Neither 1970 nor 2100 waits for ever."""
    with yard.daemon():
        for number, moment in ((4, 4102444800), (5, 0)):
            folder = lora_adapter(yard.runs / f"run/checkpoint-{number}", seed=number)
            for path in folder.iterdir():
                os.utime(path, (moment, moment))
        comes_out(yard, {"run/checkpoint-4": 1, "run/checkpoint-5": 1})


def test_what_was_finished_while_the_daemon_was_down(yard: Yard) -> None:
    """The first scan after a restart picks it up; what was published before is not published again."""
    with yard.daemon():
        lora_adapter(yard.runs / "run/checkpoint-5", seed=5)
        until(lambda: sources(yard), 20, "the first version")
    for number in (6, 7):
        lora_adapter(yard.runs / f"run/checkpoint-{number}", seed=number)
    with yard.daemon():
        comes_out(yard, {f"run/checkpoint-{n}": 1 for n in (5, 6, 7)})


def test_a_first_start_publishes_nothing_old(yard: Yard) -> None:
    """What stood there is listed as skipped, a preview counts it, and only --backfill publishes it."""
    run_root(yard.runs / "team/old", steps=(1, 2), result=False)
    with yard.daemon():
        until(lambda: control.ask(str(yard.socket), "status")["queue"]["skipped"] == 2, 20, "the list")
        lora_adapter(yard.runs / "team/new/checkpoint-1", seed=9)
        comes_out(yard, {"team/new/checkpoint-1": 1})
    dry = yard.daemon_once("--backfill", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "2 would be published" in dry.stderr
    assert not dry.stdout.count("checkpoint-1  team-new")
    yard.check(contents=1)
    done = yard.daemon_once("--backfill")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("team-old@v") == 2
    yard.check(contents=3, closed=True, state=True)


def test_a_preview_writes_nothing(yard: Yard) -> None:
    """--dry-run on a machine that never ran a daemon leaves no state and no registry behind."""
    run_root(yard.runs / "team/old", steps=(1, 2), result=False)
    dry = yard.daemon_once("--dry-run", "--json")
    assert '"count": 0' in dry.stdout
    assert not yard.state.exists()
    assert not yard.remote.exists()


def test_the_same_bytes_changed_in_silence(yard: Yard) -> None:
    """A flipped byte under the same size and time publishes nothing; `verify PATH` and the status tell."""
    with yard.daemon():
        folder = lora_adapter(yard.runs / "run/final")
        until(lambda: sources(yard), 20, "the version")
        weights = folder / "adapter_model.safetensors"
        moment = weights.stat().st_mtime
        body = bytearray(weights.read_bytes())
        body[-1] ^= 1
        weights.write_bytes(body)
        os.utime(weights, (moment, moment))
        told = yard.registry("verify", folder)
        assert told.returncode == 5
        assert "adapter_model.safetensors" in told.stdout
        until(
            lambda: any(p["code"] == "source-drift" for p in control.ask(str(yard.socket), "status")["problems"]),
            20, "the finding",
        )  # fmt: skip
        comes_out(yard, {"run/final": 1})


def test_a_staging_name_is_waited_for_until_it_is_renamed(yard: Yard) -> None:
    """Written under a temporary name, published under its own."""
    with yard.daemon():
        for seed, name in enumerate(("tmp-checkpoint-500", "checkpoint-600-tmp")):
            lora_adapter(yard.runs / "run" / name, seed=seed)
        time.sleep(4)
        assert not yard.look()[0]["claims"]
        (yard.runs / "run/tmp-checkpoint-500").rename(yard.runs / "run/checkpoint-500")
        (yard.runs / "run/checkpoint-600-tmp").rename(yard.runs / "run/checkpoint-600")
        comes_out(yard, {"run/checkpoint-500": 1, "run/checkpoint-600": 1})


def rotating(yard: Yard, steps: int, limit: int) -> None:
    """Save one checkpoint after the other and keep only the newest, as save_total_limit does."""
    for step in range(1, steps + 1):
        trainer_checkpoint(yard.runs / f"team/run/checkpoint-{step}", step=step, seed=step, tokenizer=True)
        if step > limit:
            shutil.rmtree(yard.runs / f"team/run/checkpoint-{step - limit}")
        time.sleep(0.15)


def test_rotation_under_our_hands(yard: Yard) -> None:
    """Checkpoints that vanish while we look or copy end as vanished, never as half a version."""
    yard.configure(daemon={"quiet": "0.2s", "scan": "1s"}, watch={"publish": "all"})
    with yard.daemon() as process:
        rotating(yard, 25, 2)
        until(lambda: {"team/run/checkpoint-24", "team/run/checkpoint-25"} <= set(sources(yard)), 30, "the last two")
        assert process.poll() is None
        until(lambda: not control.ask(str(yard.socket), "status")["jobs"], 20, "rest")
        told = control.ask(str(yard.socket), "status")
        assert not told["problems"], told["problems"]
        yard.check(closed=True, state=True)


def test_without_events_the_scan_alone_finds_the_same(yard: Yard) -> None:
    """On a network file system everything comes out as well, later."""
    yard.without_events()
    with yard.daemon():
        told = control.ask(str(yard.socket), "status")
        assert [(w["mode"], w["why"]) for w in told["watch"]] == [("scan", "nfs4")]
        begun = time.monotonic()
        lora_adapter(yard.runs / "run/a/checkpoint-1", seed=1)
        until(lambda: sources(yard), 20, "the version")
        assert time.monotonic() - begun < 2 + 1 + 5
        folder = lora_adapter(yard.runs / "run/a/checkpoint-2", seed=2)
        time.sleep(0.5)
        (folder / "tokenizer.json").write_text("{}")
        comes_out(yard, {"run/a/checkpoint-1": 1, "run/a/checkpoint-2": 1})


def acted(yard: Yard, *, events: bool, act: Callable[[Path], None]) -> dict[str, Any]:
    """Act something out and return the versions' contents by number of versions of each name."""
    if not events:
        yard.without_events()
    with yard.daemon():
        act(yard.runs)
        time.sleep(8)
        until(lambda: not control.ask(str(yard.socket), "status")["jobs"], 20, "rest")
    return {ref.partition("@")[0]: content for ref, content in yard.check(closed=True)["committed"].items()}


def test_the_result_is_that_of_a_daemon_without_events(tmp_path: Path) -> None:
    """Renames, deletions, late files and links: the same contents with and without hints."""

    def act(runs: Path) -> None:
        lora_adapter(runs / "a/tmp_x", seed=1).rename(runs / "a/one")
        lora_adapter(runs / "b/two", seed=2)
        shutil.rmtree(lora_adapter(runs / "c/three", seed=3))
        (lora_adapter(runs / "d/four", seed=4) / "tokenizer.json").write_text("{}")
        (runs / "d/again").symlink_to("four")

    results = []
    for events in (True, False):
        with Yard(tmp_path / str(events)) as yard:
            (tmp_path / str(events)).mkdir(exist_ok=True)
            yard.configure(daemon={"quiet": "1s", "scan": "2s"}, watch={"publish": None, "backfill": None})
            results.append(acted(yard, events=events, act=act))
    assert results[0] == results[1]
    assert len(results[0]) == 3
