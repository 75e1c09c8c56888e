"""How much memory is left for a piece of work: what the kernel has, and what the control groups allow."""

import contextlib
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path("/")
_HUGE: Final = 1 << 60
"""From here on a limit of the older control groups is none."""


class Room(NamedTuple):
    """Bytes that can be had, what says so, and of how many."""

    free: int
    by: str
    of: int = 0


def available(root: Path = _ROOT) -> Room:
    """Return the least of what MemAvailable and the control groups of this process leave; `root` is that of the files.

    Pages of files that nobody uses count as free on both sides. Raises OSError where the kernel shows no memory.
    """
    table = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    rooms = [Room(_bytes(table["MemAvailable"]), "MemAvailable", _bytes(table["MemTotal"]))]
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                rooms += _levels(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                rooms += _levels(
                    root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
                    "total_inactive_file",
                )  # fmt: skip
    return min(rooms)


def _bytes(field: str) -> int:
    return int(field.split(maxsplit=1)[0]) << 10


def _levels(mount: Path, path: str, limit: str, used: str, idle: str) -> list[Room]:
    """Return what each level from the root of a hierarchy to a group leaves."""
    found: list[Room] = []
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    for depth in range(len(parts) + 1):
        folder = mount.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):
            allowed = int((folder / limit).read_text())
            if allowed < _HUGE:
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                held = int((folder / used).read_text()) - int(statistics.get(idle, "0"))
                found.append(Room(max(0, allowed - held), "the memory limit of the control group", allowed))
    return found
