"""The daemon's control socket: one JSON line each way, versioned. Client side and message shape.

    -> {"v": 1, "op": "status", "args": {...}}
    <- {"v": 1, "ok": true, "result": {...}}   or   {"v": 1, "ok": false, "error": {errors.describe}}

On the start-up path of `registry status`: it imports nothing heavy.
"""

import json
import socket
from typing import Any, Final

from weighbridge.registry import errors

VERSION: Final = 1
LINE_LIMIT: Final = 64 << 20


def ask(path: str, op: str, args: dict[str, Any] | None = None, *, timeout: float = 5.0) -> Any:
    """Return the daemon's answer to one request.

    Raises UnreachableError when no daemon answers at `path` within `timeout` seconds, and the daemon's own error.
    """
    request = json.dumps({"v": VERSION, "op": op, "args": args or {}}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout)
            link.connect(path)
            link.sendall(request)
            with link.makefile("rb") as stream:
                line = stream.readline(LINE_LIMIT)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise errors.UnreachableError(
            "the daemon is not running",
            why=f"nobody answers at {path}",
            fix="systemctl start weighbridge (your own: systemctl --user), or: registryd run",
        ) from error
    except PermissionError as error:
        raise errors.DeniedError(
            "the daemon's socket is closed to you",
            why=f"{path}: permission denied",
            fix="join the group that owns the socket",
        ) from error
    except OSError as error:
        raise errors.UnreachableError(
            "the daemon does not answer", why=f"{path}: {error}", fix="registryd run --help"
        ) from error
    if not line.endswith(b"\n"):  # it ended before its answer did
        raise errors.UnreachableError("the daemon hung up", why=f"{path}: no whole answer", fix="look at its log")
    try:
        answer = json.loads(line)
        ok, result = bool(answer["ok"]), answer.get("result")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.UnreachableError(
            "what answers is not the daemon", why=f"{path}: the answer is not one of ours", fix="see what listens there"
        ) from error
    if ok:
        return result
    raise rebuild(answer.get("error") or {})


def rebuild(described: dict[str, Any]) -> errors.WeighbridgeError:
    """Return the error that `errors.describe` described, as its own class where that is known."""
    kinds = {kind.code: kind for kind in errors.kinds()}
    kind = kinds.get(str(described.get("code")), errors.WeighbridgeError)
    return kind(
        str(described.get("message") or "the daemon failed"),
        why=described.get("why"),
        fix=described.get("fix"),
        **{k: v for k, v in (described.get("data") or {}).items() if k not in {"what", "why", "fix"}},
    )
