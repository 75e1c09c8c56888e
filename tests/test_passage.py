"""`registryd once`: what it repeats at once, and that it never ends well with work undone."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge_testlib import kill
from weighbridge_testlib.builders import trainer_checkpoint
from weighbridge_testlib.yard import BIN, Yard


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
