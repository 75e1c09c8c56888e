"""What killed publishers left on a remote and nobody goes on with: counted, for `doctor` and `sweep`."""

from typing import NamedTuple

from weighbridge.registry.cli.output import size
from weighbridge.registry.remotes.protocol import Remote


class Left(NamedTuple):
    """How many copies or uploads lie there, and the bytes they cost."""

    copies: int
    bytes: int

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.copies} unfinished {'copy' if self.copies == 1 else 'copies'}, {size(self.bytes)}"


def left(remote: Remote, older_than: float) -> Left:
    """Return what `Remote.sweep` would remove now. Raises what the remote raises."""
    sizes = list(remote.unfinished(older_than))
    return Left(len(sizes), sum(sizes))
