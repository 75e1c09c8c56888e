"""Completion: a script for each shell, and words from the cache alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weighbridge.registry.flow import tags
from weighbridge_testlib.desk import Desk

SCRIPT = Path(sys.executable).parent / "registry"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose cache knows two names."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish("medical-sft")
    desk.shelf.publish("medical-sft")
    desk.shelf.publish("merge")
    tags.move(desk.remote, desk.shelf.registry, "medical-sft", "prod", 1, "lw")
    desk.ok("ls")
    return desk


def completed(line: str) -> list[str]:
    """Return what bash would offer at the end of a line."""
    world = os.environ | {
        "_REGISTRY_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run([SCRIPT], env=world, capture_output=True, text=True, check=False)
    return [word.partition(",")[2] for word in done.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(desk: Desk, shell: str) -> None:
    """The script names the program and its completion variable."""
    said = desk.ok("completion", shell)
    assert "_REGISTRY_COMPLETE" in said.out
    assert "registry" in said.out
    assert desk.registry("completion", "tcsh").code == 2


def test_commands_names_versions_and_tags_are_completed(desk: Desk) -> None:
    """From the cache, whatever the remote does meanwhile."""
    desk.root.rename(desk.folder / "gone")
    assert "rebuild" in completed("registry re")
    assert completed("registry pull me") == ["medical-sft", "merge"]
    assert completed("registry show medical-sft@") == ["medical-sft@v2", "medical-sft@v1"]
    assert completed("registry verify medical-sft:") == ["medical-sft:latest", "medical-sft:prod"]
    assert completed("registry pull nobody@") == []


def test_without_a_cache_nothing_is_offered_and_nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion never asks, never complains."""
    Desk(tmp_path, monkeypatch)
    assert completed("registry pull me") == []
