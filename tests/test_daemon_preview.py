"""The preview of a passage where folders change under it: told as a row, and the others are shown."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from weighbridge.config.load import load
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.preview import preview
from weighbridge_testlib.builders import lora_adapter


@pytest.mark.parametrize(("step", "reason"), [("judge", "Permission denied"), ("admit", "No such file")])
def test_a_folder_that_cannot_be_read_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, reason: str
) -> None:
    """Whatever of a folder cannot be read any more stands in its row as the reason, and the next one is shown."""
    for run in ("gone", "stays"):
        lora_adapter(tmp_path / "runs" / run / "final")
    config = tmp_path / "weighbridge.toml"
    config.write_text(
        f'[daemon]\nstate = "{tmp_path}/state"\n[remotes.team]\nurl = "{tmp_path}/remote"\n'
        f'[[watch]]\nroot = "{tmp_path}/runs"\n'
    )
    config.chmod(0o600)
    real = getattr(Intake, step)

    def late(intake: Intake, *given: Any, **named: Any) -> Any:
        if step == "judge" and "gone" in given[0].path:
            raise PermissionError(errno.EACCES, "Permission denied", given[0].path)
        if step == "admit":
            shutil.rmtree(tmp_path / "runs" / "gone", ignore_errors=True)
        return real(intake, *given, **named)

    monkeypatch.setattr(Intake, step, late)
    rows = {Path(row["path"]).parent.name: row for row in preview(load(config, {}), {}, backfill=True)}
    assert [rows[run]["publish"] for run in ("gone", "stays")] == [False, True]
    assert reason in rows["gone"]["reason"]
