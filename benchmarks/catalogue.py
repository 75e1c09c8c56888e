"""The team's catalogue in a bucket: the first `registry ls`, and one after a new version, by the size of the team.

The feed is filled as by daemons that publish now and then: a claim and its version in objects of their own, so twice as
many objects as versions, with digests that do not compress. They are put where the server keeps them, which is quicker
than S3; everything that is measured goes through S3. `ls` runs as a process of its own: once against the server itself,
then through a proxy that counts its requests.
"""

import argparse
import hashlib
import http.client
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from weighbridge.registry import layout, types
from weighbridge.registry.flow import entries, feed, snapshot
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import measure, seaweed
from weighbridge_testlib.measure import Cost
from weighbridge_testlib.proxy import Proxy
from weighbridge_testlib.seaweed import ACCESS, SECRET, Server
from weighbridge_testlib.shelf import facts, manifest_of, payload

SIZES: Final = [1_000, 10_000, 100_000]
NAMES: Final = 200
REQUESTS: Final = 4.0
FIRST: Final = 10.0
"""Seconds, of one hundred thousand versions and fewer."""

WRITERS: Final = 4


def told(rows: int) -> Iterator[types.FeedEntry]:
    """Yield the versions of a team, round about its names."""
    manifest = manifest_of(payload(), facts())
    entry = feed.version_entry("model", 1, manifest, card_sha256=manifest.digest, stored_at="2026-03-01T12:00:00Z")
    for at in range(rows):
        name, n = f"model-{at % NAMES}", at // NAMES + 1
        content, digest, card = (hashlib.sha256(f"{word} {at}".encode()).hexdigest() for word in "abc")
        yield msgspec.structs.replace(
            entry, name=name, n=n, source=layout.manifest(name, n), content=content, sha256=digest, card_sha256=card
        )


class Filler:
    """Puts objects into the folder that is the bucket, on several connections."""

    def __init__(self, server: Server, prefix: str) -> None:
        assert server.filer is not None
        address = urlsplit(server.filer)
        self._host = address.netloc
        self._base = f"{address.path}/{prefix}"
        self._own = threading.local()

    def __call__(self, item: tuple[str, bytes]) -> None:
        """Put one object."""
        key, body = item
        if not hasattr(self._own, "link"):
            self._own.link = http.client.HTTPConnection(self._host)
        self._own.link.request("PUT", f"{self._base}/{key}", body=body)
        answer = self._own.link.getresponse()
        answer.read()
        assert answer.status < 300, answer.status


def objects(rows: int) -> Iterator[tuple[str, bytes]]:
    """Yield the objects of the feed, and the newest snapshot that its writers would have left."""
    state = entries.State()
    seq = 0
    for version in told(rows):
        assert version.n is not None
        claim = msgspec.structs.replace(version, type="claim", source=layout.claim(version.name, version.n))
        for entry in (claim, version):
            seq += 1
            yield layout.feed(seq), feed.encode(feed.Part(seq=seq, epoch=1, nonce=f"{seq:032}", entries=[entry]))
            if seq <= 2 * rows // snapshot.EVERY * snapshot.EVERY:
                state.apply([entry])
    last = 2 * rows // snapshot.EVERY * snapshot.EVERY
    yield layout.snapshot(last), snapshot.encode(last, 1, state.entries())


def fill(server: Server, prefix: str, rows: int) -> None:
    """Put a whole feed into the bucket."""
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(Filler(server, prefix), objects(rows)))


def ls(place: Path, endpoint: str, prefix: str) -> Cost:
    """Run `registry ls` as a process that asks the remote."""
    config = place / "weighbridge.toml"
    config.write_text(f'[remotes.team]\nurl = "s3://registry/{prefix}"\nendpoint = "{endpoint}"\nmax_age = "0s"\n')
    config.chmod(0o600)
    environ = {**os.environ, "WEIGHBRIDGE_CONFIG": str(config)}
    took = measure.cost([str(Path(sys.prefix) / "bin/registry"), "ls"], env=environ, cwd=place)
    assert took.code == 0, took.code
    return took


def catalogue(server: Server, place: Path, rows: int) -> int:
    """Fill a registry with so many versions, and measure the first look and one after a new version."""
    prefix = f"catalogue-{rows}"
    remote = S3Remote(server.place(prefix))
    registry = open_registry(remote, create=True)
    begun = time.monotonic()
    # In a process of its own: the memory that this one has held would be counted as that of the commands below.
    filler = multiprocessing.get_context("spawn").Process(target=fill, args=(server, prefix, rows))
    filler.start()
    filler.join()
    assert filler.exitcode == 0
    filling = time.monotonic() - begun
    first = ls(place, server.endpoint, prefix)
    with Proxy(server.endpoint) as proxy:
        idle = ls(place, proxy.endpoint, prefix)
        idle_requests = len(proxy.requests)
        version = msgspec.structs.replace(
            next(told(1)), n=rows, source=layout.manifest("model-0", rows), stored_at=None
        )
        feed.announce(remote, registry, [version], known=feed.Head(2 * rows, 1))
        proxy.requests.clear()
        look = ls(place, proxy.endpoint, prefix)
        asked = [f"{request.method} {request.target.partition('?')[0]}" for request in proxy.requests]
    remote.close()
    return measure.report(
        f"catalogue-{rows}",
        {"requests_after_one_new_version": (float(len(asked)), REQUESTS), "first_ls_s": (first.wall, FIRST)},
        first_ls_cpu_s=round(first.cpu, 2),
        first_ls_mib=first.peak >> 20,
        look_s=round(look.wall, 2),
        look_cpu_s=round(look.cpu, 2),
        requests_when_nothing_is_new=idle_requests,
        ls_without_news_s=round(idle.wall, 2),
        filled_in_s=round(filling, 1),
        load=round(os.getloadavg()[0], 1),
    )


def main() -> int:
    """Measure and print one line of JSON for each size; 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, nargs="+", default=SIZES, help="how many versions, such as 1000")
    parser.add_argument("--directory", type=Path, help="where the server and the cache lie")
    given = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        place = Path(folder)
        os.environ["WEIGHBRIDGE_CACHE"] = str(place / "cache")
        (place / "server").mkdir()
        with seaweed.running(place / "server") as server:
            return max([catalogue(server, place, rows) for rows in given.versions])


if __name__ == "__main__":
    sys.exit(main())
