"""What `manifest.json` of a version says: the manifest that was claimed, or that the number was given up."""

from contextlib import suppress

from weighbridge.registry import layout
from weighbridge.registry.errors import IntegrityError, NotFoundError, UsageError, WeighbridgeError, WithdrawnError
from weighbridge.registry.flow import once
from weighbridge.registry.manifest import Manifest, parse, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Value


class Void(Value, frozen=True):
    """A number that was given up, why, and by whom."""

    reason: str
    by: str


def decided(stored: bytes, what: str) -> Manifest | Void:
    """Return the decision in these bytes. Raises IntegrityError when they are none."""
    if b'"void"' in stored[:4096]:
        document = parse_json(stored, what)
        if isinstance(document, dict) and "schema" not in document:
            reason, by = document.get("void"), document.get("by")
            if not isinstance(reason, str) or by is None:
                raise IntegrityError(f"{shown(what)} is damaged", why="it is neither a manifest nor a void")
            return Void(reason=reason, by=by if isinstance(by, str) else str(by))
    return parse(stored, what)


def settled(remote: Remote, name: str, n: int, stored: bytes) -> Manifest | Void:
    """Return what the decision of a number says. Raises IntegrityError when it is damaged.

    What looks like a later format is so only where the claim holds the same: else it is a flipped bit. Raises
    UsageError for one that is.
    """
    key = layout.manifest(name, n)
    try:
        return decided(stored, key)
    except UsageError as error:
        if remote.properties.commits or claimed_text(once.look(remote, layout.claim(name, n))) == stored:
            raise
        raise IntegrityError(f"{key} is damaged", why=error.why, fix=f"registry verify {name}@v{n}") from error


def claimed_text(claim: bytes | None) -> bytes | None:
    """Return the manifest in a claim as stored, whatever it is worth; None where there is none."""
    with suppress(IntegrityError):
        document = parse_json(claim, "the claim") if claim is not None else None
        text = document.get("manifest") if isinstance(document, dict) else None
        return text.encode("utf-8", "replace") if isinstance(text, str) else None
    return None


def is_void(remote: Remote, name: str, n: int) -> bool:
    """Tell whether a number was given up; a damaged decision gives nothing up."""
    key = layout.manifest(name, n)
    stored = once.look(remote, key)
    return stored is not None and gives_up(stored, key)


def gives_up(stored: bytes, key: str) -> bool:
    """Tell whether a decision as stored gives its number up; a damaged one does not."""
    try:
        return isinstance(decided(stored, key), Void)
    except (IntegrityError, UsageError):
        return False


def committed(remote: Remote, name: str, n: int) -> Manifest:
    """Return the manifest of a committed version. Raises NotFoundError when it is open or void, WithdrawnError."""
    return judged(remote, name, n, once.look(remote, layout.manifest(name, n)))


def judged(remote: Remote, name: str, n: int, stored: bytes | None) -> Manifest:
    """Return the manifest in a decision that was read, None standing for no object. Raises as `committed` does."""
    if stored is None:
        claimed = once.look(remote, layout.claim(name, n)) is not None
        raise NotFoundError(
            f"{name}@v{n} is not finished" if claimed else f"there is no {name}@v{n}",
            why="its number is claimed, its files are still on their way" if claimed else None,
            fix=f"registry ls {name} --all",
        )
    try:
        found = settled(remote, name, n, stored)
    except IntegrityError as error:
        mark = once.look(remote, layout.withdrawn(name, n))
        if mark is not None:
            raise withdrawn(name, n, mark) from error
        error.fix = error.fix or f"registry verify {name}@v{n}"
        raise
    if isinstance(found, Void):
        raise NotFoundError(
            f"{name}@v{n} was given up", why=f"{found.reason} (by {found.by})", fix=f"registry ls {name}"
        )
    mark = once.look(remote, layout.withdrawn(name, n))
    if mark is not None:
        raise withdrawn(name, n, mark)
    return found


def withdrawn(name: str, n: int, mark: bytes | None) -> WithdrawnError:
    """Return the error of a version that was taken back, with what its mark says of who did it and why."""
    why = "its number stays taken"
    with suppress(IntegrityError):
        said = parse_json(mark, layout.withdrawn(name, n)) if mark is not None else None
        if isinstance(said, dict) and isinstance(said.get("why"), str):
            why = f"{shown(said['why'])} ({shown(str(said.get('who')))}, {shown(str(said.get('when')))})"
    return WithdrawnError(f"{name}@v{n} was withdrawn", why=why, fix=f"registry ls {name} --all shows what is left")


def marked(remote: Remote | None, name: str, n: int) -> WithdrawnError:
    """Return the same for a version of which only the catalogue was asked; the mark is read where it can be."""
    mark = None
    with suppress(WeighbridgeError):
        mark = once.look(remote, layout.withdrawn(name, n)) if remote is not None else None
    return withdrawn(name, n, mark)
