"""Every exception of the Hub's client and of the HTTP library beneath becomes one of ours, with a cause and a fix."""

import builtins
import importlib
import inspect
import pkgutil
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import httpx2
import huggingface_hub
import huggingface_hub.errors
import pytest
from huggingface_hub.utils import get_session

from weighbridge.registry import errors
from weighbridge.registry.remotes.hub import client
from weighbridge.registry.remotes.hub.client import AGAIN, TRIES, Line
from weighbridge.registry.remotes.hub.errors import RULES, of_response, speaking, translate
from weighbridge.registry.remotes.hub.preflight import refusal
from weighbridge.registry.remotes.hub.remote import HubRemote
from weighbridge.registry.remotes.wrappers import Retrying

ROOTS = {Exception, BaseException, object, OSError, ValueError, RuntimeError, ConnectionError, TimeoutError}
WITH_ANSWER = (huggingface_hub.errors.HfHubHTTPError, httpx2.HTTPStatusError)


def classes() -> Iterator[type[BaseException]]:
    """Yield every exception class that the two libraries define."""
    found: set[type[BaseException]] = set()
    for package in (httpx2, huggingface_hub):
        names = [package.__name__, f"{package.__name__}.errors"]
        names += [f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__)]
        names += [f"{package.__name__}.utils.{n}" for n in ("_http", "_xet", "_runtime", "_validators", "_hf_uris")]
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            for _, value in inspect.getmembers(module, inspect.isclass):
                ours = value.__module__.split(".")[0] in {"httpx2", "huggingface_hub"}
                if ours and issubclass(value, BaseException) and not issubclass(value, Warning):
                    found.add(value)
    yield from sorted(found, key=lambda kind: kind.__name__)


def answer(status: int, headers: dict[str, str] | None = None, body: Any = None) -> httpx2.Response:
    """Return an answer of the Hub."""
    return httpx2.Response(
        status, headers=headers, json=body, request=httpx2.Request("POST", "https://hub.example.org/api/models/a/m")
    )


def test_the_libraries_have_the_exceptions_that_were_thought_of() -> None:
    """The walk finds what there is; a new release that brings more is noticed by the test below."""
    names = {kind.__name__ for kind in classes()}
    assert {"GatedRepoError", "OfflineModeIsEnabled", "XetDownloadError", "ReadTimeout", "RemoteProtocolError"} <= names
    assert len(names) > 60


def test_the_walk_leaves_none_out() -> None:
    """Every class in the libraries' sources that derives from an exception was walked, or one above it has its rule."""
    pattern = re.compile(r"^ *class (\w+)\(([^)]*)\)", re.MULTILINE)
    bases: dict[str, set[str]] = {}
    homes: dict[str, str] = {}
    for package in (httpx2, huggingface_hub):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            for match in pattern.finditer(path.read_text("utf-8")):
                bases.setdefault(match[1], set()).update(re.findall(r"\w+", match[2]))
                homes[match[1]] = ".".join((package.__name__, *path.relative_to(root).with_suffix("").parts))
    known = {name for name, value in vars(builtins).items() if inspect.isclass(value) and issubclass(value, Exception)}
    found: set[str] = set()
    while fresh := {name for name, above in bases.items() if above & (known | found) and name not in found}:
        found |= fresh
    missed = {n for n in found - {kind.__name__ for kind in classes()} if not n.endswith("Warning")}
    assert len(found) > 80
    for name in missed:
        try:
            kind = getattr(importlib.import_module(homes[name]), name)
        except ImportError:
            continue  # it needs a library that is not there, so nobody can raise it
        assert [parent for parent in kind.__mro__ if parent in RULES], f"{homes[name]}.{name} has no rule"


@pytest.mark.parametrize("kind", list(classes()), ids=lambda kind: kind.__name__)
def test_every_exception_is_translated(kind: type[BaseException]) -> None:
    """Each class, or one above it that is no builtin, has its rule; those that carry an answer are told by it."""
    ruled = [parent for parent in kind.__mro__ if parent in RULES]
    public = kind.__name__ in dir(huggingface_hub.errors) or kind.__name__ in dir(httpx2)
    assert ruled or not public, f"{kind.__name__} has no rule"
    assert not ROOTS.intersection(ruled[:1])
    if issubclass(kind, WITH_ANSWER):
        return
    made = kind.__new__(kind)
    made.args = ("something happened",)
    for writes in (False, True):
        told = translate(made, "cannot do it", writes=writes)
        assert told.what == "cannot do it"
        assert told.why
        harmless = isinstance(made, (httpx2.StreamError, httpx2.CookieConflict, huggingface_hub.errors.DryRunError))
        assert isinstance(told, errors.BugError) == harmless


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (401, {}, {"error": "Invalid username or password."}, errors.DeniedError),
        (401, {"X-Error-Code": "RepoNotFound"}, None, errors.NotFoundError),
        (404, {"X-Error-Code": "RevisionNotFound"}, None, errors.MissingError),
        (404, {"X-Error-Code": "EntryNotFound"}, None, errors.MissingError),
        (403, {"X-Error-Code": "GatedRepo"}, None, errors.DeniedError),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, None, errors.DeniedError),
        (403, {}, {"error": "Private repository storage limit reached"}, errors.StorageFullError),
        (403, {"X-Error-Message": "None"}, None, errors.DeniedError),
        (402, {}, None, errors.StorageFullError),
        (404, {}, None, errors.NotFoundError),
        (409, {}, {"error": "exists"}, errors.ExistsError),
        (412, {}, {"error": "A commit has happened since."}, errors.StaleHeadError),
        (400, {}, {"error": ["bad", "worse"]}, errors.RefusedError),
        (413, {}, None, errors.RefusedError),
        (422, {}, {"errors": [{"message": "no"}]}, errors.RefusedError),
        (451, {}, None, errors.DeniedError),
        (507, {}, None, errors.StorageFullError),
        (418, {}, None, errors.WeighbridgeError),
    ],
)
def test_every_status_says_what_it_means(
    status: int, headers: dict[str, str], body: Any, kind: type[errors.WeighbridgeError]
) -> None:
    """The Hub's code comes first, then its status and text; its words stand in the cause, and there is a fix."""
    told = of_response(answer(status, headers, body), "cannot do it")
    assert type(told) is kind
    assert told.data["status"] == status
    if isinstance(body, dict):
        words = next(iter(body.values()))
        assert (words if isinstance(words, str) else "bad; worse" if "error" in body else "no") in (told.why or "")
    assert told.fix or kind in {errors.MissingError, errors.WeighbridgeError}


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_a_lost_answer_to_a_write_is_not_a_failure(status: int) -> None:
    """A 5xx on a read is worth another try; on a write nobody knows, and the caller has to look."""
    assert type(of_response(answer(status), "x")) is errors.RetryableError
    assert type(of_response(answer(status), "x", writes=True)) is errors.OutcomeUnknownError
    for lost in (httpx2.ReadTimeout("t"), httpx2.RemoteProtocolError("cut"), httpx2.ReadError("r")):
        assert type(translate(lost, "x", writes=True)) is errors.OutcomeUnknownError
        assert type(translate(lost, "x")) is errors.RetryableError
    assert type(translate(httpx2.ConnectError("refused"), "x", writes=True)) is errors.RetryableError


def test_a_hub_that_is_out_of_reach_is_told_soon(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A read that finds no connection is repeated by us alone, a few times within seconds; the library says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens there once it is closed
    slept: list[float] = []
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    line = Line(f"http://127.0.0.1:{port}", environ={}, sleep=pauses.append)
    for what in (lambda: list(line.api.list_models(author="a")), lambda: line.call("GET", "/api/models")):
        pauses.clear()
        with pytest.raises(errors.RetryableError, match=f"at 127.0.0.1:{port}"):
            line.ask("cannot look", what)
        assert len(pauses) == TRIES - 1
        assert sum(pauses) < 10
    pauses.clear()
    wrapped = Retrying(HubRemote("acme", endpoint=line.endpoint, environ={}, sleep=pauses.append), sleep=pauses.append)
    with pytest.raises(errors.RetryableError):
        wrapped.read("models/m/v1/manifest.json")
    assert len(pauses) == TRIES - 1, "what was repeated is not repeated again by whoever holds the remote"
    assert slept == []
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_answered_before_is_waited_for() -> None:
    """An outage of half a minute fails no command that was let through before; a longer one is waited out once."""
    pauses: list[float] = []
    line = Line("http://hub.example:1", environ={}, sleep=pauses.append)
    away = True

    def look() -> str:
        if away and sum(pauses) < back:
            raise errors.RetryableError("away")
        return "seen"

    back = 30.0
    with pytest.raises(errors.RetryableError):
        line.ask("cannot look", look)
    assert len(pauses) == TRIES - 1, "a Hub that never answered is told soon"
    away = False
    assert line.ask("cannot look", look) == "seen"
    away = True
    pauses.clear()
    assert line.ask("cannot look", look) == "seen"
    assert max(pauses) <= 10
    back = 1e6
    pauses.clear()
    wrapped = Retrying(HubRemote("acme", endpoint=line.endpoint, environ={}), sleep=pauses.append)
    with pytest.raises(errors.RetryableError):
        wrapped._repeat(lambda: line.ask("cannot look", look))
    assert len(pauses) == AGAIN - 1, "not repeated again by whoever holds the remote"
    assert 30 < sum(pauses) < 60
    pauses.clear()
    with pytest.raises(errors.RetryableError):
        line.ask("cannot look", look)
    assert len(pauses) == TRIES - 1


def test_a_renewed_file_of_authorities_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon trusts whom the file says now; while it is away, and while it stays as it is, nothing is made anew."""
    begin = "-----BEGIN CERTIFICATE"
    one, other = (begin + text for text in Path(certifi.where()).read_text().split(begin)[1:3])
    place = tmp_path / "authorities.pem"
    place.write_text(one)
    monkeypatch.setenv("SSL_CERT_FILE", str(place))

    def session() -> httpx2.Client:
        client.install(client.Patience())
        return get_session()

    first = session()
    assert session() is first
    place.rename(tmp_path / "away")
    assert session() is first
    place.write_text(one + other)
    second = session()
    assert second is not first
    assert len(client._trusted(client._trust()).get_ca_certs()) == 2


def test_commit_quota_and_request_quota_are_told_apart() -> None:
    """The text decides: the commit quota's rate header still has requests left, and waits for about an hour."""
    rate = {"RateLimit": '"api";r=949;t=120', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}
    body = {"error": "You have exceeded the rate limit for repository commits (128 per hour)."}
    commits = of_response(answer(429, rate, body), "x")
    assert isinstance(commits, errors.QuotaError)
    assert (commits.data["quota"], commits.data["retry_after"]) == ("commits", 3600.0)
    used = of_response(answer(429, {"RateLimit": '"api";r=0;t=55'}, {"error": "too many requests"}), "x")
    assert (used.data["quota"], used.data["retry_after"]) == ("requests", 56.0)
    asked = of_response(answer(429, {"Retry-After": "7"}), "x")
    assert asked.data["retry_after"] == 7.0
    assert of_response(answer(429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "x").data["retry_after"] == 60.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("request failed with status code: 403"), errors.DeniedError),
        (RuntimeError("Data processing error: HTTP status 503 Service Unavailable"), errors.RetryableError),
        (RuntimeError("CAS error: (429 Too Many Requests)"), errors.RetryableError),
        (RuntimeError("xet write token: HTTP 404 for token"), errors.UnreachableError),
        (OSError("connection reset"), errors.RetryableError),
        (RuntimeError("storage limit reached for acme"), errors.StorageFullError),
        (FileNotFoundError(2, "No such file or directory", "/stage/w"), errors.VanishedError),
        (ValueError("Malformed response from server"), errors.IntegrityError),
        (KeyError("x"), errors.BugError),
    ],
)
def test_what_xet_raises_is_read(error: BaseException, kind: type[errors.WeighbridgeError]) -> None:
    """Its failures come as builtin exceptions; their text says what the store answered."""
    assert type(translate(error, "cannot upload")) is kind


def test_few_descriptors_are_no_fault_of_the_hub() -> None:
    """Xet ends with an I/O error where the process may not open more files: the limit is named."""
    error = OSError("I/O error: I/O error: Too many open files (os error 24)")
    assert "LimitNOFILE" in (translate(error, "cannot upload").fix or "")


def test_a_wrapped_failure_is_told_by_its_cause() -> None:
    """The client wraps what an LFS upload raised; the cause counts."""

    def upload() -> None:
        error = RuntimeError("Error while uploading 'w' to the Hub.")
        raise error from httpx2.ReadTimeout("no answer")

    def guarded() -> None:
        with speaking("cannot upload", writes=True):
            upload()

    with pytest.raises(errors.OutcomeUnknownError) as caught:
        guarded()
    assert "no answer" in (caught.value.why or "")


def test_no_token_is_ever_shown() -> None:
    """Words of the server are cut, escaped and hold no header of ours."""
    told = of_response(answer(400, {}, {"error": "bad \x1b[31m" + "x" * 1000}), "x")
    assert "\x1b" not in (told.why or "")
    assert len(told.why or "") < 400
    unsent = translate(httpx2.LocalProtocolError("Illegal header value b'Bearer hf_secret\\n'"), "x")
    assert "hf_secret" not in f"{unsent.why} {unsent.fix}"


@pytest.mark.parametrize("token", ["hf_sec ret", "hf_secret\nHost: elsewhere", "hf_s\u00e9cret", "hf_secret\x00"])
def test_what_is_no_token_is_told_before_it_is_sent(token: str) -> None:
    """Whatever would carry it refuses it word for word: it is told as what it is, and not repeated."""
    line = Line("http://127.0.0.1:9", environ={"HF_TOKEN": token})
    with pytest.raises(errors.DeniedError, match="cannot look") as caught:
        line.ask("cannot look", lambda: line.call("GET", "/api/models"))
    assert "HF_TOKEN" in (caught.value.fix or "")
    assert "cret" not in str(errors.describe(caught.value)), "not even a part of it"


def who(role: str, scoped: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return what the Hub says of a token of lw, who writes for acme and reads at readers."""
    access: dict[str, Any] = {"role": role}
    if scoped is not None:
        access["fineGrained"] = {"global": [], "scoped": scoped}
    orgs = [{"name": "Acme", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
    return {"name": "lw", "orgs": orgs, "auth": {"accessToken": access}}


def scope(name: str, *permissions: str) -> dict[str, Any]:
    """Return one scope of a fine-grained token."""
    return {"entity": {"type": "org", "name": name}, "permissions": list(permissions)}


@pytest.mark.parametrize(
    ("told", "owner", "why"),
    [
        (who("write"), "acme", None),
        (who("write"), "LW", None),
        (who("write"), "nobodyorg", "it belongs to lw, a member of Acme, readers"),
        (who("write"), "readers", "lw only reads there"),
        (who("fineGrained"), "nobodyorg", None),
        (who("fineGrained", [scope("acme", "repo.write")]), "acme", None),
        (who("fineGrained", [scope("acme/tiny", "repo.write")]), "acme", None),
        (who("fineGrained", [scope("acme", "repo.content.read"), scope("b", "repo.write")]), "acme", "repo.write on b"),
        (who("fineGrained", []), "acme", "repo.write on nothing"),
        ({}, "acme", None),
    ],
)
def test_a_token_is_judged_by_what_the_hub_tells_of_it(told: dict[str, Any], owner: str, why: str | None) -> None:
    """Organisations with roles and scopes decide; what is not told refuses nobody."""
    said = refusal(told, owner)
    assert said is None if why is None else why in str(said)
