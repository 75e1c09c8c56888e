"""What a merge or a cast reads by hand, and the place it writes to: odd files and odd targets are told, never met."""

import os
from pathlib import Path

import pytest

from weighbridge.adapters.merge import casting, preview, staging, start
from weighbridge.adapters.merge.bundle import Folder
from weighbridge.adapters.reading import table_at
from weighbridge.registry import errors
from weighbridge.registry.cli import sides
from weighbridge_testlib import builders
from weighbridge_testlib.desk import Desk


def odd(path: Path, what: str) -> None:
    """Put a pipe, or JSON deeper than any parser goes, in the place of a file."""
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("[" * 100_000 + "]" * 100_000)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with an adapter and its base as folders."""
    builders.lora_adapter(tmp_path / "adapter")
    builders.llama_model(tmp_path / "base")
    return Desk(tmp_path, monkeypatch)


@pytest.mark.parametrize("what", ["pipe", "deep"])
@pytest.mark.parametrize("side", ["adapter/adapter_config.json", "base/config.json"])
def test_a_config_that_is_none_refuses_the_merge(tmp_path: Path, side: str, what: str) -> None:
    """A pipe is not waited for and no nesting is a bug: the merge is refused with what stands against it."""
    builders.lora_adapter(tmp_path / "adapter")
    builders.llama_model(tmp_path / "base")
    odd(tmp_path / side, what)
    seen = preview.look([tmp_path / "adapter"], tmp_path / "base")
    assert seen.outcome == "refuse"
    assert {one.severity for one in seen.findings} >= {"block"}


@pytest.mark.parametrize("what", ["pipe", "deep"])
def test_whatever_is_read_by_hand_is_read_within_bounds(tmp_path: Path, what: str) -> None:
    """Config, index, tokenizer, template and record of an earlier result hold nothing where they are odd."""
    names = ("x.json", "tokenizer_config.json", "chat_template.json", "merge.json")
    for name in names:
        odd(tmp_path / name, what)
        assert table_at(tmp_path / name) is None
    folder = Folder(tmp_path, {name: (str(tmp_path / name), "tokenizer") for name in names})
    assert [folder.table(name) for name in names] == [{}] * len(names)
    assert staging.same(tmp_path, "a" * 64, "merge.json") is None


def test_a_merge_that_is_refused_is_no_cast(tmp_path: Path) -> None:
    """A whole model in the place of the adapter is refused as what was asked for: a merge."""
    model = builders.llama_model(tmp_path / "base")
    with pytest.raises(errors.RefusedError, match="this merge is refused"):
        start.merge(preview.look([model], model), tmp_path / "out")
    adapter = builders.lora_adapter(tmp_path / "adapter")
    with pytest.raises(errors.RefusedError, match="this cast is refused"):
        casting.cast(casting.look(adapter, dtype="fp32"), tmp_path / "out")


# ----------------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("dangling", "is a link"),
        ("linked", "is a link"),
        ("loop", "is a link"),
        ("linked/", "is a link"),
        ("note.txt", "is a file"),
        ("note.txt/out", "cannot be written"),
        ("dangling/out", "cannot be written"),
        ("loop/out", "cannot be written"),
    ],
)
def test_a_place_that_no_folder_can_appear_at_is_told_first(desk: Desk, target: str, words: str) -> None:
    """Links, files and what lies below them are refused before any side is looked at; nothing is left beside them."""
    (desk.folder / "dangling").symlink_to("nowhere")
    (desk.folder / "linked").symlink_to("base")
    (desk.folder / "loop").symlink_to("loop")
    (desk.folder / "note.txt").touch()
    before = set(desk.folder.iterdir())
    for command in (("merge", "./missing", "--base", "./missing"), ("cast", "./missing", "--dtype", "fp32")):
        done = desk.registry(*command, "--to", target)
        assert done.code == errors.ConflictError.exit_code
        assert words in done.err
    assert set(desk.folder.iterdir()) - before <= {desk.cache}


def test_a_place_where_nothing_may_be_written_is_told_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest folder above that is there decides, before any side is looked at."""
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != desk.folder)
    done = desk.registry("merge", "./missing", "--base", "./missing", "--to", "new/deeper/out")
    assert done.code == errors.DeniedError.exit_code
    assert "cannot be written" in done.err
    assert not (desk.folder / "new").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("adaptr", "--base", "base"), ["no folder here", "did you mean adapter?"]),
        (("./adaptr", "--base", "base"), ["did you mean adapter?"]),
        (("nothing-like-it", "--base", "base"), ["no folder here; as a version: there is no name"]),
        (("adapter@v3", "--base", "base"), ["there is no name 'adapter'"]),
        (("adapter", "--base", "example-org/other"), ["hf download example-org/other"]),
        (("runs", "--base", "base"), ["adapter: runs holds several artifacts", "such as runs/one"]),
        (("adapter", "--base", "runs"), ["base: runs holds several artifacts"]),
    ],
)
def test_a_wrong_word_is_told_with_what_was_meant(desk: Desk, words: tuple[str, ...], told: list[str]) -> None:
    """A folder with a slip in its name, a model that is not fetched yet, a folder of several: each has its cure."""
    for name in ("one", "two"):
        builders.lora_adapter(desk.folder / "runs" / name)
    said = desk.registry("merge", *words, "--to", "out")
    assert said.code in {errors.NotFoundError.exit_code, errors.RefusedError.exit_code}
    assert [one for one in told if one not in said.err] == []


def test_a_version_on_the_wrong_side_is_not_fetched(desk: Desk) -> None:
    """A model in the place of an adapter, and the other way round, is known by its kind."""
    desk.ok("push", "base", "--name", "chat")
    desk.ok("push", "adapter", "--name", "sft")
    merges = (("merge", "chat", "--base", "chat"), ("merge", "sft", "--base", "sft"))
    for words in (*merges, ("cast", "sft", "--dtype", "fp16")):
        said = desk.registry(*words)
        assert (said.code, "was published as" in said.err, "safetensors" in said.err) == (5, True, False), said.err


def test_with_json_nothing_but_the_error_is_on_stderr(desk: Desk) -> None:
    """What is said to people beside a merge is not said to programs, which read the one object there."""
    (desk.folder / "theirs").mkdir()
    (desk.folder / "theirs" / "file").touch()
    said = desk.registry("merge", "adapter", "--base", "base", "--to", "theirs", "--json")
    assert (said.code, said.error["code"]) == (7, "conflict")


def test_what_takes_long_is_announced(desk: Desk) -> None:
    """A comparison loads torch and says nothing for a while: one line says so before, for people only."""
    (desk.folder / "theirs").mkdir()
    (desk.folder / "theirs" / "file").touch()
    words = ("merge", "adapter", "--base", "base", "--to", "theirs")
    assert "are run to compare" in desk.registry(*words, "--behaviour").err
    for more in ((), ("--behaviour", "--json"), ("--behaviour", "-q")):
        assert "are run to compare" not in desk.registry(*words, *more).err


def test_a_folder_that_takes_long_to_hash_is_announced(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is named before it is hashed for publication, and only once; small ones, and programs, are not."""
    words = ("cast", "base", "--dtype", "fp32", "--name", "chat")
    assert "are hashed" not in desk.ok(*words).err
    monkeypatch.setattr(sides, "SILENT", (desk.folder / "base" / "model.safetensors").stat().st_size)
    assert desk.ok(*words).err.count(" of base are hashed: ") == 1
    assert desk.ok("merge", "adapter", "--base", "base", "--name", "sft").err.count("are hashed") == 1
    assert "are hashed" not in desk.ok(*words, "--json").err


@pytest.mark.parametrize("moment", ["before", "after"])
def test_who_loses_the_race_for_a_folder_leaves_nothing(tmp_path: Path, moment: str) -> None:
    """A folder that others made before the lock or before the rename is a conflict, and the scratch is gone."""
    look = casting.look(builders.llama_model(tmp_path / "model"), dtype="fp32")
    ready = staging.ready(look, tmp_path / "out", casting.RECORD)
    assert isinstance(ready, staging.Ready)

    def theirs() -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("{}")

    def work() -> None:
        with staging.working(ready):
            (ready.stage / staging.OUT).mkdir()
            (ready.stage / staging.JOURNAL).write_text("a file that is finished\n")
            theirs()
            staging.publish(ready, {})

    if moment == "before":
        theirs()
    with pytest.raises(errors.ConflictError, match="there already") as caught:
        work()
    assert caught.value.why == "it holds something else"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
