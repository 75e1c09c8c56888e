"""Which file system a path lies on, by the mount table: SQLite needs a local one, so does inotify."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

MOUNTINFO: Final = "/proc/self/mountinfo"

NETWORK: Final = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda"),
        *("lustre", "gpfs", "beegfs", "fhgfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "dvs"),
        *("ocfs2", "gfs", "gfs2"),
        *("9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs"),
    }
)
"""Shared between hosts, or between a guest and its host."""

LOCAL_FUSE: Final = frozenset(
    {"encfs", "gocryptfs", "cryfs", "bindfs", "mergerfs", "fuse-overlayfs", "ntfs-3g", "lxcfs", "unionfs", "squashfuse"}
)
"""FUSE file systems over a local disk. Any other one is taken for a network file system, because most are
(sshfs, s3fs, rclone, juicefs, gcsfuse, ...) and the wrong guess only costs a slower scan."""


class Mount(NamedTuple):
    """One line of the mount table."""

    point: str
    type: str
    source: str


def read_table(environ: Mapping[str, str]) -> str:
    """Return the kernel's mount table as text, or the file that WEIGHBRIDGE_MOUNTINFO names; empty without one."""
    try:
        return Path(environ.get("WEIGHBRIDGE_MOUNTINFO") or MOUNTINFO).read_text(errors="surrogateescape")
    except OSError:
        return ""


def parse(mountinfo: str) -> list[Mount]:
    """Return the mounts of a mountinfo text in its order; lines that are none are left out."""
    found = []
    for line in mountinfo.splitlines():
        before, mark, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if mark and len(fields) >= 6 and len(more) >= 2:
            found.append(Mount(_plain(fields[4]), more[0], _plain(more[1])))
    return found


def mount_of(path: Path | str, mountinfo: str | None = None) -> Mount | None:
    """Return the mount a path lies on, links resolved; the path need not exist. None when the table does not say."""
    real = os.path.realpath(path)
    if mountinfo is None:
        os.access(real, os.F_OK)  # an automounter mounts on the first look
        mountinfo = read_table({})
    best: Mount | None = None
    for mount in parse(mountinfo):
        # A later line covers an earlier one with the same or a longer point.
        if _holds(mount.point, real) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def network_filesystem(path: Path | str, mountinfo: str | None = None) -> str | None:
    """Return the type of the network file system a path lies on, such as `nfs4`, or None for a local one."""
    mount = mount_of(path, mountinfo)
    return mount.type if mount is not None and is_network(mount.type) else None


def is_network(kind: str) -> bool:
    """Tell whether a file system type is shared between hosts."""
    if kind in NETWORK or kind == "fuse":
        return True
    family, _, name = kind.partition(".")
    return family == "fuse" and name not in LOCAL_FUSE


def _holds(point: str, path: str) -> bool:
    return point in {"/", path} or path.startswith(point + "/")


def _plain(field: str) -> str:
    """Undo the table's octal escapes of blanks, tabs, newlines and backslashes."""
    if "\\" not in field:
        return field
    out, at = "", 0
    while at < len(field):
        digits = field[at + 1 : at + 4]
        if field[at] == "\\" and len(digits) == 3 and all(c in "01234567" for c in digits):
            out += chr(int(digits, 8))
            at += 4
        else:
            out += field[at]
            at += 1
    return out
