"""Every exception of huggingface_hub and of httpx2 beneath it, in our words. A test walks all of them.

What the Hub answers decides first: its error code, its status, its text. A lost answer to a request that writes is
*outcome unknown*; the same loss on a read is merely worth another try. Commit quota and API quota come as the same
status, and only the text tells them apart.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx2
from huggingface_hub import errors as hub
from huggingface_hub.utils import parse_ratelimit_headers

from weighbridge.registry import errors
from weighbridge.registry.refs import shown

HOUR: Final = 3600.0
_WORDS_MAX: Final = 300
_LIBRARIES: Final = frozenset({"huggingface_hub", "hf_xet", "httpx2", "httpcore2"})

_COMMITS: Final = re.compile(r"commit", re.IGNORECASE)
_RATE: Final = re.compile(r"rate limit|too many|per hour|retry", re.IGNORECASE)
_STORAGE: Final = re.compile(
    r"storage (?:limit|quota|is full)|out of storage|storage.{0,40}(?:exceed|reach)", re.IGNORECASE
)
_XET_STATUS: Final = re.compile(r"\b(?:status(?: code)?|HTTP)[^0-9]{0,12}([1-5][0-9]{2})\b|\(([45][0-9]{2}) [A-Z]")
_ENTRY_GONE: Final = re.compile(r"lfs pointer|does not exist|doesn't exist", re.IGNORECASE)


class NoConnectionError(httpx2.TransportError):
    """No connection could be made, so nothing was sent; of a kind that the library does not repeat by itself."""


@contextmanager
def speaking(what: str, *, writes: bool = False) -> Iterator[None]:
    """Turn whatever the client raises inside into the error of `translate`."""
    try:
        yield
    except errors.WeighbridgeError:
        raise
    except Exception as error:
        raise translate(error, what, writes=writes) from error


def translate(error: BaseException, what: str, *, writes: bool = False) -> errors.WeighbridgeError:
    """Return the error that tells a person what failed, why and what to do.

    `writes` says that the request may have changed something: then a lost answer is an OutcomeUnknownError.
    """
    response = getattr(error, "response", None)
    if isinstance(response, httpx2.Response):
        return of_response(response, what, writes=writes)
    for kind in type(error).__mro__:
        rule = RULES.get(kind)
        if rule is not None:
            return rule(error, what, writes)
    if type(error).__name__ == "XetAuthenticationError":
        return _login(error, what, writes)
    if type(error).__module__.partition(".")[0] in _LIBRARIES:
        return _later(error, what, writes)  # one of theirs that nobody is to meet, or a newer one
    if isinstance(error, (ConnectionError, RuntimeError, ValueError, OSError)):
        return _plain(error, what, writes)
    return errors.BugError(what, why=f"{type(error).__name__}: {_words(error)}")


# ------------------------------------------------------------------------------------------------ what the Hub answered


def of_response(response: httpx2.Response, what: str, *, writes: bool = False) -> errors.WeighbridgeError:
    """Return the error of an answer that is no success."""
    status = response.status_code
    code = response.headers.get("X-Error-Code", "")
    words = _answered(response)
    data: dict[str, Any] = {"status": status}
    request = response.headers.get("x-request-id") or response.headers.get("X-Amzn-Trace-Id")
    if request:
        data["request"] = request
    told = f"the Hub answered {status}" + (f": {words}" if words else "")
    if code == "GatedRepo":
        return errors.DeniedError(what, why=told, fix="ask for access on the repository's page, then repeat", **data)
    if words == "Access to this resource is disabled.":
        return errors.DeniedError(what, why=told, fix="ask the Hub's support why it was disabled", **data)
    if code == "RepoNotFound":
        # Whoever mends the token or brings the repository back need not touch the daemon: it tries again.
        return errors.NotFoundError(
            what,
            why="the repository is not there, or this token may not see it",
            fix=_LOGIN,
            remote=response.url.host,
            **data,
        )
    if code in {"RevisionNotFound", "EntryNotFound"}:
        return errors.MissingError(what, why=told, **data)
    return _by_status(response, what, told, words, data, writes=writes)


_LOGIN: Final = "check the name, and the token with: hf auth whoami"
_BY_ITSELF: Final = "; the daemon does so by itself"
_SCOPE: Final = "use a token with write access to the organisation: https://huggingface.co/settings/tokens"


def _by_status(
    response: httpx2.Response, what: str, told: str, words: str, data: dict[str, Any], *, writes: bool
) -> errors.WeighbridgeError:
    status = response.status_code
    if status == 429:
        return _limited(response, what, told, words, data)
    if status in {402, 507} or (status in {403, 413, 422} and _STORAGE.search(words)):
        return errors.StorageFullError(
            what, why=told, fix="free storage of the organisation, or enlarge its plan, then repeat", **data
        )
    if status == 401:
        return errors.DeniedError(what, why=told, fix="log in with: hf auth login, or set HF_TOKEN", **data)
    if status in {403, 451}:
        return errors.DeniedError(what, why=told, fix=_SCOPE, **data)
    if status == 404:
        # As above; and an address that is no Hub's answers everything so.
        return errors.NotFoundError(what, why=told, fix=f"{_LOGIN}; and HF_ENDPOINT", remote=response.url.host, **data)
    if status == 409:
        return errors.ExistsError(what, why=told, fix="look at what is there already", **data)
    if status == 412:
        return errors.StaleHeadError(what, why=told, fix="repeat it on top of what is there now", **data)
    if status in {400, 405, 411, 413, 415, 416, 417, 422, 431}:
        return errors.RefusedError(what, why=told, fix="change what is named, then repeat", **data)
    if status in {408, 425, 502, 503, 504} or status >= 500:
        kind = errors.OutcomeUnknownError if writes else errors.RetryableError
        return kind(what, why=told, fix="repeat it in a while; https://status.huggingface.co", **data)
    return errors.WeighbridgeError(what, why=told, **data)


def _limited(
    response: httpx2.Response, what: str, told: str, words: str, data: dict[str, Any]
) -> errors.WeighbridgeError:
    """Tell the commit quota of a repository from the request quota of a token."""
    rate = parse_ratelimit_headers(response.headers)
    after = response.headers.get("Retry-After", "").strip()
    wait = float(after) if after.isdigit() else None
    if _COMMITS.search(words) and _RATE.search(words):
        data |= {"quota": "commits", "retry_after": wait or HOUR}
        fix = f"repeat it in about an hour{_BY_ITSELF}" if wait is None else f"repeat it in {wait:.0f} s{_BY_ITSELF}"
        return errors.QuotaError(what, why=told, fix=fix, **data)
    if wait is None:
        wait = float(rate.reset_in_seconds) + 1 if rate is not None and rate.remaining == 0 else 60.0
    data |= {"quota": "requests", "retry_after": wait}
    return errors.QuotaError(what, why=told, fix=f"repeat it in {wait:.0f} s{_BY_ITSELF}", **data)


def _answered(response: httpx2.Response) -> str:
    """Return the server's words, wherever it put them, fit for a terminal."""
    words = response.headers.get("X-Error-Message", "").strip()
    if not words or words == "None":
        try:
            body = response.json()
        except Exception:  # noqa: BLE001 - no body, a body that was not read, no JSON: no words
            body = None
        if isinstance(body, dict):
            found = body.get("error") or body.get("error_description") or body.get("message") or body.get("errors")
            if isinstance(found, list):
                found = "; ".join(str(e.get("message", e)) if isinstance(e, dict) else str(e) for e in found)
            words = str(found) if found else words
    return shown(words[:_WORDS_MAX])


# --------------------------------------------------------------------------------------------- what never was an answer

_Rule = Callable[[BaseException, str, bool], errors.WeighbridgeError]


def _not_sent(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.RetryableError(
        what, why=f"no connection to the Hub: {_words(error)}", fix="check the network, HF_ENDPOINT and the proxy"
    )


def _lost(error: BaseException, what: str, writes: bool) -> errors.WeighbridgeError:
    kind = errors.OutcomeUnknownError if writes else errors.RetryableError
    return kind(what, why=f"the Hub gave no whole answer: {_words(error)}", fix="repeat it")


def _address(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    # The environment is wrong, not the job: whoever corrects it need not touch the daemon's.
    return errors.UsageError(
        what, why=f"the address is not usable: {_words(error)}", fix="correct HF_ENDPOINT, or endpoint", remote="hub"
    )


def _unsendable(_error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    """Tell of a request that could not be written down; the library's words may hold a header, and so the token."""
    return errors.UsageError(
        what,
        why="the request cannot be written down: a header of it is not usable",
        fix="correct HF_TOKEN and HF_ENDPOINT",
        remote="hub",
    )


def _proxy(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.UnreachableError(
        what, why=f"the proxy refuses: {_words(error)}", fix="correct HTTPS_PROXY, or name the Hub in NO_PROXY"
    )


def _offline(_error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.UnreachableError(
        what,
        why="this machine is told to stay offline (HF_HUB_OFFLINE)",
        fix="unset HF_HUB_OFFLINE where it may go out",
    )


def _login(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.DeniedError(what, why=_words(error), fix="log in with: hf auth login, or set HF_TOKEN")


def _named(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.UsageError(what, why=_words(error), fix="correct the name")


def _missing(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.MissingError(what, why=_words(error))


def _odd(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.IntegrityError(
        what, why=f"the answer is not what it should be: {_words(error)}", fix="repeat it; then upgrade huggingface_hub"
    )


def _later(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.RetryableError(what, why=_words(error), fix="repeat it")


def _local(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.WeighbridgeError(what, why=_words(error))


def _never(error: BaseException, what: str, _writes: bool) -> errors.WeighbridgeError:
    return errors.BugError(what, why=f"{type(error).__name__}: {_words(error)}")


RULES: Final[dict[type[BaseException], _Rule]] = {
    # Nothing was sent.
    NoConnectionError: _not_sent,
    httpx2.ConnectError: _not_sent,
    httpx2.ConnectTimeout: _not_sent,
    httpx2.PoolTimeout: _not_sent,
    httpx2.ProxyError: _proxy,
    httpx2.UnsupportedProtocol: _address,
    httpx2.InvalidURL: _address,
    httpx2.LocalProtocolError: _unsendable,
    # Something was sent, and no whole answer came.
    httpx2.TimeoutException: _lost,
    httpx2.NetworkError: _lost,
    httpx2.RemoteProtocolError: _lost,
    httpx2.TransportError: _lost,
    httpx2.DecodingError: _lost,
    httpx2.TooManyRedirects: _proxy,
    httpx2.RequestError: _lost,
    httpx2.HTTPStatusError: _lost,
    httpx2.HTTPError: _lost,
    # Faults of the caller.
    httpx2.StreamError: _never,
    httpx2.CookieConflict: _never,
    # huggingface_hub
    hub.OfflineModeIsEnabled: _offline,
    hub.LocalTokenNotFoundError: _login,
    hub.OIDCError: _login,
    hub.DeviceCodeError: _login,
    hub.HFValidationError: _named,
    hub.HfUriError: _named,
    hub.FileMetadataError: _later,
    hub.IncompleteSnapshotError: _later,
    hub.LocalEntryNotFoundError: _later,
    hub.EntryNotFoundError: _missing,
    hub.RevisionResolutionError: _later,
    hub.XetDownloadError: _later,
    hub.HfHubHTTPError: _lost,
    hub.InferenceTimeoutError: _lost,
    hub.InferenceEndpointError: _later,
    hub.TextGenerationError: _odd,
    hub.CacheNotFound: _local,
    hub.CorruptedCacheException: _local,
    hub.CachedRepoTreeNotFoundError: _local,
    hub.FileDuplicationError: _later,
    hub.SafetensorsParsingError: _odd,
    hub.NotASafetensorsRepoError: _odd,
    hub.DDUFError: _odd,
    hub.StrictDataclassError: _odd,
    hub.DryRunError: _never,
    hub.CLIError: _local,
    hub.SandboxError: _local,
}
"""The nearest class of an exception decides; those with an answer are told by it instead."""


def _plain(error: BaseException, what: str, writes: bool) -> errors.WeighbridgeError:
    """Return the error of a builtin exception: xet raises nothing else, and the LFS part wraps its own."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, RuntimeError) and cause is not None:
        return translate(cause, what, writes=writes)
    words = _words(error)
    status = _XET_STATUS.search(words)
    number = int(status[1] or status[2]) if status else 0
    lower = words.lower()
    if number in {401, 403} or "unauthorized" in lower or "forbidden" in lower:
        return errors.DeniedError(what, why=words, fix=_SCOPE)
    if number in {402, 507} or _STORAGE.search(words):
        return errors.StorageFullError(what, why=words, fix="free storage of the organisation, then repeat")
    if isinstance(error, FileNotFoundError) or "no such file" in lower:
        return errors.VanishedError(what, why=words, fix="stage it again")
    if "too many open files" in lower:
        return errors.RetryableError(what, why=words, fix=FEW_FILES)
    if isinstance(error, ValueError) and not number:
        return errors.IntegrityError(what, why=words, fix="repeat it; then upgrade huggingface_hub")
    if number == 404 and "token" in lower:
        return errors.UnreachableError(what, why=words, fix=NO_XET)
    return errors.RetryableError(what, why=words, fix="repeat it; where it goes on, set HF_HUB_DISABLE_XET=1")


FEW_FILES: Final = "raise the limit of open files: ulimit -n 4096, LimitNOFILE=16384 in a unit; then repeat it"
NO_XET: Final = "this Hub has no xet: set HF_HUB_DISABLE_XET=1"


def lost_object(error: errors.WeighbridgeError) -> bool:
    """Tell whether a commit was refused because an uploaded object is not there any more: send it again."""
    return error.data.get("status") == 400 and _ENTRY_GONE.search(error.why or "") is not None


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return shown(text[:_WORDS_MAX])
