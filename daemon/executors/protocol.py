"""Who carries merges out: what an executor is asked, and what it may answer.

Whether a try succeeded is never the executor's word: that is the file the try leaves in its staging folder
(`adapters.merge.batch`). An executor tells only whether it is still worth waiting for that file.
"""

from typing import Literal, NamedTuple, Protocol

from weighbridge.registry.types import Value


class Work(Value, frozen=True):
    """One try at a merge: `stage` holds request and answer, `key` names the try for ever.

    `memory` is what it needs in bytes, `handle` what the executor called it, None while that is not known.
    """

    key: str
    stage: str
    memory: int
    handle: str | None = None


class Live(NamedTuple):
    """It waits or runs; `why` is a sentence for people where there is something to tell."""

    handle: str
    why: str | None = None


class Gone(NamedTuple):
    """It ended, or was forgotten. Without an answer: try `again`, or `stop` until somebody has mended the cause.

    `cancelled`: somebody ended it on purpose. `fair`: the try itself was not at fault, as when its node failed.
    """

    why: str
    do: Literal["again", "stop", "cancelled"]
    fix: str | None = None
    fair: bool = False


class Absent(NamedTuple):
    """It was never submitted, or is forgotten without a trace."""


class Unknown(NamedTuple):
    """Nobody can tell at the moment: it is taken to go on."""

    why: str
    fix: str | None = None


Seen = Live | Gone | Absent | Unknown


class Executor(Protocol):
    """Carries out tries at merges; each call is short."""

    @property
    def pause(self) -> float:
        """Seconds between two looks at the same try."""
        ...

    @property
    def workers(self) -> int | None:
        """Files that a try writes at once; None: by the processors here."""
        ...

    def room(self) -> bool:
        """Tell whether another try may be submitted now."""
        ...

    def submit(self, work: Work) -> str:
        """Begin a try and return what it is called.

        Raises UnreachableError when nobody knows whether it was begun (`look` will tell), other errors when it was not.
        """
        ...

    def look(self, work: Work) -> Seen:
        """Return how a try stands; nothing is raised."""
        ...

    def starved(self, why: str) -> Gone:
        """Return what a try that got no more memory means, and what gives it more."""
        ...

    def cancel(self, work: Work) -> None:
        """End a try. Raises UnreachableError when it cannot be told to."""
        ...
