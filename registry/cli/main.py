"""The entry point of `registry` and of its twin `weighbridge`.

Starting is most of what `registry ls` costs. Two habits save a sixth of it: nothing is imported before the garbage
collector is told to stay out of the way (modules are never garbage), and a process that is about to end does not take
its modules apart first. An interrupt is no traceback from the first import on, so this module itself imports only what
the interpreter has loaded already.
"""

import atexit
import gc
import os
import sys

_INTERRUPTED = 130
"""That of `shell`, which may not be there yet."""


def main(arguments: list[str] | tuple[str, ...] | None = None) -> int:
    """Run one command and return the exit code; every error is turned into words by `shell.run`.

    `arguments` is None for the real command line, whose process belongs to us.
    """
    if arguments is not None:
        return _run(arguments)
    try:
        return _whole()
    except KeyboardInterrupt:  # while `shell` was being imported, or the process was about to end
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED


def _whole() -> int:
    gc.disable()
    code = _run(None)
    threads = sys.modules.get("threading")
    if threads is None or all(one.daemon for one in threads.enumerate() if one is not threads.main_thread()):
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter would, and nobody else can
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # a reader that left; what a command prints is out before it ends
            pass
        os._exit(code)
    return code


def _run(arguments: list[str] | tuple[str, ...] | None) -> int:
    from weighbridge.registry import shell  # noqa: PLC0415 - an interrupt in here is no traceback
    from weighbridge.registry.cli import group  # noqa: PLC0415

    return shell.run(group.registry, "registry", arguments)
