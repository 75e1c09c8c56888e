"""Bringing a catalogue up to a remote whose repositories tell of themselves: one listing, one ledger for each news."""

from collections.abc import Iterator

import msgspec

from weighbridge.registry import errors, layout, types
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow import feed, notes, tags
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.refs import name_fault
from weighbridge.registry.remotes.commits import CommitRemote
from weighbridge.registry.remotes.ledger import LEDGER_FILE, Ledger, Told, parse_ledger


def sync(remote: CommitRemote, catalog: Catalog) -> tuple[int, list[str]]:
    """Make the catalogue what the repositories say; return how many names were news, and what was wrong with some.

    A name whose repository is gone, or is not ours any more, is forgotten; a damaged one stays as it was known.
    """
    known = catalog.heads()
    found = remote.catalogue(known)
    problems = list(found.problems)
    with catalog.immediate():
        for name in known.keys() - found.heads.keys():
            catalog.replace(name, None, [])
        for name, ledger in found.ledgers.items():
            try:
                entries = list(entries_of(ledger))
            except errors.WeighbridgeError as error:
                problems.append(f"{name}: {error.what} ({error.why})")
            else:
                catalog.replace(name, found.heads[name], entries)
    return len(found.ledgers), problems


def sync_name(remote: CommitRemote, catalog: Catalog, name: str) -> None:
    """Make the catalogue what the repository of one name says now, without a listing of the others.

    Raises IntegrityError for a damaged ledger, MissingError where there is none.
    """
    commit = remote.head(name)
    if commit is None:
        catalog.replace(name, None, [])
        return
    ledger = parse_ledger(remote.read_at(name, commit, LEDGER_FILE), f"{LEDGER_FILE} of {name}")
    catalog.replace(name, commit, list(entries_of(ledger)))


def entries_of(ledger: Ledger) -> Iterator[types.FeedEntry]:
    """Yield what a feed would have told of a name. Raises IntegrityError for a damaged object."""
    if name_fault(ledger.name) is not None:
        raise errors.IntegrityError("a ledger is damaged", why=f"its name is not valid: {name_fault(ledger.name)}")
    for told in ledger.versions:
        yield _version(ledger.name, told)
    by_number = {told.n: told for told in ledger.versions}
    for path, noted in sorted(ledger.objects.items()):
        key = f"{layout.MODELS}{ledger.name}/_wb/{path}"
        stored = noted.body.encode()
        if path.startswith("tags/"):
            yield feed.tag_entry(tags.parse(stored, key), stored)
        elif path.startswith("withdrawn/"):
            n = int(path.removeprefix("withdrawn/").removesuffix(".json"))
            yield feed.withdrawn_entry(ledger.name, n, stored)
        elif path.startswith("notes/"):
            note = notes.parse(stored, key)
            row = by_number[note.n].row if note.kind == "license" and note.n in by_number else None
            row = msgspec.structs.replace(row, license=note.text) if row is not None else None
            yield feed.note_entry(ledger.name, note.n, note.seq, stored, row=row)


def _version(name: str, told: Told) -> types.FeedEntry:
    source = layout.manifest(name, told.n)
    if told.void is not None:
        return types.FeedEntry(
            type="void",
            name=name,
            n=told.n,
            source=source,
            sha256=sha256_bytes(told.void.encode()),
            content=told.content,
            stored_at=told.stored_at,
        )
    return types.FeedEntry(
        type="version",
        name=name,
        n=told.n,
        content=told.content,
        source=source,
        sha256=told.manifest,
        card_sha256=told.card,
        row=told.row,
        stored_at=told.stored_at,
    )
