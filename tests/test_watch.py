"""Watching: finished folders are handed over once, events are hints, and the result is that of the scan alone."""

# ruff: noqa: ARG002 - the ledger's interface names more than the notebook writes down

import contextlib
import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import structure
from weighbridge.config.settings import WatchRule
from weighbridge.daemon import watch
from weighbridge.daemon.folders import Folders, Known, Settlement
from weighbridge.daemon.scan import Scan
from weighbridge.daemon.watch import Hints, Mode
from weighbridge_testlib.builders import llama_model, lora_adapter, trainer_checkpoint


class Notebook:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.settlements: list[Settlement] = []
        self.rounds: list[list[str]] = []
        self.lost: list[str] = []
        self.refused: list[str] = []
        self.late: list[tuple[str, str]] = []
        self.aside: dict[str, tuple[Known, int]] = {}
        self.first: bool = False
        self.memory: dict[str, Known] = {}

    def known(self, path: str) -> Known | None:
        """Return what was settled at a path."""
        return self.memory.get(path)

    def seen(self, rule: WatchRule, path: str) -> float:
        """Know of no earlier wait."""
        return 0.0

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """Write them down."""
        self.rounds.append([Path(one.path).name for one in settlements])
        self.settlements.extend(settlements)
        self.memory |= {one.path: one.known for one in settlements}

    def overdue(self, rule: WatchRule, path: str, reason: str, waited: float) -> None:
        """Write it down."""
        self.late.append((path, reason))

    def gone(self, path: str) -> None:
        """Write it down."""
        self.lost.append(path)
        self.memory.pop(path, None)

    def awaited(self, rule: WatchRule) -> list[str]:
        """Return what the test says was refused before."""
        return self.refused

    def first_scan(self, rule: WatchRule) -> bool:
        """Say what the test wants."""
        return self.first

    def baseline(self, rule: WatchRule, standing: Mapping[str, tuple[Known, int]]) -> None:
        """Write it down."""
        self.aside = dict(standing)
        self.memory |= {path: known for path, (known, _) in standing.items()}

    def names(self) -> list[str]:
        """Return the names of what settled, in order."""
        return [Path(s.path).name for s in self.settlements]


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def _folders(
    root: Path,
    book: Notebook,
    clock: Callable[[], float],
    *,
    hints: Hints | None = None,
    quiet: float = 60.0,
    scan: float = 30.0,
    wait_limit: float = 86400.0,
) -> Folders:
    given = hints or Hints(threading.Event())
    return Folders([WatchRule(str(root))], book, given, quiet=quiet, scan=scan, wait_limit=wait_limit, clock=clock)


def _let(folders: Folders, clock: Clock, seconds: float, pace: float = 0.5) -> None:
    end = clock.now + seconds
    while clock.now < end:
        folders.step()
        clock.now += pace
        if int(clock.now) % 30 == 0:
            folders.request_scan()
    folders.step()


@pytest.fixture
def hints() -> Iterator[Hints]:
    """Give watches and take them back."""
    wake = threading.Event()
    found = Hints(wake)
    yield found
    found.stop()


def test_a_finished_checkpoint_is_handed_over_once(tmp_path: Path) -> None:
    """It settles after its rest and is not handed over again while nothing changes."""
    trainer_checkpoint(tmp_path / "run/checkpoint-5", step=5)
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    _let(folders, clock, 300)
    assert book.names() == ["checkpoint-5"]
    assert book.settlements[0].marked


def test_siblings_found_in_one_scan_are_handed_over_together(tmp_path: Path) -> None:
    """Looks at two folders are never at the same instant; their end is told at once, even when a wake falls between."""
    for step in (1, 2, 3):
        llama_model(tmp_path / f"run/checkpoint-{step}", seed=step)
    book, clock = Notebook(), Clock()

    def ticking() -> float:
        clock.now += 0.004
        return clock.now

    folders = _folders(tmp_path, book, ticking, quiet=0.3, scan=1.0)
    for _ in range(400):
        folders.step()
        clock.now += 0.001
    assert sorted(book.rounds[0]) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert len(book.rounds) == 1


def test_a_folder_that_cannot_be_judged_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in a look at one folder, those of the same round settle."""
    for step in (1, 2, 3):
        llama_model(tmp_path / f"run/checkpoint-{step}", seed=step)
    real = structure.complete

    def complete(path: str, *, mark: bool) -> str | None:
        if path.endswith("checkpoint-2"):
            raise ZeroDivisionError
        return real(path, mark=mark)

    monkeypatch.setattr("weighbridge.daemon.folders.structure.complete", complete)
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    for _ in range(300):
        with contextlib.suppress(ZeroDivisionError):
            folders.step()
        clock.now += 0.5
    assert sorted(book.names()) == ["checkpoint-1", "checkpoint-3"]


def test_a_stalled_writer_is_waited_for(tmp_path: Path) -> None:
    """Shards with pauses, the index last, then a late tokenizer: one settlement, after the last file."""
    whole = llama_model(tmp_path / "whole", shards=4)
    root = tmp_path / "watched"
    target = root / "run/final"
    target.mkdir(parents=True)
    book, clock = Notebook(), Clock()
    folders = _folders(root, book, clock)
    names = [p.name for p in whole.iterdir() if p.suffix == ".safetensors"]
    for name in [*sorted(names), "config.json", "model.safetensors.index.json"]:
        body = (whole / name).read_bytes()
        for part in (body[: len(body) // 2], body[len(body) // 2 :]):
            with (target / name).open("ab") as stream:
                stream.write(part)
            folders.request_scan()
            _let(folders, clock, 2.5)
    _let(folders, clock, 6)
    shutil.copyfile(whole / "tokenizer.json", target / "tokenizer.json")
    written = clock.now
    _let(folders, clock, 50)
    assert not book.settlements
    _let(folders, clock, 20)
    assert book.names() == ["final"]
    assert clock.now - written < 60 + 10 + 1


def test_a_late_file_is_a_new_settlement(tmp_path: Path) -> None:
    """A tokenizer that comes after all makes the folder settle again."""
    folder = lora_adapter(tmp_path / "run/final")
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    _let(folders, clock, 70)
    (folder / "tokenizer.json").write_text("{}")
    _let(folders, clock, 140)
    assert book.names() == ["final", "final"]
    assert book.settlements[0].known != book.settlements[1].known


def test_growth_in_place_is_seen_without_events(tmp_path: Path) -> None:
    """A file that grows changes no folder time; an unfinished folder is looked at file by file."""
    folder = lora_adapter(tmp_path / "run/final")
    body = (folder / "adapter_model.safetensors").read_bytes()
    with (folder / "adapter_model.safetensors").open("r+b") as stream:
        stream.truncate(100)
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    _let(folders, clock, 100)
    (waiting,) = folders.waiting()
    assert "adapter_model.safetensors" in waiting.reason
    with (folder / "adapter_model.safetensors").open("ab") as stream:
        stream.write(body[100:])
    _let(folders, clock, 130)
    assert book.names() == ["final"]


def test_a_wait_beyond_the_limit_is_told_once_and_ends_when_the_file_comes(tmp_path: Path) -> None:
    """Waiting too long is a finding, never a publication."""
    folder = tmp_path / "run/final"
    lora_adapter(folder)
    (folder / "adapter_config.json").rename(tmp_path / "config")
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock, wait_limit=600.0)
    _let(folders, clock, 1500, pace=5)
    assert [p for p, _ in book.late] == [str(folder)]
    assert "adapter_config.json" in book.late[0][1]
    assert not book.settlements
    (tmp_path / "config").rename(folder / "adapter_config.json")
    _let(folders, clock, 1000, pace=5)
    assert book.names() == ["final"]


def test_what_stands_at_the_first_scan_is_set_aside_until_it_changes(tmp_path: Path) -> None:
    """A first start publishes nothing old; a folder that goes on changing is not old."""
    lora_adapter(tmp_path / "run/old")
    growing = lora_adapter(tmp_path / "run/growing")
    book, clock = Notebook(), Clock()
    book.first = True
    folders = _folders(tmp_path, book, clock)
    folders.born_ns = time.time_ns()
    _let(folders, clock, 70)
    assert sorted(Path(p).name for p in book.aside) == ["growing", "old"]
    assert not book.settlements
    (growing / "tokenizer.json").write_text("{}")
    lora_adapter(tmp_path / "run/new")
    _let(folders, clock, 140)
    assert sorted(book.names()) == ["growing", "new"]


def test_what_changed_after_we_began_is_not_old(tmp_path: Path) -> None:
    """A checkpoint that is saved while the daemon starts is published, whenever the first scan comes to it."""
    book, clock = Notebook(), Clock()
    book.first = True
    folders = _folders(tmp_path, book, clock)
    assert folders.born_ns < time.time_ns()
    lora_adapter(tmp_path / "run/saved-meanwhile")
    folders.first_look()
    _let(folders, clock, 70)
    assert not book.aside
    assert book.names() == ["saved-meanwhile"]


def test_rotation_while_waiting(tmp_path: Path) -> None:
    """A folder that goes away before it settled is named gone and forgotten."""
    folder = lora_adapter(tmp_path / "run/checkpoint-1")
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    _let(folders, clock, 5)
    shutil.rmtree(folder)
    _let(folders, clock, 40)
    assert book.lost == [str(folder)]
    assert not folders.waiting()
    assert not book.settlements


def test_a_folder_that_cannot_be_read_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission denied is a reason to wait, not to forget."""
    lora_adapter(tmp_path / "run/final")
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    _let(folders, clock, 1)

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    tree = folders.roots[str(tmp_path)].tree
    monkeypatch.setattr(tree, "look", refuse)
    _let(folders, clock, 40)
    assert not book.lost
    assert "cannot be read" in folders.waiting()[0].reason


def test_scans_keep_their_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next scan begins no sooner than a hundred times the last one's duration."""
    lora_adapter(tmp_path / "run/final")
    book, clock = Notebook(), Clock()
    folders = _folders(tmp_path, book, clock)
    state = folders.roots[str(tmp_path)]
    inner = state.tree.scan

    def slow(**how: Any) -> Scan:
        clock.now += 1.0
        return inner(**how)

    monkeypatch.setattr(state.tree, "scan", slow)
    folders.step()
    state.duration = 1.0
    scans = state.scans
    for _ in range(9):
        clock.now += 10
        folders.request_scan()
        folders.step()
    assert state.scans == scans
    clock.now += 12
    folders.step()
    assert state.scans == scans + 1


def _wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_events_name_the_folder_that_was_touched(tmp_path: Path, hints: Hints) -> None:
    """A file that was closed or renamed and a folder that was made or moved mark their folders."""
    root = tmp_path.resolve()
    (root / "run").mkdir()
    hints.start([str(root)])
    assert hints.modes[str(root)] == Mode("inotify")
    seen: set[str] = set()
    (root / "run/a.txt").write_text("x")
    (root / "run/a.txt").rename(root / "run/b.txt")
    (root / "tmp-checkpoint-5").mkdir()
    (root / "tmp-checkpoint-5").rename(root / "checkpoint-5")

    def all_there() -> bool:
        seen.update(hints.take().folders)
        return {str(root / "run"), str(root / "checkpoint-5")} <= seen

    _wait_for(all_there)


def test_with_events_a_new_checkpoint_is_seen_before_the_scan(tmp_path: Path, hints: Hints) -> None:
    """A hint leads to the folder although no scan is due for a long time."""
    (tmp_path / "run").mkdir()
    hints.start([str(tmp_path)])
    book = Notebook()
    folders = _folders(tmp_path, book, time.monotonic, hints=hints, quiet=0.3, scan=3600.0)
    folders.step()
    lora_adapter(tmp_path / "run/deep/er/checkpoint-1")
    _wait_for(lambda: folders.step() and book.settlements, 10)
    assert book.names() == ["checkpoint-1"]


def test_an_overflow_makes_everything_be_scanned_anew(tmp_path: Path, hints: Hints) -> None:
    """Watchdog tells only its log of lost events; that is heard, and a full scan follows."""
    lora_adapter(tmp_path / "run/checkpoint-1")
    hints.start([str(tmp_path)])
    clock = Clock()
    folders = _folders(tmp_path, Notebook(), clock, hints=hints)
    _let(folders, clock, 2)
    logging.getLogger("watchdog.observers.inotify_c").warning("Inotify queue overflowed; filesystem events were lost")
    assert hints.overflows == 1
    before = folders.roots[str(tmp_path)].full
    clock.now += 60
    folders.step()
    assert folders.roots[str(tmp_path)].full > before


def test_no_instances_left_means_scanning(tmp_path: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel refuses, the root is scanned only and says why."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "inotify instance limit reached")

    monkeypatch.setattr(watch, "InotifyObserver", refuse)
    hints.start([str(tmp_path)])
    assert hints.modes[str(tmp_path)].kind == "scan"
    assert "max_user_instances" in (hints.modes[str(tmp_path)].reason or "")


def test_too_few_watches_mean_scanning(tmp_path: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdog does not tell of sub-folders it could not watch; the kernel's own count does."""
    for number in range(5):
        lora_adapter(tmp_path / f"run/checkpoint-{number}")
    hints.start([str(tmp_path)])
    assert watch.kernel_watches() == 7
    folders = _folders(tmp_path, Notebook(), Clock(), hints=hints)
    monkeypatch.setattr(watch, "kernel_watches", lambda: 3)
    folders.step()
    assert folders.mode(str(tmp_path)).kind == "scan"
    assert "max_user_watches" in (folders.mode(str(tmp_path)).reason or "")


def test_a_network_root_is_scanned_only(tmp_path: Path, hints: Hints) -> None:
    """Events of other hosts do not come, so none are asked for."""
    hints.start([str(tmp_path)], scan_only=[(str(tmp_path), "nfs4")])
    assert hints.modes[str(tmp_path)] == Mode("scan", "nfs4")
    assert watch.kernel_watches() == 0


def test_a_linked_root_is_watched_where_it_really_lies(tmp_path: Path, hints: Hints) -> None:
    """Events are told under the name that people configured."""
    real = tmp_path / "disk2/runs"
    real.mkdir(parents=True)
    root = tmp_path / "watched"
    root.symlink_to(real)
    hints.start([str(root)])
    (real / "checkpoint-1").mkdir()
    _wait_for(lambda: str(root / "checkpoint-1") in hints.take().folders)


@pytest.mark.parametrize("events", [True, False])
def test_events_or_not_the_result_is_the_same(tmp_path: Path, hints: Hints, events: bool) -> None:
    """A burst of folders, files and renames ends in the same settlements with and without events."""
    if events:
        hints.start([str(tmp_path)])
    book = Notebook()
    folders = _folders(tmp_path, book, time.monotonic, hints=hints, quiet=0.3, scan=0.5)
    folders.step()
    for number in range(12):
        lora_adapter(tmp_path / f"run/a/b/checkpoint-{number}", seed=number)
    lora_adapter(tmp_path / "run/tmp-final").rename(tmp_path / "run/final")
    shutil.rmtree(tmp_path / "run/a/b/checkpoint-0")

    def settled() -> bool:
        folders.request_scan()
        folders.step()
        time.sleep(0.02)
        return len(set(book.names()) - {"checkpoint-0"}) == 12

    _wait_for(settled, 20)
    assert set(book.names()) - {"checkpoint-0"} == {"final", *(f"checkpoint-{n}" for n in range(1, 12))}
    assert len(book.names()) == len(set(book.names()))


def test_a_burst_of_small_files_does_not_hide_a_checkpoint(tmp_path: Path, hints: Hints) -> None:
    """Thousands of events for one noisy folder, and the checkpoint beside it is found."""
    cache = tmp_path / "run/cache"
    cache.mkdir(parents=True)
    hints.start([str(tmp_path)])
    book = Notebook()
    folders = _folders(tmp_path, book, time.monotonic, hints=hints, quiet=0.3, scan=1.0)
    folders.step()
    for number in range(3000):
        (cache / f"{number}.tmp").touch()
    lora_adapter(tmp_path / "run/checkpoint-5")
    _wait_for(lambda: folders.step() and book.settlements, 15)
    assert book.names() == ["checkpoint-5"]
