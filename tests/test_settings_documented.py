"""config/example.toml documents every key: it parses, covers all settings, and shows or names each default."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weighbridge.config.load import CACHE_KEYS, DAEMON_KEYS, REMOTE_KEYS, WATCH_KEYS, load, read_text, remote_settings
from weighbridge.config.settings import CacheSettings, DaemonSettings, WatchRule
from weighbridge.config.starter import example

EXAMPLE = example()
DOCUMENT = tomllib.loads(EXAMPLE)
_KEY = re.compile(r"^([a-z_]+) = (.*?)\s+# (.+)$|^([a-z_]+) = (.*)$")


class Line(NamedTuple):
    """One key line of the example."""

    section: str
    key: str
    value: str
    comment: str


def lines() -> list[Line]:
    """Return every key line of the example with its section and comment."""
    found, section = [], ""
    for line in EXAMPLE.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := _KEY.match(line):
            found.append(Line(section, match[1] or match[4], match[2] or match[5], match[3] or ""))
    return found


def test_the_example_loads(tmp_path: Path) -> None:
    """The example is a valid configuration as it stands, and the packaged file is the one in the repository."""
    path = tmp_path / "weighbridge.toml"
    path.write_text(EXAMPLE)
    path.chmod(0o600)
    settings = load(path, {})
    assert [rule.home for rule in settings.watch] == ["team"]
    assert sorted(settings.remotes) == ["hub", "local", "team"]
    assert files("weighbridge.config").joinpath("example.toml").read_text() == EXAMPLE


def test_every_key_is_there() -> None:
    """No setting exists that the example does not show."""
    assert set(DOCUMENT["daemon"]) == set(DAEMON_KEYS)
    assert set(DOCUMENT["watch"][0]) == set(WATCH_KEYS)
    assert set(DOCUMENT["cache"]) == set(CACHE_KEYS)
    shown = {key for remote in DOCUMENT["remotes"].values() for key in remote}
    assert shown == set(REMOTE_KEYS)


@pytest.mark.parametrize("line", [line for line in lines() if line.section == "daemon"], ids=lambda line: line.key)
def test_daemon_defaults_are_shown(line: Line) -> None:
    """A key of [daemon] shows its default, or its comment names it."""
    shown = DAEMON_KEYS[line.key](DOCUMENT["daemon"][line.key])
    default = DaemonSettings._field_defaults.get(line.key)
    assert line.comment
    assert shown == default or "default" in line.comment


@pytest.mark.parametrize("line", [line for line in lines() if line.section == "watch"], ids=lambda line: line.key)
def test_watch_defaults_are_shown(line: Line) -> None:
    """A key of [[watch]] shows its default, or its comment names it; `root` has none."""
    shown = WATCH_KEYS[line.key](DOCUMENT["watch"][0][line.key])
    default = WatchRule._field_defaults.get(line.key)
    assert shown == default or "default" in line.comment or line.key in {"root", "ignore"}
    assert line.comment


@pytest.mark.parametrize(
    "line",
    [line for line in lines() if line.section.startswith("remotes.")],
    ids=lambda line: f"{line.section}.{line.key}",
)
def test_remote_defaults_are_shown(line: Line) -> None:
    """A key of a remote shows the default of its scheme, or its comment names it; `url` has none."""
    table: dict[str, Any] = DOCUMENT["remotes"][line.section.partition(".")[2]]
    shown = REMOTE_KEYS[line.key](table[line.key])
    default = getattr(remote_settings("x", table["url"]), line.key)
    assert shown == default or "default" in line.comment or line.key == "url"


def test_uncommented_defaults_equal_no_table() -> None:
    """Writing the shown value of [daemon] changes nothing against leaving it out, but for the places."""
    bare = read_text("", "x", {})
    given = read_text(EXAMPLE, "x", {})
    assert given.cache == bare.cache
    assert given.daemon._replace(state=bare.daemon.state, socket=bare.daemon.socket) == bare.daemon


MANUAL = Path(__file__).parent.parent / "docs" / "configuration.md"
TABLES = {
    "daemon": (DAEMON_KEYS, DaemonSettings._field_defaults),
    "watch": (WATCH_KEYS, WatchRule._field_defaults),
    "cache": (CACHE_KEYS, CacheSettings._field_defaults),
    "remotes.NAME": (REMOTE_KEYS, remote_settings("x", "/x")._asdict()),
}


def manual_rows() -> list[tuple[str, str, str]]:
    """Return (table, key, default) of every row of the manual's tables of keys."""
    found, section = [], ""
    for line in MANUAL.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("[]")
        elif line.startswith("| `") and section in TABLES:
            _, key, default, *_ = line.split("|")
            found.append((section, key.strip(" `"), default.strip()))
    return found


def plain(default: str) -> Any:
    """Return the value that a default in backticks stands for; a word without quotes is a string."""
    text = default.strip("`")
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def test_the_manual_has_every_key() -> None:
    """docs/configuration.md has a row for each key of each table, and no other."""
    assert {(section, key) for section, key, _ in manual_rows()} == {
        (section, key) for section, (checks, _) in TABLES.items() for key in checks
    }


@pytest.mark.parametrize(("section", "key", "default"), manual_rows(), ids=lambda text: text[:20])
def test_the_manual_gives_the_same_defaults(section: str, key: str, default: str) -> None:
    """A default that the manual gives as one plain value is the one in the code; prose is not judged."""
    checks, defaults = TABLES[section]
    if re.fullmatch(r"`[^`]+`", default):
        assert checks[key](plain(default)) == defaults[key]
