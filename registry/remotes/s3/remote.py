"""A remote that is a bucket: on AWS, MinIO, Ceph, SeaweedFS, R2 and the like, with no server of ours.

    <prefix>/models/<name>/v7/...      plain objects, as `aws s3 sync` and any loader read them
    <prefix>/_wb/probe/...             the probe's own objects, for a moment
    <prefix>/_wb/proofs/<key>.json     what the store's hash of a file in parts stands for (`proofs.py`)

Before the first write the store is asked what it really does (`probe.py`). Where it refuses a taken key, many may
write. Where it does not, a remote is only written when its settings say that there is one writer; then each key is
looked at before and read back after, which detects a second writer and cannot prevent one.
"""

import binascii
import hashlib
import itertools
import os
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import FlexibleChecksumError

from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import disk, errors, layout
from weighbridge.registry.refs import check_key, shown
from weighbridge.registry.remotes.protocol import Chunk, Denied, Progress, Properties, Stat
from weighbridge.registry.remotes.s3 import multipart, proofs
from weighbridge.registry.remotes.s3.client import Connection, Place, place_of
from weighbridge.registry.remotes.s3.errors import CAUGHT, SENSELESS, is_senseless, translate
from weighbridge.registry.remotes.s3.order import by_key
from weighbridge.registry.remotes.s3.probe import FOLDER, Capabilities, Probe, record_path
from weighbridge.registry.remotes.s3.ranges import WINDOW, Budget, Buffers, Reader
from weighbridge.registry.remotes.s3.unfinished import give_up, unfinished
from weighbridge.registry.remotes.source import changed, opened, whole

SINGLE: Final = 16 << 20
"""Files up to this size are sent in one request."""
OUT: Final = 64 << 20
"""Bytes of files on their way out that lie in memory at once."""
IN: Final = 80 << 20
"""Bytes of files on their way in that lie in memory at once: windows of a file on as many connections."""
PARALLEL: Final = 8
_TRIES: Final = 3
_DAMAGED_MAX: Final = 3
_TYPES: Final = {".json": "application/json", ".md": "text/markdown; charset=utf-8"}


def open_s3(url: str, endpoint: str | None, settings: RemoteSettings | None = None) -> "S3Remote":
    """Return the remote of `s3://bucket/prefix`. Raises UsageError for a URL that names no bucket."""
    given = settings or RemoteSettings(name="s3", url=url, endpoint=endpoint)
    place = place_of(given._replace(url=url, endpoint=endpoint))
    return S3Remote(place, record=record_path(Path(cache_dir(os.environ)), place.endpoint, place.bucket))


class S3Remote:
    """A bucket, or a folder in one, as a remote; safe for many threads, processes and machines at once."""

    def __init__(
        self,
        place: Place,
        *,
        record: Path | None = None,
        single: int = SINGLE,
        part: int = multipart.PART,
        window: int = WINDOW,
        workers: int = PARALLEL,
    ) -> None:
        self.link = Connection(place)
        self.probe = Probe(self.link, record)
        self._single = single
        self._part = part
        self._sending = Budget(OUT)
        self._reading = Buffers(IN, window)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="s3")
        self._proofs = proofs.Proofs(None if record is None else record.with_suffix(".proofs"))
        self._alone = threading.Lock()
        self._bucket_seen = False

    @property
    def url(self) -> str:
        """The URL as configured."""
        return self.link.place.url

    @property
    def properties(self) -> Properties:
        """What was found out about the store; before that, what its settings say, and no checksums."""
        can = self.probe.known()
        sha256 = can is not None and can.sha256
        return Properties(
            conditional_create=not self.link.place.one_writer if can is None else can.conditional_put,
            server_sha256=sha256,
            durable_ack=True,
            parallel=PARALLEL,
            upload_proof="sha256-server" if can is not None and can.sha256_parts else None,
            compares_files=can is not None and can.sha256_parts,
            part=self._part if can is not None and can.sha256_parts else 0,
        )

    def create(self, key: str, body: bytes) -> None:
        """Store a small object under a free key. Raises ExistsError, OutcomeUnknownError, SplitWritersError."""
        check_key(key)
        self._put(key, body, hashlib.sha256(body).digest(), self._writable(), {}, look=True)

    def upload(
        self,
        key: str,
        source: Path,
        size: int,
        sha256: str,
        progress: Progress | None = None,
        *,
        parts: Sequence[bytes] = (),
    ) -> None:
        """Store a file under a free key; unless the hashes of its parts are known, it is hashed while it is sent.

        A file that is there already is compared with the source by the server's checksum, and ExistsError is raised
        either way: `stat` knows the outcome. Raises SourceChangedError before anything is visible, VanishedError.
        """
        check_key(key)
        with opened(source) as descriptor:
            if os.fstat(descriptor).st_size != size:
                raise changed(source, f"it has {os.fstat(descriptor).st_size} bytes, expected were {size}")
            can = self._writable()
            given = self._given(payload=size > self._single)
            if size <= self._single:
                body = self._sending.take(size)
                try:
                    whole(descriptor, source, body, sha256, progress)
                    self._put(key, body, bytes.fromhex(sha256), can, given, look=False)
                finally:
                    self._sending.give(body)
                return
            if not can.multipart:
                raise errors.UsageError(
                    f"{shown(key)} is too large for this store",
                    why=f"it has {size} bytes, and {shown(self.url)} knows no uploads in parts",
                    fix="use another store",
                    remote=self.url,
                )
            self._refuse_compared(key, descriptor, size, sha256)
            part = multipart.part_size(size, self._part)
            fit = can.sha256_parts and part == self._part and len(parts) == -(-size // part)
            known = tuple(parts) if fit else ()
            job = multipart.Job(
                self.link, self._pool, self._sending, can, key, size, sha256, part, given, known, progress
            )
            with disk.speaking(f"cannot read {shown(str(source))}"):
                sent = multipart.send(job, descriptor)
            if sent.composite:
                self._keep(key, sent)
            elif can.sha256_parts:
                self._read_back(key, size, sha256)

    def read(self, key: str) -> bytes:
        """Return a small object whole, compared with the server's checksum where it has one. Raises MissingError."""
        check_key(key)
        what = f"cannot read {shown(key)}"
        for left in reversed(range(_DAMAGED_MAX)):
            answer = self.link.ask("get_object", what, Key=self.link.key(key), ChecksumMode="ENABLED")
            _refuse_page(answer, self.url)
            body = answer["Body"]
            try:
                return bytes(body.read())
            except FlexibleChecksumError as error:  # on its way, or where it lies
                if not left:
                    raise errors.IntegrityError(
                        f"{shown(key)} is damaged", why=f"its bytes do not fit its checksum at {shown(self.url)}"
                    ) from error
            except (*CAUGHT, *SENSELESS) as error:
                if isinstance(error, SENSELESS) and not is_senseless(error):
                    raise
                raise translate(error, what, self.url) from error
            finally:
                body.close()
        raise AssertionError

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes of an object from `offset` on, while the next ones are under way. Raises MissingError.

        A chunk is valid until the next one is asked for.
        """
        check_key(key)
        yield from Reader(self.link, self._pool, self._reading, key).chunks(offset)

    def stat(self, key: str) -> Stat:
        """Return size, store time, and the sha256 that the server verified, where it did. Raises MissingError."""
        check_key(key)
        head = self._head(key)
        sha256, told = self._sha256(key, head)
        return Stat(key, int(head["ContentLength"]), sha256, head["LastModified"].timestamp(), told)

    def learn(self) -> None:
        """Try the store out where nothing is known of it; a role that may not write has to do without."""
        self.probe.learn()

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix` in UTF-8 order, those after the key `after` only."""
        base = prefix.rpartition("/")[0]
        if base:
            check_key(base)
        if limit == 0:
            return
        found = by_key(self._pages(prefix, after, limit), f"{base}/" if base else "")
        start = None if after is None else after.encode()
        yield from itertools.islice((s for s in found if start is None or s.key.encode() > start), limit)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`, sorted by their UTF-8 bytes."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        whole = self.link.key(prefix)
        names = set()
        for answer in self._answers(prefix, Delimiter="/"):
            names |= {str(entry.get("Prefix", ""))[len(whole) : -1] for entry in answer.get("CommonPrefixes", ())}
        # The probe's folder is no one's, and some servers show it for a while after its last object.
        ours = {""} if prefix else {"", FOLDER.partition("/")[0]}
        yield from sorted(names - ours, key=lambda name: f"{name}/".encode())

    def delete(self, key: str) -> None:
        """Remove one object; a key that is not there is no error."""
        check_key(key)
        self._proofs.drop(self.link.key(key))
        with suppress(errors.MissingError):
            self.link.ask("delete_object", f"cannot delete {shown(key)}", tries=_TRIES, Key=self.link.key(key))

    def now(self) -> float:
        """Return the store's clock, as its answers are dated."""
        what = f"cannot ask {shown(self.url)} for the time"
        with suppress(errors.MissingError, errors.DeniedError):
            self.link.ask("head_object", what, tries=_TRIES, Key=self.link.key(layout.MARKER))
        date = self.link.date()
        if date is None:
            raise errors.UsageError(what, why="its answers carry no date", fix="use another store", remote=self.url)
        return date

    def stage(self, name: str, nonce: str) -> Path | None:  # noqa: ARG002 - a bucket has no folder here
        """Return None: there is no local folder to upload from without a copy.

        Raises what keeps one from writing there at all, as far as that is known or a probe finds out: the copy and the
        hashes of a large model come next.
        """
        self._writable()
        return None

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Give up uploads to which no part came for so many seconds, and remove what a probe left that is as old."""
        deadline = self.now() - older_than
        removed = 0
        try:
            for upload in unfinished(self.link, deadline):
                removed += give_up(self.link, upload)
        except errors.DeniedError as error:
            denied(error)
        try:
            for left in self._probes(deadline):
                self.delete(left.key)
                removed += 1
        except errors.DeniedError as error:
            denied(error)
        return removed

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each upload and of each probe that `sweep` would remove."""
        deadline = self.now() - older_than
        yield from (upload.bytes for upload in unfinished(self.link, deadline))
        yield from (left.size for left in self._probes(deadline))

    def _probes(self, deadline: float) -> Sequence[Stat]:
        return [left for left in self.list(FOLDER) if left.modified <= deadline - 3600]

    def close(self) -> None:
        """Give connections and threads back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.link.close()

    # ---------------------------------------------------------------------------------------------------------- writing

    def _writable(self) -> Capabilities:
        """Return what the store can do. Raises UsageError where nothing can be built on it."""
        can = self.probe.known() or self.probe.ask()
        if not can.read_back or not can.ordered:
            lack = "gives other bytes back than were written" if not can.read_back else "does not list in order"
            raise errors.UsageError(
                f"{shown(self.url)} cannot hold a registry", why=f"it {lack}", fix="use another store", remote=self.url
            )
        if not can.conditional_put and not self.link.place.one_writer:
            raise errors.UsageError(
                f"{shown(self.url)} cannot be shared",
                why="the store does not refuse a key that is taken, so two writers could overwrite each other",
                fix='use another store, or write writers = "one" into its settings and let one machine publish there',
                remote=self.url,
            )
        return can

    def _given(self, *, payload: bool) -> dict[str, str]:
        """Return what the settings ask for: encryption for all, a storage class only where it can save something."""
        place = self.link.place
        return place.encrypted | ({"StorageClass": place.storage_class} if place.storage_class and payload else {})

    def _put(
        self,
        key: str,
        body: bytes | bytearray,
        digest: bytes,
        can: Capabilities,
        given: Mapping[str, Any],
        *,
        look: bool,
    ) -> None:
        """Send one object in one request and see that the server has it; `digest` is the body's sha256.

        `look` reads it back where the server cannot refuse a taken key; a file is read back by whoever records it.
        """
        what = f"cannot store {shown(key)}"
        extra = {**self._given(payload=False), **given, **multipart.checks(can.sha256, body, digest)}
        if (kind := _TYPES.get(Path(key).suffix)) is not None:
            extra["ContentType"] = kind
        extra |= {"Key": self.link.key(key), "Body": body}
        if can.conditional_put:
            answer = self.link.ask("put_object", what, write=True, IfNoneMatch="*", **extra)
            if can.sha256 and answer.get("ChecksumSHA256") != multipart.spelled(digest):
                self._read_back(key, len(body), digest.hex())
            return
        with self._alone:  # our own threads at least do not overwrite each other
            multipart.refuse_taken(self.link, key)
            self.link.ask("put_object", what, write=True, **extra)
            if look and self.read(key) != body:
                raise errors.SplitWritersError(
                    f"{shown(self.url)} has a second writer",
                    why=f"{shown(key)} holds other bytes than were just written, and this store cannot refuse that",
                    fix="let one machine publish there, or use a store with conditional writes",
                    key=key,
                )

    def _refuse_compared(self, key: str, descriptor: int, size: int, sha256: str) -> None:
        """Raise ExistsError when the key is taken, once its file was compared with ours by the server's checksum."""
        try:
            head = self._head(key)
        except errors.MissingError:
            return
        told, part = _parts_of(head)
        if int(head["ContentLength"]) == size and part:
            _, ours, composite = multipart.composite_of(descriptor, part)
            if (ours, composite) == (sha256, told):
                self._keep(key, multipart.Sent(str(head.get("ETag")), told, sha256))
        raise errors.ExistsError(f"{shown(key)} is taken", why=f"{shown(self.url)} holds an object of that key")

    def _keep(self, key: str, sent: multipart.Sent) -> None:
        """Keep what was proven of a file in parts; that it cannot be said to others now is no reason to fail."""
        self._proofs.keep(self.link.key(key), sent)
        try:
            self.create(proofs.record_key(key), proofs.record(sent))
        except errors.SplitWritersError:
            raise
        except errors.WeighbridgeError:
            return

    def _read_back(self, key: str, size: int, sha256: str) -> None:
        """Compare what the server holds with what was sent, by its checksum, else by reading it."""
        found = self.stat(key)
        ours = found.sha256
        if found.size == size and ours is None:
            digest = hashlib.sha256()
            for chunk in self.fetch(key):
                digest.update(chunk)
            ours = digest.hexdigest()
        if (found.size, ours) != (size, sha256):
            raise errors.IntegrityError(
                f"{shown(key)} is not what was sent",
                why=f"{shown(self.url)} holds {found.size} bytes with sha256 {str(ours)[:12]}, "
                f"sent were {size} with {sha256[:12]}",
                fix="do not publish there until the store is repaired",
                key=key,
            )

    # ---------------------------------------------------------------------------------------------------------- reading

    def _head(self, key: str) -> Any:
        what = f"cannot look at {shown(key)}"
        try:
            head = self.link.ask(
                "head_object",
                what,
                needs=("ContentLength", "LastModified"),
                Key=self.link.key(key),
                ChecksumMode="ENABLED",
            )
        except errors.MissingError:
            self._see_bucket()
            raise
        except errors.RetryableError:
            raise
        except errors.WeighbridgeError:
            self._see_bucket()  # an answer to HEAD has no words; a listing has, and is refused for the same reason
            raise
        self._bucket_seen = True
        return head

    def _see_bucket(self) -> None:
        """Make sure that the bucket is there at all: HEAD says "not found" of a key and of a bucket alike."""
        if not self._bucket_seen:
            what = f"cannot list {shown(self.url)}"
            self.link.ask("list_objects_v2", what, tries=_TRIES, Prefix=self.link.key(layout.MARKER), MaxKeys=1)
            self._bucket_seen = True

    def _sha256(self, key: str, head: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Return the sha256 that the server itself stands for, of the object or of the parts we sent it in.

        Else, as the second, one that rests on a word: of a store that was not tried out from here, which our writers
        give a sha256 only after they saw it refuse wrong ones; or of whoever sent a file in parts.
        """
        can, told = self.probe.known(), str(head.get("ChecksumSHA256") or "")
        in_parts = "-" in told
        if not told or (can is not None and not (can.sha256_parts if in_parts else can.sha256)):
            return None, None
        if in_parts:
            etag, proof = str(head.get("ETag")), self._proofs.find(self.link.key(key))
            if proof is None or (proof.etag, proof.composite) != (etag, told):
                return None, self._recorded(key, etag, told)
            found = proof.sha256
        else:
            try:
                found = b64decode(told, validate=True).hex()
            except (ValueError, binascii.Error):
                return None, None
        return (None, found) if can is None else (found, None)

    def _recorded(self, key: str, etag: str, composite: str) -> str | None:
        """Return what whoever sent a file said that the server's hash over its parts stands for."""
        with suppress(errors.MissingError, errors.DeniedError, errors.IntegrityError):
            record = proofs.recorded(self.read(proofs.record_key(key)), etag, composite)
            return None if record is None else record.sha256
        return None

    def _pages(self, prefix: str, after: str | None, limit: int | None) -> Iterator[Stat]:
        given: dict[str, Any] = {} if limit is None else {"MaxKeys": min(1000, limit)}
        base = prefix.rpartition("/")[0]
        rest = None if after is None else after.removeprefix(f"{base}/" if base else "")
        # A start key in the middle of nested folders does not mean the same everywhere; of a flat one it does.
        if rest is not None and "/" not in rest and after is not None and after.startswith(prefix):
            given["StartAfter"] = self.link.key(after)
        elif after is not None:
            given = {}
        skip = len(self.link.place.prefix)
        for answer in self._answers(prefix, **given):
            for entry in answer.get("Contents", ()):
                key = str(entry.get("Key", ""))
                if not key.startswith(self.link.key(prefix)) or not {"Size", "LastModified"} <= set(entry):
                    raise errors.RetryableError(
                        f"cannot list {shown(prefix)} in {shown(self.url)}",
                        why=f"its answer was damaged on its way: {shown(key) or 'an entry'} was not asked for",
                        fix="repeat; where it goes on, ask who runs the store",
                    )
                if not key.endswith("/"):  # what some consoles make as a folder is no object of ours
                    yield Stat(key[skip:], int(entry["Size"]), None, entry["LastModified"].timestamp())

    def _answers(self, prefix: str, **given: Any) -> Iterator[Any]:
        what = f"cannot list {shown(prefix)} in {shown(self.url)}"
        at: dict[str, Any] = {}
        while True:
            answer = self.link.ask("list_objects_v2", what, tries=_TRIES, Prefix=self.link.key(prefix), **given, **at)
            self._bucket_seen = True
            yield answer
            if not answer.get("IsTruncated"):
                return
            if not answer.get("NextContinuationToken"):
                raise errors.IntegrityError(what, why="the store says that there is more and not where")
            at = {"ContinuationToken": answer["NextContinuationToken"]}


def _parts_of(head: Mapping[str, Any]) -> tuple[str, int]:
    """Return the server's hash over the parts of an object and the size of the parts, 0 when it does not tell."""
    told = str(head.get("ChecksumSHA256") or "")
    part = str((head.get("Metadata") or {}).get(multipart.PART_SIZE_KEY, ""))
    right = "-" in told and part.isdecimal() and int(part) >= multipart.PART_LEAST
    return told, int(part) if right else 0


def _refuse_page(answer: Mapping[str, Any], url: str) -> None:
    """Refuse what no S3 answers a GET with: neither an ETag nor any header of S3's own."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    if not any(header == "etag" or header.startswith("x-amz-") for header in headers):
        answer["Body"].close()
        raise errors.UsageError(
            f"{shown(url)} cannot be used as it is set up",
            why="what answers there is not S3: it gives neither an ETag nor any x-amz- header",
            fix="correct the endpoint of this remote",
            remote=url,
        )
