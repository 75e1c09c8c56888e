"""`registry verify`, `tag`, `card` and `rebuild`, as people use them."""

import getpass
import json
import socket
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import layout
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.shelf import payload


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with a name of two versions."""
    desk = Desk(tmp_path, monkeypatch)
    desk.shelf.publish("medical-sft", step=100)
    desk.shelf.publish("medical-sft", step=200)
    return desk


def damage(path: Path) -> None:
    """Flip one bit."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 16
    path.chmod(0o600)
    path.write_bytes(body)


# ---------------------------------------------------------------------------------------------------------- verify


def test_a_sound_version_and_a_sound_folder(desk: Desk) -> None:
    """Both say how much was read and that it is sound."""
    said = desk.ok("verify", "medical-sft:latest")
    assert said.out.splitlines()[-1].startswith("medical-sft@v2: 3 files, ")
    assert said.out.endswith("sound\n")
    desk.ok("pull", "medical-sft@v1", "model")
    for words in (("./model",), ("model",), (str(desk.folder / "model"),)):
        assert desk.ok("verify", *words).out == f"{words[0]} (medical-sft@v1): 3 files, 2.03 kB, sound\n"
    assert conforms(desk.ok("verify", "./model", "--json").json, "verify")["ref"] == "medical-sft@v1"


def test_a_damaged_version_ends_with_5_and_names_its_objects(desk: Desk) -> None:
    """File, claim and card are named; --json holds the findings."""
    damage(desk.root / layout.version("medical-sft", 2, "adapter_model.safetensors"))
    damage(desk.root / layout.claim("medical-sft", 2))
    damage(desk.root / layout.version("medical-sft", 2, "README.md"))
    said = desk.registry("verify", "medical-sft@v2")
    assert said.code == 5
    assert "    fix: " in said.out
    for word in ("adapter_model.safetensors", "claims/00000002.json", "README.md"):
        assert word in said.out
    document = conforms(desk.registry("verify", "medical-sft@v2", "--json").json, "verify")
    assert (document["outcome"], document["kind"], document["ref"]) == ("refuse", "version", "medical-sft@v2")
    assert {f["code"] for f in document["findings"]} >= {"file-damaged", "claim-damaged", "card-damaged"}


def test_a_damaged_manifest_is_named(desk: Desk) -> None:
    """Whatever bit is flipped in it."""
    damage(desk.root / layout.manifest("medical-sft", 1))
    said = desk.registry("verify", "medical-sft@v1")
    assert said.code == 5
    assert "v1/manifest.json" in said.out


def test_a_changed_folder_is_named(desk: Desk) -> None:
    """A pulled folder that somebody wrote into is not what was pulled."""
    desk.ok("pull", "medical-sft", "model")
    damage(desk.folder / "model" / "adapter_config.json")
    said = desk.registry("verify", "model", "--json")
    assert said.code == 5
    document = conforms(said.json, "verify")
    assert [(f["code"], f["subject"]) for f in document["findings"]] == [("file-damaged", "adapter_config.json")]


def test_what_cannot_be_verified_is_said(desk: Desk) -> None:
    """No such folder, no manifest and no daemon, no such version."""
    assert desk.registry("verify", "./nowhere").code == 3
    (desk.folder / "plain").mkdir()
    said = desk.registry("verify", "./plain")
    assert said.code == 3
    assert "no daemon can be asked" in said.err
    assert desk.registry("verify", "medical-sft@v7").code == 3


class Answering(socketserver.StreamRequestHandler):
    """Answers `recorded` as a daemon does."""

    answer: dict[str, Any]

    def handle(self) -> None:
        """Answer one line."""
        asked = json.loads(self.rfile.readline())
        assert asked["op"] == "recorded"
        reply = {"v": 1, "ok": True, "result": self.answer}
        self.wfile.write(json.dumps(reply).encode() + b"\n")


def test_a_source_that_changed_since_it_was_published_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon tells what it recorded for a watched folder; drift is named."""
    source = desk.folder / "run"
    for path, body in payload(1).items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(body)
    manifest = desk.shelf.claims["medical-sft"][0][2]
    answer = {"name": "medical-sft", "n": 1, "manifest": manifest.stored.decode()}
    monkeypatch.setattr(Answering, "answer", answer, raising=False)
    with socketserver.ThreadingUnixStreamServer(str(desk.folder / "registryd.sock"), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        document = conforms(desk.ok("verify", "./run", "--json").json, "verify")
        assert (document["kind"], document["ref"], document["findings"]) == ("source", "medical-sft@v1", [])
        (source / "adapter_model.safetensors").write_bytes(b"trained on")
        said = desk.registry("verify", "./run")
        server.shutdown()
    assert said.code == 5
    assert "adapter_model.safetensors has changed since it was published" in said.out


# ------------------------------------------------------------------------------------------------------------- tag


def test_a_tag_is_moved_shown_and_removed(desk: Desk) -> None:
    """Each step prints what stands now, and the next `ls` shows it."""
    assert desk.ok("tag", "medical-sft@v1", "prod").out == "medical-sft:prod -> v1\n"
    assert desk.ok("tag", "medical-sft", "prod", "--why", "newer").out == "medical-sft:prod -> v2 (was v1)\n"
    assert desk.ok("ls", "medical-sft", "--json").json["versions"][0]["tags"] == ["latest", "prod"]
    said = desk.ok("tag", "medical-sft:prod")
    assert [line.split()[:3] for line in said.out.splitlines()[1:]] == [["1", "-", "v1"], ["2", "v1", "v2"]]
    assert "newer" in said.out
    assert desk.ok("tag", "medical-sft", "-q").out.split() == ["latest", "prod"]
    assert desk.ok("tag", "medical-sft:prod", "--delete").out == "medical-sft:prod removed (was v2)\n"
    assert desk.ok("tag", "medical-sft", "-q").out.split() == ["latest"]


def test_tag_json_is_the_documented_contract(desk: Desk) -> None:
    """A move, the moves of a tag and the tags of a name each follow their schema."""
    move = conforms(desk.ok("tag", "medical-sft@v1", "prod", "--why", "x", "--json").json, "tag-move")
    assert (move["to"], move["from"], move["seq"], move["why"]) == (1, None, 1, "x")
    assert "@" in move["who"]
    moves = conforms(desk.ok("tag", "medical-sft:prod", "--json").json, "tag-moves")
    assert [m["to"] for m in moves["moves"]] == [1]
    tags = conforms(desk.ok("tag", "medical-sft", "--json").json, "tags")
    assert {t["tag"]: t["ref"] for t in tags["tags"]} == {"latest": "medical-sft@v2", "prod": "medical-sft@v1"}


def test_the_remote_tells_what_happened_to_a_name(desk: Desk) -> None:
    """Where no daemon runs, `log NAME` lists numbers, moves of tags, notes and withdrawals, with who and why."""
    desk.ok("tag", "medical-sft@v1", "prod", "--why", "first")
    desk.ok("tag", "medical-sft@v2", "prod", "--why", "better")
    desk.ok("withdraw", "medical-sft@v1", "--reason", "wrong data")
    desk.ok("card", "medical-sft@v2", "--license", "mit", "--why", "asked")
    events = conforms(desk.ok("log", "medical-sft", "--json").json, "log")["events"]
    told = [(e["event"], e["ref"].rpartition("@")[2], e["detail"].replace(getpass.getuser(), "me")) for e in events]
    assert [one[:2] for one in told[:2]] == [("committed", "v1"), ("committed", "v2")]
    at = f"by me@{socket.gethostname()}"
    assert sorted(told[2:]) == [
        ("noted", "v2", f"license, {at}: asked"),
        ("tagged", "v1", f"prod: v1, {at}: first"),
        ("tagged", "v2", f"prod: v1 -> v2, {at}: better"),
        ("withdrawn", "v1", f"{at}: wrong data"),
    ]
    assert len(desk.ok("log", "medical-sft", "-n", "2", "--remote", "team", "--json").json["events"]) == 2
    assert desk.registry("log", "nobody").code == 3
    assert desk.registry("log", "--remote", "team").code == 2
    said = desk.registry("log")
    assert (said.code, "registry log NAME" in said.err) == (6, True)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("medical-sft@v9", "prod"), 3),
        (("medical-sft@v1", "latest"), 2),
        (("medical-sft@v1", "v3"), 2),
        (("medical-sft@v1",), 2),
        (("medical-sft", "--delete"), 2),
        (("medical-sft", "prod", "--delete"), 3),
        (("medical-sft:prod",), 3),
        (("nobody",), 3),
    ],
)
def test_tag_says_why_not(desk: Desk, words: tuple[str, ...], code: int) -> None:
    """Unknown versions and tags are not found, reserved and missing words are usage errors."""
    said = desk.registry("tag", *words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("error: ")


# ------------------------------------------------------------------------------------------------------------ card


def test_the_card_is_printed(desk: Desk) -> None:
    """As it was published; --json holds the text and the notes."""
    assert desk.ok("card", "medical-sft@v1").out == "# medical-sft@v1\n"
    document = conforms(desk.ok("card", "medical-sft@v1", "--json").json, "card")
    assert (document["text"], document["notes"]) == ("# medical-sft@v1\n", [])


def test_peoples_words_are_kept_and_shown(desk: Desk) -> None:
    """What somebody writes is a note: it stands on the card of this version and of later ones, sealed bytes stay."""
    before = (desk.root / layout.version("medical-sft", 1, "README.md")).read_bytes()
    said = desk.ok("card", "medical-sft@v1", "--file", "-", stdin="Use with care: small data.\n")
    assert "kept" in said.err
    card = desk.ok("card", "medical-sft@v1").out
    assert "Use with care: small data." in card
    assert "registry pull medical-sft@v1" in card
    assert "Use with care" in desk.ok("card", "medical-sft@v1", "--json").json["notes"][0]["text"]
    assert (desk.root / layout.version("medical-sft", 1, "README.md")).read_bytes() == before
    assert (
        "nothing changed" in desk.ok("card", "medical-sft@v1", "--file", "-", stdin="Use with care: small data.\n").err
    )


def test_an_editor_is_opened(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """--edit hands people's words to EDITOR and keeps what comes back; without terminal and editor it names --file."""
    said = desk.registry("card", "medical-sft", "--edit")
    assert said.code == 2
    assert "--file" in said.err
    editor = desk.folder / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "From the editor.\\n" >"$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))
    desk.ok("card", "medical-sft", "--edit")
    assert "From the editor." in desk.ok("card", "medical-sft").out


def test_a_licence_can_be_stated_with_a_reason(desk: Desk) -> None:
    """It shows in `ls` and on the card; the manifest stays as it was sealed."""
    assert desk.registry("card", "medical-sft", "--license", "mit").code == 2
    desk.ok("card", "medical-sft", "--license", "mit", "--why", "the author agreed")
    assert desk.ok("ls", "-q", "--license", "mit").out.split() == ["medical-sft@v2"]
    assert "license: mit" in desk.ok("card", "medical-sft").out
    assert desk.ok("show", "medical-sft", "--json").json["manifest"]["license"]["id"] == "apache-2.0"


# --------------------------------------------------------------------------------------------------------- rebuild


def test_rebuild_says_what_it_wrote(desk: Desk) -> None:
    """Names, versions and facts are counted; the list is the same afterwards."""
    before = desk.ok("ls", "--all", "--json").json["versions"]
    said = desk.ok("rebuild")
    assert said.out == "catalogue of team rebuilt: 1 names, 2 versions, 4 facts, epoch 2\n"
    assert desk.ok("ls", "--all", "--json").json["versions"] == before


def test_rebuild_ends_with_5_when_something_is_damaged(desk: Desk) -> None:
    """What cannot be read is named and left out."""
    damage(desk.root / layout.manifest("medical-sft", 1))
    said = desk.registry("rebuild", "--json")
    assert said.code == 5
    (problem,) = conforms(said.json, "rebuild")["problems"]
    assert "v1/manifest.json" in problem


def test_rebuild_names_what_is_damaged_once(desk: Desk) -> None:
    """One damaged manifest is one line."""
    damage(desk.root / layout.manifest("medical-sft", 1))
    assert desk.registry("rebuild").err.count("v1/manifest.json") == 1


def test_what_to_type_next_names_the_remote_that_was_asked(desk: Desk) -> None:
    """Who gave --remote can copy the fix as it stands."""
    damage(desk.root / layout.version("medical-sft", 2, "adapter_model.safetensors"))
    said = desk.registry("pull", "medical-sft@v2", "x", "--remote", desk.root)
    assert f"fix: registry verify medical-sft@v2 --remote {desk.root}\n" in said.err
    assert "fix: registry verify medical-sft@v2\n" in desk.registry("pull", "medical-sft@v2", "x").err
    assert f"fix: registry ls --remote {desk.root}" in desk.registry("show", "nobody", "--remote", desk.root).err


def test_an_editor_that_fails_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed, and the other way is named."""
    monkeypatch.setenv("VISUAL", "no-such-editor")
    said = desk.registry("card", "medical-sft", "--edit")
    assert said.code == 2
    assert "fix: set VISUAL or EDITOR to an editor, or: registry card medical-sft@v2 --file FILE" in said.err
