"""The sockets of the test Hub: routing, the log of requests, and faults that strike before, during or after them.

The Hub is reached as 127.0.0.1, its storage and its content-addressed store as `localhost`: another host, as it is in
life, so that a client that would send its token there is found out.
"""

import contextlib
import json
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from weighbridge_testlib.hub.faults import Fault, Faults
from weighbridge_testlib.hub.store import Limits, Refused, Store, Token

WORDS: Final = {
    200: "OK", 206: "Partial Content", 302: "Found", 307: "Temporary Redirect", 400: "Bad Request",
    401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 409: "Conflict", 412: "Precondition Failed",
    413: "Payload Too Large", 416: "Range Not Satisfiable", 429: "Too Many Requests", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip


class Seen(NamedTuple):
    """One request as it came in; `token` is what its Authorization header held."""

    method: str
    path: str
    query: str
    host: str
    token: str | None
    size: int
    agent: str

    @property
    def line(self) -> str:
        """Return `METHOD path`."""
        return f"{self.method} {self.path}"


@dataclass
class Request:
    """A request with its body read."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    """By lower-case names."""
    body: bytes
    token: Token | None
    parts: dict[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Return the body as JSON."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise Refused(400, None, "the body is no JSON") from error

    def flag(self, name: str) -> bool:
        """Return a flag of the query."""
        return self.query.get(name, [""])[0] in {"1", "true", "True"}

    def one(self, name: str) -> str | None:
        """Return one value of the query."""
        return self.query.get(name, [None])[0]


@dataclass
class Answer:
    """An answer; a dict or list is sent as JSON."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the bytes of the body."""
        if isinstance(self.body, bytes):
            return self.body
        self.headers.setdefault("Content-Type", "application/json; charset=utf-8")
        return json.dumps(self.body).encode()


Act = Callable[["TestHub", Request], Answer]


class Route(NamedTuple):
    """One kind of request and what answers it."""

    method: str
    pattern: re.Pattern[str]
    act: Act
    public: bool


class Routes:
    """The routing table, filled by decorators; `{name}` matches one segment, `{name:path}` the rest."""

    def __init__(self) -> None:
        self.table: list[Route] = []

    def add(self, method: str, path: str, *, public: bool = False) -> Callable[[Act], Act]:
        """Return a decorator that answers these requests; `public` ones are not counted against the API's limit."""
        pattern = re.sub(r"\{(\w+):path\}", r"(?P<\1>.+)", path)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

        def decorate(act: Act) -> Act:
            self.table.extend(Route(m, re.compile(pattern), act, public) for m in method.split("|"))
            return act

        return decorate


class TestHub:
    """A running Hub; `store` holds what it knows, `faults` what shall go wrong, `seen` what it was asked."""

    __test__ = False

    def __init__(self, store: Store, *, xet: bool = True, multipart: int | None = None, port: int = 0) -> None:
        """Take what it holds; `xet` False is a Hub without it, `multipart` the part size of LFS uploads."""
        from weighbridge_testlib.hub import api, files  # noqa: PLC0415 - they fill the routing table
        from weighbridge_testlib.hub import xet as cas  # noqa: PLC0415

        self.store = store
        self.xet = xet
        self.multipart = multipart
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.bugs: list[str] = []
        """What went wrong in the test Hub itself; whoever closes it should look."""
        self.cas = cas.Cas()
        self.parts: dict[str, dict[int, bytes]] = {}
        self.parents: list[str | None] = []
        """The parent that each commit request named."""
        self.watch: Callable[[str, str], None] = lambda _when, _line: None
        """Told "before" and "after" each request is carried out, with its `METHOD path`."""
        self.cas_host: str | None = None
        """Another host to name as the content-addressed store, for a client that cannot reach it."""
        self._routes = [*api.ROUTES.table, *files.ROUTES.table, *cas.ROUTES.table]
        self._stop = threading.Event()
        self._server = _Server(("127.0.0.1", port), self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="test-hub", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the Hub's address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        """Return the address of the storage host."""
        return f"http://localhost:{self.port}"

    def close(self) -> None:
        """Stop at once, whatever is being said."""
        self._stop.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    def asked(self, name: str) -> list[Seen]:
        """Return the requests of a kind, by the names of `faults.ROUTES` or a pattern."""
        wanted = Fault(on=name)
        return [seen for seen in list(self.seen) if wanted.matches(seen.line)]

    def count(self, name: str) -> int:
        """Return how many requests of a kind there were."""
        return len(self.asked(name))

    def sent(self) -> int:
        """Return the bytes that were uploaded to storage or to the content-addressed store."""
        return sum(s.size for s in list(self.seen) if s.line.startswith(("PUT /_storage", "POST /_cas/v1/xorbs")))

    def leaked(self) -> list[Seen]:
        """Return requests to the storage hosts that carried an access token of the Hub."""
        return [s for s in list(self.seen) if s.host.startswith("localhost") and s.token in self.store.tokens]

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the server's end."""
        self._stop.wait(seconds)

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request, refusals included."""
        path = request.path
        for route in self._routes:
            match = route.pattern.fullmatch(path) if route.method == request.method else None
            if match is None:
                continue
            request.parts = {key: unquote(value or "") for key, value in match.groupdict().items()}
            try:
                if not route.public and path.startswith("/api/"):
                    self.store.count_request(request.token.user if request.token else "anonymous")
                return route.act(self, request)
            except Refused as refusal:
                return refused(refusal)
        return refused(Refused(404, None, f"Sorry, we can't find the page you are looking for: {path}"))


def refused(refusal: Refused) -> Answer:
    """Return a refusal as the Hub sends it."""
    headers = {"X-Error-Message": refusal.message} | refusal.headers
    if refusal.code is not None:
        headers["X-Error-Code"] = refusal.code
    return Answer({"error": refusal.message} | refusal.body, refusal.status, headers)


@contextmanager
def serve(
    *,
    limits: Limits | None = None,
    xet: bool = True,
    multipart: int | None = None,
    port: int = 0,
) -> Iterator[TestHub]:
    """Run a Hub with the organisation `acme`, its members `ann` (write) and `ben` (read), and the stranger `eve`.

    Their tokens are hf_ann, hf_ben and hf_eve.
    """
    store = Store(limits)
    store.add_user("ann", "hf_ann", orgs=["acme"])
    store.add_user("ann", "hf_fine", role="fineGrained")
    store.add_user("ben", "hf_ben", orgs=["acme"], role="read")
    store.add_user("eve", "hf_eve")
    hub = TestHub(store, xet=xet, multipart=multipart, port=port)
    try:
        yield hub
    finally:
        hub.close()
    assert not hub.bugs, "\n".join(hub.bugs)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], hub: TestHub) -> None:
        super().__init__(address, _Handler)
        self.hub = hub
        self._lines: set[socket.socket] = set()
        self._servants: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._lines.add(request)
            self._servants.add(threading.current_thread())
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._lines.discard(request)
                self._servants.discard(threading.current_thread())

    def hang_up(self) -> None:
        """Cut every connection and wait for those who served them."""
        with self._lock:
            sockets, threads = list(self._lines), list(self._servants)
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the client or a fault cut."""


class _Cut(Exception):  # noqa: N818 - a fault on purpose
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is inherited
        """Write no log."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        try:
            body = self._body()
        except _Cut:
            self._cut()
            return
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip() or None
        path = url.path
        host, agent = self.headers.get("Host", ""), self.headers.get("User-Agent", "")
        hub.seen.append(Seen(self.command, path, url.query, host, bearer, len(body), agent))
        fault = hub.faults.take(f"{self.command} {path}")
        try:
            self._say(self._act(path, url.query, body, bearer, fault), fault)
        except _Cut:
            self._cut()

    def _act(self, path: str, query: str, body: bytes, bearer: str | None, fault: Fault | None) -> Answer:
        hub = self.server.hub
        if fault is not None and fault.act == "cut":
            raise _Cut
        if fault is not None and fault.act == "stall":
            hub.wait(fault.seconds)
            raise _Cut
        if fault is not None and fault.act == "refuse":
            return refused(Refused(fault.status, fault.code, fault.message, headers=fault.headers))
        try:
            # Storage and the content-addressed store have tokens of their own, in the address or for a short time.
            token = None if path.startswith(("/_storage", "/_cas", "/_lfs/complete")) else hub.store.who(bearer)
            headers = {k.lower(): v for k, v in self.headers.items()}
            asked = parse_qs(query, keep_blank_values=True)
            hub.watch("before", f"{self.command} {path}")
            answer = hub.answer(Request(self.command, path, asked, headers, body, token))
            hub.watch("after", f"{self.command} {path}")
        except Refused as refusal:
            answer = refused(refusal)
        except Exception:  # noqa: BLE001 - reported by `serve`
            hub.bugs.append(f"{self.command} {path}: {traceback.format_exc()}")
            answer = refused(Refused(500, None, "a fault in the test Hub itself"))
        if fault is not None and fault.act == "lose":
            if fault.status == 0:
                raise _Cut
            return refused(Refused(fault.status, fault.code, fault.message, headers=fault.headers))
        return answer

    def _say(self, answer: Answer, fault: Fault | None) -> None:
        body = answer.encoded()
        if fault is not None and fault.act == "flip" and body:
            at = len(body) // 2
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        self.send_response_only(answer.status, WORDS.get(answer.status, ""))
        self.send_header("Date", formatdate(usegmt=True))
        for name, value in answer.headers.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.act == "cut-body":
            self.wfile.write(body[: len(body) // 2])
            raise _Cut
        if fault is not None and fault.act == "slow":
            step = max(1, len(body) // 10)
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                self.server.hub.wait(fault.seconds / 10)
            return
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                found += self.rfile.read(size)
                self.rfile.readline()
                if size == 0:
                    return found
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            raise _Cut  # whoever sent it is gone
        return body

    def _cut(self) -> None:
        """End the connection without a farewell."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)


def spelled(seconds: float) -> str:
    """Return a time as the Hub writes it."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
