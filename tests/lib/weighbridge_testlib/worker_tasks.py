"""Tasks for the tests of the child process."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weighbridge.registry.errors import RefusedError

Tell = Callable[[int], None]


def count(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Tell of some steps."""
    print("this goes to stderr")  # noqa: T201 - what is tested
    for _ in range(request["steps"]):
        tell(8 << 20)
    return {"steps": request["steps"], "nice": os.nice(0)}


def refuse(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Refuse."""
    raise RefusedError("no", why="because", fix="do this", n=3)


def fail(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Fail in a way nobody foresaw."""
    return {"n": 1 // 0}


def die(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """End by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hoard(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Take memory."""
    return {"n": len(bytearray(request["size"]))}


def give_up(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """End as a library does that gets no memory: with a sentence and no answer."""
    sys.stderr.write(f"{request['words']}\n")
    sys.stderr.flush()
    os._exit(1)


def environment(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Tell the names in the environment."""
    return {"names": sorted(os.environ)}


def sleep(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Tell who we are, and sleep."""
    Path(request["tell"]).write_text(str(os.getpid()))
    time.sleep(60)
    return {}
