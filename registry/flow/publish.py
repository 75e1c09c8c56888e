"""From files to a committed version: stage, seal, claim, announce, upload, decide, announce (docs/formats.md).

`publish` runs the steps at once, for `registry push`; the daemon calls the same steps and keeps a record in between.
Every step can be repeated after a crash, by anybody who has the bytes.
"""

import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from weighbridge.registry import errors, layout, stages, types
from weighbridge.registry.flow import feed, once, papers
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claim import claim, made_before
from weighbridge.registry.flow.claims import Claimed, Known, manifest_of
from weighbridge.registry.flow.commit_publish import COMMITS_MAX
from weighbridge.registry.flow.decide import clear_void, decide, receipt
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Bundle, Mode
from weighbridge.registry.flow.upload import holds, told, upload
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, parse, seal
from weighbridge.registry.refs import check_name, shown
from weighbridge.registry.remotes.protocol import Progress, Remote

Render = Callable[[Manifest, str, int], Mapping[str, bytes]]
"""Gives README.md, and training.json where there is a history, of a version; they depend on its number."""

Untold = Callable[[errors.WeighbridgeError], object]
"""Takes what kept the team from being told of a version that is published."""

Mended = Callable[[errors.WeighbridgeError], object]
"""Takes what was wrong with a committed version until its lost files were put back."""

NUMBERS_MAX: Final = 5
"""Numbers that may be given up under our hands before something must be wrong."""

UNTOLD: Final = 86_400.0
"""Seconds after which a committed version is not announced again by whoever joins it."""


class Candidate(types.Value, frozen=True):
    """A sealed bundle that has no number yet; `manifest` is its text, `nonce` the name of its stage folder."""

    name: str
    kind: str
    content: str
    manifest: str
    bundle: Bundle
    nonce: str
    derivation: str | None = None


def prepare(
    remote: Remote,
    name: str,
    files: Sequence[SourceFile],
    facts: types.Facts,
    *,
    mode: Mode = "auto",
    reserve: int = 0,
    transform: Mapping[str, bytes] | None = None,
    made: Mapping[str, staging.Made] | None = None,
    inputs: Sequence[SourceFile] = (),
    staging_folder: Path | None = None,
    derivation: str | None = None,
    progress: Progress | None = None,
) -> Candidate:
    """Stage and seal the files of one artifact for a name.

    Where the remote has a stage of its own, the copy is already the one that is published. For others it lies in
    `staging_folder`; without one, or when `auto` finds no room there, the files are read in place (direct). What is
    made out of a source (`made`, of `inputs` where they are several) is always staged, at need in the user's cache,
    where what killed commands left is swept. Raises SourceChangedError, VanishedError, DiskFullError, RefusedError
    where the weights hold NaN, UsageError, and what `made` raises.
    """
    check_name(name)
    nonce = secrets.token_hex(16)
    place = None if mode == "direct" else remote.stage(name, nonce)
    own, durable = place is not None, True
    if place is None and mode != "direct" and staging_folder is not None:
        place = staging_folder / nonce
    if place is None and remote.properties.commits:
        # What is committed at once cannot be looked at again before the decision: it always goes from a private copy.
        # A command's copy ends with the command, so it need not survive a crash of the machine.
        place, own, durable = stages.place_of(os.environ, nonce), True, False
        mode = "copy" if mode == "direct" else mode
    if place is None and made:
        mode = "copy"
        place = stages.place_of(os.environ, nonce)
    begun: AbstractContextManager[None] = nullcontext()
    if place is not None and place.parent == stages.root(os.environ):
        stages.sweep(place.parent, stages.LEFTOVER_AFTER)
        begun = stages.begun(place)
    try:
        with begun:
            bundle = staging.stage(
                files, place, mode=mode, transform=transform, made=made, inputs=inputs,
                reserve=reserve, durable=durable, part=remote.properties.part, progress=progress,
            )  # fmt: skip
    except errors.DiskFullError:
        if own or mode != "auto" or made:
            raise
        part = remote.properties.part
        bundle = staging.stage(files, None, mode="direct", transform=transform, part=part, progress=progress)
    try:
        manifest = seal(bundle.files, staging.seen(bundle, facts))
    except errors.WeighbridgeError:
        staging.discard(bundle)
        raise
    return Candidate(
        name=name,
        kind=manifest.kind,
        content=manifest.content,
        manifest=manifest.stored.decode(),
        bundle=bundle,
        nonce=nonce,
        derivation=derivation,
    )


def sealed(candidate: Candidate) -> Manifest:
    """Return the manifest of a candidate."""
    return parse(candidate.manifest.encode(), f"the sealed manifest of {candidate.name}")


def publish(
    remote: Remote,
    remote_name: str,
    registry: types.Registry,
    candidate: Candidate,
    owner: types.Owner,
    *,
    render: Render | None = None,
    people: str | None = None,
    again: bool = False,
    share: bool = True,
    adopt: bool = False,
    known: MutableMapping[int, Known] | None = None,
    keep_stage: bool = False,
    untold: Untold = lambda _: None,
    mended: Mended = lambda _: None,
    progress: Progress | None = None,
) -> types.Receipt:
    """Publish a candidate and return the receipt; a content that has a number already keeps it.

    The card is rendered around `people`, the text people wrote, unless `render` makes it. The stage is removed
    afterwards unless `keep_stage`; after an error it stays, for the next try. Raises what the steps raise up to the
    decision: `claim`, `upload`, `stage.recheck`, `decide`. When only the announcement fails, the version is published
    and `untold` is called: readers find it by its claim, which was announced, and a repetition tells the team.
    """
    manifest = sealed(candidate)
    feed_at: feed.Head | None = None
    place = candidate.bundle.place
    with stages.held(None if place is None else Path(place)):
        for _ in range(NUMBERS_MAX if not remote.properties.commits else COMMITS_MAX):
            claimed = claim(
                remote,
                registry,
                candidate.name,
                manifest,
                owner,
                derivation=candidate.derivation,
                again=again,
                share=share,
                adopt=adopt,
                known=known,
            )
            if claimed.committed:
                papers_of = partial(_papers, remote, claimed, render, people)
                done = rejoin(
                    remote, remote_name, claimed, candidate.bundle, papers_of, progress=progress, mended=mended
                )
                if needs_telling(remote, claimed):
                    _tell(remote, registry, claimed, untold)
                break
            feed_at = feed_at or feed.head(remote, registry)
            seq = feed.announce(remote, registry, [claim_entry(claimed)], known=feed_at)
            feed_at = feed.Head(seq, feed_at.epoch)
            n = claimed.claim.n
            files = _papers(remote, claimed, render, people)
            try:
                verified = upload(remote, claimed, candidate.bundle, files, progress)
                if candidate.bundle.mode == "direct":
                    staging.recheck(candidate.bundle)
                done = decide(remote, remote_name, claimed, verified)
            except errors.VoidedError:
                clear_void(remote, candidate.name, n)
                continue
            _tell(remote, registry, claimed, untold, feed_at)
            break
        else:
            raise errors.VoidedError(
                f"{candidate.name} could not be published",
                why=f"{NUMBERS_MAX} numbers were given up before they were committed",
                fix="look who gives numbers up, then repeat",
            )
        if not keep_stage:
            staging.discard(candidate.bundle)
    return done


def standing(
    remote: Remote,
    remote_name: str,
    registry: types.Registry,
    name: str,
    derivation: Callable[[], str],
    *,
    again: bool = False,
    untold: Untold = lambda _: None,
) -> tuple[types.Receipt, Manifest] | None:
    """Return the version that was made of the same things in the same way: it need not be made again.

    None where there is none, or where it has lost files, which whoever makes it anew puts back. Raises what
    `made_before` raises, and IntegrityError where something is wrong with it that making it anew does not mend.
    """
    claimed = made_before(remote, registry, name, derivation, again=again)
    if claimed is None:
        return None
    try:
        done = receipt(remote, remote_name, claimed)
    except errors.ForeignBytesError:
        raise
    except errors.IntegrityError as error:
        wrong = _in_the_way(remote, claimed)
        if wrong:
            error.fix = cure(f"{name}@v{claimed.claim.n}", wrong)
            error.data["option"] = "again"
        if wrong or remote.properties.commits:
            raise
        return None
    if needs_telling(remote, claimed):
        _tell(remote, registry, claimed, untold)
    return done, manifest_of(claimed)


def _in_the_way(remote: Remote, claimed: Claimed) -> list[str]:
    """Return the keys of a version's files that have another length than its manifest says."""
    if remote.properties.commits:
        return []
    root = layout.version(claimed.claim.name, claimed.claim.n)
    there = {found.key: found.size for found in remote.list(root)}
    return [root + one.path for one in manifest_of(claimed).files if there.get(root + one.path, one.size) != one.size]


def cure(ref: str, keys: Sequence[str]) -> str:
    """Return what makes a version right of which objects are damaged, for whoever has, or makes, the same bytes."""
    return (
        f'registry withdraw {ref} --reason "...", then registry push --again gives these bytes a new number; '
        f"or delete {' and '.join(map(shown, keys))} on the remote and repeat: it is put back"
    )


def rejoin(
    remote: Remote,
    remote_name: str,
    claimed: Claimed,
    bundle: Bundle,
    rendered: Callable[[], Mapping[str, bytes]],
    *,
    progress: Progress | None = None,
    mended: Mended = lambda _: None,
) -> types.Receipt:
    """Return the receipt of a committed version whose bytes we have, compared as far as the remote tells of it cheaply.

    What was lost of it since is put back, and `mended` told of it: no object is overwritten, and the hashes are those
    of its manifest. Raises ForeignBytesError for what was damaged since, and what `upload` raises.
    """
    if remote.properties.commits:
        return receipt(remote, remote_name, claimed)
    try:
        try:
            done = receipt(remote, remote_name, claimed)
        except errors.ForeignBytesError:
            raise
        except errors.IntegrityError as error:
            if not holds(bundle, manifest_of(claimed)):
                raise  # ours are other bytes, made in the same way of the same things
            verified = upload(remote, claimed, bundle, rendered(), progress)
            if bundle.mode == "direct":
                staging.recheck(bundle)
            done = decide(remote, remote_name, claimed, verified)
            mended(error)
            return done
        level = told(remote, claimed)
    except errors.ForeignBytesError as error:
        key = error.data.get("key")
        if key is not None:
            error.fix = cure(f"{claimed.claim.name}@v{claimed.claim.n}", [str(key)])
            error.data["option"] = "again"
        raise
    return done if level is None else msgspec.structs.replace(done, verified=level)


def _papers(remote: Remote, claimed: Claimed, render: Render | None, people: str | None) -> Mapping[str, bytes]:
    """Return card and history of a claimed version, rendered by `render` or around what people wrote."""
    name, n, manifest = claimed.claim.name, claimed.claim.n, manifest_of(claimed)
    return papers.render(remote, manifest, name, n, people=people) if render is None else render(manifest, name, n)


def _tell(
    remote: Remote, registry: types.Registry, claimed: Claimed, untold: Untold, at: feed.Head | None = None
) -> None:
    """Announce a committed version; that this fails makes nothing undone. A commit has told everybody already."""
    if remote.properties.commits:
        return
    try:
        feed.announce(remote, registry, [version_entry(remote, claimed)], known=at)
    except errors.WeighbridgeError as error:
        untold(error)


def claim_entry(claimed: Claimed) -> types.FeedEntry:
    """Return what the team is told of a claim; it is told before the decision can exist."""
    return feed.claim_entry(claimed.claim, claimed.sha256, stored_at=claimed.stored_at)


def version_entry(remote: Remote, claimed: Claimed) -> types.FeedEntry:
    """Return what the team is told of a committed version, with the digest of the card as it lies there."""
    name, n = claimed.claim.name, claimed.claim.n
    card = once.look(remote, layout.version(name, n, "README.md"))
    return feed.version_entry(
        name,
        n,
        manifest_of(claimed),
        card_sha256=None if card is None else sha256_bytes(card),
        stored_at=claimed.stored_at,
    )


def needs_telling(remote: Remote, claimed: Claimed) -> bool:
    """Return whether a version that was committed before may not be announced: its publisher can have died since.

    Later, readers still find it: its claim was announced, and open claims are looked at. A commit tells of itself.
    """
    if remote.properties.commits:
        return False
    decided = remote.stat(layout.manifest(claimed.claim.name, claimed.claim.n)).modified
    return remote.now() - decided < UNTOLD
