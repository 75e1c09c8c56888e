"""The daemon's log: one line an event on stderr, as JSON or as text, with every secret masked.

Secrets are masked in the finished line, so that none gets through in a message, an argument or a traceback.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from weighbridge.registry.refs import shown
from weighbridge.registry.times import spelled

MASK: Final = "***"
_SHAPES: Final = re.compile(
    r"hf_[A-Za-z0-9]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,}"
    r"|(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"
    r"|(?i:(?<=bearer )|(?<=authorization: ))[A-Za-z0-9._~+/=-]{8,}"
    r"|(?i:(?<=x-amz-signature=)|(?<=x-amz-security-token=))[A-Za-z0-9%/+=_.-]+"
)
_SECRET_NAME = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)", re.IGNORECASE)
_SHORTEST_SECRET: Final = 8
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def start(style: str, *, stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Send the log of everything in this process to stderr, in the style `json` or `text`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    known = secrets(os.environ if environ is None else environ)
    handler.setFormatter(_Json(known) if style == "json" else _Text(known))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # The libraries' own chatter is worth a line only when it warns.
    for name in ("apscheduler", "watchdog", "urllib3", "botocore", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def secrets(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the values of environment variables that are secrets by their names."""
    return frozenset(
        value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    )


def masked(line: str, known: Iterable[str] = ()) -> str:
    """Return a line with every token shape and every known secret replaced."""
    for secret in known:
        line = line.replace(secret, MASK)
    return _SHAPES.sub(MASK, line)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN and value is not None}


class _Json(logging.Formatter):
    def __init__(self, known: frozenset[str]) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": spelled(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name.removeprefix("weighbridge."),
            **_extras(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return masked(json.dumps(line, default=str), self._known)


class _Text(logging.Formatter):
    def __init__(self, known: frozenset[str]) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        extras = " ".join(f"{key}={value}" for key, value in _extras(record).items())
        line = f"{spelled(record.created)} {record.levelname.lower():<7} {record.getMessage()}"
        line = masked(shown(f"{line}  {extras}" if extras else line), self._known)
        if record.exc_info:
            line += "\n" + masked(self.formatException(record.exc_info), self._known)
        return line
