"""Bringing a name to a mirror by hand: a cut costs little, damage goes no further, two at once are both right."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import feed, notes, tags
from weighbridge.registry.flow.follow import Carried, beside, carry, numbers
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.mirror import deliver
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.flow.withdraw import purge, withdraw
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Chunk, Remote, Stat
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge_testlib.shelf import Shelf, payload

NAME = "medical-sft"
FILES = payload(1, size=5_000_000)
WEIGHTS = layout.version(NAME, 1, "adapter_model.safetensors")


class Cutting(Wrapper):
    """A remote whose weights break off after so many bytes, and that counts what it gave of them."""

    after: int | None = None
    given = 0

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield, count, break off."""
        for chunk in super().fetch(key, offset):
            if key == WEIGHTS:
                if self.after is not None and self.given >= self.after:
                    raise errors.RetryableError("the connection broke")
                self.given += len(chunk)
            yield chunk


class Ways:
    """A home with one version, and mirrors of both kinds: a folder, and one without a stage of its own."""

    def __init__(self, folder: Path) -> None:
        shelf = Shelf(MemoryRemote())
        shelf.publish(NAME, FILES)
        self.shelf = shelf
        self.home = Cutting(shelf.remote)
        self.scratch = folder / "scratch"
        self.folder = folder

    def mirror(self, kind: str) -> tuple[Remote, types.Registry]:
        """Open an empty mirror."""
        mirror: Remote = MemoryRemote() if kind == "memory" else DirectoryRemote(self.folder / "mirror")
        return mirror, open_registry(mirror, create=True)

    def carry(self, mirror: Remote, registry: types.Registry, n: int = 1) -> Carried:
        """Bring one number."""
        settings = RemoteSettings("mirror", mirror.url)
        return carry(self.home, mirror, NAME, n, settings=settings, registry=registry, scratch=self.scratch)


@pytest.fixture
def ways(tmp_path: Path) -> Ways:
    """Return a home and its mirrors."""
    (tmp_path / "mirror").mkdir()
    return Ways(tmp_path)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_cut_copy_goes_on_where_it_stopped(ways: Ways, kind: str) -> None:
    """What has come is hashed again and kept, nothing is visible before, and nothing stays behind afterwards."""
    mirror, registry = ways.mirror(kind)
    ways.home.after = 3_000_000
    with pytest.raises(errors.RetryableError):
        ways.carry(mirror, registry)
    with pytest.raises(errors.MissingError):
        mirror.read(layout.manifest(NAME, 1))
    before, ways.home.after = ways.home.given, None
    done = ways.carry(mirror, registry)
    assert done.outcome == "copied"
    assert done.verified in {"sha256-read", "sha256-server"}
    assert ways.home.given == len(FILES["adapter_model.safetensors"])
    assert before >= 3_000_000
    assert verify_version(mirror, NAME, 1).findings == verify_version(ways.home, NAME, 1).findings
    stages = ways.folder / "mirror" / layout.stages(NAME)
    assert not [*ways.scratch.glob("*"), *stages.glob("*")]
    assert ways.carry(mirror, registry).outcome == "there"


def test_a_copy_that_was_taken_back_is_not_revived(ways: Ways) -> None:
    """Whether its files are still there or purged: what a mirror's own mark withdraws is not brought again."""
    mirror, registry = ways.mirror("memory")
    ways.carry(mirror, registry)
    withdraw(mirror, registry, NAME, 1, who="lw", why="wrong data")
    for _ in range(2):
        with pytest.raises(errors.WithdrawnError, match="withdrawn"):
            deliver(ways.home, mirror, NAME, 1, mirror_name="mirror", registry=registry, scratch=ways.scratch)
        assert ways.carry(mirror, registry).outcome == "withdrawn"
        purge(mirror, NAME, 1, grace=-60)
    assert WEIGHTS not in {stat.key for stat in mirror.list(layout.version(NAME, 1))}


def test_damage_at_home_goes_no_further(ways: Ways) -> None:
    """A flipped bit in a file is named, and the mirror shows no version of it."""
    mirror, registry = ways.mirror("folder")
    body = bytearray(FILES["adapter_model.safetensors"])
    body[99] ^= 1
    ways.shelf.remote.delete(WEIGHTS)
    ways.shelf.remote.create(WEIGHTS, bytes(body))
    with pytest.raises(errors.IntegrityError, match=r"adapter_model\.safetensors"):
        ways.carry(mirror, registry)
    assert [s.key for s in mirror.list(layout.version(NAME, 1))] == []


def test_two_who_copy_at_once_are_both_right(ways: Ways) -> None:
    """Each has a folder of its own for the bytes, one decision stands, and both are told that it does."""
    mirror, registry = ways.mirror("folder")
    outcomes: list[str] = []
    gate = threading.Barrier(2)

    def run() -> None:
        gate.wait()
        outcomes.append(ways.carry(mirror, registry).outcome)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 2
    assert set(outcomes) <= {"copied", "there"}
    assert verify_version(mirror, NAME, 1).findings == verify_version(ways.home, NAME, 1).findings
    assert list(numbers(mirror, NAME)) == [1]


def test_what_people_said_at_the_mirror_itself_stays(ways: Ways) -> None:
    """A note under the same number is left as it is; those that are free come along, and repeating adds nothing."""
    mirror, registry = ways.mirror("folder")
    ways.carry(mirror, registry)
    notes.add(mirror, registry, NAME, 1, "card", text="ours", who="ann")
    notes.add(ways.home, ways.shelf.registry, NAME, 1, "card", text="theirs", who="lw")
    notes.add(ways.home, ways.shelf.registry, NAME, 1, "license", text="mit", who="lw")
    assert beside(ways.home, mirror, registry, NAME).notes == 1
    assert [note.text for note in notes.read(mirror, NAME, 1)] == ["ours", "mit"]
    assert beside(ways.home, mirror, registry, NAME).notes == 0


class Counting(Wrapper):
    """A remote that writes down what it is asked."""

    def __init__(self, inner: Remote) -> None:
        super().__init__(inner)
        self.asked: list[tuple[str, str]] = []

    def read(self, key: str) -> bytes:
        """Count, and return an object."""
        self.asked.append(("read", key))
        return super().read(key)

    def stat(self, key: str) -> Stat:
        """Count, and return what is known of an object."""
        self.asked.append(("stat", key))
        return super().stat(key)

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Count, and yield an object."""
        self.asked.append(("fetch", key))
        return super().fetch(key, offset)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Count, and list."""
        self.asked.append(("list", prefix))
        return super().list(prefix, after=after, limit=limit)


def asked_for(versions: int, folder: Path, *, quiet: bool) -> tuple[list[str], list[str]]:
    """Bring one version more to a mirror that has some already; return how home and mirror were asked for it.

    Unless it is quiet, each version was tagged and noted when it came, and one was taken back.
    """
    shelf = Shelf(MemoryRemote())
    home, mirror = Counting(shelf.remote), Counting(MemoryRemote())
    registry = open_registry(mirror, create=True)
    settings = RemoteSettings("mirror", mirror.url)
    for n in range(1, versions + 2):
        shelf.publish(NAME)
        if not quiet:
            tags.move(shelf.remote, shelf.registry, NAME, "best", n, "lw")
            notes.add(shelf.remote, shelf.registry, NAME, n, "license", text="mit", who="lw")
        if n == 2:
            shelf.withdraw(NAME, 1)
        home.asked, mirror.asked = [], []
        carried = carry(home, mirror, NAME, n, settings=settings, registry=registry, scratch=folder)
        told = beside(home, mirror, registry, NAME, retold=0.0)
        assert carried.outcome == "copied"
        assert (told.tags, told.notes) == ((0, 0) if quiet else (1, 1))
    assert (not quiet) == (tags.current(mirror.inner, NAME, "best") is not None)
    return [how for how, _ in home.asked], [how for how, _ in mirror.asked]


@pytest.mark.parametrize("quiet", [True, False])
def test_a_delivery_asks_for_no_version_but_its_own(tmp_path: Path, *, quiet: bool) -> None:
    """Bringing the fortieth version and what is said of it asks home and mirror as often as bringing the fourth."""
    few = asked_for(3, tmp_path / "few", quiet=quiet)
    many = asked_for(39, tmp_path / "many", quiet=quiet)
    assert [sorted(side) for side in many] == [sorted(side) for side in few]
    assert few[1].count("read") >= 1


def test_a_move_that_differs_early(ways: Ways) -> None:
    """A tag that somebody moved at the mirror is left alone however far the home has moved it since."""
    mirror, registry = ways.mirror("memory")
    ways.carry(mirror, registry)
    tags.move(ways.home, ways.shelf.registry, NAME, "prod", 1, "lw")
    beside(ways.home, mirror, registry, NAME)
    tags.move(mirror, registry, NAME, "prod", None, "ann")
    for to in (None, 1, None, 1):
        tags.move(ways.home, ways.shelf.registry, NAME, "prod", to, "lw")
    told = beside(ways.home, mirror, registry, NAME)
    assert (told.tags, told.diverged) == (0, ["prod"])
    assert [move.who for move in tags.history(mirror, NAME, "prod")] == ["lw", "ann"]


def test_what_was_brought_and_not_told(ways: Ways) -> None:
    """What somebody brought who died before telling is told by the next one; not where it is known to be told."""
    mirror, registry = ways.mirror("memory")
    ways.carry(mirror, registry)
    tags.move(ways.home, ways.shelf.registry, NAME, "prod", 1, "lw")
    key = layout.tag(NAME, "prod", 1)
    mirror.create(key, ways.home.read(key))
    at = feed.head(mirror, registry).seq
    assert beside(ways.home, mirror, registry, NAME, retold=0.0).tags == 0
    assert feed.head(mirror, registry).seq == at
    assert beside(ways.home, mirror, registry, NAME).tags == 0
    seq = feed.head(mirror, registry).seq
    (entry,) = feed.decode(mirror.read(layout.feed(seq)), seq).entries
    assert (entry.type, entry.tag) == ("tag", "prod")


def test_a_tag_that_was_removed_is_removed_there(ways: Ways) -> None:
    """Every move is copied, the removal too, and the history reads the same on both sides."""
    mirror, registry = ways.mirror("memory")
    ways.carry(mirror, registry)
    for to in (1, None, 1, None):
        tags.move(ways.home, ways.shelf.registry, NAME, "prod", to, "lw")
    assert beside(ways.home, mirror, registry, NAME).tags == 4
    assert tags.history(mirror, NAME, "prod") == tags.history(ways.home, NAME, "prod")
