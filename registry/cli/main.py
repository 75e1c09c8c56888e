"""The entry point of `registry` and of its twin `weighbridge`.

Starting is most of what `registry ls` costs. Two habits save a sixth of it: nothing is imported before the garbage
collector is told to stay out of the way (modules are never garbage), and the last collection of a process that is about
to end is spared.
"""

import gc
from collections.abc import Sequence
from importlib import import_module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; every error is turned into words by `shell.run`.

    `arguments` is None for the real command line, whose process belongs to us.
    """
    if arguments is not None:
        return _run(arguments)
    gc.disable()
    code = _run(None)
    gc.disable()
    gc.freeze()
    return code


def _run(arguments: Sequence[str] | None) -> int:
    shell = import_module("weighbridge.registry.shell")
    group = import_module("weighbridge.registry.cli.group")
    code: int = shell.run(group.registry, "registry", arguments)
    return code
