"""What merges and casts by hand leave behind: nothing that nobody goes on with, and nothing that stands in the way."""

import os
import time
from pathlib import Path

import pytest

from weighbridge.adapters.merge import casting, children, staging
from weighbridge.adapters.merge.staging import Merged
from weighbridge.registry import errors
from weighbridge.registry.cli import sides
from weighbridge.registry.cli.output import Output
from weighbridge_testlib import builders
from weighbridge_testlib.desk import Desk


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a model in bf16 as a folder, whose licence nobody states, and a remote that wants one."""
    desk = Desk(tmp_path, monkeypatch)
    desk.config.write_text(desk.config.read_text() + 'unknown_license = "block"\n')
    builders.llama_model(tmp_path / "model", readme=builders.card(None, None))
    return desk


def begun(model: Path, target: Path, dtype: str = "fp32") -> staging.Ready:
    """Return a cast that is ready to be carried out."""
    ready = staging.ready(casting.look(model, dtype=dtype), target, casting.RECORD)
    assert not isinstance(ready, Merged)
    return ready


def test_the_same_command_runs_once_at_a_time(desk: Desk) -> None:
    """While one holds its folder a second one is told so; another command, or a dry run, is not in its way."""
    with sides.scratch(["a", "b"], dry_run=False) as first:
        assert first() == first()
        with (
            pytest.raises(errors.ConflictError, match="same command"),
            sides.scratch(["a", "b"], dry_run=False) as second,
        ):
            second()
        with sides.scratch(["a", "c"], dry_run=False) as other, sides.scratch(["a", "b"], dry_run=True) as dry:
            assert len({first(), other(), dry()}) == 3
    assert list((desk.cache / "merge").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "left", "dry_run", "kept"),
    [
        (errors.UnreachableError("away"), "fetched", False, True),
        (errors.UnreachableError("away"), "fetched", True, False),
        (errors.UsageError("no such name"), "fetched", False, False),
        (errors.UsageError("no such name"), "", False, False),
        (errors.RefusedError("wrong base"), "fetched", False, False),
        (errors.RefusedError("no licence"), "result", False, True),
        (errors.UsageError("no such remote"), ".result.merge-0123456789ab", False, True),
    ],
)
def test_what_the_same_command_can_go_on_from_is_kept(
    desk: Desk, error: errors.WeighbridgeError, left: str, *, dry_run: bool, kept: bool
) -> None:
    """What was fetched stays after an error that passes, what was made after any; a dry run leaves nothing.

    The error is told also where somebody removed the folder meanwhile.
    """

    def fails() -> None:
        with sides.scratch(["a"], dry_run=dry_run) as made:
            (made() / left).touch() if left else made().rmdir()
            raise error

    with pytest.raises(type(error)):
        fails()
    assert [path.name for path in (desk.cache / "merge").glob("*/*")] == ([left] if kept else [])


def test_what_nobody_came_back_for_is_swept(desk: Desk) -> None:
    """Old folders of killed commands go when another one needs a folder; younger ones and those in use stay.

    So does one whose lock cannot be seen, as long as something changes in it.
    """
    folders = desk.cache / "merge"
    for name in ("killed", "young", "busy"):
        (folders / name / "base" / "part").mkdir(parents=True)
    with sides.scratch(["long"], dry_run=False) as used:
        old = time.time() - sides.KEPT - 60
        killed = folders / "killed"
        for path in (killed, killed / "base", killed / "base/part", folders / "busy", folders / "busy/base", used()):
            os.utime(path, (old, old))
        with sides.scratch(["next"], dry_run=False) as next_one:
            next_one()
            assert {path.name for path in folders.iterdir()} == {"young", "busy", used().name, next_one().name}


def test_a_failed_publication_is_not_in_the_way_of_the_next(desk: Desk) -> None:
    """A cast that the remote's rules refuse is made again when its model changed, and used again when it did not."""
    words = ("cast", "model", "--dtype", "fp32", "--name", "chat")
    for _ in range(2):
        said = desk.registry(*words)
        assert (said.code, "licen" in said.err) == (5, True), said.err
        (result,) = (desk.cache / "merge").glob("*/result")
    before = result.stat().st_ino
    assert desk.registry(*words).code == 5
    assert result.stat().st_ino == before
    (desk.folder / "model" / "README.md").write_text(builders.card(None, "mit"))
    assert desk.ok(*words).out.strip() == "chat-fp32@v1"
    assert "it is there already" in desk.ok(*words).err
    assert list((desk.cache / "merge").iterdir()) == []


def test_who_interrupts_is_told_that_nothing_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where files are finished, one line says that the same command goes on from them; else there is nothing to say."""
    for finished in (False, True):
        if finished:
            (tmp_path / ".out.merge-0123456789ab").mkdir()
        with pytest.raises(KeyboardInterrupt), sides.stoppable(tmp_path / "out", Output()):
            raise KeyboardInterrupt
        assert ("the same command goes on" in capsys.readouterr().err) is finished


def test_an_error_leaves_only_what_the_next_try_goes_on_from(tmp_path: Path) -> None:
    """Finished files stay after a full disk and go after a refusal; where none is finished nothing stays."""
    model = builders.llama_model(tmp_path / "model", shards=2)
    ready = begun(model, tmp_path / "out")

    def fail(error: errors.WeighbridgeError, *, finished: bool) -> None:
        with staging.working(ready):
            if finished:
                (ready.stage / staging.JOURNAL).write_text("{}\n")
            raise error

    def fails(error: errors.WeighbridgeError, *, finished: bool) -> bool:
        with pytest.raises(type(error)):
            fail(error, finished=finished)
        return ready.stage.exists()

    assert fails(errors.DiskFullError("full"), finished=True)
    assert not fails(errors.RefusedError("no"), finished=True)
    assert not fails(errors.DiskFullError("full"), finished=False)
    assert fails(errors.LimitError("memory"), finished=True)
    assert not fails(errors.VanishedError("gone"), finished=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_begun_under_a_name_goes_when_something_else_got_it(tmp_path: Path) -> None:
    """A cut cast of another precision into the same folder can never appear; one that is under way is left alone."""
    model = builders.llama_model(tmp_path / "model")
    cut, running = (begun(model, tmp_path / "out", dtype) for dtype in ("fp32", "fp16"))
    for ready in (cut, running):
        staging.make(ready)
        children.begun(ready, 1)
    (tmp_path / ".out.merge-notes").mkdir()
    third = builders.llama_model(tmp_path / "third", dtype="F32", tensors=builders.llama_tensors(dtype="F32"))
    with staging.held(running.stage):
        casting.cast(casting.look(third, dtype="bf16"), tmp_path / "out")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "third", "out", ".out.merge-notes", running.stage.name}


def test_another_that_just_finished_is_joined(tmp_path: Path) -> None:
    """Where the same result appeared between the look and the lock, nothing is written again."""
    model = builders.llama_model(tmp_path / "model")
    late = begun(model, tmp_path / "out")
    casting.cast(casting.look(model, dtype="fp32"), tmp_path / "out")
    with staging.working(late) as there:
        assert there is not None
        assert there.joined
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


@pytest.mark.parametrize("shards", [1, 5])
def test_the_room_that_is_asked_for_is_the_room_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """A small cast needs a little more than its own bytes; less than that is a full disk before the first one."""
    model = builders.llama_model(tmp_path / "model", shards=shards)
    ready = begun(model, tmp_path / "out")
    casting.cast(casting.look(model, dtype="fp32"), tmp_path / "out")
    took = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    asked = staging.needed(ready.plan, ready.bundle)
    assert took < asked < took + (256 << 10)
    monkeypatch.setattr(staging, "free_bytes", lambda _path: asked - 1)
    with pytest.raises(errors.DiskFullError) as caught:
        casting.cast(casting.look(model, dtype="fp32"), tmp_path / "more")
    assert caught.value.data["free_bytes"] == asked - 1
    assert not list(tmp_path.glob("*more*"))
