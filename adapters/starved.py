"""Work that got no more memory: how it shows, and the figures that say who keeps it short.

A library that gets none raises MemoryError, prints words of its own and ends, or cannot start a thread; and where the
memory of a machine, a job or a unit is used up the kernel ends the process, and counts that. The memory of a GPU is
another matter, and has words of its own.
"""

import contextlib
import re
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

_DEVICE: Final = re.compile(
    r"\b(?:cuda|hip|gpu|mps|xpu)\b.{0,40}?\bout of memory|\b(?:cuda|hip)error(?:memoryallocation|outofmemory)"
    r"|\b(?:cu|hip|roc)[a-z]+_status_alloc_failed|\btorch\.(?:cuda\.)?outofmemoryerror"
)
"""What torch and the libraries beneath it say of a device's memory."""

_LIMITS: Final = ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d"))


def kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has ended for memory so far, 0 where it does not count them.

    Those of our own control group where it says so (cgroup v2, `memory.events`; before, `memory.oom_control`): another
    job's are not ours. `root` is that of the files.
    """
    with contextlib.suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            ours = path.strip("/")
            names = ["memory.events"] if not controllers else []
            if "memory" in controllers.split(","):
                names, ours = ["memory.oom_control"], f"memory/{ours}"
            counted = [_counted(root / "sys/fs/cgroup" / ours / name) for name in names]
            if counted and counted[0] is not None:
                return counted[0]
    return _counted(root / "proc/vmstat") or 0


def _counted(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def told(words: str) -> errors.WeighbridgeError | None:
    """Return the error that is meant by what was said last, None where it is not about memory."""
    if of_device(words):
        return full("the GPU", words)
    return error(words) if any(word in words.casefold() for word in _WORDS) else None


def of_device(words: str) -> bool:
    """Tell whether what was said is about the memory of a GPU: more of a machine's would not help."""
    return _DEVICE.search(words.casefold()) is not None


def full(name: str, words: str) -> errors.WeighbridgeError:
    """Return the error of a device without memory left, by its name and what was said of it."""
    return errors.WeighbridgeError(
        f"the memory of {name} ran out",
        why=" ".join(words.split())[:300],
        fix="merge again when nobody else uses it, or with --device cpu; finished files are kept",
    )


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
