"""What a hostile input would try from inside a child process; each task tries one thing and hides nothing.

Run as a module it is an old kernel: calls that are named are refused, and then one task runs in a jail.

    python -m weighbridge_testlib.canary TASK REQUEST POLICY CALL=ERRNO ...
"""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.adapters import seccomp, worker
from weighbridge.adapters.jail import Policy
from weighbridge.registry.errors import WeighbridgeError, describe

Tell = Callable[[int], None]
HERE = "weighbridge_testlib.canary"


def behave(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Do what a task may: read an input, write a result, use threads, tell of progress."""
    words = Path(request["read"]).read_text()
    folder = Path(request["write"]).parent / "inner"
    folder.mkdir()
    (folder / "a").write_text(words)
    (folder / "a").rename(request["write"])
    folder.rmdir()
    tell(8 << 20)
    done: list[int] = []
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join()
    return {"words": words, "threads": done, "cwd": str(Path.cwd()), "group": os.getpgrp() == os.getpid()}


def environment(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Tell the whole environment, as this process and as the kernel sees it."""
    return {"environ": dict(os.environ), "kernel": Path("/proc/self/environ").read_text()}


def read(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Read a file."""
    return {"words": Path(request["path"]).read_text()}


def listing(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """List a folder."""
    return {"names": [path.name for path in Path(request["path"]).iterdir()]}


def write(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Write a file."""
    Path(request["path"]).write_text("was here")
    return {}


def remove(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Remove a file."""
    Path(request["path"]).unlink()
    return {}


def loosen(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Let everybody read a file."""
    Path(request["path"]).chmod(0o777)
    return {}


def empty(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Cut a file to nothing."""
    os.truncate(request["path"], 0)
    return {}


def link(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Write through a link that leads out of the staging folder."""
    Path(request["link"]).symlink_to(request["path"])
    return write({"path": request["link"]}, _tell)


def call(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Connect to a port, over TCP or UDP, or to a socket in the file system."""
    kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM, "unix": socket.SOCK_STREAM}[request["kind"]]
    family = socket.AF_UNIX if request["kind"] == "unix" else socket.AF_INET
    with socket.socket(family, kind) as line:
        line.connect(request["path"] if request["kind"] == "unix" else ("127.0.0.1", request["port"]))
        line.send(b"secret")
    return {}


def fork(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Start some processes that go on and on."""
    for _ in range(request["count"]):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    return {}


def leave(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """End, and leave a process behind that writes its id and lives on."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    Path(request["tell"]).write_text(str(child))
    return {"child": child}


def execute(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Run a program."""
    subprocess.run(["/bin/sh", "-c", f"echo > {request['path']}"], check=True)
    return {}


def shoot(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """End somebody else's process."""
    os.kill(request["process"], signal.SIGKILL)
    return {}


def hoard(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Take memory and use it, piece by piece."""
    held = []
    for _ in range(request["pieces"]):
        held.append(b"x" * (8 << 20))
        time.sleep(0.01)
    time.sleep(60)
    return {"held": len(held)}


def crowd(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Start many threads."""
    for _ in range(request["count"]):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(60)
    return {}


def sleep(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Say who we are, where that is asked, and never come back."""
    if "tell" in request:
        Path(request["tell"]).write_text(str(os.getpid()))
    time.sleep(60)
    return {}


def babble(request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Write a line to every pipe there is, as if it were an answer."""
    for descriptor in range(1, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, request["line"].encode())
    return {}


def spin(_request: dict[str, Any], _tell: Tell) -> dict[str, Any]:
    """Compute for ever."""
    while True:
        sum(range(1000))


def main(task: str, request: str, policy: str, *refused: str) -> int:
    """Refuse some system calls with an error, as an older kernel does, then run a task and print what came of it."""
    numbers = {"landlock": 444, "filter": 157 if seccomp.MACHINES["x86_64"] is seccomp.machine() else 167}
    lines = [(0x20, 0, 0, 0)]
    for one in refused:
        name, _, code = one.partition("=")
        answer = (0x06, 0, 0, 0x00050000 | getattr(errno, code))
        if name == "filter":  # prctl is refused only where it would put on a filter
            lines += [(0x15, 0, 4, numbers[name]), (0x20, 0, 0, 16), (0x15, 0, 1, 22), answer, (0x06, 0, 0, 0x7FFF0000)]
        else:
            lines += [(0x15, 0, 1, numbers[name]), answer]
    assert seccomp.install([*lines, (0x06, 0, 0, 0x7FFF0000)])
    try:
        result, held, _ = worker.jailed(
            f"{HERE}:{task}", json.loads(request), msgspec.json.decode(policy.encode(), type=Policy)
        )
    except WeighbridgeError as error:
        sys.stdout.write(json.dumps({"error": describe(error)}))
    else:
        sys.stdout.write(json.dumps({"result": result, "held": held._asdict()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
