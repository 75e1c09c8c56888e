"""The objects that an organisation holds by the keys of every remote, made of its repositories and their ledgers."""

import uuid
from collections.abc import Callable, Iterator

from weighbridge.registry import layout, types
from weighbridge.registry.manifest import canonical
from weighbridge.registry.remotes.hub.repositories import Repositories
from weighbridge.registry.remotes.hub.versions import Versions
from weighbridge.registry.remotes.ledger import Ledger
from weighbridge.registry.remotes.protocol import Stat
from weighbridge.registry.times import seconds

Told = Callable[[str], Ledger | None]
"""Returns the ledger of a name as it is now."""


def marker(endpoint: str, owner: str) -> bytes:
    """Return the registry's marker: there is no place for one, so it follows from the address."""
    where = f"{endpoint}/{owner}".casefold()
    return canonical(
        types.Registry(
            schema=types.SCHEMA_REGISTRY,
            registry=str(uuid.uuid5(uuid.NAMESPACE_URL, where)),
            format=1,
            min_reader=1,
            min_writer=1,
            mode="shared",
        )
    )


def under(prefix: str, mark: bytes, repositories: Repositories, versions: Versions, told: Told) -> Iterator[Stat]:
    """Yield the objects below a prefix in no order; the sizes of claims are told as 0."""
    if layout.MARKER.startswith(prefix):
        yield Stat(layout.MARKER, len(mark), None, 0.0)
    if not prefix.startswith(layout.MODELS):
        names = sorted(repositories.all()) if layout.MODELS.startswith(prefix) else []
    else:
        name, slash, _ = prefix.removeprefix(layout.MODELS).partition("/")
        names = [name] if slash else [n for n in sorted(repositories.all()) if n.startswith(name)]
    for name in names:
        yield from (stat for stat in _of_name(name, prefix, versions, told(name)) if stat.key.startswith(prefix))


def _of_name(name: str, prefix: str, versions: Versions, ledger: Ledger | None) -> Iterator[Stat]:
    if ledger is None:
        return
    root = f"{layout.MODELS}{name}/"
    for told in ledger.versions:
        stored = seconds(told.stored_at) or 0.0
        yield Stat(layout.claim(name, told.n), 0, None, stored)
        folder = layout.version(name, told.n)
        if prefix.startswith(folder) or folder.startswith(prefix):
            version = versions.get(name, told.n)
            for held in version.files.values() if version else ():
                yield Stat(folder + held.path, held.size, held.sha256, stored)
    for path, noted in ledger.objects.items():
        yield Stat(f"{root}_wb/{path}", len(noted.body.encode()), None, seconds(noted.at) or 0.0)
