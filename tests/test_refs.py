"""Names, tags, paths and references: one validator at every door."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import refs
from weighbridge.registry.errors import UsageError


@pytest.mark.parametrize("name", ["a", "medical-sft", "Qwen3.5_lora", "x" * 96, "7b"])
def test_plain_names_are_taken(name: str) -> None:
    """A name in the Hub's grammar passes unchanged."""
    assert refs.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "..",
        "a..b",
        "a--b",
        "-a",
        "a-",
        ".a",
        "a.",
        "_wb",
        "x" * 97,
        "a b",
        "a\n",
        "é",
        "a\x1b[31m",
        "a\u202eb",
    ],
)
def test_bad_names_are_refused_with_a_reason(name: str) -> None:
    """A name outside the grammar is refused, says why, and its message holds no raw control character."""
    with pytest.raises(UsageError) as caught:
        refs.check_name(name)
    assert caught.value.why
    assert caught.value.what.isprintable()


@given(st.text(max_size=200))
def test_any_text_has_a_valid_suggestion(text: str) -> None:
    """The suggested name is valid with room for a suffix, whatever was asked for."""
    assert refs.name_fault(refs.suggest_name(text), room=refs.SUFFIX_ROOM) is None


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("m@v7", ("m", 7, None, None)),
        ("m:prod", ("m", None, "prod", None)),
        ("m", ("m", None, "latest", None)),
        ("m:latest", ("m", None, "latest", None)),
        ("@sha256:0123abcd", (None, None, None, "0123abcd")),
        ("sha256:0123abcd", (None, None, None, "0123abcd")),
        ("m@sha256:0123abcd", ("m", None, None, "0123abcd")),
    ],
)
def test_references_are_split(ref: str, parts: tuple[str | None, int | None, str | None, str | None]) -> None:
    """Every spelling of a reference gives its name and exactly one way to choose the version."""
    assert refs.split(ref) == parts


@pytest.mark.parametrize(
    "ref", ["m@7", "m@v0", "m@v", "m:v7", "m@sha256:012", "@latest", "m@", "m:", ":prod", "m@v1@v2"]
)
def test_near_references_are_refused(ref: str) -> None:
    """A text that only looks like a reference is refused instead of guessed at."""
    with pytest.raises(UsageError):
        refs.split(ref)


@pytest.mark.parametrize("tag", ["latest", "v1", "v007", "", "-x", "a/b", "a..b", "x" * 65])
def test_reserved_and_bad_tags_are_refused(tag: str) -> None:
    """`latest` is computed and `v<digits>` are numbers; neither can be a movable tag."""
    with pytest.raises(UsageError):
        refs.check_tag(tag)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "./a",
        ".git/config",
        "a/.env",
        "C:x",
        "a\\b",
        "a\nb",
        "e\u0301",
        "a/" + "x" * 256,
    ],
)
def test_unsafe_paths_have_a_fault(path: str) -> None:
    """A path that could leave the folder, hide, or spoof a terminal is named as unsafe."""
    assert refs.path_fault(path)


@given(st.text(min_size=1, max_size=60))
def test_an_accepted_path_stays_below_its_folder(path: str) -> None:
    """Whatever passes the validator names something strictly inside the folder it is joined to."""
    if refs.path_fault(path) is None:
        segments = path.split("/")
        assert ".." not in segments
        assert all(s and not s.startswith(".") for s in segments)
        assert "\0" not in path


@pytest.mark.parametrize("paths", [["a", "A"], ["a", "a/b"], ["x/y", "x/y"], ["Straße", "STRASSE"]])
def test_colliding_paths_are_refused(paths: list[str]) -> None:
    """Two files that some file system could not hold side by side are refused before anything is written."""
    with pytest.raises(UsageError):
        refs.check_paths(paths)


@given(st.text())
def test_shown_text_never_moves_a_terminal(text: str) -> None:
    """Escaped text holds no control or bidirectional character, and plain text is shown as it is."""
    out = refs.shown(text)
    assert out.isprintable()
    assert refs.shown(out) == out
