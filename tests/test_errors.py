"""Errors: every class is documented, has its exit code, and reaches a person or a program in one shape."""

import errno
import inspect
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from weighbridge.registry import control, disk, errors, findings, shell

SCHEMA = json.loads(Path(__file__).parent.parent.joinpath("docs/schemas/error.schema.json").read_text())
FAMILIES = {
    errors.UsageError: 2,
    errors.NotFoundError: 3,
    errors.DeniedError: 4,
    errors.IntegrityError: 5,
    errors.UnreachableError: 6,
    errors.ConflictError: 7,
    errors.NotFinishedError: 8,
}


@pytest.mark.parametrize("kind", errors.kinds(), ids=lambda kind: kind.__name__)
def test_every_class_is_documented(kind: type[errors.WeighbridgeError]) -> None:
    """An error class says in its docstring what it means, and stands in the tree at the top of the module."""
    assert inspect.getdoc(kind)
    assert kind.__doc__ != errors.WeighbridgeError.__doc__ or kind is errors.WeighbridgeError
    assert kind.__name__ in (errors.__doc__ or "")


def test_codes_are_unique_and_kebab_case() -> None:
    """No two classes share a code, so that a script can tell them apart."""
    codes = [kind.code for kind in errors.kinds()]
    assert len(codes) == len(set(codes))
    for code in codes:
        assert code == code.lower()
        assert set(code) <= set("abcdefghijklmnopqrstuvwxyz-")


@pytest.mark.parametrize("kind", errors.kinds(), ids=lambda kind: kind.__name__)
def test_exit_codes_follow_the_family(kind: type[errors.WeighbridgeError]) -> None:
    """A class ends the process with the exit code of its family, 1 where it has none."""
    expected = next((code for family, code in FAMILIES.items() if issubclass(kind, family)), 1)
    assert kind.exit_code == expected


@pytest.mark.parametrize("kind", errors.kinds(), ids=lambda kind: kind.__name__)
def test_json_shape_is_the_contract(kind: type[errors.WeighbridgeError]) -> None:
    """Every error, with and without its parts, fits the published schema."""
    for error in (kind("what"), kind("what", why="why", fix="fix", size=3, names=["a"])):
        jsonschema.validate(errors.describe(error), SCHEMA)


@pytest.mark.parametrize("kind", errors.kinds(), ids=lambda kind: kind.__name__)
def test_errors_survive_the_socket(kind: type[errors.WeighbridgeError]) -> None:
    """An error that the daemon describes is raised on the other side as the same class with the same words."""
    error = kind("what", why="why", fix="fix", size=3)
    back = control.rebuild(json.loads(json.dumps(errors.describe(error))))
    assert type(back) is kind
    assert errors.describe(back) == errors.describe(error)


def test_words_have_three_lines() -> None:
    """A person sees what, why and fix, one a line."""
    error = errors.ConflictError("v7 is taken", why="trainer-02 was first", fix="registry push --again")
    assert shell.as_text(error) == "error: v7 is taken\n  why: trainer-02 was first\n  fix: registry push --again"


def test_missing_parts_leave_no_line() -> None:
    """An error without a cause or a fix prints what happened, and no empty label."""
    assert shell.as_text(errors.WeighbridgeError("it failed")) == "error: it failed"


def test_further_lines_are_indented() -> None:
    """A cause of several lines stays below its label."""
    assert shell.as_text(errors.UsageError("2 faults", why="one\ntwo")).splitlines()[1:] == ["  why: one", "       two"]


def test_control_characters_never_reach_the_terminal() -> None:
    """Escape sequences in a message are shown, not sent."""
    text = shell.as_text(errors.NotFoundError("no '\x1b[2Jx\u202e'", why="\x07", fix="\x9b1m"))
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), errors.NotFoundError),
        (NotADirectoryError(20, "Not a directory", "/x"), errors.NotFoundError),
        (PermissionError(13, "Permission denied", "/x"), errors.DeniedError),
        (OSError(28, "No space left on device", "/x"), errors.DiskFullError),
        (OSError(122, "Disk quota exceeded"), errors.DiskFullError),
        (OSError(30, "Read-only file system", "/x"), errors.WeighbridgeError),
        (OSError(5, "Input/output error"), errors.WeighbridgeError),
        (MemoryError(), errors.WeighbridgeError),
        (KeyError("x"), errors.BugError),
        (OSError("no number"), errors.BugError),
        (RecursionError(), errors.BugError),
    ],
)
def test_foreign_errors_become_ours(error: Exception, kind: type[errors.WeighbridgeError]) -> None:
    """What the system raises is told as a failure of the disk or of rights; the rest as a bug of ours."""
    found = shell.translate(error)
    assert type(found) is kind
    if isinstance(error, OSError) and error.filename:
        assert "/x" in found.what
    assert ("bug" in found.what) == (kind is errors.BugError)


@pytest.mark.parametrize("code", sorted(errno.errorcode), ids=errno.errorcode.__getitem__)
def test_whatever_a_file_system_says_has_a_fix(code: int) -> None:
    """Every error number there is becomes three lines: what could not be done, why, and what to do."""
    with pytest.raises(errors.WeighbridgeError) as caught, disk.speaking("cannot write /x"):
        raise OSError(code, os.strerror(code), "/x/y")
    assert [line.split(":")[0].strip() for line in shell.as_text(caught.value).splitlines()] == ["error", "why", "fix"]
    assert "/x/y" in (caught.value.why or "")


def test_json_takes_any_data() -> None:
    """Figures that JSON does not know are written as text rather than lost in a second error."""
    error = errors.IntegrityError("damaged", path=Path("/a/b"), digest=b"\x00")
    described: dict[str, Any] = json.loads(shell.as_line(error))
    assert described["data"]["path"] == "/a/b"


def test_json_of_findings_is_json() -> None:
    """What a refusal lists are objects, not words of Python, and names of any bytes go through every encoder."""
    found = findings.finding("file-short", os.fsdecode(b"m\xff.safetensors"), "short", "save it again")
    error = errors.RefusedError("no", why=os.fsdecode(b"it is \xff"), findings=[found])
    described: dict[str, Any] = json.loads(shell.as_line(error))
    assert described["data"]["findings"][0]["code"] == "file-short"
    assert described["data"]["findings"][0]["subject"] == r"m\xff.safetensors"
    assert msgspec.json.decode(msgspec.json.encode(errors.describe(error))) == described
    assert errors.utf8("\ud800 ä") == r"\ud800 ä"
