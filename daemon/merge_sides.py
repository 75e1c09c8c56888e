"""Both sides of a merge, brought together again at each step: the adapter as it was published, and its base."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from weighbridge.adapters.merge.preview import Look, look
from weighbridge.daemon import bases
from weighbridge.daemon.homes import Home
from weighbridge.daemon.mergestore import Merge, MergeStore
from weighbridge.registry import errors
from weighbridge.registry.flow import claim, merged
from weighbridge.registry.flow.merged import Parent
from weighbridge.registry.flow.pull import checked_manifest, pull


class Sides(NamedTuple):
    """Both sides of a merge, read again."""

    seen: Look
    adapter: Parent
    base: Parent


def sides(
    merge: Merge,
    home: Home,
    store: MergeStore,
    *,
    adapter: Path,
    folders: Sequence[Path],
    caches: Sequence[Path],
    scratch: Path,
    roots: Sequence[Path],
    moved: Callable[[int], None],
    at: Callable[[Path], None],
    fetch: bases.Fetch | None = None,
) -> Sides:
    """Return both sides of a merge; the adapter is pulled, so that what is merged is what was published.

    `at` is told where the base lies as soon as it is known; `fetch` gets one from the Hub where the rule lets it.
    Raises NotFinishedError for a base that is not here, RefusedError for an adapter that names none, what a pull
    raises, WithdrawnError.
    """
    manifest = checked_manifest(home.remote, merge.name, merge.n)
    # What lies in our scratch is ours: a folder that is not what was pulled there is pulled again.
    pull(home.remote, merge.name, merge.n, adapter, force=True, progress=lambda _path, count: moved(count))
    facts = manifest.facts
    want = bases.wanted(facts.base, Path(merge.path), adapter)
    found = bases.find(
        want, home, folders=folders, caches=caches, scratch=scratch, roots=roots, moved=moved, fetch=fetch
    )
    at(found.path)
    # Memory is asked about where the merge is made, at the moment it begins.
    seen = look([adapter], found.path, dtype=merge.dtype, weigh=False, here=False, called=found.ref)
    one = Parent(ref=merge.ref, content=manifest.content, provenance=facts.provenance, base=facts.base)
    content, ref = found.content, found.ref
    if content is None and seen.base is not None and seen.planned is not None:
        base = seen.base
        content = store.content_of(str(found.path), _stamp(seen), lambda: merged.content_of(base))
    if want.content is not None and content is not None and content != want.content:
        raise errors.NotFinishedError(
            f"the base in {found.path} is not the one the adapter belongs to",
            why=f"its content is {content[:19]}, recorded was {want.content[:19]}",
            fix="put the right one there, or name its folder in [merge] bases",
        )
    content = content or "sha256:"
    return Sides(seen, one, Parent(ref=ref or content, content=content))


def made_before(home: Home, name: str, derivation: str) -> int | None:
    """Return the number under which the same merge was published before; that need not be made again.

    Nor does one that was withdrawn. While somebody still publishes it, the claim itself decides. Raises what
    `claim.made_before` raises.
    """
    try:
        found = claim.made_before(home.remote, home.registry, name, lambda: derivation)
    except errors.WithdrawnContentError as error:
        return int(error.data["n"])
    return found.claim.n if found is not None else None


def _stamp(seen: Look) -> str:
    """Return what changes with any write to the files of a base."""
    digest = hashlib.sha256()
    assert seen.base is not None
    for file in sorted(seen.base.files, key=lambda f: f.path):
        path = Path(seen.base.sources.get(file.path, str(Path(seen.base.root) / file.path)))
        status = path.stat()
        digest.update(f"{file.path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\n".encode())
    return digest.hexdigest()
