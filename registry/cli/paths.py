"""Paths as people give them: an empty word is no folder, and what is not there is told with what was probably meant."""

import errno
import re
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.registry.errors import NotFoundError
from weighbridge.registry.refs import shown

_REFERENCE: Final = re.compile(r"[A-Za-z0-9._-]+(?:@v[0-9]+|:[A-Za-z0-9._-]+)|@sha256:[0-9a-f]{8,}")


class _Place(click.Path):
    """A path that was really given: an empty word is a variable that was not set, and never this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises click.BadParameter for an empty word."""
        if value == "":
            self.fail("it is empty; write . for this folder", param, ctx)
        return super().convert(value, param, ctx)


class _Word(click.types.StringParamType):
    """A word that says something."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the word. Raises click.BadParameter for an empty one."""
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


PLACE: Final = _Place(path_type=Path)
WORD: Final = _Word()


def absent(path: Path) -> NotFoundError:
    """Return the error for a path that holds no file and no folder: nothing, a dead or looping link, a pipe, a name."""
    text = shown(str(path))
    if _loops(path):
        why = "a link on the way leads back to itself"
        return NotFoundError(f"there is no {text}", why=why, fix="name the folder itself; ls -l shows where links lead")
    if path.is_symlink():
        return NotFoundError(f"{text} is a link to nothing", fix="restore what it points to, or name another file")
    if path.exists():
        return NotFoundError(f"{text} is neither a file nor a folder", fix="name a folder or a file with weights")
    if _REFERENCE.fullmatch(str(path)):
        fix = f"registry pull {text} DIR, then name that folder"
        return NotFoundError(f"there is no folder {text}", why="it is the name of a version", fix=fix)
    return NotFoundError(f"there is no {text}", fix="name a folder or a file that exists")


def _loops(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
