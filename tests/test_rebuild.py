"""Rebuilding the feed: whatever was damaged, the catalogue comes back from what lies on the remote."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import FeedDamagedError, UnreachableError
from weighbridge.registry.flow import feed, notes, rebuild, snapshot, sync, tags
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge_testlib.shelf import Shelf

QUERY = """SELECT v.name, v.n, v.state, v.content, v.manifest, v.card, v.license, v.noted_license, v.step, a.latest
           FROM versions AS v JOIN names AS a USING (registry, name) ORDER BY v.name, v.n"""


def fill(shelf: Shelf) -> None:
    """Publish a little of everything."""
    for step in (100, 300, 200):
        shelf.publish("sft", step=step)
    shelf.claim("sft")
    shelf.claim("sft")
    shelf.void("sft", 5)
    shelf.publish("other")
    shelf.publish("other")
    shelf.withdraw("other", 1)
    tags.move(shelf.remote, shelf.registry, "sft", "prod", 1, who="lw")
    tags.move(shelf.remote, shelf.registry, "sft", "prod", 2, who="lw")
    notes.add(shelf.remote, shelf.registry, "sft", 1, "license", text="mit", who="lw")


def state(remote: Remote) -> tuple[list[object], list[object]]:
    """Return what a new reader learns."""
    catalog = Catalog.open(None, "r", durable=False)
    try:
        sync.sync(remote, catalog)
        told = catalog.link.execute("SELECT name, tag, seq, n FROM tags ORDER BY name, tag").fetchall()
        return catalog.link.execute(QUERY).fetchall(), told
    finally:
        catalog.close()


@pytest.fixture
def shelf() -> Shelf:
    """Return a filled registry."""
    shelf = Shelf(MemoryRemote())
    fill(shelf)
    return shelf


@pytest.fixture
def old_reader(shelf: Shelf) -> Iterator[Catalog]:
    """Return a reader who knows everything up to now."""
    catalog = Catalog.open(None, "r", durable=False)
    sync.sync(shelf.remote, catalog)
    yield catalog
    catalog.close()


def damage(remote: Remote, seq: int, how: str) -> None:
    """Damage one object of the feed."""
    body = bytearray(remote.read(layout.feed(seq)))
    body[len(body) // 2] ^= 2
    remote.delete(layout.feed(seq))
    if how == "flip":
        remote.create(layout.feed(seq), bytes(body))


@pytest.mark.parametrize("how", ["flip", "hole"])
def test_a_damaged_feed_is_repaired_for_new_and_old_readers(shelf: Shelf, old_reader: Catalog, how: str) -> None:
    """Versions, voids, tags, withdrawals and notes survive; the damaged object may stay where it is."""
    before = state(shelf.remote)
    damage(shelf.remote, 2, how)
    with pytest.raises(FeedDamagedError):
        state(shelf.remote)
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    assert (report.epoch, report.names, report.versions, report.problems) == (2, 2, 5, [])
    assert state(shelf.remote) == before
    assert sync.sync(shelf.remote, old_reader).anew
    assert (old_reader.link.execute(QUERY).fetchall(), old_reader.epoch) == (before[0], 2)


def test_without_any_feed_everything_comes_back(shelf: Shelf) -> None:
    """A remote whose whole catalogue folder is gone is catalogued again."""
    before = state(shelf.remote)
    for prefix in (layout.FEED, layout.SNAPSHOTS):
        for stat in list(shelf.remote.list(prefix)):
            shelf.remote.delete(stat.key)
    assert state(shelf.remote) == ([], [])
    rebuild.rebuild(shelf.remote, shelf.registry)
    assert state(shelf.remote) == before


def test_the_snapshot_behind_a_repair_is_enough(shelf: Shelf) -> None:
    """A new reader takes the snapshot and never meets the damaged object."""
    before = state(shelf.remote)
    damage(shelf.remote, 1, "hole")
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    found = snapshot.load(shelf.remote)
    assert found is not None
    assert (found.seq, found.epoch) == (report.last, 2)
    shelf.publish("new")
    assert len(state(shelf.remote)[0]) == len(before[0]) + 1
    shelf.remote.delete(layout.snapshot(found.seq))
    assert len(state(shelf.remote)[0]) == len(before[0]) + 1


def test_later_announcements_carry_the_new_epoch(shelf: Shelf) -> None:
    """The epoch is read from the head, so nobody has to be told of a repair."""
    rebuild.rebuild(shelf.remote, shelf.registry)
    seq = shelf.publish("new") and feed.head(shelf.remote, shelf.registry).seq
    assert json.loads(shelf.remote.read(layout.feed(seq)))["epoch"] == 2


def test_objects_of_a_repair_are_full_and_say_where_it_began(shelf: Shelf) -> None:
    """Each holds 1 to 256 entries; the last one names the first."""
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    parts = feed.changes(shelf.remote, 0).parts
    assert parts[0].seq == report.first
    assert parts[-1].rebuild == report.first
    assert all(1 <= len(part.entries) <= 256 for part in parts)


class Dying(MemoryRemote):
    """Goes down after some reads."""

    left: int | None = None

    def read(self, key: str) -> bytes:
        """Count down."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise UnreachableError("down")
        return super().read(key)


def test_a_repair_that_dies_changes_nothing_and_can_be_repeated() -> None:
    """Readers go on with what they know; the next repair is whole."""
    remote = Dying()
    shelf = Shelf(remote)
    fill(shelf)
    before = state(remote)
    remote.left = 12
    with pytest.raises(UnreachableError):
        rebuild.rebuild(remote, shelf.registry)
    remote.left = None
    assert state(remote) == before
    report = rebuild.rebuild(remote, shelf.registry)
    assert report.epoch == 3
    assert state(remote) == before


def test_what_is_damaged_itself_is_named_and_left_out(shelf: Shelf) -> None:
    """A claim, a decision or a tag that cannot be read does not stop the repair of everything else."""
    for key, body in (
        (layout.claim("sft", 1), b"{}"),
        (layout.manifest("sft", 2), b"torn"),
        (layout.tag("sft", "prod", 2), b"[]"),
    ):
        shelf.remote.delete(key)
        shelf.remote.create(key, body)
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    assert len(report.problems) == 3
    for key in (layout.claim("sft", 1), layout.manifest("sft", 2), layout.tag("sft", "prod", 2)):
        assert any(key in problem for problem in report.problems)
    rows = {(row[0], row[1]): row[2] for row in state(shelf.remote)[0]}  # type: ignore[index]
    assert rows["sft", 1] == "committed"
    assert rows["sft", 2] == "open"
    assert rows["sft", 3] == "committed"


def test_a_note_on_a_version_that_is_lost_is_named_and_left_out(shelf: Shelf) -> None:
    """A repair goes on when a note's version has no manifest any more: that is what repairs are for."""
    shelf.remote.delete(layout.manifest("sft", 1))
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    assert [problem for problem in report.problems if layout.manifest("sft", 1) in problem]
    rows, _ = state(shelf.remote)
    assert ("sft", 1, "open") in {row[:3] for row in rows}  # type: ignore[index]


def test_nothing_told_during_a_repair_is_lost(tmp_path: Path) -> None:
    """Publishers that go on while two repairs run at the same time: every version is in the catalogue afterwards."""
    remote = DirectoryRemote(tmp_path)
    shelf = Shelf(remote)
    fill(shelf)
    damage(remote, 3, "flip")
    failures: list[BaseException] = []

    def publish(name: str) -> None:
        try:
            mine = Shelf(remote)
            for _ in range(6):
                mine.publish(name)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    def repair() -> None:
        try:
            rebuild.rebuild(remote, shelf.registry)
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(f"busy-{i}",)) for i in range(3)]
    threads += [threading.Thread(target=repair) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    rows = {(row[0], row[1]): row[2] for row in state(remote)[0]}  # type: ignore[index]
    assert all(rows[f"busy-{i}", n] == "committed" for i in range(3) for n in range(1, 7))
    assert rows["sft", 1] == "committed"
    assert len(rows) == 7 + 18


def test_an_empty_registry_can_be_rebuilt() -> None:
    """There is nothing to tell, and that is what is told."""
    shelf = Shelf(MemoryRemote())
    report = rebuild.rebuild(shelf.remote, shelf.registry)
    assert (report.versions, report.entries) == (0, 0)
    assert state(shelf.remote) == ([], [])
