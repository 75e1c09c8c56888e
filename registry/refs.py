"""One validator for every name, tag, path and key, and the grammar of references.

    name@v7    name:prod    name (= name:latest)    @sha256:<8 or more hex>

This module is on the start-up path of `registry ls`: it imports nothing heavy.
"""

import re
import unicodedata
from functools import lru_cache
from typing import Final

from weighbridge.registry.errors import UsageError

NAME_MAX: Final = 96
SUFFIX_ROOM: Final = 24
"""Characters of NAME_MAX that stay free for suffixes such as `-merged-bf16`."""

SEGMENT_MAX: Final = 255
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NUMBER = re.compile(r"v([1-9][0-9]{0,7})")
_DIGEST = re.compile(r"@?(?:sha256:)?([0-9a-f]{8,64})")
_BIDI: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:")


def shown(text: str) -> str:
    """Return text with control and bidirectional characters escaped, fit for a terminal or a log."""
    if text.isprintable() and not _BIDI.intersection(text):
        return text
    return "".join(
        c
        if (c.isprintable() and c not in _BIDI)
        else c.encode("unicode_escape").decode()
        if ord(c) > 31
        else f"\\x{ord(c):02x}"
        for c in text
    )


def name_fault(name: str, *, room: int = 0) -> str | None:
    """Return what is wrong with a model name, or None. `room` characters are kept free for a suffix."""
    if not name:
        return "it is empty"
    if len(name) > NAME_MAX - room:
        return f"it has {len(name)} characters, the limit here is {NAME_MAX - room}"
    return _grammar_fault(name)


@lru_cache(maxsize=1024)
def _grammar_fault(name: str) -> str | None:
    """Return what is wrong with the letters of a name; asked again and again of the same few names."""
    if not _NAME.fullmatch(name):
        return "only letters, digits, '.', '_' and '-' are allowed"
    if "--" in name or ".." in name:
        return "'--' and '..' are not allowed"
    if name[0] in ".-" or name[-1] in ".-":
        return "it may not begin or end with '.' or '-'"
    if name[0] == "_":
        return "names that begin with '_' are reserved"
    return None


def check_name(name: str, *, room: int = 0) -> str:
    """Return the name. Raises UsageError when it breaks the grammar of names (docs/formats.md)."""
    fault = name_fault(name, room=room)
    if fault:
        raise UsageError(
            f"'{shown(name[:120])}' is not a valid name",
            why=fault,
            fix=f"choose a name such as '{suggest_name(name)}'",
        )
    return name


def suggest_name(text: str) -> str:
    """Return the nearest valid name to any text."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", plain)
    plain = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", plain)).lstrip("._-").rstrip(".-")
    return plain[: NAME_MAX - SUFFIX_ROOM].rstrip(".-") or "model"


def check_tag(tag: str) -> str:
    """Return the tag. Raises UsageError for a bad spelling, for `v<digits>` (numbers) and for `latest` (computed)."""
    if tag == "latest":
        raise UsageError("'latest' cannot be moved", why="it is computed", fix="choose another tag, such as 'prod'")
    if re.fullmatch(r"v[0-9]+", tag):
        raise UsageError(
            f"'{tag}' is not a valid tag", why="v<digits> is reserved for version numbers", fix="use another tag"
        )
    if not _TAG.fullmatch(tag) or ".." in tag:
        raise UsageError(
            f"'{shown(tag[:80])}' is not a valid tag",
            why="1 to 64 letters, digits, '.', '_' and '-', the first one a letter or digit",
            fix="use a tag such as 'prod'",
        )
    return tag


def path_fault(path: str) -> str | None:
    """Return what is wrong with a relative payload path, or None.

    Plain segments joined by `/`: no `..`, no absolute or drive path, no segment that begins with a dot, no control or
    bidirectional character, no backslash, NFC, at most 255 bytes a segment.
    """
    if not path or path.startswith("/") or _WINDOWS_DRIVE.match(path):
        return "it must be relative"
    if "\\" in path:
        return "it holds a backslash"
    if any("\udc80" <= c <= "\udcff" for c in path):
        return "it is not UTF-8"
    if not path.isprintable() or _BIDI.intersection(path):
        return "it holds a control or bidirectional character"
    if unicodedata.normalize("NFC", path) != path:
        return "it is not in Unicode form NFC"
    for segment in path.split("/"):
        if segment in {"", ".", ".."}:
            return "it holds an empty, '.' or '..' segment"
        if segment.startswith("."):
            return "a segment begins with a dot"
        if len(segment.encode()) > SEGMENT_MAX:
            return f"a segment is longer than {SEGMENT_MAX} bytes"
    return None


def check_paths(paths: list[str]) -> None:
    """Raise UsageError unless every path is safe and no two differ by case alone or lie inside each other."""
    folded: dict[str, str] = {}
    for path in paths:
        fault = path_fault(path)
        if fault:
            raise UsageError(f"'{shown(path[:200])}' is not a safe file path", why=fault, fix="rename the file")
        other = folded.get(path.casefold())
        folded[path.casefold()] = path
        if other is not None:
            raise UsageError(
                f"'{shown(path)}' and '{shown(other)}' collide",
                why="they differ by case alone or are the same",
                fix="rename one",
            )
    files = set(folded)
    for path in folded:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in files:
                raise UsageError(f"'{shown(path)}' lies inside a file of the same set", fix="rename one of the two")


def check_key(key: str) -> str:
    """Return a remote's key. Raises UsageError for anything but plain segments joined by `/`."""
    if not key or key.startswith("/") or not key.isprintable() or any(s in {"", ".", ".."} for s in key.split("/")):
        raise UsageError(f"'{shown(key[:200])}' is not a valid key")
    return key


def parse_number(text: str) -> int | None:
    """Return 7 for `v7`, else None."""
    match = _NUMBER.fullmatch(text)
    return int(match[1]) if match else None


def split(ref: str) -> tuple[str | None, int | None, str | None, str | None]:
    """Return (name, number, tag, digest prefix) of a reference, exactly one of the last three set.

    Raises UsageError when the text is no reference.
    """
    if not ref or "/" in ref:
        raise UsageError(
            f"'{shown(ref[:160])}' is not a reference",
            why="it is a path" if ref else "it is empty",
            fix="use name@v7, name:tag, name or @sha256:<hex>"
            + ("; registry inspect looks at a folder" if ref else ""),
        )
    digest = _DIGEST.fullmatch(ref) if ref.startswith(("@", "sha256:")) else None
    if digest:
        return None, None, None, digest[1]
    if "@" in ref:
        name, _, version = ref.partition("@")
        n = parse_number(version)
        inner = _DIGEST.fullmatch(version)
        if n is None and inner is None:
            raise UsageError(
                f"'{shown(ref[:160])}' is not a reference",
                why="after '@' stands a version such as v7 or a digest of 8 or more hex digits",
                fix="use name@v7, name:tag, name or @sha256:<hex>",
            )
        return (
            (check_name(name), n, None, None)
            if n is not None
            else (check_name(name), None, None, inner[1] if inner else None)
        )
    name, colon, tag = ref.partition(":")
    if not colon:
        return check_name(name), None, "latest", None
    if parse_number(tag) is not None:
        raise UsageError(f"'{shown(ref)}' is not a reference", why="':' stands before a tag", fix=f"use {name}@{tag}")
    if tag != "latest":
        check_tag(tag)
    return check_name(name), None, tag, None


def hub_repo(url: str, name: str) -> str | None:
    """Return the repository of a name at the remote of a URL, `owner/name`; None where that is no Hub."""
    return f"{url.removeprefix('hf://').strip('/')}/{name}" if url.startswith("hf://") else None
