"""Which paths lie on network file systems, by an injected mount table."""

import os
from pathlib import Path

import pytest

from weighbridge.config import mounts

TABLE = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /proc rw,nosuid shared:2 - proc proc rw
41 22 0:40 / /home rw,relatime shared:3 - nfs4 filer:/export/home rw,vers=4.2,addr=10.0.0.1
42 41 0:41 / /home/anna/local rw - xfs /dev/vdb1 rw
43 22 0:42 / /scratch rw shared:4 master:7 - lustre 10.0.0.2@o2ib:/fs rw,flock
44 22 0:43 / /data\\040sets rw - fuse.sshfs me@host:/data rw
45 22 0:44 / /secure rw - fuse.gocryptfs /cipher rw
46 22 0:45 / /scratchpad rw - tmpfs tmpfs rw
47 22 0:46 / /over rw - ext4 /dev/vdc rw
48 22 0:47 / /over rw - cifs //srv/share rw
49 22 0:48 / /auto rw - autofs systemd-1 rw
not a mount line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", None),
        ("/var/lib/weighbridge", None),
        ("/home", "nfs4"),
        ("/home/anna/.local/state/weighbridge", "nfs4"),
        ("/home/anna/local/state", None),
        ("/homestead", None),
        ("/scratch/runs", "lustre"),
        ("/scratchpad/runs", None),
        ("/data sets/x", "fuse.sshfs"),
        ("/secure/x", None),
        ("/over/x", "cifs"),
        ("/auto/x", None),
    ],
)
def test_the_innermost_mount_decides(path: str, kind: str | None) -> None:
    """A path belongs to the longest mount point above it, to the last one mounted there, and to no look-alike."""
    assert mounts.network_filesystem(path, TABLE) == kind


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "glusterfs", "virtiofs"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.juicefs", "fuse.glusterfs", "fuse.rclone", "fuse", "fuse.something-new"),
    ],
)
def test_network_types_are_known(kind: str) -> None:
    """Every file system that hosts share counts as a network one; so does a FUSE file system nobody has heard of."""
    assert mounts.is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.bindfs"])
def test_local_types_are_local(kind: str) -> None:
    """Disks of this machine are local, also behind FUSE helpers that only wrap a disk."""
    assert not mounts.is_network(kind)


def test_links_are_resolved(tmp_path: Path) -> None:
    """A link from a local folder into a network file system is seen through."""
    link = tmp_path / "state"
    link.symlink_to("/home/anna/state")
    assert mounts.network_filesystem(link, TABLE) == "nfs4"


def test_an_empty_table_claims_nothing() -> None:
    """Without a mount table nothing is called a network file system."""
    assert mounts.network_filesystem("/home", "") is None
    assert mounts.mount_of("/home", "") is None


def test_this_machines_table_is_read(tmp_path: Path) -> None:
    """The kernel's own table is understood: every path lies on some mount."""
    found = mounts.mount_of(tmp_path)
    assert found is not None
    assert os.path.realpath(tmp_path).startswith(found.point)


def test_the_table_can_be_named(tmp_path: Path) -> None:
    """WEIGHBRIDGE_MOUNTINFO names another table; a missing one is empty, not an error."""
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert mounts.read_table({"WEIGHBRIDGE_MOUNTINFO": str(table)}) == TABLE
    assert mounts.read_table({"WEIGHBRIDGE_MOUNTINFO": str(tmp_path / "none")}) == ""
    assert " - " in mounts.read_table({})
