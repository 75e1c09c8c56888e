"""Putting back what a committed version has lost and what follows from the rest: nothing that lies there is touched.

The decision is the text in its claim, so it can be made again once every file was read. Card and history follow from
the manifest and the notes; what people wrote into the README of the source, and into no note, does not come back.
"""

import hashlib
from typing import Final

from weighbridge.registry import errors, layout, types
from weighbridge.registry.flow import feed, once, papers
from weighbridge.registry.flow.claims import Claimed, Told, decode, from_copy, judge, manifest_of, standing, twin
from weighbridge.registry.flow.decide import decide, void
from weighbridge.registry.flow.decision import withdrawn
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.publish import version_entry
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Progress, Remote
from weighbridge.registry.times import spelled

_NOTHING: Final = "nothing was put back"


def mend(
    remote: Remote, remote_name: str, registry: types.Registry, name: str, n: int,
    *, told: Told, progress: Progress | None = None,
) -> list[str]:  # fmt: skip
    """Put back what a version lacks of decision, card and history, tell the team, and return the keys.

    Of a number that the team was told to be given up, that alone is put back. Nothing is done where the remote's
    versions are commits, which lose nothing. Raises NotFoundError for a number that nobody claimed, WithdrawnError,
    ConflictError where another number has its content, and IntegrityError, naming the object, where claim, decision or
    a file is damaged, and where the claim is not the one that the team was told of.
    """
    check_writer(registry)
    if remote.properties.commits:
        return []
    if told.given_up:
        return _given_up(remote, registry, name, n)
    claimed = _claimed(remote, name, n, told)
    mark = once.look(remote, layout.withdrawn(name, n))
    if mark is not None or told.withdrawn:
        raise withdrawn(name, n, mark)
    manifest = manifest_of(claimed)
    stored = once.look(remote, layout.manifest(name, n))
    if stored is not None and judge(stored, claimed.claim)[0] == "void":
        return []
    rendered = papers.render(remote, manifest, name, n)
    lost = {path: body for path, body in rendered.items() if _lacks(remote, name, n, path)}
    if stored is None:
        _refuse_twin(remote, claimed.claim)
        for file in manifest.files:
            _prove(remote, name, n, file, progress)
    done = []
    for path, body in lost.items():
        if once.create(remote, layout.version(name, n, path), body) is None:
            done.append(layout.version(name, n, path))
    if stored is None:
        decide(remote, remote_name, claimed, {file.path: "sha256-read" for file in manifest.files})
        done.append(layout.manifest(name, n))
    if done:
        feed.announce(remote, registry, [version_entry(remote, claimed)])
    return done


def _given_up(remote: Remote, registry: types.Registry, name: str, n: int) -> list[str]:
    key = layout.manifest(name, n)
    if once.look(remote, key) is not None:
        return []
    void(remote, registry, name, n, reason="it was given up before, which was lost", by="registry verify --mend")
    return [key]


def _refuse_twin(remote: Remote, claim: types.Claim) -> None:
    """Refuse a second number for a content: whoever had published it meanwhile took this one for given up."""
    other = twin(remote, claim)
    if other is not None:
        raise errors.ConflictError(
            f"the content of {claim.name}@v{claim.n} is {claim.name}@v{other} as well",
            why=f"one content has one number; {_NOTHING}",
            fix=f"use {claim.name}@v{other}; v{claim.n} stays unfinished",
        )


def _claimed(remote: Remote, name: str, n: int, told: Told) -> Claimed:
    key = layout.claim(name, n)
    stored = once.look(remote, key)
    if stored is None:
        raise errors.NotFoundError(f"there is no {name}@v{n}", why=_NOTHING, fix=f"registry ls {name} --all")
    try:
        claim = decode(stored, key)
    except errors.IntegrityError as error:
        error.fix = error.fix or from_copy(key)
        raise
    if standing(remote, name, n, stored, told) == "wrong":
        raise errors.IntegrityError(
            f"{key} is damaged",
            why=f"it is not the claim that was announced, or that the next one follows; {_NOTHING}",
            fix=from_copy(key),
        )
    stored_at = spelled(remote.stat(key).modified)
    return Claimed(claim=claim, sha256=sha256_bytes(stored), joined=True, committed=False, stored_at=stored_at)


def _lacks(remote: Remote, name: str, n: int, path: str) -> bool:
    return once.look(remote, layout.version(name, n, path)) is None


def _prove(remote: Remote, name: str, n: int, file: types.FileEntry, progress: Progress | None) -> None:
    """Read a file and raise IntegrityError unless it is what its record says: a decision vouches for it."""
    digest = hashlib.sha256()
    key = layout.version(name, n, file.path)
    try:
        for chunk in remote.fetch(key):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    except errors.MissingError:
        why = f"{shown(key)} is missing as well; {_NOTHING}"
    else:
        if digest.hexdigest() == file.sha256:
            return
        why = f"{shown(key)} holds other bytes than its record says; {_NOTHING}"
    raise errors.IntegrityError(
        f"the decision of {name}@v{n} is missing, and cannot be made again",
        why=why,
        fix=f"registry push FOLDER --name {name}, with the folder it was published from, puts back what is missing",
    )
