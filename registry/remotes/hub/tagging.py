"""Git tags that follow our movable tags, so that `revision="prod"` works for whoever has only the Hub's client.

They are a convenience: the moves in the ledger decide, and a Git tag that could not follow is set by the next move.
"""

from collections.abc import Callable
from contextlib import suppress

from weighbridge.registry import errors
from weighbridge.registry.manifest import parse_json
from weighbridge.registry.remotes.hub.keys import Place
from weighbridge.registry.remotes.hub.repositories import Repositories


def follow(repositories: Repositories, commit_of: Callable[[str, int], str | None], place: Place, body: bytes) -> None:
    """Let the Git tag of a tag move stand where the move says."""
    if not place.path.startswith("tags/"):
        return
    tag = place.path.split("/")[1]
    with suppress(errors.WeighbridgeError):
        move = parse_json(body, place.path)
        to = move.get("to") if isinstance(move, dict) else None
        repositories.untag(place.name, tag)
        commit = commit_of(place.name, to) if isinstance(to, int) else None
        if commit is not None:
            repositories.tag(place.name, tag, commit)
