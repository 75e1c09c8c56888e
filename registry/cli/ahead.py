"""A look at a folder in a copy of this process, while this one loads what speaks to the remote.

Most of what a small `registry push` costs is loading, and neither half needs the other: what looks at a folder, and
what talks to a remote. Nothing depends on the copy. What it does not hand over - it met what is no error of ours, or
found what no other process can hold - is looked at here.
"""

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import IO, Any, Final, NamedTuple, cast

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.errors import WeighbridgeError, describe
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.parent import end_with
from weighbridge.registry.shell import load
from weighbridge.registry.types import Models, ModelSeen, ModelUnseen

JUDGE: Final = "weighbridge.registry.cli.judging:judge"
_LENGTH: Final = 8
"""Bytes that tell how long a message is."""


class Told(NamedTuple):
    """What the copy says: a question about a model, what it found, or the error that it met, described."""

    repo: str = ""
    revision: str | None = None
    found: Admission | None = None
    name: str = ""
    error: dict[str, Any] | None = None


class Answer(NamedTuple):
    """What it is answered: one of the two."""

    seen: ModelSeen | None
    unseen: ModelUnseen | None


class Looker:
    """The copy that looks; whoever began it ends it."""

    def __init__(self, pid: int, line: IO[bytes]) -> None:
        self._pid = pid
        self._line = line
        self._found: tuple[Admission, str] | None = None
        self._error: dict[str, Any] | None = None
        self._listener: threading.Thread | None = None

    def listen(self, ask: Models | None) -> None:
        """Answer the copy's questions about the base with `ask`, and take what it found, while this process goes on."""
        self._listener = threading.Thread(target=self._listen, args=[ask], name="look", daemon=True)
        self._listener.start()

    def found(self) -> tuple[Admission, str] | None:
        """Wait for what is to be published, and under which name; None where that is not known from here.

        Raises what the copy met.
        """
        if self._listener is not None:
            self._listener.join()
        if self._error is not None:
            raise load("weighbridge.registry.control:rebuild")(self._error)
        return self._found

    def end(self) -> None:
        """End the copy, at once; a question of it that a Hub has not answered yet is not waited for."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        if self._listener is None:  # which closes it otherwise
            self._line.close()

    def _listen(self, ask: Models | None) -> None:
        # Whatever fails here, a lone surrogate in a base's card for one, the command looks itself, and tells of it.
        with suppress(Exception), self._line:
            while body := _heard(self._line):
                told = msgspec.msgpack.decode(body, type=Told)
                if told.found is not None:
                    self._found = told.found, told.name
                    return
                self._error = told.error
                if ask is None or told.error is not None:
                    return
                said = ask(told.repo, told.revision)
                seen, unseen = (said, None) if isinstance(said, ModelSeen) else (None, said)
                _say(self._line, Answer(seen, unseen))


def begin(wish: Wish, chosen: RemoteSettings) -> Looker | None:
    """Begin to look; None where this process cannot be copied, because it has several threads, for one."""
    if threading.active_count() > 1:
        return None
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid == 0:
        try:
            ours.close()
            end_with(parent)
            _look(theirs, wish, chosen)
        finally:
            os._exit(0)  # whatever happens: nothing of the command may go on twice
    theirs.close()
    with ours:
        return Looker(pid, cast("IO[bytes]", ours.makefile("rwb")))


def _look(to: socket.socket, wish: Wish, chosen: RemoteSettings) -> None:
    """Judge the folder and tell what was found, or which error of ours was met; others are met by who looks again."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    line = cast("IO[bytes]", to.makefile("rwb"))

    def ask(repo: str, revision: str | None) -> ModelSeen | ModelUnseen:
        _say(line, Told(repo, revision))
        said = msgspec.msgpack.decode(_heard(line), type=Answer)
        return said.seen or said.unseen or ModelUnseen("it was not asked")

    asked: Models | None = ask if chosen.url.startswith("hf://") else None
    with suppress(Exception):
        try:
            _, admission, name = load(JUDGE)(wish, chosen, values=0, ask=asked)
        except WeighbridgeError as error:
            _say(line, Told(error=describe(error)))
            return
        if not admission.made:  # what is made out of files is more than values
            _say(line, Told(found=admission, name=name))


def _say(line: IO[bytes], told: object) -> None:
    body = msgspec.msgpack.encode(told)
    line.write(len(body).to_bytes(_LENGTH) + body)
    line.flush()


def _heard(line: IO[bytes]) -> bytes:
    """Return what was said next, nothing when nothing will be any more."""
    size = int.from_bytes(line.read(_LENGTH))
    body = line.read(size)
    return body if len(body) == size else b""
