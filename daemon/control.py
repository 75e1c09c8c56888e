"""The daemon's ear: a Unix socket that answers one JSON line with one JSON line (`registry.control` is the other end).

The socket belongs to us and our group (0660). Requests are small, answers are what `ops` returns; an error travels as
the object of `errors.describe` and is raised again at the other end.
"""

import json
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from weighbridge.registry import errors
from weighbridge.registry.control import VERSION
from weighbridge.registry.disk import speaking

Op = Callable[[Mapping[str, Any]], Any]

_REQUEST_LIMIT: Final = 1 << 20
_PATIENCE: Final = 10.0

_log = logging.getLogger(__name__)


class ControlServer:
    """Answers on a socket until it is closed; the lock on the state makes us the only one who may listen there."""

    def __init__(self, path: Path, ops: Mapping[str, Op]) -> None:
        self.path = path
        self._ops = ops
        self._server: _Server | None = None

    def start(self) -> None:
        """Begin to answer. Raises DeniedError and others that name the path when the socket cannot be made."""
        with speaking(f"the control socket {self.path} cannot be made"):
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                self.path.unlink()  # left over from a daemon that was killed
            before = os.umask(0o177)
            try:
                self._server = _Server(str(self.path), _Handler)
            finally:
                os.umask(before)
            self.path.chmod(0o660)
        self._server.ops = self._ops
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="control", daemon=True
        ).start()

    def close(self) -> None:
        """Stop answering and take the socket away."""
        server, self._server = self._server, None
        if server is not None:
            server.socket.shutdown(socket.SHUT_RDWR)  # its wait for a request ends now, not in half a second
            server.shutdown()
            server.server_close()
            with suppress(OSError):
                self.path.unlink()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    ops: Mapping[str, Op] = {}


class _Handler(socketserver.StreamRequestHandler):
    timeout = _PATIENCE
    server: _Server

    def handle(self) -> None:
        """Answer one request."""
        with suppress(OSError):
            line = self.rfile.readline(_REQUEST_LIMIT)
            if line:
                self.wfile.write(json.dumps(answer(line, self.server.ops), default=str).encode() + b"\n")


def answer(line: bytes, ops: Mapping[str, Op]) -> dict[str, Any]:
    """Return the reply to one request line; nothing is raised."""
    try:
        return {"v": VERSION, "ok": True, "result": _carry_out(line, ops)}
    except errors.WeighbridgeError as error:
        return {"v": VERSION, "ok": False, "error": errors.describe(error)}
    except Exception as error:  # noqa: BLE001 - whatever it was, the other end waits for an answer
        _log.exception("a request failed")
        bug = errors.BugError(f"the daemon failed to answer: {type(error).__name__}", fix="look at its log")
        return {"v": VERSION, "ok": False, "error": errors.describe(bug)}


def _carry_out(line: bytes, ops: Mapping[str, Op]) -> Any:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise errors.UsageError("the request is not JSON") from error
    if not isinstance(request, dict) or not isinstance(request.get("args", {}), dict):
        raise errors.UsageError("the request is no object")
    if request.get("v") != VERSION:
        raise errors.UsageError(
            f"this daemon speaks version {VERSION} of its protocol", fix="use the registry command of its release"
        )
    op = ops.get(str(request.get("op")))
    if op is None:
        raise errors.UsageError("the daemon does not know this request", why=f"it knows {', '.join(sorted(ops))}")
    return op(request.get("args") or {})
