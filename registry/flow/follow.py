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
from weighbridge.registry.flow.claims import decode
from weighbridge.registry.flow.decide import check_set
from weighbridge.registry.flow.decision import Void, settled
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.mirror import bring_claim, deliver, refused
from weighbridge.registry.flow.publish import UNTOLD
from weighbridge.registry.flow.resolve import unknown
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote, Stat

Outcome = Literal["copied", "there", "void", "open", "withdrawn", "refused"]


class Carried(types.Value, frozen=True):
    """What became of one number: its outcome, the level at which the copy was verified, bytes moved, why not, a fix."""

    n: int
    outcome: Outcome
    verified: str | None = None
    bytes: int = 0
    why: str | None = None
    fix: str | None = None


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
        raise unknown(home, None, name)
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

    Of a version that is there, files that were lost since are brought again; what holds other bytes is never touched.

    `settings` are the mirror's: a version that was sealed under milder rules than it asks for is refused. Raises
    DivergedError when the mirror holds something else, and what the remotes raise.
    """
    stored = once.look(home, layout.manifest(name, n))
    if stored is None:
        return Carried(n=n, outcome="open", why="nobody has committed it yet")
    gone = once.look(home, layout.withdrawn(name, n)) is not None
    try:
        manifest = None if gone else settled(home, name, n, stored)
    except errors.IntegrityError as error:
        return Carried(n=n, outcome="refused", why=f"{error.what} at its home", fix=f"registry verify {name}@v{n}")
    if manifest is None or isinstance(manifest, Void):
        refusal = refused(home, mirror, name, n, None, settings=settings)
        if refusal is not None:
            return Carried(n=n, outcome="refused", why=refusal.why, fix=refusal.fix)
        bring_claim(home, mirror, name, n, registry=registry)
        if isinstance(manifest, Void):
            return Carried(n=n, outcome="void")
        return Carried(n=n, outcome="withdrawn", why="it was taken back")
    if once.look(mirror, layout.manifest(name, n)) == stored:
        if once.look(mirror, layout.withdrawn(name, n)) is not None:
            if not mirror.properties.commits and not _is_same_claim(home, mirror, name, n):
                bring_claim(home, mirror, name, n, registry=registry)
            return Carried(n=n, outcome="withdrawn", why=f"it was taken back on {settings.name}")
        if mirror.properties.commits or _whole(home, mirror, name, n, manifest):  # a commit has all of it or is none
            return Carried(n=n, outcome="there", verified="size")
    refusal = refused(home, mirror, name, n, manifest, settings=settings)
    if refusal is not None:
        return Carried(n=n, outcome="refused", why=refusal.why, fix=refusal.fix)
    done = deliver(
        home, mirror, name, n,
        mirror_name=settings.name, registry=registry, scratch=scratch, begin=begin, progress=progress,
    )  # fmt: skip
    return Carried(n=n, outcome="copied", verified=done.verified, bytes=sum(file.size for file in manifest.files))


def _whole(home: Remote, mirror: Remote, name: str, n: int, manifest: Manifest) -> bool:
    """Return whether a version's claim is there, and its files by name and size. Raises ForeignBytesError."""
    if not _is_same_claim(home, mirror, name, n):
        return False
    try:
        check_set(mirror, name, n, manifest)
    except errors.ForeignBytesError:
        raise
    except errors.IntegrityError:
        return False
    return True


def beside(home: Remote, mirror: Remote, registry: types.Registry, name: str, *, retold: float = UNTOLD) -> Told:
    """Bring to a mirror what its home says of the versions that are there; repeating is harmless.

    `registry` is the mirror's own, for its feed. Only what the mirror lacks is read, and the newest move of each tag.
    What came within the last `retold` seconds is told to the mirror's readers again, as whoever brought it can have
    died before that; 0 where it is known that nobody did. Nothing that lies there is touched: a tag whose moves differ
    is named and left as it is. Raises what the remotes raise.
    """
    check_writer(registry)
    told = Told()
    fresh: list[Stat] = []
    there: list[Stat] = []
    lying = _tags(mirror, name)
    for tag, ours in _tags(home, name).items():
        theirs = lying.get(tag, {})
        try:
            new, at_rest = _bring_tag(home, mirror, name, tag, ours, theirs)
        except errors.DivergedError:
            told.diverged.append(tag)
            continue
        fresh += new
        there += theirs.values()
        told = msgspec.structs.replace(
            told, tags=told.tags + len(new), waiting=told.waiting if at_rest else [*told.waiting, tag]
        )
    notes, noted = _bring_marks(home, mirror, name, "notes/", lambda n: _is_there(mirror, name, n))
    marks, marked = _bring_marks(home, mirror, name, "withdrawn/", lambda n: _is_claimed(mirror, name, n))
    _announce(mirror, registry, name, [*fresh, *notes, *marks], [*there, *noted, *marked], retold)
    return msgspec.structs.replace(told, notes=len(notes), withdrawn=len(marks))


def _bring_marks(
    home: Remote, mirror: Remote, name: str, folder: str, known: Callable[[int], bool]
) -> tuple[list[Stat], list[Stat]]:
    """Copy the withdrawals or notes that a mirror lacks, of numbers it knows; return the new ones, and what lay there.

    What people said at the mirror itself stays as it is.
    """
    root = layout.claims(name).removesuffix("claims/") + folder
    lying = {stat.key: stat for stat in mirror.list(root)}
    new: list[Stat] = []
    there: list[Stat] = []
    asked: dict[int, bool] = {}
    for stat in home.list(root):
        digits = stat.key.removeprefix(root).partition("/")[0].removesuffix(".json")
        if stat.key in lying:
            there.append(lying[stat.key])
            continue
        if not digits.isdecimal():
            continue
        n = int(digits)
        if n not in asked:
            asked[n] = known(n)
        if asked[n]:
            (new if once.create(mirror, stat.key, home.read(stat.key)) is None else there).append(stat)
    return new, there


def _tags(remote: Remote, name: str) -> dict[str, dict[str, Stat]]:
    """Return the moves of every tag of a name, by tag and key, oldest first."""
    root = layout.tags(name)
    found: dict[str, dict[str, Stat]] = {}
    for stat in remote.list(root):
        found.setdefault(stat.key.removeprefix(root).partition("/")[0], {})[stat.key] = stat
    return found


def _bring_tag(  # noqa: PLR0917 - from here to there, which tag, and how it stands at both
    home: Remote, mirror: Remote, name: str, tag: str, ours: Mapping[str, Stat], theirs: Mapping[str, Stat]
) -> tuple[list[Stat], bool]:
    """Copy the moves of one tag, up to the last one whose version is there; return those that are new.

    Also whether the tag now stands as it does at home. Raises DivergedError.
    """
    keys = list(ours)
    if set(theirs) - set(ours) or any(theirs[key].size != ours[key].size for key in theirs):
        raise _other(name, tag)
    # Nothing is ever brought after a move that differs: the newest one that both have speaks for those before it.
    newest = max(theirs, default=None)
    if newest is not None and home.read(newest) != mirror.read(newest):
        raise _other(name, tag)
    bodies: dict[str, bytes] = {}
    end = 0
    for at, key in reversed(list(enumerate(keys, 1))):
        if key in theirs:
            end = at
            break
        bodies[key] = home.read(key)
        to = tags.parse(bodies[key], key).to
        if to is None or _is_there(mirror, name, to):
            end = at
            break
    new: list[Stat] = []
    for key in keys[:end]:
        if key in theirs:
            continue
        body = bodies[key] if key in bodies else home.read(key)
        if once.create(mirror, key, body) is not None:
            raise _other(name, tag)
        new.append(ours[key])
    return new, end == len(keys)


def _is_there(mirror: Remote, name: str, n: int) -> bool:
    return once.look(mirror, layout.manifest(name, n)) is not None


def _is_claimed(mirror: Remote, name: str, n: int) -> bool:
    return once.look(mirror, layout.claim(name, n)) is not None


def _is_same_claim(home: Remote, mirror: Remote, name: str, n: int) -> bool:
    """Tell whether the mirror's claim is its home's. One that is missing or torn at home says nothing against it."""
    key = layout.claim(name, n)
    ours, theirs = once.look(home, key), once.look(mirror, key)
    if theirs is None or theirs == ours:
        return theirs is not None
    try:
        if ours is not None:
            decode(ours, key)
    except errors.IntegrityError:
        return True
    return ours is None


def _announce(  # noqa: PLR0917 - to whom, of what; what is new, what lay there, for how long that is told again
    mirror: Remote,
    registry: types.Registry,
    name: str,
    fresh: Sequence[Stat],
    there: Sequence[Stat],
    retold: float,
) -> None:
    """Tell the mirror's readers of what is new there, and once more of what came a short while ago."""
    if mirror.properties.commits or not (fresh or there):
        return
    now = mirror.now()
    young = [stat for stat in there if now - stat.modified < retold]
    if fresh or young:
        feed.announce(mirror, registry, list(_entries(mirror, name, [*fresh, *young])))


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
