"""What people are told to type names the remote that they named, as it can be typed, and works as it stands."""

import os
import shlex
import time
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.cli.output import aimed
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


@pytest.mark.parametrize(
    ("told", "aimed_at"),
    [
        ("registry ls", "registry ls --remote team"),
        ("registry ls chg --all shows what is left", "registry ls chg --remote team --all shows what is left"),
        ("registry sweep removes them", "registry sweep --remote team removes them"),
        ("then: registry verify chg@v1 --mend makes it", "then: registry verify chg@v1 --remote team --mend makes it"),
        ("registry tag chg; then repeat", "registry tag chg --remote team; then repeat"),
        ("registry mirror NAME --to REMOTE, or NAME@v7", "registry mirror NAME --remote team --to REMOTE, or NAME@v7"),
        (
            "registry pull c@v1 there --remote backup && registry push there --name c",
            "registry pull c@v1 there --remote backup && registry push there --remote team --name c",
        ),
        ("publish it anew with: registry push --again", "publish it anew with: registry push --again"),
        ("registry status says why, registry inspect ./x too", "registry status says why, registry inspect ./x too"),
    ],
)
def test_every_command_of_a_text_names_the_remote_that_was_named(told: str, aimed_at: str) -> None:
    """Wherever it stands in a sentence, and once; what is only spoken of, or asks no remote, stays as it is."""
    assert aimed(told, "team") == aimed_at
    assert aimed(aimed_at, "team") == aimed_at
    assert aimed(told, None) == told


def test_a_fix_mends_the_remote_that_was_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names another one, where the version is sound: followed, the fix does not look there."""
    desk.ok("mirror", NAME, "--remote", str(desk.root), "--to", "team")
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", "team")
    manifest = desk.root / layout.manifest(NAME, 1)
    manifest.chmod(0o600)
    manifest.write_bytes(b"torn")
    fix = desk.registry("push", "source", "--name", NAME, "--remote", str(desk.root), "--json").error["fix"]
    command = fix.partition("then: ")[2].partition(" makes ")[0]
    told = desk.registry("mirror", NAME, "--remote", str(desk.root), "--to", "team", "--json").json["versions"][0]
    assert told["fix"] == f"registry verify {NAME}@v1 --remote {shlex.quote(str(desk.root))}"
    manifest.unlink()
    follow(desk, command)
    assert manifest.exists()
    said = desk.ok("push", "source", "--name", NAME, "--remote", str(desk.root))
    assert f"registry verify {NAME}@v1 --remote {shlex.quote(str(desk.root))} reads it" in said.err
