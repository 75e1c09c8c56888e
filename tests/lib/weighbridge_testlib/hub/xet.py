"""The content-addressed store behind xet, over HTTP: xorbs of chunks, shards that say how files are made of them.

A commit names files by sha256, this store by xet hash; the link between them stands in the shard. The bytes are put
together here by ourselves, so that a size or sha256 that is not that of the bytes is found out.
"""

import struct
import time
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from weighbridge_testlib.hub.files import ranged
from weighbridge_testlib.hub.lz4 import decode_frame
from weighbridge_testlib.hub.server import Answer, Request, Routes, TestHub
from weighbridge_testlib.hub.store import Refused, Repo

ROUTES = Routes()
_ENTRY: Final = 48
_END: Final = b"\xff" * 32
R: Final = "/api/(?P<kind>models|datasets|spaces)/{ns}/{name}"


class Segment(NamedTuple):
    """A run of chunks of one xorb."""

    xorb: str
    size: int
    first: int
    last: int


class File(NamedTuple):
    """A file as a shard describes it."""

    hash: str
    sha256: str | None
    segments: list[Segment]


@dataclass
class Xorb:
    """Chunks as they were sent: where each begins, and its bytes."""

    stored: bytes
    starts: list[int]
    chunks: list[bytes]


@dataclass
class Cas:
    """What the store holds; `tokens` maps an access token to the repository it was given for and its end."""

    xorbs: dict[str, Xorb] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    tokens: dict[str, tuple[Repo, float]] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------------------------- tokens


@ROUTES.add("GET", f"{R}/xet-(?P<act>read|write)-token/{{rev}}")
def token(hub: TestHub, request: Request) -> Answer:
    """Give a token for the store, in headers for Python and in JSON for Rust."""
    parts = request.parts
    write = parts["act"] == "write"
    repo = hub.store.find(
        parts["kind"].removesuffix("s"), f"{parts['ns']}/{parts['name']}", request.token, write=write, content=True
    )
    if not hub.xet:
        raise Refused(404, None, "Sorry, we can't find the page you are looking for.")
    until = time.time() + 3600
    name = f"xet-{parts['act']}-{len(hub.cas.tokens)}"
    hub.cas.tokens[name] = (repo, until)
    where = f"{hub.cas_host or hub.storage}/_cas"
    headers = {"X-Xet-Cas-Url": where, "X-Xet-Access-Token": name, "X-Xet-Token-Expiration": str(int(until))}
    return Answer({"casUrl": where, "accessToken": name, "exp": int(until)}, headers=headers)


def _repo(hub: TestHub, request: Request, act: str) -> Repo:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    found = hub.cas.tokens.get(bearer)
    if found is None or found[1] < time.time() or (act == "write" and not bearer.startswith("xet-write")):
        raise Refused(401, None, "the xet token is not valid")
    return found[0]


# -------------------------------------------------------------------------------------------------------------- upload


@ROUTES.add("POST", "/_cas/v1/xorbs/default/{hash}")
def put_xorb(hub: TestHub, request: Request) -> Answer:
    """Take chunks."""
    _repo(hub, request, "write")
    name = request.parts["hash"]
    with hub.store.lock:
        fresh = name not in hub.cas.xorbs
        if fresh:
            hub.cas.xorbs[name] = parse_xorb(request.body)
    return Answer({"was_inserted": fresh})


@ROUTES.add("POST", "/_cas/v1/shards")
def put_shard(hub: TestHub, request: Request) -> Answer:
    """Take the description of files, and make sure that their bytes are there and are what their sha256 says."""
    repo = _repo(hub, request, "write")
    for file in parse_shard(request.body):
        body = build(hub.cas, file)
        if file.sha256 is not None:
            hub.store.put_object(repo, body, file.sha256, xet=file.hash)
        hub.cas.files[file.hash] = file
    return Answer({"result": 1})


def parse_xorb(stored: bytes) -> Xorb:
    """Return the chunks of a xorb."""
    starts, chunks = [], []
    at = 0
    while at + 8 <= len(stored) and stored[at : at + 7] != b"XETBLOB":
        version, scheme = stored[at], stored[at + 4]
        packed = int.from_bytes(stored[at + 1 : at + 4], "little")
        size = int.from_bytes(stored[at + 5 : at + 8], "little")
        body = stored[at + 8 : at + 8 + packed]
        if version != 0 or len(body) != packed:
            raise Refused(400, None, "the xorb is damaged")
        starts.append(at)
        chunks.append(_unpacked(body, scheme, size))
        at += 8 + packed
    starts.append(at)
    return Xorb(stored, starts, chunks)


def _unpacked(body: bytes, scheme: int, size: int) -> bytes:
    if scheme in {1, 2}:
        body = decode_frame(body)
    if scheme == 2:  # the bytes of 4-byte words, grouped by their place in the word
        groups, at = [], 0
        for place in range(4):
            length = (size - place + 3) // 4
            groups.append(body[at : at + length])
            at += length
        whole = bytearray(size)
        for place, group in enumerate(groups):
            whole[place::4] = group
        body = bytes(whole)
    if len(body) != size:
        raise Refused(400, None, "a chunk has not the size that its header says")
    return body


def parse_shard(stored: bytes) -> list[File]:
    """Return the files that a shard describes."""
    files, at = [], 48
    while stored[at : at + 32] != _END:
        name = hash_text(stored[at : at + 32])
        flags, count = struct.unpack_from("<II", stored, at + 32)
        at += _ENTRY
        segments = []
        for _ in range(count):
            size, first, last = struct.unpack_from("<III", stored, at + 36)
            segments.append(Segment(hash_text(stored[at : at + 32]), size, first, last))
            at += _ENTRY
        if flags & 1 << 31:
            at += count * _ENTRY
        sha256 = None
        if flags & 1 << 30:
            sha256 = hash_text(stored[at : at + 32])
            at += _ENTRY
        files.append(File(name, sha256, segments))
    return files


def hash_text(raw: bytes) -> str:
    """Return a hash as text: four little-endian words of 64 bits."""
    return "".join(raw[at : at + 8][::-1].hex() for at in range(0, 32, 8))


def build(cas: Cas, file: File) -> bytes:
    """Return the bytes of a file. Raises Refused when a part of it is not there or has another size."""
    body = b""
    for segment in file.segments:
        xorb = cas.xorbs.get(segment.xorb)
        if xorb is None:
            raise Refused(400, None, f"the xorb {segment.xorb} is not there")
        piece = b"".join(xorb.chunks[segment.first : segment.last])
        if len(piece) != segment.size:
            raise Refused(400, None, "a segment has not the size that the shard says")
        body += piece
    return body


# ------------------------------------------------------------------------------------------------------------ download


@ROUTES.add("GET", "/_cas/v1/reconstructions/{hash}")
def reconstruct(hub: TestHub, request: Request) -> Answer:
    """Say where the bytes of a file, or of a range of it, lie."""
    _repo(hub, request, "read")
    file = hub.cas.files.get(request.parts["hash"])
    if file is None:
        raise Refused(404, None, "no such file")
    size = sum(segment.size for segment in file.segments)
    start, end = 0, size - 1
    wanted = request.headers.get("range")
    if wanted:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) if last else size - 1, size - 1)
        if start >= size:
            raise Refused(416, None, "range not satisfiable")
    terms: list[dict[str, Any]] = []
    fetch: dict[str, list[dict[str, Any]]] = {}
    at, skip = 0, 0
    for segment in file.segments:
        if at + segment.size > start and at <= end:
            if not terms:
                skip = start - at
            xorb = hub.cas.xorbs[segment.xorb]
            chunks = {"start": segment.first, "end": segment.last}
            terms.append({"hash": segment.xorb, "unpacked_length": segment.size, "range": chunks})
            place = {"start": xorb.starts[segment.first], "end": xorb.starts[segment.last] - 1}
            known = fetch.setdefault(segment.xorb, [])
            if not any(one["range"] == chunks for one in known):
                where = f"{hub.cas_host or hub.storage}/_cas/data/{segment.xorb}"
                known.append({"range": chunks, "url": where, "url_range": place})
        at += segment.size
    return Answer({"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch})


@ROUTES.add("GET", "/_cas/data/{hash}")
def data(hub: TestHub, request: Request) -> Answer:
    """Give out the stored form of chunks; the address is the permission."""
    return ranged(request, hub.cas.xorbs[request.parts["hash"]].stored, {})
