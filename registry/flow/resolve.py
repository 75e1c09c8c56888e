"""From a reference to one version: `name@v7`, `name:prod`, `name`, `@sha256:<hex>`, or a name and a training step."""

from difflib import get_close_matches

from weighbridge.registry import refs
from weighbridge.registry.catalog_read import Row, View
from weighbridge.registry.errors import NotFoundError, UsageError, WeighbridgeError
from weighbridge.registry.flow import decision, tags
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Value


class Resolved(Value, frozen=True):
    """One committed version; `manifest` and `card` are the sha256 the team was told, None where nobody told."""

    name: str
    n: int
    content: str
    manifest: str | None = None
    card: str | None = None

    @property
    def ref(self) -> str:
        """`name@v7`."""
        return f"{self.name}@v{self.n}"


def resolve(remote: Remote | None, catalog: View | None, ref: str, *, step: int | None = None) -> Resolved:
    """Return the version a reference means.

    A tag is read from the remote itself where there is one; without a remote the catalogue alone answers. A numbered
    version that the catalogue does not know is asked of the remote. Raises UsageError for a text that is no reference
    and for an ambiguous one, listing the matches; NotFoundError or WithdrawnError, saying what there is instead.
    """
    name, n, tag, digest = refs.split(ref)
    if step is not None:
        if name is None or n is not None or digest is not None or tag != "latest":
            raise UsageError("--step needs a plain name", fix="name it without a version or tag: NAME --step 280")
        return _by_step(remote, _known(catalog, ref), name, step)
    if digest is not None:
        return _by_content(remote, _known(catalog, ref), name, digest)
    assert name is not None
    if n is not None:
        return numbered(remote, catalog, name, n)
    if tag == "latest":
        return _latest(remote, _known(catalog, ref), name)
    assert tag is not None
    if remote is not None:
        moved = tags.current(remote, name, tag)
        at = moved.to if moved else None
    else:
        row = _known(catalog, ref).tag(name, tag)
        at = row["n"] if row else None
    if at is None:
        raise _no_tag(remote, catalog, name, tag)
    return numbered(remote, catalog, name, at)


def numbered(remote: Remote | None, catalog: View | None, name: str, n: int) -> Resolved:
    """Return one committed version by its number. Raises NotFoundError, WithdrawnError."""
    row = catalog.version(name, n) if catalog is not None else None
    if row is not None and row["state"] == "committed":
        return _resolved(row)
    if row is not None and row["state"] == "withdrawn":
        raise decision.marked(remote, name, n)
    if remote is not None:
        try:
            found = decision.committed(remote, name, n)
        except NotFoundError as error:
            raise _with_hint(error, remote, catalog, name) from None
        return Resolved(name=name, n=n, content=found.content, manifest=found.digest)
    if row is not None and row["state"] == "void":
        raise NotFoundError(f"{name}@v{n} was given up", fix=f"registry ls {name}")
    what = f"{name}@v{n} is not finished" if row is not None else f"there is no {name}@v{n}"
    raise _with_hint(NotFoundError(what), remote, catalog, name)


def _latest(remote: Remote | None, catalog: View, name: str) -> Resolved:
    row = catalog.name(name)
    if row is None:
        raise unknown(remote, catalog, name)
    if row["latest"] is None:
        raise _with_hint(NotFoundError(f"{name} has no version yet", fix="registry ls"), remote, catalog, name)
    return numbered(None, catalog, name, row["latest"])


def _by_step(remote: Remote | None, catalog: View, name: str, step: int) -> Resolved:
    rows = catalog.by_step(name, step)
    if len(rows) == 1:
        return _resolved(rows[0])
    if rows:
        raise _ambiguous(f"{name} has {len(rows)} versions of step {step}", rows)
    if catalog.name(name) is None:
        raise unknown(remote, catalog, name)
    steps = sorted({row["step"] for row in catalog.listing([name], limit=None) if row["step"] is not None})
    near = ", ".join(map(str, sorted(steps, key=lambda s: abs(s - step))[:5]))
    raise NotFoundError(
        f"{name} has no version of step {step}", why=f"near it are {near}" if near else None, fix=f"registry ls {name}"
    )


def _by_content(remote: Remote | None, catalog: View, name: str | None, digest: str) -> Resolved:
    found = catalog.by_content(digest, name)
    rows = [row for row in found if row["state"] == "committed"]
    if len(rows) == 1:
        return _resolved(rows[0])
    if rows:
        raise _ambiguous(f"{len(rows)} versions begin with sha256:{digest}", rows)
    gone = next((row for row in found if row["state"] == "withdrawn"), None)
    if gone is not None:
        raise decision.marked(remote, gone["name"], gone["n"])
    raise NotFoundError(f"nothing begins with sha256:{digest}", fix="registry ls --all -o wide")


def _resolved(row: Row) -> Resolved:
    return Resolved(name=row["name"], n=row["n"], content=row["content"], manifest=row["manifest"], card=row["card"])


def _ambiguous(what: str, rows: list[Row]) -> UsageError:
    matches = [f"{row['name']}@v{row['n']}" for row in rows]
    told = ", ".join(
        f"{ref} ({row['content'].removeprefix('sha256:')[:12]}, run {shown(str(row['run']))})"
        for ref, row in zip(matches[:8], rows, strict=False)
    )
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    return UsageError(what, why=f"they are {told}{more}", fix=f"name one, such as {matches[-1]}", matches=matches)


def _known(catalog: View | None, ref: str) -> View:
    if catalog is None:
        raise UsageError(f"'{shown(ref)}' cannot be looked up without a catalogue", fix="name a version: name@v7")
    return catalog


def _no_tag(remote: Remote | None, catalog: View | None, name: str, tag: str) -> WeighbridgeError:
    there = sorted({t for found in catalog.tags(name).values() for t in found}) if catalog is not None else []
    error = NotFoundError(
        f"{name} has no tag '{tag}'", why=f"it has {', '.join(there)}" if there else None, fix=f"registry ls {name}"
    )
    return _with_hint(error, remote, catalog, name)


def unknown(remote: Remote | None, catalog: View | None, name: str) -> NotFoundError:
    """Return the error of a name that nobody here knows: what was probably meant, and what may be hidden from us.

    Raises what a remote of commits says of the name, such as that it is gated.
    """
    hub = commits.of(remote) if remote is not None else None
    if hub is not None:
        hub.look(name, whole=False)
    names = catalog.names() if catalog is not None else []
    near = [known for known in names if known.casefold() == name.casefold()] or get_close_matches(name, names, 3)
    why = f"did you mean {' or '.join(near)}?" if near else "nobody has published under this name"
    more = f"; {hub.hidden()}" if hub is not None else ""
    return NotFoundError(f"there is no name '{shown(name)}'", why=why + more, fix="registry ls")


def _with_hint(error: WeighbridgeError, remote: Remote | None, catalog: View | None, name: str) -> WeighbridgeError:
    """Name what was probably meant: another name when this one is unknown, else the newest version."""
    if catalog is None or error.why:
        return error
    if catalog.name(name) is None:
        return unknown(remote, catalog, name)
    newest = catalog.listing([name], limit=1)
    error.why = f"the newest is {name}@v{newest[0]['n']}" if newest else f"{name} has no finished version"
    error.fix = error.fix or f"registry ls {name}"
    return error
