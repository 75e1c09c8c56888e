"""Merges that are disturbed: killed at any moment, run twice, run side by side, with sources that change under them."""

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from weighbridge.adapters.merge import job, staging, start
from weighbridge.adapters.merge.journal import Journal
from weighbridge.adapters.merge.preview import look
from weighbridge.adapters.merge.stream import Written
from weighbridge.adapters.merge.tally import Tally
from weighbridge.registry.errors import ConflictError, SourceChangedError, VanishedError
from weighbridge.registry.hashing import sha256_bytes, sha256_file
from weighbridge_testlib import builders, merging

pytestmark = pytest.mark.long

KILLS = 5
_ALONE = ("--workers", "1")


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    """Return a folder with a base in several shards, an adapter, and the undisturbed merge of both."""
    base = merging.wide_model(tmp_path / "base", shards=8, layers=8)
    adapter = merging.wide_adapter(tmp_path / "adapter", base)
    start.merge(look([adapter], base), tmp_path / "right")
    return tmp_path


def content(folder: Path) -> dict[str, str]:
    """Return the digest of every file but the record, which names the time it took."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != start.RECORD
    }


def stage_of(yard: Path) -> Path | None:
    """Return the staging folder of the merge into `out`, where there is one."""
    return next((path for path in yard.iterdir() if path.name.startswith(".out.merge-")), None)


def recorded(stage: Path | None) -> dict[str, tuple[int, int]]:
    """Return inode and time of every file the journal lists."""
    journal = stage / "journal.jsonl" if stage is not None else None
    if stage is None or journal is None or not journal.exists():
        return {}
    found: dict[str, tuple[int, int]] = {}
    for line in journal.read_bytes().split(b"\n"):
        try:
            path = json.loads(line)["path"]
        except ValueError:
            continue
        status = (stage / "out" / path).stat()
        found[path] = (status.st_ino, status.st_mtime_ns)
    return found


def test_a_kill_at_any_moment_costs_no_finished_file(yard: Path) -> None:
    """SIGKILL anywhere: no target, no child left; the next run keeps what was finished and gives the same bytes."""
    source = random.Random(11)
    target = yard / "out"
    for wanted in [0, *sorted(source.sample(range(1, 9), KILLS - 1))]:  # so many finished files, of eight
        with merging.command("merge", yard / "adapter", "--base", yard / "base", "--to", target, *_ALONE) as running:
            end = time.monotonic() + 20
            while running.poll() is None and time.monotonic() < end and len(recorded(stage_of(yard))) < wanted:
                time.sleep(0.002)
            running.kill()
        if target.exists():
            break
        _wait_for_silence(yard)
        finished = recorded(stage_of(yard))
        stage = stage_of(yard)
        if stage is not None and finished:
            again = recorded(stage)
            assert again == finished, "the child wrote on after its parent was gone"
    before = recorded(stage_of(yard))
    done = start.merge(look([yard / "adapter"], yard / "base"), target)
    assert content(target) == content(yard / "right")
    if before:
        assert set(done.facts["kept_files"]) >= set(before)
        for path, (inode, changed) in before.items():
            status = (target / path).stat()
            assert (status.st_ino, status.st_mtime_ns) == (inode, changed)
    assert stage_of(yard) is None


def _wait_for_silence(yard: Path) -> None:
    """Wait until the child of a killed merge is gone: it holds no file of the stage open any more."""
    stage = stage_of(yard)
    end = time.monotonic() + 10
    while stage is not None and time.monotonic() < end and _held_open(stage):
        time.sleep(0.01)
    assert stage is None or not _held_open(stage)


def _held_open(stage: Path) -> bool:
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            if any(str(stage) in os.readlink(link) for link in (process / "fd").iterdir()):  # noqa: PTH115
                return True
        except OSError:
            continue
    return False


def test_a_merge_done_twice_is_done_once(yard: Path) -> None:
    """The same merge into the same folder is told to be there already, and no byte is touched."""
    before = {path: path.stat().st_mtime_ns for path in (yard / "right").iterdir()}
    done = start.merge(look([yard / "adapter"], yard / "base"), yard / "right")
    assert done.joined
    assert {path: path.stat().st_mtime_ns for path in (yard / "right").iterdir()} == before
    with pytest.raises(ConflictError):
        start.merge(look([yard / "adapter"], yard / "base", dtype="fp32"), yard / "right")


def test_a_changed_source_begins_anew(yard: Path) -> None:
    """Another adapter under the same path is another merge: nothing of the old stage is used."""
    with merging.command("merge", yard / "adapter", "--base", yard / "base", "--to", yard / "out") as running:
        while running.poll() is None and not recorded(stage_of(yard)):
            time.sleep(0.002)
        running.kill()
    shutil.rmtree(yard / "adapter")
    merging.wide_adapter(yard / "adapter", yard / "base", targets=("o_proj",))
    shutil.rmtree(yard / "out", ignore_errors=True)
    done = start.merge(look([yard / "adapter"], yard / "base"), yard / "out")
    assert done.facts["kept_files"] == []
    assert content(yard / "out") != content(yard / "right")


@pytest.mark.parametrize("what", ["rewritten", "gone"])
def test_a_source_that_changes_after_the_plan_stops_the_merge(tmp_path: Path, what: str) -> None:
    """A base that is rewritten, or goes away, between look and merge is never half used."""
    base = builders.llama_model(tmp_path / "base")
    seen = look([builders.lora_adapter(tmp_path / "adapter")], base)
    path = base / "model.safetensors"
    if what == "rewritten":
        raw = path.read_bytes()
        path.unlink()
        path.write_bytes(raw)
    else:
        path.unlink()
    with pytest.raises(SourceChangedError if what == "rewritten" else VanishedError):
        start.merge(seen, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_finished_file_is_written_again(yard: Path) -> None:
    """A file that is not what the journal recorded is not kept."""
    seen = look([yard / "adapter"], yard / "base")
    _, first = merging.staged(yard / "adapter", yard / "base", yard / "stage")
    path = yard / "stage" / "out" / "model-00003-of-00008.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    again = job.run({"stage": str(yard / "stage"), "plan": "test", "workers": 2}, lambda _: None)
    assert seen.planned is not None
    assert len(again["kept"]) == 7
    assert path.name not in again["kept"]
    assert again["files"] == first["files"]


def test_two_at_once_do_not_write_into_each_other(tmp_path: Path) -> None:
    """While one process holds the stage, a second one is turned away."""
    base = builders.llama_model(tmp_path / "base")
    seen = look([builders.lora_adapter(tmp_path / "adapter")], base)
    assert seen.planned is not None
    assert seen.planned.plan is not None
    assert seen.bundle is not None
    identity = staging.plan_identity(seen.planned.plan, seen.bundle)
    stage = tmp_path / f".out.merge-{identity[:12]}"
    stage.mkdir()
    with staging.held(stage), pytest.raises(ConflictError):
        start.merge(seen, tmp_path / "out")
    start.merge(seen, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_torn_journal_line_is_passed_over(tmp_path: Path) -> None:
    """A line cut by a crash costs its own file and no other."""
    out = tmp_path / "out"
    out.mkdir()
    journal = Journal(tmp_path / "journal.jsonl", "plan")
    for name in ("a", "b", "c"):
        (out / name).write_bytes(name.encode())
        journal.record(Written(name, 1, sha256_bytes(name.encode()), {"w": Tally(elements=3)}))
    raw = (tmp_path / "journal.jsonl").read_bytes()
    (tmp_path / "journal.jsonl").write_bytes(raw[:-20])
    assert set(journal.finished(out)) == {"a", "b"}
    journal.record(Written("c", 1, sha256_bytes(b"c"), {}))
    assert set(journal.finished(out)) == {"a", "b", "c"}
    assert journal.finished(out)["a"].tallies["w"].elements == 3
    assert Journal(tmp_path / "journal.jsonl", "another plan").finished(out) == {}


def test_what_stands_in_a_folder_is_told_without_touching_it(tmp_path: Path) -> None:
    """The same merge is recognised; nothing, something else and a merge of what changed since are not, and all stay."""
    base = builders.llama_model(tmp_path / "base")
    adapter = builders.lora_adapter(tmp_path / "adapter")
    target = tmp_path / "jobs" / "out"
    assert start.standing(look([adapter], base), target) is None
    assert not target.parent.exists()
    made = start.merge(look([adapter], base), target)
    told = start.standing(look([adapter], base), target)
    assert told is not None
    assert (told.plan, told.files, told.joined) == (made.plan, made.files, True)
    before = content(target)
    os.utime(base / "model.safetensors")
    assert start.standing(look([adapter], base), target) is None
    assert content(target) == before
    (target / start.RECORD).write_text("[]")
    assert start.standing(look([adapter], base), target) is None
    assert [path.name for path in target.parent.iterdir()] == ["out"]
