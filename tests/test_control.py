"""The client's end of the daemon's socket: whatever is there, or is not, becomes an answer or an error with words."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from weighbridge.registry import control, errors

Answer = Callable[[bytes], bytes]


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return a path that is short enough for a socket."""
    return str(tmp_path / "s")


def listening(place: str, answer: Answer) -> threading.Thread:
    """Answer one request at a socket with any bytes, then hang up."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen(1)

    def serve() -> None:
        with server, server.accept()[0] as link, link.makefile("rb") as stream:
            body = answer(stream.readline())
            with suppress(OSError):  # the other end may have gone
                link.sendall(body)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_one_line_goes_each_way(place: str) -> None:
    """The request names version, operation and arguments; the result comes back as it was."""
    asked: list[bytes] = []

    def answer(line: bytes) -> bytes:
        asked.append(line)
        return b'{"v": 1, "ok": true, "result": [1, "two", null]}\n'

    thread = listening(place, answer)
    assert control.ask(place, "log", {"limit": 2}) == [1, "two", None]
    thread.join(5)
    assert json.loads(asked[0]) == {"v": 1, "op": "log", "args": {"limit": 2}}


def test_an_error_is_raised_as_what_it_was(place: str) -> None:
    """Class, words and figures of the daemon's error arrive; an unknown code is an error all the same."""
    sent = errors.describe(errors.NotFinishedError("not yet", why="it waits", fix="wait", n=7))
    listening(place, lambda _: json.dumps({"v": 1, "ok": False, "error": sent}).encode() + b"\n")
    with pytest.raises(errors.NotFinishedError, match="not yet") as caught:
        control.ask(place, "status")
    assert (caught.value.why, caught.value.fix, caught.value.data) == ("it waits", "wait", {"n": 7})
    assert type(control.rebuild({"code": "of-a-later-release", "message": "x"})) is errors.WeighbridgeError


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "hung up"),
        (b'{"v": 1, "ok": true, "result": {"a"', "hung up"),
        (b'{"v": 1, "ok": true, "result": 1}', "hung up"),
        (b"HTTP/1.1 400 Bad Request\n", "not the daemon"),
        (b"[1]\n", "not the daemon"),
        (b"{}\n", "not the daemon"),
    ],
)
def test_a_broken_answer_is_no_bug_of_ours(place: str, body: bytes, what: str) -> None:
    """A daemon that died while it answered, and a stranger at the socket, are said to be that."""
    listening(place, lambda _: body)
    with pytest.raises(errors.UnreachableError, match=what):
        control.ask(place, "status")


def test_silence_and_absence_are_told_apart(place: str) -> None:
    """Nobody there means that the daemon is down; somebody who does not answer in time is told as such."""
    with pytest.raises(errors.UnreachableError, match="not running"):
        control.ask(place, "status")
    gate = threading.Event()
    thread = listening(place, lambda _: b"late\n" if gate.wait(5) else b"")
    with pytest.raises(errors.UnreachableError, match="does not answer"):
        control.ask(place, "status", timeout=0.1)
    gate.set()
    thread.join(5)
