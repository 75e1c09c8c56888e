"""Secrets: a type that prints as a mask wherever it is shown, and the places secrets may come from.

They come from the environment or a file that only its owner reads (systemd's LoadCredential writes such files), never
from weighbridge.toml and never from the command line, where every user of the machine could read them.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Never

from weighbridge.registry.errors import DeniedError, NotFoundError, UsageError

MASK: Final = "********"
_SIZE_LIMIT: Final = 1 << 16


class Secret:
    """A text that no formatting, logging, comparison order or pickle gives away; `reveal` is the only way in."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the secret itself, at the edge that hands it to a service."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return MASK

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> Never:
        raise TypeError("a secret is not written anywhere")


def from_environ(name: str, environ: Mapping[str, str]) -> Secret | None:
    """Return a secret of the environment, or None where the variable is unset or empty."""
    text = environ.get(name, "").strip()
    return Secret(text) if text else None


def from_credential(name: str, environ: Mapping[str, str]) -> Secret | None:
    """Return a secret that the unit loads with LoadCredential=, or None where it loads none of that name."""
    folder = environ.get("CREDENTIALS_DIRECTORY")
    path = Path(folder, name) if folder else None
    return from_file(path) if path is not None and path.exists() else None


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe; it is refused right after."""
    return os.open(path, flags | os.O_NONBLOCK)


def from_file(path: Path) -> Secret:
    """Return the secret in a file. Raises UsageError where others than its owner may read or change it."""
    try:
        with open(path, "rb", opener=_at_once) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            stored = stream.read(_SIZE_LIMIT + 1)
    except FileNotFoundError as error:
        raise NotFoundError(f"the secret file {path} is not there", fix="write it, with mode 0600") from error
    except PermissionError as error:
        raise DeniedError(f"the secret file {path} may not be read", fix="run as the user who owns it") from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"the secret file {path} is no regular file", fix="name a file")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"the secret file {path} is open to others",
            why=f"its mode is {stat.S_IMODE(mode):04o}",
            fix=f"chmod 600 {path}",
        )
    if len(stored) > _SIZE_LIMIT:
        raise UsageError(f"the secret file {path} is larger than 64 KiB", fix="name the right file")
    try:
        text = stored.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise UsageError(f"the secret file {path} holds no text", fix="write the secret into it")
    return Secret(text)
