"""Keeping a mirror up with a name's home: every version in number order, then what is said of them.

What is said beside the versions (moves of tags, withdrawals, notes) is primary data too. It is copied byte for byte
under the home's keys, so that whoever reads the mirror resolves the same references to the same versions. A tag does
not move on a mirror before the version it moves to is there. A withdrawal does, whatever else is missing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import feed, fetch, once, rebuild, tags
from weighbridge.registry.flow.decide import check_set
from weighbridge.registry.flow.decision import Void, decided
from weighbridge.registry.flow.mirror import bring_claim, deliver, stricter
from weighbridge.registry.flow.publish import UNTOLD
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote, Stat

Outcome = Literal["copied", "there", "void", "open", "withdrawn", "refused"]


class Carried(types.Value, frozen=True):
    """What became of one number: its outcome, the level at which the copy was verified, bytes moved, and why not."""

    n: int
    outcome: Outcome
    verified: str | None = None
    bytes: int = 0
    why: str | None = None


class Told(types.Value, frozen=True):
    """What was brought beside the versions: how many objects of a kind are new; `waiting` and `diverged` name tags."""

    tags: int = 0
    withdrawn: int = 0
    notes: int = 0
    waiting: list[str] = msgspec.field(default_factory=list)
    diverged: list[str] = msgspec.field(default_factory=list)


def numbers(home: Remote, name: str) -> list[int]:
    """Return every number of a name that was ever claimed at its home, in order. Raises NotFoundError for none."""
    claims = [layout.claim_number(stat.key) for stat in home.list(layout.claims(name))]
    found = sorted(claim[1] for claim in claims if claim is not None)
    if not found:
        raise errors.NotFoundError(f"there is no name '{shown(name)}' at {shown(home.url)}", fix="registry ls")
    return found


def carry(
    home: Remote,
    mirror: Remote,
    name: str,
    n: int,
    *,
    settings: RemoteSettings,
    registry: types.Registry,
    scratch: Path,
    begin: Callable[[Sequence[types.FileEntry]], None] | None = None,
    progress: fetch.Progress | None = None,
) -> Carried:
    """Bring one number to a mirror, whatever became of it at home; repeating is harmless, a cut is gone on from.

    `settings` are the mirror's: a version that was sealed under milder rules than it asks for is refused. Raises
    DivergedError when the mirror holds something else, and what the remotes raise.
    """
    stored = once.look(home, layout.manifest(name, n))
    if stored is None:
        return Carried(n=n, outcome="open", why="nobody has committed it yet")
    manifest = decided(stored, layout.manifest(name, n))
    if isinstance(manifest, Void):
        bring_claim(home, mirror, name, n, registry=registry)
        return Carried(n=n, outcome="void")
    if once.look(home, layout.withdrawn(name, n)) is not None:
        bring_claim(home, mirror, name, n, registry=registry)
        return Carried(n=n, outcome="withdrawn", why="it was taken back")
    if once.look(mirror, layout.manifest(name, n)) == stored:
        if not mirror.properties.commits:  # a commit has its files or is none
            check_set(mirror, name, n, manifest)
        return Carried(n=n, outcome="there", verified="size")
    refusal = stricter(manifest, settings)
    if refusal is not None:
        return Carried(n=n, outcome="refused", why=refusal)
    done = deliver(
        home, mirror, name, n,
        mirror_name=settings.name, registry=registry, scratch=scratch, begin=begin, progress=progress,
    )  # fmt: skip
    return Carried(n=n, outcome="copied", verified=done.verified, bytes=sum(file.size for file in manifest.files))


def beside(home: Remote, mirror: Remote, registry: types.Registry, name: str) -> Told:
    """Bring to a mirror what its home says of the versions that are there; repeating is harmless.

    `registry` is the mirror's own, for its feed. Nothing that lies there is touched: a tag whose moves differ is named
    and left as it is. Raises what the remotes raise.
    """
    claimed = {claim[1] for stat in mirror.list(layout.claims(name)) if (claim := layout.claim_number(stat.key))}
    told = Told()
    fresh: list[Stat] = []
    for tag, ours in _tags(home, name).items():
        try:
            new, at_rest, moved = _bring_tag(home, mirror, name, tag, ours)
        except errors.DivergedError:
            told.diverged.append(tag)
            continue
        fresh += moved
        told = msgspec.structs.replace(
            told, tags=told.tags + new, waiting=told.waiting if at_rest else [*told.waiting, tag]
        )
    notes, noted = _bring_marks(home, mirror, name, "notes/", {n for n in claimed if _is_there(mirror, name, n)})
    withdrawn, marks = _bring_marks(home, mirror, name, "withdrawn/", claimed)
    _announce(mirror, registry, name, [*fresh, *noted, *marks])
    return msgspec.structs.replace(told, notes=notes, withdrawn=withdrawn)


def _bring_marks(home: Remote, mirror: Remote, name: str, folder: str, numbers: set[int]) -> tuple[int, list[Stat]]:
    """Copy withdrawals or notes of some numbers; return how many are new, and all of them as they lie there.

    What people said at the mirror itself stays as it is.
    """
    root = layout.claims(name).removesuffix("claims/") + folder
    there = {stat.key: stat for stat in mirror.list(root)}
    new, stats = 0, []
    for stat in home.list(root):
        digits = stat.key.removeprefix(root).partition("/")[0].removesuffix(".json")
        if not digits.isdecimal() or int(digits) not in numbers:
            continue
        if stat.key not in there:
            new += once.create(mirror, stat.key, home.read(stat.key)) is None
        stats.append(there.get(stat.key) or mirror.stat(stat.key))
    return new, stats


def _tags(remote: Remote, name: str) -> dict[str, dict[str, Stat]]:
    """Return the moves of every tag of a name, by tag and key, oldest first."""
    root = layout.tags(name)
    found: dict[str, dict[str, Stat]] = {}
    for stat in remote.list(root):
        found.setdefault(stat.key.removeprefix(root).partition("/")[0], {})[stat.key] = stat
    return found


def _bring_tag(
    home: Remote, mirror: Remote, name: str, tag: str, ours: Mapping[str, Stat]
) -> tuple[int, bool, list[Stat]]:
    """Copy the moves of one tag, up to the last one whose version is there; return how many were new.

    Also whether the tag now stands as it does at home, and the moves as they lie there. Raises DivergedError.
    """
    theirs = {stat.key: stat for stat in mirror.list(layout.tags(name, tag))}
    if set(theirs) - set(ours):
        raise _other(name, tag)
    stored = {key: home.read(key) for key in ours}
    end = 0
    for at, key in reversed(list(enumerate(ours, 1))):
        to = tags.parse(stored[key], key).to
        if key in theirs or to is None or _is_there(mirror, name, to):
            end = at
            break
    new, stats = 0, []
    for key in list(ours)[:end]:
        fresh = key not in theirs
        other = once.create(mirror, key, stored[key]) if fresh else mirror.read(key)
        if other not in {None, stored[key]}:
            raise _other(name, tag)
        new += fresh
        stats.append(mirror.stat(key) if fresh else theirs[key])
    return new, end == len(ours), stats


def _is_there(mirror: Remote, name: str, n: int) -> bool:
    return once.look(mirror, layout.manifest(name, n)) is not None


def _announce(mirror: Remote, registry: types.Registry, name: str, stats: Sequence[Stat]) -> None:
    """Tell the mirror's readers of what is new there; told again for a day, as whoever brought it can have died."""
    if mirror.properties.commits or not stats:
        return
    now = mirror.now()
    young = [stat for stat in stats if now - stat.modified < UNTOLD]
    feed.announce(mirror, registry, list(_entries(mirror, name, young)))


def _entries(mirror: Remote, name: str, stats: Sequence[Stat]) -> Iterator[types.FeedEntry]:
    for stat in stats:
        yield from rebuild.of_mark(mirror, name, stat)


def _other(name: str, tag: str) -> errors.DivergedError:
    return errors.DivergedError(
        f"the mirror has other moves of {name}:{shown(tag)}",
        why="somebody moved it there",
        fix="move tags at the home of a name; nothing was changed at the mirror",
        name=name,
        tag=tag,
    )
