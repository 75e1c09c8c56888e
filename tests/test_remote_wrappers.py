"""Remotes around remotes: retries that never repeat blindly, and rate limits; and the table that opens remotes."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from weighbridge.registry import errors
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.table import TABLE, open_remote, scheme_of
from weighbridge.registry.remotes.wrappers import RateLimited, Retrying
from weighbridge_testlib.faults import Call, Fault, Faulty
from weighbridge_testlib.remote_conformance import SAMPLE, RemoteConformance, write


class Flaky:
    """A plan that fails at random, but never twice in a row for one method and key."""

    def __init__(self, seed: int, *faults: Fault) -> None:
        self._chance = random.Random(seed)
        self._faults = faults
        self._failed: set[tuple[str, str]] = set()

    def __call__(self, call: Call) -> Fault | None:
        """Return a fault for every second call or so."""
        place = (call.method, call.key)
        if place in self._failed:
            self._failed.discard(place)
            return None
        if self._chance.random() < 0.5:
            self._failed.add(place)
            return self._chance.choice(self._faults)
        return None


class TestRetrying(RemoteConformance):
    """A directory that loses every second answer keeps the contract when retries are around it."""

    def open(self, place: Path) -> Remote:
        """Open a flaky folder."""
        flaky = Faulty(DirectoryRemote(place), Flaky(7, "busy", "lost", "dropped"))
        return Retrying(flaky, sleep=lambda _: None)

    def test_of_racing_processes_one_wins(self, place: Path) -> None:
        """Faults live in one process; the directory's own test races processes."""


class TestRateLimited(RemoteConformance):
    """A rate limit changes nothing but the time."""

    def open(self, place: Path) -> Remote:
        """Open a folder with a limit that nobody notices."""
        return RateLimited(DirectoryRemote(place), requests=1e6, bytes_per_second=1e12)

    def test_of_racing_processes_one_wins(self, place: Path) -> None:
        """The directory's own test races processes."""


def test_pauses_grow_with_jitter_and_end() -> None:
    """Pauses double up to the cap, are shortened by jitter, and after the last attempt the error is raised."""
    pauses: list[float] = []
    faulty = Faulty(MemoryRemote(), lambda _: "busy")
    remote = Retrying(faulty, attempts=5, base=1, cap=4, sleep=pauses.append, chance=lambda: 0.0)
    with pytest.raises(errors.RetryableError) as caught:
        remote.read("a")
    assert pauses == [0.5, 1, 2, 2]
    assert faulty.count() == 5
    assert caught.value.data["attempts"] == 5
    pauses.clear()
    with pytest.raises(errors.RetryableError):
        Retrying(faulty, attempts=3, base=1, sleep=pauses.append, chance=lambda: 1.0).stat("a")
    assert pauses == [1, 2]


def test_a_remote_that_says_when_is_believed() -> None:
    """`retry_after` of an error lengthens the pause, up to the cap."""
    pauses: list[float] = []

    class Asking(MemoryRemote):
        answers = itertools.count()

        def read(self, key: str) -> bytes:
            """Ask for patience, then for too much of it."""
            turn = next(self.answers)
            if turn < 2:
                raise errors.RetryableError(key, retry_after=(3, 9999)[turn])
            return b"body"

    assert Retrying(Asking(), cap=10, sleep=pauses.append).read("a") == b"body"
    assert pauses == [3, 10]


class Ticking:
    """A clock that goes on when somebody sleeps, and with each request by as much as it takes."""

    def __init__(self, takes: float) -> None:
        self.now = 100.0
        self.takes = takes

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@pytest.mark.parametrize("takes", [0.0, 0.3, 1.0, 2.5, 3.9])
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("after", "work"), [(None, lambda remote: remote.read("a")), (30, lambda remote: remote.create("b", b"body"))]
)
def test_who_never_answered_is_not_asked_for_longer_than_one_has_patience(
    takes: float, chance: float, after: int | None, work: Callable[[Remote], object]
) -> None:
    """However long a request takes and a pause is asked for: while nothing ever went through, the end comes in time."""
    clock = Ticking(takes)

    class Door(MemoryRemote):
        house = False

        def read(self, key: str) -> bytes:
            """Take a while, then say "not now"; with a house behind the door only at first."""
            clock.now += clock.takes
            if self.house:
                return b"body"
            error = errors.RetryableError(key)
            if after is not None:
                error.data["retry_after"] = after
            raise error

    door = Door()
    made = {"sleep": clock.sleep, "chance": lambda: chance, "clock": clock}
    remote = Retrying(door, patience=4.0, **made)  # type: ignore[arg-type]
    with pytest.raises(errors.RetryableError):
        remote.read("a")
    assert clock.now - 100.0 <= 4.0
    clock.now = 100.0
    with pytest.raises(errors.RetryableError):
        remote.read("a")
    assert clock.now - 100.0 <= 4.0, "the second call has no patience of its own"
    door.house = True
    work(remote)
    door.house, clock.now = False, 100.0
    with pytest.raises(errors.RetryableError):
        remote.read("a")
    assert clock.now - 100.0 >= 6 * takes + 5 * 0.1, "what answered once is asked as often as ever"


@pytest.mark.parametrize("kind", [errors.MissingError, errors.DeniedError, errors.UnreachableError])
def test_what_repeating_cannot_help_is_raised_at_once(kind: type[errors.WeighbridgeError]) -> None:
    """Only "not now" and "no answer" are repeated."""

    class Failing(MemoryRemote):
        calls = 0

        def read(self, key: str) -> bytes:
            """Fail for good."""
            self.calls += 1
            raise kind(key)

    failing = Failing()
    with pytest.raises(kind):
        Retrying(failing, sleep=lambda _: None).read("a")
    assert failing.calls == 1


@pytest.mark.parametrize("fault", ["lost", "dropped"])
def test_a_create_whose_every_answer_is_lost_is_looked_at(fault: Fault) -> None:
    """Even when no create is ever answered, a look tells whether it was carried out."""
    inner = MemoryRemote()
    faulty = Faulty(inner, lambda call: fault if call.method == "create" else None)
    remote = Retrying(faulty, sleep=lambda _: None)
    if fault == "lost":
        remote.create("a", b"1")
        assert faulty.count("create") == 1
        assert inner.read("a") == b"1"
    else:
        with pytest.raises(errors.OutcomeUnknownError):
            remote.create("a", b"1")
        assert list(inner.list("")) == []


def test_equal_bytes_that_were_there_before_are_refused() -> None:
    """Without a lost answer "exists" is passed on whatever the bytes: comparing is the flow's business."""
    inner = MemoryRemote()
    inner.create("a", b"1")
    with pytest.raises(errors.ExistsError):
        Retrying(inner).create("a", b"1")


def test_a_broken_download_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A stream that breaks after each chunk still gives every byte once."""
    inner = MemoryRemote()
    inner.upload("a", *write(tmp_path / "f", SAMPLE))
    breaks = iter(["busy", "busy", "busy"])
    faulty = Faulty(inner, lambda call: next(breaks, None) if call.method == "fetch" else None)  # type: ignore[arg-type]
    assert b"".join(Retrying(faulty, attempts=2, sleep=lambda _: None).fetch("a", 5)) == SAMPLE[5:]
    assert faulty.count("fetch") == 4


def test_a_broken_listing_repeats_nothing() -> None:
    """A listing that breaks in the middle goes on without doubles, within its limit."""
    inner = MemoryRemote()
    for number in range(9):
        inner.create(f"a/{number}", b"")
    for limit in (None, 1, 2, 5, 9, 20):
        breaks = iter(["busy"])
        faulty = Faulty(inner, lambda _, b=breaks: next(b, None))  # type: ignore[misc]
        found = Retrying(faulty, sleep=lambda _: None).list("a/", after="a/0", limit=limit)
        assert [s.key for s in found] == [f"a/{number}" for number in range(1, 9)][:limit]
    breaks = iter(["busy"])
    faulty = Faulty(inner, lambda _: next(breaks, None))  # type: ignore[arg-type]
    assert list(Retrying(faulty, sleep=lambda _: None).folders("")) == ["a"]


def test_requests_and_bytes_are_held_back(tmp_path: Path) -> None:
    """After a burst of one second the limit holds, for requests and for bytes in both directions."""
    now = [0.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    remote = RateLimited(MemoryRemote(), requests=10, sleep=sleep, clock=lambda: now[0])
    for number in range(30):
        remote.create(f"a/{number}", b"")
    assert now[0] == pytest.approx(2.0)
    now[0], pauses = 0.0, []
    remote = RateLimited(MemoryRemote(), bytes_per_second=1 << 20, sleep=sleep, clock=lambda: now[0])
    remote.upload("a", *write(tmp_path / "f", b"x" * (4 << 20)))
    assert now[0] == pytest.approx(3.0)
    assert sum(map(len, remote.fetch("a"))) == 4 << 20
    assert now[0] == pytest.approx(7.0)
    for wrong in ({"requests": 0}, {"bytes_per_second": -1}):
        with pytest.raises(errors.UsageError):
            RateLimited(MemoryRemote(), **wrong)  # type: ignore[arg-type]


def test_urls_lead_to_their_remotes(tmp_path: Path) -> None:
    """A path and a file URL open a folder, `memory:` a shelf; both come with retries around them."""
    open_remote(str(tmp_path)).create("a", b"1")
    assert open_remote(f"file://{tmp_path}").read("a") == b"1"
    open_remote("memory://table").create("a", b"2")
    assert open_remote("memory://table").read("a") == b"2"
    assert isinstance(open_remote("memory://table"), Retrying)
    assert set(TABLE) == {"file", "memory", "s3", "hf"}


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("hf://acme/name", "ORGANISATION"),
        ("fiel:///x", "file"),
        ("ftp://host", "nothing is known"),
        ("", "needs a URL"),
        ("  ", "needs a URL"),
    ],
)
def test_urls_that_lead_nowhere_are_explained(url: str, word: str) -> None:
    """Misspelt and unknown schemes, and URLs with too much in them, are told apart."""
    with pytest.raises(errors.UsageError) as caught:
        open_remote(url)
    assert word in f"{caught.value.what} {caught.value.why} {caught.value.fix}"


def test_a_plain_path_is_a_file() -> None:
    """Absolute, relative and home paths have the scheme of files; a scheme is read without case."""
    assert [scheme_of(url) for url in ("/a", "a/b", "~/a", "./a:b", "FILE:///a")] == ["file"] * 5
