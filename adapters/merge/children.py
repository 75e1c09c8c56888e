"""The child processes of a merge or a cast: what each is told, which files it is let at, and how much it may take.

One streams and proves; where only PEFT's layers can compute the merge another one goes before it, and where what the
result computes is compared one comes after. They work in the staging folder, which the caller holds.
"""

import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import worker
from weighbridge.adapters.jail import Policy
from weighbridge.adapters.memory import available
from weighbridge.adapters.merge import behave, outside, pays, reach
from weighbridge.adapters.merge.staging import BUNDLE, OUT, PLAN, Ready, needed, nothing, taken
from weighbridge.adapters.merge.values import Bundle, Plan
from weighbridge.registry import errors
from weighbridge.registry.disk import free_bytes, speaking
from weighbridge.registry.types import Value

_COMPUTED: Final = "computed.msgpack"
"""The plan once its computed tensors have their values; the one before stays for whoever begins again."""

TASK: Final = "weighbridge.adapters.merge.job:run"
_BY_PEFT: Final = "round(merge_and_unload() of PEFT {}), in fp32, rounded once"
_MEMORY: Final = 1 << 30
_WORKERS_MAX: Final = 16
_SLOWEST: Final = 2 << 20
"""Bytes a second that any disk gives: what takes longer hangs."""


class Outside(Value, frozen=True):
    """A merge that only PEFT's layers compute: the estimate of its memory in bytes, and the configs of both sides.

    `unchanged` allows a result that equals the base.
    """

    needed: int
    base: str
    adapters: tuple[str, ...]
    unchanged: bool = False


class Begun(Value, frozen=True):
    """Work that is ready to be carried out: its staging folder, and what the child process is told.

    `memory` bounds the child's own data in bytes, `reads` are the files it reads. Two begun in the same way are equal,
    so a second hand goes on.
    """

    stage: str
    target: str
    plan: str
    request: dict[str, Any]
    memory: int
    reads: tuple[str, ...] = ()
    outside: Outside | None = None
    """What PEFT has to compute first; it compares what it merged itself."""
    behaviour: behave.Wish | None = None
    """What the result computes is compared, too."""

    @property
    def most(self) -> int:
        """Bytes of memory to set aside for all of it: one child at a time."""
        return max(self.memory, _spared(self.behaviour.needed) if self.behaviour is not None else 0)


def begun(
    ready: Ready,
    workers: int | None,
    outside: Outside | None = None,
    device: str = "auto",
    behaviour: behave.Wish | None = None,
) -> Begun:
    """Write the plan down, durably enough for a child that reads it meanwhile, and return what is to be done."""
    with speaking(f"{ready.stage} cannot be written"):
        # The same bytes whoever writes them: a child that reads them meanwhile must not find half of them.
        _replace(ready.stage / PLAN, msgspec.msgpack.encode(ready.plan))
        _replace(ready.stage / BUNDLE, msgspec.msgpack.encode(ready.bundle))
    stream = _MEMORY + 4 * sum(source.size for source in ready.plan.sources[ready.plan.base_files :])
    return Begun(
        stage=str(ready.stage),
        target=str(ready.target),
        plan=ready.identity,
        request={
            "stage": str(ready.stage),
            "plan": ready.identity,
            "workers": workers or _workers(ready.plan),
            "device": device,
        },
        memory=stream if outside is None else max(stream, _spared(outside.needed)),
        reads=tuple(sorted({*(s.path for s in ready.plan.sources), *ready.bundle.copies.values()})),
        outside=outside,
        behaviour=behaviour if outside is None else None,
    )


def _spared(needed: int) -> int:
    """Return the memory that is set aside for an estimate."""
    return needed + needed // 2


def carry_out(begun: Begun, progress: worker.Tell | None = None) -> dict[str, Any]:
    """Do the work in a jailed child process, PEFT's share of it before, a comparison after it; return what came of it.

    The staging folder is held by the caller. Raises what `outside.compute`, `worker.jailed`, the child and
    `behave.compare` raise, and RefusedError where nothing would change.
    """
    stage = Path(begun.stage)
    computed = _computed(begun, stage, progress) if begun.outside is not None else None
    plan = computed.plan if computed is not None else _plan_of(stage)
    choice = pays.chosen(plan, str(begun.request["device"]), len(os.sched_getaffinity(0)))
    request = begun.request | {"device": choice.device, "device_why": choice.why}
    if computed is not None:
        with speaking(f"{stage} cannot be written"):
            _replace(stage / _COMPUTED, msgspec.msgpack.encode(computed.plan))
        request = request | {"file": _COMPUTED}
    size = sum(Path(path).stat().st_size for path in begun.reads if Path(path).exists())
    seconds = 3600 + size // _SLOWEST
    policy = Policy(
        reads=(begun.stage, *begun.reads),
        writes=(begun.stage,),
        memory=begun.memory,
        processor=seconds * int(begun.request["workers"]),
        clock=seconds,
    )
    request, policy = reach.let_in(request, policy, os.environ)
    try:
        ended = worker.jailed(TASK, request, policy, progress=progress)
    except errors.DiskFullError as error:
        raise _filled(begun, error) from error
    result = ended.result | {"jail": ended.held._asdict()}
    if computed is not None:
        result |= {
            "computed": computed.facts,
            "formula": _BY_PEFT.format(computed.facts["merged_by"]["peft"]),
            "findings": msgspec.to_builtins(computed.findings),
        }
        result["fidelity"]["tensors_unchanged"] += computed.still
    if begun.behaviour is not None and result["proof"]["passed"]:
        with speaking(f"{stage} cannot be written"):
            result["compared"] = msgspec.to_builtins(behave.compared(begun.behaviour, plan, stage / OUT, progress))
    return result


def _filled(begun: Begun, error: errors.DiskFullError) -> errors.DiskFullError:
    """Return the error of a disk that filled up meanwhile with the figures of now: what is missing, what is free."""
    stage = Path(begun.stage)
    bundle = msgspec.msgpack.decode((stage / BUNDLE).read_bytes(), type=Bundle)
    missing, free = needed(_plan_of(stage), bundle) - taken(stage), free_bytes(stage)
    return errors.DiskFullError(
        error.what,
        why=f"{error.why}; {missing} bytes are missing in {stage.parent}, {free} are free",
        fix=f"{error.fix}; finished files are kept",
        needed_bytes=missing,
        free_bytes=free,
    )


def _plan_of(stage: Path) -> Plan:
    return msgspec.msgpack.decode((stage / PLAN).read_bytes(), type=Plan)


def _computed(begun: Begun, stage: Path, progress: worker.Tell | None) -> outside.Computed:
    """Have PEFT compute what only it can. Raises what `compute` raises."""
    asked = begun.outside
    assert asked is not None
    plan = _plan_of(stage)
    configs = outside.Configs(Path(asked.base), tuple(Path(path) for path in asked.adapters))
    lacking = outside.short(asked.needed, available())
    if lacking is not None and not (stage / outside.RECORD).exists():
        raise errors.NotFinishedError("there is no room in memory", why=lacking.message, fix=lacking.fix)
    with speaking(f"{stage} cannot be written"):
        computed = outside.compute(plan, stage, needed=asked.needed, configs=configs, progress=progress)
    if not asked.unchanged and not any(step.touched for step in computed.plan.steps):
        shutil.rmtree(stage, ignore_errors=True)
        raise nothing(len(computed.still), "fp32")
    return computed


def _replace(path: Path, body: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(body)
    fresh.replace(path)


def _workers(plan: Plan) -> int:
    """Return the number of threads: one more than processors, as they wait for the disk, and no more than files."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(len(plan.files), processors + 1, _WORKERS_MAX))
