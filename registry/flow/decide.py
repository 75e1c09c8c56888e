"""The decision comes last: `manifest.json` with the claim's exact bytes, or the void (docs/formats.md)."""

from collections.abc import Callable, Mapping
from typing import Final

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import commit_publish, feed, once
from weighbridge.registry.flow.claims import Claimed, judge, manifest_of
from weighbridge.registry.flow.decision import Void, settled
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.manifest import Manifest, canonical, parse
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled

_PROOFS: Final = ("sha256-server", "sha256-read")


def decide(remote: Remote, remote_name: str, claimed: Claimed, verified: Mapping[str, str]) -> types.Receipt:
    """Commit a claim whose files are all in place and return the receipt. Doing it twice is harmless.

    `verified` names the level at which each file was compared (`upload`). Raises IntegrityError for a file that is
    missing or was not compared, ForeignBytesError for one that is not listed, VoidedError when the number was given up.
    """
    repositories = commits.of(remote)
    if repositories is not None:
        return commit_publish.decide(repositories, remote_name, claimed, verified)
    claim = claimed.claim
    manifest = manifest_of(claimed)
    unproven = [f.path for f in manifest.files if verified.get(f.path) not in _PROOFS]
    if unproven:
        raise errors.IntegrityError(
            f"{shown(unproven[0])} was not compared with its record", why="size alone is no proof", fix="upload again"
        )
    try:
        check_set(remote, claim.name, claim.n, manifest)
    except errors.IntegrityError:
        refuse_void(remote, claim)  # whoever gave the number up removed the files as well
        raise
    key = layout.manifest(claim.name, claim.n)
    if once.create(remote, key, manifest.stored) is not None:
        refuse_void(remote, claim)
    return receipt(remote, remote_name, claimed, verified)


def refuse_void(remote: Remote, claim: types.Claim) -> None:
    """Raise VoidedError when a number was given up. Raises IntegrityError when its decision is not the claim's."""
    stored = once.look(remote, layout.manifest(claim.name, claim.n))
    _, given_up = (None, None) if stored is None else judge(stored, claim)
    if given_up is not None:
        raise errors.VoidedError(
            f"{claim.name}@v{claim.n} was given up before it was committed",
            why=f"{shown(given_up.reason)} ({shown(given_up.by)})",
            fix="publish again: the content gets a new number",
        )


def receipt(
    remote: Remote, remote_name: str, claimed: Claimed, verified: Mapping[str, str] | None = None
) -> types.Receipt:
    """Return the receipt of a committed version. Without `verified` the files are compared by size alone.

    Raises IntegrityError when a file is missing or of another size.
    """
    repositories = commits.of(remote)
    if repositories is not None:
        return commit_publish.receipt(repositories, remote_name, claimed, verified=verified)
    claim = claimed.claim
    manifest = manifest_of(claimed)
    if verified is None:
        check_set(remote, claim.name, claim.n, manifest)
    levels = set(verified.values()) if verified else {"size"}
    return types.Receipt(
        remote=remote_name,
        name=claim.name,
        n=claim.n,
        content=claim.content,
        manifest_sha256=manifest.digest,
        location=f"{remote.url.rstrip('/')}/{layout.version(claim.name, claim.n)}",
        committed_at=spelled(remote.stat(layout.manifest(claim.name, claim.n)).modified),
        verified=max(levels, key=["sha256-server", "sha256-read", "size"].index),
        files={file.path: file.sha256 for file in manifest.files},
        joined=claimed.joined,
    )


def void(remote: Remote, registry: types.Registry, name: str, n: int, *, reason: str, by: str) -> None:
    """Give up a number that nobody committed and tell the team; `clear_void` removes what was uploaded under it.

    Voiding twice is harmless. Raises ConflictError when the version is committed, MissingError without a claim.
    """
    check_writer(registry)
    remote.stat(layout.claim(name, n))
    body = canonical({"void": reason, "by": by})
    stored = once.create(remote, layout.manifest(name, n), body)
    if stored is not None and not isinstance(settled(remote, name, n, stored), Void):
        raise errors.ConflictError(
            f"{name}@v{n} is committed", why="its manifest is there", fix="a committed version can only be withdrawn"
        )
    feed.announce(remote, registry, [feed.void_entry(name, n, stored or body)])


def clear_void(
    remote: Remote, name: str, n: int, *, denied: Callable[[errors.DeniedError], object] = lambda _: None
) -> int:
    """Remove what was uploaded under a number that was given up, and return how many files that were.

    No reader can see them. A writer that still runs is refused at its decision, and clears up in the same way; one that
    may not delete leaves it to the collector, which is told of it by `denied` where it may not either.
    """
    if remote.properties.commits:
        return 0  # nothing lies there before its commit
    key = layout.manifest(name, n)
    if not isinstance(settled(remote, name, n, remote.read(key)), Void):
        raise errors.ConflictError(f"{name}@v{n} is committed", why="only what was given up is cleared")
    left = [found.key for found in remote.list(layout.version(name, n)) if found.key != key]
    # Weights last, as a loader that knows no manifest must not find a config beside half the weights.
    removed = 0
    try:
        for leftover in sorted(left, key=lambda k: (k.endswith(".safetensors"), k)):
            remote.delete(leftover)
            removed += 1
    except errors.DeniedError as error:
        denied(error)
    return removed


def is_whole(remote: Remote, claim: types.Claim) -> bool:
    """Tell whether every file that a claim names lies there, by name and size, whatever else does."""
    key = layout.claim(claim.name, claim.n)
    try:
        check_set(remote, claim.name, claim.n, parse(claim.manifest.encode(), key))
    except errors.ForeignBytesError:
        return True
    except errors.IntegrityError:
        return False
    return True


def check_set(remote: Remote, name: str, n: int, manifest: Manifest) -> None:
    """Compare the files that lie there with the manifest, by name and size; what differs is listed twice.

    A bit of a listing can be another one on its way. Raises IntegrityError for a file that is missing or of another
    length, ForeignBytesError for one that is not listed.
    """
    root = layout.version(name, n)
    wanted = {entry.path: entry.size for entry in manifest.files}
    for _ in range(2):
        there = {found.key.removeprefix(root): found.size for found in remote.list(root)}
        if {path: size for path, size in there.items() if path not in types.RENDERED_FILES} == wanted:
            return
    for entry in manifest.files:
        size = there.pop(entry.path, None)
        if size != entry.size:
            found = "missing" if size is None else f"{size} bytes long"
            raise errors.IntegrityError(
                f"{shown(entry.path)} of {name}@v{n} is {found}",
                why=f"its manifest says {entry.size} bytes",
                fix=f"registry verify {name}@v{n} --remote {shown(remote.url)}",
            )
    foreign = sorted(set(there) - set(types.RENDERED_FILES))
    if foreign:
        raise errors.ForeignBytesError(
            f"{shown(root + foreign[0])} is not in the manifest",
            why="somebody put a file into the folder of a version",
            fix="remove it if it is nobody's, then repeat",
            files=foreign,
        )
