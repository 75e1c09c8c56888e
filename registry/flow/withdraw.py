"""Taking a version back: mark, announce, wait the grace, look at the tags again, delete payload only.

Claims, manifests and marks stay for ever, so that a withdrawn content does not rise again from a folder that still
stands, and nobody else gets its number.
"""

import secrets
from contextlib import suppress
from typing import Final

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import feed, once, tags
from weighbridge.registry.flow.claims import decode
from weighbridge.registry.flow.decision import Void, settled
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.upload import order
from weighbridge.registry.manifest import Manifest, canonical, parse, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.times import spelled

GRACE: Final = 7 * 86_400.0
"""Seconds from mark to deletion, by the store's clock: time to change one's mind and for readers to learn of it."""


def withdraw(remote: Remote, registry: types.Registry, name: str, n: int,
    *, who: str, why: str | None, given_up: bool = False,
) -> bool:  # fmt: skip
    """Mark a committed version as withdrawn and tell the team; False when it was marked before.

    From then on readers refuse it; its files are there until `purge`. One whose decision is damaged goes by its claim,
    unless the team was told that its number was `given_up`. Raises ConflictError while a tag points to it,
    NotFoundError when there is no such version.
    """
    check_writer(registry)
    manifest = _committed(remote, name, n, given_up=given_up)
    _refuse_tagged(remote, name, n)
    key = layout.withdrawn(name, n)
    body = canonical(
        {
            "schema": types.SCHEMA_WITHDRAWN,
            "registry": registry.registry,
            "name": name,
            "n": n,
            "content": manifest.content,
            "who": who,
            "when": spelled(remote.now()),
            "why": why,
            "nonce": secrets.token_hex(16),
        }
    )
    stored = once.create(remote, key, body)
    # Told again by whoever repeats it: the first one may have died in between.
    feed.announce(remote, registry, [feed.withdrawn_entry(name, n, stored or body)])
    return stored is None


def payload(remote: Remote, name: str, n: int) -> list[Stat]:
    """Return the files that `purge` would delete, weights last. Raises as `purge` does, but not for the grace."""
    _marked(remote, name, n)
    manifest = _committed(remote, name, n, marked=True)
    _refuse_tagged(remote, name, n)
    there = {stat.key: stat for stat in remote.list(layout.version(name, n))}
    # The config goes first: a loader that knows no manifest then fails instead of loading a part.
    keys = [layout.version(name, n, entry.path) for group in reversed(order(manifest.files)) for entry in group]
    return [there[key] for key in keys if key in there]


def wait(remote: Remote, name: str, n: int, *, grace: float = GRACE) -> float:
    """Return the seconds until a withdrawn version may be purged; 0 when it may. Raises as `purge`.

    A store's clock may count whole seconds, so a mark can seem to lie in the future.
    """
    return max(0.0, grace - max(0.0, remote.now() - _marked(remote, name, n)))


def purge(remote: Remote, name: str, n: int, *, grace: float = GRACE) -> int:
    """Delete the payload of a version that was withdrawn at least `grace` seconds ago; return the bytes set free.

    Raises NotFinishedError during the grace, ConflictError when a tag points to the version (the tag wins), and
    NotFoundError when it was never withdrawn.
    """
    left = wait(remote, name, n, grace=grace)
    if left > 0:
        raise errors.NotFinishedError(
            f"the files of {name}@v{n} are not to be deleted yet",
            why="its withdrawal may be news to somebody",
            fix=f"repeat it after {spelled(remote.now() + left)}",
            wait=left,
        )
    freed = 0
    for stat in payload(remote, name, n):
        remote.delete(stat.key)
        freed += stat.size
    return freed


def _marked(remote: Remote, name: str, n: int) -> float:
    """Return the store time of a version's mark. Raises NotFoundError without one, IntegrityError."""
    key = layout.withdrawn(name, n)
    try:
        marked = remote.stat(key)
    except errors.MissingError as error:
        raise errors.NotFoundError(
            f"{name}@v{n} was not withdrawn",
            why="nothing is deleted without a mark",
            fix=f'registry withdraw {name}@v{n} --reason "..."',
        ) from error
    _parse_mark(remote.read(key), key, name, n)
    return marked.modified


def _committed(remote: Remote, name: str, n: int, *, given_up: bool = False, marked: bool = False) -> Manifest:
    """Return what was committed; of a damaged decision, or a lost one of a version that is `marked`, as its claim says.

    A mark is only made of what was committed.
    """
    stored = once.look(remote, layout.manifest(name, n))
    found = None
    with suppress(errors.IntegrityError):
        found = settled(remote, name, n, stored) if stored is not None else None
    if found is None and (stored is not None or marked) and not given_up:
        claim = layout.claim(name, n)
        found = parse(decode(remote.read(claim), claim).manifest.encode(), claim)
    if found is None or isinstance(found, Void):
        raise errors.NotFoundError(
            f"there is no version {name}@v{n}",
            why="its number was given up" if found or given_up else "nobody has committed it",
            fix=f"registry ls {name}",
        )
    return found


def _refuse_tagged(remote: Remote, name: str, n: int) -> None:
    """Raise ConflictError when any tag of the name stands at this version."""
    newest: dict[str, str] = {}
    root = layout.tags(name)
    for found in remote.list(root):
        newest[found.key.removeprefix(root).partition("/")[0]] = found.key
    for tag, key in newest.items():
        if tags.parse(remote.read(key), key).to == n:
            raise errors.ConflictError(
                f"{name}@v{n} is tagged '{shown(tag)}'",
                why=f"a tag wins over a withdrawal; registry tag {name}@vN {tag} moves it",
                fix=f"registry tag {name} {tag} --delete",
                tag=tag,
            )


def _parse_mark(stored: bytes, key: str, name: str, n: int) -> None:
    mark = parse_json(stored, key)
    if (
        not isinstance(mark, dict)
        or mark.get("schema") != types.SCHEMA_WITHDRAWN
        or (mark.get("name"), mark.get("n")) != (name, n)
    ):
        raise errors.IntegrityError(f"{shown(key)} is damaged", why="it is not the mark of this version")
