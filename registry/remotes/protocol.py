"""What a remote is: a place that keeps small decisions and large files under keys, each created once.

A remote knows keys and bytes and nothing of names, manifests or the catalogue. Retry and rate limits are wrappers with
the same interface (`wrappers.py`); the conformance suite in the tests is the other half of this contract.

Errors every method may raise: DeniedError, UnreachableError, RetryableError, WeighbridgeError (permanent).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from weighbridge.registry.errors import DeniedError

Progress = Callable[[int], None]
"""Called with the number of bytes that were just moved."""

Denied = Callable[[DeniedError], object]
"""Is told what these credentials may not do, where that keeps nobody from the rest."""

Chunk = bytes | memoryview
"""Bytes of an object on their way; what is kept longer is copied."""


class Properties(NamedTuple):
    """What a remote can promise; the flow reads these, never the scheme."""

    conditional_create: bool
    """A create-only write is refused by the remote itself when the key exists, also in a race."""
    server_sha256: bool
    """`stat` reports a sha256 that the remote computed or checked itself."""
    durable_ack: bool
    """What was acknowledged survives a power loss."""
    parallel: int
    """Connections that pay off at the same time."""
    hashes_stored: bool = False
    """`upload` hashes on this machine the very bytes that it writes to the stored file, so none are read back."""
    upload_proof: Literal["sha256-server", "sha256-read"] | None = None
    """The level at which `upload` itself has compared what was stored, when it returns; None: it must be looked at."""
    compares_files: bool = False
    """`upload` compares a file with what lies there by the remote's checksums; `stat` knows the outcome afterwards."""
    part: int = 0
    """Bytes of the parts of a file whose sha256 the remote checks itself, 0 where it does not."""
    commits: bool = False
    """A version appears in one guarded commit that claims and decides at once; see `commits.py`."""


class Stat(NamedTuple):
    """One object: size in bytes, the remote's own sha256 (None when it has none), store time in seconds since 1970.

    `told` is a sha256 that rests on somebody's word: the remote tells it and is not known to look at the bytes, or
    whoever sent the file said what the remote's hash stands for. It proves nothing, and is None where `sha256` is not.
    """

    key: str
    size: int
    sha256: str | None
    modified: float
    told: str | None = None


class Remote(Protocol):
    """The storage interface; keys are relative, `/`-separated and pass `refs.check_key`."""

    @property
    def url(self) -> str:
        """The URL as configured, without secrets."""
        ...

    @property
    def properties(self) -> Properties:
        """What this remote can promise."""
        ...

    def create(self, key: str, body: bytes) -> None:
        """Store a small object under a free key, durably and all at once.

        Raises ExistsError when the key is taken (whatever its bytes) and OutcomeUnknownError when the answer was lost.
        """
        ...

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
        """Store a file under a free key, durably and all at once, hashing the bytes that are sent.

        `parts` are the hashes of its parts of `properties.part` bytes, by the pass that gave `sha256`, or none: by them
        the remote itself refuses other bytes, and nothing is hashed again.

        Raises SourceChangedError before anything is visible when size or sha256 of the sent bytes differ,
        ExistsError, OutcomeUnknownError.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return a small object whole. Raises MissingError."""
        ...

    def fetch(self, key: str, offset: int = 0) -> Iterator[Chunk]:
        """Yield the bytes of an object from `offset` on, in chunks of at most 2 MiB. Raises MissingError.

        A chunk is valid until the next one is asked for: its memory is used again.
        """
        ...

    def stat(self, key: str) -> Stat:
        """Return what the remote knows of one object. Raises MissingError."""
        ...

    def learn(self) -> None:
        """Find out what the remote does with checksums, where that is not known and these credentials may try it."""
        ...

    def list(self, prefix: str, *, after: str | None = None, limit: int | None = None) -> Iterator[Stat]:
        """Yield the objects whose key begins with `prefix`, in UTF-8 order, those after the key `after` only.

        Never yields an unfinished object. A prefix without objects yields nothing; an error is raised, never an empty
        answer. `after` is only portable for keys of one flat folder.
        """
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the immediate sub-folders of `prefix` (which ends with `/` or is empty), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; a key that is not there is no error."""
        ...

    def now(self) -> float:
        """Return the store's clock in seconds since 1970."""
        ...

    def stage(self, name: str, nonce: str) -> Path | None:
        """Return a private local folder from which `upload` needs no second copy, or None where there is none."""
        ...

    def sweep(self, older_than: float, *, denied: Denied = lambda _: None) -> int:
        """Remove unfinished uploads and stage folders older than so many seconds of its clock; return how many.

        What these credentials may not remove stays, and `denied` is told.
        """
        ...

    def unfinished(self, older_than: float) -> Iterator[int]:
        """Yield the bytes of each of those that `sweep` would remove now; what ends meanwhile does not count."""
        ...

    def close(self) -> None:
        """Give connections back; the remote is not used afterwards."""
        ...


Verified = Literal["sha256-server", "sha256-read", "size"]
"""At which level a stored file was compared with its record."""
