"""Over plain http the checksum that goes along with a large body is also what is signed; nothing is hashed for it."""

import hashlib
from base64 import b64encode

import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from weighbridge.registry import errors
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.signing import LARGE, KnownPayload
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.proxy import Proxy
from weighbridge_testlib.seaweed import Server

OTHER = hashlib.sha256(b"other bytes").digest()


def signed(url: str, body: bytes, checksum: bytes | None) -> str:
    """Return the hash that a request with this body and this checksum is signed with."""
    headers = {"Content-MD5": "x"} if checksum is None else {"x-amz-checksum-sha256": b64encode(checksum).decode()}
    request = AWSRequest("PUT", url, headers=headers, data=body)
    request.context["timestamp"] = "20260101T000000Z"
    request.context["has_streaming_input"] = True
    if checksum is not None:
        request.context["checksum"] = {"request_algorithm": {"in": "header", "name": "x-amz-checksum-sha256"}}
    KnownPayload(Credentials("key", "secret"), "s3", "us-east-1").add_auth(request)
    return str(request.headers["X-Amz-Content-SHA256"])


def test_what_is_signed() -> None:
    """The given sha256 of a large body is signed; a small one's is computed, and over TLS none is."""
    large, small = bytes(LARGE), bytes(LARGE - 1)
    assert signed("http://store/b/k", large, OTHER) == OTHER.hex()
    assert signed("http://store/b/k", small, OTHER) == hashlib.sha256(small).hexdigest()
    assert signed("http://store/b/k", large, None) == hashlib.sha256(large).hexdigest()
    assert signed("https://store/b/k", large, OTHER) == "UNSIGNED-PAYLOAD"


def test_a_store_refuses_what_does_not_fit_its_checksum(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body that is not what its checksum says is signed as if it were, and refused by the store."""
    servers.credentials(monkeypatch)
    with Proxy(seaweed.endpoint) as proxy:
        link = Connection(seaweed.place("signing", endpoint=proxy.endpoint))
        body, key = bytearray(LARGE), link.key("k")
        for digest in (OTHER, hashlib.sha256(body).digest()):
            refused = None
            try:
                link.ask("put_object", "put", Key=key, Body=body, ChecksumSHA256=b64encode(digest).decode())
            except errors.WeighbridgeError as error:
                refused = error
            assert (refused is None) == (digest != OTHER)
            assert {request.header("x-amz-content-sha256") for request in proxy.requests} == {digest.hex()}
            proxy.requests.clear()
        assert link.ask("head_object", "look", Key=key)["ContentLength"] == LARGE
        link.close()
