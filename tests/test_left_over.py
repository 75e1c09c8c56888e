"""Temporary files beside whole weights: what a dead save left over, and what a stalled one is still about to finish."""

import os
import time
from pathlib import Path

import pytest

from weighbridge.adapters import structure
from weighbridge.adapters.inspect import inspect
from weighbridge_testlib import builders


def aged(folder: Path, ages: dict[str, int]) -> None:
    """Set how many seconds ago each named file was changed last; the others were changed now."""
    for name, age in ages.items():
        os.utime(folder / name, (time.time() - age,) * 2)


@pytest.mark.parametrize("ending", [".tmp", ".part", ".partial", ".incomplete"])
def test_what_a_dead_save_left_over_is_no_reason_to_wait(tmp_path: Path, ending: str) -> None:
    """A temporary file older than the whole set beside it is told of, not published, and waited for by nobody."""
    folder = builders.llama_model(tmp_path, shards=3)
    left = f"model-00002-of-00003.safetensors{ending}"
    (folder / left).write_bytes(b"x")
    aged(folder, {left: 120, "model-00001-of-00003.safetensors": 60})
    assert structure.complete(folder, mark=False) is None
    found = inspect(folder)
    assert found.outcome == "accept"
    assert left not in {file.path for file in found.artifacts[0].files if file.publish}
    assert [f.subject for f in found.findings if f.code == "save-left-over"] == [left]


@pytest.mark.parametrize(
    ("left", "ages"),
    [
        ("model-00003-of-00003.safetensors.tmp", {"model-00003-of-00003.safetensors": 120}),  # about to be replaced
        ("model-00003-of-00003.safetensors.tmp", {"model.safetensors.index.json": 120}),  # the index comes last
        ("model-00001-of-00003.safetensors.tmp", {"model-00003-of-00003.safetensors": 120}),  # the third one's turn too
        ("model-00004-of-00004.safetensors.tmp", {}),  # the file it becomes is not there
        ("0f3a9c.incomplete", {}),
    ],
)
def test_a_stalled_save_is_waited_for(tmp_path: Path, left: str, ages: dict[str, int]) -> None:
    """While any weight or index is older than the temporary file, or its file is missing, somebody may come back."""
    folder = builders.llama_model(tmp_path, shards=3)
    (folder / left).write_bytes(b"x")
    aged(folder, {left: 90, **ages})
    assert structure.complete(folder, mark=False) == f"{left} is still being written"
    found = inspect(folder)
    assert found.outcome == "wait"
    assert "still-writing" in {f.code for f in found.findings}
