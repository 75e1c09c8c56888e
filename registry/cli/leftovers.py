"""What killed publishers left on a remote and nobody goes on with: counted, for `doctor` and `sweep --dry-run`."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.output import size
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.shell import load


class Left(NamedTuple):
    """How many copies or uploads lie there, and the bytes they cost."""

    copies: int
    bytes: int

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.copies} unfinished {'copy' if self.copies == 1 else 'copies'}, {size(self.bytes)}"


def left(chosen: RemoteSettings, older_than: float) -> Left:
    """Return what `Remote.sweep` would remove of a folder or a bucket. Raises what the remote raises."""
    if chosen.url.startswith("s3://"):
        opened = load("weighbridge.registry.remotes.s3.remote:open_s3")(chosen.url, chosen.endpoint, chosen)
        try:
            before = opened.now() - older_than
            sizes = list(load("weighbridge.registry.remotes.s3.unfinished:unfinished")(opened.link, before))
        finally:
            opened.close()
        return Left(len(sizes), sum(sizes))
    if not chosen.url.startswith("/"):
        return Left(0, 0)
    found = list(open_directory(chosen.url).leftovers(older_than))
    return Left(len(found), sum(sum(_sizes(path)) for path in found))


def _sizes(path: Path) -> Iterator[int]:
    """Yield the size of a file, or of every file in a folder; what goes away meanwhile does not count."""
    if not path.is_dir() or path.is_symlink():
        with suppress(OSError):
            yield path.lstat().st_size
        return
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield Path(folder, name).lstat().st_size
