"""Connections that do not come about, TLS that is not accepted, and endpoints whose first words are none of HTTP."""

import http.client
import re
from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from botocore import exceptions as boto

from weighbridge.registry.refs import shown


class Rule(NamedTuple):
    """What a class or a code means: our kind of error, its cause in words (None: as the server says), what to do."""

    kind: str
    why: str | None
    fix: str | None


AGAIN: Final = "repeat; where it goes on, ask who runs the store"
NETWORK: Final = "check the address, the network and the proxy (HTTPS_PROXY), then repeat"
PORT: Final = "correct the endpoint of this remote: host, port, and http:// or https://"
SILENT: Final = (
    "check the endpoint, its port, the network and the proxy (HTTPS_PROXY), then repeat; "
    "a store that is only slow gets more time by patience = in this remote"
)
_CA: Final = "name the store's certificate authority: ca = /path.pem, or AWS_CA_BUNDLE"
_NO_FILE: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_NO_PEM: Final = ("NO_CERTIFICATE_OR_CRL_FOUND", "PEM lib", "NO_START_LINE", "[X509")
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")
_OTHER_NAME: Final = "doesn't match"
_HANDSHAKE: Final = (_OTHER_NAME, "CERTIFICATE_VERIFY_FAILED", "certificate", "ALERT", *_NO_TLS)
_REASON: Final = re.compile(r"(?:certificate verify failed: |(?=hostname '))(.+?)\.?(?: \(_ssl|$)")


def plain(error: BaseException) -> str:
    """Return an error's text on one line, without control characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return shown(text[:300])


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    below: BaseException | None = error
    while below is not None:
        yield below
        below = below.__cause__ or below.__context__


def no_connection(error: boto.EndpointConnectionError) -> str:
    """Return why no connection came about: to which address, and what the system says; no path and no password."""
    address = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    host = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
    said = next((e.strerror for e in chain(error) if isinstance(e, OSError) and e.strerror), None)
    return f"{shown(host)}: {said or 'no connection comes about'}"


def tls(error: boto.SSLError, *, first: bool) -> Rule:
    """Judge what broke an encrypted connection; `first`: the endpoint never answered anything before."""
    text = plain(error)
    file = next((e for e in chain(error) if isinstance(e, _NO_FILE)), None)
    if file is not None or any(word in text for word in _NO_PEM):
        said = "it holds no certificate" if file is None else str(file.strerror)
        return Rule("usage", f"the file of certificate authorities (ca, AWS_CA_BUNDLE) is not usable: {said}", _CA)
    if first and any(word in text for word in _NO_TLS):
        return Rule("tls", "what answers there does not speak TLS", PORT)
    if not any(word in text for word in _HANDSHAKE):
        return Rule("lost", f"the encrypted connection broke: {text}", AGAIN)
    found = _REASON.search(text)
    reason = found[1] if found else text
    why = f"its certificate is not accepted: {reason}" if found else f"its TLS is not accepted: {reason}"
    if "mismatch" in reason or _OTHER_NAME in reason:
        return Rule("tls", why, "write endpoint with a name that stands in the certificate")
    if "expired" in reason or "not yet valid" in reason:
        return Rule("tls", why, "let the store's certificate be renewed, or set this machine's clock")
    return Rule("tls", why, _CA)


def stranger(error: BaseException) -> Rule | None:
    """Judge what an endpoint did that never answered before; None where nothing can be told from that."""
    for below in chain(error):
        if isinstance(below, http.client.BadStatusLine) and not isinstance(below, http.client.RemoteDisconnected):
            return Rule("foreign", f"what answers there does not speak HTTP: {plain(below)}", PORT)
    if isinstance(error, boto.ReadTimeoutError):
        return Rule("unreachable", "it takes the connection and says nothing", SILENT)
    return None
