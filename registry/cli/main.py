"""The entry point of `registry` and of its twin `weighbridge`.

Starting is most of what `registry ls` costs. Two habits save a sixth of it: nothing is imported before the garbage
collector is told to stay out of the way (modules are never garbage), and a process that is about to end does not take
its modules apart first.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; every error is turned into words by `shell.run`.

    `arguments` is None for the real command line, whose process belongs to us.
    """
    if arguments is not None:
        return _run(arguments)
    gc.disable()
    code = _run(None)
    threads = sys.modules.get("threading")
    if threads is None or all(one.daemon for one in threads.enumerate() if one is not threads.main_thread()):
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter would, and nobody else can
        with suppress(OSError, ValueError):  # a reader that left; what a command prints is out before it ends
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    shell = import_module("weighbridge.registry.shell")
    group = import_module("weighbridge.registry.cli.group")
    code: int = shell.run(group.registry, "registry", arguments)
    return code
