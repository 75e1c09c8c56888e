"""What a daemon costs that has nothing to do: CPU, memory, rescans and system calls over a large quiet tree.

2,000 checkpoint folders with 50,000 files are watched with default settings. After the first round the daemon is left
alone; then its CPU and memory are read for two minutes, a rescan is asked for, and strace counts the system calls of
some scans, once with everything quiet and once while a few folders are being written.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from weighbridge.registry import control
from weighbridge_testlib import measure
from weighbridge_testlib.builders import trainer_checkpoint
from weighbridge_testlib.yard import BrokenError, Yard, until

DAY = 86400.0
TREE_CALLS = ("openat", "open", "getdents64", "stat", "lstat", "newfstatat", "fstat", "statx")


def build(runs: Path, checkpoints: int, files: int) -> int:
    """Write so many Trainer checkpoints of so many files each, over the last half year; return the files written."""
    template = trainer_checkpoint(runs.parent / "template", step=1, tokenizer=True)
    ready = sorted(template.iterdir())
    fill = [f"rng_state_{i}.pth" for i in range(1, files - len(ready) + 1)]
    now = time.time()
    for number in range(checkpoints):
        folder = runs / f"project-{number % 10}/run-{number // 20}/checkpoint-{number % 20 * 100 + 100}"
        folder.mkdir(parents=True)
        age = now - 3600 - DAY * 180 * (number // 20) / (checkpoints / 20)
        for path in ready:
            shutil.copyfile(path, folder / path.name)
        for name in fill:
            (folder / name).write_bytes(b"random state\n")
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (age, age))
    return checkpoints * (len(ready) + len(fill))


def ask(yard: Yard, op: str, **arguments: Any) -> Any:
    """Ask the daemon, patiently."""
    return control.ask(str(yard.socket), op, arguments, timeout=120)


def watch_figures(pid: int, seconds: float) -> tuple[float, int]:
    """Return the share of one core and the greatest resident memory over some seconds."""
    begin, used = time.monotonic(), measure.processor_seconds(pid)
    resident = 0
    while time.monotonic() - begin < seconds:
        resident = max(resident, sum(measure.resident_bytes(p) for p in (pid, *measure.children(pid))))
        time.sleep(1)
    return (measure.processor_seconds(pid) - used) / (time.monotonic() - begin), resident


def calls(pid: int, seconds: float) -> dict[str, int] | None:
    """Return how often each system call was made in some seconds, by strace; None without strace."""
    if not shutil.which("strace"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        process = subprocess.Popen(["strace", "-f", "-qq", "-c", "-U", "name,calls", "-p", str(pid), "-o", str(log)])
        time.sleep(seconds)
        process.terminate()
        process.wait()
        rows = [line.split() for line in log.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit() and row[0] != "total"}


class Busy(threading.Thread):
    """A few trainers that keep writing."""

    def __init__(self, folders: list[Path]) -> None:
        super().__init__(daemon=True)
        self.folders = folders
        self.stopped = threading.Event()

    def run(self) -> None:
        """Append to one file in each folder, every second."""
        for folder in self.folders:
            folder.mkdir(parents=True)
        while not self.stopped.wait(1):
            for folder in self.folders:
                with (folder / "trainer.log").open("a") as stream:
                    stream.write("step\n")


def main() -> int:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=2000)
    parser.add_argument("--files", type=int, default=25, help="in each checkpoint folder")
    parser.add_argument("--seconds", type=float, default=120, help="how long the daemon is watched (default 120)")
    parser.add_argument("--active", type=int, default=10, help="folders that are written during the second count")
    parser.add_argument("--scan-only", action="store_true", help="no file events: the periodic scan alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-idle-") as base, Yard(Path(base)) as yard:
        files = build(yard.runs, options.checkpoints, options.files)
        yard.configure(
            daemon=dict.fromkeys(("scan", "quiet")),
            watch=dict.fromkeys(("publish", "min_interval", "backfill", "name")),
        )
        if options.scan_only:
            yard.without_events()
        with yard.daemon(wait=120) as daemon:
            first = until(lambda: scanned(yard), 300, "the first scan", every=0.5)
            time.sleep(10)
            share, resident = watch_figures(daemon.pid, options.seconds)
            bare = min(bare_walk(str(yard.runs)) for _ in range(3))
            rescans = []
            for _ in range(5):
                ask(yard, "scan")
                time.sleep(1)
                rescans.append(float(scanned(yard)["seconds"]))
            window = 65.0
            quiet = calls(daemon.pid, window)
            busy = Busy([yard.runs / f"active/run-{i}/checkpoint-1" for i in range(options.active)])
            busy.start()
            time.sleep(5)
            active = calls(daemon.pid, window)
            busy.stopped.set()
            if daemon.poll() is not None:
                raise BrokenError(f"the daemon ended: {yard.log_tail()}")
        published = len(yard.check()["committed"])
    return measure.report(
        "idle",
        {
            "share_of_one_core": (share, 0.01),
            "resident_bytes": (resident, 120_000_000),
            "rescan_seconds": (min(rescans), 0.5),
        },
        folders=options.checkpoints,
        files=files,
        first_scan_s=round(first, 2),
        rescans_s=rescans,
        bare_walk_s=round(bare, 3),
        published=published,
        syscalls_quiet=summary(quiet),
        syscalls_active=summary(active),
        window_s=window,
        skipped=[] if quiet is not None else ["SKIPPED syscalls: strace is not installed"],
    )


def bare_walk(folder: str) -> float:
    """Return the seconds it takes to list a tree and look at every file once, and nothing else."""

    def visit(path: str) -> None:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    visit(entry.path)
                else:
                    entry.stat(follow_symlinks=False)

    begin = time.perf_counter()
    visit(folder)
    return time.perf_counter() - begin


def scanned(yard: Yard) -> Any:
    """Return what the daemon says of its last full scan, None before the first one ended."""
    return ask(yard, "status")["scan"]


def summary(counted: dict[str, int] | None) -> dict[str, Any] | None:
    """Return all calls, those that look at the tree, and the five most frequent."""
    if counted is None:
        return None
    top = dict(sorted(counted.items(), key=lambda item: -item[1])[:5])
    return {"all": sum(counted.values()), "tree": sum(counted.get(c, 0) for c in TREE_CALLS), "most": top}


if __name__ == "__main__":
    sys.exit(main())
