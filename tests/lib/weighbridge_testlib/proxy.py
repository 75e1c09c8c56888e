"""A proxy between a client and an HTTP server that breaks what it is told to break.

with Proxy(server.endpoint, plan) as proxy: S3Remote(server.place("x", endpoint=proxy.endpoint))

`plan` is asked for every request and returns what shall go wrong with it, or None. It knows where requests and answers
begin and end, so that an answer can be lost after the server has done its work.
"""

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple, Self
from urllib.parse import urlsplit

Kind = Literal["refuse", "busy", "deny", "expire", "cut-request", "flip-request", "lost", "stall", "cut", "flip"]
KINDS: tuple[Kind, ...] = ("refuse", "busy", "cut-request", "flip-request", "lost", "stall", "cut", "flip")
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
ANSWERS = {"busy": ("503 Slow Down", BUSY), "deny": ("403 Forbidden", DENIED), "expire": ("400 Bad Request", EXPIRED)}


class Fault(NamedTuple):
    """What goes wrong, and at which byte (modulo what there is).

    refuse: closed before anything is passed on. busy: answered with SlowDown. deny: answered with AccessDenied.
    expire: answered with ExpiredToken. cut-request: the server gets a part.
    flip-request, flip: one bit of request or answer is another. lost: done, and the connection is closed without an
    answer. stall: done, and no answer comes. cut: the answer breaks off.
    """

    kind: Kind
    at: int = 0


class Request(NamedTuple):
    """One request: its number from 1 on, method, path with query, the length of its body, and its first lines."""

    number: int
    method: str
    target: str
    size: int
    head: bytes = b""

    def header(self, name: str) -> str | None:
        """Return the value of a header."""
        found = Message(self.head, b"").header(name.encode())
        return None if found is None else found.decode("latin-1")


Plan = Callable[[Request], Fault | None]


class Message(NamedTuple):
    """A request or an answer as it stands on the wire."""

    head: bytes
    body: bytes

    @property
    def first(self) -> list[str]:
        """The words of its first line."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a header."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return value.strip()
        return None


class Proxy:
    """Listens on loopback in a thread of its own; `requests` holds what came by, `broken` what was broken.

    `answered` is called when the server has answered a request, before anything of the answer is passed back.
    """

    def __init__(self, upstream: str, plan: Plan = lambda _: None, *, stall: float = 5.0) -> None:
        address = urlsplit(upstream)
        self._upstream = (str(address.hostname), int(address.port or 80))
        self.plan = plan
        self.stall = stall
        self.answered: Callable[[Request], None] = lambda _: None
        self.requests: list[Request] = []
        self.broken: list[tuple[Request, Fault]] = []
        self.endpoint = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20), self._loop
        ).result(10)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and drop every connection."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on and its answer back; return whether the connection goes on."""
        asked = await self._read(reader, bodiless=False, answer=False, permit=writer)
        method, target, *_ = asked.first
        request = Request(len(self.requests) + 1, method, target, len(asked.body), asked.head)
        self.requests.append(request)
        fault = self.plan(request)
        if fault is not None:
            self.broken.append((request, fault))
        kind = fault.kind if fault else None
        at = fault.at if fault else 0
        if kind == "refuse":
            return False
        if kind in ANSWERS:
            status, body = ANSWERS[kind]
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + (b"" if method == "HEAD" else body))
            await writer.drain()
            return True
        answer = await self._forward(asked, method, kind, at)
        if answer is not None:
            self.answered(request)
        if answer is None or kind == "lost":
            return False
        if kind == "stall":
            await asyncio.sleep(self.stall)
            return False
        wire = answer.head + answer.body
        if kind == "cut":
            writer.write(wire[: at % len(wire)])
            await writer.drain()
            return False
        writer.write(flipped(wire, at) if kind == "flip" else wire)
        await writer.drain()
        return answer.header(b"connection") != b"close"

    async def _forward(self, asked: Message, method: str, kind: str | None, at: int) -> Message | None:
        reader, writer = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            wire = asked.head + asked.body
            if kind == "cut-request":
                writer.write(wire[: at % len(wire)])
                await writer.drain()
                return None
            writer.write(flipped(wire, at) if kind == "flip-request" else wire)
            await writer.drain()
            while True:
                answer = await asyncio.wait_for(self._read(reader, bodiless=method == "HEAD", answer=True), 20)
                if answer.first[1] != "100":
                    return answer
        except TimeoutError:  # a flipped bit can make the server wait for more
            return None
        finally:
            writer.close()

    async def _read(
        self,
        reader: asyncio.StreamReader,
        *,
        bodiless: bool,
        answer: bool,
        permit: asyncio.StreamWriter | None = None,
    ) -> Message:
        head = await reader.readuntil(b"\r\n\r\n")
        message = Message(head, b"")
        if bodiless or (answer and message.first[1] in {"100", "204", "304"}):
            return message
        if permit is not None and message.header(b"expect") is not None:
            permit.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = message.header(b"content-length")
        if length is not None:
            return Message(head, await reader.readexactly(int(length)))
        if message.header(b"transfer-encoding") == b"chunked":
            return Message(head, await self._chunks(reader))
        return Message(head, await reader.read(-1) if answer else b"")

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = b""
        while True:
            line = await reader.readuntil(b"\r\n")
            chunk = await reader.readexactly(int(line.split(b";")[0], 16) + 2)
            body += line + chunk
            if line.strip() == b"0":
                return body


def flipped(wire: bytes, at: int) -> bytes:
    """Return the bytes with one bit changed."""
    place = at % (len(wire) * 8)
    changed = bytearray(wire)
    changed[place // 8] ^= 1 << (place % 8)
    return bytes(changed)
