"""A version that would do as the result of a command, and that was found damaged from here: it is looked at again.

Whoever is told that a result is there already goes on to use it, and a look at names and sizes misses changed bytes.
"""

from contextlib import closing, suppress
from typing import Final

import msgspec

from weighbridge.registry import catalog_read, layout
from weighbridge.registry.catalog_read import DAMAGE, View
from weighbridge.registry.cli import context
from weighbridge.registry.cli.catalogue import DAMAGED
from weighbridge.registry.cli.output import Output
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import IntegrityError
from weighbridge.registry.flow.publish import cure
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Finding, Receipt, Registry

_BYTES: Final = frozenset({"file-damaged", "file-size"})
"""What is put back by whoever makes the same bytes again, once it is out of the way."""


def looked_at(remote: Remote, registry: Registry, receipt: Receipt, out: Output) -> Receipt:
    """Return the receipt of a committed version, of one that is remembered as damaged after every byte was read.

    Raises IntegrityError where it is damaged still, with its findings and what makes it right.
    """
    name, n = receipt.name, receipt.n
    if not _remembered(registry, name, n):
        return receipt
    if not out.as_json:  # an error that follows is to be the one object on stderr
        out.talk(f"{name}@v{n} was found damaged before, and is read again")
    with following(out) as follower:
        checked = verify_version(
            remote, name, n, manifest_sha256=receipt.manifest_sha256, begin=follower.begin, progress=follower.moved
        )
    wrong = [one for one in checked.findings if one.severity == "block"]
    if wrong:
        raise IntegrityError(
            f"{name}@v{n}, made before of the same parents in the same way, is damaged",
            why="; ".join(one.message for one in wrong[:4]),
            fix=_way(remote, receipt, wrong),
            findings=wrong,
            option="again",
        )
    return msgspec.structs.replace(receipt, verified=checked.level or receipt.verified)


def _remembered(registry: Registry, name: str, n: int) -> bool:
    """Return whether the last look from here found the copy damaged; nobody is asked."""
    with suppress(OSError, *DAMAGE), closing(catalog_read.open_file(context.catalog_path(registry.registry))) as link:
        row = View(link).copy(name, n)
        return row is not None and row["level"] == DAMAGED
    return False


def _way(remote: Remote, receipt: Receipt, wrong: list[Finding]) -> str:
    """Return what makes a damaged version right for whoever makes the same bytes again."""
    ref = f"{receipt.name}@v{receipt.n}"
    if remote.properties.commits:  # a commit is not changed any more
        return f'registry withdraw {ref} --reason "...", then registry push --again: a new number'
    other = next((one.fix for one in wrong if one.code not in _BYTES and one.fix), None)
    return other or cure(ref, [layout.version(receipt.name, receipt.n, one.subject) for one in wrong])
