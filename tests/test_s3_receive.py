"""An answer is received straight into the memory where it is to lie, and told apart from one that broke."""

import gzip
import io
import socket
import threading
from collections.abc import Iterator

import pytest
import urllib3
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody

from weighbridge.registry.remotes.s3.receive import receive

BODY = bytes(range(256)) * 40
ANSWERS = {
    "/whole": (BODY, len(BODY), ""),
    "/cut": (BODY[:99], len(BODY), ""),
    "/packed": (gzip.compress(BODY), len(gzip.compress(BODY)), "Content-Encoding: gzip\r\n"),
}
"""What is sent of a path, the length that is said, and another header."""


class Reset(io.BytesIO):
    """What reading a connection is that the other side reset."""

    def readinto(self, buffer: object) -> int:  # noqa: ARG002 - a failing part
        """Fail as the system does."""
        raise ConnectionResetError(104, "Connection reset by peer")


@pytest.fixture
def pool() -> Iterator[urllib3.HTTPConnectionPool]:
    """Serve the answers on loopback; one that is cut ends its connection, `/stall` says nothing more."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked:
            while line := asked.readline():
                while asked.readline().strip():
                    pass
                path = line.split()[1].decode()
                body, length, header = ANSWERS.get(path, (b"", 9, ""))
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{header}\r\n".encode() + body)
                if path == "/cut":
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with urllib3.HTTPConnectionPool("127.0.0.1", listening.getsockname()[1], timeout=0.3, retries=False) as pool:
        yield pool
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def ask(pool: urllib3.HTTPConnectionPool, path: str) -> StreamingBody:
    """Ask for a path and return the body as the library gives it."""
    answer = pool.request("GET", path, preload_content=False)
    return StreamingBody(answer, int(answer.headers["content-length"]))


def test_a_whole_answer_leaves_its_connection_to_the_next(pool: urllib3.HTTPConnectionPool) -> None:
    """Bytes come whole, at once or in pieces, and the second answer comes over the connection of the first."""
    for pieces in (1, 4):
        body, window = ask(pool, "/whole"), bytearray(len(BODY))
        step = len(BODY) // pieces
        for start in range(0, len(BODY), step):
            assert receive(body, memoryview(window)[start : start + step]) == step
        assert window == BODY
        body.close()
    assert pool.num_connections == 1


def test_a_packed_answer_is_unpacked(pool: urllib3.HTTPConnectionPool) -> None:
    """An answer with an encoding of its own is read by the library, which knows it."""
    window = bytearray(len(BODY))
    assert receive(ask(pool, "/packed"), memoryview(window)) == len(BODY)
    assert window == BODY


def test_what_breaks_is_told_as_the_library_tells_it(pool: urllib3.HTTPConnectionPool) -> None:
    """Of an answer that ends early less comes; one that stalls or whose connection is reset is the library's error."""
    body, window = ask(pool, "/cut"), memoryview(bytearray(len(BODY)))
    assert receive(body, window) == 99
    body.close()
    with pytest.raises(ReadTimeoutError):
        receive(ask(pool, "/stall"), window)
    body = ask(pool, "/stall")
    body._raw_stream._fp.fp = Reset()
    with pytest.raises(ResponseStreamingError):
        receive(body, window)
