"""A check of what killed publishers left on a remote: it costs room, or money, and nobody goes on with it."""

from collections.abc import Iterator

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.checks.check import WARN, Check
from weighbridge.registry.cli.leftovers import left
from weighbridge.registry.cli.output import span
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.flow.collect import LEFTOVER_AFTER
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.remotes.protocol import Remote


def unfinished(name: str, remote: RemoteSettings, opened: Remote) -> Iterator[Check]:
    """Yield a warning where something lies there that `sweep` would remove: in a registry, and for who may list it."""
    try:
        found = left(opened, LEFTOVER_AFTER)
        swept = found.copies > 0 and _is_registry(opened)
    except WeighbridgeError:
        return
    if swept:
        yield Check(
            WARN,
            f"{name}-leftovers",
            f"{remote.name} holds {found} of killed publishers, untouched for {span(LEFTOVER_AFTER)}",
            f"registry sweep --remote {remote.word}",
        )


def _is_registry(opened: Remote) -> bool:
    """Return True where a registry was begun that this version may write. Raises what the remote raises."""
    check_writer(open_registry(opened, create=False))
    return True
