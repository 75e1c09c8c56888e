"""How much memory is left: the kernel's figure and the limits of both kinds of control groups, the least of them."""

from pathlib import Path

import pytest

from weighbridge.adapters.memory import Room, available

GIB = 1 << 30


def machine(root: Path, groups: str, free: int = 8 * GIB) -> Path:
    """Write what a kernel shows of its memory and of the groups of this process."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {free >> 10} kB\nHugetlb: 0 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(folder: Path, limit: str, used: int, idle: int, names: tuple[str, str, str]) -> None:
    """Write one level of a hierarchy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {idle}\n")


NEW = ("memory.max", "memory.current", "inactive_file")
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_this_machine_has_memory() -> None:
    """The real kernel tells a figure and where it comes from."""
    room = available()
    assert room.free > 0
    assert room.by


def test_without_a_limit_the_kernel_s_figure_counts(tmp_path: Path) -> None:
    """A group whose limit is `max`, or that is not there, changes nothing."""
    root = machine(tmp_path, "0::/user.slice\n")
    assert available(root) == Room(8 * GIB, "MemAvailable", 16 * GIB)
    group(root / "sys/fs/cgroup/user.slice", "max", 5 * GIB, 0, NEW)
    assert available(root) == Room(8 * GIB, "MemAvailable", 16 * GIB)


def test_the_tightest_level_of_a_hierarchy_counts(tmp_path: Path) -> None:
    """A parent's limit holds its children, and pages of files that nobody uses are free."""
    root = machine(tmp_path, "0::/system.slice/job.scope\n")
    group(root / "sys/fs/cgroup/system.slice", str(6 * GIB), 5 * GIB, 2 * GIB, NEW)
    group(root / "sys/fs/cgroup/system.slice/job.scope", str(5 * GIB), GIB, 0, NEW)
    assert (available(root).free, available(root).of) == (3 * GIB, 6 * GIB)
    assert "control group" in available(root).by


def test_the_older_hierarchy_is_read_too(tmp_path: Path) -> None:
    """Limits of the memory controller of version 1 count; its huge number for none does not."""
    root = machine(tmp_path, "4:cpu,cpuacct:/a\n3:memory:/job\n")
    group(root / "sys/fs/cgroup/memory", str((1 << 63) - 4096), 0, 0, OLD)
    group(root / "sys/fs/cgroup/memory/job", str(2 * GIB), GIB, 0, OLD)
    assert available(root).free == GIB


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/../../etc\n"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, text: str) -> None:
    """A damaged list of groups, or one that leads elsewhere, is no limit; the kernel's figure stays."""
    assert available(machine(tmp_path, text)).free == 8 * GIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    """There is never less than nothing."""
    root = machine(tmp_path, "0::/job\n")
    group(root / "sys/fs/cgroup/job", str(GIB), 2 * GIB, 0, NEW)
    assert available(root).free == 0
