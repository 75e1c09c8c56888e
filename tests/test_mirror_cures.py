"""What a mirror's refusal advises works when it is followed to the letter: the lines, the table, the command."""

import re
import shlex
from pathlib import Path

import pytest

from weighbridge_testlib.builders import card, lora_adapter
from weighbridge_testlib.desk import Desk
from weighbridge_testlib.hub import TestHub
from weighbridge_testlib.hub.rig import environ

NAME = "chg"
RULES = {
    "paths": 'paths = "rewrite"\n',
    "not internal": "internal = false\n",
    "both": 'internal = false\npaths = "block"\n',
    "licence": 'unknown_license = "block"\n',
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with one version at home, sealed with its host and without a licence."""
    desk = Desk(tmp_path, monkeypatch)
    lora_adapter(tmp_path / "source", seed=1, readme=card(None, None))
    lora_adapter(tmp_path / "licensed", seed=1)
    desk.ok("push", "source", "--name", NAME)
    monkeypatch.setenv("WEIGHBRIDGE_REMOTE", "team")
    return desk


def refused(desk: Desk, to: str) -> str:
    """Return the fix of the mirror's refusal."""
    said = desk.registry("mirror", NAME, "--to", to, "--json")
    assert said.code == 5
    (one,) = said.json["versions"]
    return str(one["fix"])


def write(desk: Desk, fix: str) -> None:
    """Write the lines that a fix names into the table that it names, the last of the file or a new one."""
    told = fix.partition(" lets ")[0]
    lines = dict(re.findall(r'([a-z_]+) = ("[^"]*"|true)', told))
    (name,) = re.findall(r"\[remotes\.([^\]]+)\]", told)
    before, _, table = desk.config.read_text().partition(f"[remotes.{name}]\n")
    kept = [line for line in table.splitlines() if line.partition(" = ")[0] not in lines]
    desk.config.write_text(
        "\n".join([before, f"[remotes.{name}]", *(f"{k} = {v}" for k, v in lines.items()), *kept, ""])
    )


def push(desk: Desk, fix: str, folder: str = "source") -> None:
    """Run the command that a fix names."""
    command = fix.partition("; ")[2].partition(" publishes")[0].replace("FOLDER", folder).replace("OTHER-NAME", "other")
    assert command.startswith("registry push ")
    desk.ok(*shlex.split(command)[1:])


@pytest.mark.parametrize("rule", RULES)
def test_the_lines_of_a_fix_let_a_version_into_a_mirror(desk: Desk, rule: str) -> None:
    """They may stand beside what the table says already, and a second refusal has a fix that works, too."""
    (desk.folder / "backup").mkdir()
    with desk.config.open("a") as stream:
        stream.write(f'[remotes.backup]\nurl = "{desk.folder}/backup"\n{RULES[rule]}')
    fix = refused(desk, "backup")
    if rule != "licence":
        push(desk, fix)
    write(desk, fix)
    desk.ok("mirror", NAME, "--to", "backup")
    assert (desk.folder / "backup/models" / NAME / "v1/manifest.json").exists()


def test_the_table_of_a_fix_lets_a_version_into_a_mirror_that_had_none(
    desk: Desk, hub: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote that was named by its address is named so in commands, and its table has its address."""
    for key, value in environ(hub, desk.folder, HF_HUB_DISABLE_XET="1").items():
        if key.startswith("HF_"):
            monkeypatch.setenv(key, value)
    fix = refused(desk, "hf://acme")
    push(desk, fix, "licensed")
    write(desk, fix)
    write(desk, refused(desk, "hf://acme"))  # it has no licence, which the Hub asks for
    desk.ok("mirror", NAME, "--to", "acme")
    assert "v1" in hub.store.get(f"acme/{NAME}").tags
