"""Run `registry inspect` on every entry of a hostile corpus, watched: prints one JSON line per entry.

    python hostile_look.py FOLDER < list of labels

Each entry is looked at twice in a process of its own, as a person sees it and as JSON. The audit hook of hostile_run
records what looking has no reason for; the limits are hard: 300 MiB above the start, some seconds of CPU, and a clock
for whoever waits on a pipe.
"""

import codecs
import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from weighbridge.registry.cli.main import main as registry
from weighbridge_testlib import hostile_run
from weighbridge_testlib.builders import llama_model

SOUND = "sound"
"""A folder that is written into the corpus and looked at first, so that everything is imported before."""

CPU_SECONDS = 10
CLOCK_SECONDS = 20


def steering(words: str) -> list[str]:
    """Return the characters of some output that could steer a terminal or turn its text around."""
    return sorted({repr(c) for c in words if not c.isprintable() and c != "\n"})


def judge(path: Path) -> dict[str, Any]:
    """Look at one entry, watched, and say what came of it."""
    sys.addaudithook(hostile_run.hook)
    signal.alarm(CLOCK_SECONDS)
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, used + CPU_SECONDS))
    Path("/proc/self/clear_refs").write_text("5")
    before, limit = hostile_run.peak(), hostile_run.space() + hostile_run.LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    found: dict[str, Any] = {}
    start = time.process_time()
    hostile_run.watching = True
    for form in ("table", "json"):
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = registry(["inspect", str(path), "-o", form])
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not have come out
            code = -1
            err.write(f"escaped: {type(error).__name__}: {error}"[:300])
        if form == "table":
            found |= {"code": code, "seconds": time.process_time() - start, "err": err.getvalue()[:600]}
            found |= {"steering": steering(out.getvalue() + err.getvalue()), "bytes": hostile_run.peak() - before}
            found["out"] = out.getvalue()[:400]
        else:
            hostile_run.watching = False
            found |= {"json_code": code, **document(out.getvalue() or err.getvalue())}
    return {**found, "events": hostile_run.events[:20]}


def document(text: str) -> dict[str, Any]:
    """Return what the JSON says: the outcome, and the codes that block or wait."""
    try:
        said = json.loads(text)
    except ValueError as error:
        return {"broken_json": str(error)[:200]}
    if "outcome" not in said:
        return {"outcome": "error", "codes": [said.get("code")]}
    return {
        "outcome": said["outcome"],
        "codes": sorted({f["code"] for f in said["findings"] if f["severity"] == "block"}),
    }


def main() -> None:
    """Read the labels from standard input and judge each entry in a process of its own."""
    folder = Path(sys.argv[1])
    codecs.lookup("unicode_escape")
    importlib.import_module("license_expression")
    with contextlib.redirect_stdout(io.StringIO()):  # everything is imported before anybody watches
        for form in ("table", "json"):
            registry(["inspect", str(llama_model(folder / SOUND, shards=2)), "-o", form])
    for label in json.load(sys.stdin):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            line = {"label": label, **judge(folder / label)}
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.write(writing, json.dumps(line).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as answer:  # noqa: PTH123 - a descriptor, no path
            said = answer.read().decode()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(said or json.dumps({"label": label, "code": None, "died": os.waitstatus_to_exitcode(status)}))
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
