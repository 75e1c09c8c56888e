"""The cache of pulled files: a second pull transfers nothing, and nothing that lies there is ever believed unread."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry.flow.cache import Cache
from weighbridge.registry.flow.pull import Pulled, pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Chunk
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge_testlib.shelf import Shelf, payload

NAME = "medical-sft"
FILES = payload(1, size=300_000)
TOTAL = sum(map(len, FILES.values()))
ROOMY = 1 << 30


class Counting(Wrapper):
    """A remote that counts the bytes of files that were asked of it."""

    moved = 0

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield and count."""
        for chunk in super().fetch(key, offset):
            self.moved += len(chunk)
            yield chunk


@pytest.fixture
def remote() -> Counting:
    """Return a remote with one version."""
    shelf = Shelf(MemoryRemote())
    shelf.publish(NAME, FILES)
    return Counting(shelf.remote)


def kept(folder: Path) -> dict[str, Path]:
    """Return the files of a cache by their names."""
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


def right(pulled: Pulled) -> bool:
    """Tell whether a pull delivered what was published."""
    return all((Path(pulled.path) / path).read_bytes() == body for path, body in FILES.items())


def test_a_second_pull_transfers_nothing(remote: Counting, tmp_path: Path) -> None:
    """Every file comes from the cache, whatever the target and the name of the file."""
    cache = Cache(tmp_path / "cache", ROOMY)
    first = pull(remote, NAME, 1, tmp_path / "a", cache=cache)
    assert (first.fetched, first.reused, first.cached, remote.moved) == (TOTAL, 0, 0, TOTAL)
    assert sorted(kept(tmp_path / "cache")) == sorted(map(sha256_bytes, FILES.values()))
    second = pull(remote, NAME, 1, tmp_path / "b", cache=Cache(tmp_path / "cache", ROOMY))
    assert (second.fetched, second.reused, second.cached, remote.moved) == (0, TOTAL, TOTAL, TOTAL)
    assert right(second)
    third = pull(remote, NAME, 1, tmp_path / "c")
    assert (third.fetched, third.cached) == (TOTAL, 0)


def test_what_people_do_to_a_pulled_file_does_not_reach_the_cache(remote: Counting, tmp_path: Path) -> None:
    """Nothing is linked: a target can be written, and writing to it changes neither the cache nor the next pull."""
    cache = Cache(tmp_path / "cache", ROOMY)
    for target in ("a", "b"):
        pulled = pull(remote, NAME, 1, tmp_path / target, cache=cache)
        for path in FILES:
            assert (tmp_path / target / path).stat().st_nlink == 1
            with (tmp_path / target / path).open("r+b") as stream:
                stream.write(b"mine")
        assert pulled.bytes == TOTAL
    for digest, file in kept(tmp_path / "cache").items():
        found = file.stat()
        assert (sha256_bytes(file.read_bytes()), found.st_nlink, found.st_mode & 0o777) == (digest, 1, 0o400)
    assert right(pull(remote, NAME, 1, tmp_path / "c", cache=cache))


@pytest.mark.parametrize("harm", ["flipped", "short", "long", "folder"])
def test_a_damaged_file_is_fetched_again(remote: Counting, tmp_path: Path, harm: str) -> None:
    """What does not hash to its name is forgotten, the pull is right all the same, and the next one finds it mended."""
    cache = Cache(tmp_path / "cache", ROOMY)
    pull(remote, NAME, 1, tmp_path / "a", cache=cache)
    weights = kept(tmp_path / "cache")[sha256_bytes(FILES["adapter_model.safetensors"])]
    body = bytearray(FILES["adapter_model.safetensors"])
    weights.unlink()
    if harm == "folder":
        weights.mkdir()
    else:
        body[7] ^= 1
        weights.write_bytes({"flipped": body, "short": body[:-9], "long": body + b"more"}[harm])
    second = pull(remote, NAME, 1, tmp_path / "b", cache=cache)
    assert right(second)
    assert second.fetched == len(FILES["adapter_model.safetensors"])
    assert pull(remote, NAME, 1, tmp_path / "c", cache=cache).fetched == 0


def test_a_version_above_the_limit_is_kept_in_part(remote: Counting, tmp_path: Path) -> None:
    """No more is written than may stay: of a version that does not fit, some files are kept and none is swept."""
    room = TOTAL - 1
    pull(remote, NAME, 1, tmp_path / "a", cache=Cache(tmp_path / "cache", room))
    held = kept(tmp_path / "cache")
    assert held
    assert sum(file.stat().st_size for file in held.values()) <= room
    assert Cache(tmp_path / "cache", room).sweep() == 0


def test_the_longest_unused_files_go_first(tmp_path: Path) -> None:
    """A cache never stays above its limit; using a file makes it young, and one that is too large is not kept."""
    cache = Cache(tmp_path / "cache", 2500)
    bodies = [bytes([number]) * 1000 for number in range(4)]
    digests = [sha256_bytes(body) for body in bodies]
    for number, (body, digest) in enumerate(zip(bodies, digests, strict=True)):
        source = tmp_path / f"source-{number}"
        source.write_bytes(body)
        cache.keep(source, digest, 1000)
        path = kept(tmp_path / "cache").get(digest)
        if path is not None:
            os.utime(path, (number, number))
        if number == 2:
            assert cache.lend(digests[0], 1000, tmp_path / "lent")
    assert cache.sweep() == 2000
    assert set(kept(tmp_path / "cache")) == {digests[0], digests[3]}
    large = tmp_path / "large"
    large.write_bytes(b"x" * 2501)
    cache.keep(large, sha256_bytes(b"x" * 2501), 2501)
    assert set(kept(tmp_path / "cache")) == {digests[0], digests[3]}


def test_many_pulls_and_sweeps_at_once(remote: Counting, tmp_path: Path) -> None:
    """Pulls that fill and use one cache while others empty it are all right, and leave nothing half kept."""
    failures: list[BaseException] = []
    gate = threading.Barrier(4)

    def run(number: int) -> None:
        gate.wait()
        try:
            for turn in range(4):
                cache = Cache(tmp_path / "cache", ROOMY if number % 2 else 1000)
                assert right(pull(remote, NAME, 1, tmp_path / f"{number}-{turn}", cache=cache))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for digest, path in kept(tmp_path / "cache").items():
        assert sha256_bytes(path.read_bytes()) == digest


def test_a_cache_that_cannot_be_written_costs_nothing_but_itself(remote: Counting, tmp_path: Path) -> None:
    """Where its folder is a file, a pull goes on without it."""
    (tmp_path / "cache").write_text("in the way")
    pulled = pull(remote, NAME, 1, tmp_path / "a", cache=Cache(tmp_path / "cache", ROOMY))
    assert right(pulled)
    assert (tmp_path / "cache").read_text() == "in the way"
