"""`registry diagnose`: from an error text, or from nothing, to the cause in these files and the command for it."""

import sys
from collections import deque
from pathlib import Path
from typing import IO, Any, Final

import click

from weighbridge.adapters.diagnose import text as texts
from weighbridge.adapters.diagnose.answer import Diagnosis, document
from weighbridge.adapters.diagnose.answer import diagnose as ask
from weighbridge.adapters.diagnose.rule import Cause
from weighbridge.registry.cli import options, paths
from weighbridge.registry.cli.inspect import plain
from weighbridge.registry.cli.output import Output

EXIT: Final = {"nothing": 0, "found": 5, "wait": 8}
READ_LIMIT: Final = 64 << 20
"""Bytes of standard input that are read at most."""

_CHUNK: Final = 64 << 10
_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}
_OUTCOME: Final = {"nothing": "green", "found": "red", "wait": "yellow"}
_SHOWN: Final = 6
_SAID: Final = 4


@click.command("diagnose")
@click.argument("path", type=paths.PLACE)
@click.option("--error", "error", metavar="TEXT", help="What the program said; '-' reads a whole log from stdin.")
@click.option(
    "--base",
    type=paths.WORD,
    metavar="BASE",
    help="The base model: a folder, or an id in the Hub cache [default: as named].",
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Names to pass over, as in a watch rule; repeatable.")
@options.talking
def diagnose(*, path: Path, error: str | None, base: str | None, ignore: tuple[str, ...], out: Output) -> int:
    """Say why PATH does not load, or what an error text means for it, and what mends it.

    Without --error every cause of a failure that is in these files, the worst first. With it, the causes that explain
    the text come first, and what the text usually means is said where nothing of it is here. Headers and configs are
    read, nothing is run or changed. Ends 0 when nothing was found, 5 when a cause was found, 8 when all there is to it
    is that the folder is not finished.
    """
    text = _standard_input() if error == "-" else error
    try:
        found = ask(path, text, base=base, ignore=ignore)
    except FileNotFoundError as gone:
        raise paths.absent(path) from gone
    if found.artifact is None and not path.exists():
        raise paths.absent(path)  # a link to nothing, under a name that is none of weights
    if out.as_json:
        out.json(plain(document(found)))
    else:
        show(found, out)
    return EXIT[found.outcome]


def _standard_input() -> str:
    """Return what is piped in, of what is longer than any log beginning and end; bytes that are no text are marked."""
    stream: IO[Any] = getattr(sys.stdin, "buffer", sys.stdin)
    first: list[str] = []
    last: deque[str] = deque(maxlen=-(-texts.TAIL // _CHUNK) + 1)
    size = 0
    while size < READ_LIMIT:
        chunk = stream.read(_CHUNK)
        if not chunk:
            break
        size += len(chunk)
        part = chunk if isinstance(chunk, str) else chunk.decode("utf-8", "replace")
        if sum(map(len, first)) < texts.HEAD:
            first.append(part)
        else:
            last.append(part)
    return "".join([*first, *last])


def show(found: Diagnosis, out: Output) -> None:
    """Print the answer: what was said, the causes with the commands that mend them, and what was not found."""
    label = out.paint(found.outcome, _OUTCOME[found.outcome])
    out.say_painted(f"{label}  ", f"{found.path}: {found.artifact or 'nothing known'}; {_counted(found)}")
    if found.base is not None:
        out.say(f"  base      {found.base}")
    for said in (found.said or [])[:_SAID]:
        out.say(f"  line {said.line:<4} {said.text}")
        out.say(f"            {said.title}")
    for cause, subjects in grouped(found.causes):
        _cause(cause, subjects, out)
    _unexplained(found, out)
    for one in found.unsure:
        out.say(f"  not looked at: {one}")


def grouped(causes: list[Cause]) -> list[tuple[Cause, list[str]]]:
    """Return causes in their order, each once for all the subjects that differ by name alone."""
    groups: dict[tuple[str, ...], list[Cause]] = {}
    for cause in causes:
        about = cause.message.replace(cause.subject, "*").replace(cause.artifact_root, "*")
        groups.setdefault((cause.rule, cause.severity, about), []).append(cause)
    return [(same[0], list(dict.fromkeys(one.subject for one in same))) for same in groups.values()]


def _cause(cause: Cause, subjects: list[str], out: Output) -> None:
    out.say()
    about = ", ".join(subjects[:_SHOWN]) + (f" and {len(subjects) - _SHOWN} more" if len(subjects) > _SHOWN else "")
    word = "  explains the text" if cause.explains else ""
    out.say_painted(f"  {out.paint(cause.severity, _STYLES[cause.severity])}  ", f"{cause.rule}  {about}{word}")
    out.say(f"         {cause.message}")
    out.say(f"    fix: {cause.fix}")
    for command in cause.commands:
        out.say(f"       $ {command}")


def _counted(found: Diagnosis) -> str:
    if not found.causes:
        return "no cause of a failure was found in these files"
    count = len(grouped(found.causes))
    explaining = sum(1 for cause, _ in grouped(found.causes) if cause.explains)
    told = f"{count} cause{'' if count == 1 else 's'} found"
    return (
        told
        if found.said is None
        else f"{told}, {explaining or 'none'} of them explain{'s' * (explaining == 1)} the text"
    )


def _unexplained(found: Diagnosis, out: Output) -> None:
    if found.said is None:
        return
    rest = [said for said in found.said if not said.explained]
    if found.said and rest:
        out.say()
    for said in rest[:_SAID]:
        out.say(f"  '{said.title}' usually means that {said.means}; that was not found in these files")
    if not found.said:
        out.say()
        out.say(f"  the text ({found.lines} line{'' if found.lines == 1 else 's'}) says nothing that is known here")
