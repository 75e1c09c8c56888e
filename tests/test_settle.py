"""When a folder counts as finished: structure and rest, an end mark shortens the wait, file times prove nothing."""

import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.adapters import checkpoint, structure
from weighbridge.daemon.scan import Tree
from weighbridge.daemon.settle import (
    MARKED,
    FileStat,
    Listing,
    Seen,
    Settled,
    StillWriting,
    believable,
    judge,
    listing,
    same_shape,
    several_writers,
)
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint

QUIET = 60.0


class Watcher:
    """Looks at one real folder with a clock that the test moves."""

    def __init__(self, folder: Path, quiet: float = QUIET) -> None:
        self.folder, self.quiet, self.now = folder, quiet, 1000.0
        self.tree = Tree(str(folder.parent))
        self.seen: Seen | None = None

    def look(self, after: float = 0.0) -> Settled | StillWriting:
        """Let time pass, look, and return the verdict."""
        self.now += after
        files = self.tree.look(str(self.folder)) or Listing(())
        names = {f.path for f in files.files}
        verdict = judge(
            self.seen,
            files,
            self.now,
            quiet=self.quiet,
            structure=structure.complete(self.folder, mark=False) if self.folder.is_dir() else "gone",
            mark=checkpoint.end_mark(names, self.folder.name),
        )
        self.seen = verdict.seen
        return verdict


def _file(path: str, *, size: int = 10, ctime: int = 5) -> FileStat:
    return FileStat(path, size, 0, ctime, 1)


def test_structure_alone_is_not_enough(tmp_path: Path) -> None:
    """A whole folder is taken only after it has been at rest for the quiet time."""
    watcher = Watcher(lora_adapter(tmp_path / "final"))
    assert isinstance(watcher.look(), StillWriting)
    early = watcher.look(QUIET - 1)
    assert isinstance(early, StillWriting)
    assert "unchanged for 59 s of 60 s" in early.reason
    assert isinstance(watcher.look(1), Settled)


def test_quiet_time_alone_is_not_enough(tmp_path: Path) -> None:
    """A folder whose file is shorter than its header is never taken, however long nothing changes."""
    folder = lora_adapter(tmp_path / "final")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    watcher = Watcher(folder)
    watcher.look()
    for _ in range(5):
        verdict = watcher.look(86400)
        assert isinstance(verdict, StillWriting)
        assert "adapter_model.safetensors" in verdict.reason


def test_one_look_is_never_enough(tmp_path: Path) -> None:
    """Even without a quiet time two looks must agree."""
    watcher = Watcher(lora_adapter(tmp_path / "final"), quiet=0)
    assert isinstance(watcher.look(), StillWriting)
    assert isinstance(watcher.look(), Settled)


def test_a_change_starts_the_clock_anew(tmp_path: Path) -> None:
    """Rest is counted from the last look that saw a difference."""
    folder = lora_adapter(tmp_path / "final")
    watcher = Watcher(folder)
    watcher.look()
    watcher.look(50)
    (folder / "tokenizer.json").write_text("{}")
    assert isinstance(watcher.look(10), StillWriting)
    assert isinstance(watcher.look(59), StillWriting)
    assert isinstance(watcher.look(1), Settled)


@pytest.mark.parametrize("mtime", [0, 4102444800])
def test_file_times_do_not_count(tmp_path: Path, mtime: int) -> None:
    """Files from 1970 or from the future wait exactly as long as others."""
    folder = lora_adapter(tmp_path / "final")
    for path in folder.iterdir():
        os.utime(path, (mtime, mtime))
    watcher = Watcher(folder)
    watcher.look()
    assert isinstance(watcher.look(QUIET - 1), StillWriting)
    assert isinstance(watcher.look(1), Settled)


def test_an_end_mark_shortens_the_wait(tmp_path: Path) -> None:
    """A Trainer checkpoint that ends with trainer_state.json is taken after two seconds of rest."""
    watcher = Watcher(trainer_checkpoint(tmp_path / "checkpoint-5", step=5))
    watcher.look()
    assert isinstance(watcher.look(MARKED - 0.5), StillWriting)
    assert isinstance(watcher.look(0.5), Settled)


def test_an_end_mark_does_not_replace_structure(tmp_path: Path) -> None:
    """The mark is there and a shard is short: the folder is not finished."""
    folder = trainer_checkpoint(tmp_path / "checkpoint-5", step=5, adapter=False, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    body = shard.read_bytes()
    shard.write_bytes(body[:-8])
    watcher = Watcher(folder)
    watcher.look()
    assert isinstance(watcher.look(1000), StillWriting)
    shard.write_bytes(body)
    watcher.look()
    assert isinstance(watcher.look(QUIET), Settled)


def test_a_mark_that_is_not_the_newest_file_is_not_believed(tmp_path: Path) -> None:
    """A mark of an earlier save under a new one, or a copy in another order, only means the usual quiet time."""
    folder = trainer_checkpoint(tmp_path / "checkpoint-5", step=5)
    late = folder / "tokenizer.json"
    while late.exists() is False or late.stat().st_ctime_ns <= (folder / "trainer_state.json").stat().st_ctime_ns:
        late.write_text("{}")
    watcher = Watcher(folder)
    watcher.look()
    assert isinstance(watcher.look(QUIET - 1), StillWriting)
    assert isinstance(watcher.look(1), Settled)


def test_with_several_processes_a_mark_is_one_word_among_many(tmp_path: Path) -> None:
    """Rank files mean several writers, and then only the quiet time counts."""
    folder = trainer_checkpoint(tmp_path / "checkpoint-5", step=5, deepspeed_ranks=2)
    watcher = Watcher(folder)
    watcher.look()
    assert isinstance(watcher.look(QUIET - 1), StillWriting)
    assert isinstance(watcher.look(1), Settled)


@pytest.mark.parametrize(
    ("path", "several"),
    [
        ("rng_state_0.pth", True),
        ("rng_state.pth", False),
        ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", True),
        ("random_states_0.pkl", False),
        ("random_states_1.pkl", True),
        ("optimizer.pt", False),
        ("__0_0.distcp", True),
    ],
)
def test_rank_files_tell_of_several_writers(path: str, several: bool) -> None:
    """Files that exist once per process are known by their names."""
    assert several_writers([path]) is several


def test_a_mark_that_never_comes_only_means_quiet_time(tmp_path: Path) -> None:
    """A checkpoint whose trainer died before trainer_state.json is whole all the same, and waits as others do."""
    watcher = Watcher(trainer_checkpoint(tmp_path / "checkpoint-5", step=5, ended=False))
    watcher.look()
    assert isinstance(watcher.look(QUIET - 1), StillWriting)
    assert isinstance(watcher.look(1), Settled)


def test_an_empty_mark_is_no_mark() -> None:
    """A mark that was created but not written says nothing."""
    assert not believable(listing([_file("trainer_state.json", size=0)]), "trainer_state.json")
    assert believable(listing([_file("trainer_state.json"), _file("a", ctime=5)]), "trainer_state.json")
    assert not believable(listing([_file("trainer_state.json"), _file("a", ctime=6)]), "trainer_state.json")


def test_an_empty_folder_is_not_finished() -> None:
    """Nothing is not an artifact."""
    seen = Seen(Listing(()), 0, 0, 5)
    assert isinstance(judge(seen, Listing(()), 1000, quiet=1, structure=None, mark=None), StillWriting)


def test_a_log_that_grows_does_not_hold_a_model_back(tmp_path: Path) -> None:
    """What never belongs to an artifact takes no part in the verdict."""
    folder = lora_adapter(tmp_path / "run")
    (folder / "runs").mkdir()
    watcher = Watcher(folder)
    watcher.look()
    for name in ("train.log", "runs/events.out.tfevents.1", "trainer_log.jsonl"):
        (folder / name).write_text("more\n")
        watcher.look(10)
    assert isinstance(watcher.look(QUIET), Settled)


def test_change_time_alone_leaves_the_shape(tmp_path: Path) -> None:
    """A chmod or a time set back changes the fingerprint and not the shape; a later time changes both."""
    folder = lora_adapter(tmp_path / "final")
    tree = Tree(str(tmp_path))
    before = tree.look(str(folder))
    target = folder / "adapter_config.json"
    was = target.stat()
    while target.stat().st_ctime_ns == was.st_ctime_ns:
        target.chmod(0o600)
        target.chmod(0o644)
    after = tree.look(str(folder))
    assert before is not None
    assert after is not None
    assert before.fingerprint != after.fingerprint
    assert same_shape(before.shape, after.shape)
    os.utime(target, (was.st_mtime, was.st_mtime))
    restored = tree.look(str(folder))
    assert restored is not None
    assert same_shape(before.shape, restored.shape)
    os.utime(target, (was.st_mtime, was.st_mtime + 2))
    later = tree.look(str(folder))
    assert later is not None
    assert not same_shape(before.shape, later.shape)


BUILDERS = {
    "adapter": lambda folder: lora_adapter(folder, tokenizer=True),
    "sharded": lambda folder: llama_model(folder, shards=3),
    "checkpoint": lambda folder: trainer_checkpoint(folder, step=5),
    "ranks": lambda folder: trainer_checkpoint(folder, step=5, adapter=False, deepspeed_ranks=2),
}
NEEDED = ("adapter_config.json", "model.safetensors.index.json")


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(sorted(BUILDERS)), order=st.randoms(use_true_random=False), share=st.floats(0, 1))
def test_never_finished_before_the_last_byte(
    tmp_path_factory: pytest.TempPathFactory, kind: str, order: random.Random, share: float
) -> None:
    """Written in any order and in any chunks and stopped anywhere: what lacks a needed byte is never taken."""
    place = tmp_path_factory.mktemp("yard")
    whole = BUILDERS[kind](place / "whole")
    folder = place / ("checkpoint-5" if kind in {"checkpoint", "ranks"} else "final")
    folder.mkdir()
    bodies = {p.relative_to(whole).as_posix(): p.read_bytes() for p in sorted(whole.rglob("*")) if p.is_file()}
    chunks = {name: _chunks(body, order) for name, body in bodies.items()}
    sequence = [name for name, parts in chunks.items() for _ in parts]
    order.shuffle(sequence)
    watcher = Watcher(folder)
    for name in sequence[: round(share * len(sequence))]:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        with target.open("ab") as stream:
            stream.write(chunks[name].pop(0))
        assert isinstance(watcher.look(order.choice([0.1, 1.0, 3.0])), StillWriting)
    watcher.look(1)
    names = {path.name for path in folder.iterdir()}
    taken = isinstance(watcher.look(100 * QUIET), Settled) and checkpoint.is_candidate(names)
    # The line feed behind a JSON object is no part of it.
    lacking = [
        name
        for name, parts in chunks.items()
        if (name.endswith(".safetensors") or name in NEEDED) and b"".join(parts).strip()
    ]
    assert not (taken and lacking), f"taken although {lacking} lack bytes"
    if share == 1:
        assert taken
    shutil.rmtree(place)


def _chunks(body: bytes, order: random.Random) -> list[bytes]:
    cuts = sorted({0, len(body), *(order.randrange(len(body) + 1) for _ in range(2))})
    return [body[a:b] for a, b in itertools.pairwise(cuts)]
