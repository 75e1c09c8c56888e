"""Putting a version's files into place (docs/formats.md), in an order that fails foreign loaders safely.

Weights, tokenizer, index, everything else, `config.json` / `adapter_config.json`, card, signature: a loader that knows
nothing of manifests finds no config until all it needs is there. A payload file that is there already is compared;
other bytes are `foreign-bytes` and stop the job. A card, history or signature that is there already is kept.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from weighbridge.registry import errors, layout
from weighbridge.registry.flow import commit_publish, once
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claims import Claimed, manifest_of
from weighbridge.registry.flow.decide import refuse_void
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Progress, Remote, Verified
from weighbridge.registry.types import PAPERS, FileEntry

_FIRST: Final = ("weights", "tokenizer", "index")
_LAST: Final = frozenset({"config.json", "adapter_config.json"})


def upload(
    remote: Remote,
    claimed: Claimed,
    bundle: Bundle,
    rendered: Mapping[str, bytes],
    progress: Progress | None = None,
) -> dict[str, str]:
    """Put every file of a claimed version into place and return the level at which each payload file was verified.

    `rendered` holds the card, and training.json and the signature where there are any. Repeating is harmless. Raises
    ForeignBytesError, SourceChangedError, StageDamagedError, VoidedError when the number was given up meanwhile.
    """
    repositories = commits.of(remote)
    if repositories is not None:
        return commit_publish.upload(repositories, claimed, bundle, rendered, progress)
    manifest = manifest_of(claimed)
    for path in _absent(bundle, manifest):
        raise errors.IntegrityError(
            f"{shown(path)} is not in the bundle", why="the claim is for another content", fix="stage it again"
        )
    verified: dict[str, str] = {}

    def one(entry: FileEntry) -> Verified:
        return _put(remote, claimed, bundle, entry, progress)

    with ThreadPoolExecutor(max(1, remote.properties.parallel), thread_name_prefix="upload") as pool:
        for group in order(manifest.files):
            running = [pool.submit(one, entry) for entry in group]
            try:
                verified |= {e.path: run.result() for e, run in zip(group, running, strict=True)}
            except errors.IntegrityError:
                refuse_void(remote, claimed.claim)  # whoever gave the number up removed what was there
                raise
            finally:
                for run in running:
                    run.cancel()
    for path in PAPERS:
        if path in rendered:
            once.create(remote, layout.version(claimed.claim.name, claimed.claim.n, path), rendered[path])
    return verified


def holds(bundle: Bundle, manifest: Manifest) -> bool:
    """Tell whether a bundle has every payload file of a manifest."""
    return not _absent(bundle, manifest)


def _absent(bundle: Bundle, manifest: Manifest) -> list[str]:
    held = {(entry.path, entry.size, entry.sha256) for entry in bundle.files}
    return [e.path for e in manifest.files if (e.path, e.size, e.sha256) not in held]


def told(remote: Remote, claimed: Claimed) -> Verified | None:
    """Compare what lies there of a version with its record as far as the remote tells without reading a byte.

    Return the level, None where of some file only the size is told. Raises ForeignBytesError for other bytes.
    """
    if not remote.properties.server_sha256 or remote.properties.commits:
        return None
    claim = claimed.claim

    def one(entry: FileEntry) -> Verified | None:
        return _compare(remote, layout.version(claim.name, claim.n, entry.path), entry, read=False)

    with ThreadPoolExecutor(max(1, remote.properties.parallel), thread_name_prefix="compare") as pool:
        levels = set(pool.map(one, manifest_of(claimed).files))
    return None if None in levels else "sha256-server"


def order(files: Sequence[FileEntry]) -> list[list[FileEntry]]:
    """Return the files in groups; a group begins when the one before is in place, within one any order is safe."""
    groups: dict[int, list[FileEntry]] = {}
    for entry in files:
        if PurePosixPath(entry.path).name in _LAST:
            rank = len(_FIRST) + 1
        else:
            rank = _FIRST.index(entry.role) if entry.role in _FIRST else len(_FIRST)
        groups.setdefault(rank, []).append(entry)
    return [sorted(groups[rank], key=lambda e: -e.size) for rank in sorted(groups)]


def _put(remote: Remote, claimed: Claimed, bundle: Bundle, entry: FileEntry, progress: Progress | None) -> Verified:
    key = layout.version(claimed.claim.name, claimed.claim.n, entry.path)
    properties = remote.properties
    # A folder refuses a taken key before it copies anything; a server may only do so when all was sent.
    if claimed.joined and not properties.hashes_stored:
        found = _compare(remote, key, entry, read=not properties.compares_files)
        if found is not None:
            return found
    body = bundle.inline.get(entry.path)
    if body is not None:
        once.create(remote, key, body)  # whatever lies there is looked at now
        return _proven(remote, key, entry)
    source = staging.ready(bundle, entry)
    try:
        remote.upload(key, source, entry.size, entry.sha256, progress, parts=bundle.parts.get(entry.path, ()))
    except errors.ExistsError:
        return _proven(remote, key, entry)
    return "sha256-read" if properties.hashes_stored else properties.upload_proof or _proven(remote, key, entry)


def _proven(remote: Remote, key: str, entry: FileEntry) -> Verified:
    level = _compare(remote, key, entry)
    if level is None:
        raise errors.IntegrityError(
            f"{shown(key)} is gone",
            why="it was there a moment ago",
            fix="look who deletes from the remote, then repeat",
        )
    return level


def _compare(remote: Remote, key: str, entry: FileEntry, *, read: bool = True) -> Verified | None:
    """Compare an object with its record by the server's checksum, else by reading it; None when there is none.

    Without `read` also None when only reading could tell. A difference is believed when two looks see the same one: a
    bit of an answer can be another one on its way, and nobody is to be accused for that.
    """
    try:
        first = _look(remote, key, entry, read=read)
        if not isinstance(first, _Other):
            return first
        second = _look(remote, key, entry, read=read)
    except errors.MissingError:
        return None
    if not isinstance(second, _Other):
        return second
    if first != second:
        raise errors.RetryableError(
            f"nobody can tell what {shown(key)} holds",
            why=f"of {_words(first)} and {_words(second)}, seen one after the other, one was damaged on its way",
            fix="repeat; where it goes on, look for what damages bytes between here and the store, or use https",
        )
    raise _foreign(key, first, entry)


class _Other(NamedTuple):
    """What lies where something else was expected; the sha256 is None where it was not looked at."""

    size: int
    sha256: str | None


def _look(remote: Remote, key: str, entry: FileEntry, *, read: bool) -> Verified | _Other | None:
    found = remote.stat(key)
    told = found.sha256 if remote.properties.server_sha256 else None
    if found.size != entry.size or told not in {None, entry.sha256}:
        return _Other(found.size, told)
    if told is not None:
        return "sha256-server"
    if not read:
        return None
    digest = hashlib.sha256()
    for chunk in remote.fetch(key):
        digest.update(chunk)
    return "sha256-read" if digest.hexdigest() == entry.sha256 else _Other(found.size, digest.hexdigest())


def _words(other: _Other) -> str:
    return f"{other.size} bytes" + (f" with sha256 {other.sha256[:12]}" if other.sha256 else "")


def _foreign(key: str, other: _Other, entry: FileEntry) -> errors.ForeignBytesError:
    return errors.ForeignBytesError(
        f"{shown(key)} holds other bytes",
        why=f"{_words(other)} lie there, the manifest says {entry.size} with {entry.sha256[:12]}",
        fix="nothing was overwritten; find out who wrote there, then give the number up or remove the file",
        key=key,
    )
