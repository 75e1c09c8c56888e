"""What a kill costs: a publisher dies at a request boundary, and the next one sends only what the server does not have.

The proxy passes whole requests on, so a kill before one means that the server never saw it, and a kill after one that
its answer was lost. A part that the server has is never sent again, and of each file only one is under way.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.ranges import AHEAD
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.proxy import Fault, Proxy, Request
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import Shelf

pytestmark = pytest.mark.long

MIB = 1 << 20
PART = multipart.PART_LEAST
PARTS = 4

CHILD = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.remote import S3Remote

endpoint, prefix, workers, *files = sys.argv[1:]
remote = S3Remote(Place(f"s3://registry/{prefix}", "registry", prefix + "/", endpoint), single=1 << 20, part=5 << 20,
                  workers=int(workers))
remote.probe.ask()
print("ready", flush=True)
sys.stdin.readline()
def send(file):
    key, source, size, sha256 = file.split(",")
    remote.upload(key, Path(source), int(size), sha256)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(send, files))
"""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


def key_of(number: int) -> str:
    """Return the key of a file."""
    return layout.version("m", 1, f"model-{number}.safetensors")


def sources(folder: Path, count: int) -> dict[str, tuple[Path, int, str]]:
    """Write files of four parts, the last one short; return what `upload` wants to know of each key."""
    found = {}
    for number in range(count):
        body = random.Random(number).randbytes(PARTS * PART - 12_345)
        path = folder / f"source-{number}"
        path.write_bytes(body)
        found[key_of(number)] = (path, len(body), sha256_bytes(body))
    return found


def is_part(request: Request) -> bool:
    """Tell whether a request sends a part."""
    return request.method == "PUT" and "partNumber=" in request.target


def is_completion(request: Request) -> bool:
    """Tell whether a request completes an upload."""
    return request.method == "POST" and "uploadId=" in request.target


def kill_at(
    server: Server,
    prefix: str,
    given: dict[str, tuple[Path, int, str]],
    workers: int,
    match: Callable[[Request], bool],
    *,
    nth: int,
    done: Callable[[], bool] | None = None,
) -> Counter[str]:
    """Upload in a process of its own that is killed at the nth request of a kind: before the server gets it.

    With `done` the server gets it and its answer does not arrive; the process is killed when `done` says so. Returns
    how many parts of each key were on their way or there.
    """
    met: list[int] = []
    reached, dead = threading.Event(), threading.Event()
    files = [f"{key},{source},{size},{sha256}" for key, (source, size, sha256) in given.items()]
    with Proxy(server.endpoint, stall=60.0) as proxy:
        command = [sys.executable, "-c", CHILD, proxy.endpoint, prefix, str(workers), *files]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"

        def plan(request: Request) -> Fault | None:
            if dead.is_set():
                return Fault("refuse")  # of a dead process nothing more arrives
            if match(request):
                met.append(request.number)
            if len(met) != nth or request.number != met[-1]:
                return None
            reached.set()
            if done is not None:
                return Fault("stall")
            dead.set()
            child.send_signal(signal.SIGKILL)
            return Fault("refuse")

        proxy.plan = plan
        child.stdin.write("go\n")
        child.stdin.flush()
        assert reached.wait(30)
        while done is not None and not done():
            time.sleep(0.02)
        dead.set()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        begun = [request for request in proxy.requests if is_part(request)]
        return Counter(key for key in given for request in begun if f"/{key}?" in request.target)


def there(server: Server, prefix: str) -> dict[str, int]:
    """Return how many parts the server has of each unfinished upload, by key."""
    client = server.client()
    found = {}
    for upload in client.list_multipart_uploads(Bucket=server.bucket, Prefix=f"{prefix}/").get("Uploads", []):
        listed = client.list_parts(Bucket=server.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        found[upload["Key"].removeprefix(f"{prefix}/")] = len(listed.get("Parts", []))
    return found


def finish(server: Server, prefix: str, given: dict[str, tuple[Path, int, str]]) -> int:
    """Upload again with a fresh process's knowledge, see that all is right, and return how many parts were sent."""
    remote = S3Remote(server.place(prefix), single=MIB, part=PART)
    remote.probe.ask()
    remote.link.counts.clear()
    assert [stat.key for stat in remote.list("") if stat.key not in given] == []
    for key, (source, size, sha256) in given.items():
        with suppress(errors.ExistsError):
            remote.upload(key, source, size, sha256)
        assert remote.stat(key).sha256 == sha256
    sent = remote.link.counts["upload_part"]
    assert there(server, prefix) == {}
    remote.close()
    return sent


@pytest.mark.parametrize(("nth", "after"), [(1, False), (3, True), (4, True)])
def test_a_kill_at_a_part_costs_at_most_that_part(seaweed: Server, tmp_path: Path, nth: int, after: bool) -> None:
    """With one part under way, the parts before the kill are kept, and the one at the kill when its answer was lost."""
    prefix, given = f"resume-part-{nth}-{after}", sources(tmp_path, 1)
    kept = nth if after else nth - 1
    lost = (lambda: there(seaweed, prefix) == {key_of(0): nth}) if after else None
    kill_at(seaweed, prefix, given, 1, is_part, nth=nth, done=lost)
    assert there(seaweed, prefix) == {key_of(0): kept}
    assert finish(seaweed, prefix, given) == PARTS - kept


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_the_completion_costs_nothing(seaweed: Server, tmp_path: Path, after: bool) -> None:
    """Every part is there, and so is the whole file when only the answer was lost: nothing is sent again."""
    prefix, given = f"resume-complete-{after}", sources(tmp_path, 1)
    lost = (lambda: there(seaweed, prefix) == {}) if after else None
    kill_at(seaweed, prefix, given, 4, is_completion, nth=1, done=lost)
    assert finish(seaweed, prefix, given) == 0


@pytest.mark.parametrize(("count", "nth"), [(1, 2), (2, 3)])
def test_a_kill_costs_one_part_of_each_file(seaweed: Server, tmp_path: Path, count: int, nth: int) -> None:
    """However many workers there are, no part that the server has goes twice, and each file lacks one at most."""
    prefix, given = f"resume-files-{count}", sources(tmp_path, count)
    begun = kill_at(seaweed, prefix, given, 4, is_part, nth=nth)
    kept = there(seaweed, prefix)  # or more: what had arrived whole at the kill may be stored just now
    assert all(begun[key] - kept.get(key, 0) <= 1 for key in given)
    assert finish(seaweed, prefix, given) <= count * PARTS - sum(kept.values())


PULL = """
import sys
from pathlib import Path
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.remote import S3Remote

endpoint, prefix, target = sys.argv[1:]
place = Place(f"s3://registry/{prefix}", "registry", prefix + "/", endpoint)
pull(S3Remote(place, window=1 << 20), "m", 1, Path(target))
"""


def test_a_killed_pull_goes_on_with_what_was_written(seaweed: Server, tmp_path: Path) -> None:
    """What lay there at the kill is a beginning of the file, is hashed again, and only the rest is fetched."""
    remote = S3Remote(seaweed.place("resume-pull"))
    weights = random.Random(7).randbytes(24 * MIB + 1000)
    Shelf(remote).publish("m", {"model.safetensors": weights})
    reads: list[int] = []
    with Proxy(seaweed.endpoint) as proxy:
        command = [sys.executable, "-c", PULL, proxy.endpoint, "resume-pull", str(tmp_path / "model")]
        child = subprocess.Popen(command, env=os.environ)

        def plan(request: Request) -> Fault | None:
            if "model.safetensors" in request.target:
                reads.append(request.number)
            if len(reads) < AHEAD + 10:
                return None
            child.send_signal(signal.SIGKILL)
            return Fault("refuse")

        proxy.plan = plan
        assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    result = pull(remote, "m", 1, tmp_path / "model")
    assert result.fetched + result.reused == len(weights)
    assert 2 * MIB <= result.reused < len(weights)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    remote.close()
