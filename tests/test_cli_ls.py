"""`registry ls`: what is listed, in which words, how old it may be, and what it costs."""

import json
import time
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.flow import tags
from weighbridge.registry.types import Finding
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.shelf import payload


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with three names."""
    desk = Desk(tmp_path, monkeypatch)
    warn = Finding(code="license-unknown", severity="warn", subject="README.md", message="m")
    desk.shelf.publish("medical-sft", step=100, created_at="2026-11-01T00:00:00Z")
    desk.shelf.publish("medical-sft", step=200, created_at="2026-11-02T00:00:00Z")
    desk.shelf.publish("rerank", license_id=None, findings=[warn], created_at="2026-11-03T00:00:00Z")
    desk.shelf.publish("chat", kind="model", base="Qwen/Qwen3-8B", owner=None, created_at="2026-10-01T00:00:00Z")
    tags.move(desk.remote, desk.shelf.registry, "medical-sft", "prod", 1, "lw")
    return desk


def column(text: str, title: str) -> list[str]:
    """Return one column of a table."""
    head, *rows = text.splitlines()
    start = head.index(title)
    return [row[start:].split("  ")[0].strip() for row in rows]


def test_the_table_shows_the_latest_version_of_each_name(desk: Desk) -> None:
    """One row a name, the newest first, with version, tags, owner, kind, base, licence, checks, where, size and age."""
    said = desk.ok("ls")
    assert said.out.splitlines()[0].split() == (
        ["NAME", "VERSION", "TAGS", "OWNER", "KIND", "BASE", "LICENSE", "CHECKS", "WHERE", "SIZE", "AGE"]
    )
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["rerank", "v1"],
        ["medical-sft", "v2"],
        ["chat", "v1"],
    ]
    assert column(said.out, "CHECKS") == ["warn", "ok", "ok"]
    assert column(said.out, "LICENSE") == ["-", "apache-2.0", "apache-2.0"]
    assert column(said.out, "BASE") == ["tiny-base", "tiny-base", "Qwen3-8B"]
    assert column(said.out, "OWNER") == ["lw", "lw", "-"]
    assert said.err.strip().startswith("3 names, 4 versions, ")


def test_naming_one_lists_its_versions_with_their_tags(desk: Desk) -> None:
    """With a name all its versions come, and each carries its tags."""
    said = desk.ok("ls", "medical-sft")
    assert column(said.out, "VERSION") == ["v2", "v1"]
    assert column(said.out, "TAGS") == ["latest", "prod"]
    assert desk.ok("ls", "med*", "chat", "-q").out.split() == ["medical-sft@v2", "medical-sft@v1", "chat@v1"]


def test_json_is_the_documented_contract(desk: Desk) -> None:
    """--json follows its schema: integer bytes, full digests, times with Z; jsonl is one version a line."""
    document = conforms(desk.ok("ls", "--json").json, "ls")
    first = document["versions"][1]
    assert (first["ref"], first["version"], first["tags"], first["where"]) == (
        "medical-sft@v2",
        2,
        ["latest"],
        ["team"],
    )
    assert first["size"] == sum(map(len, payload(2).values()))
    assert first["created_at"] == "2026-11-02T00:00:00Z"
    lines = desk.ok("ls", "-o", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == document["versions"]


def test_everything_means_every_version_in_every_state(desk: Desk) -> None:
    """--all shows unfinished, given-up and withdrawn numbers too, and cuts nothing off."""
    desk.shelf.claim("medical-sft")
    desk.shelf.claim("medical-sft")
    desk.shelf.void("medical-sft", 4)
    desk.shelf.withdraw("chat", 1)
    assert len(desk.ok("ls", "-q").out.split()) == 2
    document = conforms(desk.ok("ls", "--all", "--json").json, "ls")
    assert {row["ref"]: row["state"] for row in document["versions"]} == {
        "rerank@v1": "committed",
        "medical-sft@v1": "committed",
        "medical-sft@v2": "committed",
        "medical-sft@v3": "open",
        "medical-sft@v4": "void",
        "chat@v1": "withdrawn",
    }


def test_rows_are_chosen_and_ordered(desk: Desk) -> None:
    """--kind, --base, --license, --since, --sort and -n do what they say."""
    assert desk.ok("ls", "-q", "--kind", "model").out.split() == ["chat@v1"]
    assert desk.ok("ls", "-q", "--base", "qwen").out.split() == ["chat@v1"]
    assert desk.ok("ls", "-q", "--license", "unknown").out.split() == ["rerank@v1"]
    assert desk.ok("ls", "-q", "--license", "apache").out.split() == ["medical-sft@v2", "chat@v1"]
    assert desk.ok("ls", "-q", "--since", "2026-11-03").out.split() == ["rerank@v1"]
    assert desk.ok("ls", "-q", "--sort", "name").out.split() == ["chat@v1", "medical-sft@v2", "rerank@v1"]
    assert desk.ok("ls", "-q", "--sort", "age:asc").out.split()[0] == "chat@v1"
    said = desk.ok("ls", "-n", "1")
    assert len(said.out.splitlines()) == 2
    assert "there is more" in said.err
    assert desk.ok("ls", "-n", "1", "--json").json["more"] is True


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--sort", "colour"), 2), (("--since", "yesterday"), 2), (("nobody",), 3), (("--kind", "toy"), 2)],
)
def test_what_makes_no_sense_is_answered(desk: Desk, words: tuple[str, ...], code: int) -> None:
    """Unknown columns, ages and kinds are usage errors, an unknown name is not found."""
    said = desk.registry("ls", *words)
    assert said.code == code
    assert said.err.startswith("error: ")
    assert said.out == ""


def test_a_misspelled_name_is_answered_with_the_nearest(desk: Desk) -> None:
    """The error names what was probably meant, in words and in JSON."""
    assert "medical-sft" in desk.registry("ls", "medical-stf").err
    error = conforms(desk.registry("ls", "medical-stf", "--json").error, "error")
    assert error["code"] == "not-found"


def test_what_is_published_shows_at_once(desk: Desk) -> None:
    """A directory remote is never older than its feed, whatever max_age says."""
    desk.ok("ls")
    desk.shelf.publish("brand-new")
    assert "brand-new@v1" in desk.ok("ls", "-q").out.split()


def test_within_max_age_nobody_is_asked(desk: Desk) -> None:
    """The cache answers alone, and says how old it is."""
    desk.ok("ls")
    desk.root.rename(desk.folder / "gone")
    said = desk.ok("ls")
    assert "as of" in said.err
    assert len(said.out.splitlines()) == 4


def test_offline_never_asks(desk: Desk) -> None:
    """--offline shows what is known, and says so when nothing is."""
    said = desk.registry("ls", "--offline")
    assert said.code == 3
    assert "--offline" in said.err
    desk.ok("ls")
    desk.shelf.publish("brand-new")
    assert "brand-new@v1" not in desk.ok("ls", "--offline", "-q").out.split()


def test_a_remote_that_is_gone_leaves_the_cache_to_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old cache is shown with a warning when the remote does not answer."""
    desk = Desk(tmp_path, monkeypatch, max_age="1s")
    desk.shelf.publish("medical-sft")
    desk.ok("ls")
    desk.root.rename(desk.folder / "gone")
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    said = desk.ok("ls")
    assert "medical-sft" in said.out
    assert "no registry any more" in said.err
    assert desk.registry("pull", "medical-sft").code == 6


@pytest.mark.parametrize("damage", ["rubbish", "value", "short"])
def test_a_damaged_cache_is_read_anew_with_a_note(desk: Desk, damage: str) -> None:
    """Whatever happened to the cache, the list is right and a note on stderr says what was done."""
    before = desk.ok("ls", "--json").json["versions"]
    (path,) = desk.cache.glob("catalog/*.db")
    body = path.read_bytes()
    if damage == "value":
        at = body.index(b"apache-2.0")
        path.write_bytes(body[:at] + b"apache-3.0" + body[at + 10 :])
    else:
        path.write_bytes(b"rubbish" * 2000 if damage == "rubbish" else body[: len(body) // 2])
    said = desk.ok("ls", "--json")
    assert said.json["versions"] == before
    assert "read anew" in said.err
    assert desk.ok("ls", "--json").err == ""


def test_a_damaged_feed_is_named_and_mended_by_rebuild(desk: Desk) -> None:
    """A reader without a cache is told which object is damaged and what to do; after that the list is whole again."""
    before = desk.ok("ls", "--all", "--json").json["versions"]
    path = desk.root / layout.feed(3)
    body = bytearray(path.read_bytes())
    body[len(body) // 3] ^= 1
    path.chmod(0o600)
    path.write_bytes(body)
    for cached in desk.cache.rglob("*.db*"):
        cached.unlink()
    said = desk.registry("ls", "--all", "--json")
    assert said.code == 5
    error = conforms(said.error, "error")
    assert (error["code"], error["fix"]) == ("feed-damaged", "registry rebuild")
    assert layout.feed(3) in error["message"]
    conforms(desk.ok("rebuild", "--json").json, "rebuild")
    assert desk.ok("ls", "--all", "--json").json["versions"] == before


def test_control_characters_never_reach_a_terminal(desk: Desk) -> None:
    """A row that somebody filled with escape codes is shown escaped."""
    desk.shelf.publish("evil", owner="\x1b[31mred\u202e", base="a\nb")
    said = desk.ok("ls", "evil")
    assert "\x1b" not in said.out
    assert "\u202e" not in said.out
    assert len(said.out.splitlines()) == 2


def test_an_empty_registry_prints_headings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing published is no error."""
    desk = Desk(tmp_path, monkeypatch)
    said = desk.ok("ls")
    assert len(said.out.splitlines()) == 1
    assert said.err == "nothing is published yet on team\n"
    assert conforms(desk.ok("ls", "--json").json, "ls")["versions"] == []
    desk.shelf.publish("medical-sft")
    said = desk.ok("ls", "medical-sft", "--kind", "merged", "--remote", str(desk.root))
    assert len(said.out.splitlines()) == 1
    assert "1 version" not in said.err
    assert "nothing that is published fits" in said.err


def test_a_place_that_is_no_registry_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path is not taken for an empty registry."""
    desk = Desk(tmp_path, monkeypatch)
    said = desk.registry("ls", "--remote", tmp_path / "elsewhere")
    assert said.code == 3
    assert "no registry" in said.err
