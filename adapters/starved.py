"""Work that got no more memory: how it shows, and the figures that say who keeps it short.

A library that gets none raises MemoryError, prints words of its own and ends, or cannot start a thread; and where the
memory of a machine, a job or a unit is used up the kernel ends the process, and counts that.
"""

import resource
from pathlib import Path
from typing import Final

from weighbridge.adapters import memory
from weighbridge.registry import errors

_WORDS: Final = (
    "memoryerror", "memory allocation", "cannot allocate memory", "can't allocate memory", "unable to allocate",
    "failed to map segment", "bad_alloc", "out of memory", "can't start new thread",
)  # fmt: skip
"""What the interpreter, the C library, BLAS and torch say last."""

_LIMITS: Final = ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d"))


def kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has ended for memory since it started, 0 where it does not count them."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def says(words: str) -> bool:
    """Tell whether what was said last is about memory."""
    return any(word in words.casefold() for word in _WORDS)


def error(how: str) -> errors.MemoryShortError:
    """Return the error of work that got no more memory, with what is allowed here; `how` says how it showed."""
    allowed = [(soft, name) for number, name in _LIMITS if (soft := resource.getrlimit(number)[0]) >= 0]
    room = memory.available()
    told = [f"{soft} bytes are allowed ({name})" for soft, name in allowed]
    told.append(f"{room.free} of {room.of} bytes are free now ({room.by})")
    return errors.MemoryShortError(
        "the work ran out of memory",
        why=f"{how}; {', '.join(told)}",
        fix="give it more memory, or let it write fewer files at once (--workers 1), then repeat",
        free_bytes=room.free,
        allowed_bytes=min([room.of, *(soft for soft, _ in allowed)]),
    )
