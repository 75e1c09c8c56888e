"""Bringing a version to a mirror: the home's objects under the home's numbers, decided last.

A mirror gives no number of its own. What lies there and is something else is reported as diverged and left alone.
Claims come over in number order with the void ones among them, so that a mirror is as dense as its home.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import commit_mirror, feed, fetch, once, withhold
from weighbridge.registry.flow import place as places
from weighbridge.registry.flow.claims import Claimed, decode
from weighbridge.registry.flow.decide import decide, receipt
from weighbridge.registry.flow.decision import gives_up, is_void, withdrawn
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.publish import version_entry
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.flow.upload import upload
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, parse
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled


def deliver(
    home: Remote,
    mirror: Remote,
    name: str,
    n: int,
    *,
    mirror_name: str,
    registry: types.Registry,
    scratch: Path,
    begin: Callable[[Sequence[types.FileEntry]], None] | None = None,
    progress: fetch.Progress | None = None,
) -> types.Receipt:
    """Bring a committed version of `home` to `mirror` and return the mirror's receipt; repeating is harmless.

    `registry` is the mirror's own, for its feed; `scratch` a folder for the bytes where the mirror has no stage. Every
    byte is verified on its way; after a cut the next call goes on with what has come. `begin` is called with the files
    before the first byte, and not at all when the version is there already and whole. Raises DivergedError when the
    mirror holds something else, NotFoundError when the home has no such version, WithdrawnError when it was taken back
    at home or on the mirror, whose files a purge may have deleted for good, and what the remotes raise.
    """
    check_writer(registry)
    repositories = commits.of(mirror)
    if repositories is not None:
        return commit_mirror.deliver(
            home, repositories, name, n, mirror_name=mirror_name, scratch=scratch, begin=begin, progress=progress
        )
    manifest = checked_manifest(home, name, n)
    claimed, told = _bring_claims(home, mirror, name, n)
    mark = once.look(mirror, layout.withdrawn(name, n))
    if mark is not None:
        raise withdrawn(name, n, mark)
    if claimed.committed:
        try:
            return receipt(mirror, mirror_name, claimed)
        except errors.ForeignBytesError:
            raise
        except errors.IntegrityError:
            pass  # a file was lost since: it is brought again, as nothing that lies there is touched
    told.append(feed.claim_entry(claimed.claim, claimed.sha256, stored_at=claimed.stored_at))
    feed.announce(mirror, registry, told)
    with _stage(mirror, name, manifest, scratch) as place:
        if begin is not None:
            begin(manifest.files)
        fetch.files(home, name, n, manifest.files, place, progress=progress)
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
            shutil.rmtree(place, ignore_errors=True)
            key = error.data.get("key")
            fix = f"if it is damaged, delete {shown(str(key))} there and mirror {name}@v{n} to {mirror_name} again"
            raise _diverged(name, n, error.what, fix if key else None) from error
    feed.announce(mirror, registry, [version_entry(mirror, claimed)])
    return done


class Refusal(types.Value, frozen=True):
    """Why a mirror's rules keep a version away from it, and what can be done."""

    why: str
    fix: str


def stricter(manifest: Manifest, mirror: RemoteSettings) -> Refusal | None:
    """Return why a mirror may not have a version that was sealed before this mirror was asked, or None.

    One manifest serves all remotes, so a version that was sealed under milder rules cannot be changed any more.
    """
    licence = manifest.facts.license.id
    told = _private(manifest, mirror)
    if told is not None:
        return told
    if licence is None and mirror.unknown_license == "block":
        fix = mirror.written('unknown_license = "warn"') + " lets it go there"
        return Refusal(why=f"its licence is unknown, and {mirror.name} blocks that", fix=fix)
    if licence is not None and licence in mirror.deny_licenses:
        fix = f"take it out of {mirror.written('deny_licenses')}"
        return Refusal(why=f"its licence {licence} is denied by {mirror.name}", fix=fix)
    if mirror.remote_code == "block" and any(file.role == "code" for file in manifest.files):
        fix = mirror.written('remote_code = "allow"') + " lets it go there"
        return Refusal(why=f"it holds code, and {mirror.name} blocks that", fix=fix)
    return None


def refused(
    home: Remote, mirror: Remote, name: str, n: int, manifest: Manifest | None, *, settings: RemoteSettings
) -> Refusal | None:
    """Return why number n of a name may not go to a mirror of these `settings`, or None; `manifest` is None for a void.

    Besides its own manifest that looks at those in the claims that would go along, as a mirror is as dense as its home.
    """
    own = stricter(manifest, settings) if manifest is not None else None
    if own is not None or settings.paths == "keep" or commits.of(mirror) is not None:
        return own
    there = {layout.claim_number(found.key) for found in mirror.list(layout.claims(name))}
    for number in (one for one in range(1, n + 1) if (name, one) not in there):
        key = layout.claim(name, number)
        told = _private(parse(decode(home.read(key), key).manifest.encode(), key), settings)
        if told is not None:
            return told if number == n else msgspec.structs.replace(told, why=f"of v{number} before it, {told.why}")
    return None


def _private(manifest: Manifest, mirror: RemoteSettings) -> Refusal | None:
    told = withhold.private(manifest.facts) if mirror.paths != "keep" else []
    if not told:
        return None
    # Who said "internal = false" has to take that back, too: it says that private paths may not be kept.
    lines = ['paths = "keep"'] if mirror.internal else ["internal = true", 'paths = "keep"']
    return Refusal(
        why=f"the manifest holds {', '.join(told)}, and {mirror.name} does not keep them",
        fix=f"{mirror.written(*lines)} lets them go there; registry push FOLDER --name OTHER-NAME "
        f"--remote {mirror.word} publishes the files anew without them",
    )


def held(mirror: Remote, name: str, n: int, manifest: Manifest, *, mirror_name: str) -> types.Receipt | None:
    """Return the receipt of a version that lies on a mirror, whole by names and sizes, whoever brought it; else None.

    Nothing is written. Raises ForeignBytesError, and what the remotes raise.
    """
    key = layout.claim(name, n)
    stored = once.look(mirror, key) if once.look(mirror, layout.manifest(name, n)) == manifest.stored else None
    if stored is None:
        return None
    claim, at = decode(stored, key), spelled(mirror.stat(key).modified)
    claimed = Claimed(claim=claim, sha256=sha256_bytes(stored), joined=True, committed=True, stored_at=at)
    try:
        return receipt(mirror, mirror_name, claimed)
    except errors.ForeignBytesError:
        raise
    except errors.IntegrityError:
        return None


@contextmanager
def _stage(mirror: Remote, name: str, manifest: Manifest, scratch: Path) -> Iterator[Path]:
    """Give a folder for the bytes of a version, the same one after a cut; removed when all went well.

    Where another process is bringing the same version at this moment, each has a folder of its own. What nobody goes on
    with is swept by its age.
    """
    nonce = sha256_bytes(f"weighbridge-mirror-v1\0{name}\0{manifest.digest}".encode())[:32]
    with ExitStack() as held:
        place = mirror.stage(name, nonce) or scratch / nonce
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.enter_context(places.locked(place))
        except errors.ConflictError:
            nonce = secrets.token_hex(16)
            place = mirror.stage(name, nonce) or scratch / nonce
            held.enter_context(places.locked(place))
        yield place
        shutil.rmtree(place, ignore_errors=True)


def bring_claim(home: Remote, mirror: Remote, name: str, n: int, *, registry: types.Registry) -> None:
    """Bring claim n and those before it to a mirror, and the voids among them: for a number without bytes.

    Raises DivergedError when the mirror holds something else. A mirror whose transaction is a commit has no claims.
    """
    check_writer(registry)
    if commits.of(mirror) is None:
        _, told = _copy_claims(home, mirror, name, n)
        void = _bring_void(home, mirror, name, n)
        if void is not None:
            told.append(void)
        feed.announce(mirror, registry, told)


def _bring_claims(home: Remote, mirror: Remote, name: str, n: int) -> tuple[Claimed, list[types.FeedEntry]]:
    """Copy every claim up to n that the mirror lacks, and the voids among them; return the mirror's claim n.

    Also what is new there of the numbers before it, for the feed.
    """
    stored, told = _copy_claims(home, mirror, name, n)
    claim = decode(stored, layout.claim(name, n))
    decision = once.look(mirror, layout.manifest(name, n))
    if decision is not None and decision != claim.manifest.encode():
        raise _diverged(name, n, "another decision lies there")
    claimed = Claimed(
        claim=claim,
        sha256=sha256_bytes(stored),
        joined=True,
        committed=decision is not None,
        stored_at=spelled(mirror.stat(layout.claim(name, n)).modified),
    )
    return claimed, told


def _copy_claims(home: Remote, mirror: Remote, name: str, n: int) -> tuple[bytes, list[types.FeedEntry]]:
    """Copy every claim up to n that the mirror lacks, and the voids before n; return claim n as stored.

    Also what is new there of the numbers before n, for the feed.
    """
    told: list[types.FeedEntry] = []
    there = {layout.claim_number(found.key) for found in mirror.list(layout.claims(name))}
    stored = b""
    for number in range(1, n + 1):
        key = layout.claim(name, number)
        if number < n and (name, number) in there:
            continue
        stored = home.read(key)
        claim = decode(stored, key)  # first: what is torn at home goes nowhere
        other = once.create(mirror, key, stored)
        if other is not None:
            fix = f"if it is damaged, delete {key} there and mirror {name}@v{number} again"
            raise _diverged(name, number, f"{key} is another claim", fix)
        if number < n:
            told.append(feed.claim_entry(claim, sha256_bytes(stored)))
            void = _bring_void(home, mirror, name, number)
            told += [void] if void is not None else []
    return stored, told


def _bring_void(home: Remote, mirror: Remote, name: str, n: int) -> types.FeedEntry | None:
    """Copy the decision that gives a number up; return what readers are told of it, None when there is nothing new.

    In other words it is none: a void that was lost comes back in those of whoever gave the number up again.
    """
    key = layout.manifest(name, n)
    stored = once.look(home, key)
    if stored is not None and gives_up(stored, key) and not is_void(mirror, name, n):
        if once.create(mirror, key, stored) is not None:
            raise _diverged(name, n, "it was given up at home and committed here")
        return feed.void_entry(name, n, stored)
    return None


def _diverged(name: str, n: int, why: str, fix: str | None = None) -> errors.DivergedError:
    return errors.DivergedError(
        f"the mirror holds something else as {name}@v{n}",
        why=why,
        fix="nothing was changed there; find out who wrote to the mirror" + (f"; {fix}" if fix else ""),
        name=name,
        n=n,
    )
