"""The staging folder of a merge or a cast: refuse, make room, hold it for the children, publish by one rename.

It is the target's hidden sibling and is named after the plan, so that the same work begun again finds what a killed one
has finished. Nothing else ever writes there: a lock that ends with its process says so.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge import __version__
from weighbridge.adapters.merge import outside
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.values import Bundle, Plan
from weighbridge.adapters.reading import table_at
from weighbridge.adapters.target import appear, free
from weighbridge.registry import errors, findings
from weighbridge.registry.disk import free_bytes, speaking, sync_folder
from weighbridge.registry.types import Finding, Value

_SHORT: Final = 12
OUT: Final = "out"
"""Where the child writes inside the staging folder; gone once the result was published or set apart."""

PLAN: Final = "plan.msgpack"
BUNDLE: Final = "bundle.msgpack"
JOURNAL: Final = "journal.jsonl"
_BLOCK: Final = 4096
"""Bytes by which the disk's blocks may make each file larger."""

_PAPERS: Final = 64 << 10
_A_TENSOR: Final = 2 << 10
"""Bytes of plan, journal and record, and how much of it each tensor brings: its steps and its tallies in words."""


class Merged(Value, frozen=True):
    """What was carried out: where it lies, its files with size and sha256, what was proven, and findings."""

    path: str
    plan: str
    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    findings: list[Finding]
    joined: bool = False
    """It lay there already."""


class Ready(NamedTuple):
    """What is about to be carried out, and where: every refusal that needs no byte of the weights lies behind it.

    `record` is the name of the record that will lie beside the weights.
    """

    plan: Plan
    bundle: Bundle
    identity: str
    target: Path
    stage: Path
    record: str


def ready(look: Look, target: Path, record: str) -> Ready | Merged:
    """Return what is to be done, or the same result where the target holds it already.

    Raises RefusedError, NotFinishedError and ConflictError as `allowed` and `already` do.
    """
    plan, bundle = allowed(look)
    identity = plan_identity(plan, bundle)
    target = Path(os.path.abspath(target))  # noqa: PTH100 - a link on the way stays as it is named
    there = already(target, identity, record)
    if there is not None:
        return there
    return Ready(plan, bundle, identity, target, target.parent / f".{target.name}.merge-{identity[:_SHORT]}", record)


def make(ready: Ready) -> None:
    """Make the staging folder. Raises DiskFullError where the result does not fit, DeniedError."""
    with speaking(f"{ready.target} cannot be written"):
        ready.target.parent.mkdir(parents=True, exist_ok=True)
        _room(ready)
        ready.stage.mkdir(exist_ok=True)


@contextmanager
def working(ready: Ready) -> Iterator[Merged | None]:
    """Hold the staging folder for one piece of work; yields what another process finished meanwhile, mostly None.

    What an error leaves is kept for the next try where that can go on from it: a file is finished, and nothing that was
    read is at fault. Raises what `make` and `held` raise.
    """
    make(ready)
    with held(ready.stage):
        try:
            there = already(ready.target, ready.identity, ready.record)
        except errors.ConflictError:
            shutil.rmtree(ready.stage, ignore_errors=True)
            raise
        if there is not None:
            shutil.rmtree(ready.stage, ignore_errors=True)
        try:
            yield there
        except BaseException as error:
            hopeless = isinstance(error, errors.IntegrityError | errors.VanishedError)
            if hopeless or not (finished(ready.stage) or (ready.stage / outside.RECORD).exists()):
                shutil.rmtree(ready.stage, ignore_errors=True)
            raise


def finished(stage: Path) -> int:
    """Return how many files of the result are finished: a try that added none got nowhere."""
    try:
        return (stage / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return 0


def publish(ready: Ready, record: Mapping[str, Any]) -> None:
    """Write the record beside the weights and let the folder appear under its name."""
    out = ready.stage / OUT
    with speaking(f"{ready.target} cannot be written"):
        _write(out / ready.record, record)
        sync_folder(out)
        try:
            appear(out, ready.target)
        except errors.ConflictError:
            # The name stays theirs, so what lies here would never be asked for again.
            shutil.rmtree(ready.stage, ignore_errors=True)
            already(ready.target, ready.identity, ready.record)
            raise
        sync_folder(ready.target.parent)
    shutil.rmtree(ready.stage, ignore_errors=True)
    _forsaken(ready)


def _forsaken(ready: Ready) -> None:
    """Remove what was begun under the same name and cannot be published any more, unless somebody is at it."""
    mark = f".{ready.target.name}.merge-"
    for entry in ready.target.parent.iterdir():
        if entry.name.startswith(mark) and len(entry.name) == len(mark) + _SHORT and (entry / PLAN).is_file():
            with suppress(errors.ConflictError, OSError), held(entry):
                shutil.rmtree(entry, ignore_errors=True)


def plan_identity(plan: Plan, bundle: Bundle) -> str:
    """Return the hex digest that names a merge: its sources as they are now, every step, every file beside them."""
    digest = hashlib.sha256(msgspec.msgpack.encode(plan))
    digest.update(msgspec.msgpack.encode(bundle))
    for path in sorted(bundle.copies.values()):
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    digest.update(__version__.encode())
    return digest.hexdigest()


def allowed(look: Look) -> tuple[Plan, Bundle]:
    """Return the plan and the bundle. Raises RefusedError, NotFinishedError, WeighbridgeError without the extra."""
    blocks = [f for f in look.findings if f.severity == "block" and not findings.CODES[f.code].waits]
    waits = [f for f in look.findings if findings.CODES[f.code].waits]
    if blocks:
        raise errors.RefusedError(
            f"this {look.what} is refused", why=_first(look, blocks), fix=blocks[0].fix, findings=blocks
        )
    if waits:
        raise errors.NotFinishedError(
            "a folder is not finished", why=_first(look, waits), fix=waits[0].fix, findings=waits
        )
    if look.planned is None or look.planned.plan is None or look.bundle is None:
        raise errors.RefusedError(f"this {look.what} is refused", why="there is no plan for it", findings=look.findings)
    installed()
    # The child stands elsewhere, and is let at exactly these files.
    copies = {path: os.path.realpath(origin) for path, origin in look.bundle.copies.items()}
    return look.planned.plan, msgspec.structs.replace(look.bundle, copies=copies)


def _first(look: Look, found: Sequence[Finding]) -> str:
    """Return the words of the first of some findings: which of several folders it is about, and how many more are."""
    side = f"{found[0].subject.partition('/')[0]}: " if look.what == "merge" else ""
    more = f" ({len(found) - 1} more against it)" if len(found) > 1 else ""
    return f"{side}{found[0].message}{more}"


def installed() -> None:
    """Raise WeighbridgeError where what does the arithmetic is not installed."""
    if any(find_spec(name) is None for name in ("numpy", "ml_dtypes")):
        raise errors.WeighbridgeError(
            "the merge extra is not installed",
            why="merging needs numpy and ml-dtypes",
            fix="pip install 'weighbridge[merge]'",
        )


def already(target: Path, identity: str, record: str) -> Merged | None:
    """Return the same result where the target holds it. Raises ConflictError where it holds anything else.

    Raises what `free` raises, too.
    """
    free(target)
    try:
        entries = list(target.iterdir())
    except FileNotFoundError:
        return None
    if not entries:
        return None
    found = same(target, identity, record)
    if found is None:
        raise errors.ConflictError(
            f"{target} is there already", why="it holds something else", fix="name another folder, or remove it"
        )
    return found


def make_way(look: Look, target: Path, record: str) -> None:
    """Remove what stands in a folder of our own, unless it is the result of this very look.

    Raises what `allowed` raises, and DeniedError where it cannot be removed.
    """
    plan, bundle = allowed(look)
    if same(target, plan_identity(plan, bundle), record) is None:
        with speaking(f"{target} cannot be removed"), suppress(FileNotFoundError):
            shutil.rmtree(target)


def same(target: Path, identity: str, record: str) -> Merged | None:
    """Return the result of a plan where the target holds it whole, None for anything else."""
    try:
        told = table_at(target / record) or {}
        if told["plan"] != identity or any(
            (target / path).stat().st_size != file["size"] for path, file in told["files"].items()
        ):
            return None
        return Merged(
            path=str(target), plan=identity, files=told["files"], facts=told["facts"],
            findings=msgspec.convert(told["findings"], list[Finding]), joined=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def needed(plan: Plan, bundle: Bundle) -> int:
    """Return the bytes that making a result takes on the disk, before anything is there.

    Its files, rounded up to blocks, what PEFT computes meanwhile, and the papers beside it: the plan, and for each
    tensor what journal and record say of it. Raises OSError.
    """
    sizes = [file.size for file in plan.files] + [len(body) for body in bundle.written.values()]
    sizes += [Path(origin).stat().st_size for origin in bundle.copies.values()]
    computed = sum(4 * step.origin.count for step in plan.steps if step.computed)
    papers = _PAPERS + _A_TENSOR * len(plan.steps)
    return sum(sizes) + _BLOCK * len(sizes) + computed + papers


def taken(stage: Path) -> int:
    """Return the bytes that what was written takes on the disk."""
    return sum(f.stat().st_blocks * 512 for f in (stage / OUT).rglob("*") if f.is_file())


def _room(ready: Ready) -> None:
    """Raise DiskFullError where the result does not fit beside what is there."""
    parent, stage = ready.target.parent, ready.stage
    need = needed(ready.plan, ready.bundle) - taken(stage)
    free = free_bytes(parent)
    if free < need:
        raise errors.DiskFullError(
            f"there is no room for the result in {parent}",
            why=f"it needs {need} bytes, {free} are free",
            fix="free some space, or name a folder on another disk",
            needed_bytes=need,
            free_bytes=free,
        )


@contextmanager
def held(stage: Path) -> Iterator[None]:
    """Hold the staging folder against others. Raises ConflictError when another process has it, or just ended it."""
    lock = stage / "lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise _just_ended(stage) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.ConflictError(
                "this is being made already", why=f"another process holds {stage}", fix="wait for it"
            ) from error
        if not _is(lock, descriptor):
            raise _just_ended(stage)
        yield
    finally:
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Tell whether an open file is the one at its path: whoever holds a folder may remove it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _just_ended(stage: Path) -> errors.ConflictError:
    return errors.ConflictError(
        "this was being made by another process, which just ended", why=f"{stage} is gone", fix="run it again"
    )


def quarantine(stage: Path) -> Path:
    """Set a result that failed apart, so that the next try begins anew."""
    apart = stage.with_name(stage.name + "-failed")
    shutil.rmtree(apart, ignore_errors=True)
    (stage / OUT).rename(apart)
    (stage / JOURNAL).unlink(missing_ok=True)
    return apart


def nothing(count: int, dtype: str) -> errors.RefusedError:
    """Return the refusal of a result that would equal the base."""
    nothing = findings.finding(
        "merge-changes-nothing",
        "adapter",
        f"all {count} tensors the adapter touches are the base's, bit for bit, in {dtype}",
        "merge with --dtype fp32; an adapter whose lora_B is zero has nothing to merge",
        unchanged_share=1.0,
    )
    return errors.RefusedError(
        "the merged model would equal the base", why=nothing.message, fix=nothing.fix, findings=[nothing]
    )


def _write(path: Path, record: Mapping[str, Any]) -> None:
    body = json.dumps(msgspec.to_builtins(record, str_keys=True), indent=1, ensure_ascii=False).encode() + b"\n"
    with path.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())
