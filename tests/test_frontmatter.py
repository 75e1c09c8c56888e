"""The YAML block of a card, read as the Hub reads it and written so that nothing in it can be mistaken."""

import math

import pytest
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import frontmatter

WORDS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.text(max_size=400))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    """Any text gives a value or a fault with a line inside it, never an exception."""
    parsed = frontmatter.load(text)
    assert parsed.fault is None or 1 <= (parsed.line or 1) <= len(text.splitlines()) + 1


@given(st.text(alphabet="-#: \n\r\ufeffab[]{}*&!|>'\"", max_size=200))
def test_no_card_makes_the_splitter_fail(text: str) -> None:
    """Any card splits into a block and a body, both of them parts of the text."""
    parts = frontmatter.split(text)
    assert parts.body == "" or parts.displaced or text.endswith(parts.body)
    assert parts.front is None or parts.front in text


@given(st.dictionaries(WORDS, VALUES, max_size=5))
def test_dumped_fields_read_back_equal(front: dict[str, object]) -> None:
    """What is dumped reads back equal, through the Hub client's own pattern too."""
    text = frontmatter.fenced(front) + "\nbody\n"
    block = REGEX_YAML_BLOCK.search(text)
    assert block is not None
    assert frontmatter.load(block[2]).value == front or not front
    assert frontmatter.split(text).body == "\nbody\n"


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "NO", "y", "n", "2024-01-01", "1:30", "="])
def test_words_of_old_yaml_are_text(word: str) -> None:
    """Words that YAML 1.1 took for truth values, dates or numbers are the text a person wrote."""
    assert frontmatter.load(f"language: {word}").value == {"language": word}


def test_numbers_and_truth_values_are_those_of_yaml_1_2() -> None:
    """Numbers keep their usual meaning; a leading zero is no octal number."""
    value = frontmatter.load("a: 010\nb: 0x1f\nc: 1.0e-4\nd: true\ne: ~\nf: .inf\ng: 1e3\nh: -2").value
    assert value == {"a": 10, "b": 31, "c": 1e-4, "d": True, "e": None, "f": math.inf, "g": 1000.0, "h": -2}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("license: mit\n tags: [a, b", 2),
        ("license: mit\ntags: [a, b", 2),
        ("a: 1\nb: 2\na: 3", 3),
        ("a:\n\tb: 1", 2),
        ("a: *nowhere", 1),
        ("a: 1\nb: \x07", 2),
        ("a: !!python/object/apply:os.system [id]", 1),
        ("? [a, b]\n: c", 1),
        ("x: &x [*x]", 1),
    ],
)
def test_faults_name_their_line(text: str, line: int) -> None:
    """A block that is no plain YAML, holds a key twice, or asks for code is a fault at its line."""
    parsed = frontmatter.load(text)
    assert parsed.value is None
    assert parsed.fault
    assert parsed.line == line


def test_long_blocks_are_refused_at_their_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that holds too much is not read to its end, and a long one not a second time for its fault."""
    monkeypatch.setattr(frontmatter, "EXPANDED_MAX", 1000)
    many = "".join(f"k{i}: v\n" for i in range(20_000)) + "c: ["
    assert frontmatter.load(many) == (None, "it holds too many values", 1)
    broken = "a: b\nc: [" + "\n" * 200_000 + "]]"
    assert frontmatter.load(broken) == (None, "did not find expected key", 200_002)


def test_a_key_of_blanks_is_read_once() -> None:
    """A line that could be a key at any of its half a million blanks is none, in time that grows with its length."""
    text = "---\na" + " " * 500_000 + "!\n"
    assert frontmatter.split(text) == (False, None, 1, text, True, False)
    text = "\r\n" * 300_000 + "---\na: 1\n---\n"
    assert frontmatter.split(text) == (False, "a: 1", 300_002, "", True, False)


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5000, "- " * 5000 + "x", "a: " + "9" * 5000])
def test_monsters_are_refused_quickly(text: str) -> None:
    """Deep nesting and endless numbers end as a fault."""
    assert frontmatter.load(text).fault


def test_a_document_that_grows_by_aliases_is_refused() -> None:
    """Aliases that multiply are counted before anything is built; a few of them are fine."""
    grown = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    assert "large" in (frontmatter.load(grown).fault or "")
    assert frontmatter.load("a: &a [x]\nb: *a").value == {"a": ["x"], "b": ["x"]}


def test_a_block_that_stands_elsewhere_is_found_but_marked() -> None:
    """Front matter below other text is displaced; two rulers around prose and a block inside code are none."""
    parts = frontmatter.split("**Note**\n\n---\nlicense: other\ntags:\n\n- a\n---\n\nbody\n")
    assert parts.displaced
    assert parts.line == 4
    assert parts.body == "**Note**\n\n\nbody\n"
    assert frontmatter.split("# T\n---\nhello: there\n---\n").front is None
    assert frontmatter.split("# T\n---\nhello: license\n---\n").front is None
    assert frontmatter.split('# T\n---\na: 1\n"\\x6cicense": mit\n---\n').displaced
    assert frontmatter.split("# T\n```\n---\nlicense: mit\n---\n```\n").front is None
