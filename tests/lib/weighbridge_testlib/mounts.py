"""File systems that fail on demand: a small ext4 that can lose its power, a small tmpfs, a read-only mount.

All of them need root and a kernel that lets it; `refused()` tells why not, so that a proof can be skipped honestly.
"""

import fcntl
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_EXT4_SHUTDOWN: Final = 0x8004587D
_NO_LOG_FLUSH: Final = struct.pack("I", 2)


class PowerLossDisk:
    """An ext4 in a file; `lose_power` drops all that was not forced to it, then mounts what is left."""

    def __init__(self, image: Path, at: Path) -> None:
        self.image = image
        self.at = at

    def mount(self) -> None:
        """Mount the image; the journal is replayed, as after a real power loss."""
        _do("mount", "-o", "loop", str(self.image), str(self.at))

    def unmount(self) -> None:
        """Unmount; nobody may have a file open."""
        _do("umount", str(self.at))

    def cut(self) -> None:
        """Stop the disk this instant, without flushing the journal; every later call on it fails."""
        handle = os.open(self.at, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, _EXT4_SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(handle)

    def lose_power(self) -> None:
        """Cut and come back."""
        self.cut()
        self.unmount()
        self.mount()


@contextmanager
def power_loss_disk(folder: Path, *, megabytes: int = 96) -> Iterator[PowerLossDisk]:
    """Make and mount an ext4 under `folder`; unmount it in the end."""
    image, at = folder / "disk.img", folder / "disk"
    at.mkdir(parents=True)
    with image.open("wb") as stream:
        stream.truncate(megabytes << 20)
    _do("mkfs.ext4", "-q", "-F", str(image))
    disk = PowerLossDisk(image, at)
    disk.mount()
    try:
        yield disk
    finally:
        _do("umount", "-l", str(at))


@contextmanager
def small_disk(at: Path, *, kilobytes: int, inodes: int = 0) -> Iterator[Path]:
    """Mount a tmpfs of this size; unmount it in the end."""
    at.mkdir(parents=True, exist_ok=True)
    options = f"size={kilobytes}k" + (f",nr_inodes={inodes}" if inodes else "")
    _do("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at))
    try:
        yield at
    finally:
        _do("umount", "-l", str(at))


def remount(at: Path, *options: str) -> None:
    """Change a mounted file system's options, such as `ro` or `size=8m`."""
    _do("mount", "-o", ",".join(("remount", *options)), str(at))


def refused(*, loop: bool = False) -> str | None:
    """Return why this process cannot mount a tmpfs (with `loop`, an ext4 in a file that it can shut down), or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        with tempfile.TemporaryDirectory() as folder:
            if not loop:
                with small_disk(Path(folder) / "t", kilobytes=64):
                    return None
            with power_loss_disk(Path(folder), megabytes=16) as disk:
                disk.lose_power()
    except (OSError, subprocess.CalledProcessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"this machine cannot mount it: {detail}"
    return None


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
