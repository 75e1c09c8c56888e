"""How commands speak: data on stdout, talk on stderr, one column printer, sizes and ages.

Every cell goes through `refs.shown`, so no name from a folder or a remote can steer a terminal. On a terminal a table
is cut to its width; into a pipe nothing is cut and nothing is coloured. JSON is ASCII: it survives every locale.
"""

import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TextIO

from weighbridge.registry.errors import NotFoundError
from weighbridge.registry.refs import shown
from weighbridge.registry.shell import load

FORMATS: Final = ("table", "wide", "json", "jsonl", "name")
_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB", "EB")
_SHRINK_TO: Final = 8
_GAP: Final = "  "


_OF_A_NAME: Final = frozenset({"show", "pull", "push", "verify", "tag", "card", "mirror", "withdraw", "purge"})
_OF_A_REMOTE: Final = frozenset({"ls", "rebuild", "sweep", "log"})
"""Commands that people may be told to type and that ask a remote: those that need a word more, and those that do not.

A command of the first kind without its word is only spoken of.
"""

_NEXT: Final = re.compile(r"(?=\bregistry [a-z])")
_TOLD: Final = re.compile(r"registry ([a-z]+)( (?!-|&&)[^\s,;]*[^\s,;:.])?")


def text(value: Any) -> str:
    """Return any JSON value as a cell: `-` for nothing, words for booleans, lists joined by commas."""
    if value is None or value == "":
        return "-"
    if value is True or value is False:
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value) or "-"
    return str(value)


def size(count: int | None) -> str:
    """Return bytes in decimal units with three digits: `712 B`, `2.27 GB`, `162 MB`."""
    if count is None:
        return "-"
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1000
        if value < 9.995:
            return f"{value:.2f} {unit}"
        if value < 99.95:
            return f"{value:.1f} {unit}"
        if value < 999.5:
            return f"{value:.0f} {unit}"
    return f"{value:.0f} {_UNITS[-1]}"


def age(moment: float | None, now: float | None = None) -> str:
    """Return how long ago a moment (seconds since 1970) was: `40s`, `12m`, `5h`, `3d`, `8w`; never below 0s."""
    if moment is None:
        return "-"
    return span((time.time() if now is None else now) - moment)


def span(seconds: float) -> str:
    """Return a length of time in its one fitting unit, cut, not rounded."""
    whole = max(0, int(seconds))
    for limit, unit, letter in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h"), (1209600, 86400, "d")):
        if whole < limit:
            return f"{whole // unit}{letter}"
    return f"{whole // 604800}w"


def instant(moment: float | None) -> str | None:
    """Return seconds since 1970 as UTC ISO 8601 with Z, to the second; None stays None."""
    return None if moment is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def short(digest: str | None) -> str:
    """Return the 12 hex digits of a digest that tables show."""
    return "-" if not digest else digest.removeprefix("sha256:")[:12]


def width(cell: str) -> int:
    """Return the columns a cell takes on a terminal: two for wide characters, none for combining ones."""
    if cell.isascii():
        return len(cell)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in {"W", "F"} else 1 for c in cell
    )


def aimed(text: str, remote: str | None) -> str:
    """Return a text in which every command that asks a remote names the one that was named with `--remote`, if any.

    The option stands behind the command's first word: what follows may be a sentence.
    """
    if remote is None:
        return text
    option = f" --remote {load('shlex:quote')(remote)}"
    return "".join(_with(option, command) for command in _NEXT.split(text))


def _with(option: str, command: str) -> str:
    """Return a command, with the words up to the next one, with an option where that tells something."""
    found = _TOLD.match(command)
    if found is None or "--remote" in command.split():
        return command
    at = found.end()
    if found[1] in _OF_A_REMOTE:
        goes_on = found[2] is not None and command[at : at + 1] == " " and command[at + 1 : at + 2] not in {"-", ""}
        at = found.end(1) if goes_on else at  # a sentence goes on
    elif found[1] not in _OF_A_NAME or found[2] is None:
        return command
    return command[:at] + option + command[at:]


class Column(NamedTuple):
    """One column of a table: the row's key, and how its value is shown."""

    key: str
    title: str = ""
    """The heading; the upper-cased key when empty."""
    show: Callable[[Any], str] = text
    right: bool = False
    wide: bool = False
    """Shown with `-o wide` only."""
    shrink: bool = False
    """May be cut on a narrow terminal."""
    spare: int = 0
    """Left out on a terminal that is too narrow even so: 1 first, 0 never."""


class Output:
    """Where one command writes, in the format its options chose."""

    __slots__ = ("color", "fmt", "quiet", "remote")

    def __init__(
        self, fmt: str = "table", *, quiet: bool = False, color: str = "auto", remote: str | None = None
    ) -> None:
        """Choose a format of FORMATS; `quiet` silences talk, `color` is auto, always or never.

        `remote` is what `--remote` named: commands that are told of name it, too.
        """
        self.fmt = fmt
        self.quiet = quiet
        self.color = color
        self.remote = remote

    @property
    def as_json(self) -> bool:
        """Whether the command was asked for JSON."""
        return self.fmt in {"json", "jsonl"}

    def rows(
        self,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[Column],
        *,
        schema: str,
        into: str,
        name: str = "ref",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Print rows as the chosen format.

        JSON is one object: `schema`, the fields of `extra`, and the rows unchanged under the key `into`; `jsonl` is one
        row a line; `name` prints the row's field `name`.
        """
        if self.fmt == "json":
            self.json({"schema": schema, **(extra or {}), into: list(rows)})
        elif self.fmt == "jsonl":
            write("".join(line(row) + "\n" for row in rows))
        elif self.fmt == "name":
            write("".join(shown(str(row[name])) + "\n" for row in rows))
        else:
            self.table(rows, columns)

    def table(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> None:
        """Print aligned columns under upper-case headings; an empty table prints its headings."""
        chosen = [column for column in columns if self.fmt == "wide" or not column.wide]
        cells = [[shown(column.show(row.get(column.key))) for column in chosen] for row in rows]
        titles = [column.title or column.key.upper() for column in chosen]
        widths = [max(map(width, column)) for column in zip(titles, *cells, strict=True)]
        room = terminal_width(sys.stdout)
        if room is not None and self.fmt != "wide":
            spared = _spared(titles, widths, chosen, room)
            kept = [at for at in range(len(chosen)) if at not in spared]
            chosen = [chosen[at] for at in kept]
            titles, widths = [titles[at] for at in kept], [widths[at] for at in kept]
            cells = [[row[at] for at in kept] for row in cells]
            _shrink(widths, titles, chosen, room)
        painted = self.paint(_row(titles, widths, chosen), "bold")
        write("".join(f"{row}\n" for row in [painted, *(_row(cell, widths, chosen) for cell in cells)]))

    def json(self, value: Mapping[str, Any]) -> None:
        """Print one JSON object, indented for people on a terminal and on one line into a pipe."""
        write(line(value, indent=1 if sys.stdout.isatty() else None) + "\n")

    def say(self, what: str = "") -> None:
        """Print one line of data to stdout; control characters in it are escaped."""
        write(shown(what) + "\n")

    def say_painted(self, label: str, what: str) -> None:
        """Print one line of data whose label was painted already; the rest is escaped."""
        write(label + shown(what) + "\n")

    def talk(self, what: str, style: str | None = None) -> None:
        """Print one line of talk to stderr, unless -q was given."""
        if not self.quiet:
            whole = shown(aimed(what, self.remote))
            sys.stderr.write((self.paint(whole, style, sys.stderr) if style else whole) + "\n")
            sys.stderr.flush()

    def paint(self, what: str, style: str, stream: TextIO | None = None) -> str:
        """Return the text in a style of `_STYLES` where the stream shows colours."""
        return f"\033[{_STYLES[style]}m{what}\033[0m" if colours(self.color, stream or sys.stdout) else what

    def lively(self) -> bool:
        """Whether progress bars make sense: talk is wanted and stderr is a terminal that can move its cursor."""
        return not self.quiet and not self.as_json and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def colours(choice: str, stream: TextIO) -> bool:
    """Tell whether a stream gets colours: the option first, then NO_COLOR, TERM=dumb and whether it is a terminal."""
    if choice != "auto":
        return choice == "always"
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind a stream, or None when it is none: then nothing is cut."""
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def line(value: Any, indent: int | None = None) -> str:
    """Return a value as ASCII JSON; NaN and infinities, which JSON has no word for, become strings."""
    if indent is None:
        plain = _compact(value)
        if plain is not None:
            return plain
    dumps = load("json:dumps")
    try:
        found: str = dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        found = dumps(_finite(value), indent=indent, allow_nan=False)
    return found


def _compact(value: Any) -> str | None:
    """Return plain values as json.dumps would, None for what needs more than that.

    The json package costs as much to import as all of `ls` to run; its quoting is in C and free.
    """
    try:
        quoted: Callable[[str], str] = load("_json:encode_basestring_ascii")
    except (NotFoundError, AttributeError):
        return None

    def told(part: Any) -> str:
        kind = type(part)
        if kind is str:
            return quoted(part)
        if kind is int:
            return repr(part)
        if part is None or kind is bool:
            return {None: "null", True: "true", False: "false"}[part]
        if kind is dict and all(type(key) is str for key in part):
            return "{" + ", ".join(f"{quoted(key)}: {told(item)}" for key, item in part.items()) + "}"
        if kind is list or kind is tuple:
            return "[" + ", ".join(map(told, part)) + "]"
        raise TypeError

    try:
        return told(value)
    except (TypeError, RecursionError):
        return None


def write(data: str) -> None:
    """Write data to stdout."""
    sys.stdout.write(data)


def cut(cell: str, room: int) -> str:
    """Return a cell that takes at most `room` columns, its end replaced by `..` where it had to be cut."""
    if width(cell) <= room:
        return cell
    kept = ""
    used = 0
    for character in cell:
        used += width(character)
        if used > room - 2:
            break
        kept += character
    return kept + ".."[:room]


def _row(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    out = []
    for cell, room, column in zip(cells, widths, columns, strict=True):
        kept = cut(cell, room)
        space = " " * (room - width(kept))
        out.append(space + kept if column.right else kept + space)
    return _GAP.join(out).rstrip()


def _spared(titles: Sequence[str], widths: Sequence[int], columns: Sequence[Column], room: int) -> list[int]:
    """Return which columns to leave out, in order, so that a table fits whose columns shrank as far as they can."""
    least = [
        min(found, max(len(title), _SHRINK_TO)) if column.shrink else found
        for title, found, column in zip(titles, widths, columns, strict=True)
    ]
    spare = sorted((column.spare, at) for at, column in enumerate(columns) if column.spare)
    out: list[int] = []
    while spare and sum(least) + len(_GAP) * (len(columns) - len(out) - 1) > room:
        at = spare.pop(0)[1]
        out.append(at)
        least[at] = 0
    return sorted(out)


def _shrink(widths: list[int], titles: Sequence[str], columns: Sequence[Column], room: int) -> None:
    """Take columns that may shrink down, the widest first, until the table fits or nothing more can give."""
    least = [max(len(title), _SHRINK_TO) for title in titles]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        able = [at for at, column in enumerate(columns) if column.shrink and widths[at] > least[at]]
        if not able:
            return
        widths[max(able, key=widths.__getitem__)] -= 1


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if value != value:  # noqa: PLR0124 - NaN alone differs from itself
            return "NaN"
        return {float("inf"): "Infinity", float("-inf"): "-Infinity"}.get(value, value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
