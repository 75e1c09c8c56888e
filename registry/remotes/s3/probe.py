"""What a store really does, found out by trying: an answer of 200 proves nothing.

Some servers ignore the condition of a create-only write, some ignore or merely echo checksums, some list in another
order, some keep the framing of a chunked request inside the object. A few small objects below `_wb/probe/` are written,
read back and removed. What was found is kept beside the caches, for this endpoint and bucket, and shown by `doctor`.
"""

import base64
import hashlib
import json
import os
import secrets
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.registry import errors
from weighbridge.registry.remotes.s3.client import ENDPOINT_VARIABLES, Connection
from weighbridge.registry.remotes.s3.errors import CAUGHT, translate

FOLDER: Final = "_wb/probe/"
"""Where the probe's objects lie for a moment; names of models never begin with `_`."""
KEEP: Final = 30 * 86_400.0
"""Seconds after which a store is asked again: servers are upgraded."""
KEEP_PART: Final = 86_400.0
"""The same where something did not work: it may have been mended."""
_FORMAT: Final = 1
_ONE: Final = b"weighbridge probe: this was written first\n"
_TWO: Final = b"weighbridge probe: this may not replace it\n"
_UNKNOWN: Final = "not tried"


class Capabilities(NamedTuple):
    """What was found; a field is True only where it was seen to work."""

    conditional_put: bool
    """A put to a taken key is refused."""
    conditional_complete: bool
    """The completion of a multipart upload to a taken key is refused."""
    sha256: bool
    """A put with a wrong sha256 is refused, and a right one is told again later."""
    sha256_parts: bool
    """The same for parts, and the hash over the parts' hashes is told after completion."""
    read_back: bool
    """What is read is what was written, whole and in part."""
    ordered: bool
    """Listings show what was just written, in the order of keys, and go on after a key."""
    deletes: bool
    """These credentials may delete."""
    multipart: bool
    """Unfinished uploads can be begun, listed, completed and given up."""
    trailers: str
    """What becomes of the checksum trailers that other tools send over TLS: "kept", "refused", "damaged"."""
    server: str
    """What the server calls itself."""
    skew: float
    """Seconds by which the store's clock is ahead of this machine's."""
    probed_at: float
    """When, in seconds since 1970."""

    @property
    def whole(self) -> bool:
        """Everything that a shared registry is built on works."""
        return all((self.conditional_put, self.conditional_complete, self.sha256_parts, self.read_back, self.ordered))


class Shop(NamedTuple):
    """The keys of one probe."""

    once: str
    parts: str
    empty: str
    wrong: str
    trailer: str

    @classmethod
    def fresh(cls) -> "Shop":
        """Return keys that nobody else uses: another probe may be running or cleaning up."""
        folder = f"{FOLDER}{secrets.token_hex(8)}/"
        return cls(*(f"{folder}{name}" for name in ("a-once", "b-parts", "c-empty", "d-wrong", "e-trailer")))


_known: dict[tuple[str | None, str], Capabilities] = {}
_lock: Final = threading.Lock()


class Probe:
    """Knows what the store of a connection can do: from this process, from the record, else by asking."""

    def __init__(self, link: Connection, record: Path | None) -> None:
        self._link = link
        self._record = record
        named = (link.place.endpoint, *(os.environ.get(name) for name in ENDPOINT_VARIABLES))
        self._own = (next(filter(None, named), None), link.place.bucket)
        self._denied = False

    def known(self) -> Capabilities | None:
        """Return what is known without asking the store."""
        found = _known.get(self._own)
        if found is None and self._record is not None:
            found = recall(self._record, self._own)
            if found is not None:
                _known[self._own] = found
        age = time.time() - found.probed_at if found is not None else 0.0
        return found if found is not None and age < (KEEP if found.whole else KEEP_PART) else None

    def ask(self, *, again: bool = False) -> Capabilities:
        """Return what the store can do, asking it when that is not known or `again`. Raises what requests raise."""
        with _lock:
            found = None if again else self.known()
            if found is None:
                found = examine(self._link)
                _known[self._own] = found
                if self._record is not None:
                    remember(self._record, self._own, found)
            return found

    def learn(self) -> None:
        """Ask the store where that was not denied before; what else is wrong is told by whatever is asked next."""
        if not self._denied:
            try:
                self.ask()
            except errors.DeniedError:
                self._denied = True
            except errors.WeighbridgeError:
                pass

    def trust(self, found: Capabilities) -> None:
        """Take what is known from elsewhere: of the same store behind another address."""
        _known[self._own] = found


def forget() -> None:
    """Forget what this process knows of every store."""
    _known.clear()


def record_path(folder: Path, endpoint: str | None, bucket: str) -> Path:
    """Return the file that keeps what was found out about one bucket behind one endpoint."""
    mark = zlib.crc32(f"{endpoint or ''}\n{bucket}".encode())
    return folder / "s3" / f"{bucket}.{mark:08x}.json"


def recall(record: Path, own: tuple[str | None, str]) -> Capabilities | None:
    """Return what a record says of a store; a damaged one, one of another store or format says nothing."""
    try:
        document = json.loads(record.read_bytes())
        if (document["format"], document["endpoint"], document["bucket"]) != (_FORMAT, *own):
            return None
        found = Capabilities(**document["capabilities"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kinds = Capabilities.__annotations__
    right = all(type(value) is kinds[name] for name, value in found._asdict().items())
    return found if right else None


def remember(record: Path, own: tuple[str | None, str], found: Capabilities) -> None:
    """Write a record, whole or not at all; where that cannot be, the store is asked again next time."""
    document = {"format": _FORMAT, "endpoint": own[0], "bucket": own[1], "capabilities": found._asdict()}
    with suppress(OSError):
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(prefix=".", dir=record.parent)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(document, stream, indent=1)
        Path(fresh).replace(record)


def examine(link: Connection) -> Capabilities:
    """Try everything out and return what was found; what did not work the first time is tried once more.

    Raises DeniedError and what else keeps one from writing at all, and UnreachableError when an answer was lost: then
    nothing was found out.
    """
    found = _examine(link)
    return found if found.whole else _examine(link)


def _examine(link: Connection) -> Capabilities:
    shop = Shop.fresh()
    trial = _Trial(link)
    try:
        server = trial.put_first(shop.once)
        conditional = trial.put_is_refused(shop.once)
        body = _TWO if trial.replaced else _ONE
        sha256 = trial.wrong_is_refused(shop.wrong) and trial.told(shop.once) == _digest(body)
        read_back = trial.reads(shop.once, body)
        parts = trial.parts(shop.parts)
        ordered = trial.lists(shop, parts=parts.works)
        trailers = trial.trailers(shop.trailer)
    finally:
        deletes = trial.clear(shop)
    date = link.date()
    return Capabilities(
        conditional_put=conditional,
        conditional_complete=parts.conditional,
        sha256=sha256,
        sha256_parts=sha256 and parts.sha256,
        read_back=read_back and parts.read_back,
        ordered=ordered,
        deletes=deletes,
        multipart=parts.works,
        trailers=trailers,
        server=server,
        skew=0.0 if date is None else date - time.time(),
        probed_at=time.time(),
    )


class _Parts(NamedTuple):
    works: bool = False
    conditional: bool = False
    sha256: bool = False
    read_back: bool = True


def _digest(body: bytes) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def _refusal(error: errors.WeighbridgeError) -> bool:
    """Tell a server's clear "no" from an answer that was lost or put off; only the first one is a finding."""
    status = error.data.get("status")
    return isinstance(status, int) and (400 <= status < 500 or status == 501) and not error.data.get("slow")


class _Trial:
    """The single experiments; one that is refused was simply not seen to work."""

    WHAT = "cannot find out what the store can do"

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"}
        self._encrypted: dict[str, Any] = dict(link.place.encrypted)
        self.replaced = False

    def put_first(self, key: str) -> str:
        """Write the first object and return the server's name; what is refused here is refused for good."""
        try:
            answer = self._put(key, _ONE, **self._condition)
        except errors.ExistsError:
            return "no name"  # the answer to our own first try was lost
        except errors.WeighbridgeError as error:
            if error.data.get("status") != 501:
                raise
            self._condition = {}  # a clean "no": the store knows no conditions
            answer = self._put(key, _ONE)
        return str(answer["ResponseMetadata"]["HTTPHeaders"].get("server", "") or "no name")

    def put_is_refused(self, key: str) -> bool:
        """Try to replace the first object, and look whether that was refused and left it alone."""
        if not self._condition:
            return False
        try:
            self._put(key, _TWO, **self._condition)
        except errors.ExistsError:
            return self.reads(key, _ONE)
        except errors.WeighbridgeError as error:
            if not _refusal(error):
                raise
        self.replaced = self.reads(key, _TWO)
        return False

    def wrong_is_refused(self, key: str) -> bool:
        """Send a wrong sha256; it has to be refused, and nothing may be stored."""
        wrong = {"Body": _ONE, "ChecksumSHA256": _digest(_TWO), **self._condition, **self._encrypted}
        return self._is_refused("put_object", key, **wrong) and not self._there(key)

    def told(self, key: str) -> str:
        """Ask for the sha256 of an object."""
        head = self._ask("head_object", key, ChecksumMode="ENABLED")
        return str(head.get("ChecksumSHA256") or "")

    def reads(self, key: str, body: bytes) -> bool:
        """Read an object whole and in part, and compare."""
        try:
            return self._bytes(key) == body and self._bytes(key, Range="bytes=3-9") == body[3:10]
        except errors.DeniedError:
            raise  # says nothing of the store
        except errors.WeighbridgeError as error:
            if not _refusal(error):
                raise
            return False

    def parts(self, key: str) -> _Parts:
        """Send an object in parts, and another one over it; with our checksums, or without where they are refused."""
        algorithms: tuple[dict[str, Any], ...] = ({"ChecksumAlgorithm": "SHA256"}, {})
        for algorithm in algorithms:
            try:
                upload = self._begin(key, algorithm)
            except errors.WeighbridgeError as error:
                if not _refusal(error):
                    raise
                continue
            try:
                return self._parts(key, upload, algorithm)
            except errors.WeighbridgeError as error:
                if not _refusal(error):
                    raise
            finally:
                self._give_up(key, upload)
        return _Parts()

    def _parts(self, key: str, upload: str, algorithm: dict[str, Any]) -> _Parts:
        wrong: dict[str, Any] = {"UploadId": upload, "PartNumber": 1, "Body": _ONE, "ChecksumSHA256": _digest(_TWO)}
        refused = bool(algorithm) and self._is_refused("upload_part", key, **wrong)
        part = self._part(key, upload, _ONE, sha256=bool(algorithm))
        listed = self._ask("list_parts", key, UploadId=upload).get("Parts", [])
        with suppress(errors.ExistsError):  # the answer to our own first try was lost
            self._finish(key, upload, part)
        ours = base64.b64encode(hashlib.sha256(hashlib.sha256(_ONE).digest()).digest()).decode()
        told = self.told(key)
        return _Parts(
            works=len(listed) == 1 and listed[0].get("Size") == len(_ONE),
            sha256=refused and told == f"{ours}-1",
            read_back=self.reads(key, _ONE),
            conditional=self._finish_is_refused(key, algorithm),
        )

    def lists(self, shop: Shop, *, parts: bool) -> bool:
        """List what was just written, in pages of one and after a key."""
        folder = self._link.key(shop.once.rpartition("/")[0] + "/")
        wanted = [self._link.key(key) for key in (shop.once, *([shop.parts] if parts else []), shop.empty)]
        with suppress(errors.ExistsError):
            self._put(shop.empty, b"", **self._condition)
        try:
            found = self._listed(folder, {"MaxKeys": 1})
            after = self._listed(folder, {"StartAfter": wanted[0]})
        except errors.DeniedError:
            raise  # says nothing of the store
        except errors.WeighbridgeError as error:
            if not _refusal(error):
                raise
            return False
        others = {self._link.key(shop.wrong), self._link.key(shop.parts)} - set(wanted)
        return [k for k in found if k not in others] == wanted and [k for k in after if k not in others] == wanted[1:]

    def _listed(self, folder: str, how: dict[str, Any]) -> list[str]:
        found: list[str] = []
        at = how
        for _ in range(10):
            answer = self._link.ask("list_objects_v2", self.WHAT, tries=3, Prefix=folder, **at)
            found += [entry["Key"] for entry in answer.get("Contents", ())]
            if not answer.get("IsTruncated") or not answer.get("NextContinuationToken"):
                break
            at = {**how, "ContinuationToken": answer["NextContinuationToken"]}
        return found

    def trailers(self, key: str) -> str:
        """Let the library do as it does by default, which over TLS sends the body in chunks with a trailer.

        We never do; other tools do, and whoever copies into the bucket should know.
        """
        if not (self._link.place.endpoint or "https:").startswith("https:"):
            return _UNKNOWN
        client = self._link.client(request_checksum_calculation="when_supported")
        try:
            given = {**self._condition, **self._encrypted}
            client.put_object(Bucket=self._link.place.bucket, Key=self._link.key(key), Body=_ONE, **given)
        except CAUGHT:
            return "refused"
        finally:
            client.close()
        return "kept" if self.reads(key, _ONE) else "damaged"

    def clear(self, shop: Shop) -> bool:
        """Remove the probe's objects; a role that may not delete leaves a few hundred bytes, which harm nobody."""
        done = True
        for key in shop:
            try:
                self._ask("delete_object", key)
            except errors.DeniedError:
                done = False
            except errors.WeighbridgeError:
                continue
        return done

    def _ask(self, operation: str, key: str, *, tries: int = 3, **parameters: Any) -> Any:
        return self._link.ask(operation, self.WHAT, tries=tries, Key=self._link.key(key), **parameters)

    def _put(self, key: str, body: bytes, **parameters: Any) -> Any:
        given = {"ChecksumSHA256": _digest(body), **self._encrypted}
        return self._ask("put_object", key, Body=body, **(given | parameters))

    def _bytes(self, key: str, **parameters: Any) -> bytes:
        body = self._ask("get_object", key, **parameters)["Body"]
        try:
            return bytes(body.read())
        except CAUGHT as error:
            raise translate(error, self.WHAT, self._link.place.url) from error

    def _is_refused(self, operation: str, key: str, **parameters: Any) -> bool:
        try:
            self._ask(operation, key, tries=1, **parameters)
        except errors.WeighbridgeError as error:
            if not _refusal(error):
                raise
            return True
        return False

    def _there(self, key: str) -> bool:
        try:
            self._ask("head_object", key)
        except errors.MissingError:
            return False
        return True

    def _begin(self, key: str, algorithm: dict[str, Any]) -> str:
        return str(self._ask("create_multipart_upload", key, **algorithm, **self._encrypted)["UploadId"])

    def _part(self, key: str, upload: str, body: bytes, *, sha256: bool) -> dict[str, Any]:
        given: dict[str, Any] = {"ChecksumSHA256": _digest(body)} if sha256 else {}
        answer = self._ask("upload_part", key, UploadId=upload, PartNumber=1, Body=body, **given)
        return {"PartNumber": 1, "ETag": answer["ETag"], **given}

    def _finish(self, key: str, upload: str, part: dict[str, Any]) -> None:
        given: dict[str, Any] = {"UploadId": upload, "MultipartUpload": {"Parts": [part]}}
        self._ask("complete_multipart_upload", key, **given, **self._condition)

    def _finish_is_refused(self, key: str, algorithm: dict[str, Any]) -> bool:
        if not self._condition:
            return False
        upload = self._begin(key, algorithm)
        try:
            self._finish(key, upload, self._part(key, upload, _TWO, sha256=bool(algorithm)))
        except errors.ExistsError:
            return self.reads(key, _ONE)
        finally:
            self._give_up(key, upload)
        return False

    def _give_up(self, key: str, upload: str) -> None:
        with suppress(errors.WeighbridgeError):
            self._ask("abort_multipart_upload", key, UploadId=upload)
