"""What measuring programs and proofs share: large weights, CPU of a command, figures of a process, a line of JSON."""

import hashlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 1 << 24
_CHUNK = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """What one run of a command cost: CPU seconds of it and its children, wall seconds, exit code, peak memory."""

    cpu: float
    wall: float
    code: int
    peak: int = 0
    """Bytes that were resident at most; what the starting process held counts as well."""


def cost(command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> Cost:
    """Run a command, its output thrown away, and return what it cost."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - begin
    return Cost(usage.ru_utime + usage.ru_stime, wall, process.returncode, usage.ru_maxrss << 10)


def timed(work: Callable[[], None], rest: float) -> float:
    """Return the seconds something takes, the disk's queue emptied and the disk rested before."""
    os.sync()
    time.sleep(rest)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def single_pass(source: Path, target: Path) -> None:
    """Copy, hash and force to disk every file of a folder, one after the other: the least a publisher must do."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as read, (target / path.name).open("wb", buffering=0) as write:
            while chunk := read.read(_CHUNK):
                digest.update(chunk)
                write.write(chunk)
            os.fsync(write.fileno())
    handle = os.open(target, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds a process and its ended children have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def written_bytes(pid: int) -> dict[str, int]:
    """Return what a process and its ended children wrote: by system calls, and to the disk."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    values = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
    return {"calls": values["wchar"], "disk": values["write_bytes"] - values["cancelled_write_bytes"]}


def children(pid: int) -> list[int]:
    """Return the living processes below a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def noise(seed: int, count: int, dtype: str = "F32") -> bytes:
    """Return so many random values around 0.02 (F32 or BF16) as bytes: quick to make, and no NaN among them."""
    width = {"F32": 4, "BF16": 2}[dtype]
    source, size = random.Random(seed), width * count
    raw = bytearray().join(source.randbytes(min(_BLOCK, size - at)) for at in range(0, size, _BLOCK))
    raw[width - 1 :: width] = b"\x3c" * count
    return bytes(raw)


def report(benchmark: str, bars: Mapping[str, tuple[float, float]], **figures: Any) -> int:
    """Print one line of JSON; `bars` maps a figure's name to (measured, most allowed). Return the exit code."""
    kept = all(measured <= limit for measured, limit in bars.values())
    line = {
        "benchmark": benchmark,
        "ok": kept,
        "bars": {name: {"measured": round(measured, 4), "at_most": limit} for name, (measured, limit) in bars.items()},
        **figures,
    }
    print(json.dumps(line, default=str))  # noqa: T201  the figures are the output
    return 0 if kept else 1
