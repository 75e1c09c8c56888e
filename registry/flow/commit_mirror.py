"""Bringing a version to a mirror whose transaction is a commit: the home's claim and manifest, under the home's number.

In number order the version becomes the head of main. One that comes late, behind a higher number, gets a branch of its
own for a moment, its tag, and a line in the ledger; main stays at the highest.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import commit_publish, fetch, once
from weighbridge.registry.flow.claims import Claimed, decode
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes.commits import CommitRemote, Standing
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled


def deliver(
    home: Remote,
    mirror: CommitRemote,
    name: str,
    n: int,
    *,
    mirror_name: str,
    scratch: Path,
    begin: Callable[[Sequence[types.FileEntry]], None] | None = None,
    progress: fetch.Progress | None = None,
) -> types.Receipt:
    """Bring a committed version of `home` to `mirror` and return its receipt; repeating is harmless.

    `begin` and `progress` are told of what is fetched; a commit sends its files at once and tells nothing meanwhile.
    Raises DivergedError when the mirror holds something else under this name or number, and what the remotes raise.
    """
    manifest = checked_manifest(home, name, n)
    stored = home.read(layout.claim(name, n))
    claim = decode(stored, layout.claim(name, n))
    claimed = Claimed(
        claim=claim, sha256=sha256_bytes(stored), joined=True, committed=False, stored_at=spelled(mirror.now())
    )
    standing = mirror.look(name, whole=False)
    _refuse_diverged(mirror, standing, claimed)
    told = standing.ledger.version(n) if standing.ledger else None
    if told is not None:
        return commit_publish.decide(mirror, mirror_name, claimed, commit_publish.check(mirror, claimed))
    place = scratch / secrets.token_hex(16)
    try:
        if begin is not None:
            begin(manifest.files)
        fetch.files(home, name, n, manifest.files, place, progress=progress)
        rendered: Mapping[str, bytes] = {
            path: body for path in types.PAPERS if (body := once.look(home, layout.version(name, n, path))) is not None
        }
        bundle = Bundle(place=str(place), mode="copy", files=list(manifest.files), sources=[])
        job = commit_publish.Job(mirror, claimed, stored, manifest, bundle, rendered, time.sleep, given=True)
        if claim.n in standing.tags:
            commit_publish.tell(job)  # it came late, and whoever brought it died before it was told of
            verified = commit_publish.check(mirror, claimed)
        else:
            verified = commit_publish.publish(job)
        return commit_publish.decide(mirror, mirror_name, claimed, verified)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _refuse_diverged(mirror: CommitRemote, standing: Standing, claimed: Claimed) -> None:
    """Raise DivergedError when what lies there is of another registry or another content."""
    claim, ledger = claimed.claim, standing.ledger
    why = None
    if ledger is not None and ledger.registry != claim.registry:
        why = f"its versions come from registry {ledger.registry}"
    told = ledger.version(claim.n) if ledger is not None else None
    if told is not None and (told.claim != claimed.sha256 or told.void is not None):
        why = "another version has this number"
    if told is None and claim.n in standing.tags:
        theirs = once.look(mirror, layout.claim(claim.name, claim.n))
        if theirs is None or sha256_bytes(theirs) != claimed.sha256:
            why = f"there is a tag v{claim.n} that is not ours"
    if ledger is None and standing.commit is not None:
        found = commit_publish.foreign(mirror.look(claim.name))
        why = f"{found[0]} lies there, and no version of ours" if found else why
    if why is not None:
        raise errors.DivergedError(
            f"the mirror holds something else as {claim.name}@v{claim.n}",
            why=why,
            fix="nothing was changed there; find out who wrote to the mirror",
            name=claim.name,
            n=claim.n,
        )
