"""A check of what killed publishers left on a remote: it costs room, or money, and nobody goes on with it."""

from collections.abc import Iterator

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.checks.check import WARN, Check
from weighbridge.registry.cli.leftovers import left
from weighbridge.registry.cli.output import span
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.flow.collect import LEFTOVER_AFTER
from weighbridge.registry.remotes.protocol import Remote


def unfinished(name: str, remote: RemoteSettings, opened: Remote) -> Iterator[Check]:
    """Yield a warning where something lies there; who may not list it sweeps nothing either."""
    try:
        found = left(opened, LEFTOVER_AFTER)
    except WeighbridgeError:
        return
    if found.copies:
        yield Check(
            WARN,
            f"{name}-leftovers",
            f"{remote.name} holds {found} of killed publishers, untouched for {span(LEFTOVER_AFTER)}",
            f"registry sweep --remote {remote.name}",
        )
