"""One bucket behind one endpoint: where it is, in whose name it is asked, and at which pace.

botocore, the core of boto3, is used as it is: importing boto3 with its transfer manager takes twice as long, and its
transfers neither hash what they send nor refuse to overwrite. Its CRT client is never used: with a custom endpoint it
is known to talk to another one. Retries are ours, because the library's own turn a lost answer into "exists".
"""

import email.utils
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import botocore.config
import botocore.loaders
import botocore.session
from botocore.exceptions import ResponseStreamingError
from botocore.utils import determine_content_length, parse_timestamp

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors
from weighbridge.registry.refs import check_key, shown
from weighbridge.registry.remotes.s3.contact import SILENT
from weighbridge.registry.remotes.s3.errors import CAUGHT, SENSELESS, is_senseless, translate
from weighbridge.registry.remotes.s3.signing import use_known_payload

CONNECT_TIMEOUT: Final = 4.0
"""Seconds until a wrong address is an error: a person waits for it."""
READ_TIMEOUT: Final = 60.0
"""Seconds without a byte until an answer is lost."""
PATIENCE: Final = 15.0
"""Seconds in which an endpoint that never answered has to: the look-up of its name, all its addresses, TLS, and words.

This is for whoever waits and tries again by itself; a sound store that is busy was seen to take more than four. A
command gives less, because a person waits for it.
"""
CONNECTIONS: Final = 32
DOUBTS: Final = 2
"""Times that a strange refusal over plain http is asked for again."""
HANGING_MAX: Final = 8
"""First requests that may hang at once after they were given up, before no other is begun."""
ASK_FROM: Final = 1 << 20
"""Bytes of a body from which on the store may refuse a request before it is sent."""
ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Where the library finds an endpoint by itself."""

_NOT_NOW: Final = (errors.RetryableError, errors.OutcomeUnknownError)
_AWS: Final = re.compile(r"(?:.+\.)?s3[.-](?:[a-z0-9.-]+\.)?amazonaws\.com(?:\.cn)?")
"""The hosts of S3 itself, which has neither a bucket in its own name nor a path before one."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_LOADER: Final = botocore.loaders.Loader()  # reading the description of S3 costs more than a request; once is enough


class Place(NamedTuple):
    """Where a bucket is and how it is asked; `prefix` is empty or ends with `/`."""

    url: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    ca: str | None = None
    profile: str | None = None
    encryption: str | None = None
    storage_class: str | None = None
    one_writer: bool = False
    connect_timeout: float = CONNECT_TIMEOUT
    read_timeout: float = READ_TIMEOUT
    patience: float = PATIENCE

    @property
    def named_twice(self) -> bool:
        """Whether the endpoint names the bucket too, as far as its words go: its last part, or the first of its host.

        AWS: bucket.s3.region.amazonaws.com and, of old, bucket.s3-region.amazonaws.com.
        """
        address = urlsplit(self.endpoint or "")
        return address.path.rstrip("/").rpartition("/")[2] == self.bucket or address.netloc.startswith(
            (f"{self.bucket}.s3.", f"{self.bucket}.s3-")
        )

    @property
    def encrypted(self) -> dict[str, str]:
        """What every request that begins an object says of its encryption; a bucket may refuse those that do not."""
        if not (self.encryption or "").startswith("aws:kms"):
            return {"ServerSideEncryption": self.encryption} if self.encryption else {}
        key = str(self.encryption).removeprefix("aws:kms").removeprefix(":")
        return {"ServerSideEncryption": "aws:kms"} | ({"SSEKMSKeyId": key} if key else {})


def place_of(settings: RemoteSettings) -> Place:
    """Return the place of a remote's settings. Raises UsageError for a URL that names no bucket."""
    bucket, _, prefix = settings.url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not settings.url.startswith("s3://") or not _BUCKET.fullmatch(bucket):
        raise errors.UsageError(
            f"'{shown(settings.url)}' names no bucket",
            why="a bucket has 3 to 63 lower-case letters, digits, '.' and '-'",
            fix="write s3://bucket/prefix",
        )
    if prefix:
        check_key(prefix)
    if settings.ca is not None and not Path(settings.ca).is_file():
        raise errors.UsageError(
            f"the certificate file {shown(str(settings.ca))} is not there",
            why="no file lies there",
            fix=f"correct ca of [remotes.{settings.name}]",
        )
    place = Place(
        url=settings.url,
        bucket=bucket,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=settings.endpoint,
        region=settings.region,
        addressing=settings.addressing,
        ca=str(settings.ca) if settings.ca is not None else None,
        profile=settings.profile,
        encryption=settings.encryption,
        storage_class=settings.storage_class,
        one_writer=settings.writers == "one",
        patience=settings.patience or PATIENCE,
    )
    _refuse_bucket(place, settings.name)
    return place


def _refuse_bucket(place: Place, name: str) -> None:
    """Refuse an endpoint of AWS that names the bucket as well: all would go into a folder of that name in the bucket.

    Elsewhere `ml.s3.corp.example` may be a host of that name, and `/models` the path of a gateway: doctor warns of it.
    """
    if place.named_twice and _AWS.fullmatch(urlsplit(place.endpoint or "").hostname or ""):
        raise errors.UsageError(
            f"the endpoint {shown(place.endpoint or '')} names the bucket",
            why="the bucket stands in the URL of the remote already, so everything would lie one folder too deep",
            fix=f"leave {place.bucket} out of endpoint in [remotes.{name}]",
        )


class Pace:
    """How long requests wait because the store asked for fewer: doubled at each refusal, less with each success."""

    LEAST: Final = 0.05
    MOST: Final = 5.0

    def __init__(self) -> None:
        self.most = self.MOST
        self._pause = 0.0
        self._lock = threading.Lock()

    @property
    def pause(self) -> float:
        """Seconds that the next request waits."""
        return self._pause

    def slow(self) -> None:
        """Note that the store asked for fewer requests."""
        with self._lock:
            self._pause = min(self.most, max(self.LEAST, self._pause * 2))

    def well(self) -> None:
        """Note that a request went through."""
        if self._pause:
            with self._lock:
                self._pause = self._pause * 0.8 if self._pause > self.LEAST / 4 else 0.0

    def wait(self) -> None:
        """Wait for one's turn, not all at the same moment."""
        if self._pause:
            time.sleep(self._pause * (0.5 + random.random()))  # noqa: S311 - jitter


class Connection:
    """Sends requests to one bucket; made for many threads. Nothing is connected before the first request.

    `counts` says how many requests of each kind were sent, `patience` is half the first pause before a repetition.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pace = Pace()
        self.counts: Counter[str] = Counter()
        self.patience = 0.1
        self._client: Any = None
        self._answered = False
        self._hanging: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._date: tuple[float, float] | None = None
        self._proven = False

    def ask(
        self,
        operation: str,
        what: str,
        *,
        write: bool = False,
        tries: int = 1,
        needs: Sequence[str] = (),
        **parameters: Any,
    ) -> Any:
        """Carry one request out and return the answer; `tries` repeats what was refused for now.

        `write` marks what may not be repeated blindly; such a request is never tried twice here when its answer was
        lost. An answer that lacks what the caller `needs` was damaged on its way. Raises our errors.
        """
        parameters["Bucket"] = self.place.bucket
        attempt, doubts = 1, 0
        while True:
            self.pace.wait()
            self.counts[operation] += 1
            # A write may take its time, and whether it was carried out matters more than how soon that is known.
            first = not self._answered and not write
            call = partial(getattr(self.client(), operation), **parameters)
            try:
                answer = self._awaited(call) if first else call()
                _complete(answer, needs)
            except (*CAUGHT, *SENSELESS) as error:
                if isinstance(error, SENSELESS) and not is_senseless(error):
                    raise
                told = getattr(error, "response", None)
                self._note(told)
                found = translate(error, what, self.place.url, write=write, first=first)
                if isinstance(found, errors.NotFoundError) and "remote" in found.data and self.place.named_twice:
                    found.fix = f"leave {self.place.bucket} out of endpoint, which names the bucket as well"
                # Whoever says "not now" to everything may be a door without a house.
                self._answered = self._answered or (told is not None and not isinstance(found, _NOT_NOW))
                if found.data.get("slow"):
                    self.pace.slow()
                if doubts < DOUBTS and self._doubtful(found):
                    doubts += 1
                    continue
                if attempt >= tries or write or not isinstance(found, errors.RetryableError):
                    raise found from error
                time.sleep(min(2.0, self.patience * 2**attempt) * (0.5 + random.random() / 2))  # noqa: S311 - jitter
                attempt += 1
            else:
                self._proven = self._answered = True
                self._note(answer)
                self.pace.well()
                return answer

    def _doubtful(self, found: errors.WeighbridgeError) -> bool:
        """Tell whether a refusal may be due to a request that was damaged on its way.

        Over TLS none can be. Over plain http a flipped bit makes a signature wrong or an action unknown; where requests
        of ours were answered before, such a refusal is asked for again before it is believed. It was not carried out.
        """
        strange = isinstance(found, errors.DeniedError | errors.UsageError) or found.data.get("kind") == "refused"
        return self._proven and strange and str(self.client().meta.endpoint_url).startswith("http:")

    def _awaited(self, call: Callable[[], Any]) -> Any:
        """Return what a request returns or raises, if it does so while the place is patient.

        Timeouts of sockets do not bound this: a name can have many addresses where nobody answers, its look-up can
        hang, and bytes can come one a second. The thread ends by itself; no command waits for it, and a daemon has few.
        """
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= HANGING_MAX:
            raise self._silent(f"{len(self._hanging)} earlier requests still hang")
        ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                ended.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits
                ended.put((None, error))

        thread = threading.Thread(target=run, name="s3-first", daemon=True)
        thread.start()
        try:
            answer, error = ended.get(timeout=self.place.patience)
        except Empty:
            self._hanging.append(thread)
            raise self._silent(f"no answer came within {self.place.patience:g} s") from None
        if error is not None:
            raise error
        return answer

    def _silent(self, why: str) -> errors.UnreachableError:
        what = f"{shown(self.place.url)} cannot be reached"
        return errors.UnreachableError(what, why=why, fix=SILENT, remote=self.place.url)

    def key(self, key: str) -> str:
        """Return where a key of the remote lies in the bucket."""
        return f"{self.place.prefix}{key}"

    def date(self) -> float | None:
        """Return the store's clock by its last answer, or None when it has told none."""
        if self._date is None:
            return None
        told, then = self._date
        return told + (time.monotonic() - then)

    def client(self, **changes: Any) -> Any:
        """Return the client of the library; with `changes` of its configuration a new one, else always the same."""
        if changes:
            return self._connect(changes)
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client = self._connect({})
        return self._client

    def close(self) -> None:
        """Give the connections back."""
        if self._client is not None:
            self._client.close()

    def _connect(self, changes: dict[str, Any]) -> Any:
        place = self.place
        try:
            session = botocore.session.Session(profile=place.profile)
            session.register_component("data_loader", _LOADER)
            parsers = session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=_instant)
            config = botocore.config.Config(
                # Explicit checksums only: what the library adds by itself breaks stores that do not know trailers.
                request_checksum_calculation=changes.get("request_checksum_calculation", "when_required"),
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": _style(place, session)},
                connect_timeout=min(place.connect_timeout, 0.9 * place.patience),  # its own words, before patience ends
                read_timeout=place.read_timeout,
                max_pool_connections=CONNECTIONS,
                tcp_keepalive=True,
                user_agent_extra="weighbridge",
            )
            region = place.region or session.get_config_variable("region")
            if region is None and _endpoint(place, session):
                region = "us-east-1"  # what stores with an address of their own take for "wherever you are"
            client = session.create_client(
                "s3", region_name=region, endpoint_url=place.endpoint, verify=place.ca, config=config
            )
            credentials = session.get_credentials()
            if credentials is not None:
                credentials.get_frozen_credentials()  # may ask a person: no part of waiting for the store
        except CAUGHT as error:
            raise translate(error, f"cannot use {shown(place.url)}", place.url) from error
        except ValueError as error:
            raise errors.UsageError(
                f"{shown(place.url)} cannot be used as it is set up",
                why=str(error),
                fix="write endpoint as https://host",
            ) from error
        client.meta.events.register_last("before-call.s3", _send_at_once)
        use_known_payload(client)
        return client

    def _note(self, answer: Any) -> None:
        """Remember the store's clock."""
        headers = (answer or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
        try:
            told = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
        except (KeyError, ValueError, TypeError):
            return
        self._date = (told, time.monotonic())


def _instant(told: Any) -> datetime:
    """Return a time that a store told; the library's own way takes longer than all else of a row of a listing."""
    try:
        return datetime.fromisoformat(told)
    except (TypeError, ValueError):
        return parse_timestamp(told)  # type: ignore[no-any-return]


def _send_at_once(params: dict[str, Any], **_: Any) -> None:
    """Do not ask whether a small body may be sent: that costs a round trip, and a second where nobody answers."""
    body = params.get("body")
    if hasattr(body, "read") and determine_content_length(body) < ASK_FROM:
        params["headers"].pop("Expect", None)


def _complete(answer: Any, needs: Sequence[str]) -> None:
    lacking = [field for field in needs if answer.get(field) is None]
    if lacking:
        if answer.get("Body") is not None:
            answer["Body"].close()
        raise ResponseStreamingError(error=f"the answer lacks {', '.join(lacking)}")


def _endpoint(place: Place, session: Any) -> bool:
    """Tell whether the store has an address of its own, ours or one the library finds by itself."""
    configured = session.get_scoped_config().get("endpoint_url") if place.endpoint is None else place.endpoint
    return bool(configured or any(os.environ.get(name) for name in ENDPOINT_VARIABLES))


def _style(place: Place, session: Any) -> str:
    """Return how a bucket stands in an address: as the remote says, as ~/.aws/config says, else by the kind of store.

    A store with an address of its own rarely has a DNS name for each bucket, so there it stands in the path.
    """
    if place.addressing != "auto":
        return place.addressing
    said = session.get_scoped_config().get("s3")
    if isinstance(said, dict) and said.get("addressing_style"):
        return str(said["addressing_style"])
    return "path" if _endpoint(place, session) else "auto"
