"""The feed: dense, create-only, told twice without harm, and honest about damage."""

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.registry import layout
from weighbridge.registry.errors import ExistsError, FeedDamagedError, OutcomeUnknownError, UnreachableError
from weighbridge.registry.flow import entries, feed, snapshot, tags
from weighbridge.registry.manifest import canonical
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Properties, Remote, Stat
from weighbridge.registry.types import FeedEntry
from weighbridge_testlib.shelf import Shelf, facts, manifest_of, payload


@pytest.fixture
def shelf() -> Shelf:
    """Return an empty registry in memory."""
    return Shelf(MemoryRemote())


def version(name: str = "medical-sft", n: int = 1) -> FeedEntry:
    """Return the entry of a version."""
    return feed.version_entry(name, n, manifest_of(payload(n), facts()))


def numbers(remote: Remote) -> list[int]:
    """Return the numbers of all objects of the feed."""
    return [seq for seq, _ in feed.list_after(remote, 0)]


def test_an_announcement_is_one_object_with_the_documented_fields(shelf: Shelf) -> None:
    """What is announced lies under the next number with schema, seq, epoch, nonce, entries and a seal."""
    shelf.tell(version())
    document = json.loads(shelf.remote.read("catalog/feed/000000000001.json"))
    assert document.keys() == {"schema", "seq", "epoch", "nonce", "entries", "sha256"}
    assert (document["schema"], document["seq"], document["epoch"]) == ("weighbridge/feed/1", 1, 1)
    (entry,) = document["entries"]
    assert entry["source"] == "models/medical-sft/v1/manifest.json"
    assert entry["row"]["kind"] == "adapter"
    assert entry["row"]["run"] == "medical/run-1"


def test_both_ends_of_a_tags_move_are_always_spelled(shelf: Shelf) -> None:
    """A first move comes from null and a removal goes to null, in feed and snapshot alike; nothing else has them."""
    shelf.publish("medical-sft")
    for to in (1, None):
        tags.move(shelf.remote, shelf.registry, "medical-sft", "prod", to, who="lw")
    stored = [e for n in numbers(shelf.remote) for e in json.loads(shelf.remote.read(layout.feed(n)))["entries"]]
    assert [(e["from"], e["to"]) for e in stored if e["type"] == "tag"] == [(None, 1), (1, None)]
    assert not any({"from", "to", "tag"} & e.keys() for e in stored if e["type"] != "tag")
    told = [e for part in feed.changes(shelf.remote, 0).parts for e in part.entries]
    lines = gzip.decompress(snapshot.encode(1, 1, told)).splitlines()[1:]
    assert [json.loads(line) for line in lines] == stored


def test_numbers_are_dense_and_returned(shelf: Shelf) -> None:
    """Each announcement takes the next number."""
    assert [shelf.tell(version(n=n)) for n in (1, 2, 3)] == [1, 2, 3]
    assert numbers(shelf.remote) == [1, 2, 3]


def test_many_entries_are_spread_over_objects_of_256(shelf: Shelf) -> None:
    """600 entries make three objects, in order."""
    assert shelf.tell(*(version(n=n) for n in range(1, 601))) == 3
    parts = feed.changes(shelf.remote, 0).parts
    assert [len(part.entries) for part in parts] == [256, 256, 88]
    assert [entry.n for part in parts for entry in part.entries] == list(range(1, 601))


def test_a_known_place_saves_the_listing_and_may_be_old(shelf: Shelf) -> None:
    """A hint that is behind the feed only costs another try."""
    shelf.tell(version(n=1))
    shelf.tell(version(n=2))
    seq = feed.announce(shelf.remote, shelf.registry, [version(n=3)], known=feed.Head(1, 1), pause=lambda _: None)
    assert seq == 3


class Losing(MemoryRemote):
    """Loses the answer of the first creates, with or without carrying them out."""

    def __init__(self, *, carried_out: bool, losses: int = 1) -> None:
        super().__init__()
        self.carried_out = carried_out
        self.losses = losses

    def create(self, key: str, body: bytes) -> None:
        """Lose the answer, as a connection that breaks does."""
        if key.startswith(layout.FEED) and self.losses:
            self.losses -= 1
            if self.carried_out:
                super().create(key, body)
            raise OutcomeUnknownError("the answer was lost")
        super().create(key, body)


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_lost_answer_gives_one_object(carried_out: bool) -> None:
    """Whether or not the lost request was carried out, the entries are told once."""
    remote = Losing(carried_out=carried_out, losses=2)
    shelf = Shelf(remote)
    assert feed.announce(remote, shelf.registry, [version()], pause=lambda _: None) == 1
    assert numbers(remote) == [1]


class Careless(MemoryRemote):
    """A store without create-only writes."""

    @property
    def properties(self) -> Properties:
        """Promise nothing."""
        return super().properties._replace(conditional_create=False)

    def create(self, key: str, body: bytes) -> None:
        """Overwrite."""
        try:
            super().create(key, body)
        except ExistsError:
            self.delete(key)
            super().create(key, body)


def test_a_store_without_create_only_is_looked_at_before_each_put() -> None:
    """Nothing that is there is overwritten, also where the store itself would allow it."""
    remote = Careless()
    shelf = Shelf(remote)
    shelf.tell(version(n=1))
    first = remote.read(layout.feed(1))
    assert feed.announce(remote, shelf.registry, [version(n=2)], known=feed.Head(0, 1), pause=lambda _: None) == 2
    assert remote.read(layout.feed(1)) == first


def test_threads_that_announce_at_once_lose_nothing(tmp_path: Path) -> None:
    """Eight threads, ten announcements each: 80 dense objects, every entry once."""
    remote = DirectoryRemote(tmp_path)
    shelf = Shelf(remote)

    def work(of: int) -> None:
        for n in range(1, 11):
            feed.announce(remote, shelf.registry, [version(f"name-{of}", n)])

    threads = [threading.Thread(target=work, args=(of,)) for of in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(remote) == list(range(1, 81))
    told = [(e.name, e.n) for part in feed.changes(remote, 0).parts for e in part.entries]
    assert sorted(told) == [(f"name-{of}", n) for of in range(8) for n in range(1, 11)]


ANNOUNCER = """
import sys
from pathlib import Path
from weighbridge_testlib.shelf import Shelf, facts, manifest_of, payload
from weighbridge.registry.flow import feed
from weighbridge.registry.remotes.directory import DirectoryRemote
remote = DirectoryRemote(Path(sys.argv[1]))
shelf = Shelf(remote)
for n in range(1, 9):
    shelf.tell(feed.version_entry(sys.argv[2], n, manifest_of(payload(n), facts())))
"""


def test_processes_that_announce_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three processes, eight announcements each: 24 dense objects, every entry once."""
    Shelf(DirectoryRemote(tmp_path))
    library = str(Path(__file__).parent / "lib")
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {library!r})\n{ANNOUNCER}",
                str(tmp_path),
                f"of-{i}",
            ]
        )
        for i in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    remote = DirectoryRemote(tmp_path)
    assert numbers(remote) == list(range(1, 25))
    assert len({(e.name, e.n) for part in feed.changes(remote, 0).parts for e in part.entries}) == 24


def test_changes_begin_after_the_cursor(shelf: Shelf) -> None:
    """A reader is given what is new, in order."""
    for n in (1, 2, 3):
        shelf.tell(version(n=n))
    found = feed.changes(shelf.remote, 1)
    assert [part.seq for part in found.parts] == [2, 3]
    assert found.head == 3
    assert not found.fresh
    assert feed.changes(shelf.remote, 3) == feed.Changes([], fresh=False, head=3)


def test_a_hole_is_named(shelf: Shelf) -> None:
    """A missing object is damage: what it told may be lost."""
    for n in (1, 2, 3):
        shelf.tell(version(n=n))
    shelf.remote.delete(layout.feed(2))
    with pytest.raises(FeedDamagedError, match=r"catalog/feed/000000000002\.json") as caught:
        feed.changes(shelf.remote, 0)
    assert caught.value.code == "feed-damaged"
    assert caught.value.exit_code == 5
    assert caught.value.fix == "registry rebuild"


def test_an_absurd_number_is_refused_without_reading_everything_below(shelf: Shelf) -> None:
    """An object far ahead of all others does not make a reader ask for a billion objects."""
    shelf.tell(version())
    shelf.remote.create(layout.feed(999_999_999_999), b"{}")
    with pytest.raises(FeedDamagedError, match="000000000002"):
        feed.changes(shelf.remote, 0)


def test_a_repair_far_behind_a_great_hole_is_found(shelf: Shelf) -> None:
    """Objects that were lost long ago do not matter to a reader who starts behind them."""
    first = feed.append(shelf.remote, shelf.registry, [version(n=1)], feed.Head(5_000_000, 1), epochs=1)
    feed.append(shelf.remote, shelf.registry, [version(n=2)], first, rebuild=first.seq)
    shelf.tell(version(n=3))
    found = feed.changes(shelf.remote, 0)
    assert found.fresh
    assert [entry.n for part in found.parts for entry in part.entries] == [1, 2, 3]


def _flips(stored: bytes) -> Iterator[bytes]:
    for bit in range(0, len(stored) * 8, 7):
        body = bytearray(stored)
        body[bit // 8] ^= 1 << (bit % 8)
        yield bytes(body)


def test_a_flipped_bit_anywhere_in_an_object_is_noticed(shelf: Shelf) -> None:
    """No bit of an object can change without the object being named as damaged."""
    shelf.tell(version())
    stored = shelf.remote.read(layout.feed(1))
    for body in _flips(stored):
        with pytest.raises(FeedDamagedError):
            feed.decode(body, 1)


def test_an_object_without_a_seal_is_read_when_it_has_the_plain_fields_only() -> None:
    """Another writer may leave the seal out; a field that looks like a damaged seal may not stand in for it."""
    document = json.loads(feed.encode(feed.Part(seq=1, epoch=1, nonce="ab", entries=[version()])))
    seal = document.pop("sha256")
    assert feed.decode(canonical(document), 1).entries[0].name == "medical-sft"
    with pytest.raises(FeedDamagedError):
        feed.decode(canonical(document | {"sha257": seal}), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "models/other/v1/manifest.json"},
        {"n": 2},
        {"n": None},
        {"name": "../up"},
        {"content": None},
        {"row": None},
        {"sha256": "ab"},
        {"type": "tag"},
        {"n": 10**8, "source": layout.manifest("medical-sft", 10**8)},
        {"n": 2**63, "source": layout.manifest("medical-sft", 2**63)},
        {"type": "tag", "tag": "prod", "to": 2**63, "source": layout.tag("medical-sft", "prod", 1)},
        {"type": "tag", "tag": "prod", "to": 1, "source": layout.tag("medical-sft", "prod", 10**8)},
        {"type": "tag", "tag": "prod", "to": 1, "source": layout.tags("medical-sft", "prod") + "1" * 5000 + ".json"},
    ],
)
def test_an_entry_that_contradicts_itself_is_damage(change: dict[str, object]) -> None:
    """Source, name, number and type of an entry must agree, and its numbers have no more digits than keys have."""
    part = feed.Part(seq=1, epoch=1, nonce="ab", entries=[msgspec.structs.replace(version(), **change)])
    with pytest.raises(FeedDamagedError):
        feed.decode(feed.encode(part), 1)


def test_announcing_goes_on_behind_a_damaged_head(shelf: Shelf) -> None:
    """A damaged newest object stops readers, never publishers; the epoch is read from before it."""
    shelf.tell(version(n=1))
    shelf.remote.create(layout.feed(2), b"torn")
    assert shelf.tell(version(n=3)) == 3
    assert json.loads(shelf.remote.read(layout.feed(3)))["epoch"] == 1


def test_an_object_that_is_listed_and_not_there_makes_no_hole(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a damaged listing made up is not built on: the next object comes right behind the last real one."""
    shelf.publish("m")
    real = shelf.remote.list

    def damaged(prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        yield from real(prefix, after=after, limit=limit)
        if prefix == layout.FEED:
            yield Stat(layout.feed(18), 1, None, 0.0)

    monkeypatch.setattr(shelf.remote, "list", damaged)
    last = feed.announce(shelf.remote, shelf.registry, [feed.void_entry("m", 2, b"{}")])
    monkeypatch.undo()
    assert [seq for seq, _ in feed.list_after(shelf.remote, 0)] == list(range(1, last + 1))


def test_the_512th_object_is_followed_by_a_snapshot(shelf: Shelf) -> None:
    """The snapshot holds the state after object 512 and begins with its header; nobody writes another in between."""
    for seq in range(1, 512):
        part = feed.Part(seq=seq, epoch=1, nonce="ab", entries=[version(n=seq)])
        shelf.remote.create(layout.feed(seq), feed.encode(part))
    assert snapshot.newest(shelf.remote) == 0
    assert shelf.tell(version(n=512)) == 512
    assert shelf.tell(version(n=513)) == 513
    assert [s.key for s in shelf.remote.list(layout.SNAPSHOTS)] == [f"catalog/snap/{10**12 - 1 - 512:012d}.jsonl.gz"]
    found = snapshot.load(shelf.remote)
    assert found is not None
    assert (found.seq, found.epoch, len(found.entries)) == (512, 1, 512)


def test_no_snapshot_is_made_of_a_damaged_feed(shelf: Shelf) -> None:
    """A state with a hole in it is not passed on; publishing is not disturbed."""
    for n in (1, 2, 3):
        shelf.tell(version(n=n))
    shelf.remote.delete(layout.feed(2))
    assert not feed.take_snapshot(shelf.remote, 3)
    assert not list(shelf.remote.list(layout.SNAPSHOTS))


def test_a_snapshot_builds_on_the_one_before(shelf: Shelf) -> None:
    """Only the objects since the last snapshot are read again."""
    for n in (1, 2, 3):
        shelf.tell(version(n=n))
    assert feed.take_snapshot(shelf.remote, 2)
    shelf.remote.delete(layout.feed(1))
    assert feed.take_snapshot(shelf.remote, 3)
    found = snapshot.load(shelf.remote)
    assert found is not None
    assert [entry.n for entry in found.entries] == [1, 2, 3]


def test_superseded_snapshots_go_when_readers_had_time() -> None:
    """Young ones and two spares stay, so that a damaged newest one has another behind it; the feed stays whole."""
    time = 1_800_000_000.0
    remote = MemoryRemote(clock=lambda: time)
    for seq in (512, 1024, 1536, 2048):
        remote.create(layout.snapshot(seq), snapshot.encode(seq, 1, [version(n=seq)]))
        time += 3600
    remote.create(f"{layout.SNAPSHOTS}of-somebody-else", b"")

    def left() -> list[int]:
        return [seq for stat in remote.list(layout.SNAPSHOTS) if (seq := layout.snapshot_number(stat.key)) is not None]

    assert snapshot.sweep(remote, 3.5 * 3600) == 0
    assert snapshot.sweep(remote, 1.5 * 3600) == 1
    assert left() == [2048, 1536, 1024]
    assert snapshot.sweep(remote, 0) == 1
    assert snapshot.sweep(remote, 0) == 0
    assert left() == [2048, 1536]
    assert remote.stat(f"{layout.SNAPSHOTS}of-somebody-else")
    found = snapshot.load(remote, upto=2047)
    assert found is not None
    assert found.seq == 1536


def test_a_flipped_bit_in_a_snapshot_is_noticed() -> None:
    """Whatever bit changes, the snapshot is refused or unpacks to exactly what was written."""
    stored = snapshot.encode(512, 1, [version(n=n) for n in range(1, 5)])
    whole = snapshot.decode(stored, 512)
    for body in _flips(stored):
        try:
            assert snapshot.decode(body, 512) == whole
        except FeedDamagedError:
            continue
    with pytest.raises(FeedDamagedError):
        snapshot.decode(stored[:-9], 512)
    with pytest.raises(FeedDamagedError):
        snapshot.decode(stored, 1024)


def test_a_damaged_snapshot_gives_way_to_an_older_one(shelf: Shelf) -> None:
    """A snapshot is a shortcut: without a sound one the feed itself is read."""
    for n in (1, 2):
        shelf.tell(version(n=n))
    assert feed.take_snapshot(shelf.remote, 1)
    shelf.remote.create(layout.snapshot(2), b"not gzip")
    found = snapshot.load(shelf.remote)
    assert found is not None
    assert found.seq == 1


def test_a_decision_takes_the_place_of_its_claim_and_keeps_its_time(shelf: Shelf) -> None:
    """Folded, a claim and its version are one fact; the claim's store time, which orders runs, stays."""
    shelf.publish("medical-sft")
    shelf.claim("medical-sft")
    state = entries.State()
    for part in feed.changes(shelf.remote, 0).parts:
        state.apply(part.entries)
    assert [(e.type, e.n) for e in state.entries()] == [("claim", 2), ("version", 1)] or [
        (e.type, e.n) for e in state.entries()
    ] == [("version", 1), ("claim", 2)]
    assert all(e.stored_at for e in state.entries())


@given(st.lists(st.sampled_from(["claim", "version", "withdrawn"]), max_size=12), st.randoms())
def test_folding_does_not_depend_on_order_or_repetition(kinds: list[str], chance: object) -> None:
    """Whatever is told late or twice, the state is the same."""
    manifest = manifest_of(payload(1), facts())
    told = {
        "claim": FeedEntry(
            type="claim",
            name="a",
            n=1,
            content=manifest.content,
            source=layout.claim("a", 1),
            sha256="0" * 64,
            stored_at="2026-01-01T00:00:00.000Z",
        ),
        "version": feed.version_entry("a", 1, manifest),
        "withdrawn": feed.withdrawn_entry("a", 1, b"x"),
    }
    first, second = entries.State(), entries.State()
    first.apply(told[kind] for kind in kinds)
    shuffled = [*kinds, *kinds]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    second.apply(told[kind] for kind in shuffled)
    assert first.entries() == second.entries()


class Down(MemoryRemote):
    """Answers nothing under `catalog/`."""

    def create(self, key: str, body: bytes) -> None:
        """Fail."""
        if key.startswith("catalog/"):
            raise UnreachableError("the remote is down")
        super().create(key, body)


def test_a_remote_that_is_down_is_reported() -> None:
    """An announcement that failed raises, so that its owner keeps it and tells it later."""
    with pytest.raises(UnreachableError):
        Shelf(Down()).tell(version())
