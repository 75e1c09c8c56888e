"""Read every file of a hostile corpus in this process, watched: prints one JSON line per file.

    python hostile_run.py FOLDER < list of {"label", "reader"}

An audit hook records every event that reading has no reason for; the memory limit is 300 MiB above the start.
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge.adapters.formats.select import select

READERS = ("torch_zip", "torch_legacy", "gguf", "dcp", "onnx", "opaque")
LIMIT = 300 << 20
QUIET = ("object.", "marshal.", "sys._getframe", "builtins.id", "gc.", "os.listdir", "os.scandir")

events: list[str] = []
watching = False


def hook(event: str, args: tuple[Any, ...]) -> None:
    """Record what reading a file never needs."""
    if not watching or event.startswith(QUIET):
        return
    if event == "open":
        mode, flags = args[1], args[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            events.append(f"open for writing {args[0]!r}")
        return
    if event == "import" and str(args[0]).startswith(("encodings", "_codecs")):
        return
    events.append(f"{event} {args[:1]!r}"[:200])


def peak() -> int:
    """Return the most memory that this process has held since its birth by fork."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def space() -> int:
    """Return the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def judge(path: Path, reader: Any) -> dict[str, Any]:
    """Read one file, watched, and say what came of it."""
    global watching  # noqa: PLW0603 - the hook cannot be removed, only told to look away
    sys.addaudithook(hook)
    Path("/proc/self/clear_refs").write_text("5")
    before, limit = peak(), space() + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    result: dict[str, Any] = {"hazards": [], "detail": ""}
    start = time.process_time()
    watching = True
    try:
        found: Directory = reader.read(path)
        select(found)
        result["result"] = "directory"
        result["hazards"] = [f"{h.code}:{h.severity}:{h.subject}"[:200] for h in found.hazards]
    except FormatFault as fault:
        result["result"], result["detail"] = "fault", f"{fault.code}: {fault.message}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not have come out
        result["result"], result["detail"] = "escaped", f"{type(error).__name__}: {error}"[:300]
    watching = False
    return {**result, "events": events[:20], "seconds": time.process_time() - start, "bytes": peak() - before}


def main() -> None:
    """Read the list from standard input and judge each file in a process of its own."""
    folder = Path(sys.argv[1])
    modules = {name: importlib.import_module(f"weighbridge.adapters.formats.{name}") for name in READERS}
    for attack in json.load(sys.stdin):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            line = {"label": attack["label"], **judge(folder / attack["label"], modules[attack["reader"]])}
            os.write(writing, json.dumps(line).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as answer:  # noqa: PTH123 - a descriptor, no path
            line_bytes = answer.read()
        os.waitpid(child, 0)
        sys.stdout.write(line_bytes.decode() or json.dumps({"label": attack["label"], "result": "died"}))
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
