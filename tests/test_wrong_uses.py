"""What people type by mistake is answered with what they meant, and with a command that works."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge_testlib import builders
from weighbridge_testlib.desk import Desk

NAME = "medical-sft"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with one published version."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish(NAME, step=100)
    return desk


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Return one desk for all that changes nothing: a version, a model, two adapters, a pipe and a dead link."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        desk = Desk(folder, patch)
        desk.shelf.publish(NAME, step=100)
        builders.llama_model(folder / "model")
        for name in ("a", "b"):
            builders.lora_adapter(folder / "two" / name, seed=ord(name))
        os.mkfifo(folder / "pipe")
        (folder / "dead").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        yield desk


WRONG: dict[str, tuple[int, str]] = {
    "show ./medical-sft": (2, "it is a path"),
    "show ''": (2, "it is empty"),
    f"show {NAME}@v1 --step 100": (2, "NAME --step 280"),
    f"ls {NAME}@v1": (3, f"registry show {NAME}@v1"),
    "ls ''": (3, "there is no name ''"),
    "ls --since ''": (2, "is no age"),
    "ls --remote s3:/bucket/prefix": (2, "s3://bucket/prefix"),
    f"pull {NAME} ''": (2, "write . for this folder"),
    "push '' --name x": (2, "write . for this folder"),
    "push pipe --name x": (3, "neither a file nor a folder"),
    "allow model --code file-shrot --reason x": (2, "did you mean file-short?"),
    "allow model --code file-short --reason x": (4, "cannot be allowed"),
    "push two --name x": (2, "registry push two/a --name x\n"),
    "push model --name x --kind adapter": (2, "it holds: model"),
    "push model --name x --allow license-unknow --reason y": (2, "did you mean license-unknown?"),
    "push model --name x --allow file-short --reason y": (4, "cannot be allowed"),
    "inspect dead": (3, "a link to nothing"),
    "diagnose dead": (3, "a link to nothing"),
    "extract dead --to x": (3, "a link to nothing"),
    "push dead --name y": (3, "a link to nothing"),
    **{
        f"{command} {place}": (3, "leads back to itself")
        for command in ("push --name y", "inspect", "diagnose", "extract --to x")
        for place in ("./loop", "loop/", "loop/below")
    },
    "merge ./loop --base model --to x": (3, "leads back to itself"),
    "merge two/a --base ./loop --to x": (3, "leads back to itself"),
    "merge dead --base model --to x": (3, "a link to nothing"),
    "cast loop/below --dtype fp32 --to x": (3, "there is no loop/below"),
    "verify ./loop": (3, "there is no folder ./loop"),
    "diagnose model --base ./loop": (3, "there is no base ./loop"),
    "extract model --to dead": (7, "is a link"),
    "extract model --to model/config.json": (7, "is a file"),
    f"inspect {NAME}@v1": (3, f"registry pull {NAME}@v1 DIR"),
    f"diagnose {NAME}:prod": (3, f"registry pull {NAME}:prod DIR"),
    "diagnose ''": (2, "write . for this folder"),
    "diagnose model --base ''": (2, "it is empty"),
    "diagnose model --base two/a": (2, "is an adapter"),
    "extract pipe --to x": (3, "neither a file nor a folder"),
    "extract model --to x": (2, "--name NAME publishes what"),
    "merge two/a --base two/b --to x": (5, "the model that the adapter was trained on"),
    "merge '' --base model --to x": (2, "it is empty"),
    "verify ./two/a --remote team": (2, "leave --remote out"),
    f"tag {NAME} nope --delete": (3, f"registry tag {NAME}"),
    "mirror ./medical-sft --to x": (2, "there is no remote"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_use_is_answered(shared: Desk, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """It ends with its code, and its words say what was meant."""
    code, said = WRONG[words]
    monkeypatch.chdir(shared.folder)
    monkeypatch.setenv("WEIGHBRIDGE_CONFIG", str(shared.config))
    monkeypatch.setenv("WEIGHBRIDGE_CACHE", str(shared.cache))
    told = shared.registry(*shlex.split(words))
    assert (told.code, told.out) == (code, "")
    assert said in told.err
    assert not (shared.folder / "x").exists()


def test_a_part_that_was_pulled_is_told_as_such(desk: Desk) -> None:
    """Pulling all into a folder that holds a part says so; with --force it becomes whole."""
    desk.ok("pull", NAME, "t", "--include", "*.json")
    told = desk.registry("pull", NAME, "t")
    assert told.code == 7
    assert "only a part" in told.err
    desk.ok("pull", NAME, "t", "--force")
    assert desk.ok("verify", "./t").out.endswith("sound\n")


def test_a_named_remote_makes_a_name_of_it(desk: Desk) -> None:
    """A folder that is called like a name is not compared instead of the version on the remote that was named."""
    desk.ok("pull", NAME)
    (desk.folder / NAME / "adapter_config.json").write_text("{}")
    assert desk.registry("verify", NAME).code == 5
    assert desk.ok("verify", NAME, "--remote", "team").out.endswith("sound\n")


def test_what_all_adds_is_told_apart(desk: Desk) -> None:
    """With --all the table says which versions were withdrawn, and the totals leave them out."""
    desk.shelf.publish(NAME, step=200)
    desk.ok("withdraw", f"{NAME}@v1", "--reason", "wrong data")
    told = desk.ok("ls", "--all")
    assert "withdrawn" in told.out
    assert "1 name, 1 version," in told.err
    assert "withdrawn" not in desk.ok("ls", NAME).out


def test_a_url_of_a_configured_remote_has_its_settings(desk: Desk) -> None:
    """Named by its address it is the remote that the configuration knows, by its name."""
    assert "on team" in desk.ok("ls", "--remote", str(desk.root)).err
