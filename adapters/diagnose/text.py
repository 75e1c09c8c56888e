"""Find the lines that matter in an error text: bounded, cleaned of colours and control characters, matched in one pass.

A pattern is a row of plain fragments that must follow each other in one line (or across one wrap of it). There is no
backtracking, so no text can make it slow.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

HEAD: Final = 64 << 10
"""Characters kept from the beginning of a long text."""

TAIL: Final = 192 << 10
"""Characters kept from its end, where a traceback has its last word."""

LINE: Final = 4000
"""Characters of a line that are looked at."""

SHOWN: Final = 300
"""Characters of a line that are told again."""

SPOKEN: Final = 6
"""Lines up to which a text may be somebody's own words."""

Pattern = tuple[str, ...]
"""Lower-case fragments that follow each other."""

_COLOUR = re.compile(r"\x1b\[[0-9;:?]{0,40}[ -/]?[@-~]")
_QUOTES: Final = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " "})
_SIDES: Final = r"torch\.Size\(\[([0-9, ]{0,60})\]\)"
_MISMATCH = re.compile(
    rf"size mismatch for ([\w.-]{{1,300}}): copying a param with shape {_SIDES} from checkpoint, "
    rf"the shape in current model is {_SIDES}"
)
_REPORTED = re.compile(rf"ckpt: {_SIDES} vs model: ?{_SIDES}")


class Line(NamedTuple):
    """A line with its number from 1, as it was and as it is matched: in lower case, with a space at both ends."""

    number: int
    shown: str
    plain: str


class Text(NamedTuple):
    """An error text: its lines that are looked at, how many there were, and whether the middle was left out."""

    lines: tuple[Line, ...]
    total: int
    cut: bool
    plain: str
    """All lines as they are matched, for a first quick look."""

    @property
    def short(self) -> bool:
        """It is what a person says rather than what a program printed."""
        return self.total <= SPOKEN


class Mismatch(NamedTuple):
    """A tensor whose shape a text complains about."""

    name: str
    stored: tuple[int, ...]
    wanted: tuple[int, ...]
    number: int


def read(text: str) -> Text:
    """Return a text as lines. Of one longer than HEAD + TAIL the middle is left out."""
    middle = len(text) - HEAD - TAIL
    parts = [(0, text)] if middle <= 0 else [(0, text[:HEAD]), (text.count("\n", 0, HEAD + middle), text[-TAIL:])]
    lines: list[Line] = []
    for before, part in parts:
        for number, raw in enumerate(part.split("\n"), start=before + 1):
            clean = _clean(raw)
            if clean:
                lines.append(Line(number, clean, f" {clean.lower()} "))
    return Text(tuple(lines), text.count("\n") + 1, middle > 0, " " + "".join(line.plain[1:] for line in lines))


def find(text: Text, patterns: Iterable[Pattern]) -> Line | None:
    """Return the last line that one of the patterns begins in, None where none does."""
    best: Line | None = None
    for pattern in patterns:
        if not all(fragment in text.plain for fragment in pattern):
            continue
        for at in range(len(text.lines) - 1, -1, -1):
            line = text.lines[at]
            if best is not None and line.number <= best.number:
                break
            if _within(text.lines, at, pattern):
                best = line
                break
    return best


def mismatches(text: Text) -> list[Mismatch]:
    """Return the tensors whose shapes a text of torch, PEFT or transformers complains about, each once."""
    found: dict[str, Mismatch] = {}
    for line in text.lines:
        if "size" not in line.plain:
            continue
        for match in _MISMATCH.finditer(line.shown):
            found.setdefault(match[1], Mismatch(match[1], _shape(match[2]), _shape(match[3]), line.number))
        cells = line.shown.split("|", maxsplit=3)
        reported = _REPORTED.search(cells[2]) if len(cells) > 2 and cells[1].strip() == "MISMATCH" else None
        if reported is not None:
            name = cells[0].strip()
            found.setdefault(name, Mismatch(name, _shape(reported[1]), _shape(reported[2]), line.number))
    return list(found.values())


def number_after(text: Text, *fragments: str) -> int | None:
    """Return the whole number right behind a pattern, None where there is none."""
    for line in text.lines:
        at = 0
        for fragment in fragments:
            at = line.plain.find(fragment, at)
            if at < 0:
                break
            at += len(fragment)
        else:
            match = re.match(r"[ :'\"=(]{0,4}([0-9]{1,9})", line.plain[at : at + 20])
            if match is not None:
                return int(match[1])
    return None


def _clean(raw: str) -> str:
    raw = raw.rstrip("\r").rpartition("\r")[2]  # of a progress bar the state that a terminal shows in the end
    plain = _COLOUR.sub("", raw[: 4 * LINE]).translate(_QUOTES)[:LINE]
    if not plain.isprintable():
        plain = "".join(c if c.isprintable() else " " for c in plain)
    return " ".join(plain.split())


def _within(lines: tuple[Line, ...], at: int, pattern: Pattern) -> bool:
    """Return whether a pattern begins in a line and ends in it or in the next one."""
    own = lines[at].plain
    whole = own if at + 1 >= len(lines) else own + lines[at + 1].plain[1:]
    place = whole.find(pattern[0])
    if not 0 <= place < len(own):
        return False
    place += len(pattern[0])
    for fragment in pattern[1:]:
        place = whole.find(fragment, place)
        if place < 0:
            return False
        place += len(fragment)
    return True


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(side) for side in text.split(",") if side.strip().isdigit())
