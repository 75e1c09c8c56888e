"""Binding a number to a content. One content has one number in one name, whoever comes.

Every claim of the name is read; one with our content is joined, whoever made it, and its manifest is used. Claims are
dense and create-only, so that of two racers one gets the number and the other reads it and goes on.
"""

import secrets
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final

from weighbridge.adapters.run_place import same_place
from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import claims, commit_claim, once
from weighbridge.registry.flow.claims import Claimed, Known
from weighbridge.registry.flow.decide import void
from weighbridge.registry.flow.decision import is_void
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.manifest import Manifest, canonical, parse, parse_json
from weighbridge.registry.refs import check_name, shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled

ATTEMPTS: Final = 1000
"""Numbers tried in one go; so many other contents at once are a fault somewhere else."""


def claim(
    remote: Remote,
    registry: types.Registry,
    name: str,
    manifest: Manifest,
    owner: types.Owner,
    *,
    derivation: str | None = None,
    again: bool = False,
    share: bool = True,
    adopt: bool = False,
    known: MutableMapping[int, Known] | None = None,
) -> Claimed:
    """Return the claim of a content in a name: the one that is there, or a new one with the next number.

    `owner` is claimed with the name of its machine only where the manifest's facts hold that as well.
    `again` publishes what was withdrawn, under a new number. `share` False refuses a name that another run began.
    `known` may be kept between calls for one name and registry; only new claims are read then. `adopt` takes over a
    repository with files of somebody else, on remotes that have repositories.

    Raises WithdrawnContentError, NameTakenError (another kind, run, registry or spelling), NotFinishedError while
    another process is publishing the same derivation, IntegrityError for a damaged claim.
    """
    check_name(name)
    owner = claims.owner(owner, manifest.facts)
    repositories = commits.of(remote)
    if repositories is not None:
        return commit_claim.claim(
            repositories, registry, name, manifest, owner,
            derivation=derivation, again=again, share=share, adopt=adopt,
        )  # fmt: skip
    check_writer(registry, remote, owner)
    found = claims.read_all(remote, registry, name, known)
    for _ in range(ATTEMPTS):
        joined = _join(remote, name, found, manifest.content, derivation, again=again)
        if joined is not None:
            return joined
        n = len(found) + 1
        first = next((known for known in found.values() if not is_void(remote, name, known.n)), None)
        if first is None:
            _refuse_collision(remote, name)
        else:
            _refuse_stranger(remote, name, first, manifest, share=share)
        _refuse_lost(remote, name, n)
        made = types.Claim(
            schema=types.SCHEMA_CLAIM,
            registry=registry.registry,
            name=name,
            n=n,
            content=manifest.content,
            manifest=manifest.stored.decode(),
            owner=owner,
            nonce=secrets.token_hex(16),
            prev=found[n - 1].sha256 if n > 1 else None,
            derivation=derivation,
        )
        body = canonical(made)
        taken = once.create(remote, layout.claim(name, n), body)
        if taken is not None and registry.mode == "single-writer":
            _refuse_second_writer(taken, name, n, owner)
        found[n] = claims.examine(taken or body, registry, name, n, found.get(n - 1))
        if known is not None:
            known[n] = found[n]
        if taken is None:
            return _relied_on(remote, registry, made, found[n], body, begins=first is None)
    raise errors.ConflictError(
        f"no number could be claimed for {name}",
        why=f"{ATTEMPTS} numbers in a row went to others",
        fix="look who else publishes under this name, then repeat",
    )


def made_before(
    remote: Remote, registry: types.Registry, name: str, derivation: Callable[[], str], *, again: bool = False
) -> Claimed | None:
    """Return the committed version that was made of the same things in the same way, None where there is none.

    None also while one is being published: whoever makes it anew may be the one who goes on there. Nothing is claimed.
    `derivation` may take its time: it is only asked for where the name has versions that were made of others.
    Raises WithdrawnContentError unless `again`, IntegrityError for a damaged claim or decision, NameTakenError.
    """
    repositories = commits.of(remote)
    if repositories is not None:
        return commit_claim.made_before(repositories, name, derivation, again=again)
    made = {n: known for n, known in claims.read_all(remote, registry, name).items() if known.derivation is not None}
    try:
        return _join(remote, name, made, "", derivation(), again=again) if made else None
    except errors.NotFinishedError:
        return None


def _join(
    remote: Remote, name: str, found: Mapping[int, Known], content: str, derivation: str | None, *, again: bool
) -> Claimed | None:
    """Return the claim to join, or None when there is none. Claims that were given up do not count.

    One that is committed comes before one that is open: whoever claimed anew took that one for given up.
    """
    withdrawn: types.Claim | None = None
    waiting: types.Claim | None = None
    begun: Claimed | None = None
    done: Claimed | None = None
    for known in found.values():
        same = known.content == content
        if not same and (derivation is None or known.derivation != derivation):
            continue
        claim, _ = claims.load(remote, name, known)
        if once.look(remote, layout.withdrawn(name, known.n)) is not None:  # first: its decision may be damaged
            withdrawn = claim
            continue
        state, _ = claims.state(remote, claim)
        if state == "void":
            continue
        if same and state == "committed":
            return _claimed(remote, claim, known.sha256, joined=True, committed=True)
        if same:
            begun = begun or _claimed(remote, claim, known.sha256, joined=True, committed=False)
        elif state == "committed":
            done = done or _claimed(remote, claim, known.sha256, joined=True, committed=True)
        else:
            waiting = claim
    if begun is not None or done is not None:
        return begun or done
    if waiting is not None:
        raise errors.NotFinishedError(
            f"{name}@v{waiting.n} is being published by {shown(waiting.owner.host)}",
            why="it is made from the same things in the same way; a second one would only differ by rounding",
            fix="wait for it; if its publisher is dead, the number is given up after seven days",
            n=waiting.n,
            host=waiting.owner.host,
        )
    if withdrawn is not None and not again:
        raise errors.WithdrawnContentError(
            f"this content was withdrawn as {name}@v{withdrawn.n}",
            why="what was withdrawn does not come back by itself",
            fix="publish it under a new number with: registry push --again",
            option="again",
            n=withdrawn.n,
        )
    return None


def _claimed(remote: Remote, claim: types.Claim, sha256: str, *, joined: bool, committed: bool) -> Claimed:
    stored = remote.stat(layout.claim(claim.name, claim.n)).modified
    return Claimed(claim=claim, sha256=sha256, joined=joined, committed=committed, stored_at=spelled(stored))


def _refuse_second_writer(taken: bytes, name: str, n: int, owner: types.Owner) -> None:
    """Stop when somebody else took a number where only one may write: the store cannot keep two apart."""
    document = parse_json(taken, layout.claim(name, n))
    other = document.get("owner") if isinstance(document, dict) else None
    if not isinstance(other, dict) or other.get("daemon") != owner.daemon:
        host = other.get("host") if isinstance(other, dict) else None
        raise errors.SplitWritersError(
            f"{name}@v{n} was claimed by a second writer",
            why=f"{shown(str(host or 'somebody'))} writes to a registry that can only bear one writer",
            fix=f"stop one of the two, then look at each version since: registry verify {name}@v{n}",
            n=n,
        )


def _relied_on(
    remote: Remote, registry: types.Registry, made: types.Claim, known: Known, body: bytes, *, begins: bool
) -> Claimed:
    """Read a claim of ours back before anything is built on it; `begins` says that it is the name's first to count."""
    key = layout.claim(made.name, made.n)
    if remote.read(key) != body:
        raise errors.IntegrityError(
            f"{key} is not what was written",
            why=f"{shown(remote.url)} confirmed other bytes than it holds",
            fix="do not publish there until the store is repaired",
        )
    if begins:
        _yield_to_older(remote, registry, made)
    return _claimed(remote, made, known.sha256, joined=False, committed=False)


def _rivals(remote: Remote, name: str) -> dict[str, float]:
    """Return the names that differ from this one by case alone, with the store time of their first claims.

    Claims that were given up do not count: a name of nothing but those is free again.
    """
    folded = name.casefold()
    found = {}
    for other in remote.folders(layout.MODELS):
        if other == name or other.casefold() != folded:
            continue
        for stored in remote.list(layout.claims(other)):
            place = layout.claim_number(stored.key)
            if place is not None and not is_void(remote, *place):
                found[other] = stored.modified
                break
    return found


def _refuse_lost(remote: Remote, name: str, n: int) -> None:
    """Refuse a number that was decided: its claim was lost, and another one would keep the right one away for ever."""
    try:
        remote.stat(layout.manifest(name, n))
    except errors.MissingError:
        return
    key = layout.claim(name, n)
    raise errors.IntegrityError(
        f"{key} is missing", why=f"{layout.manifest(name, n)} is there, which decides it", fix=claims.from_copy(key)
    )


def _refuse_collision(remote: Remote, name: str) -> None:
    for other in _rivals(remote, name):
        raise _collision(name, other)


def _yield_to_older(remote: Remote, registry: types.Registry, made: types.Claim) -> None:
    """Give our claim up when another spelling was claimed meanwhile; both look, so never do both go on."""
    rivals = _rivals(remote, made.name)
    if not rivals:
        return
    ours = remote.stat(layout.claim(made.name, made.n)).modified
    for other, theirs in rivals.items():
        if ours >= theirs:
            reason = f"{other} has the same spelling but for case"
            void(remote, registry, made.name, made.n, reason=reason, by=made.owner.host)
            raise _collision(made.name, other)


def _collision(name: str, other: str) -> errors.NameTakenError:
    return errors.NameTakenError(
        f"the name {name} is taken by {other}",
        why="names are unique without case",
        fix=f"publish as {other}, or choose another name",
        other=other,
    )


def _refuse_stranger(remote: Remote, name: str, first: Known, manifest: Manifest, *, share: bool) -> None:
    """Refuse a second kind under one name, and a second run unless the name is shared."""
    began = parse(claims.load(remote, name, first)[0].manifest.encode(), layout.claim(name, first.n))
    if began.kind != manifest.kind:
        suffix = types.KIND_SUFFIX.get(manifest.kind, "-merged")
        raise errors.NameTakenError(
            f"{name} holds {began.kind} versions",
            why=f"a name has one kind for ever, and this is of kind {manifest.kind}",
            fix=f"publish it as {name}{suffix}",
            kind=began.kind,
        )
    ours, theirs = manifest.facts.provenance.run, began.facts.provenance.run
    if not share and not same_place(ours.id, theirs.id):
        raise errors.NameTakenError(
            f"{name} belongs to the run {shown(theirs.project)}/{shown(theirs.name)}",
            why=f"{shown(ours.project)}/{shown(ours.name)} is another run",
            fix="give this run another name, or share this one: share = true in the watch rule, registry push --share",
            option="share",
            run=theirs.id,
        )
