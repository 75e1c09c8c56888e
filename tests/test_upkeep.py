"""What is done now and then: old versions are read again, leftovers go, and nothing that is still needed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.daemon import report, upkeep
from weighbridge.daemon.deliveries import Deliveries
from weighbridge.daemon.follow import Following
from weighbridge.daemon.upkeep import Upkeep
from weighbridge.registry import layout
from weighbridge.registry.errors import UnreachableError
from weighbridge.registry.flow import verify
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.remotes.protocol import Chunk, Properties, Remote, Stat
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge_testlib.bench import Bench, with_mirror
from weighbridge_testlib.builders import lora_adapter, run_root


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Give a bench that publishes everything."""
    found = Bench(tmp_path, publish=("all",))
    yield found
    found.catalog.close()


def keeper(bench: Bench) -> Upkeep:
    """Return the upkeep of a bench."""
    return Upkeep(bench.store, bench.homes, frozenset({"team"}), bench.state, "host")


def looked_at(bench: Bench) -> dict[int, list[str]]:
    """Return what the looks found, by number."""
    return {
        row["n"]: [f for f in row["findings"].split('"') if f.endswith("damaged")]
        for row in bench.store.verifications()
    }


def test_every_version_is_read_again_whatever_became_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was withdrawn or lost does not keep the others from their turn; what was lost is told."""
    monkeypatch.setattr(upkeep, "VERIFY_AGAIN_AFTER", 0.0)
    run_root(bench.runs / "team/run", steps=(1, 2, 3), result=False)
    bench.settle()
    bench.work()
    home = bench.homes.get("team")
    withdraw(home.remote, home.registry, "team-run", 1, who="lw", why=None)
    home.remote.delete(layout.manifest("team-run", 2))
    for _ in range(3):
        keeper(bench).verify()
    assert looked_at(bench) == {1: [], 2: ["manifest-damaged"], 3: []}
    (told,) = report._damaged(bench.store)
    assert told["fix"] == "registry verify team-run@v2 --remote team --mend"


class Far(Wrapper):
    """A server behind a network that has a checksum of each file; `read_whole` holds the files that were fetched."""

    def __init__(self, inner: Remote) -> None:
        super().__init__(inner)
        self.read_whole: list[str] = []

    @property
    def properties(self) -> Properties:
        """What a server promises."""
        return self.inner.properties._replace(hashes_stored=False, server_sha256=True)

    def stat(self, key: str) -> Stat:
        """Return what the server knows."""
        found = self.inner.stat(key)
        return found._replace(sha256=sha256_bytes(self.inner.read(key)))

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes, and note it."""
        self.read_whole.append(key)
        yield from self.inner.fetch(key, offset)


def test_behind_a_network_the_checksums_are_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a server holds is fetched once a week only to look at it; what it tells of damage is found."""
    monkeypatch.setattr(upkeep, "VERIFY_AGAIN_AFTER", 0.0)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()
    home = bench.homes.get("team")
    home.remote = far = Far(home.remote)
    weights = layout.version("team-run", 2, "adapter_model.safetensors")
    body = bytearray(far.read(weights))
    body[-1] ^= 1
    far.delete(weights)
    far.create(weights, bytes(body))
    for _ in range(2):
        keeper(bench).verify()
    assert (looked_at(bench), far.read_whole) == ({1: [], 2: ["file-damaged"]}, [])


class Plain(Far):
    """A server that has no checksum of anything."""

    def stat(self, key: str) -> Stat:
        """Return what the server knows."""
        return self.inner.stat(key)._replace(sha256=None, told=None)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects, without checksums."""
        for found in self.inner.list(prefix, after=after, limit=limit):
            yield found._replace(sha256=None, told=None)


def test_a_look_that_proved_nothing_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large files without a checksum only the size is compared: that is told once for a home, and is no damage."""
    monkeypatch.setattr(upkeep, "VERIFY_AGAIN_AFTER", 0.0)
    monkeypatch.setattr(verify, "SMALL", 100)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()
    home = bench.homes.get("team")
    home.remote = Plain(home.remote)
    for _ in range(2):
        keeper(bench).verify()
    (told,) = report._damaged(bench.store)
    assert (told["code"], told["severity"], told["n"]) == ("copy-unproven", "note", 1)
    assert "only their sizes were compared; so it was with 1 more version" in told["message"]
    assert told["fix"] == "registry verify team-run@v1 --remote team --quick reads them"
    assert not [event for event in bench.store.events() if event["event"] == "damaged"]


def test_a_stage_that_a_job_waits_with_is_never_swept(bench: Bench) -> None:
    """However long the remote was away: the bytes of a waiting job stay, those of nobody go."""
    folder = lora_adapter(bench.runs / "team/run/checkpoint-1")
    (job,) = bench.settle()
    sealed = bench.runner.run(job, upto="sealed")
    assert sealed is not None
    stage = bench.place / "remote/models/team-run/_wb/stage"
    (ours,) = stage.iterdir()
    (stage / "of-somebody-dead").mkdir()
    long_ago = time.time() - 30 * 86_400
    for path in (*stage.rglob("*"), ours):
        os.utime(path, (long_ago, long_ago))
    keeper(bench).hold()
    assert open_directory(str(bench.place / "remote")).sweep(86_400.0) == 1  # by somebody else, by hand
    assert [path.name for path in stage.iterdir()] == [ours.name]
    os.utime(ours, (long_ago, long_ago))
    keeper(bench).sweep()
    assert [path.name for path in stage.iterdir()] == [ours.name]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    bench.work()
    assert list(bench.versions()) == ["team-run@v1"]


def test_a_mirror_is_swept_like_a_home(tmp_path: Path) -> None:
    """What a dead publisher staged on a mirror goes as well, and a home that refuses keeps no other from its turn."""
    bench = with_mirror(tmp_path)
    bench.homes.get("mirror")
    left = tmp_path / "mirror/models/team-run/_wb/stage/of-somebody-dead"
    left.mkdir(parents=True, mode=0o700)
    os.utime(left, (0, 0))
    home = bench.homes.get("team")
    (tmp_path / "remote" / layout.MARKER).unlink()
    with pytest.raises(UnreachableError):
        home.confirm()
    keeper(bench).sweep()
    assert not left.exists()
    bench.catalog.close()


def test_a_registry_is_left_alone_from_the_moment_it_asks_for_a_newer_writer(tmp_path: Path) -> None:
    """A daemon that runs already publishes, sweeps, delivers and follows there no more; all of it waits."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()
    home, mirror = bench.homes.get("team"), bench.homes.get("mirror")
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    assert deliveries.step()
    withdraw(home.remote, home.registry, "team-run", 1, who="lw", why=None)
    home.sync()
    for place in ("remote", "mirror"):
        stage = tmp_path / place / "models/team-run/_wb/stage/of-somebody-dead"
        stage.mkdir(parents=True, mode=0o700)
        os.utime(stage, (0, 0))
        marker = tmp_path / place / layout.MARKER
        marker.chmod(0o600)
        marker.write_bytes(marker.read_bytes().replace(b'"min_writer":1', b'"min_writer":2'))
    before = sorted(path for place in ("remote", "mirror") for path in (tmp_path / place).rglob("*"))
    run_root(bench.runs / "team/other", steps=(1,), result=False)
    (job,) = bench.settle()
    for _ in range(8):
        step = bench.store.job(job.id)
        assert step is not None
        bench.runner.run(step)
    assert deliveries.step()
    assert Following(bench.store, bench.homes).step() == 0
    keeper(bench).sweep()
    waiting = bench.store.job(job.id)
    assert waiting is not None
    assert (waiting.shown, [row["state"] for row in bench.store.deliveries()]) == ("waiting", ["done", "waiting"])
    assert sorted(path for place in ("remote", "mirror") for path in (tmp_path / place).rglob("*")) == before
    assert (home.registry.min_writer, mirror.registry.min_writer) == (2, 2)
    bench.catalog.close()
