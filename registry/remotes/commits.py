"""What a remote is whose transaction is a commit: one repository per name, one guarded commit per version.

The flow asks for the standing of a name, makes up its mind, and sends one commit on top of what it saw; a commit that
comes too late is refused whole. `Properties.commits` says that a remote is of this kind. For readers it is a remote
like any other: it answers for the keys of `layout.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, cast

import msgspec

from weighbridge.registry import errors, types
from weighbridge.registry.remotes.ledger import Ledger
from weighbridge.registry.remotes.protocol import Progress, Remote
from weighbridge.registry.remotes.wrappers import Wrapper

UNMOVED: Final = (0.5, 2.5)
"""Seconds to wait after each refusal as stale on a head that did not move: one that somebody else's commit moved is
seen by then, also where what answers reads lags behind. One more refusal is no race."""


class Held(types.Value, frozen=True):
    """A file of a tree: `sha256` where the remote keeps one, `blob` the name that Git gives to its bytes."""

    path: str
    size: int
    sha256: str | None
    blob: str | None


class Standing(types.Value, frozen=True):
    """What a repository holds at the head of its main branch; `commit` None means that there is no repository.

    `tags` maps the numbers of the tags v1, v2, ... to their commits, ours or not; `past` is the highest number that
    this machine has seen of the name, whatever the repository still knows.
    """

    name: str
    commit: str | None
    files: list[Held]
    ledger: Ledger | None
    tags: dict[int, str]
    card: bytes | None = None
    past: int = 0

    @property
    def last(self) -> int:
        """The highest number that is told, or that a tag had before us; 0 for none."""
        return max([*self.tags, *(told.n for told in (self.ledger.versions if self.ledger else []))], default=0)

    @property
    def next(self) -> int:
        """The number of the next version: after all that there are and were."""
        return max(self.last, self.past) + 1


class Sending(types.Value, frozen=True):
    """A payload file on its way: where it lies here, its size and sha256."""

    path: str
    source: str
    size: int
    sha256: str


class Change(types.Value, frozen=True):
    """A commit to be made: on which branch, on top of what, and what it changes.

    `files` are paths of what was sent before, `small` are bytes, `delete` are paths of files.
    """

    parent: str
    title: str
    message: str
    files: list[str] = msgspec.field(default_factory=list)
    small: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    delete: list[str] = msgspec.field(default_factory=list)
    branch: str = "main"


class Writer(Protocol):
    """Something that sends files to one repository and makes commits there; nothing is seen before a commit."""

    def send(self, files: Sequence[Sending], base: str, progress: Progress | None = None) -> None:
        """Bring files to the remote, for a commit on top of `base`. What is there already is not sent again."""
        ...

    def commit(self, change: Change) -> str:
        """Make a commit and return its id. Raises StaleHeadError, OutcomeUnknownError and what the remote raises."""
        ...

    def close(self) -> None:
        """Give up what was not committed."""
        ...


class Stale:
    """Tells a race from a missing right, by how often commits on one head are refused as stale."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._unmoved = 0

    def pause(self, parent: str | None, head: str | None) -> float:
        """Return how many seconds to wait after a refusal, 0.0 where the head moved on from the parent meanwhile.

        Raises DeniedError, with what could not be done, where it is no race.
        """
        if head != parent:
            self._unmoved = 0
            return 0.0
        self._unmoved += 1
        if self._unmoved > len(UNMOVED):
            raise errors.DeniedError(
                self._what,
                why=f"the remote says {self._unmoved} times that somebody else committed, and nobody did",
                fix="look whether the token may commit to the main branch, or only open pull requests",
            )
        return UNMOVED[self._unmoved - 1]


class CommitRemote(Remote, Protocol):
    """A remote with commits."""

    def look(self, name: str, *, whole: bool = True) -> Standing:
        """Return the standing of a name now, never from a cache; without `whole` no files and no card."""
        ...

    def called(self, name: str) -> str:
        """Return what the repository of a name is called: another name where somebody renamed it."""
        ...

    def head(self, name: str) -> str | None:
        """Return the commit that the main branch stands at now; None where there is no repository."""
        ...

    def begin(self, name: str, *, exists: bool) -> None:
        """Make sure that we may write there, and make the repository where there is none."""
        ...

    def check(self, name: str, files: Sequence[types.FileEntry], card: bytes) -> None:
        """Raise RefusedError, DeniedError or UnreachableError for what is known to fail before a byte is sent."""
        ...

    def locked(self, name: str) -> AbstractContextManager[bool]:
        """Hold the one lock of this machine on a repository, and tell whether it was free.

        Writers that wait need not be refused.
        """
        ...

    def writer(self, name: str, key: str, size: int) -> Writer:
        """Return the writer that is kept under a key (the content being published), or begin one for so many bytes."""
        ...

    def ready(self) -> None:
        """Begin what will send, whatever it is. For a command that has just begun and has one thread."""
        ...

    def edit(self, name: str, change: Change) -> str:
        """Make a commit of small files alone and return its id. Raises what `Writer.commit` raises."""
        ...

    def release(self, name: str, key: str) -> None:
        """Close a writer that is not needed any more."""
        ...

    def commit_of(self, name: str, n: int) -> str | None:
        """Return the commit of a version, by its tag or by the history; None when there is none."""
        ...

    def know(self, name: str, n: int, commit: str) -> None:
        """Take note of the commit of a version, as the remote just told whoever made it."""
        ...

    def facts_at(self, name: str, commit: str, paths: Sequence[str]) -> dict[str, Held]:
        """Return size and checksum of files of a commit, as the remote reports them now."""
        ...

    def read_at(self, name: str, commit: str, path: str) -> bytes:
        """Return a small file of a commit. Raises MissingError."""
        ...

    def tag(self, name: str, n: int, commit: str) -> None:
        """Give a commit its tag v<n>. Raises DivergedError when the tag stands elsewhere."""
        ...

    def branch(self, name: str, branch: str, start: str) -> None:
        """Make a branch that starts at a commit; one that is there is moved by nobody."""
        ...

    def branch_head(self, name: str, branch: str) -> str | None:
        """Return the commit that a branch stands at."""
        ...

    def unbranch(self, name: str, branch: str) -> None:
        """Remove a branch."""
        ...

    def hidden(self) -> str:
        """Say what of this remote is not shown to us, and why."""
        ...

    def may_write(self, name: str | None) -> str:
        """Say in words how we may write there, asking about one name where there is any. Raises DeniedError."""
        ...

    def model(self, repo: str, revision: str | None) -> types.ModelSeen | types.ModelUnseen:
        """Return what is known there of any model, by its id and revision; raises nothing that the remote causes."""
        ...

    def catalogue(self, known: Mapping[str, str]) -> "Listing":
        """Return the names of this remote, and the ledgers of those whose head is not the known one."""
        ...


class Listing(types.Value, frozen=True):
    """The names of a commit remote with their heads, the ledgers that are news, and what was wrong with some."""

    heads: dict[str, str]
    ledgers: dict[str, Ledger]
    problems: list[str]


def of(remote: Remote) -> CommitRemote | None:
    """Return the commit remote inside a remote, or None where versions are made of keys."""
    if not remote.properties.commits:
        return None
    while isinstance(remote, Wrapper):
        remote = remote.inner
    return cast("CommitRemote", remote)
