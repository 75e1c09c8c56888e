"""Several remotes of one name: `mirror`, `withdraw`, `verify --remote`, and the copies in `show`."""

import os
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import layout
from weighbridge.registry.flow import notes, tags
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.withdraw import GRACE
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge_testlib.builders import lora_adapter
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.shelf import payload

NAME = "medical-sft"


class Two(Desk):
    """A desk with a second remote, `backup`, and a name of three numbers; the second was given up."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, more: str = "") -> None:
        super().__init__(folder, patch)
        self.there = folder / "backup"
        self.there.mkdir()
        with self.config.open("a") as stream:
            stream.write(f'[remotes.backup]\nurl = "{self.there}"\nmax_age = "1h"\n{more}')
        patch.setenv("WEIGHBRIDGE_REMOTE", "team")
        self.shelf.publish(NAME, step=100)
        self.shelf.claim(NAME, step=150)
        self.shelf.void(NAME, 2)
        self.shelf.publish(NAME, step=200)
        self.backup = DirectoryRemote(self.there)

    def tag(self, tag: str, n: int | None) -> None:
        """Move a tag at home."""
        tags.move(self.remote, self.shelf.registry, NAME, tag, n, "lw", "it is better")

    def mirrored(self, *more: str) -> Any:
        """Mirror the name and return what was told."""
        return conforms(self.ok("mirror", NAME, "--to", "backup", "--json", *more).json, "mirror")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    """Return a desk with two remotes."""
    return Two(tmp_path, monkeypatch)


def outcomes(told: Any) -> list[tuple[int, str]]:
    """Return number and outcome of each version."""
    return [(one["version"], one["outcome"]) for one in told["versions"]]


# ------------------------------------------------------------------------------------------------------------ mirror


def test_a_name_is_copied_with_all_that_is_said_of_it(desk: Two) -> None:
    """Same numbers, claims, manifests, files, tags and notes; what was given up stays so; nothing is sealed anew."""
    desk.tag("prod", 1)
    desk.tag("prod", 3)
    notes.add(desk.remote, desk.shelf.registry, NAME, 3, "license", text="mit", who="lw")
    told = desk.mirrored()
    assert outcomes(told) == [(1, "copied"), (2, "void"), (3, "copied")]
    assert (told["tags"], told["notes"], told["withdrawn"], told["waiting"]) == (2, 1, 0, [])
    root = layout.MODELS + NAME
    ours = {stat.key: desk.remote.read(stat.key) for stat in desk.remote.list(root)}
    assert {stat.key: desk.backup.read(stat.key) for stat in desk.backup.list(root)} == ours
    listed = desk.ok("ls", NAME, "--all", "--remote", "backup", "--json").json["versions"]
    assert [(row["version"], row["state"], row["tags"], row["license"]) for row in listed] == [
        (3, "committed", ["latest", "prod"], "mit"),
        (2, "void", [], None),
        (1, "committed", [], "apache-2.0"),
    ]
    desk.ok("pull", f"{NAME}:prod", "model", "--remote", "backup")
    assert desk.ok("verify", "./model").out.endswith("sound\n")


def test_doing_it_again_changes_nothing(desk: Two) -> None:
    """The second time everything is there; a new version and a moved tag come with the third."""
    desk.mirrored()
    before = [stat.key for stat in desk.backup.list("")]
    assert outcomes(desk.mirrored()) == [(1, "there"), (2, "void"), (3, "there")]
    assert [stat.key for stat in desk.backup.list(layout.MODELS)] == [k for k in before if k.startswith(layout.MODELS)]
    desk.shelf.publish(NAME, step=300)
    desk.tag("prod", 4)
    said = desk.ok("mirror", NAME, "--to", "backup")
    assert (
        said.out
        == f"{NAME}: 1 version copied to backup (2.03 kB), 2 there already; 1 tag move, 0 notes, 0 withdrawals\n"
    )


def test_one_version_and_a_tag_that_has_to_wait(desk: Two) -> None:
    """Only the version that was named is copied; a tag does not move there before its version is there."""
    desk.tag("prod", 1)
    desk.tag("prod", 3)
    told = conforms(desk.ok("mirror", f"{NAME}@v1", "--to", "backup", "--json").json, "mirror")
    assert (outcomes(told), told["tags"], told["waiting"]) == ([(1, "copied")], 1, ["prod"])
    assert desk.ok("pull", f"{NAME}:prod", "old", "--remote", "backup", "--json").json["version"] == 1
    told = desk.mirrored()
    assert (told["tags"], told["waiting"]) == (1, [])
    assert desk.ok("pull", f"{NAME}:prod", "new", "--remote", "backup", "--json").json["version"] == 3


def test_what_is_something_else_there_is_left_alone(desk: Two) -> None:
    """Another claim ends 7 and touches nothing; so does a tag that somebody moved at the mirror."""
    other = desk.folder / "other"
    desk.mirrored()
    tags.move(desk.backup, desk.shelf.registry, NAME, "prod", 1, "ann")
    desk.tag("prod", 3)
    said = desk.registry("mirror", NAME, "--to", "backup", "--json")
    assert (said.code, said.error["code"], conforms(said.json, "mirror")["diverged"]) == (
        7,
        "mirror-diverged",
        ["prod"],
    )
    moved = tags.current(desk.backup, NAME, "prod")
    assert moved is not None
    assert (moved.to, moved.who) == (1, "ann")
    other.mkdir()
    open_registry(DirectoryRemote(other), create=True)
    foreign = other / layout.claim(NAME, 1)
    foreign.parent.mkdir(parents=True)
    foreign.write_text("{}")
    said = desk.registry("mirror", NAME, "--to", str(other))
    assert said.code == 7
    assert foreign.read_text() == "{}"


def test_a_stricter_mirror_refuses_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sealed under milder rules is not copied to a remote with stricter ones; the command ends 5."""
    desk = Two(tmp_path, monkeypatch, more='deny_licenses = ["apache-2.0"]\n')
    said = desk.registry("mirror", NAME, "--to", "backup")
    assert said.code == 5
    assert f"{NAME}@v1: refused, its licence apache-2.0 is denied by backup" in said.err
    assert list(desk.backup.folders(f"{layout.MODELS}{NAME}/")) in ([], ["_wb", "v2"])


def test_what_cannot_be_mirrored_is_said(desk: Two) -> None:
    """Onto itself, an unknown name, a tag instead of a version."""
    for words, code in (
        ((NAME, "--to", "team"), 2),
        (("nothing", "--to", "backup"), 3),
        ((f"{NAME}:prod", "--to", "backup"), 2),
    ):
        said = desk.registry("mirror", *words)
        assert said.code == code, said.err
        assert "fix:" in said.err


# ---------------------------------------------------------------------------------------------------------- withdraw


def test_a_version_is_taken_back_here_and_on_mirrors(desk: Two) -> None:
    """It is neither listed nor pulled any more, its files stay, and the mark comes to a mirror with the next copy."""
    desk.mirrored()
    told = conforms(desk.ok("withdraw", f"{NAME}@v3", "--reason", "wrong data", "--json").json, "withdraw")
    assert (told["ref"], told["already"], told["copies"]) == (f"{NAME}@v3", False, ["backup"])
    again = desk.ok("withdraw", f"{NAME}@v3", "--reason", "again").err
    assert f"registry mirror {NAME}@v3 --remote team --to backup" in again
    assert [row["version"] for row in desk.ok("ls", NAME, "--json").json["versions"]] == [1]
    assert desk.registry("pull", f"{NAME}@v3").code == 3
    assert desk.remote.stat(layout.version(NAME, 3, "adapter_model.safetensors")).size
    assert desk.ok("pull", f"{NAME}@v3", "before", "--remote", "backup").code == 0
    assert desk.mirrored()["withdrawn"] == 1
    assert desk.registry("pull", f"{NAME}@v3", "after", "--remote", "backup").code == 3
    for command in (["show", f"{NAME}@v3"], ["pull", f"{NAME}@v3", "asked"]):
        asked = desk.registry(*command)
        assert asked.code == 3
        assert "wrong data" in asked.err
    said = desk.ok("withdraw", f"{NAME}@v3", "--reason", "again")
    assert "withdrawn before" in said.err
    assert "backup" not in said.err


def test_a_number_nobody_has_claimed_is_no_copy(desk: Two) -> None:
    """A number that is not there is a mistake, not a copy with nothing to do."""
    said = desk.registry("mirror", f"{NAME}@v9", "--to", "backup")
    assert said.code == 3
    assert f"no {NAME}@v9" in said.err


def test_a_remote_that_is_not_mounted_gets_no_second_registry(desk: Two) -> None:
    """Where a registry was seen, an empty folder is a mount that is missing: nothing is written to it."""
    desk.ok("mirror", NAME, "--to", "backup")
    adapter = lora_adapter(desk.folder / "adapter", seed=9)
    for folder, words in (
        (desk.root, ["push", adapter, "--name", "another"]),
        (desk.folder / "backup", ["mirror", NAME, "--to", "backup"]),
    ):
        away = folder.with_name(f"{folder.name}.away")
        folder.rename(away)
        folder.mkdir()
        said = desk.registry(*words)
        assert said.code == 6, said.err
        assert "mounted" in said.err
        assert not any(folder.iterdir())
        folder.rmdir()
        away.rename(folder)
        desk.ok(*words)


def test_a_tag_and_a_vague_reference_are_no_withdrawal(desk: Two) -> None:
    """A version that a tag stands on is kept, and what is taken back is named exactly and with a reason."""
    desk.tag("prod", 3)
    said = desk.registry("withdraw", f"{NAME}@v3", "--reason", "wrong data")
    assert said.code == 7
    assert f"registry tag {NAME} prod --delete" in said.err
    desk.ok("tag", NAME, "prod", "--delete")
    assert desk.registry("withdraw", NAME, "--reason", "wrong data").code == 2
    assert desk.registry("withdraw", f"{NAME}@v1", "--reason", " ").code == 2
    assert desk.registry("withdraw", f"{NAME}@v9", "--reason", "wrong data").code == 3


def test_files_go_only_after_a_withdrawal_and_its_grace(desk: Two) -> None:
    """Without --yes it is only said; within the grace it ends 8; then the payload goes and manifest and claim stay."""
    assert desk.registry("purge", f"{NAME}@v3", "--yes").code == 3
    desk.ok("withdraw", f"{NAME}@v3", "--reason", "wrong data")
    told = conforms(desk.ok("purge", f"{NAME}@v3", "--json").json, "purge")
    assert (told["dry_run"], told["files"], told["bytes"]) == (True, 3, sum(map(len, payload(3).values())))
    assert "--yes, after 20" in desk.ok("purge", f"{NAME}@v3").out
    early = desk.registry("purge", f"{NAME}@v3", "--yes")
    assert early.code == 8
    assert "repeat it after 20" in early.err
    mark = desk.root / layout.withdrawn(NAME, 3)
    long_ago = mark.stat().st_mtime - GRACE - 60
    os.utime(mark, (long_ago, long_ago))
    assert desk.ok("purge", f"{NAME}@v3", "--yes").out == f"3 files, 2.03 kB of {NAME}@v3 on team deleted\n"
    left = {stat.key.rpartition("/")[2] for stat in desk.remote.list(layout.version(NAME, 3))}
    assert left == {"README.md", "training.json", "manifest.json"}
    assert desk.ok("purge", f"{NAME}@v3", "--json").json["files"] == 0
    assert desk.registry("purge", NAME, "--yes").code == 2
    assert desk.ok("verify", f"{NAME}@v1").code == 0


# ------------------------------------------------------------------------------------------------------ show, verify


def test_show_says_which_remotes_hold_a_version(desk: Two) -> None:
    """Each copy with its state, the level at which it was verified from here, and when."""
    document = conforms(desk.ok("show", f"{NAME}@v3", "--json").json, "show")
    assert [(c["remote"], c["state"], c["verified"]) for c in document["copies"]] == [
        ("team", "committed", None),
        ("backup", "unknown", None),
    ]
    desk.mirrored()
    desk.ok("verify", f"{NAME}@v3")
    document = conforms(desk.ok("show", f"{NAME}@v3", "--json").json, "show")
    assert [(c["remote"], c["state"], c["verified"]) for c in document["copies"]] == [
        ("team", "committed", "sha256-read"),
        ("backup", "committed", "sha256-read"),
    ]
    assert document["version"]["where"] == ["team", "backup"]
    assert all(copy["verified_at"] for copy in document["copies"])
    lines = desk.ok("show", f"{NAME}@v3").out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("copies"))
    assert lines[at].startswith(f"copies    team   {desk.root}/models/{NAME}/v3   (sha256-read at ")
    assert lines[at + 1].startswith(f"          backup   {desk.there}/models/{NAME}/v3   (sha256-read at ")


def test_show_asks_every_remote_when_told_to(desk: Two) -> None:
    """With --copies a version that somebody else mirrored meanwhile is seen; one that is not there is absent."""
    desk.mirrored()
    for path in (desk.cache / "catalog").iterdir():
        path.unlink()
    found = desk.ok("show", f"{NAME}@v1", "--json", "--copies").json["copies"]
    assert [copy["state"] for copy in found] == ["committed", "committed"]
    desk.shelf.publish(NAME, step=400)
    found = desk.ok("show", f"{NAME}@v4", "--json", "--copies").json["copies"]
    assert [copy["state"] for copy in found] == ["committed", "absent"]


def test_verify_names_a_damaged_copy(desk: Two) -> None:
    """The copy on the mirror is read, the one at home is not; the command that is named mends it."""
    desk.mirrored()
    damaged = desk.there / layout.version(NAME, 1, "adapter_model.safetensors")
    damaged.chmod(0o600)
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    said = desk.registry("verify", f"{NAME}@v1", "--remote", "backup", "--read", "--json")
    document = conforms(said.json, "verify")
    (found,) = [found for found in document["findings"] if found["severity"] == "block"]
    assert found["code"] == "file-damaged"
    assert document["levels"] == {"sha256-read": 3}
    assert desk.ok("verify", f"{NAME}@v1").code == 0
    assert desk.registry("verify", f"{NAME}@v1", "--read", "--quick").code == 2
    command = f"registry mirror {NAME}@v1 --remote team --to backup"
    assert found["fix"].endswith(f"then: {command}")
    for harm, code in ((damaged.unlink, 0), (lambda: damaged.write_bytes(b"short"), 7)):
        harm()
        wrong = desk.registry("verify", f"{NAME}@v1", "--remote", "backup", "--json").json["findings"]
        assert command in wrong[0]["fix"]
        assert desk.registry(*command.split()[1:]).code == code
        damaged.chmod(0o600)
    assert damaged.read_bytes() == b"short"
    damaged.unlink()
    desk.ok(*command.split()[1:])
    assert desk.ok("verify", f"{NAME}@v1", "--remote", "backup", "--read").out.endswith("sound\n")


def test_a_damaged_home_names_the_copy_that_is_sound(desk: Two) -> None:
    """At home a copy comes back by a push of what is fetched: from where is said."""
    desk.mirrored()
    damaged = desk.root / layout.version(NAME, 1, "adapter_model.safetensors")
    damaged.chmod(0o600)
    damaged.write_bytes(b"x")
    assert f"registry pull {NAME}@v1 {NAME}-v1 --remote backup" in desk.registry("verify", f"{NAME}@v1").out


def test_a_folder_of_somebody_else_becomes_no_registry(desk: Two) -> None:
    """Among other files nothing is begun, by no command; hidden ones and a registry, half begun or whole, are fine."""
    other = desk.folder / "downloads"
    other.mkdir()
    (other / ".hidden").write_text("x")
    (other / "film.mkv").write_text("x")
    adapter = lora_adapter(desk.folder / "adapter", seed=9)
    for words in (
        ("mirror", NAME, "--to", str(other)),
        ("push", str(adapter), "--name", "another", "--remote", str(other)),
    ):
        said = desk.registry(*words)
        assert said.code == 2
        assert "film.mkv" in said.err
        assert sorted(path.name for path in other.iterdir()) == [".hidden", "film.mkv"]
    (other / "film.mkv").unlink()
    (other / "_wb" / "stage").mkdir(parents=True)  # of a command that was killed while it began the registry
    (other / "_wb" / "stage" / "8d58b9df78d5032ba55438fe.part").write_text("{")
    desk.ok("mirror", NAME, "--to", other)
    (other / "film.mkv").write_text("x")
    desk.ok("mirror", NAME, "--to", other)
