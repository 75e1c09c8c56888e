"""Every error a person can meet, each with its kind, exit code, what, why and fix.

    WeighbridgeError                 1  anything below
      UsageError                     2  the command or the configuration is wrong
      NotFoundError                  3  no such name, version, tag, path or key
        MissingError                    a remote holds nothing under this key
        NoRegistryError                 a remote is there, and no registry was begun in it
        WithdrawnError                  the version was withdrawn
        VanishedError                   a source file went away while it was looked at
      DeniedError                    4  login, scope or permission
      IntegrityError                 5  bytes, structure or licence are not what they must be
        SourceChangedError              the source was rewritten while it was read
        ForeignBytesError               a version's folder holds bytes that its manifest does not list
        StageDamagedError               a staged copy is not what was hashed: stage again
        RefusedError                    a check blocks this artifact
        JailedError                     a child process wanted what its jail forbids
        FeedDamagedError                the team's feed has a hole or a damaged object
      UnreachableError               6  a remote gives no answer; trying again can help
        RetryableError                  it answered "not now"
        QuotaError                      its quota is used up for a while; `data["retry_after"]` says how long
        OutcomeUnknownError             the request may or may not have been carried out: look, then retry
      ConflictError                  7  somebody else holds it, or other bytes are there already
        StateHeldError                  another daemon works on this state folder
        ExistsError                     a create-only write found another object
        NameTakenError                  the name belongs to another run, kind, registry or spelling
        VoidedError                     the number was given up; claim a new one
        DivergedError                   a mirror holds something else under this name and number
        SplitWritersError               a second writer where only one may write
        StaleHeadError                  somebody committed in between: look again, then repeat
        WithdrawnContentError           these bytes were withdrawn and come back only when asked for
      NotFinishedError               8  wait: the work is not done yet
      DiskFullError                  1  a disk has too little room, or would fall under its reserve
      StorageFullError               1  a remote has no room left, or its plan allows no more
      LimitError                     1  a child process reached a limit and was ended
      MemoryShortError               1  a child process got no more memory
      BugError                       1  nobody foresaw this: a fault in weighbridge itself

This module is on the start-up path of `registry ls`: it imports nothing.
"""

from typing import Any, ClassVar


class WeighbridgeError(Exception):
    """The root: `what` happened, `why`, and the exact `fix`; `data` holds figures for `--json`."""

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None, **data: Any) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.data = data


class UsageError(WeighbridgeError):
    """The command or the configuration is wrong; nothing was done."""

    code = "usage"
    exit_code = 2


class NotFoundError(WeighbridgeError):
    """No such name, version, tag or path."""

    code = "not-found"
    exit_code = 3


class MissingError(NotFoundError):
    """A remote holds nothing under this key."""

    code = "missing-key"


class NoRegistryError(NotFoundError):
    """The remote is there and holds no registry."""

    code = "no-registry"


class WithdrawnError(NotFoundError):
    """The version was withdrawn; its number stays taken."""

    code = "withdrawn"


class VanishedError(NotFoundError):
    """A source file went away while it was looked at (rotation); nothing of it was published."""

    code = "vanished"


class DeniedError(WeighbridgeError):
    """Login, scope or permission is missing; repeating does not help."""

    code = "denied"
    exit_code = 4


class IntegrityError(WeighbridgeError):
    """Bytes or structure are not what the record says; nothing was delivered."""

    code = "integrity"
    exit_code = 5


class SourceChangedError(IntegrityError):
    """A source file was rewritten while it was read; the job stops before anything is visible."""

    code = "source-changed"


class ForeignBytesError(IntegrityError):
    """A version's folder holds bytes that its manifest does not list; publishing stops and touches nothing."""

    code = "foreign-bytes"


class StageDamagedError(IntegrityError):
    """A staged copy is not what was hashed; nothing of it became visible, and the source can be staged again."""

    code = "stage-damaged"


class RefusedError(IntegrityError):
    """A check blocks this artifact; `data["findings"]` lists why."""

    code = "refused"


class JailedError(IntegrityError):
    """A child process wanted a file, a network or a process that its jail forbids; nothing of it was used."""

    code = "jailed"


class FeedDamagedError(IntegrityError):
    """The team's feed has a hole or a damaged object; `data["seq"]` is its number. The versions are not touched."""

    code = "feed-damaged"


class UnreachableError(WeighbridgeError):
    """A remote gives no answer; trying again can help."""

    code = "unreachable"
    exit_code = 6


class RetryableError(UnreachableError):
    """A remote answered "not now" (slow down, busy, 5xx); the request was not carried out."""

    code = "retryable"


class QuotaError(UnreachableError):
    """A quota of the remote is used up for a while; `data["retry_after"]` is that while in seconds."""

    code = "quota-used-up"


class OutcomeUnknownError(UnreachableError):
    """The answer was lost: the request may have been carried out. Look at the remote before any retry."""

    code = "outcome-unknown"


class ConflictError(WeighbridgeError):
    """Somebody else holds it, or other bytes are there already."""

    code = "conflict"
    exit_code = 7


class StateHeldError(ConflictError):
    """Another daemon works on this state folder."""

    code = "state-held"


class ExistsError(ConflictError):
    """A create-only write found an object under its key; read it to learn whose it is."""

    code = "exists"


class NameTakenError(ConflictError):
    """The name belongs to another run, another kind, another registry, or to a spelling that differs by case alone."""

    code = "name-taken"


class VoidedError(ConflictError):
    """The number was given up before it was committed; the content needs a new claim."""

    code = "voided"


class DivergedError(ConflictError):
    """A mirror holds something else under a name and number of the home; it is left alone."""

    code = "mirror-diverged"


class SplitWritersError(ConflictError):
    """Somebody else writes to a remote that can only bear one writer; publishing stops before more is mixed up."""

    code = "split-writers"


class StaleHeadError(ConflictError):
    """Somebody committed in between: look at what is there now, then repeat on top of it."""

    code = "stale-head"


class WithdrawnContentError(ConflictError):
    """These bytes were withdrawn under this name and come back only when somebody asks for it."""

    code = "withdrawn-content"


class NotFinishedError(WeighbridgeError):
    """The work is not done yet; wait and ask again."""

    code = "not-finished"
    exit_code = 8


class DiskFullError(WeighbridgeError):
    """A disk has too little room, or would fall under the reserve that is kept free for the trainer."""

    code = "disk-full"


class StorageFullError(WeighbridgeError):
    """A remote has no room left, or its plan allows no more; somebody has to free or buy some."""

    code = "remote-full"


class LimitError(WeighbridgeError):
    """A child process used more memory, time or threads than it may and was ended; `data["limit"]` says which."""

    code = "limit-reached"


class MemoryShortError(WeighbridgeError):
    """A child process got no more memory, or was ended for the memory it held; `data` holds what is allowed."""

    code = "memory-short"


class BugError(WeighbridgeError):
    """Nobody foresaw this: a fault in weighbridge itself, never the user's."""

    code = "bug"


def describe(error: WeighbridgeError) -> dict[str, Any]:
    """Return the JSON object that `--json` prints for an error; its shape is a contract."""
    return {
        "schema": "weighbridge/error/1",
        "code": error.code,
        "exit_code": error.exit_code,
        "message": _plain(error.what),
        "why": _plain(error.why),
        "fix": _plain(error.fix),
        "data": {key: _plain(value) for key, value in error.data.items()},
    }


def utf8(text: str) -> str:
    r"""Return text that every file and database can hold.

    Bytes of a file name that are no UTF-8 are spelled `\xff`, halves of characters, as JSON can name them, `\ud800`.
    """
    if text.isascii():
        return text
    return "".join(
        c
        if not "\ud800" <= c <= "\udfff"
        else f"\\x{ord(c) - 0xDC00:02x}"
        if "\udc80" <= c <= "\udcff"
        else f"\\u{ord(c):04x}"
        for c in text
    )


def half_character(value: Any) -> str | None:
    r"""Return the first half of a character in any string of a document, spelled `\ud800`; None where all is text.

    JSON and YAML can name such halves; no database, manifest or other program can hold them.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, str) and not one.isascii():
            half = next((c for c in one if "\ud800" <= c <= "\udfff"), None)
            if half is not None:
                return f"\\u{ord(half):04x}"
    return None


def _plain(value: Any) -> Any:
    """Return a value of `data` as JSON takes it: findings as objects, names spelled out."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    fields = getattr(type(value), "__struct_fields__", None)  # a frozen value, without importing what defines it
    return {name: _plain(getattr(value, name)) for name in fields} if fields is not None else value


def kinds() -> list[type[WeighbridgeError]]:
    """Return every error class, parents before children, for the printed list and for tests."""
    found: list[type[WeighbridgeError]] = []
    waiting: list[type[WeighbridgeError]] = [WeighbridgeError]
    while waiting:
        kind = waiting.pop(0)
        found.append(kind)
        waiting.extend(kind.__subclasses__())
    return found
