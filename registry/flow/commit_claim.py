"""Planning a number on a remote whose transaction is a commit: the version that has the content, or the next number.

Nothing is written: the claim becomes true with the commit (`commit_publish`).
"""

import secrets
import uuid
from collections.abc import Callable
from typing import Final

from weighbridge.adapters.run_place import same_place
from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow.claims import Claimed, decode
from weighbridge.registry.flow.commit_publish import foreign, tag
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, canonical
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.commits import CommitRemote, Standing
from weighbridge.registry.remotes.ledger import Told
from weighbridge.registry.times import spelled

_BY_NAME: Final = 5
"""The version of a uuid that is made from a name."""


def claim(
    remote: CommitRemote,
    registry: types.Registry,
    name: str,
    manifest: Manifest,
    owner: types.Owner,
    *,
    derivation: str | None = None,
    again: bool = False,
    share: bool = True,
    adopt: bool = False,
) -> Claimed:
    """Return the claim of a content: that of the version that has it, or one that is to be committed with it.

    `adopt` takes over a repository that holds files of somebody else, that was this one's before the organisation was
    renamed, or that has lost versions which this machine has seen: numbers go on after those. Raises NameTakenError,
    WithdrawnContentError.
    """
    check_writer(registry)
    standing = remote.look(name, whole=False)
    _refuse_others(remote, standing, registry, manifest, share=share, adopt=adopt)
    found = _join(remote, standing, manifest.content, derivation, again=again)
    if found is not None:
        return found
    if standing.last < standing.past and not adopt:
        raise _forgotten(standing)
    last = standing.ledger.last() if standing.ledger else None
    n = standing.next
    made = types.Claim(
        schema=types.SCHEMA_CLAIM,
        registry=registry.registry,
        name=name,
        n=n,
        content=manifest.content,
        manifest=manifest.stored.decode(),
        owner=owner,
        nonce=secrets.token_hex(16),
        prev=last.claim if last else None,
        derivation=derivation,
    )
    return Claimed(
        claim=made,
        sha256=sha256_bytes(canonical(made)),
        joined=False,
        committed=False,
        stored_at=spelled(remote.now()),
    )


def made_before(remote: CommitRemote, name: str, derivation: Callable[[], str], *, again: bool) -> Claimed | None:
    """Return the version that was made of the same things in the same way. Raises WithdrawnContentError."""
    standing = remote.look(name, whole=False)
    if standing.ledger is None or not any(told.derivation for told in standing.ledger.versions):
        return None
    return _join(remote, standing, "", derivation(), again=again)


def _refuse_others(
    remote: CommitRemote,
    standing: Standing,
    registry: types.Registry,
    manifest: Manifest,
    *,
    share: bool,
    adopt: bool,
) -> None:
    """Refuse a name that belongs to another registry, kind or run, or a repository that is not ours."""
    name, ledger = standing.name, standing.ledger
    if ledger is None:
        if standing.commit is not None and not adopt:
            found = foreign(remote.look(name))
            if found:
                raise errors.NameTakenError(
                    f"the repository of {name} holds files of somebody else",
                    why=f"{shown(found[0])} is there, and no version of ours",
                    fix="choose another name, or take it over (its history stays) with: registry push --adopt",
                    option="adopt",
                    foreign=found,
                )
        return
    if ledger.name != name:
        raise errors.NameTakenError(
            f"the repository {name} holds the versions of {shown(ledger.name)}",
            why="it was renamed, and versions keep their name",
            fix=f"publish as {shown(ledger.name)}, or choose another name",
        )
    if ledger.registry != registry.registry and not (adopt and _from_an_address(ledger.registry)):
        raise errors.NameTakenError(
            f"{name} belongs to another registry",
            why=f"its versions come from registry {shown(ledger.registry)}, this one is {registry.registry}",
            fix="publish to the home of the name, or choose another name"
            + ("; where only the organisation was renamed, or the endpoint is another: registry push --adopt"
               if _from_an_address(ledger.registry) else ""),
            option="adopt",
        )  # fmt: skip
    first = next((told for told in ledger.versions if told.void is None), None)
    if first is None:
        return
    if first.row.kind != manifest.kind:
        raise errors.NameTakenError(
            f"{name} holds {first.row.kind} versions",
            why=f"a name has one kind for ever, and this is of kind {manifest.kind}",
            fix=f"publish it as {name}{types.KIND_SUFFIX.get(manifest.kind, '-merged')}",
            kind=first.row.kind,
        )
    ours = manifest.facts.provenance.run
    if not share and not same_place(first.row.run_id or "", ours.id):
        raise errors.NameTakenError(
            f"{name} belongs to the run {shown(first.row.run or 'of somebody else')}",
            why=f"{shown(ours.project)}/{shown(ours.name)} is another run",
            fix="give this run another name, or share this one: share = true in the watch rule, registry push --share",
            option="share",
            run=first.row.run_id,
        )


def _forgotten(standing: Standing) -> errors.NameTakenError:
    """Return what is said of a repository that has lost versions, or is gone, since this machine looked last."""
    name, past = standing.name, standing.past
    seen = "v1" if past == 1 else f"v1 to v{past}"
    if standing.commit is None:
        what, why = f"the repository of {name} is gone", "it was deleted, or this token may not see it any more"
    else:
        what, why = f"the repository of {name} has lost versions", "it was deleted and made anew, emptied, or set back"
    return errors.NameTakenError(
        what,
        why=f"{why}; {seen} were published there, and a number is never given out twice",
        fix=f"see who did that; to go on there with v{past + 1}: registry push --adopt",
        option="adopt",
        last=past,
    )


def _from_an_address(registry: str) -> bool:
    """Tell whether a registry is a home on a Hub, whose uuid follows from its address and changes with it.

    Others have a random one: a repository with their versions is a mirror, and stays theirs.
    """
    try:
        return uuid.UUID(registry).version == _BY_NAME
    except ValueError:
        return False


def _join(
    remote: CommitRemote, standing: Standing, content: str, derivation: str | None, *, again: bool
) -> Claimed | None:
    if standing.ledger is None:
        return None
    withdrawn: Told | None = None
    for told in standing.ledger.versions:
        same = told.content == content or (derivation is not None and told.derivation == derivation)
        if not same or told.void is not None:
            continue
        if standing.ledger.withdrawn(told.n):
            withdrawn = told
            continue
        if told.n not in standing.tags:
            tag(remote, standing.name, told.n)  # whoever made the commit died before the tag
        return _joined(remote, standing.name, told)
    if withdrawn is not None and not again:
        raise errors.WithdrawnContentError(
            f"this content was withdrawn as {standing.name}@v{withdrawn.n}",
            why="what was withdrawn does not come back by itself",
            fix="publish it under a new number with: registry push --again",
            option="again",
            n=withdrawn.n,
        )
    return None


def _joined(remote: CommitRemote, name: str, told: Told) -> Claimed:
    stored = remote.read(layout.claim(name, told.n))
    return Claimed(
        claim=decode(stored, layout.claim(name, told.n)),
        sha256=told.claim,
        joined=True,
        committed=True,
        stored_at=told.stored_at,
    )
