"""What people are told to type names the remote that they named, as it can be typed, and works as it stands."""

import os
import shlex
import time
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.desk import Desk

NAME = "chg"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk whose remote has no name of its own: nothing but its folder is told."""
    desk = Desk(tmp_path, monkeypatch)
    desk.config.write_text(desk.config.read_text().replace(str(desk.root), str(tmp_path / "other")))
    (tmp_path / "a folder").mkdir()
    desk.root = desk.root.rename(tmp_path / "a folder" / "elsewhere")
    lora_adapter(tmp_path / "source", seed=1)
    desk.ok("push", "source", "--name", NAME, "--remote", "./a folder/elsewhere")
    return desk


def follow(desk: Desk, fix: str) -> None:
    """Run the commands of a fix."""
    for command in fix.replace("FOLDER", "source").split(" && "):
        desk.ok(*shlex.split(command)[1:])


def test_what_verify_names_is_a_remote_that_can_be_typed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was named as such is named in the fix by its whole path, whatever folder it is typed in."""
    (desk.root / layout.manifest(NAME, 1)).unlink()
    said = desk.registry("verify", f"{NAME}@v1", "--remote", "./a folder/elsewhere", "--json")
    (found,) = [one for one in said.json["findings"] if one["severity"] == "block"]
    monkeypatch.chdir(desk.folder / "source")
    follow(desk, found["fix"])
    assert (desk.root / layout.manifest(NAME, 1)).exists()


def test_what_doctor_names_is_a_remote_that_can_be_swept(desk: Desk) -> None:
    """What lies in a folder goes as doctor says; where no registry was begun there is nothing to sweep with."""
    plain = desk.folder / "plain"
    for root in (desk.root, plain):
        stage = root / f"models/{NAME}/_wb/stage/dead"
        stage.mkdir(parents=True)
        os.utime(stage, (time.time() - 1e6,) * 2)
    for root, known in ((desk.root, True), (plain, False)):
        checks = desk.registry("doctor", str(root), "--json").json["checks"]
        left = [one["fix"] for one in checks if one["name"].endswith("-leftovers")]
        assert bool(left) == known
        for fix in left:
            follow(desk, fix)
            assert not (root / f"models/{NAME}/_wb/stage/dead").exists()
