"""What a repository of a commit remote says of itself: two files in its tree (docs/formats.md).

    weighbridge.json    whose commit this is: registry, name, number, content, manifest digest, and the claim
    _wb/ledger.json     every version of the name, and the small objects that have keys elsewhere: tag moves,
                        withdrawals, notes

Each commit carries the ledger of its parent on, so that the head's tells everything in one request. A claim is not
stored twice: it is put together from weighbridge.json and the manifest beside it, to the byte.
"""

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from weighbridge.registry import errors, types
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import canonical, parse, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.rows import row_of

T = TypeVar("T")

VERSION_FILE: Final = "weighbridge.json"
LEDGER_FILE: Final = "_wb/ledger.json"
ATTRIBUTES: Final = ".gitattributes"
OURS: Final = frozenset({VERSION_FILE, LEDGER_FILE, ATTRIBUTES})
"""Files of a tree that belong to no version's set."""

SCHEMA_VERSION: Final = "weighbridge/commit/1"
SCHEMA_LEDGER: Final = "weighbridge/ledger/1"
SHARED: Final = ("tags/", "withdrawn/", "notes/")
"""Beginnings of the keys, below a name's `_wb/`, of objects that are kept in the ledger."""


class Told(types.Value, frozen=True):
    """One version as the ledger tells it; `void` is why it was given up."""

    n: int
    content: str
    manifest: str
    claim: str
    stored_at: str
    row: types.Row
    card: str | None = None
    derivation: str | None = None
    void: str | None = None


class Noted(types.Value, frozen=True):
    """A small object as stored, and when."""

    at: str
    body: str


class Ledger(types.Value, frozen=True):
    """A name's versions in the order of their numbers, and its small objects by the rest of their keys."""

    name: str
    registry: str
    versions: list[Told] = msgspec.field(default_factory=list)
    objects: dict[str, Noted] = msgspec.field(default_factory=dict)

    def version(self, n: int) -> Told | None:
        """Return what is told of one version."""
        return next((told for told in self.versions if told.n == n), None)

    def last(self) -> Told | None:
        """Return what is told of the version with the highest number."""
        return self.versions[-1] if self.versions else None

    def withdrawn(self, n: int) -> bool:
        """Tell whether a version was taken back."""
        return f"withdrawn/{n:08d}.json" in self.objects

    def adding(self, fresh: Iterable[Told]) -> "Ledger":
        """Return the ledger with versions added; one that is told already is replaced."""
        found = {told.n: told for told in self.versions} | {told.n: told for told in fresh}
        return msgspec.structs.replace(self, versions=[found[n] for n in sorted(found)])

    def noting(self, key: str, body: bytes, at: str) -> "Ledger":
        """Return the ledger with one object more."""
        return msgspec.structs.replace(self, objects=self.objects | {key: Noted(at=at, body=body.decode())})


class Identity(types.Value, frozen=True):
    """What weighbridge.json says of its commit; `claim` is the claim without its manifest's text."""

    schema: str
    registry: str
    name: str
    n: int
    content: str
    manifest: str
    stored_at: str
    claim: dict[str, Any]

    def claim_bytes(self, manifest: bytes) -> bytes:
        """Return the claim as every other remote stores it."""
        return canonical(self.claim | {"manifest": manifest.decode()})


def identity(claim: bytes, stored_at: str) -> bytes:
    """Return weighbridge.json for a claim."""
    document = parse_json(claim, "a claim")
    manifest = document.pop("manifest")
    return canonical(
        Identity(
            schema=SCHEMA_VERSION,
            registry=document["registry"],
            name=document["name"],
            n=document["n"],
            content=document["content"],
            manifest=sha256_bytes(manifest.encode()),
            stored_at=stored_at,
            claim=document,
        )
    )


def told_of(claim: bytes, stored_at: str, *, card: bytes | None = None) -> Told:
    """Return what the ledger tells of a version, taken from its claim."""
    document = parse_json(claim, "a claim")
    manifest = document["manifest"].encode()
    return Told(
        n=document["n"],
        content=document["content"],
        manifest=sha256_bytes(manifest),
        claim=sha256_bytes(claim),
        stored_at=stored_at,
        row=row_of(parse(manifest, "the manifest of a claim")),
        card=None if card is None else sha256_bytes(card),
        derivation=document.get("derivation"),
    )


def parse_identity(stored: bytes, where: str) -> Identity:
    """Return what weighbridge.json says. Raises IntegrityError, or UsageError for a newer format."""
    return _parse(stored, where, Identity, SCHEMA_VERSION)


def encode(ledger: Ledger) -> bytes:
    """Return _wb/ledger.json: one version a line, so that a person sees what a commit changed."""
    document = msgspec.to_builtins(ledger) | {"schema": SCHEMA_LEDGER}
    versions = ",\n".join(canonical(told).decode() for told in ledger.versions)
    rest = canonical(document | {"versions": []}).decode()
    before, _, after = rest.rpartition('"versions":[]')
    return f'{before}"versions":[\n{versions}\n]{after}\n'.encode()


def parse_ledger(stored: bytes, where: str) -> Ledger:
    """Return the ledger. Raises IntegrityError, or UsageError for a newer format."""
    found = _parse(stored, where, Ledger, SCHEMA_LEDGER)
    numbers = [told.n for told in found.versions]
    if numbers != sorted(set(numbers)) or (numbers and numbers[0] < 1):
        raise errors.IntegrityError(f"{shown(where)} is damaged", why="its versions are not in order")
    return found


def _parse(stored: bytes, where: str, kind: type[T], schema: str) -> T:
    document = parse_json(stored, where)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        if isinstance(found, str) and found.startswith(schema.rpartition("/")[0]):
            raise errors.UsageError(
                f"{shown(where)} was written by a newer version",
                why=f"its schema is {shown(found)}",
                fix="upgrade weighbridge",
            )
        raise errors.IntegrityError(f"{shown(where)} is not ours", why=f"its schema is not {schema}")
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise errors.IntegrityError(f"{shown(where)} is damaged", why=str(error)) from error
