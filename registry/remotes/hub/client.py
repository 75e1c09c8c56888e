"""The line to a Hub: its address, the token, time limits on every request, and answers as our errors.

huggingface_hub has one HTTP client per process, without any time limit; ours takes its place. It never sleeps out a
rate limit (the library would, without bound): whoever calls decides whether to wait.
"""

import functools
import math
import os
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    get_token,
    hf_raise_for_status,
    logging,
    set_client_factory,
)

from weighbridge import __version__
from weighbridge.config.secrets import Secret, from_credential, from_environ
from weighbridge.config.settings import HUB
from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.hub.errors import NoConnectionError, speaking
from weighbridge.registry.shell import load

T = TypeVar("T")

CREDENTIAL: Final = "hf-token"
"""What a unit calls the token in LoadCredential=."""

TRIES: Final = 4
AGAIN: Final = 10
"""Tries of a read at a Hub that let one through before: what passes within a minute, while a commit is read back for
one, fails no command."""
FIRST: Final = 30.0
"""Seconds until a Hub that has not said a word yet counts as silent."""
_PATIENT: Final = 10.0
"""Seconds that a first read may be repeated, or a quota may ask us to wait, without anybody being told."""
_LONGER: Final = 6.0
"""Times as long a read may be repeated where one went through before."""

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_TOKEN: Final = re.compile(r"[!-~]+")
_SYSTEM: Final = ssl.get_default_verify_paths().openssl_cafile
_TRACE: Final = "X-Amzn-Trace-Id"
_install = threading.Lock()


class Patience(NamedTuple):
    """How long to wait, in seconds: for a connection, for an answer, for a commit, and for any byte of an upload."""

    connect: float = 10.0
    answer: float = 60.0
    commit: float = 300.0
    stall: float = 120.0


class Line:
    """One Hub as one user sees it. Nothing is asked before a method is called."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self.endpoint = (endpoint or self.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        self.patience = patience or Patience()
        self.token = token(self.environ)
        self.sleep = sleep

    @functools.cached_property
    def api(self) -> Any:
        """The library's whole interface, an `HfApi`, for what uploads: a tenth of a second that readers do without."""
        return load("huggingface_hub:HfApi")(
            endpoint=self.endpoint,
            token=self.token.reveal() if self.token else False,
            library_name="weighbridge",
            library_version=__version__,
        )

    @property
    def host(self) -> str:
        """The host of the Hub, for messages."""
        return urlsplit(self.endpoint).netloc or self.endpoint

    @property
    def offline(self) -> bool:
        """Whether this machine is told not to go out."""
        return self.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        found: dict[str, str] = build_hf_headers(
            token=self.token.reveal() if self.token else False,
            library_name="weighbridge",
            library_version=__version__,
        )
        return found

    def ask(self, what: str, call: Callable[[], T], *, writes: bool = False) -> T:
        """Carry out a request through the library; a read that fails for a moment is repeated, a write never is.

        It is repeated for longer where a request went through before, and none was given up since.
        """
        failed = 0
        known = self.host in _well
        tries, end = (AGAIN, _PATIENT * _LONGER) if known else (TRIES, _PATIENT)
        end += time.monotonic()
        while True:
            try:
                with self.speaking(what, writes=writes):
                    answer = call()
                    _well.add(self.host)
                    return answer
            except (errors.RetryableError, errors.QuotaError) as error:
                failed += 1
                pause = min(0.2 * 2.0**failed, _PATIENT)
                if isinstance(error, errors.QuotaError):
                    asked = float(error.data.get("retry_after", _PATIENT + 1))
                    pause = asked if asked <= _PATIENT else math.inf
                if writes or failed >= tries or time.monotonic() + pause > end:
                    if not writes:
                        error.data["attempts"] = failed  # so that nobody above repeats each of them again
                        if not isinstance(error, errors.QuotaError):
                            _well.discard(self.host)
                    raise
                self.sleep(pause)

    @contextmanager
    def speaking(self, what: str, *, writes: bool = False) -> Iterator[None]:
        """Make sure that requests have our limits, and turn what goes wrong into our errors."""
        if self.offline:
            raise errors.UnreachableError(
                what,
                why="this machine is told to stay offline (HF_HUB_OFFLINE)",
                fix="unset HF_HUB_OFFLINE where it may go out",
            )
        if self.token is not None and not _TOKEN.fullmatch(self.token.reveal()):
            # Whatever carries it would show it: it is refused as a header, word for word.
            raise errors.DeniedError(
                what,
                why="the token holds a blank, a line break or a letter that no token has",
                fix="set HF_TOKEN to the token alone, or log in with: hf auth login",
            )
        install(self.patience)
        with speaking(f"{what} at {self.host}", writes=writes):
            yield

    def call(self, method: str, path: str, *, more: Mapping[str, str] | None = None, **given: Any) -> httpx2.Response:
        """Send one request, with `more` headers, and return the answer; belongs inside `ask`."""
        headers = self.headers() | dict(more or {})
        if self.host not in _skews and "timeout" not in given:
            first = min(FIRST, self.patience.answer)
            given["timeout"] = httpx2.Timeout(first, connect=min(first, self.patience.connect))
        answer = get_session().request(method, f"{self.endpoint}{path}", headers=headers, **given)
        hf_raise_for_status(answer)
        return answer

    def json(
        self, what: str, send: Callable[[], httpx2.Response], shape: Callable[[Any], T], *, writes: bool = False
    ) -> T:
        """Carry out a request and return what `shape` takes out of its JSON; anything else is no answer of a Hub."""

        def shaped() -> T:
            answer = send()
            try:
                return shape(answer.json())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                kind = errors.OutcomeUnknownError if writes else errors.RetryableError
                raise kind(
                    what,
                    why=f"{self.host} answered with what is no answer of a Hub",
                    fix="look at what stands between here and there (a proxy, a login page), then repeat",
                ) from error

        return self.ask(what, shaped, writes=writes)

    def pages(self, what: str, path: str, params: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Yield the rows of a list that comes in pages; each page is asked for as `ask` does."""
        following: str | None = path
        while following is not None:
            answers: list[httpx2.Response] = []
            send = functools.partial(self._kept, answers, following, params)
            yield from self.json(what, send, _rows)
            after = answers[-1].links.get("next", {}).get("url")
            following, params = (after.removeprefix(self.endpoint) if after else None), None  # the address has them

    def _kept(self, answers: list[httpx2.Response], path: str, params: Mapping[str, Any] | None) -> httpx2.Response:
        answers.append(self.call("GET", path, params=params))
        return answers[-1]

    def now(self) -> float:
        """Return the Hub's clock in seconds since 1970, by its last answer to whatever was asked."""
        if self.host not in _skews:
            self.ask("cannot ask for the time", lambda: self.call("GET", "/api/models", params={"limit": 1}))
        return time.time() + _skews.get(self.host, 0.0)

    def fetch(self, repo: str, commit: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file of a commit from `offset` on. Raises MissingError.

        The commit is named in full, so no cache between here and there can give out an older file.
        """
        where = f"{self.endpoint}/{repo}/resolve/{quote(commit, safe='')}/{quote(path)}"
        headers = self.headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        with (
            self.speaking(f"cannot read {shown(path)} of {repo}"),
            get_session().stream("GET", where, headers=headers) as answer,
        ):
            if offset and answer.status_code == 416:
                return
            if answer.is_error:
                answer.read()
            hf_raise_for_status(answer)
            skip = offset if offset and answer.status_code == 200 else 0
            for chunk in answer.iter_raw(1 << 20):
                if skip >= len(chunk):
                    skip -= len(chunk)
                    continue
                yield chunk[skip:] if skip else chunk
                skip = 0

    def read(self, repo: str, commit: str, path: str) -> bytes:
        """Return a small file of a commit whole. Raises MissingError."""
        return self.ask(f"cannot read {shown(path)} of {repo}", lambda: b"".join(self.fetch(repo, commit, path)))


def token(environ: Mapping[str, str]) -> Secret | None:
    """Return the access token: the unit's credential, else HF_TOKEN, else what `hf auth login` stored."""
    found = from_credential(CREDENTIAL, environ) or from_environ("HF_TOKEN", environ)
    if found is not None or environ is not os.environ:
        return found
    stored = get_token()
    return Secret(stored) if stored else None


_installed: "tuple[Patience, _Trust] | None" = None
_well: Final[set[str]] = set()
"""By host and port: Hubs that let a request through, and none was given up since."""
_skews: Final[dict[str, float]] = {}
"""By host and port: how many seconds its clock is ahead of ours, by its last answer."""


def install(patience: Patience) -> None:
    """Give the library an HTTP client with time limits; the same limits and the same to trust change nothing.

    A file of authorities that is renewed while a daemon runs is read again, once it is there.
    """
    global _installed  # noqa: PLW0603 - the library keeps one client per process, and this is what it was given
    trust = _trust()
    with _install:
        if _installed is not None and trust.changed is None:
            trust = _installed[1]
        if _installed != (patience, trust):
            logging.set_verbosity(logging.ERROR)  # it tells of every retry on stderr; what matters is raised
            set_client_factory(lambda: make_client(patience))
            _installed = patience, trust


def warm_up(patience: Patience) -> None:
    """Load and make what the first request needs, before anybody asks for anything."""
    install(patience)
    get_session()


class _Client(httpx2.Client):
    """Says at once when a read finds no connection: the library would try for half a minute, and log every try."""

    def send(self, request: httpx2.Request, **given: Any) -> httpx2.Response:
        try:
            return super().send(request, **given)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            if request.method not in {"GET", "HEAD"}:
                raise
            raise NoConnectionError(str(error), request=request) from error


def make_client(patience: Patience) -> httpx2.Client:
    """Return an HTTP client that never waits for ever."""
    return _Client(
        event_hooks={"request": [_trace], "response": [_learn_the_time, _refuse_to_wait]},
        follow_redirects=True,
        timeout=httpx2.Timeout(patience.answer, connect=patience.connect),
        verify=_trusted(_trust()),
    )


class _Trust(NamedTuple):
    """Where those whom to trust are listed, and that list's time and size, None where there is none."""

    place: str
    changed: tuple[int, int] | None


def _trust() -> _Trust:
    place = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR") or _SYSTEM
    try:
        found = os.stat(place)  # noqa: PTH116 - before every request
    except OSError:
        return _Trust(place, None)
    return _Trust(place, (found.st_mtime_ns, found.st_size))


@functools.lru_cache(maxsize=1)
def _trusted(trust: _Trust) -> ssl.SSLContext:
    """Return whom to trust, read once while that stays: 15 ms that a copy of a process need not spend again."""
    del trust  # the library reads it itself
    return httpx2.create_ssl_context()


def _trace(request: httpx2.Request) -> None:
    """Name the request, so that the Hub's support can find it."""
    request.headers.setdefault(_TRACE, str(uuid.uuid4()))


def _learn_the_time(answer: httpx2.Response) -> None:
    """Take note of the clock of whoever answers, also of one who refuses."""
    try:
        told = parsedate_to_datetime(answer.headers.get("Date", "")).astimezone(UTC).timestamp()
    except (ValueError, TypeError):
        return
    _skews[answer.request.url.netloc.decode()] = told - time.time()


def _refuse_to_wait(answer: httpx2.Response) -> None:
    """Raise at once on a rate limit: the library would sleep as long as it is told, however long that is."""
    if answer.status_code == 429:
        answer.read()
        hf_raise_for_status(answer)


def _rows(found: Any) -> list[dict[str, Any]]:
    """Return the rows of a page. Raises TypeError for anything else."""
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise TypeError
    return found
