"""A pull that dies anywhere, into a folder or a mount point: nothing half is ever taken for a version."""

import os
from pathlib import Path
from typing import Any

import pytest

from weighbridge.registry import manifest
from weighbridge.registry.errors import ConflictError
from weighbridge.registry.flow import place
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge_testlib.shelf import Shelf, holds, leftovers, payload

NAME = "medical-sft"


CALLS = ("open", "write", "fsync", "rename", "mkdir", "ftruncate", "unlink", "rmdir", "readv", "close")


def _die_at(k: int, work: Any) -> int:
    """Run `work` in a child that dies before its k-th system call of interest; return the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def counted(call: Any) -> Any:
        def run(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == k:
                os._exit(77)
            return call(*args, **more)

        return run

    try:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        place._renameat2 = counted(place._renameat2)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent sees the code
        os._exit(1)


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_anywhere_the_target_is_absent_or_perfect(tmp_path: Path, replacing: bool) -> None:
    """A pull may die before every system call: the target is whole, old or new, and repeating finishes it."""
    remote = DirectoryRemote(tmp_path / "remote")
    shelf = Shelf(remote)
    shelf.publish(NAME, payload(1))
    shelf.publish(NAME, payload(2))
    for k in range(1, 400):
        folder = tmp_path / f"at-{k}"
        target = folder / "model"
        if replacing:
            pull(remote, NAME, 1, target)
        code = _die_at(k, lambda target=target: pull(remote, NAME, 2, target, force=replacing))
        assert code in {0, 77}
        if target.exists():
            assert holds(target, payload(2)) or (replacing and holds(target, payload(1)))
        else:
            assert not replacing
        pull(remote, NAME, 2, target, force=replacing)
        assert holds(target, payload(2))
        if code == 0:
            break
    assert code == 0
    assert k > 40


@pytest.fixture
def shelf() -> Shelf:
    """Return a registry in memory with one version."""
    shelf = Shelf(MemoryRemote())
    shelf.publish(NAME, payload(1))
    return shelf


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that says it is a mount point."""
    target = tmp_path / "volume"
    target.mkdir()
    (target / "lost+found").mkdir()
    real = Path.is_mount
    monkeypatch.setattr(Path, "is_mount", lambda self: self == target or real(self))
    return target


def test_a_mount_point_is_filled_inside_and_called_the_weaker_form(shelf: Shelf, mounted: Path) -> None:
    """A volume cannot be renamed over: files move in one by one, the manifest last, the marker goes at the end."""
    result = pull(shelf.remote, NAME, 1, mounted)
    assert result.weaker
    assert holds(mounted, payload(1))
    assert leftovers(mounted) == []
    second = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"new"}
    shelf.publish(NAME, second)
    with pytest.raises(ConflictError):
        pull(shelf.remote, NAME, 2, mounted)
    pull(shelf.remote, NAME, 2, mounted, force=True)
    assert holds(mounted, second)
    assert leftovers(mounted) == []


def test_a_mount_point_with_foreign_files_is_refused(shelf: Shelf, mounted: Path) -> None:
    """A volume with somebody's data in it is not touched."""
    (mounted / "data.csv").write_text("mine")
    with pytest.raises(ConflictError):
        pull(shelf.remote, NAME, 1, mounted, force=True)
    assert (mounted / "data.csv").read_text() == "mine"


@pytest.mark.parametrize("replacing", [False, True])
def test_killed_while_filling_a_mount_point_no_manifest_lies(tmp_path: Path, mounted: Path, replacing: bool) -> None:
    """Whenever a manifest is there without the marker, the files fit it; repeating the command finishes the rest."""
    remote = DirectoryRemote(tmp_path / "remote")
    shelf = Shelf(remote)
    shelf.publish(NAME, payload(1))
    shelf.publish(NAME, payload(2))
    for k in range(1, 400):
        for path in sorted(mounted.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if replacing:
            pull(remote, NAME, 1, mounted)
        code = _die_at(k, lambda: pull(remote, NAME, 2, mounted, force=replacing))
        assert code in {0, 77}
        at = place.look(mounted)
        if at.manifest is not None and not at.unfinished:
            assert manifest.verify(at.manifest, mounted) == [] or leftovers(mounted)
        pull(remote, NAME, 2, mounted, force=replacing)
        assert holds(mounted, payload(2))
        assert leftovers(mounted) == []
        if code == 0:
            break
    assert code == 0
