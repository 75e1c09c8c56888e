"""Checkers for single values of weighbridge.toml: each returns the parsed value or raises Fault with what is wrong."""

import os
from collections.abc import Callable
from typing import Any, Final

from weighbridge.config.settings import PLACEHOLDERS, PUBLISH
from weighbridge.registry.refs import SUFFIX_ROOM, name_fault, shown

Check = Callable[[Any], Any]

_SIZES: Final = {
    "b": 1,
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb", "pb"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib", "pib"), 1)},
}
_TIMES: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMERALS: Final = frozenset("0123456789.")
SCHEMES: Final = ("file", "memory", "s3", "hf")
_BYTES_MAX: Final = 1 << 62
_SECONDS_MAX: Final = 100 * 365 * 86400
_SOCKET_MAX: Final = 107
"""Bytes the kernel takes as the path of a Unix socket."""


class Fault(Exception):  # noqa: N818 - not an error of the program: a finding about one value, collected by `load`
    """What is wrong with one value, and how to write it."""

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


def kind(value: Any) -> str:
    """Return what TOML calls a value's type."""
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def text(value: Any) -> str:
    """Accept a string without control characters."""
    if not isinstance(value, str):
        raise Fault(f"a string is expected, here is {kind(value)}", "put it in quotes")
    if not value.strip():
        raise Fault("it is empty", "write a value, or remove the key")
    if not value.isprintable():
        raise Fault("it holds a control character", "write it again by hand")
    return value


def flag(value: Any) -> bool:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise Fault(f"true or false is expected, here is {kind(value)}", "write true or false, without quotes")
    return value


def whole(least: int, most: int) -> Check:
    """Return a check for an integer within bounds."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise Fault(f"an integer is expected, here is {kind(value)}", f"write a number from {least} to {most}")
        if not least <= value <= most:
            raise Fault(f"{value} is out of range", f"write a number from {least} to {most}")
        return value

    return check


def choice(*words: str) -> Check:
    """Return a check for one of some words; the nearest one is named for any other."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise Fault(f"a string is expected, here is {kind(value)}", f"write one of: {', '.join(words)}")
        if value not in words:
            raise Choice(value, words)
        return value

    return check


class Choice(Fault):
    """A word that is none of those allowed; `load` adds the nearest one."""

    def __init__(self, word: str, words: tuple[str, ...]) -> None:
        super().__init__(f"'{shown(word[:80])}' is not a choice", f"write one of: {', '.join(words)}")
        self.word = word
        self.words = words


def size(value: Any) -> int:
    """Accept a size such as "200 GB", "1.5 TiB" or an integer of bytes."""
    hint = 'write a size such as "200 GB"'
    if isinstance(value, int) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str):
        number, unit = _split(value.strip())
        factor = _SIZES.get(unit.strip().lower())
        if number is None or factor is None:
            raise Fault(f"'{shown(value[:80])}' is not a size", hint)
        found = number * factor
    else:
        raise Fault(f"a size is expected, here is {kind(value)}", hint)
    if not 0 <= found <= _BYTES_MAX:
        raise Fault(f"'{shown(str(value)[:80])}' is out of range", hint)
    return round(found)


def positive_size(value: Any) -> int:
    """Accept a size above zero."""
    found = size(value)
    if found <= 0:
        raise Fault("it must be more than 0", 'write a size such as "200 GB"')
    return found


def duration(value: Any) -> float:
    """Accept a length of time such as "30s", "10m", "1h30m" or "7d", and return seconds."""
    hint = 'write a time such as "30s", "10m" or "24h"'
    if not isinstance(value, str):
        raise Fault(f"a time with its unit is expected, here is {kind(value)}", hint)
    rest = value.strip()
    found = 0.0
    if not rest:
        raise Fault("it is empty", hint)
    while rest:
        number, unit = _split(rest)
        unit = unit.lstrip()
        letters = len(unit) - len(unit.lstrip("mshdw"))
        factor = _TIMES.get(unit[:letters])
        if number is None or factor is None:
            raise Fault(f"'{shown(value[:80])}' is not a time", hint)
        found += number * factor
        rest = unit[letters:].lstrip()
    if found > _SECONDS_MAX:
        raise Fault(f"'{shown(value[:80])}' is out of range", hint)
    return found


def positive_duration(value: Any) -> float:
    """Accept a length of time above zero."""
    found = duration(value)
    if found <= 0:
        raise Fault("it must be more than 0", 'write a time such as "30s"')
    return found


def _split(given: str) -> tuple[float | None, str]:
    """Return the number a text begins with, or None, and what follows it."""
    end = 0
    while end < len(given) and given[end] in _NUMERALS:
        end += 1
    try:
        return float(given[:end]), given[end:]
    except ValueError:
        return None, given


def path(value: Any) -> str:
    """Accept an absolute path."""
    given = text(value)
    if not given.startswith("/"):
        why = "'~' is not expanded here" if given.startswith("~") else "it is relative"
        raise Fault(f"'{shown(given[:200])}' must be an absolute path: {why}", f'write "{_absolute(given)}"')
    return os.path.normpath(given)


def socket_path(value: Any) -> str:
    """Accept an absolute path that the kernel takes as the address of a Unix socket."""
    found = path(value)
    if len(os.fsencode(found)) > _SOCKET_MAX:
        raise Fault(
            f"the path is longer than the {_SOCKET_MAX} bytes a socket may have", "choose a shorter path, under /run"
        )
    return found


def _absolute(given: str) -> str:
    return shown(os.path.abspath(os.path.expanduser(given)))  # noqa: PTH100, PTH111 - plain text for a message


def words(value: Any) -> tuple[str, ...]:
    """Accept a list of strings, none of them twice."""
    if not isinstance(value, list):
        raise Fault(f"an array of strings is expected, here is {kind(value)}", 'write it as ["one", "two"]')
    found = tuple(text(item) for item in value)
    for item in found:
        if found.count(item) > 1:
            raise Fault(f"'{shown(item[:80])}' stands in it twice", "remove one")
    return found


def folders(value: Any) -> tuple[str, ...]:
    """Accept a list of absolute paths."""
    return tuple(path(item) for item in words(value))


def slurm_word(value: Any) -> str:
    """Accept what sbatch takes as a partition, account, QOS or generic resource: no blanks, nothing like an option."""
    given = text(value)
    if given.startswith("-") or not all(letter.isalnum() or letter in "_-.:,=/()*" for letter in given):
        raise Fault(f"'{shown(given[:80])}' is no word for sbatch", "write it as sbatch takes it, such as gpu:1")
    return given


def patterns(value: Any) -> tuple[str, ...]:
    """Accept ignore patterns: file name patterns, or folder names that end in `/`, relative to the run."""
    found = words(value)
    for item in found:
        if item.startswith("/") or ".." in item.split("/"):
            raise Fault(f"'{shown(item[:80])}' must be a pattern below a run", 'write it as "wandb/" or "*.tmp"')
    return found


def publish(value: Any) -> tuple[str, ...]:
    """Accept "all" or "manual", or a list of "best" and "last"."""
    hint = 'write ["best", "last"], "all" or "manual"'
    found = (text(value),) if isinstance(value, str) else words(value)
    for item in found:
        if item not in PUBLISH:
            raise Choice(item, PUBLISH)
    if not found:
        raise Fault("the list is empty", hint)
    if len(found) > 1 and {"all", "manual"}.intersection(found):
        raise Fault("'all' and 'manual' stand alone", hint)
    return found


def metric(value: Any) -> str:
    """Accept `metric:min` or `metric:max`."""
    given = text(value)
    name, _, goal = given.rpartition(":")
    if not name or goal not in {"min", "max"} or " " in name:
        raise Fault(f"'{shown(given[:80])}' names no metric and goal", 'write it as "eval_loss:min"')
    return given


def template(value: Any) -> str:
    """Accept a name template: the grammar of names with the placeholders {project} and {run}."""
    given = text(value)
    hint = f"use {' and '.join('{' + word + '}' for word in PLACEHOLDERS)}, letters, digits, '.', '_' and '-'"
    plain, rest = "", given
    while "{" in rest:
        before, _, rest = rest.partition("{")
        word, closed, rest = rest.partition("}")
        if not closed:
            raise Fault(f"'{shown(given[:120])}' has a '{{' that is not closed", hint)
        if word not in PLACEHOLDERS:
            raise Choice(word, PLACEHOLDERS)
        plain += before + "x"
    fault = name_fault(plain + rest, room=SUFFIX_ROOM)
    if fault:
        raise Fault(f"'{shown(given[:120])}' makes no valid names: {fault}", hint)
    return given


def url(value: Any) -> str:
    """Accept the URL of a remote: an absolute path, file://, s3://bucket/prefix, hf://organisation or memory://."""
    hint = 'write an absolute path, "s3://bucket/prefix" or "hf://organisation"'
    if isinstance(value, str) and not value.strip():
        raise Fault("it is empty", hint)
    given = text(value)
    scheme, mark, rest = given.partition("://")
    if not mark:
        return path(given)
    if scheme not in SCHEMES:
        raise Choice(scheme, SCHEMES)
    if "@" in rest.split("/", 1)[0]:
        raise Fault(
            "it holds a user or a password", "remove it: secrets come from the environment or a credential file"
        )
    if "?" in rest or "#" in rest:
        raise Fault("it holds a query or a fragment", hint)
    if scheme == "file":
        return path(rest)
    if not rest.strip("/") and scheme != "memory":
        raise Fault(f"nothing follows {scheme}://", hint)
    if any(part in {".", ".."} for part in rest.split("/")):
        raise Fault("it holds a '.' or '..' segment", hint)
    return given.rstrip("/") if scheme != "memory" else given


def encryption(value: Any) -> str:
    """Accept "AES256", "aws:kms", or "aws:kms:" with the id, alias or ARN of a key."""
    given = text(value)
    if given not in {"AES256", "aws:kms"} and not (given.startswith("aws:kms:") and len(given) > len("aws:kms:")):
        raise Fault(f"'{shown(given[:120])}' is no encryption", 'write "AES256", "aws:kms" or "aws:kms:KEY"')
    return given


def endpoint(value: Any) -> str:
    """Accept the http(s) address of an S3 service or of a Hub, without secrets."""
    given = text(value)
    scheme, mark, rest = given.partition("://")
    if not mark or scheme not in {"http", "https"} or not rest:
        raise Fault(f"'{shown(given[:120])}' is not an address", 'write it as "https://s3.example.org"')
    if "@" in rest.split("/", 1)[0]:
        raise Fault(
            "it holds a user or a password", "remove it: secrets come from the environment or a credential file"
        )
    return given.rstrip("/")
