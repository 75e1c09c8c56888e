"""Errors of the S3 library and of S3 servers: every one becomes one of ours, with a cause, a fix and an exit code."""

import datetime as dt
import inspect
import socket
import string
import threading
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
import urllib3.exceptions
from botocore import exceptions as boto

from weighbridge.config.load import read_text, remote_settings
from weighbridge.registry import errors
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.s3 import client
from weighbridge.registry.remotes.s3.client import Pace, place_of
from weighbridge.registry.remotes.s3.errors import CLASSES, CODES, translate
from weighbridge.registry.remotes.s3.remote import S3Remote, open_s3
from weighbridge.registry.remotes.table import open_remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.seaweed import Server

URL = "s3://registry/team"
ROOTS = {boto.BotoCoreError, boto.ClientError}
RAISED = sorted(
    {
        kind
        for _, kind in inspect.getmembers(boto, inspect.isclass)
        if issubclass(kind, Exception) and not issubclass(kind, Warning) and kind.__module__ == boto.__name__
    },
    key=lambda kind: kind.__name__,
)


def instance(kind: type[Exception]) -> Exception:
    """Return an error of a class, with its message filled in."""
    if issubclass(kind, boto.ClientError):
        return kind({"Error": {"Code": "X", "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "GetObject")
    text = getattr(kind, "fmt", "")
    values: dict[str, Any] = {field: field for _, field, _, _ in string.Formatter().parse(text) if field}
    if issubclass(kind, boto.WaiterError):
        values["last_response"] = {}
    return kind(**values)


def answered(
    code: str,
    status: int,
    message: str = "words",
    headers: dict[str, str] | None = None,
    operation: str = "GetObject",
) -> boto.ClientError:
    """Return the error that the library makes of a server's answer."""
    about = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return boto.ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": about}, operation)


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_every_class_of_the_library_is_translated(kind: type[Exception], write: bool) -> None:
    """Each class is listed, itself or by an ancestor below the root, and becomes an error with its three parts."""
    if kind not in ROOTS and not issubclass(kind, boto.ClientError):
        assert any(parent in CLASSES for parent in kind.__mro__ if parent not in {*ROOTS, OSError})
    found = translate(instance(kind), "cannot read a", URL, write=write)
    assert isinstance(found, errors.WeighbridgeError)
    assert found.what
    assert found.why
    assert found.fix
    assert found.exit_code in {1, 2, 3, 4, 6}
    assert isinstance(found, errors.BugError) or f"{found.what} {found.why}".count(URL) == 1


@pytest.mark.parametrize("code", sorted(CODES))
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_every_code_of_the_servers_is_translated(code: str, write: bool) -> None:
    """Each code becomes an error that says why; the one place without a fix is what the flow handles by itself."""
    found = translate(answered(code, 400), "cannot store a", URL, write=write)
    assert found.what
    assert found.why
    handled = errors.MissingError | errors.ExistsError
    assert found.fix or isinstance(found, handled) or found.data.get("kind") in {"range", "refused"}
    assert f"{found.what} {found.why}".count(URL) == 1, "which remote, said once"


@pytest.mark.parametrize(
    ("error", "kind", "exit_code"),
    [
        (answered("NoSuchBucket", 404), errors.NotFoundError, 3),
        (answered("NoSuchKey", 404), errors.MissingError, 3),
        (answered("404", 404, operation="HeadObject"), errors.MissingError, 3),
        (answered("404", 404), errors.UsageError, 2),  # not in S3's words
        (answered("AccessDenied", 403), errors.DeniedError, 4),
        (answered("403", 403), errors.DeniedError, 4),
        (answered("InvalidAccessKeyId", 403), errors.DeniedError, 4),
        (answered("SignatureDoesNotMatch", 403), errors.DeniedError, 4),
        (answered("ExpiredToken", 400), errors.DeniedError, 4),
        (answered("RequestTimeTooSkewed", 403), errors.DeniedError, 4),
        (answered("PermanentRedirect", 301), errors.UsageError, 2),
        (answered("301", 301), errors.UsageError, 2),
        (answered("AuthorizationHeaderMalformed", 400), errors.UsageError, 2),
        (answered("SlowDown", 503), errors.RetryableError, 6),
        (answered("429", 429), errors.RetryableError, 6),
        (answered("InternalError", 500), errors.RetryableError, 6),
        (answered("502", 502), errors.RetryableError, 6),
        (answered("PreconditionFailed", 412), errors.ExistsError, 7),
        (answered("XMinioStorageFull", 507), errors.StorageFullError, 1),
        (answered("Whatever", 400), errors.WeighbridgeError, 1),
        (boto.EndpointConnectionError(endpoint_url="http://x"), errors.UnreachableError, 6),
        (boto.NoCredentialsError(), errors.DeniedError, 4),
        (boto.ProfileNotFound(profile="x"), errors.UsageError, 2),
        (boto.ReadTimeoutError(endpoint_url="http://x"), errors.RetryableError, 6),
        (urllib3.exceptions.ProtocolError("cut"), errors.RetryableError, 6),
        (OSError("broken pipe"), errors.RetryableError, 6),
        (RuntimeError("?"), errors.BugError, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_what_becomes_of_it(error: Exception, kind: type[errors.WeighbridgeError], exit_code: int) -> None:
    """The usual failures have the class and the exit code that a person and the daemon go by."""
    found = translate(error, "cannot read a", URL)
    assert type(found) is kind
    assert found.exit_code == exit_code


@pytest.mark.parametrize(
    "error",
    [
        answered("ConditionalRequestConflict", 409),
        answered("OperationAborted", 409),
        answered("InternalError", 500),
        answered("ServiceUnavailable", 503),
        answered("504", 504),
        answered("400", 400),  # not in S3's words: something between us and the store said it
        boto.ReadTimeoutError(endpoint_url="http://x"),
        boto.ConnectionClosedError(endpoint_url="http://x"),
        boto.SSLError(endpoint_url="https://x", error="EOF occurred in violation of protocol"),
    ],
    ids=str,
)
def test_a_write_without_an_answer_is_unknown(error: Exception) -> None:
    """A conflict, trouble over there or a lost answer says nothing about whether a write was carried out."""
    assert type(translate(error, "cannot store a", URL, write=True)) is errors.OutcomeUnknownError


@pytest.mark.parametrize(
    "error",
    [
        answered("SlowDown", 503),
        answered("BadDigest", 400),
        boto.EndpointConnectionError(endpoint_url="http://x"),
        boto.ConnectTimeoutError(endpoint_url="http://x"),
        boto.SSLError(endpoint_url="https://x", error="CERTIFICATE_VERIFY_FAILED"),
    ],
    ids=str,
)
def test_a_write_that_was_refused_or_never_sent_is_known(error: Exception) -> None:
    """What never reached the store, or was refused in its own words, was not carried out."""
    found = translate(error, "cannot store a", URL, write=True)
    assert isinstance(found, errors.UnreachableError)
    assert not isinstance(found, errors.OutcomeUnknownError)


def test_a_wish_to_wait_is_kept() -> None:
    """Retry-After goes on to whoever repeats, and the pace of all requests goes down."""
    found = translate(answered("SlowDown", 503, headers={"retry-after": "7"}), "cannot read a", URL)
    assert found.data["retry_after"] == 7
    assert found.data["slow"] is True


def test_words_of_a_server_reach_no_terminal_unescaped() -> None:
    """Control characters in a server's message are shown, not sent."""
    found = translate(answered("Odd", 400, message="\x1b[2Jgone"), "cannot read a", URL)
    assert "\x1b" not in f"{found.why}"


def test_the_pace_follows_the_store() -> None:
    """Each refusal doubles the pause up to a bound, each success shortens it until there is none."""
    pace = Pace()
    for _ in range(20):
        pace.slow()
    assert pace.pause == Pace.MOST
    for _ in range(40):
        pace.well()
    assert pace.pause == 0


@pytest.mark.parametrize("url", ["s3://", "s3://ab", "s3://Bucket", "s3://a_b/c", "s3://bucket/../x", "s3://-a-/x"])
def test_urls_that_name_no_bucket_are_refused(url: str) -> None:
    """A bucket that no store would take is refused before anything is asked."""
    with pytest.raises(errors.UsageError):
        open_s3(url, None)


def test_settings_reach_the_place(tmp_path: Path) -> None:
    """Region, addressing, authority, profile, encryption and class come from the remote's own settings."""
    ca = tmp_path / "ca.pem"
    ca.write_text("x")
    given = {"endpoint": "https://h", "region": "r", "addressing": "path", "ca": ca, "profile": "p", "writers": "one"}
    place = place_of(remote_settings("team", "s3://bucket/a/b", {**given, "encryption": "aws:kms:k"}))
    assert place[:7] == ("s3://bucket/a/b", "bucket", "a/b/", "https://h", "r", "path", str(ca))
    assert (place.profile, place.encryption, place.one_writer) == ("p", "aws:kms:k", True)
    ca.unlink()
    with pytest.raises(errors.UsageError, match="not there"):
        place_of(remote_settings("team", "s3://bucket", {"ca": ca}))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('region = "x"', "only s3:// remotes have region"),
        ('writers = "one"', "only s3:// remotes have writers"),
        ('encryption = "AES256"', "only s3:// remotes have encryption"),
    ],
)
def test_settings_of_buckets_are_for_buckets(line: str, word: str) -> None:
    """A key that only means something for a bucket is refused for a folder."""
    with pytest.raises(errors.UsageError) as caught:
        read_text(f'[remotes.team]\nurl = "/srv"\n{line}\n', "x", {})
    assert word in f"{caught.value.why} {caught.value.data}"


@pytest.mark.parametrize(
    "line", ['encryption = "aes"', 'encryption = "aws:kms:"', 'storage_class = "GLACIER"', 'addressing = "host"']
)
def test_values_that_no_store_knows_are_refused(line: str) -> None:
    """Encryption, class and addressing are checked before anything is sent; archives can not be pulled from."""
    with pytest.raises(errors.UsageError):
        read_text(f'[remotes.team]\nurl = "s3://bucket"\n{line}\n', "x", {})


# ------------------------------------------------------------------------------------------------ against real servers


def failing(remote: Remote) -> errors.WeighbridgeError:
    """Begin a registry, which must fail; return the error."""
    with pytest.raises(errors.WeighbridgeError) as caught:
        open_registry(remote, create=True)
    remote.close()
    assert caught.value.what
    assert caught.value.why
    assert caught.value.fix
    return caught.value


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


def reach(server: Server, **changes: Any) -> Remote:
    """Open a remote of the server through the table, as the commands do."""
    settings = remote_settings("team", "s3://registry/errors", {"endpoint": server.endpoint, **changes})
    return open_remote(settings.url, settings=settings)


@pytest.mark.usefixtures("_allowed")
def test_a_bucket_that_is_not_there(seaweed: Server) -> None:
    """A wrong bucket is "not found", and never an empty registry."""
    settings = remote_settings("team", "s3://no-such-bucket/x", {"endpoint": seaweed.endpoint})
    remote = open_remote(settings.url, settings=settings)
    assert failing(remote).exit_code == 3
    for look in (lambda: remote.stat("a"), lambda: list(remote.list("")), lambda: remote.sweep(0)):
        with pytest.raises(errors.NotFoundError) as caught:
            look()
        assert type(caught.value) is errors.NotFoundError


@pytest.mark.usefixtures("_allowed")
def test_a_clock_that_is_wrong(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a day off is "denied", and the fix is to set it."""
    real = botocore.auth.get_current_datetime
    day = dt.timedelta(days=1)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: real(*a, **k) + day)
    found = failing(reach(seaweed))
    assert found.exit_code == 4
    assert "clock" in f"{found.why} {found.fix}"


@pytest.mark.usefixtures("_allowed")
def test_silence_is_bounded() -> None:
    """An endpoint that takes connections and never said anything is "unreachable" after the first timeout, at once."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", "registry")
        remote = S3Remote(server.place("x", patience=0.2))
        with pytest.raises(errors.UnreachableError) as caught:
            remote.read("a")
        assert "no answer came within 0.2 s" in f"{caught.value.why}"
        assert remote.link.counts == {"get_object": 1}
        remote.close()


def test_requests_that_hang_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request that is given up keeps a thread until it ends by itself: beside so many no other is begun."""
    servers.credentials(monkeypatch)
    monkeypatch.setattr(client, "HANGING_MAX", 2)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", "registry").place("x", patience=0.2)
        remote = S3Remote(place._replace(connect_timeout=60.0))
        told = []
        for _ in range(4):
            with pytest.raises(errors.UnreachableError) as caught:
                remote.read("a")
            told.append(f"{caught.value.why}")
        hanging = [thread for thread in set(threading.enumerate()) - before if thread.name == "s3-first"]
        assert ["earlier requests still hang" in why for why in told] == [False, False, True, True], told
        assert len(hanging) == 2
    for thread in hanging:
        thread.join(30)
    remote.close()
