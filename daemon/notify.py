"""Tell systemd how we are: READY, WATCHDOG, RELOADING, STOPPING, STATUS; without systemd nothing happens."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


def notify(*lines: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send some `KEY=value` lines to the service manager; return whether there was one to hear them."""
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.connect("\0" + address[1:] if address[0] == "@" else address)
        link.sendall("\n".join(lines).encode())
        return True
    return False


def watchdog_seconds(environ: Mapping[str, str] | None = None) -> float | None:
    """Return how often systemd wants to hear from this process, or None when it does not ask."""
    given = os.environ if environ is None else environ
    span, pid = given.get("WATCHDOG_USEC", ""), given.get("WATCHDOG_PID", "")
    if not span.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(span) / 1e6 or None
