"""Publishing in a process of its own that dies at a chosen request."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighbridge.registry.remotes.hub.child import GROUP
from weighbridge_testlib.hub.rig import TRANSPORTS
from weighbridge_testlib.hub.server import TestHub
from weighbridge_testlib.measure import children

_PROGRAM: Final = """
import os, sys
from pathlib import Path
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge_testlib.hub.rig import publish
remote = HubRemote("acme", inline=int(os.environ["INLINE"]), sleep=lambda _: None)
sizes = [int(word) for word in sys.argv[2:]]
files = {f"w{n}.safetensors": bytes([65 + n]) * size for n, size in enumerate(sizes)} | {"adapter_config.json": b"{}"}
print(publish(remote, Path(sys.argv[1]), files=files).n)
remote.close()
"""


class Killed:
    """One publication by a process that is killed at a request: `when` it is "before" or "after" it is carried out."""

    def __init__(
        self, hub: TestHub, env: Mapping[str, str], folder: Path, sizes: tuple[int, ...], *, way: str = "lfs"
    ) -> None:
        self._hub = hub
        self._env = dict(env) | TRANSPORTS[way] | {"INLINE": "0" if way == "child" else str(GROUP)}
        self._words = [str(folder), *map(str, sizes)]
        self.orphans: list[int] = []
        """Descriptors of the processes that the killed one had begun, to be given to `ended`."""

    def run(self, *, at: int | None = None, when: str = "before", on: str = "") -> tuple[bool, str]:
        """Publish; kill it at the `at`-th request that begins with `on`. Returns whether it died, and what it said."""
        process: subprocess.Popen[str] | None = None
        seen = 0
        died = False

        def watch(now: str, line: str) -> None:
            nonlocal seen, died
            if now != when or at is None or died or on not in line:
                return
            seen += 1
            if seen == at and process is not None:
                died = True
                self.orphans = [os.pidfd_open(child) for child in children(process.pid)]
                os.kill(process.pid, signal.SIGKILL)
                process.wait()

        self._hub.watch = watch
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, *self._words],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=60)
        finally:
            self._hub.watch = lambda _when, _line: None
        assert died or process.returncode == 0, err[-3000:]
        return died, out.strip()


def ended(process: int) -> bool:
    """Wait until the process of a descriptor has ended, and close it; False when it goes on for half a minute."""
    try:
        return process in select.select([process], [], [], 30)[0]
    finally:
        os.close(process)


def stored_twice(hub: TestHub) -> dict[str, Any]:
    """Return the objects whose bytes came whole more than once."""
    counts: dict[str, int] = {}
    for seen in hub.asked("lfs-put"):
        counts[seen.path] = counts.get(seen.path, 0) + 1
    return {path: count for path, count in counts.items() if count > 1}
