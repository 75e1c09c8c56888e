"""Synchronising: few requests, a snapshot when much is new, open claims resolved, damage never guessed away."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weighbridge.registry import layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.errors import FeedDamagedError, UnreachableError
from weighbridge.registry.flow import feed, sync
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Stat
from weighbridge_testlib.shelf import Shelf


class Counting(MemoryRemote):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read(self, key: str) -> bytes:
        """Count and read."""
        self.asked["get"] += 1
        return super().read(key)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Count and list."""
        self.asked["list"] += 1
        return super().list(prefix, after=after, limit=limit)


@pytest.fixture
def shelf() -> Shelf:
    """Return an empty registry that counts requests."""
    return Shelf(Counting())


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    """Return an empty catalogue in memory."""
    opened = Catalog.open(None, "r", durable=False)
    yield opened
    opened.close()


def requests(shelf: Shelf) -> Counter[str]:
    """Return the counter, set to zero for what follows."""
    assert isinstance(shelf.remote, Counting)
    counter = shelf.remote.asked
    counter.clear()
    return counter


def refs(catalog: Catalog) -> list[str]:
    """Return what `ls --all` lists, sorted, with states."""
    rows = catalog.listing(every=True, limit=None)
    return sorted(f"{row['name']}@v{row['n']} {row['state']} {','.join(row['tags'])}".strip() for row in rows)


def test_what_was_published_is_found(shelf: Shelf, catalog: Catalog) -> None:
    """After a synchronisation the catalogue lists what the feed tells."""
    shelf.publish("a")
    shelf.publish("a")
    shelf.publish("b")
    report = sync.sync(shelf.remote, catalog, now=lambda: 42.0)
    assert refs(catalog) == ["a@v1 committed", "a@v2 committed latest", "b@v1 committed latest"]
    assert (report.objects, report.open, report.anew, report.problems) == (6, 0, False, [])
    assert catalog.registry()["refreshed_at"] == 42.0


def test_nothing_new_costs_one_request_and_one_version_three(shelf: Shelf, catalog: Catalog) -> None:
    """LIST after the cursor; then one GET for each new object."""
    shelf.publish("a")
    sync.sync(shelf.remote, catalog)
    counter = requests(shelf)
    sync.sync(shelf.remote, catalog)
    assert counter == {"list": 1}
    shelf.publish("a")
    counter = requests(shelf)
    sync.sync(shelf.remote, catalog)
    assert counter == {"list": 1, "get": 2}


def test_an_open_claim_is_resolved_by_one_request(shelf: Shelf, catalog: Catalog) -> None:
    """A committed version whose announcement was lost is found through its claim, with its row."""
    shelf.publish("a", tell_version=False)
    shelf.claim("a")
    report = sync.sync(shelf.remote, catalog)
    assert refs(catalog) == ["a@v1 committed latest", "a@v2 open"]
    assert (report.resolved, report.open) == (1, 1)
    row = catalog.version("a", 1)
    assert row is not None
    assert row["license"] == "apache-2.0"
    shelf.void("a", 2, announce=False)
    counter = requests(shelf)
    sync.sync(shelf.remote, catalog)
    assert refs(catalog) == ["a@v1 committed latest", "a@v2 void"]
    assert counter["get"] == 1


def test_a_damaged_decision_is_named_and_stays_open(shelf: Shelf, catalog: Catalog) -> None:
    """A manifest.json that is not what was claimed makes nothing appear."""
    shelf.claim("a")
    shelf.remote.create(layout.manifest("a", 1), b'{"schema":"weighbridge/manifest/1"')
    report = sync.sync(shelf.remote, catalog)
    assert refs(catalog) == ["a@v1 open"]
    (problem,) = report.problems
    assert "models/a/v1/manifest.json" in problem


def test_a_new_reader_takes_the_snapshot(shelf: Shelf, catalog: Catalog) -> None:
    """With a snapshot at hand the objects before it are not read."""
    for _ in range(4):
        shelf.publish("a")
    assert feed.take_snapshot(shelf.remote, 6)
    counter = requests(shelf)
    sync.sync(shelf.remote, catalog)
    assert counter["get"] == 3
    assert [row["n"] for row in catalog.listing(["a"])] == [4, 3, 2, 1]
    assert catalog.cursor == 8


def test_a_reader_far_behind_takes_the_snapshot_too(shelf: Shelf, catalog: Catalog) -> None:
    """More than 64 new objects make a reader look for one; fewer do not."""
    shelf.publish("a")
    sync.sync(shelf.remote, catalog)
    for _ in range(40):
        shelf.publish("b")
    assert feed.take_snapshot(shelf.remote, 80)
    counter = requests(shelf)
    report = sync.sync(shelf.remote, catalog)
    assert counter["get"] == 3
    assert report.objects == 2
    assert len(catalog.listing(every=True, limit=None)) == 41


def test_a_snapshot_and_the_feed_give_the_same_catalogue(shelf: Shelf, catalog: Catalog) -> None:
    """Whichever way a reader came, it knows the same."""
    for _ in range(3):
        shelf.publish("a")
    shelf.withdraw("a", 1)
    shelf.claim("b")
    sync.sync(shelf.remote, catalog)
    head = catalog.cursor
    assert feed.take_snapshot(shelf.remote, head)
    other = Catalog.open(None, "r", durable=False)
    sync.sync(shelf.remote, other)
    columns = "name, n, state, content, manifest, card, license, run_id, claimed_at, created_at"
    query = f"SELECT {columns} FROM versions ORDER BY name, n"
    assert other.link.execute(query).fetchall() == catalog.link.execute(query).fetchall()
    assert (
        other.link.execute("SELECT * FROM names").fetchall() == catalog.link.execute("SELECT * FROM names").fetchall()
    )
    assert other.cursor == head
    other.close()


def test_a_damaged_object_stops_the_reader_and_changes_nothing(shelf: Shelf, catalog: Catalog) -> None:
    """What is known stays as it was, and the error names the object."""
    shelf.publish("a")
    sync.sync(shelf.remote, catalog)
    shelf.publish("b")
    shelf.publish("c")
    body = bytearray(shelf.remote.read(layout.feed(4)))
    body[100] ^= 1
    shelf.remote.delete(layout.feed(4))
    shelf.remote.create(layout.feed(4), bytes(body))
    with pytest.raises(FeedDamagedError, match="000000000004"):
        sync.sync(shelf.remote, catalog)
    assert refs(catalog) == ["a@v1 committed latest"]
    assert catalog.cursor == 2


def test_a_remote_that_was_set_back_is_read_anew(shelf: Shelf, catalog: Catalog) -> None:
    """When the object at the cursor is gone or another one, older knowledge is dropped."""
    shelf.publish("a")
    shelf.publish("b")
    sync.sync(shelf.remote, catalog)
    for seq in (3, 4):
        shelf.remote.delete(layout.feed(seq))
    shelf.publish("c")
    report = sync.sync(shelf.remote, catalog)
    assert report.anew
    assert refs(catalog) == ["a@v1 committed latest", "c@v1 committed latest"]


def test_claims_without_a_time_of_their_own_take_that_of_the_feed(shelf: Shelf, catalog: Catalog) -> None:
    """The store time of the feed's object stands in, so that runs can still be ordered."""
    _, manifest = shelf.claim("a", announce=False)
    shelf.tell(feed.version_entry("a", 1, manifest))
    sync.sync(shelf.remote, catalog)
    row = catalog.version("a", 1)
    assert row is not None
    assert row["claimed_at"] == shelf.remote.stat(layout.feed(1)).modified


def test_a_damaged_cache_is_read_anew_with_a_note(shelf: Shelf, tmp_path: Path) -> None:
    """A cache file full of rubbish is thrown away; the result is right and a sentence says what happened."""
    shelf.publish("a")
    path = tmp_path / "cache" / "r.db"
    for damage in (b"rubbish" * 1000, None):
        catalog, _, notes = sync.refresh(shelf.remote, path, "r")
        assert not notes
        catalog.close()
        whole = path.read_bytes()
        at = whole.index(b"apache-2.0")
        path.write_bytes(damage or whole[:at] + b"apachE" + whole[at + 6 :])
        catalog, _, notes = sync.refresh(shelf.remote, path, "r")
        if damage:
            assert "damaged" in notes[0]
            assert refs(catalog) == ["a@v1 committed latest"]
        catalog.close()
        sync.discard(path)


def test_a_cache_that_cannot_be_written_is_kept_in_memory(shelf: Shelf, tmp_path: Path) -> None:
    """A home that is full or read-only does not stop a reader."""
    shelf.publish("a")
    (tmp_path / "file").write_text("in the way")
    catalog, _, notes = sync.refresh(shelf.remote, tmp_path / "file" / "r.db", "r")
    assert "cannot be used" in notes[0]
    assert refs(catalog) == ["a@v1 committed latest"]
    catalog.close()


def test_a_cache_that_stays_locked_is_left_alone(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds it, a reader gets its answer, from memory."""
    monkeypatch.setattr("weighbridge.registry.catalog._BUSY_MS", 50)
    shelf.publish("a")
    path = tmp_path / "r.db"
    sync.refresh(shelf.remote, path, "r")[0].close()
    shelf.publish("b")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    catalog, _, notes = sync.refresh(shelf.remote, path, "r")
    assert "locked" in notes[0]
    assert refs(catalog) == ["a@v1 committed latest", "b@v1 committed latest"]
    catalog.close()
    holder.execute("ROLLBACK")
    holder.close()


class Breaking(Counting):
    """Stops answering when told to."""

    down = False

    def read(self, key: str) -> bytes:
        """Fail when down."""
        if self.down:
            raise UnreachableError("down")
        return super().read(key)


def test_a_remote_that_goes_down_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    """An interrupted synchronisation is repeated as if it had never begun."""
    remote = Breaking()
    shelf = Shelf(remote)
    shelf.publish("a")
    path = tmp_path / "r.db"
    sync.refresh(remote, path, "r")[0].close()
    shelf.publish("b")
    remote.down = True
    with pytest.raises(UnreachableError):
        sync.refresh(remote, path, "r")
    remote.down = False
    catalog, _, _ = sync.refresh(remote, path, "r")
    assert refs(catalog) == ["a@v1 committed latest", "b@v1 committed latest"]
    catalog.close()


class Readers(RuleBasedStateMachine):
    """One reader that synchronises now and then knows what one that starts afresh knows."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(MemoryRemote())
        self.often = Catalog.open(None, "r", durable=False)
        self.open: list[tuple[str, int]] = []

    names = st.sampled_from(["a", "b"])

    @rule(name=names, told=st.booleans(), step=st.integers(0, 3), run=st.sampled_from(["r", "s"]))
    def publish(self, name: str, told: bool, step: int, run: str) -> None:
        """Publish, sometimes without telling the end."""
        self.shelf.publish(name, tell_version=told, step=step, run=run)

    @rule(name=names)
    def claim(self, name: str) -> None:
        """Claim and leave it open."""
        n, _ = self.shelf.claim(name)
        self.open.append((name, n))

    @rule(told=st.booleans())
    def void(self, told: bool) -> None:
        """Give the oldest open claim up."""
        if self.open:
            self.shelf.void(*self.open.pop(0), announce=told)

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        """Take the first committed version back, once."""
        if self.shelf.claims.get(name) and not list(self.shelf.remote.list(layout.withdrawn(name))):
            try:
                self.shelf.remote.read(layout.version(name, 1, "README.md"))
            except Exception:  # noqa: BLE001 - it was only claimed
                return
            self.shelf.withdraw(name, 1)

    @rule()
    def snapshot(self) -> None:
        """Write a snapshot of now."""
        head = feed.head(self.shelf.remote, self.shelf.registry).seq
        if head:
            assert feed.take_snapshot(self.shelf.remote, head)

    @rule()
    def synchronise(self) -> None:
        """Let the frequent reader look."""
        sync.sync(self.shelf.remote, self.often)

    @invariant()
    def both_know_the_same(self) -> None:
        """Compare with a fresh reader."""
        fresh = Catalog.open(None, "r", durable=False)
        sync.sync(self.shelf.remote, fresh)
        sync.sync(self.shelf.remote, self.often)
        assert refs(fresh) == refs(self.often)
        fresh.close()

    def teardown(self) -> None:
        """Close."""
        self.often.close()


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
