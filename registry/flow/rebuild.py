"""Writing the feed anew from what lies on the remote: claims, decisions, tags, withdrawals, notes.

The first object raises the epoch *before* anything is read: whatever others tell from then on stands behind it, and
whatever was told before is on the remote already. The objects from the first to the last, which names the first, then
hold the full state, however many others tell at the same time. A reader who finds the last one forgets everything that
is older than the first; a repair that dies half-way changes nothing for anybody. Two at once are both right.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec

from weighbridge.registry import layout
from weighbridge.registry.errors import IntegrityError, MissingError, UsageError
from weighbridge.registry.flow import feed, notes, once, tags
from weighbridge.registry.flow.claims import Told, decode, standing
from weighbridge.registry.flow.decide import is_whole
from weighbridge.registry.flow.decision import Void, claimed_text, settled
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import parse, parse_json
from weighbridge.registry.refs import name_fault, shown
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.rows import row_of
from weighbridge.registry.times import spelled
from weighbridge.registry.types import Claim, FeedEntry, Registry, Value


class Report(Value, frozen=True):
    """What a repair wrote; `problems` name objects that were damaged and left out."""

    epoch: int
    first: int
    last: int
    names: int
    versions: int
    entries: int
    problems: list[str]


def rebuild(remote: Remote, registry: Registry, *, progress: Callable[[str], None] | None = None) -> Report:
    """Write the full state into the feed as a new epoch, with a snapshot behind it; old objects stay where they are.

    `progress` is called with each name when it has been read. Errors of the remote are raised; repeating is harmless.
    """
    if remote.properties.commits:
        raise UsageError(
            f"there is nothing to rebuild at {shown(remote.url)}",
            why="its repositories tell of themselves, and every look reads them",
            fix="registry ls",
        )
    at = feed.head(remote, registry)
    begin = feed.append(remote, registry, _any_fact(remote), at, epochs=1)
    problems: list[str] = []
    found: list[FeedEntry] = []
    names = versions = 0
    for name, told, wrong in _walk(remote):
        found += told
        problems += wrong
        names += any(entry.type == "version" for entry in told)
        versions += sum(entry.type == "version" for entry in told)
        if progress is not None:
            progress(name)
    at = begin
    chunks = [found[i : i + feed.ENTRIES_MAX] for i in range(0, len(found), feed.ENTRIES_MAX)] or [[]]
    for chunk in chunks[:-1]:
        at = feed.append(remote, registry, chunk, at)
    at = feed.append(remote, registry, chunks[-1], at, rebuild=begin.seq)
    feed.take_snapshot(remote, at.seq)
    return Report(
        epoch=begin.epoch,
        first=begin.seq,
        last=at.seq,
        names=names,
        versions=versions,
        entries=len(found),
        problems=problems,
    )


def _any_fact(remote: Remote) -> list[FeedEntry]:
    """Return one fact, for the first object: an object of the feed is never empty while there is anything to tell."""
    for name, told, _ in _walk(remote, first_only=True):
        if told:
            return told[:1] if name else []
    return []


def _walk(remote: Remote, *, first_only: bool = False) -> Iterator[tuple[str, list[FeedEntry], list[str]]]:
    """Yield each name with its facts and what is damaged of them, sorted by name."""
    for name in list(remote.folders(layout.MODELS)):
        if name_fault(name):
            yield name, [], [f"{layout.MODELS}{shown(name)} is no valid name"]
            continue
        claims = list(remote.list(layout.claims(name)))
        workers = max(1, remote.properties.parallel)
        with ThreadPoolExecutor(workers, thread_name_prefix="rebuild") as pool:
            answers = list(pool.map(lambda stat: _of_claim(remote, stat), claims[:1] if first_only else claims))
            told = list(chain.from_iterable(entries for entries, _ in answers))
            wrong = [text for _, text in answers if text]
            for stat in [] if first_only else _beside(remote, name):
                try:
                    told += of_mark(remote, name, stat)
                except (IntegrityError, MissingError, UsageError) as error:
                    wrong.append(f"{error.what}: {error.why}")
        yield name, told, wrong


def _of_claim(remote: Remote, stat: Stat) -> tuple[list[FeedEntry], str | None]:
    """Return the claim and the decision of one number, and what is wrong with them."""
    number = layout.claim_number(stat.key)
    if number is None:
        return [], f"{shown(stat.key)} is no claim"
    name, n = number
    told: list[FeedEntry] = []
    stored_at = spelled(stat.modified)
    wrong = claim = None
    key = layout.manifest(name, n)
    decision = once.look(remote, key)
    stored = remote.read(stat.key)
    try:
        claim = decode(stored, stat.key)
        differs = decision is None or claim.manifest.encode() != decision
        if differs and standing(remote, name, n, stored, Told()) == "wrong":
            raise IntegrityError(f"{stat.key} is damaged", why="it is not the one that the next claim follows")  # noqa: TRY301
        told.append(feed.claim_entry(claim, sha256_bytes(stored), stored_at=stored_at))
    except (IntegrityError, UsageError) as error:
        if isinstance(error, UsageError) and claimed_text(stored) == decision:
            raise  # both are of a later format, not damaged
        wrong = f"{stat.key} is damaged: {error.why}"
        claim = None
    try:
        found = settled(remote, name, n, decision) if decision is not None else None
    except IntegrityError as error:
        wrong = f"{error.what}: {error.why}"
    else:
        if isinstance(found, Void):
            told.append(feed.void_entry(name, n, decision or b"", stored_at=stored_at))
        elif found is not None and claim is not None and found.stored != claim.manifest.encode():
            wrong = f"{key} is not what {stat.key} says: one of them is damaged"
        elif found is not None:
            card = once.look(remote, layout.version(name, n, "README.md"))
            card_sha256 = sha256_bytes(card) if card is not None else None
            told.append(feed.version_entry(name, n, found, card_sha256=card_sha256, stored_at=stored_at))
        elif claim is not None and _lacks_decision(remote, claim):
            ref = f"{name}@v{n}"
            return told, f"{ref} was never finished, though all its files lie there: registry verify {ref} --mend"
    return told, f"{wrong} (what helps says: registry verify {name}@v{n})" if wrong else None


def _lacks_decision(remote: Remote, claim: Claim) -> bool:
    """Tell whether nothing but its decision is missing of a number, by now: a publisher may be at its last step."""
    if once.look(remote, layout.withdrawn(claim.name, claim.n)) is not None or not is_whole(remote, claim):
        return False
    return once.look(remote, layout.manifest(claim.name, claim.n)) is None


def _beside(remote: Remote, name: str) -> Iterator[Stat]:
    """Yield the objects beside the claims: moves of tags, withdrawals, notes."""
    root = layout.claims(name).removesuffix("claims/")
    for folder in ("tags/", "withdrawn/", "notes/"):
        yield from remote.list(root + folder)


def of_mark(remote: Remote, name: str, stat: Stat) -> list[FeedEntry]:
    """Return what is told of a tag's move, a withdrawal or a note. Raises IntegrityError, MissingError, UsageError."""
    stored = remote.read(stat.key)
    parts = stat.key.split("/_wb/", 1)[-1].split("/")
    if parts[0] == "tags":
        return [feed.tag_entry(tags.parse(stored, stat.key), stored)]
    if parts[0] == "withdrawn":
        parse_json(stored, stat.key)
        digits = parts[-1].removesuffix(".json")
        n = int(digits) if digits.isdecimal() else 0
        if stat.key != layout.withdrawn(name, n):
            raise IntegrityError(f"{shown(stat.key)} is no withdrawal", why="its key has no number")
        return [feed.withdrawn_entry(name, n, stored)]
    note = notes.parse(stored, stat.key)
    row = None
    if note.kind == "license":
        manifest = parse(remote.read(layout.manifest(name, note.n)), layout.manifest(name, note.n))
        row = msgspec.structs.replace(row_of(manifest), license=note.text)
    return [feed.note_entry(name, note.n, note.seq, stored, row=row)]
