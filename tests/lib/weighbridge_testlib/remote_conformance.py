"""What every remote has to do, as tests: a remote's own test file inherits `RemoteConformance` and says how to open it.

class TestDirectory(RemoteConformance):
    def open(self, place: Path) -> Remote: ...
"""

import hashlib
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import errors
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge_testlib.faults import Call, Fault, Faulty

RACERS = 8
CONTESTED = "models/m/_wb/claims/00000001.json"
MIB = 1 << 20
SAMPLE = b"0123456789abcdef" * (3 * MIB // 16) + b"the odd end"


def write(path: Path, body: bytes) -> tuple[Path, int, str]:
    """Write a file and return what `upload` wants to know of it."""
    path.write_bytes(body)
    return path, len(body), hashlib.sha256(body).hexdigest()


def once(fault: Fault, *methods: str) -> Callable[[Call], Fault | None]:
    """Return a plan that lets the first call of one of these methods fail."""
    done: list[Call] = []

    def plan(call: Call) -> Fault | None:
        if call.method in methods and not done:
            done.append(call)
            return fault
        return None

    return plan


def race(remotes: list[Remote], key: str) -> list[str]:
    """Let one thread per remote create the same key at the same time; return the outcome of each."""
    gate = threading.Barrier(len(remotes))
    outcomes: list[str] = [""] * len(remotes)

    def run(number: int) -> None:
        gate.wait()
        outcomes[number] = attempt(remotes[number], key, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(remotes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def attempt(remote: Remote, key: str, number: int) -> str:
    """Create `key` with a body that names the racer; return "won", "exists" or the class of another error."""
    try:
        remote.create(key, b"racer %d " % number * 1000)
    except errors.ExistsError:
        return "exists"
    except errors.WeighbridgeError as error:
        return type(error).__name__
    return "won"


def race_in_process(opener: Callable[[Path], Remote], place: Path, number: int, gate: Any, out: Any) -> None:
    """Be one racer in a process of its own (a target for multiprocessing, hence a function of a module)."""
    remote = opener(place)
    gate.wait()
    out.put((number, attempt(remote, CONTESTED, number)))


class RemoteConformance(ABC):
    """The contract of `remotes.protocol.Remote`; each test opens the remote anew in an empty place."""

    race_rounds = 3
    """Keys that are fought for by threads; servers that serialise such writes slowly get fewer."""

    @abstractmethod
    def open(self, place: Path) -> Remote:
        """Open the remote that belongs to a place; opened twice, both see the same objects."""

    def opener(self) -> Callable[[Path], Remote] | None:
        """Return a function of a module that opens the remote in another process, or None where none can."""
        return None

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """Return the place of the remote of this test."""
        place = tmp_path / "remote"
        place.mkdir()
        return place

    @pytest.fixture
    def remote(self, place: Path) -> Iterator[Remote]:
        """Open the remote of this test."""
        remote = self.open(place)
        yield remote
        remote.close()

    # ---------------------------------------------------------------------------------------------------- small objects

    def test_what_was_created_is_read_back(self, remote: Remote, place: Path) -> None:
        """A created object is read back whole, by this and by another connection."""
        remote.create("catalog/feed/000000000001.json", b'{"a":1}')
        assert remote.read("catalog/feed/000000000001.json") == b'{"a":1}'
        other = self.open(place)
        assert other.read("catalog/feed/000000000001.json") == b'{"a":1}'
        other.close()

    @pytest.mark.parametrize("body", [b"", b"x", b"y" * (2 * MIB + 3)])
    def test_bodies_of_any_size(self, remote: Remote, body: bytes) -> None:
        """An empty and a large body come back as they were given."""
        remote.create("a/b", body)
        assert remote.read("a/b") == body
        assert b"".join(remote.fetch("a/b")) == body
        assert remote.stat("a/b").size == len(body)

    @pytest.mark.parametrize("second", [b"one", b"two"])
    def test_a_taken_key_is_refused(self, remote: Remote, second: bytes) -> None:
        """A second create fails with ExistsError, whatever its bytes, and changes nothing."""
        remote.create("a/b", b"one")
        with pytest.raises(errors.ExistsError):
            remote.create("a/b", second)
        assert remote.read("a/b") == b"one"

    def test_what_is_not_there_is_missing(self, remote: Remote) -> None:
        """Reading, fetching and looking at an absent key raise MissingError."""
        remote.create("a/b", b"")
        for key in ("nothing", "a", "a/c", "a/b/c"):
            with pytest.raises(errors.MissingError):
                remote.read(key)
            with pytest.raises(errors.MissingError):
                remote.stat(key)
            with pytest.raises(errors.MissingError):
                next(iter(remote.fetch(key)))

    def test_stat_tells_size_checksum_and_time(self, remote: Remote) -> None:
        """`stat` gives the size, the store's time, and a sha256 exactly where the remote says it has one."""
        before = remote.now()
        remote.create("a/b", b"body")
        found = remote.stat("a/b")
        assert (found.key, found.size) == ("a/b", 4)
        assert found.sha256 == (hashlib.sha256(b"body").hexdigest() if remote.properties.server_sha256 else None)
        assert before - 2 <= found.modified <= remote.now() + 2

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/./b", "a/", "a\nb", "a\0b"])
    def test_a_key_that_is_none_is_refused(self, remote: Remote, key: str, tmp_path: Path) -> None:
        """Empty, absolute, climbing and unprintable keys are refused by every method."""
        source, size, sha256 = write(tmp_path / "f", b"x")
        acts: list[Callable[[], object]] = [
            lambda: remote.create(key, b""),
            lambda: remote.upload(key, source, size, sha256),
            lambda: remote.read(key),
            lambda: remote.stat(key),
            lambda: list(remote.fetch(key)),
            lambda: remote.delete(key),
        ]
        for act in acts:
            with pytest.raises(errors.UsageError):
                act()

    def test_keys_of_any_script(self, remote: Remote) -> None:
        """Accents, spaces and characters that mean something in URLs are kept as they are."""
        keys = ["m/é.json", "m/中文", "m/a b+c%20d", "m/#q?x=1&y", "m/~'()!*", "m/\U0001f600"]
        for key in keys:
            remote.create(key, key.encode())
        assert [found.key for found in remote.list("m/")] == sorted(keys, key=str.encode)
        assert all(remote.read(key) == key.encode() for key in keys)

    # ------------------------------------------------------------------------------------------------------------ files

    def test_a_file_is_stored(self, remote: Remote, tmp_path: Path) -> None:
        """An uploaded file is fetched in chunks of at most 2 MiB, and progress adds up to its size."""
        moved: list[int] = []
        source, size, sha256 = write(tmp_path / "f", SAMPLE)
        remote.upload("models/m/v1/model.safetensors", source, size, sha256, moved.append)
        chunks = list(remote.fetch("models/m/v1/model.safetensors"))
        assert b"".join(chunks) == SAMPLE
        assert max(map(len, chunks)) <= 2 * MIB
        assert sum(moved) == size
        assert source.read_bytes() == SAMPLE

    @pytest.mark.parametrize("offset", [0, 1, MIB, len(SAMPLE) - 1, len(SAMPLE)])
    def test_fetch_goes_on_from_an_offset(self, remote: Remote, tmp_path: Path, offset: int) -> None:
        """A broken download can go on where it stopped; behind the last byte there is nothing more."""
        remote.upload("a/f", *write(tmp_path / "f", SAMPLE))
        assert b"".join(remote.fetch("a/f", offset)) == SAMPLE[offset:]

    def test_an_empty_file_is_stored(self, remote: Remote, tmp_path: Path) -> None:
        """A file of zero bytes is an object."""
        remote.upload("a/f", *write(tmp_path / "f", b""))
        assert remote.stat("a/f").size == 0
        assert list(remote.fetch("a/f")) == []

    def test_a_taken_key_is_refused_for_files(self, remote: Remote, tmp_path: Path) -> None:
        """An upload never replaces what is there."""
        remote.create("a/f", b"first")
        with pytest.raises(errors.ExistsError):
            remote.upload("a/f", *write(tmp_path / "f", b"second"))
        assert remote.read("a/f") == b"first"

    @pytest.mark.parametrize(("size", "sha256"), [(-1, None), (1, None), (0, "0" * 64)])
    def test_a_file_that_is_not_what_was_hashed_stays_invisible(
        self, remote: Remote, tmp_path: Path, size: int, sha256: str | None
    ) -> None:
        """Another size or sha256 raises SourceChangedError, and nothing appears under the key."""
        source, real, digest = write(tmp_path / "f", SAMPLE)
        with pytest.raises(errors.SourceChangedError):
            remote.upload("a/f", source, real + size, sha256 or digest)
        assert list(remote.list("")) == []
        with pytest.raises(errors.MissingError):
            remote.stat("a/f")

    def test_a_file_rewritten_while_it_is_sent_stays_invisible(self, remote: Remote, tmp_path: Path) -> None:
        """Bytes that change between hash and upload, while it runs, never become an object."""
        source, size, sha256 = write(tmp_path / "f", SAMPLE)

        def meddle(_: int) -> None:
            with source.open("r+b") as stream:
                stream.seek(size - 5)
                stream.write(b"other")

        with pytest.raises(errors.SourceChangedError):
            remote.upload("a/f", source, size, sha256, meddle)
        assert list(remote.list("")) == []

    def test_an_upload_is_invisible_until_it_is_whole(self, remote: Remote, place: Path, tmp_path: Path) -> None:
        """While a file is being sent, no reader and no listing sees any of it."""
        other = self.open(place)
        seen: list[object] = []

        def look(_: int) -> None:
            seen.extend(other.list(""))
            seen.extend(other.folders("models/"))

        remote.upload("models/m/v1/w", *write(tmp_path / "f", SAMPLE), look)
        assert seen == []
        assert [found.key for found in other.list("")] == ["models/m/v1/w"]
        other.close()

    def test_a_source_that_went_away_is_named(self, remote: Remote, tmp_path: Path) -> None:
        """A vanished source raises VanishedError and leaves nothing."""
        with pytest.raises(errors.VanishedError):
            remote.upload("a/f", tmp_path / "gone.bin", 1, "0" * 64)
        assert list(remote.list("")) == []

    def test_a_stage_spares_the_second_copy(self, remote: Remote, tmp_path: Path) -> None:
        """A file in the remote's own stage folder, where there is one, is private and becomes an object."""
        stage = remote.stage("m", "0123abcd")
        if stage is None:
            remote.upload("models/m/v1/w", *write(tmp_path / "w", SAMPLE))
        else:
            assert stage.stat().st_mode & 0o077 == 0
            source, size, sha256 = write(stage / "w", SAMPLE)
            assert list(remote.list("")) == []
            remote.upload("models/m/v1/w", source, size, sha256)
            assert remote.stage("m", "0123abcd") == stage
        assert b"".join(remote.fetch("models/m/v1/w")) == SAMPLE
        assert [found.key for found in remote.list("")] == ["models/m/v1/w"]

    # --------------------------------------------------------------------------------------------------------- listings

    def test_listings_are_in_utf8_order(self, remote: Remote) -> None:
        """Keys come in the order of their bytes, nested folders included, with sizes and times."""
        keys = ["a", "b-c", "b/c", "b/d/e", "b/d-", "b0", "B", "b/é", "b/z", "b/\U0001f600", "b/\uff5e"]
        for key in keys:
            remote.create(key, b"12")
        ordered = sorted(keys, key=str.encode)
        found = list(remote.list(""))
        assert [stat.key for stat in found] == ordered
        assert {stat.size for stat in found} == {2}
        assert all(abs(stat.modified - remote.now()) < 60 for stat in found)
        for prefix in ("b", "b/", "b/d", "b/d/", "B", "zz", "b/d/e"):
            assert [s.key for s in remote.list(prefix)] == [k for k in ordered if k.startswith(prefix)]

    def test_a_listing_goes_on_after_a_key(self, remote: Remote) -> None:
        """`after` leaves out what comes before and the key itself, there or not; `limit` bounds the answer."""
        keys = [f"catalog/feed/{n:012d}.json" for n in range(1, 8)]
        for key in keys:
            remote.create(key, b"")
        remote.create("catalog/snap/1", b"")
        assert [s.key for s in remote.list("catalog/feed/", after=keys[3])] == keys[4:]
        assert [s.key for s in remote.list("catalog/feed/", after="catalog/feed/000000000003.jsoo")] == keys[3:]
        assert [s.key for s in remote.list("catalog/feed/", after=keys[1], limit=2)] == keys[2:4]
        assert [s.key for s in remote.list("catalog/feed/", limit=1)] == keys[:1]
        assert list(remote.list("catalog/feed/", after=keys[-1])) == []
        assert list(remote.list("catalog/feed/", limit=0)) == []

    def test_nothing_is_listed_where_nothing_is(self, remote: Remote) -> None:
        """A prefix without objects gives an empty listing."""
        assert list(remote.list("")) == []
        assert list(remote.list("models/none/")) == []
        assert list(remote.folders("")) == []
        assert list(remote.folders("models/")) == []

    def test_folders_are_those_that_hold_objects(self, remote: Remote) -> None:
        """`folders` names the immediate sub-folders in the order of their bytes, and no objects."""
        for key in ("models/b/v1/x", "models/a/v1/x", "models/a/v10/x", "models/a/v2/y/z", "models/a/note", "top"):
            remote.create(key, b"")
        assert list(remote.folders("models/")) == ["a", "b"]
        assert list(remote.folders("models/a/")) == ["v1", "v10", "v2"]
        assert list(remote.folders("")) == ["models"]
        assert list(remote.folders("models/a/v1/")) == []

    def test_folders_whose_names_begin_alike(self, remote: Remote) -> None:
        """A folder whose name begins with another's comes in the order of keys, and none is lost on the way."""
        for name in ("a", "a-b", "a.b", "a0", "ab"):
            remote.create(f"models/{name}/v1/x", b"")
        assert list(remote.folders("models/")) == ["a-b", "a.b", "a", "a0", "ab"]
        assert list(Retrying(remote).folders("models/")) == ["a-b", "a.b", "a", "a0", "ab"]

    def test_a_deleted_object_is_gone(self, remote: Remote) -> None:
        """A deleted key is missing, not listed and free again; deleting it twice is no error."""
        remote.create("models/m/v1/x", b"1")
        remote.create("models/m/v1/y", b"2")
        remote.delete("models/m/v1/x")
        remote.delete("models/m/v1/x")
        remote.delete("models/m/v1/x/deeper")
        remote.delete("models/m/v1")
        assert [s.key for s in remote.list("")] == ["models/m/v1/y"]
        with pytest.raises(errors.MissingError):
            remote.read("models/m/v1/x")
        remote.create("models/m/v1/x", b"3")
        assert remote.read("models/m/v1/x") == b"3"

    # ------------------------------------------------------------------------------------------- clock, sweeping, races

    def test_the_clock_is_that_of_the_store(self, remote: Remote) -> None:
        """`now` tells the time by which objects are dated, and asking leaves nothing behind."""
        assert abs(remote.now() - time.time()) < 30
        assert list(remote.list("")) == []

    def test_sweeping_spares_every_object(self, remote: Remote, tmp_path: Path) -> None:
        """Sweeping with no patience at all removes no object."""
        remote.create("models/m/_wb/claims/00000001.json", b"1")
        remote.upload("models/m/v1/w", *write(tmp_path / "w", b"weights"))
        remote.sweep(-10.0)
        assert [s.key for s in remote.list("")] == ["models/m/_wb/claims/00000001.json", "models/m/v1/w"]

    def test_of_racing_threads_one_wins(self, remote: Remote, place: Path) -> None:
        """Eight threads, on their own connections and on one, create one key: one wins, the others are told."""
        own = [self.open(place) for _ in range(RACERS)]
        for turn, remotes in enumerate((own, [remote] * RACERS)):
            for round_ in range(self.race_rounds):
                key = f"models/m{turn}/_wb/claims/{round_:08d}.json"
                outcomes = race(remotes, key)
                assert sorted(outcomes) == ["exists"] * (RACERS - 1) + ["won"]
                assert remote.read(key) == b"racer %d " % outcomes.index("won") * 1000
        for other in own:
            other.close()

    def test_of_racing_processes_one_wins(self, place: Path) -> None:
        """Eight processes create one key: one wins, and its bytes are there."""
        opener = self.opener()
        if opener is None:
            assert self.open(place).properties.durable_ack is False  # lives in one process only
            return
        context = multiprocessing.get_context("spawn")
        gate, out = context.Barrier(RACERS), context.SimpleQueue()
        racers = [context.Process(target=race_in_process, args=(opener, place, n, gate, out)) for n in range(RACERS)]
        for racer in racers:
            racer.start()
        outcomes = dict(out.get() for _ in racers)
        for racer in racers:
            racer.join()
        assert sorted(outcomes.values()) == ["exists"] * (RACERS - 1) + ["won"]
        winner = next(number for number, outcome in outcomes.items() if outcome == "won")
        assert self.open(place).read(CONTESTED) == b"racer %d " % winner * 1000

    def test_of_racing_uploads_one_wins(self, remote: Remote, tmp_path: Path) -> None:
        """Two files sent to one key at once: one is stored whole, the other is told."""
        gate = threading.Barrier(2)
        outcomes: list[str] = []

        def send(letter: str) -> None:
            source, size, sha256 = write(tmp_path / letter, letter.encode() * MIB)
            gate.wait()
            try:
                remote.upload("models/m/v1/w", source, size, sha256)
                outcomes.append(letter)
            except errors.ExistsError:
                outcomes.append("exists")

        threads = [threading.Thread(target=send, args=(letter,)) for letter in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [letter for letter in outcomes if letter != "exists"]
        assert len(outcomes) == 2
        assert b"".join(remote.fetch("models/m/v1/w")) == winner.encode() * MIB

    # ----------------------------------------------------------------------------------------------------- lost answers

    @pytest.mark.parametrize("fault", ["lost", "dropped", "busy"])
    def test_a_create_without_an_answer_ends_well(self, remote: Remote, fault: Fault) -> None:
        """Done or not done: after a lost answer the object is there once, and the writer knows that it is its own."""
        careful = Retrying(Faulty(remote, once(fault, "create")), sleep=lambda _: None)
        careful.create("a/b", b"mine")
        assert remote.read("a/b") == b"mine"

    @pytest.mark.parametrize("fault", ["lost", "dropped", "busy"])
    def test_an_upload_without_an_answer_ends_well(self, remote: Remote, tmp_path: Path, fault: Fault) -> None:
        """A file whose answer was lost is there once and whole."""
        careful = Retrying(Faulty(remote, once(fault, "upload")), sleep=lambda _: None)
        careful.upload("a/b", *write(tmp_path / "f", SAMPLE))
        assert b"".join(remote.fetch("a/b")) == SAMPLE

    def test_a_lost_answer_is_not_taken_for_a_win(self, remote: Remote, tmp_path: Path) -> None:
        """Where somebody else's bytes are there, a writer without an answer learns that the key is taken."""
        remote.create("a/b", b"theirs")
        careful = Retrying(Faulty(remote, once("dropped", "create", "upload")), sleep=lambda _: None)
        with pytest.raises(errors.ExistsError):
            careful.create("a/b", b"mine")
        careful = Retrying(Faulty(remote, once("dropped", "create", "upload")), sleep=lambda _: None)
        with pytest.raises(errors.ExistsError):
            careful.upload("a/b", *write(tmp_path / "f", b"mine"))
        assert remote.read("a/b") == b"theirs"

    def test_it_says_what_it_is(self, remote: Remote) -> None:
        """URL and properties are told without asking the store, and at least one connection pays off."""
        assert remote.url
        assert remote.properties.parallel >= 1
        assert os.sep not in remote.url or "://" in remote.url or remote.url.startswith("/")
