"""On which line a key of a TOML text stands; tomllib does not say. Loaded only when a configuration has a fault.

The text is known to be valid TOML, so the scanner only has to tell keys from values, not to judge them.
"""

from typing import Final

KeyPath = tuple[str | int, ...]
"""Keys and array positions from the root, as in ("watch", 1, "root")."""

_BLANK: Final = " \t"
_SPACE: Final = " \t\r\n"
_ESCAPES: Final = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}


def line_of(source: str, path: KeyPath) -> int | None:
    """Return the line of a key, or of its nearest parent that is written down; None for the root itself."""
    known = positions(source)
    for end in range(len(path), 0, -1):
        if path[:end] in known:
            return known[path[:end]]
    return None


def positions(source: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every table header, key and array element of a valid TOML text."""
    return _Scanner(source).scan()


class _Scanner:
    def __init__(self, source: str) -> None:
        self.source = source + "\n"
        self.at = 0
        self.found: dict[KeyPath, int] = {}
        self.counts: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip():
            start = self.at
            if self.source[self.at] == "[":
                many = self.source.startswith("[[", self.at)
                self.at += 2 if many else 1
                table = self._header(self._key(), start, many=many)
                self.at = self.source.index("\n", self.at)
            else:
                self._pair(table)
        return self.found

    def _skip(self) -> bool:
        """Step over white space and comments; False at the end of the text."""
        while self.at < len(self.source):
            if self.source[self.at] == "#":
                self.at = self.source.index("\n", self.at)
            elif self.source[self.at] in _SPACE:
                self.at += 1
            else:
                return True
        return False

    def _line(self, at: int) -> int:
        return self.source.count("\n", 0, at) + 1

    def _note(self, path: KeyPath, at: int) -> None:
        self.found.setdefault(path, self._line(at))

    def _header(self, key: list[str], at: int, *, many: bool) -> KeyPath:
        """Return the table a header opens, noting it; an array of tables counts one further."""
        table: KeyPath = ()
        for depth, word in enumerate(key):
            table = (*table, word)
            self._note(table, at)
            last = depth == len(key) - 1
            if last and many:
                self.counts[table] = self.counts.get(table, -1) + 1
            if table in self.counts:
                table = (*table, self.counts[table])
                self._note(table, at)
        return table

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        path = table
        for word in self._key():
            path = (*path, word)
            self._note(path, start)
        self.at = self.source.index("=", self.at) + 1
        self._value(path)

    def _key(self) -> list[str]:
        """Read a dotted key and stop behind it."""
        words: list[str] = []
        while True:
            self._blanks()
            mark = self.source[self.at]
            if mark in "\"'":
                words.append(self._string())
            else:
                end = self.at
                while self.source[end].isalnum() or self.source[end] in "_-":
                    end += 1
                words.append(self.source[self.at : end])
                self.at = end
            self._blanks()
            if self.source[self.at] != ".":
                return words
            self.at += 1

    def _blanks(self) -> None:
        while self.source[self.at] in _BLANK:
            self.at += 1

    def _string(self) -> str:
        """Read any of the four kinds of strings and stop behind it; the text is exact for one-line strings."""
        mark = self.source[self.at]
        if self.source.startswith(mark * 3, self.at):
            self._long_string(mark)
            return ""
        self.at += 1
        text = ""
        while self.source[self.at] != mark:
            if mark == '"' and self.source[self.at] == "\\":
                text += self._escape()
            else:
                text += self.source[self.at]
                self.at += 1
        self.at += 1
        return text

    def _escape(self) -> str:
        letter = self.source[self.at + 1]
        digits = {"u": 4, "U": 8}.get(letter, 0)
        code = self.source[self.at + 2 : self.at + 2 + digits]
        self.at += 2 + digits
        return chr(int(code, 16)) if digits else _ESCAPES.get(letter, letter)

    def _long_string(self, mark: str) -> None:
        self.at += 3
        while not self.source.startswith(mark * 3, self.at):
            self.at += 2 if mark == '"' and self.source[self.at] == "\\" else 1
        self.at += 3
        while self.source[self.at] == mark:  # up to two quotes may end the text itself
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        self._skip()
        mark = self.source[self.at]
        if mark in "\"'":
            self._string()
        elif mark == "[":
            self._array(path)
        elif mark == "{":
            self._inline(path)
        else:
            while self.source[self.at] not in ",]}#\n":
                self.at += 1

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        position = 0
        while self._skip() and self.source[self.at] != "]":
            if self.source[self.at] == ",":
                self.at += 1
                position += 1
                continue
            self._note((*path, position), self.at)
            self._value((*path, position))
        self.at += 1

    def _inline(self, path: KeyPath) -> None:
        self.at += 1
        while self._skip() and self.source[self.at] != "}":
            if self.source[self.at] == ",":
                self.at += 1
                continue
            self._pair(path)
        self.at += 1
