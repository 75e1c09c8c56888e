"""Reading the claims of a name: dense, chained by the sha256 of the claim before, each naming one content."""

from collections.abc import Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import msgspec

from weighbridge.registry import errors, layout, types
from weighbridge.registry.catalog_read import View
from weighbridge.registry.flow import once
from weighbridge.registry.flow.decision import Void, claimed_text, decided, is_void
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, parse, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote

State = Literal["open", "committed", "void"]

Standing = Literal["right", "wrong", "unknown"]
"""What others say of a claim: the team was told of just this one, or of another, or nobody can tell."""

_SERIAL: Final = 4
"""Claims that are read one after the other; more are worth threads."""


class Claimed(types.Value, frozen=True):
    """A number that is bound to our content: the claim, its sha256 as stored, and its store time.

    `joined`: the claim was there before. `committed`: so was its decision.
    """

    claim: types.Claim
    sha256: str
    joined: bool
    committed: bool
    stored_at: str | None = None


NOBODY: Final = "somebody"
"""Stands for the name of a machine or a person where none may be told."""


class Told(types.Value, frozen=True):
    """What the team was told of a number: the sha256 of its claim and of its manifest, and what became of it."""

    claim: str | None = None
    manifest: str | None = None
    given_up: bool = False
    withdrawn: bool = False


class Known(types.Value, frozen=True):
    """What deciding about a name needs of one claim; claims never change, so this may be kept."""

    n: int
    sha256: str
    content: str
    derivation: str | None


class _Head(msgspec.Struct):
    """A claim without its manifest's text."""

    schema: str
    registry: str
    name: str
    n: int
    content: str
    prev: str | None
    derivation: str | None = None


_heads: Final = msgspec.json.Decoder(_Head)


def manifest_of(claimed: Claimed) -> Manifest:
    """Return the manifest that the claim holds; its bytes are those of the decision to come."""
    return parse(claimed.claim.manifest.encode(), layout.manifest(claimed.claim.name, claimed.claim.n))


def read_all(
    remote: Remote, registry: types.Registry, name: str, known: MutableMapping[int, Known] | None = None
) -> dict[int, Known]:
    """Return every claim of a name by number; `known` saves reading again what was read before, and is filled.

    Raises IntegrityError naming a claim that is damaged or missing: without it nobody could tell whether a content has
    a number already. Raises NameTakenError when the name is at home in another registry.
    """
    kept = known if known is not None else {}
    last = max(kept, default=0)
    # The last one known is listed and read again: a remote that was set back must not be trusted to go on from there.
    after = layout.claim(name, last - 1) if last > 1 else None
    numbers = []
    for found in remote.list(layout.claims(name), after=after):
        place = layout.claim_number(found.key)
        if place is not None:
            numbers.append(place[1])
    if last and last not in numbers:
        kept.clear()
        return read_all(remote, registry, name, kept)
    bodies = _read(remote, name, numbers)
    for n, stored in zip(numbers, bodies, strict=True):
        again = kept.get(n)
        if again is not None:
            if again.sha256 != sha256_bytes(stored):
                kept.clear()
                return read_all(remote, registry, name, kept)
            continue
        kept[n] = examine(stored, registry, name, n, kept.get(n - 1))
    return dict(kept)


def examine(stored: bytes, registry: types.Registry, name: str, n: int, before: Known | None) -> Known:
    """Return what counts of a claim as stored, after checking its place in the chain.

    Raises IntegrityError, NameTakenError.
    """
    key = layout.claim(name, n)
    try:
        head = _heads.decode(stored)
    except msgspec.MsgspecError as error:
        raise _damaged(key, str(error)) from error
    if head.schema != types.SCHEMA_CLAIM or (head.name, head.n) != (name, n):
        raise _damaged(key, f"it says {shown(head.schema)}, {shown(head.name)} and number {head.n}")
    if head.registry != registry.registry:
        raise errors.NameTakenError(
            f"{name} belongs to another registry",
            why=f"{key} was written for registry {shown(head.registry)}, this one is {registry.registry}",
            fix="publish to the home of the name, or choose another name",
        )
    if n > 1 and before is None:
        raise _damaged(layout.claim(name, n - 1), f"it is missing, though {key} is there")
    if head.prev != (before.sha256 if before else None):
        raise _damaged(layout.claim(name, n - 1) if before else key, f"its sha256 is not the one in {key}")
    return Known(n=n, sha256=sha256_bytes(stored), content=head.content, derivation=head.derivation)


def load(remote: Remote, name: str, known: Known) -> tuple[types.Claim, bytes]:
    """Return one claim whole, and as stored. Raises IntegrityError unless it is what was read before."""
    key = layout.claim(name, known.n)
    stored = remote.read(key)
    if sha256_bytes(stored) != known.sha256:
        raise _damaged(key, "it changed between two looks")
    return decode(stored, key), stored


def decode(stored: bytes, key: str) -> types.Claim:
    """Return the claim in these bytes. Raises IntegrityError, also when it is not its key's or its manifest's."""
    try:
        claim = msgspec.convert(parse_json(stored, key), types.Claim)
    except msgspec.ValidationError as error:
        raise _damaged(key, str(error)) from error
    if claim.schema != types.SCHEMA_CLAIM or layout.claim_number(key) != (claim.name, claim.n):
        raise _damaged(key, f"it says {shown(claim.schema)}, {shown(claim.name)} and number {claim.n}")
    if parse(claim.manifest.encode(), f"the manifest in {key}").content != claim.content:
        raise _damaged(key, "its content is not that of its manifest")
    return claim


def owner(one: types.Owner, facts: types.Facts) -> types.Owner:
    """Return who claims a version, with the machine's name only where the facts of the version hold it as well."""
    return one if facts.provenance.host is not None else msgspec.structs.replace(one, host=NOBODY)


def told_of(catalog: View, name: str, n: int) -> Told:
    """Return what the feed says of a number: a decision that was only found by looking there says nothing for itself.

    A void that was found so gave the number up all the same: nobody makes one by a flipped bit.
    """
    row = catalog.version(name, n)
    if row is None:
        return Told()
    found = (name, n) in catalog.loose_ends()
    return Told(
        claim=row["claim"],
        manifest=None if found else row["manifest"],
        given_up=row["state"] == "void",
        withdrawn=row["state"] == "withdrawn",
    )


def standing(remote: Remote, name: str, n: int, stored: bytes, told: Told) -> Standing:
    """Return whether a claim as stored is the one that was written, by what was told of it and by the claim after it.

    The manifest's digest says more than the claim's own: a repair of the feed tells of a claim as it found it.
    """
    digest = sha256_bytes(stored)
    if told.claim not in {None, digest}:
        return "wrong"
    if told.manifest is not None:
        return "right" if told.manifest == sha256_bytes(claimed_text(stored) or b"") else "wrong"
    after = once.look(remote, layout.claim(name, n + 1))
    try:
        head = _heads.decode(after) if after is not None else None
    except msgspec.MsgspecError:
        head = None
    if head is None:
        return "unknown"
    return "right" if head.prev == digest else "wrong"


def twin(remote: Remote, claim: types.Claim) -> int | None:
    """Return another number of the name that has the content of a claim, is not given up and not taken back."""
    for found in remote.list(layout.claims(claim.name)):
        place = layout.claim_number(found.key)
        if place is None or place[1] == claim.n:
            continue
        try:
            head = _heads.decode(remote.read(found.key))
        except msgspec.MsgspecError:
            continue
        over = is_void(remote, *place) or once.look(remote, layout.withdrawn(*place)) is not None
        if head.content == claim.content and not over:
            return place[1]
    return None


def state(remote: Remote, claim: types.Claim) -> tuple[State, Void | None]:
    """Return how a claim ended, or that it is open. Raises IntegrityError when the decision is not the claim's."""
    key = layout.manifest(claim.name, claim.n)
    stored = once.look(remote, key)
    if stored is None:
        return "open", None
    return judge(stored, claim)


def judge(stored: bytes, claim: types.Claim) -> tuple[State, Void | None]:
    """Return what a decision as stored says of its claim. Raises IntegrityError when it is not the claim's.

    A decision that cannot be read is the damaged one; of two that can, nobody knows here, and no fix may delete one.
    """
    key = layout.manifest(claim.name, claim.n)
    if stored == claim.manifest.encode():
        return "committed", None
    try:
        found: Manifest | Void | None = decided(stored, key)
        why = None
    except (errors.IntegrityError, errors.UsageError) as error:  # what looks like a later format is a flipped bit
        found, why = None, error.why
    if isinstance(found, Void):
        return "void", found
    ref = f"{claim.name}@v{claim.n}"
    if found is not None:
        raise errors.IntegrityError(
            f"{key} is damaged, or {layout.claim(claim.name, claim.n)} is",
            why="one is not what the other says",
            fix=f"registry verify {ref} tells which, as far as anybody knows",
        )
    raise errors.IntegrityError(
        f"{key} is damaged",
        why=why,
        fix=f"delete {key} on the remote, then: registry verify {ref} --mend makes it of the claim",
    )


def _read(remote: Remote, name: str, numbers: Iterable[int]) -> list[bytes]:
    keys = [layout.claim(name, n) for n in numbers]
    workers = min(remote.properties.parallel, len(keys))
    if len(keys) <= _SERIAL or workers < 2:
        return [remote.read(key) for key in keys]
    with ThreadPoolExecutor(workers, thread_name_prefix="claims") as pool:
        return list(pool.map(remote.read, keys))


def _damaged(key: str, why: str) -> errors.IntegrityError:
    return errors.IntegrityError(
        f"{key} is damaged", why=why, fix=f"{from_copy(key)}; nothing is published under the name meanwhile"
    )


def from_copy(key: str, ref: str | None = None) -> str:
    """Return how a claim or void comes back that is damaged or lost: nobody makes it anew, a mirror holds the same."""
    found = layout.claim_number(key)
    ref = ref or ("NAME@vN" if found is None else f"{found[0]}@v{found[1]}")
    return (
        f"delete {key} if it is there, then: registry mirror {ref} --remote MIRROR --to REMOTE, from a copy that has it"
    )
