"""`registry inspect` and the daemon's look on hostile folders and files: a named refusal each, and nothing runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge_testlib import hostile, hostile_folders, hostile_look
from weighbridge_testlib.bench import Bench

pytestmark = pytest.mark.long

POISON = (
    "index-surrogate", "index-escape", "index-hole", "pipe-README.md", "pipe-config.json", "pipe-weighbridge.yaml",
    "link-", "socket", "folder-as-", "name-no-utf-8", "name-lines", "sidecar-runs", "card-runs", "safetensors-hole",
)  # fmt: skip
"""Attacks of which each would stop a daemon in a way of its own."""

EVERY = 5
"""One file in so many of the corpus of files is looked at by the command here; the proof `hostile` looks at all."""


def judged(corpus: Path, labels: list[str]) -> dict[str, dict[str, Any]]:
    """Look at entries of a corpus, each in a process of its own, watched and under hard limits."""
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge_testlib.hostile_look", str(corpus)],
        input=json.dumps(labels),
        env={**os.environ, "PYTHONPATH": str(Path(hostile_look.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    return {line["label"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Look at every folder that is quick to make, and at a share of the files."""
    home = tmp_path_factory.mktemp("hostile")
    canary = home / "canary"
    attacks = hostile_folders.folders(home / "folders", canary, light=True)
    files = hostile.corpus(home / "files", canary)[::EVERY]
    before = {path: path.lstat().st_mtime_ns for path in sorted(home.rglob("*"))}
    found = judged(home / "folders", [attack.label for attack in attacks])
    found |= judged(home / "files", [file.label for file in files])
    harmless = {attack.label: attack.harmless for attack in attacks} | {file.label: file.harmless for file in files}
    for label, passes in harmless.items():
        found[label]["harmless"] = passes
    sound = {home / part / hostile_look.SOUND for part in ("folders", "files")}
    after = {
        path: path.lstat().st_mtime_ns
        for path in sorted(home.rglob("*"))
        if path not in sound and not sound & set(path.parents)
    }
    del before[home / "folders"], after[home / "folders"], before[home / "files"], after[home / "files"]
    assert before == after, "looking changed something"
    assert not canary.exists(), "something ran"
    return found


def test_there_are_many_attacks(verdicts: dict[str, dict[str, Any]]) -> None:
    """Far more than the sixty that were asked for, of every kind."""
    assert len(verdicts) >= 180


def test_every_entry_ends_in_words(verdicts: dict[str, dict[str, Any]]) -> None:
    """Accepted, refused or not finished: no bug, no traceback, no process that a limit had to end."""
    assert {label: v for label, v in verdicts.items() if v["code"] not in {0, 5, 8}} == {}


def test_nothing_hostile_is_accepted(verdicts: dict[str, dict[str, Any]]) -> None:
    """Only what is not taken in anyway may be passed over; whatever would be loaded is refused by name."""
    assert [label for label, v in verdicts.items() if v["code"] == 0 and not v["harmless"]] == []
    assert [label for label, v in verdicts.items() if v["code"] and not v["codes"]] == []


def test_nothing_runs_and_nothing_is_written(verdicts: dict[str, dict[str, Any]]) -> None:
    """No import, no process, no socket, no file opened for writing."""
    assert {label: v["events"] for label, v in verdicts.items() if v["events"]} == {}


def test_no_name_steers_a_terminal_or_breaks_json(verdicts: dict[str, dict[str, Any]]) -> None:
    """What is printed is printable, and the JSON of the same look is JSON with the same verdict."""
    assert {label: v["steering"] for label, v in verdicts.items() if v["steering"]} == {}
    assert {label: v for label, v in verdicts.items() if "broken_json" in v or v["json_code"] != v["code"]} == {}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Return a daemon's jobs over an empty yard."""
    bench = Bench(tmp_path)
    yield bench
    bench.catalog.close()


def test_the_daemon_looks_at_hostile_runs_and_goes_on(bench: Bench, tmp_path: Path) -> None:
    """Each hostile run ends as a version without its poison or as a job that says why; none as a bug, all in one go."""
    canary = tmp_path / "canary"
    hostile_folders.folders(tmp_path / "kept", canary, light=True, only=POISON)
    (tmp_path / "kept").rename(bench.runs / "kept")
    bench.settle()
    bench.work()
    jobs = bench.store.jobs()
    assert len(jobs) > 12
    assert [job.path for job in jobs if job.state == "quarantined"] == []
    assert [job.path for job in jobs if job.state == "blocked" and not job.findings_list] == []
    assert bench.versions()
    assert not [path for path in bench.tree.nodes if "/link-root/root" in path or "/link-kernel/proc" in path]
    assert not canary.exists()
    published = {path.name for path in (bench.place / "remote").rglob("*") if path.is_file()}
    assert not published & {"secret.safetensors", "passwd"}
