"""The marker: a registry begins once, and newer formats are refused in words."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from weighbridge.registry import errors, layout
from weighbridge.registry.flow import feed, notes, tags
from weighbridge.registry.flow.claim import claim
from weighbridge.registry.flow.collect import collect
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.follow import beside
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.flow.mirror import bring_claim
from weighbridge.registry.flow.rebuild import rebuild
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Properties
from weighbridge.registry.types import Owner, Registry
from weighbridge_testlib.shelf import Shelf, facts, manifest_of, payload


def stored(remote: MemoryRemote, **changes: object) -> MemoryRemote:
    """Put a marker with some fields changed into an empty remote."""
    other = MemoryRemote()
    open_registry(other, create=True)
    remote.create(layout.MARKER, json.dumps(json.loads(other.read(layout.MARKER)) | changes).encode())
    return remote


def test_a_registry_begins_once() -> None:
    """The first call creates the marker, later ones return the same registry."""
    remote = MemoryRemote()
    with pytest.raises(errors.NotFoundError, match="no registry"):
        open_registry(remote, create=False)
    begun = open_registry(remote, create=True)
    assert (begun.format, begun.min_reader, begun.min_writer, begun.mode, begun.epoch) == (1, 1, 1, "shared", 1)
    assert open_registry(remote, create=True) == open_registry(remote, create=False) == begun
    check_writer(begun)


def test_two_that_begin_agree(tmp_path: Path) -> None:
    """Racing beginners end up with one registry."""
    found: list[Registry] = []
    gate = threading.Barrier(6)

    def begin() -> None:
        remote = DirectoryRemote(tmp_path / "new")
        gate.wait()
        found.append(open_registry(remote, create=True))

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len({registry.registry for registry in found}) == 1


def test_a_newer_format_is_refused() -> None:
    """A registry that needs a newer reader is not read, one that needs a newer writer is not written."""
    with pytest.raises(errors.UsageError, match="newer"):
        open_registry(stored(MemoryRemote(), min_reader=2, mode="consensus", registry=7), create=False)
    registry = open_registry(stored(MemoryRemote(), min_writer=2, something="new"), create=True)
    with pytest.raises(errors.UsageError, match="newer weighbridge to write"):
        check_writer(registry)


WRITERS: dict[str, Callable[[MemoryRemote, Registry], object]] = {
    "claim": lambda r, of: claim(r, of, NAME, manifest_of(payload(9), facts()), Owner(host="h", daemon="d")),
    "tag": lambda r, of: tags.move(r, of, NAME, "prod", 1, "lw"),
    "untag": lambda r, of: tags.move(r, of, NAME, "prod", None, "lw"),
    "note": lambda r, of: notes.add(r, of, NAME, 1, "card", text="words", who="lw"),
    "withdraw": lambda r, of: withdraw(r, of, NAME, 1, who="lw", why="a test"),
    "void": lambda r, of: void(r, of, NAME, 2, reason="a test", by="lw"),
    "collect": lambda r, of: collect(r, of, by="lw", dead_after=-60),
    "announce": lambda r, of: feed.announce(r, of, [feed.void_entry(NAME, 1, b"{}")]),
    "rebuild": rebuild,
    "bring a claim": lambda r, of: bring_claim(shelf().remote, r, NAME, 1, registry=of),
    "bring what is said": lambda r, of: beside(shelf().remote, r, of, NAME),
}
NAME = "medical-sft"


def shelf(remote: MemoryRemote | None = None) -> Shelf:
    """Return a registry with a version and an open claim."""
    made = Shelf(remote or MemoryRemote())
    made.publish(NAME)
    made.claim(NAME)
    return made


@pytest.mark.parametrize("name", WRITERS)
def test_nobody_touches_what_only_a_newer_version_writes(name: str) -> None:
    """Whatever would write into such a registry is refused before anything of it is there."""
    remote = MemoryRemote()
    made = shelf(remote)
    before = {stat.key: remote.read(stat.key) for stat in remote.list("")}
    newer = msgspec.structs.replace(made.registry, min_writer=2)
    with pytest.raises(errors.UsageError, match="newer weighbridge to write"):
        WRITERS[name](remote, newer)
    assert {stat.key: remote.read(stat.key) for stat in remote.list("")} == before


@pytest.mark.parametrize("changes", [{"registry": "no uuid"}, {"format": "x"}, {"mode": "odd"}, {"schema": "other/1"}])
def test_a_damaged_marker_is_named(changes: dict[str, object]) -> None:
    """A marker that is not what was written is damage, not an empty remote."""
    with pytest.raises(errors.IntegrityError, match=r"weighbridge\.json"):
        open_registry(stored(MemoryRemote(), **changes), create=True)
    remote = MemoryRemote()
    remote.create(layout.MARKER, b"{")
    with pytest.raises(errors.IntegrityError):
        open_registry(remote, create=True)


def test_a_store_that_overwrites_is_not_shared() -> None:
    """Where a taken key is not refused, only a single writer may begin a registry."""

    class Plain(MemoryRemote):
        @property
        def properties(self) -> Properties:
            """Promise less."""
            return super().properties._replace(conditional_create=False)

    with pytest.raises(errors.UsageError, match="cannot be shared"):
        open_registry(Plain(), create=True)
    assert open_registry(Plain(), create=True, mode="single-writer").mode == "single-writer"
