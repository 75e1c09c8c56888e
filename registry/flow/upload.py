"""Putting a version's files into place (docs/formats.md), in an order that fails foreign loaders safely.

Weights, tokenizer, index, everything else, `config.json` / `adapter_config.json`, card, signature: a loader that knows
nothing of manifests finds no config until all it needs is there. A payload file that is there already is compared;
other bytes are `foreign-bytes` and stop the job. A card, history or signature that is there already is kept.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Final

from weighbridge.registry import errors, layout
from weighbridge.registry.flow import commit_publish, once
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claims import Claimed, manifest_of
from weighbridge.registry.flow.decide import refuse_void
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.hashing import sha256_bytes
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
    held = {(entry.path, entry.size, entry.sha256) for entry in bundle.files}
    absent = [e.path for e in manifest.files if (e.path, e.size, e.sha256) not in held]
    if absent:
        raise errors.IntegrityError(
            f"{shown(absent[0])} is not in the bundle", why="the claim is for another content", fix="stage it again"
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
        stored = once.create(remote, key, body)
        if stored is not None:
            raise _foreign(key, len(stored), sha256_bytes(stored), entry)
        return _proven(remote, key, entry)
    source = staging.ready(bundle, entry)
    try:
        remote.upload(key, source, entry.size, entry.sha256, progress)
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

    Without `read` also None when only reading could tell.
    """
    try:
        found = remote.stat(key)
        if found.size != entry.size:
            raise _foreign(key, found.size, found.sha256, entry)
        if remote.properties.server_sha256 and found.sha256 is not None:
            if found.sha256 != entry.sha256:
                raise _foreign(key, found.size, found.sha256, entry)
            return "sha256-server"
        if not read:
            return None
        digest = hashlib.sha256()
        for chunk in remote.fetch(key):
            digest.update(chunk)
    except errors.MissingError:
        return None
    if digest.hexdigest() != entry.sha256:
        raise _foreign(key, found.size, digest.hexdigest(), entry)
    return "sha256-read"


def _foreign(key: str, size: int, sha256: str | None, entry: FileEntry) -> errors.ForeignBytesError:
    digest = f" with sha256 {sha256[:12]}" if sha256 else ""
    return errors.ForeignBytesError(
        f"{shown(key)} holds other bytes",
        why=f"{size} bytes{digest} lie there, the manifest says {entry.size} with {entry.sha256[:12]}",
        fix="nothing was overwritten; find out who wrote there, then give the number up or remove the file",
        key=key,
    )
