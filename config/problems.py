"""Faults of a configuration in words: file, line, key, what is wrong, how to mend it, the nearest valid word."""

import re
from collections.abc import Sequence
from typing import Final

from weighbridge.config.lines import KeyPath, line_of
from weighbridge.config.load import Problem
from weighbridge.config.nearest import nearest
from weighbridge.registry.errors import UsageError
from weighbridge.registry.refs import shown

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_LISTED: Final = 20
"""Faults that are spelled out; further ones are counted."""


def as_error(source: str, text: str, problems: Sequence[Problem]) -> UsageError:
    """Return one error that lists every fault, in the order of the file."""
    listed = sorted(((line_of(text, problem.path) or 1, problem) for problem in problems), key=lambda item: item[0])
    data = [
        {"line": line, "key": dotted(problem.path), "message": _message(problem), "fix": problem.fix}
        for line, problem in listed
    ]
    if len(listed) == 1:
        line, problem = listed[0]
        return UsageError(
            f"{source}, line {line}: {_place(problem.path)}: {_message(problem)}",
            fix=_fix(problem),
            file=source,
            problems=data,
        )
    lines = []
    for line, problem in listed[:_LISTED]:
        fix = _fix(problem)
        lines.append(f"line {line}: {_place(problem.path)}: {_message(problem)}" + (f" - {fix}" if fix else ""))
    if len(listed) > _LISTED:
        lines.append(f"and {len(listed) - _LISTED} more")
    return UsageError(
        f"{source} has {len(listed)} faults",
        why="\n".join(lines),
        fix=f"edit {source}",
        file=source,
        problems=data,
    )


def not_toml(source: str, text: str, error: Exception) -> UsageError:
    """Return what tomllib said, with the line in front."""
    said = str(error)
    match = _AT.search(said)
    line = int(match[1]) if match and match[1] else text.count("\n") + 1
    return UsageError(
        f"{source}, line {line}: not valid TOML: {shown(_AT.sub('', said))}",
        fix=f"edit {source}",
        file=source,
        problems=[{"line": line, "key": "", "message": shown(said), "fix": None}],
    )


def dotted(path: KeyPath) -> str:
    """Return a key path as text: `watch[1].root`; positions count from 0, as in JSON."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{shown(part[:80])}"
    return out.lstrip(".")


def _place(path: KeyPath) -> str:
    """Return the table as it is written in the file, and the key."""
    tables = [shown(part[:80]) for part in path if isinstance(part, str)]
    if path[:1] == ("watch",) and len(path) > 1:
        return " ".join(["[[watch]]", *tables[1:]])
    depth = 2 if path[:1] == ("remotes",) or path[:2] == ("merge", "slurm") else 1
    if len(tables) <= depth:
        return f"[{'.'.join(tables)}]" if tables[0] in {"daemon", "remotes", "merge"} else tables[0]
    return f"[{'.'.join(tables[:depth])}] {'.'.join(tables[depth:])}"


def _near(problem: Problem) -> str | None:
    return nearest(problem.word, problem.near) if problem.word is not None else None


def _message(problem: Problem) -> str:
    near = _near(problem)
    return f"{problem.message}; did you mean '{near}'?" if near else problem.message


def _fix(problem: Problem) -> str | None:
    near = _near(problem)
    return f"write {near}" if near and problem.message == "unknown key" else problem.fix
