"""The parent's part of a merge: refuse, make room, run the child, look at the result, publish it by one rename.

The staging folder is the target's hidden sibling and is named after the plan, so that the same merge begun again finds
what a killed one has finished. Nothing else ever writes there: a lock that ends with its process says so.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge import __version__
from weighbridge.adapters import layout, worker
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.merge import outside
from weighbridge.adapters.merge.preview import COSINE, Look, update_lost
from weighbridge.adapters.merge.values import Bundle, Plan
from weighbridge.registry import errors, findings
from weighbridge.registry.disk import free_bytes, speaking, sync_folder
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.types import Finding, Value

RECORD: Final = "merge.json"
"""The record of a merge, beside the weights: what was merged, how, and what was proven."""

SCHEMA: Final = "weighbridge/merge/1"
TASK: Final = "weighbridge.adapters.merge.job:run"
OUT: Final = "out"
"""Where the child writes inside the staging folder; gone once the result was published or set apart."""

_MARGIN: Final = 64 << 20
_MEMORY: Final = 1 << 30
_WORKERS_MAX: Final = 16


class Merged(Value, frozen=True):
    """A merge that was carried out: where it lies, its files with size and sha256, what was proven, and findings."""

    path: str
    plan: str
    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    findings: list[Finding]
    joined: bool = False
    """It lay there already."""


def merge(
    look: Look,
    target: Path,
    *,
    workers: int | None = None,
    unchanged: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Merged:
    """Carry out what was looked at, into a folder that appears whole or not at all.

    `unchanged` allows a result that equals the base. Raises RefusedError with its findings, ConflictError for a target
    that holds something else or is being written, DiskFullError, and what the child process raises; then nothing is
    published, and the same call goes on with the files that were finished.
    """
    ready = _ready(look, target)
    if isinstance(ready, Merged):
        return ready
    _make(ready)
    with held(ready.stage):
        computed = _computed(look, ready.plan, ready.stage, unchanged=unchanged, progress=progress)
        plan = computed.plan if computed is not None else ready.plan
        begun = _begun(ready, plan, workers)
        result = worker.run(TASK, begun.request, memory=begun.memory, progress=progress)
        if computed is not None:
            result |= {"computed": computed.facts, "formula": _by_peft(computed.facts["merged_by"])}
            result["fidelity"]["tensors_unchanged"] += computed.still
        more = computed.findings if computed is not None else []
        return _settle(look, ready, plan, result, more, unchanged=unchanged)


class Begun(Value, frozen=True):
    """A merge that is ready to be carried out: its staging folder, and what the child process is told.

    `memory` bounds the child's own data in bytes. Two begun in the same way are equal, so a second hand goes on.
    """

    stage: str
    target: str
    plan: str
    request: dict[str, Any]
    memory: int


class _Ready(NamedTuple):
    """What is about to be carried out, and where: every refusal that needs no byte of the weights lies behind it."""

    plan: Plan
    bundle: Bundle
    identity: str
    target: Path
    stage: Path


def begin(look: Look, target: Path, *, workers: int | None = None) -> Begun | Merged:
    """Refuse, make room and write the plan down; or return the same merge where the target holds it already.

    Raises what `merge` raises before the first byte, and RefusedError for what only PEFT's layers compute: that is
    done beside `merge`, which waits for it.
    """
    ready = _ready(look, target)
    if isinstance(ready, Merged):
        return ready
    if any(step.computed for step in ready.plan.steps):
        raise errors.RefusedError(
            "this type of adapter is merged by hand only",
            why="PEFT's own layers compute it, with the whole model in memory",
            fix="registry merge merges and publishes it on a machine with enough memory",
        )
    _make(ready)
    return _begun(ready, ready.plan, workers)


def standing(look: Look, target: Path) -> Merged | None:
    """Return the merge that was looked at where the target holds it, None for anything else; nothing is written.

    Raises RefusedError and NotFinishedError as `begin` does.
    """
    plan, bundle = _allowed(look)
    return _same(target, plan_identity(plan, bundle))


def _ready(look: Look, target: Path) -> _Ready | Merged:
    plan, bundle = _allowed(look)
    identity = plan_identity(plan, bundle)
    target = Path(os.path.abspath(target))  # noqa: PTH100 - a link on the way stays as it is named
    there = _already(target, identity)
    if there is not None:
        return there
    return _Ready(plan, bundle, identity, target, target.parent / f".{target.name}.merge-{identity[:12]}")


def _make(ready: _Ready) -> None:
    with speaking(f"{ready.target} cannot be written"):
        ready.target.parent.mkdir(parents=True, exist_ok=True)
        _room(ready.target.parent, ready.stage, ready.plan)
        ready.stage.mkdir(exist_ok=True)


def _begun(ready: _Ready, plan: Plan, workers: int | None) -> Begun:
    with speaking(f"{ready.stage} cannot be written"):
        # The same bytes whoever writes them: a child that reads them meanwhile must not find half of them.
        _replace(ready.stage / "plan.msgpack", msgspec.msgpack.encode(plan))
        _replace(ready.stage / "bundle.msgpack", msgspec.msgpack.encode(ready.bundle))
    return Begun(
        stage=str(ready.stage),
        target=str(ready.target),
        plan=ready.identity,
        request={"stage": str(ready.stage), "plan": ready.identity, "workers": workers or _workers(plan)},
        memory=_MEMORY + 4 * sum(source.size for source in plan.sources[plan.base_files :]),
    )


def finish(look: Look, target: Path, result: dict[str, Any], *, unchanged: bool = False) -> Merged:
    """Judge what a child process of `begin` wrote and publish the folder by one rename.

    Raises what `merge` raises after the child, and SourceChangedError where `look` gives another plan by now.
    """
    ready = _ready(look, target)
    if isinstance(ready, Merged):
        return ready
    if not (ready.stage / OUT).is_dir():
        raise errors.SourceChangedError(
            "the merge was made from something else",
            why="adapter or base changed since it was begun",
            fix="merge again",
        )
    with held(ready.stage):
        return _settle(look, ready, ready.plan, result, [], unchanged=unchanged)


def _settle(
    look: Look, ready: _Ready, plan: Plan, result: dict[str, Any], more: Sequence[Finding], *, unchanged: bool
) -> Merged:
    found = [*look.findings, *_judged(result, ready.stage, plan, unchanged=unchanged), *more]
    facts = {**look.facts, **_facts(result)}
    record = _record(look, ready.identity, result, found)
    out = ready.stage / OUT
    with speaking(f"{ready.target} cannot be written"):
        _write(out / RECORD, record)
        sync_folder(out)
        out.rename(ready.target)
        sync_folder(ready.target.parent)
    shutil.rmtree(ready.stage, ignore_errors=True)
    return Merged(path=str(ready.target), plan=ready.identity, files=result["files"], facts=facts, findings=found)


def _computed(
    look: Look, plan: Plan, stage: Path, *, unchanged: bool, progress: Callable[[int], None] | None
) -> outside.Computed | None:
    """Have PEFT compute what only it can; None where the plan needs nothing of that. Raises what `compute` raises."""
    if not any(step.computed for step in plan.steps):
        return None
    assert look.base is not None
    configs = outside.Configs(
        Path(look.base.root) / layout.MODEL_CONFIG,
        tuple(Path(one.root) / layout.ADAPTER_CONFIG for one in look.adapters),
    )
    with speaking(f"{stage} cannot be written"):
        computed = outside.compute(
            plan, stage, needed=int(look.facts["memory_bytes"]), configs=configs, progress=progress
        )
    if not unchanged and not any(step.touched for step in computed.plan.steps):
        shutil.rmtree(stage, ignore_errors=True)
        raise _nothing(len(computed.still), "fp32")
    return computed


def _by_peft(versions: Mapping[str, Any]) -> str:
    return f"round(merge_and_unload() of PEFT {versions['peft']}), in fp32, rounded once"


def _replace(path: Path, body: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(body)
    fresh.replace(path)


def plan_identity(plan: Plan, bundle: Bundle) -> str:
    """Return the hex digest that names a merge: its sources as they are now, every step, every file beside them."""
    digest = hashlib.sha256(msgspec.msgpack.encode(plan))
    digest.update(msgspec.msgpack.encode(bundle))
    for path in sorted(bundle.copies.values()):
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    digest.update(__version__.encode())
    return digest.hexdigest()


def _allowed(look: Look) -> tuple[Plan, Bundle]:
    """Return the plan and the bundle. Raises RefusedError, NotFinishedError, WeighbridgeError without the extra."""
    blocks = [f for f in look.findings if f.severity == "block" and not findings.CODES[f.code].waits]
    waits = [f for f in look.findings if findings.CODES[f.code].waits]
    if blocks:
        raise errors.RefusedError("this merge is refused", why=blocks[0].message, fix=blocks[0].fix, findings=blocks)
    if waits:
        raise errors.NotFinishedError(
            "a folder is not finished", why=waits[0].message, fix=waits[0].fix, findings=waits
        )
    if look.planned is None or look.planned.plan is None or look.bundle is None:
        raise errors.RefusedError("this merge is refused", why="there is no plan for it", findings=look.findings)
    if not _installed():
        raise errors.WeighbridgeError(
            "the merge extra is not installed",
            why="merging needs numpy and ml-dtypes",
            fix="pip install 'weighbridge[merge]'",
        )
    return look.planned.plan, look.bundle


def _installed() -> bool:
    from importlib.util import find_spec  # noqa: PLC0415 - asked once, before the child is started

    return all(find_spec(name) is not None for name in ("numpy", "ml_dtypes"))


def _already(target: Path, identity: str) -> Merged | None:
    """Return the same merge where the target holds it. Raises ConflictError where it holds anything else."""
    try:
        entries = list(target.iterdir())
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise errors.ConflictError(f"{target} is a file", fix="name a folder that is not there yet") from error
    if not entries:
        return None
    same = _same(target, identity)
    if same is None:
        raise errors.ConflictError(
            f"{target} is there already", why="it holds something else", fix="name another folder, or remove it"
        )
    return same


def _same(target: Path, identity: str) -> Merged | None:
    try:
        record = json.loads((target / RECORD).read_bytes())
        if record["plan"] != identity or any(
            (target / path).stat().st_size != file["size"] for path, file in record["files"].items()
        ):
            return None
        return Merged(
            path=str(target), plan=identity, files=record["files"], facts=record["facts"],
            findings=msgspec.convert(record["findings"], list[Finding]), joined=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _room(parent: Path, stage: Path, plan: Plan) -> None:
    """Raise DiskFullError where the result does not fit beside what is there."""
    have = 0
    if (stage / OUT).is_dir():
        have = sum(f.stat().st_blocks * 512 for f in (stage / OUT).rglob("*") if f.is_file())
    need = plan.size + sum(4 * step.origin.count for step in plan.steps if step.computed) + _MARGIN - have
    free = free_bytes(parent)
    if free < need:
        raise errors.DiskFullError(
            f"there is no room for the merged model in {parent}",
            why=f"it needs {need} bytes, {free} are free",
            fix="free some space, or name a folder on another disk",
            needed_bytes=need,
            free_bytes=free,
        )


@contextmanager
def held(stage: Path) -> Iterator[None]:
    """Hold the staging folder against others. Raises ConflictError when another process has it."""
    descriptor = os.open(stage / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.ConflictError(
                "this merge is being made already", why=f"another process holds {stage}", fix="wait for it"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _workers(plan: Plan) -> int:
    """Return the number of threads: one more than processors, as they wait for the disk, and no more than files."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(len(plan.files), processors + 1, _WORKERS_MAX))


def _judged(result: dict[str, Any], stage: Path, plan: Plan, *, unchanged: bool) -> list[Finding]:
    """Return the findings of what was written. Raises RefusedError where it is not what it must be."""
    proof, fidelity = result["proof"], result["fidelity"]
    if not proof["passed"]:
        apart = _quarantine(stage)
        failed = findings.finding(
            "merge-unproven",
            "model",
            f"{proof['bound_violations']} of {proof['elements_checked']} elements are out of bound, "
            f"{len(proof['failures'])} tensors failed: {'; '.join(proof['failures'][:3])}",
            "do not use it; report this with the adapter",
            **proof,
        )
        raise errors.RefusedError(
            "the written model failed its proof", why=f"{failed.message}; it lies apart in {apart}", findings=[failed]
        )
    looked_at = [step.name for step in plan.steps if step.factors or step.computed]
    still = [name for name in fidelity["tensors_unchanged"] if name in looked_at]
    others = any(step.touched and not (step.factors or step.computed) for step in plan.steps)
    if looked_at and len(still) == len(looked_at) and not others and not unchanged:
        shutil.rmtree(stage / OUT, ignore_errors=True)
        (stage / "journal.jsonl").unlink(missing_ok=True)
        raise _nothing(len(still), result["dtype"])
    seen = inspect(stage / OUT)
    broken = [f for f in seen.findings if f.severity == "block"]
    if broken:
        raise errors.RefusedError(
            "the merged folder is not a whole model", why=broken[0].message, fix=broken[0].fix, findings=broken
        )
    found: list[Finding] = []
    if fidelity["cosine"] is not None and fidelity["cosine"] < COSINE:
        found.append(update_lost(result["dtype"], fidelity["unchanged_share"], fidelity["cosine"]))
    found.append(
        findings.finding(
            "merge-proven",
            "model",
            f"{proof['tensors_copied']} tensors are the base's byte for byte, {proof['tensors_changed']} changed ones "
            f"were read again: {proof['elements_checked']} elements, none further from the exact sum than rounding "
            "allows",
            **_facts(result),
        )
    )
    return found


def _nothing(count: int, dtype: str) -> errors.RefusedError:
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


def _quarantine(stage: Path) -> Path:
    """Set a result that failed apart, so that the next try begins anew."""
    apart = stage.with_name(stage.name + "-failed")
    shutil.rmtree(apart, ignore_errors=True)
    (stage / OUT).rename(apart)
    (stage / "journal.jsonl").unlink(missing_ok=True)
    return apart


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the child found, under the names of the facts."""
    fidelity = result["fidelity"]
    facts = {
        "proof": result["proof"],
        "fidelity": {k: v for k, v in fidelity.items() if k != "tensors_unchanged" or v},
        "formula": result["formula"],
        "written_dtype": result["dtype"],
        "kept_files": result["kept"],
        **result.get("computed", {}),
    }
    if fidelity["unchanged_share"] is not None:
        facts |= {"unchanged_share": fidelity["unchanged_share"], "update_cosine": fidelity["cosine"]}
    return facts


def _record(look: Look, identity: str, result: dict[str, Any], found: list[Finding]) -> dict[str, Any]:
    """Return the record of a merge; no path of this machine stands in it."""
    return {
        "schema": SCHEMA,
        "plan": identity,
        "tool": {"name": "weighbridge", "version": __version__},
        "base": look.facts.get("base_model"),
        "adapters": [
            {
                "base_model": one.base.id,
                "type": one.adapter.peft_type if one.adapter is not None else None,
                "weights_sha256": _digest(one.root),
            }
            for one in look.adapters
        ],
        "formula": result["formula"],
        "dtype": result["dtype"],
        "arithmetic": result["arithmetic"],
        "files": result["files"],
        "facts": {**look.facts, **_facts(result)},
        "findings": msgspec.to_builtins(found),
    }


def _digest(root: str) -> str | None:
    path = Path(root) / "adapter_model.safetensors"
    try:
        return sha256_file(path)
    except OSError:
        return None


def _write(path: Path, record: dict[str, Any]) -> None:
    body = json.dumps(msgspec.to_builtins(record, str_keys=True), indent=1, ensure_ascii=False).encode() + b"\n"
    with path.open("wb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())
