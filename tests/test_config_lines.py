"""The line of a key in a TOML text, which tomllib does not tell."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.config.lines import KeyPath, line_of, positions

SAMPLE = '''\
# comment [daemon]
title = "x # no comment"

[daemon]
scan = "30s" # [[watch]]
"quoted key" = 1
a.b.c = 2

[[watch]]
root = """
[[watch]]
root = "in a string" """
ignore = [ # brackets ] in comments
  "wandb/", "]",
  '# not a comment',
]
[[watch]]
  root = 'C:\\' # a literal string ends here
[watch.extra]
deep = true
[remotes]
hub = { url = "hf://x", paths = ["a", { b = 1 }] }
[remotes.'odd "name"']
url = "\\u0041\\"]"
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("title",), 2),
        (("daemon",), 4),
        (("daemon", "scan"), 5),
        (("daemon", "quoted key"), 6),
        (("daemon", "a", "b", "c"), 7),
        (("watch",), 9),
        (("watch", 0), 9),
        (("watch", 0, "root"), 10),
        (("watch", 0, "ignore"), 13),
        (("watch", 0, "ignore", 1), 14),
        (("watch", 0, "ignore", 2), 15),
        (("watch", 1), 17),
        (("watch", 1, "root"), 18),
        (("watch", 1, "extra"), 19),
        (("watch", 1, "extra", "deep"), 20),
        (("remotes", "hub"), 22),
        (("remotes", "hub", "url"), 22),
        (("remotes", "hub", "paths", 1, "b"), 22),
        (("remotes", 'odd "name"', "url"), 24),
    ],
)
def test_keys_are_found(path: KeyPath, line: int) -> None:
    """Tables, arrays of tables, dotted and quoted keys, inline tables and array elements are all found."""
    assert line_of(SAMPLE, path) == line


def test_what_is_not_written_has_its_parents_line() -> None:
    """A key that is missing is reported where its table begins; the root has no line."""
    assert line_of(SAMPLE, ("watch", 1, "home")) == 17
    assert line_of(SAMPLE, ("nowhere",)) is None
    assert line_of("", ("x",)) is None


def every_path(value: Any, at: KeyPath = ()) -> list[KeyPath]:
    """Return every key path of a parsed TOML value."""
    found: list[KeyPath] = [at] if at else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += every_path(item, (*at, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            found += every_path(item, (*at, position))
    return found


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6)
SCALARS = st.one_of(
    st.integers(-99, 99).map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.sampled_from(["1979-05-27 07:32:00", "1.5e3", "inf", "''", '"""a\n]#\n"""', "'''[x]\n= 1\n'''", '"""""a"""""']),
    KEYS.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
)


def quoted(key: str) -> str:
    """Return a key as a TOML basic string."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ # ]\n" + ",\n".join(items) + "\n]"),
        st.dictionaries(KEYS, inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{quoted(key)} = {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=6,
)
TABLES = st.lists(
    st.tuples(
        st.sampled_from(["table", "array"]),
        KEYS,
        st.dictionaries(KEYS, VALUES, max_size=3),
        st.sampled_from(["", "#[x]"]),
    ),
    max_size=5,
)


@given(TABLES)
def test_every_key_of_any_text_has_its_line(tables: list[tuple[str, str, dict[str, str], str]]) -> None:
    """For any generated text, each path that tomllib finds has a line, and exactly the line it was written on."""
    text, expected, counts, kinds = "", {}, dict[str, int](), dict[str, str]()
    for kind, name, items, comment in tables:
        if kinds.setdefault(name, kind) != kind or (kind == "table" and name in counts):
            continue
        counts[name] = counts.get(name, -1) + 1
        at: KeyPath = (name, counts[name]) if kind == "array" else (name,)
        expected[at] = text.count("\n") + 1
        text += f"[[{quoted(name)}]] {comment}\n" if kind == "array" else f"[{quoted(name)}] {comment}\n"
        for key, value in items.items():
            expected[(*at, key)] = text.count("\n") + 1
            text += f"{quoted(key)} = {value} {comment}\n"
    document = tomllib.loads(text)
    known = positions(text)
    assert set(every_path(document)) == set(known)
    for path, line in expected.items():
        assert known[path] == line


@given(st.text(max_size=40))
def test_any_valid_text_is_scanned(text: str) -> None:
    """Whatever tomllib accepts is scanned to its end, with the same paths."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(every_path(document)) == set(positions(text))
