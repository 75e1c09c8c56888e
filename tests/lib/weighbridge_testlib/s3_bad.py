"""Remotes on S3 that cannot be used, and how a command has to end on each: the cases of tests and proof alike.

with World(server, folder) as world:
    for case in CASES: case.remote(world) gives the lines of [remotes.team], case.env what the environment has beside

The bad servers are sockets of this process; all listen on loopback and last until the world ends.
"""

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from weighbridge.registry.manifest import canonical
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib.proxy import Fault, Plan, Proxy, Request
from weighbridge_testlib.seaweed import ACCESS, SECRET, Server, certificates, ports
from weighbridge_testlib.shelf import REGISTRY, Shelf

NAME: Final = "medical-sft"
XML: Final = {"Content-Type": "application/xml"}
HTML: Final = {"Content-Type": "text/html"}
COMMANDS: Final = ("ls", "show", "pull", "push", "tag", "verify", "withdraw", "mirror", "doctor")


class World:
    """A sound server with a registry below `bad`, and whatever else stands at an address."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._client = server.client()  # making one costs more than asking
        self._stack = ExitStack()
        self._made: dict[Any, str] = {}

    def __enter__(self) -> Self:
        """Fill the registry with one version."""
        remote = S3Remote(self.server.place("bad"))
        Shelf(remote).publish(NAME, step=280)
        for prefix, changes in (("newer-writer", {"min_writer": 2}), ("newer-reader", {"min_reader": 2})):
            newer = S3Remote(self.server.place(prefix))
            shelf = Shelf(newer)
            shelf.publish(NAME, step=280)
            newer.delete("weighbridge.json")
            document = {"schema": "weighbridge/registry/1", "registry": REGISTRY, "format": 2, "mode": "shared"}
            newer.create("weighbridge.json", canonical({"min_reader": 1, "min_writer": 2, **document, **changes}))
            newer.close()
        remote.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every listener."""
        self._client.close()
        self._stack.close()

    def remote(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of [remotes.team]; those of the sound registry where none are given."""
        return {"url": f"s3://{self.server.bucket}/bad", "endpoint": self.server.endpoint} | keys

    def bucket(self) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Return what lies in the bucket, by whomever: objects with their ETags, unfinished uploads with their ids."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.server.bucket)
        found = {(entry["Key"], entry["ETag"]) for page in pages for entry in page.get("Contents", ())}
        begun = self._client.list_multipart_uploads(Bucket=self.server.bucket).get("Uploads", ())
        return found, {(upload["Key"], upload["UploadId"]) for upload in begun}

    def once(self, key: Any, make: Callable[[], str]) -> str:
        """Return the address that `make` gave for this key before, else that it gives now."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def site(
        self, status: int, headers: Mapping[str, str], body: bytes, *, tls: tuple[Path, Path] | None = None
    ) -> str:
        """Return the address of a web server that answers everything in one way."""
        return self.once((status, body, tls), lambda: self._site(status, headers, body, tls))

    def _site(self, status: int, headers: Mapping[str, str], body: bytes, tls: tuple[Path, Path] | None) -> str:
        server = Quiet(("127.0.0.1", 0), Page)
        server.answer = (status, headers, body)  # type: ignore[attr-defined]
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        self._stack.callback(server.server_close)
        self._stack.callback(thread.join)
        self._stack.callback(server.shutdown)
        return f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"

    def error(self, status: int, code: str, more: str = "", headers: Mapping[str, str] | None = None) -> str:
        """Return the address of a server that answers with an error in S3's words."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message>{more}</Error>"
        return self.site(status, {**XML, **(headers or {})}, body.encode())

    def listener(self, words: bytes | None = None, *, hole: bool = False, drip: bool = False) -> str:
        """Return host and port of somebody who takes connections and says a few words, or nothing.

        hole: connections do not even come about. drip: the words come over and over, four times a second.
        """
        return self.once((words, hole, drip), lambda: self._listener(words, hole=hole, drip=drip))

    def _listener(self, words: bytes | None, *, hole: bool, drip: bool) -> str:
        listening = self._stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0 if hole else 128)
        port = int(listening.getsockname()[1])
        if hole:  # the queue is full: whoever comes now gets no answer to his first packet
            for _ in range(2):
                waiting = self._stack.enter_context(socket.socket())
                waiting.setblocking(False)
                with suppress(BlockingIOError):
                    waiting.connect(("127.0.0.1", port))
        if words is not None:
            ended = threading.Event()
            thread = threading.Thread(target=_talk, args=(listening, words, ended), kwargs={"drip": drip})
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(ended.set)
            listening.settimeout(0.05)
        return f"127.0.0.1:{port}"

    def behind(self, name: str, plan: Plan) -> str:
        """Return the address of a proxy before the sound server."""
        return self.once(name, lambda: self._stack.enter_context(Proxy(self.server.endpoint, plan)).endpoint)

    def file(self, name: str, text: str) -> Path:
        """Return a file with this text."""
        path = self.folder / name
        path.write_text(text)
        return path

    def tls(self, name: str, host: str, until: dt.timedelta = dt.timedelta(days=1)) -> tuple[str, Path]:
        """Return the address of an https server with a certificate for a host, and its authority."""
        folder = self.folder / f"tls-{name}"
        if not folder.is_dir():
            folder.mkdir()
            certificates(folder, host, until=until)
        pair = (folder / "cert.pem", folder / "key.pem")
        return self.site(404, XML, b"", tls=pair), folder / "ca.pem"


class Quiet(ThreadingHTTPServer):
    """Says nothing of clients that leave: they are what is tested."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


class Page(BaseHTTPRequestHandler):
    """Answers everything in the one way of its server."""

    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status, headers, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the names are those of the library

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _talk(listening: socket.socket, words: bytes, ended: threading.Event, *, drip: bool) -> None:
    """Say the words to whoever comes; with `drip` again and again for as long as he listens."""
    held: list[socket.socket] = []
    while not ended.is_set():
        with suppress(OSError):
            held.append(listening.accept()[0])
            held[-1].sendall(words)
        if drip:
            for one in held:
                with suppress(OSError):
                    one.sendall(words)
            ended.wait(0.25)
    for one in held:
        one.close()


class Case(NamedTuple):
    """One remote that cannot be used: its keys, what the environment has, how commands end, and words of the cause.

    `codes` are those of commands that end otherwise than the others. `soon`: the command only ends because its patience
    does. `fix`: words of what to do.
    """

    title: str
    remote: Callable[[World], dict[str, Any]]
    code: int
    why: str
    fix: str = ""
    env: Mapping[str, str | None] = {}
    codes: Mapping[str, int | None] = {}
    soon: bool = False


def _at(make: Callable[[World], str]) -> Callable[[World], dict[str, Any]]:
    return lambda world: world.remote(endpoint=make(world))


def _url(url: str) -> Callable[[World], dict[str, Any]]:
    return lambda world: world.remote(url=url)


def _error(
    status: int, code: str, more: str = "", headers: Mapping[str, str] | None = None
) -> Callable[[World], dict[str, Any]]:
    return _at(lambda world: world.error(status, code, more, headers))


def _page(status: int, headers: Mapping[str, str], body: bytes) -> Callable[[World], dict[str, Any]]:
    return _at(lambda world: world.site(status, headers, body))


def _ca(make: Callable[[World], Path]) -> Callable[[World], dict[str, Any]]:
    return lambda world: world.remote(endpoint=world.server.secure, ca=make(world))


def _tls(name: str, host: str, until: dt.timedelta = dt.timedelta(days=1)) -> Callable[[World], dict[str, Any]]:
    return lambda world: (
        dict(zip(("endpoint", "ca"), world.tls(name, host, until), strict=True)) | {"url": world.remote()["url"]}
    )


def _plan(name: str, plan: Plan) -> Callable[[World], dict[str, Any]]:
    return _at(lambda world: world.behind(name, plan))


def writes(request: Request) -> bool:
    """Tell whether a request changes anything."""
    return request.method not in {"GET", "HEAD"}


def lists(request: Request) -> bool:
    """Tell whether a request lists."""
    return "list-type=2" in request.target


def _weights(request: Request) -> bool:
    return writes(request) and "/v" in request.target and "safetensors" in request.target


def _decides(request: Request) -> bool:
    return writes(request) and request.target.partition("?")[0].endswith("/manifest.json")


_READS: Final = {"ls": 0, "show": 0, "pull": 0, "verify": 0, "doctor": 0}
_LATE: Final = _READS | {"tag": None, "withdraw": None}  # nothing is in their way: not tried, as the registry is shared
_EU: Final = "<Region>eu-central-1</Region>"
_ENDPOINT: Final = "<Endpoint>registry.s3.eu-central-1.amazonaws.com</Endpoint>"
_IN_EU: Final = {"x-amz-bucket-region": "eu-central-1"}
_NO_S3: Final = "not S3|not in the words of S3|points elsewhere"
_NO_KEYS: Final = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
_UNTRUSTED: Final = "certificate is not accepted"

CASES: Final = (
    # Where.
    Case(
        "a bucket that is not there", _url("s3://no-such-bucket/team"), 3, "no bucket of that name", "correct the URL"
    ),
    Case("a name that no bucket has", _url("s3://No_Bucket/team"), 2, "lower-case letters", "s3://bucket/prefix"),
    Case(
        "a bucket in the endpoint too",
        _at(lambda w: f"https://{w.server.bucket}.s3.eu-central-1.amazonaws.com"),
        2,
        "stands in the URL",
        "leave registry out",
    ),
    Case(
        "a path in the endpoint",
        _at(lambda w: f"{w.server.endpoint}/minio/{w.server.bucket}"),
        3,
        "no bucket",
        "leave registry out of endpoint",
    ),
    Case(
        "an endpoint without a scheme",
        _at(lambda w: w.server.endpoint.removeprefix("http://")),
        2,
        "endpoint",
        "https://",
    ),
    Case("an endpoint whose port is none", _at(lambda _: "http://127.0.0.1:port"), 2, "", "https://host"),
    Case("a port where nobody listens", _at(lambda _: f"http://127.0.0.1:{ports(1)[0]}"), 6, "refused", "address"),
    Case("a host that is not there", _at(lambda _: "http://no-such-host.invalid"), 6, "no-such-host", "address"),
    Case("another region, as AWS says it", _error(400, "AuthorizationHeaderMalformed", _EU), 2, "", '"eu-central-1"'),
    Case(
        "another region, redirected", _error(301, "PermanentRedirect", _ENDPOINT, _IN_EU), 2, "region", '"eu-central-1"'
    ),
    Case(
        "another region, for now",
        _error(307, "TemporaryRedirect", _ENDPOINT, _IN_EU | {"Location": "http://127.0.0.1:9/x"}),
        2,
        "region",
        '"eu-central-1"',
    ),
    # In whose name.
    Case("a profile that is not there", lambda w: w.remote(profile="nowhere"), 2, "nowhere", "profile"),
    Case("no credentials", lambda w: w.remote(), 4, "no credentials", "AWS_ACCESS_KEY_ID", _NO_KEYS),
    Case(
        "a wrong secret",
        lambda w: w.remote(),
        4,
        "secret key is wrong",
        "credentials",
        {"AWS_SECRET_ACCESS_KEY": "x" * 20},
    ),
    Case(
        "an unknown key",
        lambda w: w.remote(),
        4,
        "does not know this access key",
        "credentials",
        {"AWS_ACCESS_KEY_ID": "nobody"},
    ),
    Case("a session that has expired", _error(400, "ExpiredToken"), 4, "session has expired", "log in again"),
    Case("a token that is not valid", _error(403, "InvalidToken"), 4, "token is not valid", "log in again"),
    Case("clocks that differ", _error(403, "RequestTimeTooSkewed"), 4, "clocks", "set this machine's clock"),
    Case("everything denied", _plan("all", lambda _: Fault("deny")), 4, "Access Denied", "docs/policies"),
    Case(
        "listing denied",
        _plan("list", lambda r: Fault("deny") if lists(r) else None),
        4,
        "Access Denied",
        "docs/policies",
    ),
    Case(
        "writing denied",
        _plan("write", lambda r: Fault("deny") if writes(r) else None),
        4,
        "Access Denied",
        "docs/policies",
        codes=_READS,
    ),
    Case(
        "weights denied",
        _plan("weights", lambda r: Fault("deny") if _weights(r) else None),
        4,
        "Access Denied",
        "",
        codes=_LATE,
    ),
    Case(
        "a session that ends before the decision",
        _plan("decides", lambda r: Fault("expire") if _decides(r) else None),
        4,
        "session has expired",
        "log in again",
        codes=_LATE,
    ),
    # What is no S3.
    Case("a page, 200", _page(200, HTML, b"<html>Welcome</html>"), 2, _NO_S3, "endpoint"),
    Case("a page, 403", _page(403, HTML, b"<html>Forbidden</html>"), 4, "refuses it", ""),
    Case("a page, 404", _page(404, HTML, b"<html>no</html>"), 2, _NO_S3, "endpoint"),
    Case("a page, 405", _page(405, HTML, b"<html>no</html>"), 2, _NO_S3, "endpoint"),
    Case("a page, 503", _page(503, HTML, b"<html>down</html>"), 6, "503", "", soon=True),
    Case(
        "a login page",
        _page(302, HTML | {"Location": "https://login.example.org/"}, b"<html>go</html>"),
        2,
        _NO_S3,
        "endpoint",
    ),
    Case("JSON, 200", _page(200, {"Content-Type": "application/json"}, b'{"ok":true}'), 2, _NO_S3, "endpoint"),
    Case("JSON, 404", _page(404, {"Content-Type": "application/json"}, b'{"detail":"no"}'), 2, _NO_S3, "endpoint"),
    Case("nothing, 200", _page(200, {}, b""), 2, _NO_S3, "endpoint"),
    Case(
        "SSH",
        _at(lambda w: f"http://{w.listener(b'SSH-2.0-OpenSSH_9.2' + bytes((13, 10)))}"),
        2,
        "does not speak HTTP",
        "port",
    ),
    # Who says nothing.
    Case("silence", _at(lambda w: f"http://{w.listener()}"), 6, "answer|says nothing", "patience", soon=True),
    Case(
        "silence where TLS is expected",
        _at(lambda w: f"https://{w.listener()}"),
        6,
        "answer|says nothing",
        "patience",
        soon=True,
    ),
    Case(
        "packets that are dropped", _at(lambda w: f"http://{w.listener(hole=True)}"), 6, "answer", "network", soon=True
    ),
    Case(
        "a byte now and then",
        _at(lambda w: f"http://{w.listener(b'H', drip=True)}"),
        6,
        "answer",
        "patience",
        soon=True,
    ),
    Case("closed without a word", _plan("closed", lambda _: Fault("refuse")), 6, "closed", "endpoint", soon=True),
    # TLS.
    Case("an authority that nobody knows", _at(lambda w: str(w.server.secure)), 6, _UNTRUSTED, "ca = "),
    Case("another authority", _ca(lambda w: w.tls("other", "127.0.0.1")[1]), 6, _UNTRUSTED, "ca = "),
    Case(
        "a certificate for another host",
        _tls("mismatch", "s3.example.org"),
        6,
        "doesn't match|mismatch",
        "name that stands",
    ),
    Case(
        "a certificate that has expired", _tls("expired", "127.0.0.1", dt.timedelta(days=-1)), 6, "expired", "renewed"
    ),
    Case(
        "an authority that is no certificate",
        _ca(lambda w: w.file("no.pem", "not a pem")),
        2,
        "no certificate",
        "ca = ",
    ),
    Case("an authority that is not there", _ca(lambda w: w.folder / "absent.pem"), 2, "no file", "ca"),
    Case("an authority that is a folder", _ca(lambda w: w.folder), 2, "no file", "ca"),
    Case(
        "https where http is spoken",
        _at(lambda w: w.server.endpoint.replace("http:", "https:")),
        6,
        "does not speak TLS",
        "http://",
    ),
    Case(
        "http where https is spoken",
        _at(lambda w: str(w.server.secure).replace("https:", "http:")),
        6,
        "broke off|closed",
        "https://",
        soon=True,
    ),
    # Of a newer version.
    Case(
        "a registry that only a newer version writes",
        _url("s3://registry/newer-writer"),
        2,
        "format 2 is needed",
        "upgrade",
        codes=_READS,
    ),
    Case(
        "a registry that only a newer version reads",
        _url("s3://registry/newer-reader"),
        2,
        "format 2 is needed",
        "upgrade",
    ),
)

KEYS: Final = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}


def written(folder: Path, keys: Mapping[str, Any], patience: str | None) -> Path:
    """Write a configuration with one remote and a second one in a folder, and return it."""
    given = dict(keys) | ({"patience": patience} if patience else {})
    lines = [f'{key} = "{value}"' for key, value in given.items()]
    config = folder / "weighbridge.toml"
    config.write_text(
        f'[daemon]\nsocket = "{folder}/s"\nstate = "{folder}/state"\n[remotes.team]\n' + "\n".join(lines) + "\n"
    )
    config.chmod(0o600)
    return config


def arguments(command: str, model: Path, out: Path, other: Path) -> list[str]:
    """Return the words of a command about the remote `team`; a model is published under the name of its folder."""
    return {
        "ls": ["ls"],
        "show": ["show", f"{NAME}@v1"],
        "pull": ["pull", f"{NAME}@v1", str(out)],
        "push": ["push", str(model), "--name", model.name],
        "tag": ["tag", f"{NAME}@v1", "prod"],
        "verify": ["verify", f"{NAME}@v1", "--remote", "team"],
        "withdraw": ["withdraw", f"{NAME}@v1", "--reason", "a trial"],
        "mirror": ["mirror", "elsewhere", "--remote", str(other), "--to", "team"],
        "doctor": ["doctor", "team"],
    }[command]
