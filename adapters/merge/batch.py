"""A merge that somebody else asks for and collects: what to do and what came of it are files in the staging folder.

    python -m weighbridge.adapters.merge.batch STAGE

`request.json` says what to do, `result.json` appears by one rename when it is done: a scheduler forgets its jobs, a
file does not. The work itself is that of `children.carry_out`, in a child that is jailed and ends with this process.

Ends 0 with a result, 1 with an error that the file names, 75 when another process makes the same merge.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import worker
from weighbridge.adapters.merge.children import Begun, carry_out
from weighbridge.adapters.merge.staging import OUT, held
from weighbridge.registry import errors
from weighbridge.registry.disk import sync_folder
from weighbridge.registry.types import Value

REQUEST: Final = "request.json"
RESULT: Final = "result.json"
STARTED: Final = "started.json"
BUSY: Final = 75


class Answer(Value, frozen=True):
    """What came of one try: `result` as the child gave it, or `error` as `errors.describe` does."""

    key: str
    plan: str
    host: str
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class Request(Value, frozen=True):
    """One try at a merge; `key` names it, for ever."""

    key: str
    begun: Begun


def write_request(key: str, begun: Begun) -> None:
    """Write down what is to be done; durable when this returns. Raises OSError."""
    _write(Path(begun.stage) / REQUEST, Request(key=key, begun=begun))


def memory(stage: Path) -> int:
    """Return the bytes that the children of a request may use, one at a time; 0 where there is none."""
    try:
        return msgspec.json.decode((stage / REQUEST).read_bytes(), type=Request).begun.most
    except (OSError, msgspec.MsgspecError):
        return 0


def answer(stage: Path, key: str, plan: str) -> Answer | None:
    """Return what came of a try, None while nothing did.

    A whole result of an earlier try of this plan counts as long as its files are there: what failed its proof was set
    apart, and the next try begins anew.
    """
    try:
        found = msgspec.json.decode((stage / RESULT).read_bytes(), type=Answer)
    except (OSError, msgspec.MsgspecError):
        return None
    if found.plan != plan or (found.result is None and found.key != key):
        return None
    if found.result is not None and not (stage / OUT).is_dir():
        return None
    return found


def started(stage: Path, key: str) -> str | None:
    """Return the scheduler's number of the job that began a try, as the job itself wrote it down."""
    try:
        told = json.loads((stage / STARTED).read_bytes())
        return str(told["job"]) if told["key"] == key and told["job"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def perform(stage: Path, *, progress: worker.Tell | None = None) -> Answer:
    """Do what the request in `stage` asks for and leave the answer beside it; a whole answer is not made twice.

    What the child raises is in the answer. Raises ConflictError while another process makes the same merge, OSError.
    """
    with held(stage):
        request = msgspec.json.decode((stage / REQUEST).read_bytes(), type=Request)
        begun = request.begun
        known = answer(stage, request.key, begun.plan)
        if known is not None and known.result is not None:
            return known
        (stage / RESULT).unlink(missing_ok=True)
        told = {"key": request.key, "job": os.environ.get("SLURM_JOB_ID"), "host": socket.gethostname()}
        (stage / STARTED).write_text(json.dumps(told))
        made = Answer(key=request.key, plan=begun.plan, host=socket.gethostname())
        try:
            result = carry_out(begun, progress)
        except errors.WeighbridgeError as error:
            described = json.loads(json.dumps(errors.describe(error), default=msgspec.to_builtins))
            made = msgspec.structs.replace(made, error=described)
        else:
            made = msgspec.structs.replace(made, result=result)
        _write(stage / RESULT, made)
        return made


def _write(path: Path, value: Value) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("wb") as stream:
        stream.write(msgspec.json.encode(value))
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def main(arguments: list[str] | None = None) -> int:
    """Carry out one merge."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        sys.stderr.write("usage: python -m weighbridge.adapters.merge.batch STAGE\n")
        return 2
    try:
        done = perform(Path(given[0]))
    except errors.ConflictError as error:
        sys.stderr.write(f"{error.what}: {error.why}\n")
        return BUSY
    if done.error is not None:
        sys.stderr.write(f"error: {done.error.get('message')}\n  why: {done.error.get('why')}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
