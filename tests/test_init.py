"""`registry init`: a commented configuration that loads at once, and the registry it names."""

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.config.load import DAEMON_KEYS, REMOTE_KEYS, WATCH_KEYS, load, read_text
from weighbridge.config.starter import starter
from weighbridge.registry.cli.main import main
from weighbridge.registry.errors import ConflictError, UsageError

SHAPE = {
    "type": "object",
    "required": ["schema", "path", "kept", "registries", "next"],
    "properties": {
        "schema": {"const": "weighbridge/init/1"},
        "path": {"type": "string"},
        "kept": {"type": "boolean"},
        "registries": {
            "type": "array",
            "items": {
                "required": ["remote", "url", "registry", "begun"],
                "properties": {"registry": {"type": ["string", "null"]}, "begun": {"type": "boolean"}},
            },
        },
        "next": {"type": "array", "items": {"type": "string"}},
    },
}


def test_a_watching_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With folders and a remote the file watches them, keeps versions there, and the registry is begun."""
    path = tmp_path / "weighbridge.toml"
    (tmp_path / "runs").mkdir()
    store = tmp_path / "store"
    assert main(["init", "--path", str(path), "--watch", str(tmp_path / "runs"), "--remote", str(store)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert "registryd install-unit" in captured.err
    assert f"export WEIGHBRIDGE_CONFIG={path}" in captured.err
    settings = load(path, {})
    assert [(rule.root, rule.home) for rule in settings.watch] == [(str(tmp_path / "runs"), "local")]
    assert settings.remotes["local"].url == str(store)
    assert json.loads((store / "weighbridge.json").read_text())["schema"] == "weighbridge/registry/1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_reading_teammate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without folders nothing is watched, and the next command lists what there is."""
    path = tmp_path / "deep" / "weighbridge.toml"
    assert main(["init", "--path", str(path), "--remote", str(tmp_path / "store")]) == 0
    assert load(path, {}).watch == ()
    talk = capsys.readouterr().err
    assert "registry ls" in talk
    assert "install-unit" not in talk


def test_every_key_stands_in_it(tmp_path: Path) -> None:
    """All keys are in the file, as comments where nothing was asked, and each comes alive by removing the mark."""
    text = starter([str(tmp_path)], "/srv/x")
    assert set(tomllib.loads(text)["watch"][0]) == {"root", "home"}
    alive = "\n".join(
        line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in text.splitlines()
    )
    document = tomllib.loads(alive.replace("# Weighbridge reads", "#").replace("(~/.config", "#"))
    assert set(document["daemon"]) == set(DAEMON_KEYS)
    assert set(document["watch"][0]) == set(WATCH_KEYS)
    assert {key for remote in document["remotes"].values() for key in remote} == set(REMOTE_KEYS)


@pytest.mark.parametrize(("url", "name"), [("/srv/x", "local"), ("s3://b/p", "team"), ("hf://acme", "hub")])
def test_remotes_are_named_by_their_kind(url: str, name: str) -> None:
    """A directory is called local, a bucket team, a Hub organisation hub, and rules use it as home."""
    settings = read_text(starter(["/runs/a", "/runs/b"], url), "x", {})
    assert list(settings.remotes) == [name]
    assert [(rule.root, rule.home) for rule in settings.watch] == [("/runs/a", name), ("/runs/b", name)]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=20).map("/r/".__add__))
def test_any_folder_can_be_watched(folder: str) -> None:
    """Whatever a folder is called, quotes and backslashes included, the file names exactly it."""
    try:
        settings = read_text(starter([folder], "/srv/x"), "x", {"HOME": "/h"})
    except UsageError:
        return
    assert str(settings.watch[0].root) == str(Path(folder)) or "/." in folder or "//" in folder


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was asked for is not written over somebody's settings; --force does it."""
    path = tmp_path / "weighbridge.toml"
    arguments = ["init", "--path", str(path), "--remote", str(tmp_path / "b")]
    assert main(["init", "--path", str(path), "--remote", str(tmp_path / "a")]) == 0
    before = path.read_bytes()
    assert main(arguments) == ConflictError.exit_code
    assert path.read_bytes() == before
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    assert load(path, {}).remotes["local"].url == str(tmp_path / "b")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "weighbridge.toml"]


def test_init_again_keeps_the_file_and_finds_the_registry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without wishes, `init` on a machine that has a configuration leaves it and begins what it names."""
    path = tmp_path / "weighbridge.toml"
    assert main(["init", "--path", str(path), "--remote", str(tmp_path / "a"), "--json"]) == 0
    first = report(capsys)
    before = path.read_bytes()
    assert main(["init", "--path", str(path), "--json"]) == 0
    second = report(capsys)
    assert path.read_bytes() == before
    assert (first["kept"], second["kept"]) == (False, True)
    assert (first["registries"][0]["begun"], second["registries"][0]["begun"]) == (True, False)
    assert first["registries"][0]["registry"] == second["registries"][0]["registry"]


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `init --json` printed, its shape checked."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SHAPE)
    return found


def test_folders_that_do_not_go_together_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A remote inside a watched folder is refused before anything is written."""
    path = tmp_path / "weighbridge.toml"
    code = main(["init", "--path", str(path), "--watch", str(tmp_path / "r"), "--remote", str(tmp_path / "r" / "s")])
    assert code == UsageError.exit_code
    assert "lie inside each other" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["s4://b", "s3://key:secret@b", "s3://"])
def test_bad_urls_are_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL that no configuration could hold is a usage error of the option."""
    assert main(["init", "--path", str(tmp_path / "w.toml"), "--remote", url]) == UsageError.exit_code
    text = capsys.readouterr().err
    assert "--remote" in text
    assert "secret" not in text.replace("secrets come from", "")


def test_a_remote_out_of_reach_still_gives_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the registry cannot be begun now, the file stands and the reason is told."""
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "weighbridge.toml"
    assert main(["init", "--path", str(path), "--remote", str(tmp_path / "file" / "store")]) == 0
    assert path.exists()
    assert "no registry at" in capsys.readouterr().err


def test_the_users_own_place_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --path an ordinary user's file goes to the config folder, where every command finds it."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/config/weighbridge/weighbridge.toml\n"
    assert "WEIGHBRIDGE_CONFIG" not in captured.err
    assert (tmp_path / "data/weighbridge/registry/weighbridge.json").exists()


def test_the_named_configuration_is_the_one_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With WEIGHBRIDGE_CONFIG set, init writes the file that every other command will read."""
    monkeypatch.setenv("WEIGHBRIDGE_CONFIG", str(tmp_path / "mine.toml"))
    assert main(["init", "--remote", str(tmp_path / "remote")]) == 0
    assert load(tmp_path / "mine.toml").remotes
