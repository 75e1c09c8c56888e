"""The entry point of `registryd`.

As with `registry`, an interrupt is no traceback from the first import on, so this module itself imports only what the
interpreter has loaded already.
"""

import os
import sys

_INTERRUPTED = 130
"""That of `shell`, which may not be there yet."""


def main(arguments: list[str] | tuple[str, ...] | None = None) -> int:
    """Run the command line and return its exit code; every error is turned into words by `shell.run`.

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
    code = _run(None)
    threads = sys.modules.get("threading")
    if threads is not None and threads.active_count() > 1:
        # Python would wait for the threads of every pool, and a remote that is silent may hold one for a minute.
        logs = sys.modules.get("logging")
        if logs is not None:
            logs.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: list[str] | tuple[str, ...] | None) -> int:
    from weighbridge.daemon import commands  # noqa: PLC0415 - an interrupt in here is no traceback
    from weighbridge.registry import shell  # noqa: PLC0415

    return shell.run(commands.registryd, "registryd", arguments)
