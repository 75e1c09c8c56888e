"""Publishing to a remote whose transaction is a commit: claim and decision are one guarded commit.

The number is only an intention until the commit stands: `claim` looks and plans, `upload` sends the files and makes the
commit on top of what it saw, `decide` tags it and gives the receipt. A head that moved is looked at before anything is
repeated: our content there means done, another version means a new number, a person's edit only moves the parent.
Nothing is forced, and no commit is made twice.
"""

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from weighbridge.registry import card, errors, types
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.claims import Claimed, manifest_of
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, canonical
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import ledger as ledgers
from weighbridge.registry.remotes.commits import Change, CommitRemote, Held, Sending, Stale, Standing, Writer
from weighbridge.registry.remotes.ledger import ATTRIBUTES, LEDGER_FILE, OURS, VERSION_FILE, Ledger
from weighbridge.registry.remotes.protocol import Progress, Verified

COMMITS_MAX: Final = 60
"""Commits tried while others commit too."""

LOST_MAX: Final = 4
"""Commits without an answer and without a trace."""

LOOKS: Final = (0.2, 0.8, 2.0)
"""Seconds after a lost answer at which the head is looked at again before anything is repeated."""

BELIEVED: Final = 5.0
"""Seconds for which nobody is thought to have committed, where nobody of this machine had the lock: a commit on top of
an old head is refused whole, so a wrong guess costs a request and nothing else."""

_PLAIN: Final = frozenset({ATTRIBUTES, "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", ".gitignore"})
"""Files of a repository that somebody made by hand and put nothing into yet."""

_PROOFS: Final = frozenset({"sha256-server", "sha256-read"})

Pause = Callable[[float], None]


# -------------------------------------------------------------------------------------------------------------- upload


class Job(NamedTuple):
    """One version on its way: its claim and the claim's bytes, where its files lie, and its papers.

    `given` says that another remote gave the number: it is taken as it is, and may come late.
    """

    remote: CommitRemote
    claimed: Claimed
    body: bytes
    manifest: Manifest
    bundle: Bundle
    rendered: Mapping[str, bytes]
    pause: Pause
    given: bool = False

    @property
    def name(self) -> str:
        """The name."""
        return self.claimed.claim.name

    @property
    def n(self) -> int:
        """The number."""
        return self.claimed.claim.n


class Plan(NamedTuple):
    """What one commit changes, on top of one standing."""

    change: Change
    sending: list[Sending]


def upload(
    remote: CommitRemote,
    claimed: Claimed,
    bundle: Bundle,
    rendered: Mapping[str, bytes],
    progress: Progress | None = None,
    *,
    pause: Pause = time.sleep,
) -> dict[str, str]:
    """Send the files of a claimed version, make its commit, and return the level at which each file was verified.

    Repeating is harmless: a commit that stands is found, files that are there are not sent again. Raises VoidedError
    when another version took the number meanwhile, RefusedError for what the remote would not take, before a byte is
    sent.
    """
    job = Job(remote, claimed, canonical(claimed.claim), manifest_of(claimed), bundle, rendered, pause)
    return publish(job, progress)


def publish(job: Job, progress: Progress | None = None) -> dict[str, str]:
    """Bring a version to its remote and verify it there."""
    remote, claim = job.remote, job.claimed.claim
    held = {(entry.path, entry.size, entry.sha256) for entry in job.bundle.files}
    absent = [e.path for e in job.manifest.files if (e.path, e.size, e.sha256) not in held]
    if absent:
        raise errors.IntegrityError(
            f"{shown(absent[0])} is not in the bundle", why="the claim is for another content", fix="stage it again"
        )
    try:
        seen, standing = time.monotonic(), remote.look(job.name)
        done = _landed(job, standing)
        if done is None:
            _refuse_taken(job, standing)
            # After the look: where somebody renamed the repository, what writes must know its name of now.
            writer = remote.writer(job.name, claim.content, job.manifest.size)
            remote.begin(job.name, exists=standing.commit is not None)
            remote.check(job.name, job.manifest.files, _card(job, standing))
            if standing.commit is None:
                standing = remote.look(job.name)
                _refuse_foreign(standing)
            writer.send(_plan(job, standing).sending, standing.commit or "", progress)
            done = _commit(job, writer, standing, seen)
        verified = read_back(remote, done, job.claimed, job.manifest)
    except errors.VoidedError:
        raise  # the same bytes get another number, and the writer holds them
    except errors.WeighbridgeError:
        remote.release(job.name, claim.content)
        raise
    remote.release(job.name, claim.content)
    return verified


def foreign(standing: Standing) -> list[str]:
    """Return the files of a repository that is not ours, but for what every new one has."""
    return [held.path for held in standing.files if standing.ledger is None and held.path not in _PLAIN]


def _refuse_foreign(standing: Standing) -> None:
    """Refuse a repository that somebody made and filled while we were about to make it."""
    found = foreign(standing)
    if found:
        raise errors.NameTakenError(
            f"the repository of {standing.name} holds files of somebody else",
            why=f"{shown(found[0])} was put there a moment ago",
            fix="choose another name",
        )


def _commit(job: Job, writer: Writer, standing: Standing, seen: float) -> str:
    """Make the commit and return its id, looking again whenever the head may have moved since it was `seen`."""
    remote = job.remote
    stale, lost = Stale(f"{job.name} cannot be committed"), 0
    with remote.locked(job.name) as free:
        believed = free and time.monotonic() - seen < BELIEVED
        if not believed and remote.head(job.name) != standing.commit:
            standing = remote.look(job.name)
        for attempt in range(COMMITS_MAX):
            done = _landed(job, standing)
            if done is not None:
                return done
            _refuse_taken(job, standing)
            plan = _plan(job, standing)
            try:
                writer.send(plan.sending, plan.change.parent)
                if late(job, standing):
                    return _aside(job, writer, plan.change)
                made = writer.commit(plan.change)
            except errors.StaleHeadError:
                fresh = remote.look(job.name)
                longer = stale.pause(standing.commit, fresh.commit)
                job.pause(max(longer, min(2.0, 0.05 * 1.5**attempt) * random.uniform(0.5, 1)))  # noqa: S311 - jitter
                standing = fresh
            except errors.OutcomeUnknownError:
                lost += 1
                standing = _look_for(job, standing)
                if lost >= LOST_MAX and _landed(job, standing) is None:
                    raise
            else:
                remote.know(job.name, job.n, made)
                return made
    raise errors.RetryableError(
        f"{job.name} could not be committed", why=f"{COMMITS_MAX} commits of others came first", fix="repeat it"
    )


def _look_for(job: Job, standing: Standing) -> Standing:
    """Look whether a commit without an answer arrives; a server may need a moment after it gave up on us."""
    for seconds in LOOKS:
        fresh = job.remote.look(job.name)
        if fresh.commit != standing.commit:
            return fresh
        job.pause(seconds)
    return job.remote.look(job.name)


def _landed(job: Job, standing: Standing) -> str | None:
    """Return the commit of our version when it stands already; raise VoidedError when it stands under another number.

    Another publisher's commit of the same content counts as ours: the bytes are the same.
    """
    ledger, claim = standing.ledger, job.claimed.claim
    if ledger is None:
        return None
    for told in ledger.versions:
        same = told.content == claim.content and not (job.given and told.n != claim.n)
        if not same or told.void is not None or ledger.withdrawn(told.n):
            continue
        if told.n != claim.n or told.manifest != job.manifest.digest:
            raise errors.VoidedError(
                f"{claim.name}@v{claim.n} is not needed any more",
                why=f"the same content was committed as v{told.n} meanwhile",
                fix="publish again: it joins that version",
            )
        commit = job.remote.commit_of(claim.name, told.n)
        if commit is None:
            raise errors.IntegrityError(
                f"the commit of {claim.name}@v{told.n} is not to be found",
                why="the ledger tells of it, neither a tag nor the history does",
                fix="look whether somebody rewrote the history of the repository",
            )
        return commit
    return None


def _refuse_taken(job: Job, standing: Standing) -> None:
    """Raise VoidedError unless the claim still continues what stands there."""
    claim = job.claimed.claim
    last = standing.ledger.last() if standing.ledger else None
    if not job.given and (standing.next != claim.n or claim.prev != (last.claim if last else None)):
        raise errors.VoidedError(
            f"the number v{claim.n} of {claim.name} went to somebody else",
            why=f"the next one is v{standing.next}",
            fix="publish again: the content gets a new number",
        )


def late(job: Job, standing: Standing) -> bool:
    """Tell whether a version whose number was given elsewhere comes behind a higher one."""
    last = standing.ledger.last() if standing.ledger else None
    return job.given and last is not None and last.n > job.n


def _aside(job: Job, writer: Writer, change: Change) -> str:
    """Commit a late version on a branch of its own, tag it, tell of it on main, and remove the branch."""
    remote, branch = job.remote, f"wb/v{job.n}"
    remote.unbranch(job.name, branch)
    remote.branch(job.name, branch, change.parent)
    made = writer.commit(msgspec.structs.replace(change, branch=branch))
    remote.know(job.name, job.n, made)
    remote.tag(job.name, job.n, made)
    tell(job)
    remote.unbranch(job.name, branch)
    return made


def tell(job: Job) -> None:
    """Add a version that is tagged to the ledger on main."""
    fresh = ledgers.told_of(job.body, job.claimed.stored_at or "", card=job.rendered.get("README.md"))
    rewrite(
        job.remote,
        job.name,
        f"{job.name} v{job.n} is told of",
        lambda ledger: None if ledger.version(job.n) else ledger.adding([fresh]),
    )


def _plan(job: Job, standing: Standing) -> Plan:
    """Return the commit that makes the tree exactly this version, on top of this standing."""
    claim = job.claimed.claim
    assert standing.commit is not None
    told_at = job.claimed.stored_at or ""
    text = _card(job, standing)
    before = standing.ledger or Ledger(name=claim.name, registry=claim.registry)
    before = msgspec.structs.replace(before, registry=claim.registry)  # another one's only where it was adopted
    small = {path: job.rendered[path] for path in ("training.json", "manifest.dsse.json") if path in job.rendered} | {
        "README.md": text,
        "manifest.json": job.manifest.stored,
        VERSION_FILE: ledgers.identity(job.body, told_at),
        LEDGER_FILE: ledgers.encode(before.adding([ledgers.told_of(job.body, told_at, card=text)])),
    }
    there = {held.path: held for held in standing.files}
    sending = []
    for entry in job.manifest.files:
        if _same(there.get(entry.path), entry):
            continue
        inline = job.bundle.inline.get(entry.path)
        if inline is not None:
            small[entry.path] = inline
        else:
            source = staging.ready(job.bundle, entry)
            sending.append(Sending(path=entry.path, source=str(source), size=entry.size, sha256=entry.sha256))
    wanted = {entry.path for entry in job.manifest.files} | small.keys() | OURS
    change = Change(
        parent=standing.commit,
        title=f"{claim.name} v{claim.n}",
        message=f"content {claim.content}\nmanifest sha256:{job.manifest.digest}",
        files=[one.path for one in sending],
        small=small,
        delete=sorted(there.keys() - wanted),
    )
    return Plan(change, sending)


def _same(held: Held | None, entry: types.FileEntry) -> bool:
    """Tell whether a file lies there already; only a sha256 proves it, so small files always go along."""
    return held is not None and held.size == entry.size and held.sha256 == entry.sha256


def _card(job: Job, standing: Standing) -> bytes:
    """Return the card: what people wrote on the remote since the last version is kept, their words win."""
    text = job.rendered["README.md"]
    last = standing.ledger.last() if standing.ledger else None
    if standing.card is None or (last is not None and last.card == sha256_bytes(standing.card)):
        return text
    theirs = card.split_people(standing.card)
    if not theirs.strip():
        return text
    return card.render(job.manifest, job.name, job.n, people=theirs)


# ---------------------------------------------------------------------------------------------------------- afterwards


def check(remote: CommitRemote, claimed: Claimed) -> dict[str, str]:
    """Compare the files of a version that stands with its manifest and return the levels."""
    commit = remote.commit_of(claimed.claim.name, claimed.claim.n)
    if commit is None:
        raise errors.NotFoundError(f"there is no {claimed.claim.name}@v{claimed.claim.n}", why="no commit is it")
    return read_back(remote, commit, claimed, manifest_of(claimed))


def read_back(remote: CommitRemote, commit: str, claimed: Claimed, manifest: Manifest) -> dict[str, str]:
    """Compare every file of the commit with its record and return the levels.

    Stored objects are compared by the sha256 that the remote reports, small files by reading them. A version that is
    not what was sent is given up at once, before anybody can have used it.
    """
    name = claimed.claim.name
    levels = _levels(remote, name, commit, manifest)
    wrong = [level for level in levels.values() if level not in _PROOFS]
    if wrong:
        levels = _levels(remote, name, commit, manifest)  # it may have been the look that went wrong
        wrong = [level for level in levels.values() if level not in _PROOFS]
    if wrong:
        give_up(remote, name, claimed.claim.n, wrong[0])
        raise errors.IntegrityError(
            f"{name}@v{claimed.claim.n} arrived damaged and was given up", why="; ".join(wrong[:4]), fix="publish again"
        )
    return levels


def _levels(remote: CommitRemote, name: str, commit: str, manifest: Manifest) -> dict[str, str]:
    """Return the level at which each file is what the manifest says, or the words that say what is wrong with it."""
    found = remote.facts_at(name, commit, [entry.path for entry in manifest.files])

    def one(entry: types.FileEntry) -> Verified | str:
        held = found.get(entry.path)
        if held is None:
            return f"{shown(entry.path)} is missing"
        if held.size != entry.size:
            return f"{shown(entry.path)} has {held.size} bytes, the manifest says {entry.size}"
        level: Verified = "sha256-server"
        sha256 = held.sha256
        if sha256 is None:
            level, sha256 = "sha256-read", sha256_bytes(remote.read_at(name, commit, entry.path))
        if sha256 != entry.sha256:
            return f"{shown(entry.path)} has sha256 {sha256[:12]}, the manifest says {entry.sha256[:12]}"
        return level

    with ThreadPoolExecutor(max(1, 2 * remote.properties.parallel), thread_name_prefix="read-back") as pool:
        return dict(zip((e.path for e in manifest.files), pool.map(one, manifest.files), strict=True))


def give_up(remote: CommitRemote, name: str, n: int, reason: str) -> None:
    """Mark a version as given up in the ledger, so that nobody reads it."""

    def void(ledger: Ledger) -> Ledger | None:
        told = ledger.version(n)
        if told is None or told.void is not None:
            return None
        return ledger.adding([msgspec.structs.replace(told, void=reason)])

    rewrite(remote, name, f"{name} v{n} is given up", void)


def rewrite(remote: CommitRemote, name: str, title: str, change: Callable[[Ledger], Ledger | None]) -> None:
    """Change the ledger on main by a commit of its own; `change` returns None when there is nothing to do."""
    for attempt in range(COMMITS_MAX):
        standing = remote.look(name, whole=False)
        fresh = change(standing.ledger) if standing.ledger is not None else None
        if fresh is None or standing.commit is None:
            return
        edit = Change(parent=standing.commit, title=title, message="", small={LEDGER_FILE: ledgers.encode(fresh)})
        try:
            remote.edit(name, edit)
        except (errors.StaleHeadError, errors.OutcomeUnknownError):
            if attempt + 1 == COMMITS_MAX:
                raise
        else:
            return


def decide(remote: CommitRemote, remote_name: str, claimed: Claimed, verified: Mapping[str, str]) -> types.Receipt:
    """Tag a version whose commit stands and was verified, and return the receipt. Doing it twice is harmless."""
    commit = tag(remote, claimed.claim.name, claimed.claim.n)
    return receipt(remote, remote_name, claimed, commit, verified)


def receipt(
    remote: CommitRemote,
    remote_name: str,
    claimed: Claimed,
    commit: str | None = None,
    verified: Mapping[str, str] | None = None,
) -> types.Receipt:
    """Return the receipt of a committed version. Without `verified` its files are compared by size and checksum."""
    claim, manifest = claimed.claim, manifest_of(claimed)
    commit = commit or remote.commit_of(claim.name, claim.n)
    if commit is None:
        raise errors.NotFoundError(f"there is no {claim.name}@v{claim.n}", why="no commit says that it is this version")
    if verified is None:
        verified = read_back(remote, commit, claimed, manifest)
    return types.Receipt(
        remote=remote_name,
        name=claim.name,
        n=claim.n,
        content=claim.content,
        manifest_sha256=manifest.digest,
        location=f"{remote.url}/{remote.called(claim.name)}@{commit}",
        committed_at=claimed.stored_at or "",
        verified=max(set(verified.values()), key=["sha256-server", "sha256-read", "size"].index),
        files={file.path: file.sha256 for file in manifest.files},
        joined=claimed.joined,
    )


def tag(remote: CommitRemote, name: str, n: int) -> str:
    """Give a version its tag and return its commit. Raises NotFoundError, DivergedError."""
    commit = remote.commit_of(name, n)
    if commit is None:
        raise errors.NotFoundError(f"there is no {name}@v{n}", why="no commit says that it is this version")
    remote.tag(name, n, commit)
    return commit
