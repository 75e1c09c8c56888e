"""The child process for heavy work: exec'ed, told its task by a pipe, ended with its parent, bounded in memory.

    parent -> child   one line: {"task": "module:function", "request": {...}, "memory": bytes, "nice": n, "jail": {...}}
    child -> parent   lines: {"held": {...}} of a jail, {"progress": bytes}, then {"result": {...}} or {"error": {...}}

The pipe from the parent stays open as long as the parent wants the work: when it closes, however that came about, the
child ends itself. It also asks the kernel to be ended with its parent. Secrets of the parent's environment do not pass.
"""

import contextlib
import errno
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import jail, limits, starved
from weighbridge.adapters.jail import Held, Policy
from weighbridge.registry import errors
from weighbridge.registry.parent import end_with

Tell = Callable[[int], None]
"""Called with the number of bytes that were just done."""

Task = Callable[[dict[str, Any], Tell], dict[str, Any]]
"""What a child runs: a request of plain JSON values in, a result of such values out."""

_PASSED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONSAFEPATH")
_PYTHON: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_LINE_LIMIT: Final = 64 << 20
_ANSWERS: Final = ("held", "result", "error")
_TELL_EVERY: Final = 8 << 20
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})


def run(
    task: str,
    request: Mapping[str, Any],
    *,
    memory: int | None = None,
    nice: int = 10,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Run `module:function` in a child process and return its result.

    `memory` bounds the child's own data in bytes. Call it from a thread that lives as long as the work is wanted: the
    child ends with it. Raises what the task raised, as far as it is one of ours; a child that was ended from outside,
    or ran out of memory, is a WeighbridgeError that says so.
    """
    environ = {name: os.environ[name] for name in (*_PASSED, *_PYTHON) if name in os.environ}
    environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    message = {"task": task, "request": dict(request), "memory": memory, "nice": nice, "parent": os.getpid()}
    child = _started([sys.executable, "-m", "weighbridge.adapters.worker"], environ, None)
    return _result(_talked(child, message, progress))


class Ended(NamedTuple):
    """A jailed child that came back: its result, what of the jail held, and the most memory of its own, in bytes."""

    result: dict[str, Any]
    held: Held
    peak: int


def jailed(
    task: str, request: Mapping[str, Any], policy: Policy, *, nice: int = 10, progress: Tell | None = None
) -> Ended:
    """Run `module:function` in a child process inside a jail.

    The folders that may be written exist. Raises what `run` raises, JailedError where the task wanted what the jail
    forbids, LimitError where it was ended for what it used.
    """
    home = Path(policy.writes[0])
    command = [sys.executable, "-P", "-m", "weighbridge.adapters.worker"]
    child = _started(command, jail.environment(policy, os.environ), home)
    watch = limits.Watch(child.pid, policy)
    message = {
        "task": task,
        "request": dict(request),
        "memory": None,
        "nice": nice,
        "parent": os.getpid(),
        "jail": msgspec.to_builtins(policy),
    }
    spoken = _talked(child, message, progress, watch)
    stopped = watch.verdict or limits.over_time(spoken.code, policy)
    if stopped is not None:
        raise stopped
    return Ended(_result(spoken), Held(**spoken.answers["held"]), watch.peak)


class _Spoken(NamedTuple):
    """What came of a child: its answers, its exit code, what it said on stderr; `short` when memory ran out meanwhile.

    The kernel counts the processes that it ends for memory, and does not say which they were.
    """

    answers: dict[str, Any]
    code: int
    said: bytes
    short: bool


def _started(command: list[str], environ: Mapping[str, str], home: Path | None) -> "subprocess.Popen[bytes]":
    """Start a child; one with a home of its own leads a process group of its own."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd=home,
        process_group=None if home is None else 0,
        close_fds=True,
    )


def _talked(
    child: "subprocess.Popen[bytes]",
    message: Mapping[str, Any],
    progress: Tell | None,
    watch: limits.Watch | None = None,
) -> _Spoken:
    """Give a child its task and hear it to its end."""
    assert child.stdin is not None
    assert child.stdout is not None
    said: list[bytes] = []
    killed = starved.kills()
    listener = threading.Thread(target=_listen, args=(child, said), daemon=True)
    listener.start()
    answers: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
        while line := child.stdout.readline(_LINE_LIMIT):
            event = _event(line)
            if "progress" in event:
                if progress is not None:
                    progress(int(event["progress"]))
            else:
                # The first word counts: that of what holds came before any input. Anything else a child may babble.
                answers = {key: event[key] for key in _ANSWERS if key in event} | answers
    except BaseException:
        if watch is not None:
            watch.stop()
        raise
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        if watch is not None:
            watch.wait()
        code = child.wait()
        listener.join(1.0)
        child.stdout.close()
    return _Spoken(answers, code, b"".join(said), starved.kills() > killed)


def _event(line: bytes) -> dict[str, Any]:
    """Return what a child told in one line; one that reads hostile files may tell anything."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("progress", 0), int):
        raise errors.WeighbridgeError(
            "the child process did not answer as it should", why="it told something that is no message of ours"
        )
    return event


def _result(spoken: _Spoken) -> dict[str, Any]:
    if "result" in spoken.answers:
        result: dict[str, Any] = spoken.answers["result"]
        return result
    if "error" in spoken.answers:
        raise _error(spoken.answers["error"])
    raise _ended(spoken)


def _listen(child: "subprocess.Popen[bytes]", said: list[bytes]) -> None:
    assert child.stderr is not None
    with contextlib.suppress(ValueError, OSError), child.stderr as stream:
        said.append(stream.read(1 << 20))
        while stream.read(1 << 20):
            pass


def _error(told: dict[str, Any]) -> errors.WeighbridgeError:
    kinds = {kind.code: kind for kind in errors.kinds()}
    kind = kinds.get(told["code"], errors.WeighbridgeError)
    return kind(told["message"], why=told["why"], fix=told["fix"], **told["data"])


def _ended(spoken: _Spoken) -> errors.WeighbridgeError:
    """Return the error for a child that ended without an answer."""
    code, lines = spoken.code, spoken.said.decode("utf-8", "replace").strip().splitlines()
    if code == -signal.SIGKILL and spoken.short:
        return starved.error("the kernel ended its process for the memory it held")
    short = starved.told(lines[-1].rstrip(".")) if lines else None
    if short is not None:
        return short
    if code < 0:
        name = signal.Signals(-code).name
        why = f"it was ended by {name}" + ("; the kernel does that when memory runs out" if name == "SIGKILL" else "")
        return errors.WeighbridgeError(
            "the child process did not finish", why=why, fix="run it again: it goes on where it was"
        )
    return errors.WeighbridgeError(
        "the child process did not finish", why=lines[-1] if lines else f"it ended with {code} and said nothing"
    )


# ----------------------------------------------------------------------------------------------------------- the child


def main() -> int:
    """Read one task, run it, answer; what is printed by the task goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    told = sys.stdin.buffer.readline(_LINE_LIMIT)
    if not told:
        return 0
    message = json.loads(told)
    end_with(message["parent"])
    confined = message.get("jail") is not None
    if confined:  # before there is a second thread, which would stay outside
        held = jail.enter(msgspec.convert(message["jail"], Policy))
        answers.write(json.dumps({"held": held._asdict()}).encode() + b"\n")
    threading.Thread(target=_end_when_closed, daemon=True).start()
    os.nice(message["nice"])
    if message["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (message["memory"], message["memory"]))
    answer: dict[str, Any]
    try:
        module, _, name = message["task"].partition(":")
        task: Task = getattr(importlib.import_module(module), name)
        answer = {"result": task(message["request"], _Teller(answers))}
    except errors.WeighbridgeError as error:
        answer = {"error": errors.describe(error)}
    except OSError as error:
        if not confined or error.errno not in _FORBIDDEN:
            raise
        answer = {"error": errors.describe(_forbidden(error))}
    except (MemoryError, RuntimeError) as error:
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        short = starved.told(words)
        if short is None:
            raise
        answer = {"error": errors.describe(short)}
    answers.write(json.dumps(answer, default=str).encode() + b"\n")
    return 0


def _forbidden(error: OSError) -> errors.JailedError:
    where = f"{error.filename}: " if error.filename else ""
    return errors.JailedError(
        "the child process wanted what its jail forbids",
        why=f"{where}{error.strerror or error}",
        fix="do not use the input, unless you know why it asks for this",
    )


class _Teller:
    """Tells the parent of progress, a few times a second at most; called from several threads."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._held = 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._held += count
            if self._held >= _TELL_EVERY:
                self._answers.write(b'{"progress":%d}\n' % self._held)
                self._held = 0


def _end_when_closed() -> None:
    """End when the parent lets go of the pipe."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 1 << 16):
            pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
