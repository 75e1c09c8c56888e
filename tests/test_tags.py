"""Tags: the greatest move counts, conflicts name the winner, only committed versions can be tagged."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import layout
from weighbridge.registry.errors import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    UnreachableError,
    UsageError,
    WithdrawnError,
)
from weighbridge.registry.flow import feed, tags
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge_testlib.shelf import Shelf

NAME = "medical-sft"


@pytest.fixture
def shelf() -> Shelf:
    """Return a registry with three versions."""
    shelf = Shelf(MemoryRemote())
    for _ in range(3):
        shelf.publish(NAME)
    return shelf


def move(shelf: Shelf, to: int | None, tag: str = "prod", **more: Any) -> Any:
    """Move a tag."""
    return tags.move(shelf.remote, shelf.registry, NAME, tag, to, who=more.pop("who", "lw"), **more)


def test_a_move_is_an_object_with_the_documented_fields(shelf: Shelf) -> None:
    """Each move is created once under the next number and holds who, when, why, from, to and a nonce."""
    move(shelf, 1)
    move(shelf, 2, why="better on eval", clock=lambda: 1_800_000_000.0)
    document = json.loads(shelf.remote.read("models/medical-sft/_wb/tags/prod/00000002.json"))
    assert document.pop("nonce")
    assert document == {
        "schema": "weighbridge/tag/1",
        "name": NAME,
        "tag": "prod",
        "seq": 2,
        "to": 2,
        "from": 1,
        "who": "lw",
        "when": "2027-01-15T08:00:00.000Z",
        "why": "better on eval",
    }


def test_the_team_is_told(shelf: Shelf) -> None:
    """A move is announced in the feed."""
    move(shelf, 2)
    entry = feed.changes(shelf.remote, 6).parts[-1].entries[0]
    assert (entry.type, entry.tag, entry.to, entry.from_) == ("tag", "prod", 2, None)


def test_history_lists_every_move(shelf: Shelf) -> None:
    """Moves, removals and new beginnings are all kept."""
    for to in (1, 2, None, 3):
        move(shelf, to)
    assert [(m.seq, m.from_, m.to) for m in tags.history(shelf.remote, NAME, "prod")] == [
        (1, None, 1),
        (2, 1, 2),
        (3, 2, None),
        (4, None, 3),
    ]


def test_moving_to_where_it_stands_only_tells_again(shelf: Shelf) -> None:
    """Repeating a move whose announcement was lost heals the catalogue and writes no second move."""
    move(shelf, 1)
    assert move(shelf, 1).seq == 1
    assert len(tags.history(shelf.remote, NAME, "prod")) == 1
    assert len(feed.changes(shelf.remote, 6).parts) == 2


def test_only_committed_versions_can_be_tagged(shelf: Shelf) -> None:
    """Open, given-up, withdrawn and unknown numbers are refused, each with its reason."""
    shelf.claim(NAME)
    shelf.claim(NAME)
    shelf.void(NAME, 5)
    shelf.withdraw(NAME, 3)
    for to, kind, words in (
        (4, NotFoundError, "not finished"),
        (5, NotFoundError, "given up"),
        (3, WithdrawnError, "withdrawn"),
        (9, NotFoundError, "there is no"),
    ):
        with pytest.raises(kind, match=words):
            move(shelf, to)
    assert tags.current(shelf.remote, NAME, "prod") is None


@pytest.mark.parametrize("tag", ["latest", "v7", "a b", "-x", "../x"])
def test_reserved_and_bad_tags_are_refused(shelf: Shelf, tag: str) -> None:
    """`latest` is computed, `v7` is a number, the rest is no tag."""
    with pytest.raises(UsageError):
        move(shelf, 1, tag)


def test_removing_a_tag_that_is_not_there_is_said(shelf: Shelf) -> None:
    """There is nothing to remove."""
    with pytest.raises(NotFoundError, match="no tag"):
        move(shelf, None)


class Raced(MemoryRemote):
    """Lets somebody else move the tag between our look and our write."""

    other: bytes | None = None

    def create(self, key: str, body: bytes) -> None:
        """Write the other one's move first."""
        if self.other is not None and "/tags/" in key:
            other, self.other = self.other, None
            super().create(key, other)
        super().create(key, body)


def test_who_comes_second_is_told_who_won() -> None:
    """The conflict names the winner, where the tag stands now, and why."""
    shelf = Shelf(Raced())
    for _ in range(2):
        shelf.publish(NAME)
    other = Shelf(MemoryRemote())
    for _ in range(2):
        other.publish(NAME)
    move(other, 2, who="mina", why="hotfix")
    assert isinstance(shelf.remote, Raced)
    shelf.remote.other = other.remote.read(layout.tag(NAME, "prod", 1))
    with pytest.raises(ConflictError) as caught:
        move(shelf, 1)
    assert "mina moved it to v2" in str(caught.value.why)
    assert "hotfix" in str(caught.value.why)
    assert caught.value.exit_code == 7
    assert caught.value.data["winner"]["who"] == "mina"


def test_of_many_movers_one_wins_each_number(tmp_path: Path) -> None:
    """Threads that move a tag at once: every success is one link of a chain without gaps."""
    remote = DirectoryRemote(tmp_path)
    shelf = Shelf(remote)
    for _ in range(8):
        shelf.publish(NAME)
    won: list[int] = []

    def work(to: int) -> None:
        with contextlib.suppress(ConflictError):
            won.append(tags.move(remote, shelf.registry, NAME, "prod", to, who=f"w{to}").seq)

    threads = [threading.Thread(target=work, args=(to,)) for to in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chain = tags.history(remote, NAME, "prod")
    assert sorted(won) == [m.seq for m in chain] == list(range(1, len(chain) + 1))
    assert [m.from_ for m in chain] == [None, *(m.to for m in chain[:-1])]


class Mute(MemoryRemote):
    """Cannot write the feed."""

    mute = False

    def create(self, key: str, body: bytes) -> None:
        """Fail for the feed."""
        if self.mute and key.startswith("catalog/"):
            raise UnreachableError("down")
        super().create(key, body)


def test_a_move_that_could_not_be_told_says_so_and_how_to_repeat() -> None:
    """The tag stands; the error says that only the team does not know yet."""
    remote = Mute()
    shelf = Shelf(remote)
    shelf.publish(NAME)
    remote.mute = True
    with pytest.raises(UnreachableError, match="could not be told"):
        move(shelf, 1)
    moved = tags.current(remote, NAME, "prod")
    assert moved is not None
    assert moved.to == 1
    remote.mute = False
    move(shelf, 1)
    assert feed.changes(remote, 2).parts[-1].entries[0].type == "tag"


def test_a_damaged_move_is_named(shelf: Shelf) -> None:
    """A tag whose last move cannot be read points nowhere."""
    shelf.remote.create(layout.tag(NAME, "prod", 1), b'{"schema":"weighbridge/tag/1"}')
    with pytest.raises(IntegrityError, match=r"tags/prod/00000001\.json"):
        tags.current(shelf.remote, NAME, "prod")
