"""The Hub as a remote: `hf://organisation`, one repository per name, one commit and one tag `v7` per version.

For readers it answers for the keys of every remote (`layout.py`): a version's files are those of the commit that its
tag names, a claim is put together from weighbridge.json and the manifest beside it, tag moves, withdrawals and notes
lie in the ledger on main. There is no feed; `catalogue` takes its place. Writers use what `commits.py` describes.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import errors, layout, stages, types
from weighbridge.registry.refs import check_key, shown
from weighbridge.registry.remotes.commits import Change, Held, Listing, Stale, Standing, Writer
from weighbridge.registry.remotes.hub import locks, numbers
from weighbridge.registry.remotes.hub.child import GROUP, Child, copied
from weighbridge.registry.remotes.hub.client import Line, Patience, warm_up
from weighbridge.registry.remotes.hub.discovery import PARALLEL, listing
from weighbridge.registry.remotes.hub.keys import Place, place_of
from weighbridge.registry.remotes.hub.models import Models
from weighbridge.registry.remotes.hub.objects import marker, under
from weighbridge.registry.remotes.hub.preflight import Limits, Preflight
from weighbridge.registry.remotes.hub.repositories import Repositories
from weighbridge.registry.remotes.hub.tagging import follow
from weighbridge.registry.remotes.hub.versions import Version, Versions
from weighbridge.registry.remotes.hub.writer import ChildWriter, LocalWriter
from weighbridge.registry.remotes.ledger import LEDGER_FILE, Ledger, encode, parse_ledger
from weighbridge.registry.remotes.protocol import Denied, Progress, Properties, Stat
from weighbridge.registry.times import seconds, spelled

ATTEMPTS: Final = 20
"""Commits of others between our look and our commit, after which somebody must be told."""


def open_hub(url: str, endpoint: str | None = None, settings: RemoteSettings | None = None) -> "HubRemote":
    """Return the remote of `hf://organisation`. Raises UsageError for a URL with more or less in it."""
    owner = url.removeprefix("hf://").strip("/")
    if not owner or "/" in owner or not owner.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise errors.UsageError(
            f"'{shown(url)}' is no organisation of the Hub",
            why="versions go into repositories of their own names",
            fix="write hf://ORGANISATION",
        )
    return HubRemote(owner, endpoint=endpoint, private=settings is None or settings.private)


class HubRemote:
    """The model repositories of one organisation or user; safe to use from several threads."""

    def __init__(
        self,
        owner: str,
        *,
        endpoint: str | None = None,
        private: bool = True,
        environ: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        limits: Limits | None = None,
        inline: int = GROUP,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the organisation; `private` says how repositories are made, those that are there keep what they are.

        `inline` is how many bytes may be sent by LFS without a child process.
        """
        self.line = Line(endpoint, environ=environ, patience=patience, sleep=sleep)
        self.repositories = Repositories(self.line, owner)
        self.models = Models(self.line)
        self.private = private
        self._owner = owner
        self._inline = inline
        self._preflight = Preflight(self.line, limits or Limits())
        self._versions = Versions(self.line, self.repositories, self.ledger)
        self._writers: dict[tuple[str, str], ChildWriter | LocalWriter] = {}
        self._ledgers: dict[tuple[str, str], Ledger | None] = {}
        self._spare: Child | None = None
        self._lock = threading.Lock()
        self._sleep = sleep

    # -------------------------------------------------------------------------------------------------- like any remote

    @property
    def url(self) -> str:
        """The URL as configured."""
        return f"hf://{self._owner}"

    @property
    def properties(self) -> Properties:
        """Guarded commits; the Hub reports the sha256 of every stored object."""
        return Properties(
            conditional_create=True, server_sha256=True, durable_ack=True, parallel=PARALLEL, commits=True
        )

    def create(self, key: str, body: bytes) -> None:
        """Store a tag move, a withdrawal or a note: one guarded commit that adds it to the ledger of its name.

        Raises ExistsError when the key is taken, UsageError for any other key: versions come by whole commits.
        """
        place = place_of(key)
        if place.kind != "shared":
            raise errors.UsageError(
                f"the Hub keeps versions, not {shown(key)}", why="a version is one commit there", fix="publish it"
            )
        with self.locked(place.name):
            self._note(place, body)
        follow(self.repositories, self._versions.commit_of, place, body)

    def upload(
        self,
        key: str,
        source: Path,
        size: int,
        sha256: str,
        progress: Progress | None = None,
        *,
        parts: Sequence[bytes] = (),
    ) -> None:
        """Raise UsageError: a file alone is no version."""
        del source, size, sha256, progress, parts
        raise errors.UsageError(
            f"the Hub keeps versions, not {shown(check_key(key))}", why="a version is one commit there"
        )

    def read(self, key: str) -> bytes:
        """Return a small object whole, as it is now. Raises MissingError."""
        place = place_of(key)
        if place.kind == "marker":
            return self._marker()
        if place.kind == "shared":
            ledger = self.ledger(place.name)
            noted = ledger.objects.get(place.path) if ledger else None
            if noted is None:
                raise self._missing(key)
            return noted.body.encode()
        if place.kind == "claim":
            return self._version(key, place).claim()
        if place.kind == "file":
            version = self._version(key, place)
            if place.path == "manifest.json":
                return version.decision()
            if place.path not in version.files:
                raise self._missing(key)
            return self.line.read(self.repositories.id(place.name), version.commit, place.path)
        raise self._missing(key)

    def fetch(self, key: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of an object from `offset` on. Raises MissingError."""
        place = place_of(key)
        if place.kind == "file" and place.path != "manifest.json":
            version = self._version(key, place)
            held = version.files.get(place.path)
            if held is None:
                raise self._missing(key)
            if offset >= held.size:
                return
            yield from self.line.fetch(self.repositories.id(place.name), version.commit, place.path, offset)
            return
        body = self.read(key)
        if offset < len(body):
            yield body[offset:]

    def stat(self, key: str) -> Stat:
        """Return what the Hub knows of one object. Raises MissingError."""
        place = place_of(key)
        if place.kind == "file":
            version = self._version(key, place)
            held = version.files.get(place.path)
            if held is None:
                raise self._missing(key)
            return Stat(key, held.size, held.sha256, version.stored)
        if place.kind == "claim":
            version = self._version(key, place)
            return Stat(key, len(version.claim()), None, version.stored)
        if place.kind == "shared":
            ledger = self.ledger(place.name)
            noted = ledger.objects.get(place.path) if ledger else None
            if noted is None:
                raise self._missing(key)
            return Stat(key, len(noted.body.encode()), None, seconds(noted.at) or 0.0)
        return Stat(key, len(self.read(key)), None, 0.0)

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects under `prefix` in UTF-8 order, those after the key `after` only.

        Only whole folders are asked for. The sizes of claims are not known to a listing, and are told as 0.
        """
        start = None if after is None else after.encode()
        found = sorted(self._under(prefix), key=lambda stat: stat.key.encode())
        yield from itertools.islice((s for s in found if start is None or s.key.encode() > start), limit)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the sub-folders of `prefix`, sorted."""
        if prefix == layout.MODELS:
            yield from sorted(self.repositories.all(), key=lambda name: f"{name}/".encode())
            return
        keys = (stat.key.removeprefix(prefix) for stat in self._under(prefix))
        yield from sorted({key.partition("/")[0] for key in keys if "/" in key}, key=lambda name: f"{name}/".encode())

    def learn(self) -> None:
        """There is nothing to find out."""

    def delete(self, key: str) -> None:
        """Raise UsageError: the Hub keeps the history of a repository."""
        raise errors.UsageError(
            f"{shown(check_key(key))} cannot be removed from the Hub",
            why="a commit stays in its repository's history",
            fix="delete the repository on its settings page, if all of it may go",
        )

    def now(self) -> float:
        """Return the Hub's clock."""
        return self.line.now()

    def stage(self, name: str, nonce: str) -> Path | None:
        """Return None: whoever publishes stages in a folder of its own."""
        del name, nonce
        return None

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Remove what commands staged for the Hub and left behind, when nothing changed in it for so many seconds."""
        del denied  # it is our own
        return stages.sweep(stages.root(self.line.environ), older_than)

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each copy that `sweep` would remove."""
        yield from map(stages.size_of, stages.leftovers(stages.root(self.line.environ), older_than))

    def close(self) -> None:
        """End all uploads."""
        with self._lock:
            writers, self._writers = self._writers, {}
            spare, self._spare = self._spare, None
        for writer in writers.values():
            writer.close()
        if spare is not None:
            spare.end()

    # ------------------------------------------------------------------------------------------------- with its commits

    def look(self, name: str, *, whole: bool = True) -> Standing:
        """Return the standing of a name now; without `whole` no files and no card."""
        past = numbers.highest(*self._own("numbers", f"{self._owner}/{name}"))  # before: the Hub must know what we know
        commit = self.head(name)
        if commit is None:
            return Standing(name=name, commit=None, files=[], ledger=None, tags={}, past=past)
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="look") as pool:
            refs = pool.submit(self.repositories.refs, name)
            ledger = pool.submit(self._ledger_at, name, commit)
            files = pool.submit(self.repositories.tree, name, commit) if whole else None
            card = pool.submit(self._card_at, name, commit) if whole else None
            tags = refs.result().numbers
            told = ledger.result()
            if told is None:
                told = self._versions.recover(name, tags)
            if told is not None and told.versions:
                self._note_number(name, past, told.versions[-1].n)
            return Standing(
                name=name,
                commit=commit,
                files=files.result() if files else [],
                ledger=told,
                tags=tags,
                card=card.result() if card else None,
                past=past,
            )

    def head(self, name: str) -> str | None:
        """Return the commit that main stands at now; None where there is no repository."""
        return self.repositories.head(name)

    def begin(self, name: str, *, exists: bool) -> None:
        """Make sure that we may write there, and make the repository where there is none."""
        repo = self.repositories.id(name)
        self._preflight.may_write(repo, exists=exists)
        if not exists:
            self.repositories.create(name, private=self.private)

    def check(self, name: str, files: Sequence[types.FileEntry], card: bytes) -> None:
        """Raise for what is known to fail before a byte is sent: limits, card, and how it is to be sent."""
        repo = self.repositories.id(name)
        self._preflight.size(repo, files)
        self._preflight.card(repo, card)
        self._preflight.transport(repo)

    def locked(self, name: str) -> AbstractContextManager[bool]:
        """Hold the one lock of this machine on a repository, and tell whether it was free."""
        return locks.held(*self._own("locks", self.repositories.id(name)))

    def writer(self, name: str, key: str, size: int) -> Writer:
        """Return the writer kept under a key, or a new one; a child process starts while we go on.

        A little by LFS is sent from here: each of its requests has a time limit, and starting a child costs more.
        """
        repo = self.repositories.id(name)
        with self._lock:
            found = self._writers.get((name, key))
            if found is not None and found.repo != repo:
                found.close()  # it was renamed since this one was begun
                found = None
            if found is None:
                if self._spare is None and size <= self._inline and self._preflight.known_transport() == "lfs":
                    found = LocalWriter(self.line, repo)
                else:
                    spare, self._spare = self._spare, None
                    found = ChildWriter(self.line, repo, lambda: self._preflight.transport(repo), spare)
                self._writers[name, key] = found
        if isinstance(found, ChildWriter):
            found.begin()
        return found

    def ready(self) -> None:
        """Begin the child that sends what is sent next; it loads its part of the library meanwhile.

        What both need is loaded before, once.
        """
        warm_up(self.line.patience)
        with self._lock:
            self._spare = self._spare or copied()

    def edit(self, name: str, change: Change) -> str:
        """Make a commit of small files alone and return its id."""
        return self.repositories.edit(name, change)

    def release(self, name: str, key: str) -> None:
        """End a writer that is not needed any more."""
        with self._lock:
            found = self._writers.pop((name, key), None)
        if found is not None:
            found.close()

    def commit_of(self, name: str, n: int) -> str | None:
        """Return the commit of a version."""
        return self._versions.commit_of(name, n)

    def know(self, name: str, n: int, commit: str) -> None:
        """Take note of the commit of a version, as the Hub just told whoever made it."""
        self._versions.know(name, n, commit)
        self._note_number(name, 0, n)

    def facts_at(self, name: str, commit: str, paths: Sequence[str]) -> dict[str, Held]:
        """Return size and checksum of files of a commit, as the Hub reports them now."""
        return self.repositories.facts(name, commit, paths)

    def read_at(self, name: str, commit: str, path: str) -> bytes:
        """Return a small file of a commit. Raises MissingError."""
        return self.line.read(self.repositories.id(name), commit, path)

    def tag(self, name: str, n: int, commit: str) -> None:
        """Give a commit its tag v<n>. Raises DivergedError when the tag stands elsewhere."""
        try:
            self.repositories.tag(name, f"v{n}", commit)
        except (errors.ExistsError, errors.OutcomeUnknownError) as error:
            at = self.repositories.refs(name).tags.get(f"v{n}")
            if at == commit:
                return
            if at is None:
                raise
            raise errors.DivergedError(
                f"the tag v{n} of {self.repositories.id(name)} stands at another commit",
                why=f"at {at[:12]}, the version is {commit[:12]}",
                fix="find out who set it; a tag v<number> is never moved",
            ) from error

    def branch(self, name: str, branch: str, start: str) -> None:
        """Make a branch that starts at a commit; one that is there is left."""
        with suppress(errors.ExistsError):
            self.repositories.branch(name, branch, start)

    def branch_head(self, name: str, branch: str) -> str | None:
        """Return the commit that a branch stands at."""
        return self.repositories.refs(name).branches.get(branch)

    def unbranch(self, name: str, branch: str) -> None:
        """Remove a branch."""
        self.repositories.unbranch(name, branch)

    def may_write(self, name: str | None) -> str:
        """Say what the token may do and how large files would travel. Raises DeniedError, UnreachableError."""
        role = self._preflight.role()
        repo = self.repositories.id(name) if name else ""
        self._preflight.may_write(repo or self._owner, exists=bool(repo))
        if not repo:  # the Hub itself was asked about one that is there
            self._preflight.owns(self._owner)
        way = self._preflight.transport(repo) if repo else self._preflight.known_transport() or "xet or LFS"
        return f"token role {role}, large files by {way}"

    def hidden(self) -> str:
        """Say what is not shown: the Hub answers about a private repository as about one that is not there."""
        if self.line.token is None:
            return "what is private is not shown without a token: hf auth login, or set HF_TOKEN"
        return "what is private is shown to its members only: hf auth whoami"

    def called(self, name: str) -> str:
        """Return what the repository of a name is called."""
        return self.repositories.called(name)

    def model(self, repo: str, revision: str | None) -> types.ModelSeen | types.ModelUnseen:
        """Return what the Hub says of any model, an adapter's base for one."""
        return self.models.ask(repo, revision)

    def catalogue(self, known: Mapping[str, str]) -> Listing:
        """Return the names with their heads, and the ledgers that are news: one request, and one for each of those."""
        return listing(self.repositories, self._ledger_at, known)

    def ledger(self, name: str) -> Ledger | None:
        """Return the ledger at the head of main now; None where there is none."""
        commit = self.repositories.head(name)
        return None if commit is None else self._ledger_at(name, commit)

    # ------------------------------------------------------------------------------------------------------- the inside

    def _note(self, place: Place, body: bytes) -> None:
        """Add an object to the ledger of a name, on top of whatever is there."""
        stale = Stale(f"nothing can be said of {place.name}")
        standing = self.look(place.name, whole=False)
        for attempt in range(ATTEMPTS):
            if standing.commit is None or standing.ledger is None:
                raise errors.NotFoundError(
                    f"there is no version of {place.name}", fix=f"registry ls --remote {self.url}"
                )
            if place.path in standing.ledger.objects:
                raise errors.ExistsError(
                    f"{shown(place.path)} of {place.name} is taken", why="its ledger holds an object of that key"
                )
            change = Change(
                parent=standing.commit,
                title=place.path.removesuffix(".json"),
                message="",
                small={LEDGER_FILE: encode(standing.ledger.noting(place.path, body, spelled(self.now())))},
            )
            try:
                self.edit(place.name, change)
            except errors.StaleHeadError:
                if attempt + 1 == ATTEMPTS:
                    raise
                self._sleep(0.05 * (attempt + 1) * (0.5 + secrets.randbelow(100) / 100))
                fresh = self.look(place.name, whole=False)
                self._sleep(stale.pause(standing.commit, fresh.commit))
                standing = fresh
            else:
                return

    def _ledger_at(self, name: str, commit: str) -> Ledger | None:
        """Return the ledger of a commit, which never changes. Raises IntegrityError."""
        with self._lock:
            if (name, commit) in self._ledgers:
                return self._ledgers[name, commit]
        repo = self.repositories.id(name)
        try:
            found: Ledger | None = parse_ledger(self.line.read(repo, commit, LEDGER_FILE), f"{LEDGER_FILE} of {repo}")
        except errors.MissingError:
            found = None
        with self._lock:
            self._ledgers = {k: v for k, v in self._ledgers.items() if k[0] != name} | {(name, commit): found}
        return found

    def _card_at(self, name: str, commit: str) -> bytes | None:
        try:
            return self.line.read(self.repositories.id(name), commit, "README.md")
        except errors.MissingError:
            return None

    def _note_number(self, name: str, past: int, n: int) -> None:
        """Remember the highest number of a name, where it is more than what is remembered."""
        place = self._own("numbers", f"{self._owner}/{name}")
        if n > (past or numbers.highest(*place)):
            numbers.note(*place, n)

    def _own(self, folder: str, repo: str) -> tuple[Path, str]:
        """Return a folder of this machine's notes, and what a repository is called in it."""
        return Path(cache_dir(self.line.environ), folder), f"{self.line.host} {repo}".casefold()

    def _version(self, key: str, place: Place) -> Version:
        found = self._versions.get(place.name, place.n)
        if found is None:
            raise self._missing(key)
        return found

    def _missing(self, key: str) -> errors.MissingError:
        return errors.MissingError(f"{shown(key)} is not there", why=f"{self.url} holds nothing under this key")

    def _marker(self) -> bytes:
        return marker(self.line.endpoint, self._owner)

    def _under(self, prefix: str) -> Iterator[Stat]:
        return under(prefix, self._marker(), self.repositories, self._versions, self.ledger)
