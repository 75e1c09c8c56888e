"""Regular expressions that come with a folder, matched in a time that grows with the name alone.

A backtracking matcher can be made to run for ever (`(a|a|a){25}b`), and whoever writes an adapter_config.json writes
both the pattern and the names. So a pattern becomes a set of states (Thompson's construction) that all advance at once;
what was worked out is kept, so that the names of a large model cost a look-up for each letter. Single letters and
classes are asked of `re` itself. Look-around has no states: such patterns go to `re`, where they are short and choose
little.
"""

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

LENGTH: Final = 2000
"""Characters of the longest pattern that is tried."""

_STATES: Final = 4000
_WORK: Final = 1_000_000
"""Steps of new work after which a pattern is given up: about a second."""

_DEPTH: Final = 50
_CHOICES: Final = 10_000
_REPEATS: Final = 3
_QUANTIFIER: Final = re.compile(r"\*|\+|\?|\{(?P<low>[0-9]*)(?P<comma>,?)(?P<high>[0-9]*)\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:[dDsSwW]|[^0-9A-Za-z]|[ntrfv])", re.DOTALL)
_GROUP: Final = re.compile(r"\((?:\?:|\?P<\w+>)?(?!\?)")
_NAME: Final = re.compile(r"[A-Za-z0-9_.]*|\(\.\*\\\.\)\?\([A-Za-z0-9_.]*\)")
"""Names, with a dot for any letter, as they stand or as PEFT wraps them."""
_REPEAT: Final = re.compile(r"[+*}]")


class _UnfitError(Exception):
    """A pattern that has no states here, or too many."""


class _State(NamedTuple):
    """Takes a letter that `atom` matches, or goes on for nothing to all of `to`: at the start or end only by `at`."""

    atom: str
    to: list[int]
    at: str = ""


class Pattern:
    """One pattern of a config; `problem` says why it is none, None where it is one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._plain = is_name(text)
        self.problem = None if self._plain else _problem(text)
        self._states: list[_State] = []
        self._entry: int | None = None
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._left = _WORK
        self._start: frozenset[int] | None = None
        self._ends: dict[frozenset[int], bool] = {}

    @property
    def tried(self) -> bool:
        """Whether names are held against it at all."""
        return self._plain or (self.problem is None and (self._first() >= 0 or _is_plain(self.text)))

    def _first(self) -> int:
        """Return the state that a match starts in, -1 where the pattern has none; made when it is first asked for."""
        if self._entry is None:
            self._entry = -1
            if self.problem is None and len(self.text) <= LENGTH:
                try:
                    self._entry = _Parser(self.text, self._states).whole()
                except (_UnfitError, RecursionError):
                    return self._entry
        return self._entry

    def matches(self, name: str) -> bool | None:
        """Return whether it covers a whole name; None where that is not tried."""
        if not self.tried:
            return None
        entry = self._first()
        if entry < 0:
            return re.fullmatch(self.text, name) is not None
        if self._start is None:
            self._start = self._closure([entry], first=True)
        held = self._start
        for letter in name:
            if not held or self._left < 0:
                break
            key = (held, letter)
            if key not in self._next:
                self._left -= len(held)
                taken = [s.to[0] for i in held if (s := self._states[i]).atom and _takes(s.atom, letter)]
                self._next[key] = self._closure(taken)
            held = self._next[key]
        if self._left < 0:
            return None
        if not name:
            return 0 in self._closure(held, first=True, last=True)
        if held not in self._ends:
            self._ends[held] = 0 in self._closure(held, last=True)
        return self._ends[held]

    def _closure(self, start: Iterable[int], *, first: bool = False, last: bool = False) -> frozenset[int]:
        """Return all states that are reached without a letter."""
        found: set[int] = set()
        waiting = list(start)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            state = self._states[number]
            if not state.atom and (not state.at or (first if state.at == "^" else last)):
                waiting += state.to
        self._left -= len(found)
        return frozenset(found)


def is_name(text: str) -> bool:
    """Tell whether a pattern is a mere name, as most of most configs are: it has no fault and is always tried."""
    return len(text) <= LENGTH and _NAME.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Return a pattern of a config."""
    return Pattern(text)


@lru_cache(maxsize=1 << 16)
def _takes(atom: str, letter: str) -> bool:
    return re.fullmatch(atom, letter) is not None


def _problem(text: str) -> str | None:
    if len(text) > LENGTH:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a later Python will read otherwise is a pattern still
            re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def _is_plain(text: str) -> bool:
    """Return whether a pattern with look-around has so few repetitions and choices that it cannot run long."""
    repeated = re.search(r"\)[*+{]", text) is not None
    choices = 1
    for group in text.split("("):
        choices *= 1 + group.count("|") + group.count("?")
    return not repeated and len(_REPEAT.findall(text)) <= _REPEATS and choices <= _CHOICES and len(text) <= LENGTH


class _Parser:
    """Builds the states of a pattern from its end to its start; state 0 is the one where it has matched."""

    def __init__(self, text: str, states: list[_State]) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._states = states
        states.append(_State("", []))

    def whole(self) -> int:
        """Return the state that a match starts in. Raises _UnfitError."""
        tree = self._choice()
        if self._at < len(self._text):
            raise _UnfitError
        return self._build(tree, 0)

    # -- reading

    def _choice(self) -> tuple[object, ...]:
        self._depth += 1
        if self._depth > _DEPTH:
            raise _UnfitError
        ways = [self._row()]
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            ways.append(self._row())
        self._depth -= 1
        return ("choice", ways)

    def _row(self) -> tuple[object, ...]:
        row: list[tuple[object, ...]] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            row.append(self._repeated(self._one()))
        return ("row", row)

    def _one(self) -> tuple[object, ...]:
        text, at = self._text, self._at
        if text[at] == "(":
            opened = _GROUP.match(text, at)
            if opened is None:
                raise _UnfitError
            self._at = opened.end()
            inner = self._choice()
            self._at += 1  # the closing bracket: the pattern is one
            return inner
        if text[at] in "^$":
            self._at += 1
            return ("at", text[at])
        match = _CLASS.match(text, at) if text[at] == "[" else _ESCAPE.match(text, at) if text[at] == "\\" else None
        if match is None and text[at] in "[\\":
            raise _UnfitError
        atom = match.group() if match is not None else text[at] if text[at] == "." else re.escape(text[at])
        self._at = match.end() if match is not None else at + 1
        return ("letter", atom)

    def _repeated(self, one: tuple[object, ...]) -> tuple[object, ...]:
        match = _QUANTIFIER.match(self._text, self._at)
        if match is None or match.group() == "{}":
            return one
        mark = match.group()[0]
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(mark, (int(match["low"] or 0), None))
        if mark == "{" and (match["high"] or not match["comma"]):
            high = int(match["high"]) if match["high"] else low
        self._at = match.end()
        if self._at < len(self._text) and self._text[self._at] in "?+":
            if self._text[self._at] == "+":
                raise _UnfitError  # takes all and gives nothing back
            self._at += 1
        return ("repeat", one, low, high)

    # -- building

    def _state(self, atom: str, to: list[int], at: str = "") -> int:
        if len(self._states) >= _STATES:
            raise _UnfitError
        self._states.append(_State(atom, to, at))
        return len(self._states) - 1

    def _build(self, tree: tuple[object, ...], then: int) -> int:
        kind = tree[0]
        if kind == "letter":
            return self._state(str(tree[1]), [then])
        if kind == "at":
            return self._state("", [then], str(tree[1]))
        if kind == "choice":
            ways: list[tuple[object, ...]] = tree[1]  # type: ignore[assignment]
            return (
                self._build(ways[0], then) if len(ways) == 1 else self._state("", [self._build(w, then) for w in ways])
            )
        if kind == "row":
            row: list[tuple[object, ...]] = tree[1]  # type: ignore[assignment]
            for one in reversed(row):
                then = self._build(one, then)
            return then
        return self._build_repeat(tree, then)

    def _build_repeat(self, tree: tuple[object, ...], then: int) -> int:
        _, one, low, high = tree
        assert isinstance(one, tuple)
        assert isinstance(low, int)
        if high is None:
            loop = self._state("", [then])
            self._states[loop].to.append(self._build(one, loop))
            then = loop
        else:
            assert isinstance(high, int)
            if high > _STATES:
                raise _UnfitError
            end = then
            for _ in range(high - low):
                then = self._state("", [end, self._build(one, then)])
        for _ in range(min(low, _STATES)):
            then = self._build(one, then)
        return then
