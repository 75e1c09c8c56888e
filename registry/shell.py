"""What `registry` and `registryd` share: one place that runs a command and turns every error into words.

    error: what happened            on stderr; with --json the object of errors.describe instead
      why: the cause
      fix: the exact command

Exit codes are those of `errors`, besides 130 for an interrupt and 141 for a reader that closed the pipe.
This module is on the start-up path of every command: whatever it imports is paid by `registry ls`.
"""

import contextlib
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from weighbridge.registry import errors
from weighbridge.registry.refs import shown

INTERRUPTED = 130
PIPE_CLOSED = 141
_ELSEWHERE = "or choose another folder"


def run(group: click.Group, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run one command of `group` and return the exit code of the process; nothing is raised.

    `arguments` is None for the real command line. A command returns its own exit code, or None for 0.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _forgiving_streams()
    try:
        result = _invoke(group, program, given)
        sys.stdout.flush()
    except BrokenPipeError:
        return _pipe_closed()
    except KeyboardInterrupt:
        return _interrupted()
    except click.Abort as abort:
        return _interrupted() if isinstance(abort.__context__, KeyboardInterrupt) else _ended(given)
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes words
        if _no_arguments(error):
            return errors.UsageError.exit_code
        return report(_of_cache(translate(error)), as_json=wants_json(given), cause=error)
    return result if isinstance(result, int) else 0


def _invoke(group: click.Group, program: str, given: list[str]) -> object:
    """Let click parse and run, but not decide how the process ends."""
    if f"_{program.upper()}_COMPLETE" in os.environ:
        group.main(given, prog_name=program)  # prints a completion and exits
    try:
        with group.make_context(program, given) as context:
            return group.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code


def report(error: errors.WeighbridgeError, *, as_json: bool, cause: BaseException | None = None) -> int:
    """Write one error to stderr and return its exit code. A traceback comes with WEIGHBRIDGE_DEBUG=1 only."""
    if cause is not None and os.environ.get("WEIGHBRIDGE_DEBUG", "0") not in {"", "0"}:
        load("traceback:print_exception")(cause, file=sys.stderr)
    try:
        sys.stderr.write((as_line(error) if as_json else as_text(error)) + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        _pipe_closed()
    return error.exit_code


def as_text(error: errors.WeighbridgeError) -> str:
    """Return the three lines a person sees; further lines of a cause or a fix are indented below the first."""
    lines = _labelled("error: ", error.what)
    if error.why:
        lines += _labelled("  why: ", error.why)
    if error.fix:
        lines += _labelled("  fix: ", error.fix)
    return "\n".join(lines)


def as_line(error: errors.WeighbridgeError) -> str:
    """Return the JSON object of an error on one line; ASCII, so that it survives every terminal and locale."""
    line: str = load("json:dumps")(errors.describe(error), default=str)
    return line


def translate(error: BaseException) -> errors.WeighbridgeError:
    """Return any exception as one of ours: click's as a usage error, the system's by errno, the rest as a bug."""
    if isinstance(error, errors.WeighbridgeError):
        return error
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        fix = f"{context.command_path} --help" if context is not None else None
        return errors.UsageError(error.format_message(), fix=fix)
    if isinstance(error, OSError) and error.errno is not None:
        return _from_system(error)
    if isinstance(error, MemoryError) or str(error) == "can't start new thread":  # by a limit on either
        return errors.WeighbridgeError(
            "out of memory",
            why=str(error) or None,
            fix="free memory or raise the limits (ulimit -v, -d, -u), then run the command again",
        )
    where = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return errors.BugError(
        f"this is a bug in weighbridge: {where}",
        fix="run it again with WEIGHBRIDGE_DEBUG=1 and report the traceback",
    )


def wants_json(arguments: Sequence[str]) -> bool:
    """Tell whether a command line asks for JSON, also where its options could not be parsed."""
    for at, argument in enumerate(arguments):
        if argument == "--":
            return False
        if argument in {"--json", "-ojson", "-ojsonl", "--output=json", "--output=jsonl"}:
            return True
        if argument in {"-o", "--output"} and arguments[at + 1 : at + 2] in (["json"], ["jsonl"]):
            return True
    return False


def load(target: str) -> Any:
    """Return the attribute that `module:attribute` names: commands, and what is needed only when something fails.

    Raises NotFoundError when this installation does not hold the module.
    """
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise errors.NotFoundError(
            "this installation is not complete",
            why=f"the module {module} is not there",
            fix="pip install --force-reinstall weighbridge",
        ) from error


def warmed_up() -> None:
    """Set what is loaded aside for good and let the collector work from here on, for the command itself."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _labelled(label: str, text: str) -> list[str]:
    first, *more = text.split("\n")
    return [label + shown(first), *(" " * len(label) + shown(line) for line in more)]


def _from_system(error: OSError) -> errors.WeighbridgeError:
    path = error.filename if isinstance(error.filename, str) else None
    what = (error.strerror or str(error)).lower()
    what = f"{path}: {what}" if path else what
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return errors.NotFoundError(what)
    if error.errno == errno.ELOOP:
        why = "a link on the way leads back to itself"
        return errors.NotFoundError(what, why=why, fix="name the folder itself; ls -l shows where links lead")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return errors.DeniedError(what, fix="check owner and mode of the path, or run as the user who owns it")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return errors.DiskFullError(what, fix="free some space, then run the command again")
    if error.errno == errno.EROFS:
        return errors.WeighbridgeError(what, fix=f"make that file system writable, {_ELSEWHERE}")
    return errors.WeighbridgeError(what)


def _of_cache(error: errors.WeighbridgeError) -> errors.WeighbridgeError:
    """Name the variable that moves the commands' cache where an error is about room or access in it.

    Whoever ran the command has not named that folder, so that "another one" tells nothing.
    """
    full = isinstance(error, errors.DiskFullError)
    if full or isinstance(error, errors.DeniedError) or _ELSEWHERE in (error.fix or ""):
        cache = load("weighbridge.config.places:cache_dir")(os.environ)
        text = f"{error.what} {error.why or ''} "
        if any(f"{cache}{end}" in text for end in "/:' "):
            first = "free some space there, or " if full else ""
            error.fix = f"{first}set WEIGHBRIDGE_CACHE to a folder {'with more room' if full else 'you can write to'}"
    return error


def _no_arguments(error: Exception) -> bool:
    """Show a group's help instead of an error when the program was called without a word."""
    if not isinstance(error, click.UsageError) or type(error).__name__ != "NoArgsIsHelpError":
        return False
    sys.stderr.write(error.format_message() + "\n")
    return True


def _forgiving_streams() -> None:
    """Let no character and no closed stream stop a command: escape what the terminal's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - lives as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _pipe_closed() -> int:
    """End quietly: nobody reads on. The descriptor is replaced so that the last flush finds an open one."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return INTERRUPTED


def _ended(arguments: Sequence[str]) -> int:
    error = errors.UsageError("the input ended before the question was answered", fix="give the answer as an option")
    return report(error, as_json=wants_json(arguments))
