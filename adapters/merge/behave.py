"""Does the merged model compute what base and adapter do together? Asked for, and answered by running all three.

The proof of the elements shows that the arithmetic was right; that every matrix went to the right place shows in the
outputs alone. A merge passes where it is no further from base and adapter, both in fp32, than these two are from
themselves in the precision of the result - or, where that is nothing, than a hundredth of what the adapter changes. It
must be nearer than the base, whose distance stands beside it, so that a merge that changes nothing cannot pass.
"""

import math
import os
import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import worker
from weighbridge.adapters.jail import Policy
from weighbridge.adapters.memory import available
from weighbridge.adapters.merge import outside
from weighbridge.adapters.merge.outside import Configs
from weighbridge.adapters.merge.values import Plan
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding, Value

TASK: Final = "weighbridge.adapters.merge.behave_job:run"
FIELD: Final = "behaviour"
NEEDS: Final = "what a model computes is compared by running it, which needs torch, transformers and peft"
_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Wish(Value, frozen=True):
    """A comparison that is asked for: the estimate of its memory in bytes, and the configs of both sides."""

    needed: int
    base: str
    adapters: tuple[str, ...]


class Apart(Value, frozen=True):
    """How far outputs are from those of base and adapter in fp32."""

    largest: float
    cosine: float
    """The mean of 1 - cos over the positions."""
    kl: float
    """The mean divergence of what is predicted, in nats."""


class Distances(Value, frozen=True):
    """The merged model, the base alone, and base and adapter in the precision of the result (None: it does not run)."""

    merged: Apart
    base: Apart
    noise: Apart | None
    scale: float


class Compared(Value, frozen=True):
    """What came of a comparison, in values that a file can hold: the fact `behaviour`, None where there is none.

    `words` is what a sentence on the proof goes on with, `wrong` what is wrong with the result, `why` says why nothing
    was compared.
    """

    behaviour: dict[str, Any] | None = None
    words: str = ""
    wrong: str | None = None
    why: str | None = None


def wish(plan: Plan, configs: Configs) -> Wish:
    """Return what to ask for where a plan's result is to be compared."""
    return Wish(needed=need(plan), base=str(configs.base), adapters=tuple(map(str, configs.adapters)))


def need(plan: Plan) -> int:
    """Return an estimate of the bytes that the comparison takes: one model in fp32 at a time, and what loads it."""
    counts = [step.origin.count for step in plan.steps]
    adapters = sum(one.size for one in plan.sources[plan.base_files :])
    return 4 * (sum(counts) + 2 * max(counts, default=0)) + 4 * adapters + outside.LIBRARIES


def compared(asked: Wish, plan: Plan, out: Path, progress: worker.Tell | None = None) -> Compared:
    """Compare the written model in `out` and judge it. Raises what `compare` raises."""
    seen = compare(asked, plan, out, progress)
    if isinstance(seen, str):
        return Compared(why=seen)
    return Compared(behaviour=facts(seen), words=told(seen), wrong=wrong(seen))


def compare(asked: Wish, plan: Plan, out: Path, progress: worker.Tell | None = None) -> Distances | str:
    """Run the three models in a jailed child; return their distances, or why they were not compared.

    The written model lies in `out`, and the child gets a folder beside it. A child that ran out of memory or time
    compared nothing. One that was ended from outside raises WeighbridgeError: the merge stands in its journal, and is
    compared by whoever goes on with it. Raises JailedError and OSError.
    """
    try:
        outside.installed(NEEDS)
    except errors.WeighbridgeError as error:
        return f"{error.what}: {error.why}"
    needed, room = asked.needed, available()
    if needed > room.free:
        return f"it takes about {needed} bytes of memory, {room.free} are free ({room.by})"
    place = out.with_name(FIELD)
    shutil.rmtree(place, ignore_errors=True)
    configs = Configs(Path(asked.base), tuple(Path(path) for path in asked.adapters))
    view, home = place / "view", place / "home"
    for folder in (view, home):
        folder.mkdir(parents=True)
    outside.show(plan, view, configs, untied=False)
    files = [(out / file.path, [step.name for step in file.steps]) for file in plan.files]
    outside.lay(view / "merged", out / configs.base.name, files)
    workers = max(1, len(os.sched_getaffinity(0)))
    seconds = 3600 + (plan.size + sum(one.size for one in plan.sources)) // (2 << 20)
    policy = Policy(
        reads=(str(view), *(one.path for one in plan.sources), *(str(path) for path, _ in files)),
        writes=(str(home),),
        memory=needed + needed // 2,
        processor=seconds * workers,
        clock=seconds,
        workers=workers,
        variables=outside.QUIET,
    )
    request = {"view": str(view), "adapters": len(configs.adapters), "workers": workers, "dtype": _DTYPES[plan.dtype]}
    try:
        answer = worker.jailed(TASK, request, policy, progress=progress).result
    except (errors.MemoryShortError, errors.LimitError) as error:
        return f"{error.what}: {error.why}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if "distances" not in answer:
        return str(answer.get("why"))
    return msgspec.convert(answer["distances"], Distances)


def wrong(seen: Distances) -> str | None:
    """Return what is wrong with a merged model that computes something else, None where it computes the same."""
    merged, base, noise = seen.merged, seen.base, seen.noise
    if merged.largest <= max(outside.SHARE * base.largest, outside.NOISE * seen.scale):
        return None
    quiet = noise is not None and (
        merged.largest <= noise.largest or (merged.cosine <= noise.cosine and merged.kl <= noise.kl)
    )
    if quiet and merged.cosine < base.cosine:
        return None
    return (
        f"on fixed inputs the merged model is {merged.largest:.3g} away from base and adapter together "
        f"(1 - cos {merged.cosine:.2g}, divergence {merged.kl:.2g}); the base alone is {base.largest:.3g} away "
        f"({base.cosine:.2g}, {base.kl:.2g})"
        + (f", and this precision costs {noise.largest:.3g} ({noise.cosine:.2g}, {noise.kl:.2g})" if noise else "")
    )


def facts(seen: Distances) -> dict[str, Any]:
    """Return the distances as the fact `behaviour`; what is no number is null, as JSON has no word for it."""
    each = {"merged": seen.merged, "base": seen.base} | ({"noise": seen.noise} if seen.noise is not None else {})
    return {
        "error": _number(seen.merged.largest),
        "distance": _number(seen.base.largest),
        "noise": _number(seen.noise.largest) if seen.noise is not None else None,
        "scale": _number(seen.scale),
        "cosine": {name: _number(one.cosine) for name, one in each.items()},
        "kl": {name: _number(one.kl) for name, one in each.items()},
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def told(seen: Distances) -> str:
    """Return what a sentence on the proof goes on with."""
    cost = f", and this precision costs {seen.noise.largest:.3g}" if seen.noise is not None else ""
    return (
        f"; on fixed inputs its outputs, up to {seen.scale:.3g}, are {seen.merged.largest:.3g} away from those of base "
        f"and adapter together, the base's {seen.base.largest:.3g}{cost}"
    )


def failed(seen: Compared, dtype: str) -> Finding:
    """Return the finding of a result in `dtype` that computes something else."""
    fix = "report this with the adapter"
    if dtype != "F32":
        fix = "merge in fp32 (a rule: merge_retry): where that passes, this precision was too coarse; else report this"
    return findings.finding("merge-unproven", "model", seen.wrong or "", fix, behaviour=seen.behaviour)


def untold(why: str) -> Finding:
    """Return the finding of a comparison that was asked for and could not be made."""
    return findings.finding(
        "merge-not-compared",
        "model",
        f"what the merged model computes was not compared with base and adapter: {why}",
        "the proof of its elements stands; compare them where they can be run",
    )
