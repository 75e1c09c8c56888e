"""Bringing a version to a mirror: the home's objects under the home's numbers, decided last.

A mirror gives no number of its own. What lies there and is something else is reported as diverged and left alone.
Claims come over in number order with the void ones among them, so that a mirror is as dense as its home.
"""

import secrets
import shutil
from pathlib import Path

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import commit_mirror, feed, fetch, once
from weighbridge.registry.flow.claims import Claimed, decode
from weighbridge.registry.flow.decide import decide, receipt
from weighbridge.registry.flow.decision import Void, decided
from weighbridge.registry.flow.publish import version_entry
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.flow.upload import upload
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled


def deliver(
    home: Remote, mirror: Remote, name: str, n: int, *, mirror_name: str, registry: types.Registry, scratch: Path
) -> types.Receipt:
    """Bring a committed version of `home` to `mirror` and return the mirror's receipt; repeating is harmless.

    `registry` is the mirror's own, for its feed; `scratch` a folder for the bytes where the mirror has no stage. Every
    byte is verified on its way. Raises DivergedError when the mirror holds something else, WithdrawnError and
    NotFoundError when the home has no such version, and what the remotes raise.
    """
    repositories = commits.of(mirror)
    if repositories is not None:
        return commit_mirror.deliver(home, repositories, name, n, mirror_name=mirror_name, scratch=scratch)
    manifest = checked_manifest(home, name, n)
    claimed = _bring_claims(home, mirror, name, n)
    if claimed.committed:
        return receipt(mirror, mirror_name, claimed)
    feed.announce(mirror, registry, [feed.claim_entry(claimed.claim, claimed.sha256, stored_at=claimed.stored_at)])
    nonce = secrets.token_hex(16)
    place = mirror.stage(name, nonce) or scratch / nonce
    try:
        fetch.files(home, name, n, manifest.files, place)
        rendered = {
            path: stored
            for path in types.PAPERS
            if (stored := once.look(home, layout.version(name, n, path))) is not None
        }
        bundle = Bundle(place=str(place), mode="copy", files=list(manifest.files), sources=[])
        try:
            verified = upload(mirror, claimed, bundle, rendered)
            done = decide(mirror, mirror_name, claimed, verified)
        except (errors.ForeignBytesError, errors.VoidedError) as error:
            raise _diverged(name, n, error.what) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    feed.announce(mirror, registry, [version_entry(mirror, claimed)])
    return done


def _bring_claims(home: Remote, mirror: Remote, name: str, n: int) -> Claimed:
    """Copy every claim up to n that the mirror lacks, and the voids among them; return the mirror's claim n."""
    there = {layout.claim_number(found.key) for found in mirror.list(layout.claims(name))}
    stored = b""
    for number in range(1, n + 1):
        key = layout.claim(name, number)
        if number < n and (name, number) in there:
            continue
        stored = home.read(key)
        other = once.create(mirror, key, stored)
        if other is not None:
            raise _diverged(name, number, f"{key} is another claim")
        if number < n:
            _bring_void(home, mirror, name, number)
    claim = decode(stored, layout.claim(name, n))
    decision = once.look(mirror, layout.manifest(name, n))
    if decision is not None and decision != claim.manifest.encode():
        raise _diverged(name, n, "another decision lies there")
    return Claimed(
        claim=claim,
        sha256=sha256_bytes(stored),
        joined=True,
        committed=decision is not None,
        stored_at=spelled(mirror.stat(layout.claim(name, n)).modified),
    )


def _bring_void(home: Remote, mirror: Remote, name: str, n: int) -> None:
    key = layout.manifest(name, n)
    stored = once.look(home, key)
    if stored is not None and isinstance(decided(stored, key), Void):
        other = once.create(mirror, key, stored)
        if other is not None:
            raise _diverged(name, n, "it was given up at home and committed here")


def _diverged(name: str, n: int, why: str) -> errors.DivergedError:
    return errors.DivergedError(
        f"the mirror holds something else as {name}@v{n}",
        why=why,
        fix="nothing was changed there; find out who wrote to the mirror",
        name=name,
        n=n,
    )
