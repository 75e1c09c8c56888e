"""From a number to a commit, and what that commit holds; a version never changes, so what was read is kept.

The tag v7 names the commit. Where it is missing (its publisher died before it), the history is searched. The ledger at
the head of main is the second witness: a tag that was moved is found out, and read by nobody.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from weighbridge.registry import errors
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import canonical
from weighbridge.registry.remotes.commits import Held
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.hub.repositories import Repositories
from weighbridge.registry.remotes.ledger import OURS, VERSION_FILE, Identity, Ledger, Told, parse_identity, told_of
from weighbridge.registry.times import seconds

KEPT: Final = 64
"""Versions that are remembered."""


class Version(NamedTuple):
    """A version as its commit holds it; `told` is what the ledger says of it, where it does."""

    commit: str
    identity: Identity
    manifest: bytes
    files: dict[str, Held]
    told: Told | None

    @property
    def stored(self) -> float:
        """When its claim was made, in seconds since 1970."""
        return seconds(self.identity.stored_at) or 0.0

    def claim(self) -> bytes:
        """Return the claim, as every other remote stores it. Raises IntegrityError when it was meddled with."""
        body = self.identity.claim_bytes(self.manifest)
        if self.told is not None and self.told.void is None and sha256_bytes(body) != self.told.claim:
            raise _meddled(self.identity, "its claim is not the one that the ledger tells of")
        return body

    def decision(self) -> bytes:
        """Return the manifest, or the void where the number was given up."""
        if self.told is not None and self.told.void is not None:
            return canonical({"void": self.told.void, "by": "weighbridge"})
        return self.manifest


class Versions:
    """The versions of all names of a remote."""

    def __init__(self, line: Line, repositories: Repositories, ledger: Callable[[str], Ledger | None]) -> None:
        self._line = line
        self._repositories = repositories
        self._ledger = ledger
        self._kept: dict[tuple[str, int], Version] = {}
        self._known: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()

    def get(self, name: str, n: int) -> Version | None:
        """Return a version; None when there is none. Raises IntegrityError when tag and ledger disagree."""
        with self._lock:
            kept = self._kept.get((name, n))
        if kept is not None:
            return kept
        ledger = self._ledger(name)
        told = ledger.version(n) if ledger else None
        commit, found = self._find(name, n)
        if commit is None or found is None:
            return None
        repo = self._repositories.id(name)
        manifest = self._line.read(repo, commit, "manifest.json")
        if sha256_bytes(manifest) != found.manifest:
            raise _meddled(found, "its manifest.json is not the one that weighbridge.json names")
        if told is not None and (told.content, told.manifest) != (found.content, found.manifest):
            raise _meddled(found, f"the tag v{n} does not stand at the commit that the ledger tells of")
        files = {held.path: held for held in self._repositories.tree(name, commit) if held.path not in OURS}
        version = Version(commit, found, manifest, files, told)
        with self._lock:
            self._kept[name, n] = version
            while len(self._kept) > KEPT:
                self._kept.pop(next(iter(self._kept)))
        return version

    def commit_of(self, name: str, n: int) -> str | None:
        """Return the commit of a version; None when there is none."""
        with self._lock:
            kept = self._kept.get((name, n))
            known = self._known.get((name, n))
        if kept is not None:
            return kept.commit
        return known or self._find(name, n)[0]

    def know(self, name: str, n: int, commit: str) -> None:
        """Take note of the commit of a version, as the Hub told whoever made it."""
        with self._lock:
            self._known[name, n] = commit

    def recover(self, name: str, tags: Mapping[int, str]) -> Ledger | None:
        """Return the ledger as the tags tell it, for a repository whose ledger somebody removed; None without any."""
        found: list[Told] = []
        registry = ""
        for n, commit in sorted(tags.items()):
            identity = self._identity(name, commit)
            if identity is None or identity.n != n:
                continue
            registry = registry or identity.registry
            manifest = self._line.read(self._repositories.id(name), commit, "manifest.json")
            found.append(told_of(identity.claim_bytes(manifest), identity.stored_at))
        return Ledger(name=name, registry=registry, versions=found) if found else None

    def _find(self, name: str, n: int) -> tuple[str | None, Identity | None]:
        """Return the commit that says it is this version, by its tag, else by the history of main."""
        try:
            tagged = self._repositories.refs(name).numbers.get(n)
        except errors.NotFoundError:
            return None, None
        if tagged is not None:
            found = self._identity(name, tagged)
            if found is None:
                return None, None  # a tag from before our time
            if found.name != name and found.n == n:
                raise errors.NotFoundError(
                    f"{self._repositories.id(name)} holds the versions of {found.name}",
                    why="a version keeps its name when its repository is renamed",
                    fix=f"use {found.name}@v{n}",
                )
            if (found.name, found.n) != (name, n):
                raise _meddled(found, f"the tag v{n} of {self._repositories.id(name)} was moved")
            return tagged, found
        for past in self._repositories.history(name, "main"):
            if past.title == title(name, n):
                found = self._identity(name, past.commit)
                if found is not None and (found.name, found.n) == (name, n):
                    return past.commit, found
        return None, None

    def _identity(self, name: str, commit: str) -> Identity | None:
        repo = self._repositories.id(name)
        try:
            stored = self._line.read(repo, commit, VERSION_FILE)
        except errors.MissingError:
            return None
        return parse_identity(stored, f"{VERSION_FILE} of {repo}")


def title(name: str, n: int) -> str:
    """Return the title of a version's commit, by which it is found again."""
    return f"{name} v{n}"


def _meddled(found: Identity, why: str) -> errors.IntegrityError:
    return errors.IntegrityError(
        f"{found.name}@v{found.n} is not what was published",
        why=why,
        fix="find out who wrote to the repository; nothing was delivered",
    )
