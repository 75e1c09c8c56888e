"""What the child process does that uploads and commits (child.py): `python -m weighbridge.registry.remotes.hub.send`.

The library's upload can hang for an hour, and its Rust part cannot be interrupted; a process can be ended. It is told
what to do in JSON lines on its standard input and answers in JSON lines; when its input ends, so does it. The token
comes that way too: neither the command line nor the environment shows it.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TextIO

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import tqdm

from weighbridge import __version__
from weighbridge.registry import errors
from weighbridge.registry.remotes.commits import Change
from weighbridge.registry.remotes.hub import client
from weighbridge.registry.remotes.hub.errors import translate
from weighbridge.registry.remotes.hub.sender import Sender

_EVERY: Final = 0.2


class _Counter:
    """Counts the bytes that the library reports to its progress bars, and tells them now and then."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say
        self._moved = 0.0
        self._told = 0.0
        self._lock = threading.Lock()

    def attach(self) -> None:
        """Listen to every progress bar of the library; none is drawn, but all are made."""
        counter = self
        bars: Any = tqdm
        begin, plain = bars.__init__, bars.update

        def unseen(bar: Any, *args: Any, **given: Any) -> None:
            begin(bar, *args, **(given | {"disable": True}))

        def update(bar: Any, n: float | None = 1) -> Any:
            counter.moved(n or 0)
            return plain(bar, n)

        bars.__init__, bars.update = unseen, update
        # The library has read by now whether this user wants to see bars; without any it reports to nobody.
        home: Any = importlib.import_module("huggingface_hub.utils.tqdm")
        home.HF_HUB_DISABLE_PROGRESS_BARS = False

    def moved(self, count: float = 0) -> None:
        """Take note of bytes, or of none: anything shows that it is alive."""
        now = time.monotonic()
        with self._lock:
            self._moved += count
            if now - self._told < _EVERY:
                return
            self._told = now
            moved, self._moved = self._moved, 0.0
        self._say({"moved": int(moved)})


def carry_out(sender: Sender, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order and return the answer."""
    if order["do"] == "send":
        sender.send(order["files"], order["base"])
        return {}
    small = {path: bytes.fromhex(body) for path, body in order["small"].items()}
    change = Change(
        parent=order["parent"], title=order["title"], message=order["message"], branch=order["branch"],
        files=order["files"], small=small, delete=order["delete"],
    )  # fmt: skip
    return {"commit": sender.commit(change)}


def _warm_up() -> None:
    """Load and open what an upload needs, while nobody has an order yet."""
    patience = client.Patience()
    client.warm_up(patience._replace(answer=patience.commit))
    if not constants.HF_HUB_DISABLE_XET:
        with suppress(ImportError):
            importlib.import_module("hf_xet")


def serve(orders: TextIO, out: TextIO) -> None:
    """Carry out orders until there are no more, then end the process."""
    lock = threading.Lock()

    def say(line: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(line, default=str) + "\n")
            out.flush()

    _warm_up()
    first = json.loads(orders.readline() or "null")
    if first is None:
        return  # nobody had anything to send
    patience = client.Patience(*first["patience"])
    client.install(patience._replace(answer=patience.commit))
    counter = _Counter(say)
    counter.attach()
    xet = first["transport"] == "xet"
    constants.HF_HUB_DISABLE_XET = not xet
    api = HfApi(
        endpoint=first["endpoint"],
        token=first["token"] or False,
        library_name="weighbridge",
        library_version=__version__,
    )
    sender = Sender(first["repo"], api, xet=xet, alive=counter.moved, sent=lambda paths: say({"sent": paths}))
    waiting: list[dict[str, Any]] = []
    there = threading.Condition()

    def listen() -> None:
        while line := orders.readline():
            with there:
                waiting.append(json.loads(line))
                there.notify()
        os._exit(0)  # whoever started us is gone, and nothing of ours may go on

    threading.Thread(target=listen, daemon=True).start()
    say({"ready": True})
    while True:
        with there:
            while not waiting:
                there.wait()
            order = waiting.pop(0)
        try:
            say({"done": carry_out(sender, order)})
        except Exception as error:  # noqa: BLE001 - told to whoever started us
            found = error if isinstance(error, errors.WeighbridgeError) else None
            found = found or translate(error, order["what"], writes=order["do"] == "commit")
            say({"error": errors.describe(found), "kind": type(found).__name__})


def main() -> None:
    """Serve the standard input and output."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the library prints is no answer
    serve(sys.stdin, out)


if __name__ == "__main__":
    main()
