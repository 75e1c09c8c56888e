"""The remote that lives in memory."""

from pathlib import Path

from weighbridge.registry.remotes.memory import MemoryRemote, open_memory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge_testlib.remote_conformance import RemoteConformance
from weighbridge_testlib.version_conformance import VersionConformance


class TestMemory(RemoteConformance):
    """The memory remote keeps the contract of all remotes."""

    def open(self, place: Path) -> Remote:
        """Open the shelf that belongs to a place."""
        return open_memory(f"memory://{place}")


class TestMemoryVersions(VersionConformance):
    """The flow finds on the memory remote what it needs of every remote."""

    def open(self, place: Path) -> Remote:
        """Open the shelf that belongs to a place."""
        return open_memory(f"memory://{place}")


def test_labels_tell_remotes_apart() -> None:
    """The same label is the same remote within a process, another label is another."""
    open_memory("memory://labels-one").create("a", b"1")
    assert open_memory("memory://labels-one").read("a") == b"1"
    assert list(open_memory("memory://labels-two").list("")) == []


def test_its_clock_can_be_set() -> None:
    """Objects are dated by the clock that was given, so that tests need not wait."""
    remote = MemoryRemote(clock=lambda: 1234.5)
    remote.create("a", b"")
    assert remote.stat("a").modified == remote.now() == 1234.5
