"""The fixes that are named do work when they are followed: lost and damaged objects of a committed version."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import disk, layout
from weighbridge.registry.errors import DiskFullError
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.desk import Desk, conforms

NAME = "chg"
CONFIG = layout.version(NAME, 1, "adapter_config.json")
MANIFEST = layout.manifest(NAME, 1)
WEIGHTS = layout.version(NAME, 1, "adapter_model.safetensors")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a mirror."""
    desk = Desk(tmp_path, monkeypatch)
    (tmp_path / "backup").mkdir()
    with desk.config.open("a") as stream:
        stream.write(f'[remotes.backup]\nurl = "{tmp_path}/backup"\nmax_age = "1h"\n')
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", "team")
    return desk


@pytest.fixture
def desk(bare: Desk) -> Desk:
    """Return a desk with a mirror, and one version that was pushed from a folder."""
    bare.ok("push", lora_adapter(bare.folder / "source", seed=1), "--name", NAME)
    return bare


def spoil(file: Path, body: bytes) -> None:
    """Put other bytes into the place of an object."""
    file.chmod(0o600)
    file.write_bytes(body)


def fixes(desk: Desk, *more: str) -> list[str]:
    """Return the fixes of what verify finds."""
    said = desk.registry("verify", f"{NAME}@v1", "--json", *more)
    assert said.code == 5
    return [found["fix"] for found in said.json["findings"] if found["severity"] == "block"]


def follow(desk: Desk, fix: str) -> None:
    """Do what a fix says: delete the object it names first, then run its commands one after the other."""
    before, _, commands = fix.partition("then: ") if "then: " in fix else ("", "", fix)
    if before:
        (desk.root / before.partition("delete ")[2].split()[0]).unlink()
    commands = commands.partition(", with the folder")[0].replace("FOLDER", "source")
    for command in commands.split(" && "):
        desk.ok(*command.split()[1:])


@pytest.mark.parametrize(("key", "mirrored"), [(CONFIG, False), (CONFIG, True), (MANIFEST, False), (MANIFEST, True)])
def test_what_verify_names_mends_a_version_at_home(desk: Desk, key: str, mirrored: bool) -> None:
    """A lost object is put back by pushing the same bytes, a damaged one when it was deleted before."""
    if mirrored:
        desk.ok("mirror", NAME, "--to", "backup")
    whole = (desk.root / key).read_bytes()
    spoil(desk.root / key, whole[:-1] + bytes([whole[-1] ^ 1]))
    (fix,) = fixes(desk)
    assert ("--remote backup" in fix) == (mirrored and key == CONFIG)
    assert fix.endswith(" --remote team --mend") == (key == MANIFEST)
    follow(desk, fix)
    assert (desk.root / key).read_bytes() == whole
    assert desk.ok("verify", f"{NAME}@v1").out.endswith("sound\n")
    (desk.root / key).unlink()
    (fix,) = fixes(desk)
    assert "delete" not in fix
    follow(desk, fix)
    assert (desk.root / key).read_bytes() == whole


def test_papers_follow_from_the_rest(desk: Desk) -> None:
    """A card that is lost or damaged is rendered anew, a history too, and the team is told of the new card."""
    for path in ("README.md", "training.json"):
        (desk.root / layout.version(NAME, 1, path)).unlink(missing_ok=True)
    (fix,) = fixes(desk)
    copy, _, command = fix.partition("; or ")
    assert copy == "restore it from a copy of the remote: a mirror holds the same object, with people's words"
    assert command == f"registry verify {NAME}@v1 --remote team --mend"
    said = conforms(desk.ok(*command.split()[1:], "--json").json, "verify")
    assert said["mended"][0] == layout.version(NAME, 1, "README.md")
    spoil(desk.root / layout.version(NAME, 1, "README.md"), b"torn")
    (fix,) = fixes(desk)
    assert fix.startswith(
        "restore it from a copy of the remote: a mirror holds the same object, with people's words; or "
    )
    follow(desk, fix)
    assert conforms(desk.ok("verify", f"{NAME}@v1", "--mend", "--json").json, "verify")["mended"] == []


def test_a_torn_decision_that_the_catalogue_left_out_is_mended(desk: Desk) -> None:
    """After a rebuild the team knows nothing of it; by its number it is named, and mended, all the same."""
    whole = (desk.root / MANIFEST).read_bytes()
    spoil(desk.root / MANIFEST, b'{"to')
    assert desk.registry("rebuild").code == 5
    (fix,) = fixes(desk)
    assert fix == f"delete {MANIFEST} on the remote, then: registry verify {NAME}@v1 --remote team --mend"
    assert fix.partition(" --remote")[0] in desk.registry("verify", f"{NAME}@v1", "--mend").err
    follow(desk, fix)
    assert (desk.root / MANIFEST).read_bytes() == whole
    assert desk.ok("pull", f"{NAME}@v1", "pulled").code == 0


def test_a_decision_is_made_again_of_whole_files_alone(desk: Desk) -> None:
    """What vouches for files is put back when all of them were read and are right; else it is said which is not."""
    for key in (CONFIG, WEIGHTS):
        whole = (desk.root / key).read_bytes()
        (desk.root / MANIFEST).unlink()
        spoil(desk.root / key, whole[:-1] + b"?")
        said = desk.registry("verify", f"{NAME}@v1", "--mend", "--json")
        assert said.code == 5
        assert said.error["why"] == f"{key} holds other bytes than its record says; nothing was put back"
        assert not (desk.root / MANIFEST).exists()
        (desk.root / key).unlink()
        assert f"{key} is missing as well" in desk.registry("verify", f"{NAME}@v1", "--mend").err
        follow(desk, said.error["fix"])
        assert (desk.root / MANIFEST).exists()


@pytest.mark.parametrize("lost", [True, False])
def test_a_claim_comes_back_from_a_mirror(desk: Desk, lost: bool) -> None:
    """Nobody can make one anew: push and verify name the way over a copy, and after it both go on."""
    desk.ok("mirror", NAME, "--to", "backup")
    claim = desk.root / layout.claim(NAME, 1)
    whole = claim.read_bytes()
    claim.unlink() if lost else spoil(claim, b"torn")
    (fix,) = fixes(desk)
    if not lost:
        assert f"fix: {fix}" in desk.registry("verify", f"{NAME}@v1", "--mend").err
        lora_adapter(desk.folder / "more", seed=2)
        assert fix in desk.registry("push", "more", "--name", NAME).err
        claim.unlink()
    way = fix.partition("then: ")[2].partition(", from")[0].replace("MIRROR", "backup").replace("REMOTE", "team")
    desk.ok(*way.split()[1:])
    assert claim.read_bytes() == whole
    assert desk.ok("verify", f"{NAME}@v1").out.endswith("sound\n")
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "r")
    claim.unlink()
    desk.ok(*way.split()[1:])
    assert claim.read_bytes() == whole


def test_a_version_with_a_torn_decision_is_taken_back(desk: Desk) -> None:
    """Its claim says what it was; readers, a mirror and a push are told of the withdrawal from then on."""
    spoil(desk.root / MANIFEST, b'{"torn')
    said = desk.registry("mirror", NAME, "--to", "backup")
    assert (said.code, f"refused, {MANIFEST} is damaged at its home" in said.err) == (5, True)
    assert f"fix: registry verify {NAME}@v1" in said.err
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "torn")
    for command in ("pull", "verify", "show"):
        said = desk.registry(command, f"{NAME}@v1", "--json")
        assert (said.code, said.error["code"]) == (3, "withdrawn"), command
    told = conforms(desk.ok("mirror", NAME, "--to", "backup", "--json").json, "mirror")
    assert ([one["outcome"] for one in told["versions"]], told["withdrawn"]) == (["withdrawn"], 1)
    assert "--again" in desk.registry("push", "source", "--name", NAME).err
    assert desk.ok("push", "source", "--name", NAME, "--again").out == "chg@v2\n"
    days_ago = time.time() - 8 * 86_400
    os.utime(desk.root / layout.withdrawn(NAME, 1), (days_ago, days_ago))
    desk.ok("purge", f"{NAME}@v1", "--yes")
    assert not (desk.root / WEIGHTS).exists()


def test_a_push_tells_what_it_put_back_and_what_it_cannot(desk: Desk) -> None:
    """What is lost is mended under its number; of what is damaged the ways out are named, and they work."""
    (desk.root / CONFIG).unlink()
    said = desk.ok("push", "source", "--name", NAME)
    assert (said.out, "mended: adapter_config.json of chg@v1 is missing" in said.err) == ("chg@v1\n", True)
    assert "by size alone: registry verify chg@v1" in desk.ok("push", "source", "--name", NAME).err
    spoil(desk.root / CONFIG, b"{}")
    said = desk.registry("push", "source", "--name", NAME)
    assert (said.code, (desk.root / CONFIG).read_bytes()) == (5, b"{}")
    assert 'fix: registry withdraw chg@v1 --reason "...", then registry push source --name chg --again' in said.err
    assert f"or delete {CONFIG} on the remote and repeat" in said.err
    manifest = desk.root / layout.manifest(NAME, 1)
    whole = manifest.read_bytes()
    for torn in (b"torn", whole.replace(b"weighbridge/manifest/1", b"weighbridge/manifest/3"), whole[:-1] + b" }"):
        spoil(manifest, torn)
        error = desk.registry("push", "source", "--name", NAME, "--json").error
        if torn.endswith(b" }"):  # it says the same in other bytes: the claim could as well be the damaged one
            assert error["fix"].startswith(f"registry verify {NAME}@v1 tells which")
            assert fixes(desk)[0].startswith(f"delete {layout.manifest(NAME, 1)} on the remote")
            continue
        assert error["fix"].startswith(f"delete {layout.manifest(NAME, 1)} on the remote")
        assert desk.registry("pull", f"{NAME}@v1", "x", "--json").error["fix"] == f"registry verify {NAME}@v1"
    spoil(manifest, whole)
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "damaged")
    assert desk.ok("push", "source", "--name", NAME, "--again").out == "chg@v2\n"


def test_a_damaged_copy_is_remembered_and_not_called_sound(desk: Desk) -> None:
    """What verify found last from here counts, for show and for where a sound copy is fetched."""
    desk.ok("mirror", NAME, "--to", "backup")
    for root in (desk.folder / "backup", desk.root):
        spoil(root / WEIGHTS, b"x")
    assert "--remote team --to backup" in fixes(desk, "--remote", "backup")[0]
    document = conforms(desk.ok("show", f"{NAME}@v1", "--json").json, "show")
    assert [copy["verified"] for copy in document["copies"]] == ["sha256-read", "damaged"]
    assert "backup" not in fixes(desk)[0]
    assert "(damaged at 20" in desk.ok("show", f"{NAME}@v1").out
    document = conforms(desk.ok("show", f"{NAME}@v1", "--json").json, "show")
    assert [copy["verified"] for copy in document["copies"]] == ["damaged", "damaged"]
    (desk.root / WEIGHTS).unlink()
    desk.ok("push", "source", "--name", NAME)
    assert desk.ok("show", f"{NAME}@v1", "--json").json["copies"][0]["verified"] == "sha256-read"


def test_a_copy_that_nobody_compared_is_not_called_sound(desk: Desk) -> None:
    """Of a copy that is only known to be there, the fix says how to find out what it is worth."""
    desk.ok("mirror", NAME, "--to", "backup")
    for path in (desk.cache / "catalog").iterdir():
        path.unlink()
    desk.ok("ls", "--remote", "backup")
    spoil(desk.root / WEIGHTS, b"x")
    assert fixes(desk)[0].startswith(f"registry verify {NAME}@v1 --remote backup tells whether its copy is sound; ")


def test_what_lies_in_the_cache_names_the_variable_that_moves_it(bare: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or closed cache was named by nobody: the fix says how to put it elsewhere."""
    for error, words in (
        (DiskFullError(f"there is no room to stage in {bare.cache}/stage/x", fix="f"), "with more room"),
        (disk.translate(OSError(errno.EROFS, "read-only", f"{bare.cache}/merge"), "cannot make it"), "can write to"),
        (OSError(errno.EROFS, "Read-only file system", f"{bare.cache}/x"), "can write to"),
        (DiskFullError(f"there is no room in {bare.cache}2/x", fix="free some space"), None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("weighbridge.registry.cli.push.begin", raising(error))
            said = bare.registry("push", "source", "--name", NAME, "--json")
        assert said.error["fix"].endswith(words or "free some space")
        assert ("WEIGHBRIDGE_CACHE" in said.error["fix"]) == (words is not None)


def raising(error: Exception) -> Any:
    """Return a function that fails."""

    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_file_too_many_in_a_pulled_folder_is_to_be_removed(desk: Desk) -> None:
    """What verify says of it works; another pull would not."""
    desk.ok("pull", f"{NAME}@v1", "model")
    (desk.folder / "model" / "notes.txt").write_text("mine")
    (found,) = desk.registry("verify", "./model", "--json").json["findings"]
    assert (found["code"], found["fix"]) == ("file-extra", "remove it, or move it away")
    (desk.folder / "model" / "notes.txt").unlink()
    desk.ok("verify", "./model")


def test_a_dangling_link_is_named_with_its_place(bare: Desk) -> None:
    """What it points to is said, and what to do."""
    lora_adapter(bare.folder / "source", seed=1)
    (bare.folder / "source" / "merges.txt").symlink_to("/nowhere/merges.txt")
    error = bare.registry("push", "source", "--name", NAME, "--json").error
    assert error["message"] == "merges.txt is a link to nothing"
    assert "source/merges.txt points to /nowhere/merges.txt" in error["why"]
    assert error["fix"] == "put the file there, or remove the link"


def test_a_configuration_that_cannot_be_written_names_the_folder(bare: Desk) -> None:
    """Nobody is told of a temporary file that they have not named."""
    error = bare.registry("init", "--path", "/proc/x.toml", "--json").error
    assert error["message"] == "cannot write /proc/x.toml"
    assert ".weighbridge-" not in str(error)
    assert error["fix"]


def test_damage_of_another_name_is_told_with_what_helps(desk: Desk) -> None:
    """It is no error of the command: with --json an error that follows stands alone."""
    desk.shelf.publish("other", tell_version=False)
    spoil(desk.root / layout.manifest("other", 1), b"torn")
    assert "(what helps says: registry verify other@v1)" in desk.registry("pull", f"{NAME}@v9", "x").err
    assert desk.registry("pull", f"{NAME}@v9", "x", "--json").error["code"] == "not-found"
