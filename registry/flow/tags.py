"""Moving a tag: read where it stands, create the next move; whoever comes second is told who won."""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weighbridge.registry import layout
from weighbridge.registry.errors import ConflictError, IntegrityError, NotFoundError, UnreachableError
from weighbridge.registry.flow import feed, once
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.manifest import canonical, parse_json
from weighbridge.registry.refs import check_name, check_tag
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled
from weighbridge.registry.types import SCHEMA_TAG, Registry, TagMove


def move(  # noqa: PLR0917 - read like a sentence: this tag of this name to that version, by whom, why
    remote: Remote,
    registry: Registry,
    name: str,
    tag: str,
    to: int | None,
    who: str,
    why: str | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> TagMove:
    """Move a tag to a committed version, or remove it (`to` None), tell the team, and return the move.

    A tag that stands there already is only told again. Raises NotFoundError or WithdrawnError for a version that cannot
    be tagged, ConflictError that names the winner when somebody else moved the tag at the same time, and
    UnreachableError when the tag moved and the team could not be told.
    """
    check_writer(registry)
    check_name(name)
    check_tag(tag)
    last = current(remote, name, tag)
    at = last.to if last else None
    if to is None and at is None:
        raise NotFoundError(f"{name} has no tag '{tag}'", fix=f"registry tag {name}")
    if to is not None:
        committed(remote, name, to)
    if last is None or at != to:
        wanted = TagMove(
            schema=SCHEMA_TAG,
            name=name,
            tag=tag,
            seq=last.seq + 1 if last else 1,
            to=to,
            from_=at,
            who=who,
            when=spelled(clock()),
            why=why,
            nonce=secrets.token_hex(16),
        )
        _create(remote, wanted)
        last = wanted
    _tell(remote, registry, last)
    return last


def current(remote: Remote, name: str, tag: str) -> TagMove | None:
    """Return the last move of a tag as the remote has it; None when it was never set."""
    key = None
    for stat in remote.list(layout.tags(name, tag)):
        key = stat.key
    return None if key is None else _read(remote, key)


def history(remote: Remote, name: str, tag: str) -> list[TagMove]:
    """Return every move of a tag, oldest first."""
    keys = [stat.key for stat in remote.list(layout.tags(name, tag))]
    with ThreadPoolExecutor(max(1, remote.properties.parallel), thread_name_prefix="tags") as pool:
        return list(pool.map(lambda key: _read(remote, key), keys))


def _create(remote: Remote, wanted: TagMove) -> None:
    key = layout.tag(wanted.name, wanted.tag, wanted.seq)
    theirs = once.create(remote, key, canonical(wanted))
    if theirs is None:
        return
    winner = parse(theirs, key)
    where = f"moved it to v{winner.to}" if winner.to is not None else "removed it"
    raise ConflictError(
        f"{wanted.name}:{wanted.tag} was moved by somebody else at the same time",
        why=f"{winner.who} {where} at {winner.when}" + (f": {winner.why}" if winner.why else ""),
        fix="look at it again, then repeat the command if you still want to",
        winner=msgspec.to_builtins(winner),
    )


def _tell(remote: Remote, registry: Registry, moved: TagMove) -> None:
    key = layout.tag(moved.name, moved.tag, moved.seq)
    try:
        feed.announce(remote, registry, [feed.tag_entry(moved, remote.read(key))])
    except UnreachableError as error:
        raise UnreachableError(
            f"{moved.name}:{moved.tag} was moved, but the team's catalogue could not be told",
            why=error.what,
            fix="run the same command again",
        ) from error


def _read(remote: Remote, key: str) -> TagMove:
    return parse(remote.read(key), key)


def parse(stored: bytes, key: str) -> TagMove:
    """Return the move in these bytes. Raises IntegrityError."""
    try:
        found = msgspec.convert(parse_json(stored, key), TagMove)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"{key} is damaged", why=str(error)) from error
    if key != layout.tag(found.name, found.tag, found.seq):
        raise IntegrityError(f"{key} is damaged", why="it tells of another tag")
    return found
