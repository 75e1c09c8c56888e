"""Large files in parts: one of a file under way while the next is read.

    read a part, hash it, go on with the hash of the file -> a worker sends it -> the server checks that hash

Where the parts' hashes are known from the pass that hashed the file, a part is read and sent with the hash it has to
have: the server refuses other bytes, and nothing is hashed twice.

The server keeps the hash over the hashes of the parts (`<base64>-<parts>`); after completion it is read back and
compared with ours, which proves the whole file without reading it again. The part size is kept with the object. Parts
that a killed upload left behind are compared with the bytes that are to be sent now, and only then not sent again.
"""

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Progress
from weighbridge.registry.remotes.s3.client import Connection
from weighbridge.registry.remotes.s3.probe import Capabilities
from weighbridge.registry.remotes.s3.ranges import Budget

PART: Final = 16 << 20
"""Bytes of a part, unless that makes too many."""
PART_LEAST: Final = 5 << 20
"""Servers refuse smaller parts, but for the last one."""
PARTS_MAX: Final = 10_000
PART_SIZE_KEY: Final = "wb-part-size"
"""The metadata that tells in which parts a file was sent; without it the server's hash could not be recomputed."""
_TRIES: Final = 4
_READ: Final = 1 << 20


class Sent(NamedTuple):
    """What the server confirmed of a file: its own tag, its hash over the parts' hashes, and what we sent."""

    etag: str
    composite: str
    sha256: str


class Job(NamedTuple):
    """One file on its way; `known` are the hashes of its parts by the pass that gave `sha256`, or none."""

    link: Connection
    pool: ThreadPoolExecutor
    budget: Budget
    can: Capabilities
    key: str
    size: int
    sha256: str
    part: int
    given: Mapping[str, Any]
    known: tuple[bytes, ...] = ()
    progress: Progress | None = None

    @property
    def what(self) -> str:
        """Say what cannot be done when something fails."""
        return f"cannot store {shown(self.key)}"


class _Part(NamedTuple):
    number: int
    etag: str
    digest: bytes


class _Bytes(NamedTuple):
    number: int
    body: bytearray
    digest: bytes


def part_size(size: int, least: int = PART) -> int:
    """Return the size of the parts of a file: `least`, doubled until there are few enough."""
    part = max(least, PART_LEAST)
    while -(-size // part) > PARTS_MAX:
        part *= 2
    return part


def spelled(digest: bytes) -> str:
    """Return a digest as S3 spells it."""
    return base64.b64encode(digest).decode()


def composite(digests: list[bytes]) -> str:
    """Return the hash that a server keeps for a file that was sent in parts with these hashes."""
    return f"{spelled(hashlib.sha256(b''.join(digests)).digest())}-{len(digests)}"


def composite_of(descriptor: int, part: int) -> tuple[int, str, str]:
    """Read a file and return its size, its sha256, and the hash a server keeps for it in parts of this size."""
    whole, total = hashlib.sha256(), 0
    digests: list[bytes] = []
    os.lseek(descriptor, 0, os.SEEK_SET)
    while True:
        one, left = hashlib.sha256(), part
        while left and (chunk := os.read(descriptor, min(_READ, left))):
            whole.update(chunk)
            one.update(chunk)
            left -= len(chunk)
        if left == part and digests:
            return total, whole.hexdigest(), composite(digests)
        total += part - left
        digests.append(one.digest())


def send(job: Job, descriptor: int) -> Sent:
    """Send a file in parts and return what the server confirmed.

    Raises SourceChangedError before anything is visible, ExistsError when the key is taken, RetryableError and
    OutcomeUnknownError, after which the next call goes on from the parts that are there. Once the file is confirmed,
    the uploads of its key that were unfinished before are ended: none of them can become anything any more.
    """
    before = _unfinished(job)
    upload, there = _resume(job, descriptor, before) or (_begin(job), {})
    try:
        parts = _send_parts(job, descriptor, upload, there)
        etag = _complete(job, upload, parts)
    except errors.WeighbridgeError as error:
        later = isinstance(error, errors.UnreachableError | errors.DeniedError | errors.StorageFullError)
        if not later or error.data.get("kind") == "stale":  # no next call can go on from it
            _abort(job, upload)
        if error.data.get("kind") == "gone":
            raise _gone(job, error) from error
        raise
    sent = _confirmed(job, etag, [part.digest for part in parts])
    for other in before:
        if other != upload:
            _abort(job, other)
    return sent


def _begin(job: Job) -> str:
    algorithm: dict[str, Any] = {"ChecksumAlgorithm": "SHA256"} if job.can.sha256_parts else {}
    answer = job.link.ask(
        "create_multipart_upload",
        job.what,
        tries=_TRIES,
        needs=("UploadId",),
        Key=job.link.key(job.key),
        Metadata={PART_SIZE_KEY: str(job.part)},
        **algorithm,
        **job.given,
    )
    return str(answer["UploadId"])


def _unfinished(job: Job) -> list[str]:
    """Return the unfinished uploads of exactly this key, the latest first; none where the list is refused or unknown.

    A killed process leaves one behind; it has no parts when its first one had not arrived.
    """
    found: list[Mapping[str, Any]] = []
    with _unless_told():
        found = sorted(uploads(job.link, job.key, exact=True), key=lambda u: u["Initiated"], reverse=True)
    return [str(upload["UploadId"]) for upload in found]


def _resume(job: Job, descriptor: int, before: list[str]) -> tuple[str, dict[int, Mapping[str, Any]]] | None:
    """Return the first of these uploads that is of the same file, with its parts, or None.

    It is the same file when the first of its parts is; each other one is compared when its turn comes. One without
    parts does not tell what it is of. A list that is refused or not known only means that everything is sent.
    """
    with _unless_told():
        for upload in before:
            there = {int(part["PartNumber"]): part for part in _listed(job, upload)}
            number = min(there, default=0)
            size = min(job.part, job.size - (number - 1) * job.part)
            if number and size > 0:
                body = os.pread(descriptor, size, (number - 1) * job.part)
                if _same(there[number], body, hashlib.sha256(body).digest()):
                    return upload, there
    return None


@contextmanager
def _unless_told() -> Iterator[None]:
    """Do without an answer that is refused, not known, or not to be had now."""
    try:
        yield
    except (errors.DeniedError, errors.NotFoundError, errors.RetryableError):
        return
    except errors.WeighbridgeError as error:
        if type(error) is not errors.WeighbridgeError:
            raise


def uploads(link: Connection, prefix: str, *, exact: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield the unfinished uploads below a prefix, or of exactly this key."""
    at: dict[str, Any] = {}
    while True:
        what = f"cannot list the unfinished uploads of {shown(link.place.url)}"
        answer = link.ask("list_multipart_uploads", what, tries=_TRIES, Prefix=link.key(prefix), **at)
        for upload in answer.get("Uploads", ()):
            if not {"Key", "UploadId", "Initiated"} <= set(upload):
                raise errors.RetryableError(what, why="its answer was damaged on its way", fix="repeat")
            if not exact or upload["Key"] == link.key(prefix):
                yield upload
        if not answer.get("IsTruncated") or not answer.get("NextKeyMarker"):
            return
        at = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer.get("NextUploadIdMarker", "")}


def _listed(job: Job, upload: str) -> Iterator[Mapping[str, Any]]:
    at: dict[str, Any] = {}
    while True:
        answer = job.link.ask(
            "list_parts", job.what, tries=_TRIES, Key=job.link.key(job.key), UploadId=upload, MaxParts=1000, **at
        )
        parts = [part for part in answer.get("Parts", ()) if {"PartNumber", "ETag"} <= set(part)]
        yield from parts
        if not answer.get("IsTruncated") or not parts:
            return
        at = {"PartNumberMarker": int(parts[-1]["PartNumber"])}


def _same(listed: Mapping[str, Any], body: bytes | bytearray, digest: bytes) -> bool:
    """Tell whether a part that a server lists holds these bytes: by its sha256, else by the MD5 that its tag may be."""
    if listed.get("Size") != len(body):
        return False
    told = listed.get("ChecksumSHA256")
    if told:
        return bool(told == spelled(digest))
    tag = str(listed.get("ETag", "")).strip('"')
    return tag == hashlib.md5(body, usedforsecurity=False).hexdigest()


def _send_parts(job: Job, descriptor: int, upload: str, there: Mapping[int, Mapping[str, Any]]) -> list[_Part]:
    """Read the file once, send its parts, and return them; no worker is busy when this returns or raises.

    One part is on its way at a time, while the next one is read and hashed: a kill costs that one and no other. What is
    faster for a store is left to several files at once.
    """
    whole = hashlib.sha256()
    parts: list[_Part] = []
    sending: Future[_Part] | None = None
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        for number, start in enumerate(range(0, job.size, job.part), 1):
            size = min(job.part, job.size - start)
            body = job.budget.take(size)
            try:
                _read(job, descriptor, body)
                if job.known:
                    digest = job.known[number - 1]
                else:
                    whole.update(body)
                    digest = hashlib.sha256(body).digest()
                ready = _Bytes(number, body, digest)
                if sending is not None:
                    parts.append(sending.result())
                sending = job.pool.submit(_send_part, job, upload, ready, there.get(number))
            except BaseException:
                job.budget.give(body)
                raise
            sending.add_done_callback(partial(_give, job.budget, body))
            del body, ready
        if os.read(descriptor, 1):
            raise _changed(job, "it is longer than it was")
        if not job.known and whole.hexdigest() != job.sha256:
            raise _changed(job, f"its sha256 is {whole.hexdigest()[:12]}, expected was {job.sha256[:12]}")
        if sending is not None:
            parts.append(sending.result())
    finally:
        if sending is not None and not sending.cancel():
            wait((sending,))
    return parts


def _give(budget: Budget, body: bytearray, _: object) -> None:
    budget.give(body)


def _read(job: Job, descriptor: int, body: bytearray) -> None:
    """Fill a buffer from where the file is."""
    have = 0
    with memoryview(body) as view:
        while have < len(body):
            count = os.readv(descriptor, [view[have : have + _READ]])
            if not count:
                raise _changed(job, "it is shorter than it was")
            have += count


def _changed(job: Job, why: str) -> errors.SourceChangedError:
    return errors.SourceChangedError(
        f"the source of {shown(job.key)} changed while it was read",
        why=why,
        fix="wait until its writer is done, then repeat",
    )


def _send_part(job: Job, upload: str, ready: _Bytes, listed: Mapping[str, Any] | None) -> _Part:
    # By an MD5 the part may be the bytes that were just read, and these others than the ones that were hashed.
    if listed is not None and _same(listed, ready.body, ready.digest) and not (job.known and _differs(ready)):
        etag = str(listed["ETag"])
    else:
        try:
            answer = job.link.ask(
                "upload_part",
                job.what,
                tries=_TRIES,
                needs=("ETag",),
                Key=job.link.key(job.key),
                UploadId=upload,
                PartNumber=ready.number,
                Body=ready.body,
                **checks(job.can.sha256_parts, ready.body, ready.digest),
            )
        except errors.WeighbridgeError as error:
            if job.known and _differs(ready):
                raise _changed(job, f"its part {ready.number} holds other bytes than it did") from error
            raise
        etag = str(answer["ETag"])
    if job.progress is not None:
        job.progress(len(ready.body))
    return _Part(ready.number, etag, ready.digest)


def _differs(ready: _Bytes) -> bool:
    return hashlib.sha256(ready.body).digest() != ready.digest


def checks(sha256: bool, body: bytes | bytearray, digest: bytes) -> dict[str, Any]:
    """Return the checksum by which a server refuses damaged bytes: ours, or the old one where it knows no other."""
    if sha256:
        return {"ChecksumSHA256": spelled(digest)}
    return {"ContentMD5": spelled(hashlib.md5(body, usedforsecurity=False).digest())}


def _complete(job: Job, upload: str, parts: list[_Part]) -> str:
    listed = [
        {"PartNumber": part.number, "ETag": part.etag}
        | ({"ChecksumSHA256": spelled(part.digest)} if job.can.sha256_parts else {})
        for part in parts
    ]
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if job.can.conditional_complete else {}
    if not condition:
        refuse_taken(job.link, job.key)
    answer = job.link.ask(
        "complete_multipart_upload",
        job.what,
        write=True,
        Key=job.link.key(job.key),
        UploadId=upload,
        MultipartUpload={"Parts": listed},
        **condition,
    )
    return str(answer.get("ETag", ""))


def _confirmed(job: Job, etag: str, digests: list[bytes]) -> Sent:
    """Read back what the server holds now and compare it with what was sent.

    A store may look at the condition first and complete afterwards, so that of two completions in one moment both are
    answered well: then ExistsError, as for any key that is taken. Raises OutcomeUnknownError when it does not tell:
    then the bytes have to be read.
    """
    try:
        head = job.link.ask(
            "head_object",
            job.what,
            tries=_TRIES,
            needs=("ContentLength",),
            Key=job.link.key(job.key),
            ChecksumMode="ENABLED",
        )
    except (errors.RetryableError, errors.MissingError) as error:
        raise errors.OutcomeUnknownError(
            job.what, why="it was sent and could not be looked at", fix="repeat"
        ) from error
    ours = composite(digests)
    told = str(head.get("ChecksumSHA256") or "")
    if head["ContentLength"] != job.size or (job.can.sha256_parts and told and told != ours):
        if etag and str(head.get("ETag") or etag) != etag:  # not the tag it answered with: it is another's file
            raise _taken(job.link, job.key)
        raise errors.IntegrityError(
            f"{shown(job.key)} is not what was sent",
            why=f"{shown(job.link.place.url)} holds {head['ContentLength']} bytes with the checksum {told or 'none'}, "
            f"sent were {job.size} with {ours}",
            fix="do not publish there until the store is repaired",
            key=job.key,
        )
    return Sent(str(head.get("ETag") or etag), told if job.can.sha256_parts else "", job.sha256)


def refuse_taken(link: Connection, key: str) -> None:
    """Raise ExistsError when an object of this key is there: all that a store without conditions allows."""
    what = f"cannot look at {shown(key)}"
    with suppress(errors.MissingError):
        link.ask("head_object", what, tries=_TRIES, Key=link.key(key))
        raise _taken(link, key)


def _taken(link: Connection, key: str) -> errors.ExistsError:
    return errors.ExistsError(f"{shown(key)} is taken", why=f"{shown(link.place.url)} holds an object of that key")


def _abort(job: Job, upload: str) -> None:
    with suppress(errors.WeighbridgeError):  # what is left over is swept by its age
        job.link.ask("abort_multipart_upload", job.what, Key=job.link.key(job.key), UploadId=upload)


def _gone(job: Job, error: errors.WeighbridgeError) -> errors.WeighbridgeError:
    """Tell why an upload is gone: somebody finished it, perhaps we ourselves, or gave it up."""
    try:
        refuse_taken(job.link, job.key)
    except errors.ExistsError as taken:
        return taken
    except errors.WeighbridgeError:
        return errors.OutcomeUnknownError(job.what, why=error.why, fix=error.fix)
    return errors.RetryableError(job.what, why=error.why, fix=error.fix)
