"""How commands speak: columns, sizes, ages, colours, JSON."""

import io
import json
import os
import pty
import sys
import termios
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry.cli import output
from weighbridge.registry.cli.output import Column, Output

COLUMNS = (
    Column("name", shrink=True),
    Column("tags"),
    Column("size", show=output.size, right=True),
    Column("digest", show=output.short, wide=True),
)
ROWS: list[dict[str, Any]] = [
    {
        "name": "medical-sft",
        "tags": ["latest", "prod"],
        "size": 162_000_000,
        "digest": "sha256:" + "9" * 64,
        "ref": "a@v1",
    },
    {"name": "x", "tags": [], "size": 712, "digest": None, "ref": "x@v2"},
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal of a given width."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 40) -> Terminal:
    """Make stdout a terminal, for the rest of the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    """Headings are upper-case, text is left, numbers are right, nothing has trailing blanks."""
    Output().table(ROWS, COLUMNS)
    assert capsys.readouterr().out == (
        "NAME         TAGS           SIZE\nmedical-sft  latest,prod  162 MB\nx            -             712 B\n"
    )


def test_wide_tables_have_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """`-o wide` adds the columns that the plain table leaves out."""
    Output("wide").table(ROWS, COLUMNS)
    assert "DIGEST" in capsys.readouterr().out.splitlines()[0]


def test_an_empty_table_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    """No rows print the headings alone."""
    Output().table([], COLUMNS)
    assert capsys.readouterr().out == "NAME  TAGS  SIZE\n"


@pytest.mark.parametrize("fmt", ["table", "wide"])
def test_pipes_get_everything_plain(capsys: pytest.CaptureFixture[str], fmt: str) -> None:
    """Into a pipe nothing is cut and nothing is coloured."""
    Output(fmt).table([{**ROWS[0], "name": "n" * 300}], COLUMNS)
    text = capsys.readouterr().out
    assert "n" * 300 in text
    assert "\x1b" not in text


def test_terminals_cut_what_may_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal the column that may shrink is cut; the others stay whole."""
    terminal = on_terminal(monkeypatch)
    Output(color="never").table([{**ROWS[0], "name": "n" * 300}], COLUMNS)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) == 40
    assert "n.." in lines[1]
    assert "162 MB" in lines[1]


def test_too_narrow_a_terminal_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing more can give, the table is wider than the terminal."""
    terminal = on_terminal(monkeypatch, columns=5)
    Output(color="never").table(ROWS, COLUMNS)
    assert "latest,prod" in terminal.getvalue()


def test_a_real_terminal_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width comes from the terminal itself where COLUMNS does not say."""
    monkeypatch.delenv("COLUMNS", raising=False)  # test runners set it for their workers
    controller, side = pty.openpty()
    try:
        termios.tcsetwinsize(side, (24, 77))
        with os.fdopen(os.dup(side), "w") as stream:
            assert output.terminal_width(stream) == 77
    finally:
        os.close(controller)
        os.close(side)
    assert output.terminal_width(io.StringIO()) is None


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets colours unless NO_COLOR, TERM=dumb or --color never; --color always wins over all."""
    terminal = on_terminal(monkeypatch)
    assert output.colours("auto", terminal)
    assert not output.colours("never", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.colours("auto", terminal)
    assert output.colours("always", terminal)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not output.colours("auto", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert not output.colours("auto", io.StringIO())
    assert output.colours("always", io.StringIO())


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON carries the schema, the extra fields and the rows unchanged, on one line into a pipe."""
    Output("json").rows(ROWS, COLUMNS, schema="weighbridge/x/1", into="versions", extra={"as_of": None})
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == {"schema": "weighbridge/x/1", "as_of": None, "versions": ROWS}


def test_jsonl_is_one_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`-o jsonl` prints each row as an object of its own."""
    Output("jsonl").rows(iter(ROWS), COLUMNS, schema="weighbridge/x/1", into="versions")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS


def test_names_are_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`-o name` prints the reference of each row and nothing else."""
    Output("name").rows(ROWS, COLUMNS, schema="weighbridge/x/1", into="versions")
    assert capsys.readouterr().out == "a@v1\nx@v2\n"


def test_json_survives_odd_values(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN, infinities, undecodable bytes and terminal codes come out as valid ASCII JSON."""
    odd = {"nan": float("nan"), "list": [float("inf"), -float("inf")], "path": "a\udce9\x1b[2J", "wide": "漢"}
    Output("json").json(odd)
    text = capsys.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text)["nan"] == "NaN"
    assert json.loads(text)["list"] == ["Infinity", "-Infinity"]


def test_cells_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control and bidirectional characters of names are shown escaped, in tables, names and lines."""
    evil = "a\x1b]0;x\x07\n\u202eb"
    out = Output()
    out.table([{**ROWS[0], "name": evil}], COLUMNS)
    out.say(evil)
    out.talk(evil)
    Output("name").rows([{"ref": evil}], COLUMNS, schema="s", into="x")
    captured = capsys.readouterr()
    for line in (captured.out + captured.err).splitlines():
        assert line.isprintable()
        assert "\u202e" not in line
    assert captured.out.count("\n") == 4


def test_talk_goes_to_stderr_and_can_be_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    """Talk never mixes with data, and -q silences it."""
    Output().talk("working")
    Output(quiet=True).talk("not said")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "working\n")


def test_wide_characters_keep_columns_straight(capsys: pytest.CaptureFixture[str]) -> None:
    """A wide character takes two columns, a combining one none."""
    assert output.width("漢字") == 4
    assert output.width("e\u0301") == 1
    Output().table([{"name": "漢字", "tags": None, "size": 1}, {"name": "abcd", "tags": None, "size": 1}], COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].index("-") + 2 == lines[2].index("-")


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (712, "712 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (161_500_000, "162 MB"),
        (2_270_000_000, "2.27 GB"),
        (15_200_000_000, "15.2 GB"),
        (5 * 10**21, "5000 EB"),
    ],
)
def test_sizes(count: int | None, shown: str) -> None:
    """Sizes are decimal, with three digits."""
    assert output.size(count) == shown


@given(st.integers(0, 10**20))
def test_sizes_are_near_and_short(count: int) -> None:
    """A shown size is within half a percent, and its number has three digits from a kilobyte on."""
    number, unit = output.size(count).split()
    factor = 1000 ** ["B", "kB", "MB", "GB", "TB", "PB", "EB"].index(unit)
    assert abs(float(number) * factor - count) <= count * 0.0051
    assert count < 1000 or len(number.replace(".", "")) == 3


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7199, "119m"),
        (7200, "2h"),
        (172_799, "47h"),
        (172_800, "2d"),
        (1_209_600, "2w"),
        (60 * 604_800, "60w"),
    ],
)
def test_ages(seconds: float, shown: str) -> None:
    """An age has one unit, is never negative, and changes unit only where two of the next are full."""
    assert output.age(1_000_000_000 - seconds, now=1_000_000_000) == shown


def test_moments() -> None:
    """Moments are UTC ISO 8601 with Z; none stays none."""
    assert output.instant(1_796_000_000.9) == "2026-11-30T00:53:20Z"
    assert output.instant(None) is None
    assert output.age(None) == "-"


@given(st.text(max_size=30), st.integers(2, 40))
def test_cut_cells_fit(text: str, room: int) -> None:
    """A cut cell never takes more room than it was given, and one that fits is left alone."""
    assert output.width(output.cut(text, room)) <= room
    if output.width(text) <= room:
        assert output.cut(text, room) == text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), ("", "-"), ([], "-"), (True, "yes"), (False, "no"), (0, "0"), (["a", "b"], "a,b"), (1.5, "1.5")],
)
def test_values_as_cells(value: Any, shown: str) -> None:
    """Nothing is a dash, truth is a word, lists are joined."""
    assert output.text(value) == shown


def test_bars_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars need a terminal on stderr, and nobody who asked for quiet or JSON."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Output().lively()
    assert not Output(quiet=True).lively()
    assert not Output("json").lively()
    monkeypatch.setenv("TERM", "dumb")
    assert not Output().lively()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not Output().lively()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON)
def test_compact_json_is_what_json_dumps_would_write(value: Any) -> None:
    """The short way round the json package gives the same bytes; what JSON lacks becomes a string."""
    told = output.line(value)
    try:
        assert told == json.dumps(value, allow_nan=False)
    except ValueError:
        assert json.loads(told) is not None


def test_a_narrow_terminal_leaves_spare_columns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cutting is not enough, the least needed columns go, the first spare one first; a pipe keeps them all."""
    columns = (
        Column("name", shrink=True),
        Column("owner", spare=2),
        Column("where", spare=1),
        Column("size", show=output.size, right=True),
    )
    row = {"name": "medical-sft", "owner": "somebody", "where": "team", "size": 5}
    terminal = on_terminal(monkeypatch, columns=26)
    Output(color="never").table([row], columns)
    assert terminal.getvalue().splitlines()[0].split() == ["NAME", "OWNER", "SIZE"]
    terminal = on_terminal(monkeypatch, columns=16)
    Output(color="never").table([row], columns)
    assert terminal.getvalue().splitlines()[0].split() == ["NAME", "SIZE"]
