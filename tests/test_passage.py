"""`registryd once`: what it repeats at once, and that it never ends well with work undone."""

import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from weighbridge_testlib import kill
from weighbridge_testlib.builders import lora_adapter, trainer_checkpoint
from weighbridge_testlib.yard import BIN, Yard

pytestmark = pytest.mark.long


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard whose daemon looks quickly."""
    with Yard(tmp_path / "yard") as made:
        made.configure(daemon={"scan": "200ms", "quiet": "200ms"})
        yield made


def settled(yard: Yard, step: int) -> Path:
    """Leave a checkpoint that nobody has touched for a while."""
    folder = trainer_checkpoint(yard.runs / f"team/run-1/checkpoint-{step}", step=step, seed=step)
    for path in [*folder.iterdir(), folder]:
        os.utime(path, (time.time() - 600,) * 2)
    return folder


def test_a_repeated_passage_tries_again_at_once(yard: Yard) -> None:
    """What waits after an error is due for whoever runs `once` again: the cause may be gone."""
    settled(yard, 10)
    assert yard.daemon_once().returncode == 0
    away = yard.remote.rename(yard.folder / "away")
    settled(yard, 20)
    failed = yard.daemon_once()
    assert failed.returncode == 6, failed.stderr
    away.rename(yard.remote)
    again = yard.daemon_once()
    assert again.returncode == 0, again.stderr
    yard.check(contents=2, closed=True, state=True)


def test_a_missing_root_does_not_keep_the_others_from_being_published(yard: Yard) -> None:
    """What stands under the roots that are there is published first; the exit code then tells a cron job of the gap."""
    settled(yard, 10)
    with yard.config.open("a") as stream:
        stream.write(f'[[watch]]\nroot = "{yard.folder}/unmounted"\nhome = "team"\n')
    done = yard.daemon_once("--json")
    assert done.returncode == 3, done.stderr
    assert [row["n"] for row in json.loads(done.stdout)["published"]] == [1]
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["code"], told["exit_code"]) == ("not-found", 3)
    assert f"{yard.folder}/unmounted" in told["message"]
    (yard.folder / "unmounted").mkdir()
    assert yard.daemon_once().returncode == 0


def test_the_database_keeps_a_manifest_once(yard: Yard) -> None:
    """Of what is done the catalogue alone has the document, and whoever compares the folder reads it there."""
    folder = settled(yard, 10)
    assert yard.daemon_once().returncode == 0
    manifest = json.loads((yard.remote / "models/team-run-1/v1/manifest.json").read_text())
    packed = json.dumps(manifest["provenance"]["log_history"], separators=(",", ":"))
    assert "loss" in packed
    with closing(sqlite3.connect(yard.state / "weighbridge.db")) as link:
        tables = [name for (name,) in link.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        stored = [(name, row[1]) for name in tables for row in link.execute(f'PRAGMA table_info("{name}")')]
        values = [str(v) for name, key in stored for (v,) in link.execute(f'SELECT "{key}" FROM "{name}"')]
    assert sum(packed in value for value in values) == 1
    for path in folder.iterdir():
        path.chmod(0o600)  # only change times differ: the bytes are compared with the manifest
    assert json.loads(yard.daemon_once("--json").stdout)["published"] == []
    with closing(sqlite3.connect(yard.state / "weighbridge.db")) as link:
        assert link.execute("SELECT reason FROM jobs WHERE state = 'superseded'").fetchall() == [
            ("only change times differ from team-run-1@v1",)
        ]
    yard.check(contents=1, closed=True, state=True)


def test_what_a_dead_save_left_over_holds_nothing_up(yard: Yard) -> None:
    """A passage publishes the whole set beside an older temporary file, without it, and says so in the manifest."""
    folder = settled(yard, 10)
    left = folder / "adapter_model.safetensors.tmp"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 900,) * 2)
    done = yard.daemon_once()
    assert done.returncode == 0, done.stderr
    manifest = json.loads((yard.remote / "models/team-run-1/v1/manifest.json").read_text())
    assert left.name not in {file["path"] for file in manifest["files"]}
    assert [f["subject"] for f in manifest["findings"] if f["code"] == "save-left-over"] == [left.name]
    yard.check(contents=1, closed=True, state=True)


def test_a_passage_tells_of_what_it_could_not_name_or_read(yard: Yard) -> None:
    """A folder whose name is no UTF-8 and a database that was set aside stand on stderr, with what they are about."""
    settled(yard, 10)
    lora_adapter(yard.runs / "team/run-2/final")
    odd = os.fsencode(yard.runs / "team") + b"/caf\xe9"
    (yard.runs / "team/run-2").rename(os.fsdecode(odd))
    done = yard.daemon_once()
    assert done.returncode == 0, done.stderr
    (line,) = [text for text in done.stderr.splitlines() if "not UTF-8" in text]
    assert "caf\\xe9" in line
    database = yard.state / "weighbridge.db"
    database.write_bytes(b"SQLite format 3\0" + b"\xa5" * 8192)
    again = yard.daemon_once()
    assert again.returncode == 0, again.stderr
    (line,) = [text for text in again.stderr.splitlines() if "the database was damaged" in text]
    assert str(next((yard.state / "damaged").iterdir())) in line
    yard.check(contents=1, closed=True, state=True)


def test_a_passage_whose_database_fails_does_not_end_well(yard: Yard) -> None:
    """A disk error under the database in the middle is told and ends 1; the next passage publishes the rest."""
    reason = kill.available()
    if reason:
        pytest.skip(reason)
    for step in (10, 20):
        settled(yard, step)
    command = [str(BIN / "registryd"), "once"]
    for when in range(4, 40):
        fault = [f"--trace={(call := 'fdatasync')}", "--output=/dev/null", f"--inject={call}:error=EIO:when={when}"]
        done = subprocess.run(
            [*kill.STRACE, *fault, *command], env=yard.env, cwd=yard.folder, capture_output=True, text=True, check=False
        )
        report, _ = yard.look()
        if len(report["committed"]) < 2:
            assert done.returncode == 1, (when, done.stderr)
            break
    else:
        pytest.fail("no fault kept a version from being published")
    again = yard.daemon_once()
    assert again.returncode == 0, again.stderr
    yard.check(contents=2, closed=True, state=True)
