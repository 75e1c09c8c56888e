"""The parent's part of a merge: refuse, make room, run the child, look at the result, publish it by one rename."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge import __version__
from weighbridge.adapters import inside, layout, paths
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.merge import base as bases
from weighbridge.adapters.merge import behave, children, identity, outside, pays, staging
from weighbridge.adapters.merge.children import Begun, Outside
from weighbridge.adapters.merge.outside import Configs
from weighbridge.adapters.merge.preview import COSINE, Look, update_lost
from weighbridge.adapters.merge.staging import OUT, Merged, Ready
from weighbridge.adapters.merge.values import Plan
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding

RECORD: Final = inside.MERGED

_NAMELESS: Final = "<path>"

SCHEMA: Final = "weighbridge/merge/1"


def merge(
    look: Look,
    target: Path,
    *,
    workers: int | None = None,
    unchanged: bool = False,
    behaviour: bool = False,
    device: str = "auto",
    progress: Callable[[int], None] | None = None,
) -> Merged:
    """Carry out what was looked at, into a folder that appears whole or not at all.

    `unchanged` allows a result that equals the base; `behaviour` has base, adapter and result run and compared, which
    takes the torch extra; `device` is as in `pays.chosen`. Raises RefusedError with its findings, ConflictError for a
    target that holds something else or is being written, DiskFullError, and what the child process raises; then nothing
    is published, and the same call goes on with the files that were finished.
    """
    ready = staging.ready(look, target, RECORD)
    if isinstance(ready, Merged):
        return ready
    if behaviour:
        outside.installed(behave.NEEDS)
    pays.chosen(ready.plan, device, 1)  # a GPU that cannot do it is told before anything is written
    with staging.working(ready) as there:
        if there is not None:
            return there
        look = _hashed(look)
        wish = behave.wish(ready.plan, _configs(look)) if behaviour else None
        begun = children.begun(ready, workers, _outside(look, ready.plan, unchanged=unchanged), device, wish)
        result = children.carry_out(begun, progress)
        return _settle(look, ready, result, unchanged=unchanged)


def begin(look: Look, target: Path, *, workers: int | None = None, behaviour: bool = False) -> Begun | Merged:
    """Refuse, make room and write the plan down; or return the same merge where the target holds it already.

    With `behaviour` the result is compared where it can be run: whoever carries it out may lack what that takes.
    Raises what `merge` raises before the first byte.
    """
    ready = staging.ready(look, target, RECORD)
    if isinstance(ready, Merged):
        return ready
    asked = _outside(look, ready.plan, unchanged=False)
    if asked is not None:
        outside.installed()
    staging.make(ready)
    wish = behave.wish(ready.plan, _configs(look)) if behaviour else None
    return children.begun(ready, workers, asked, behaviour=wish)


def standing(look: Look, target: Path) -> Merged | None:
    """Return the merge that was looked at where the target holds it, None for anything else; nothing is written.

    Raises RefusedError and NotFinishedError as `begin` does.
    """
    plan, bundle = staging.allowed(look)
    return staging.same(target, staging.plan_identity(plan, bundle), RECORD)


def finish(look: Look, target: Path, result: dict[str, Any], *, unchanged: bool = False) -> Merged:
    """Judge what a child process of `begin` wrote and publish the folder by one rename.

    Raises what `merge` raises after the child, and SourceChangedError where `look` gives another plan by now.
    """
    ready = staging.ready(look, target, RECORD)
    if isinstance(ready, Merged):
        return ready
    if not (ready.stage / OUT).is_dir():
        raise errors.SourceChangedError(
            "the merge was made from something else",
            why="adapter or base changed since it was begun",
            fix="merge again",
        )
    with staging.held(ready.stage):
        return _settle(_hashed(look), ready, result, unchanged=unchanged)


def _hashed(look: Look) -> Look:
    """Return a look with the digests of all adapters' weights; each file is read for it once, if at all.

    The files are those of the plan: the child that does the work holds them against it afterwards.
    """
    return look._replace(weights=tuple(map(identity.hashed, look.weights)))


def _outside(look: Look, plan: Plan, *, unchanged: bool) -> Outside | None:
    """Return what PEFT has to compute, None where the plan needs nothing of that."""
    if not any(step.computed for step in plan.steps):
        return None
    configs = _configs(look)
    return Outside(
        needed=int(look.facts["memory_bytes"]),
        base=str(configs.base),
        adapters=tuple(map(str, configs.adapters)),
        unchanged=unchanged,
    )


def _configs(look: Look) -> Configs:
    """Return the configs of both sides."""
    assert look.base is not None
    return Configs(
        Path(look.base.root) / layout.MODEL_CONFIG,
        tuple(Path(one.root) / layout.ADAPTER_CONFIG for one in look.adapters),
    )


def _settle(look: Look, ready: Ready, result: dict[str, Any], *, unchanged: bool) -> Merged:
    told = msgspec.convert(result.get("findings", []), list[Finding])
    found = [
        *look.findings,
        *_judged(result, ready, look, unchanged=unchanged),
        *told,
    ]
    device = {name: value for name, value in result["arithmetic"].items() if name.startswith("device")}
    facts = {**look.facts, **_facts(result), **device}
    staging.publish(ready, _record(look, ready.identity, result, found))
    return Merged(path=str(ready.target), plan=ready.identity, files=result["files"], facts=facts, findings=found)


def _judged(result: dict[str, Any], ready: Ready, look: Look, *, unchanged: bool) -> list[Finding]:
    """Return the findings of what was written. Raises RefusedError where it is not what it must be."""
    stage, plan = ready.stage, ready.plan
    proof, fidelity = result["proof"], result["fidelity"]
    if not proof["passed"]:
        apart = staging.quarantine(stage)
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
    compared = _compared(result)
    if compared.wrong is not None:
        apart = staging.quarantine(stage)
        failed = behave.failed(compared, plan.dtype)
        raise errors.RefusedError(
            "the merged model does not compute what base and adapter do",
            why=f"{compared.wrong}; it lies apart in {apart}",
            fix=failed.fix,
            findings=[failed],
        )
    looked_at = [step.name for step in plan.steps if step.factors or step.computed]
    still = [name for name in fidelity["tensors_unchanged"] if name in looked_at]
    others = any(step.touched and not (step.factors or step.computed) for step in plan.steps)
    if looked_at and len(still) == len(looked_at) and not others and not unchanged:
        shutil.rmtree(stage / OUT, ignore_errors=True)
        (stage / staging.JOURNAL).unlink(missing_ok=True)
        raise staging.nothing(len(still), result["dtype"])
    seen = inspect(stage / OUT)
    broken = [f for f in seen.findings if f.severity == "block"]
    if broken:
        raise errors.RefusedError(
            "the merged folder is not a whole model", why=broken[0].message, fix=broken[0].fix, findings=broken
        )
    found: list[Finding] = []
    if fidelity["cosine"] is not None and fidelity["cosine"] < COSINE:
        found.append(update_lost(result["dtype"], fidelity["unchanged_share"], fidelity["cosine"]))
    facts = _facts(result)
    base = identity.told(look.facts.get("base_identity"), look.findings)
    words = compared.words
    if facts.get("behaviour") is None:
        words = "; what it computes was not compared with base and adapter"
    found.append(
        findings.finding(
            inside.PROVEN,
            "model",
            f"{proof['tensors_copied']} tensors are the base's byte for byte, {proof['tensors_changed']} changed ones "
            f"were read again: {proof['elements_checked']} elements, none further from the exact sum than rounding "
            f"allows{words}. Of the base: {base}",
            **facts,
            adapter_weights=[*(one.sha256 for one in look.weights), *_before(look)],
        )
    )
    return found + ([behave.untold(compared.why)] if compared.why is not None else [])


def _before(look: Look) -> list[str]:
    """Return the digests of what the base held before."""
    assert look.base is not None
    return inside.held(Path(look.base.root))


def _compared(result: dict[str, Any]) -> behave.Compared:
    """Return what came of a comparison, an empty one where none was asked for."""
    return msgspec.convert(result.get("compared", {}), behave.Compared)


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the child found, under the names of the facts."""
    fidelity = result["fidelity"]
    facts = {
        "proof": result["proof"],
        "fidelity": {k: v for k, v in fidelity.items() if k != "tensors_unchanged" or v},
        "formula": result["formula"],
        "written_dtype": result["dtype"],
        "kept_files": result["kept"],
        "jail": result["jail"],
        **result.get("computed", {}),
    }
    if "compared" in result:
        facts["behaviour"] = _compared(result).behaviour
    if fidelity["unchanged_share"] is not None:
        facts |= {"unchanged_share": fidelity["unchanged_share"], "update_cosine": fidelity["cosine"]}
    return facts


def _record(look: Look, plan: str, result: dict[str, Any], found: list[Finding]) -> dict[str, Any]:
    """Return the record of a merge; no path of this machine stands in it.

    `base` is what was merged into, by name and commit where it has such, `base_tensors` what tells it from others in
    any case; what an adapter names as its base stands with the adapter.
    """
    assert look.base is not None
    base = bases.read(Path(look.base.root))
    facts = {**look.facts, **_facts(result)}
    return {
        "schema": SCHEMA,
        "plan": plan,
        "tool": {"name": "weighbridge", "version": __version__},
        "base": look.called or identity.cached(Path(look.base.root)),
        "base_tensors": identity.fingerprint(base) if base is not None else None,
        "adapters": [
            {
                "base_model": _NAMELESS if paths.is_local(one.base.id) else one.base.id,
                "type": one.adapter.peft_type if one.adapter is not None else None,
                "weights_sha256": weights.sha256,
            }
            for one, weights in zip(look.adapters, look.weights, strict=True)
        ],
        "formula": result["formula"],
        "dtype": result["dtype"],
        "arithmetic": result["arithmetic"],
        "files": result["files"],
        "facts": {name: value for name, value in facts.items() if not paths.scan_value("", {name: value})},
        "findings": msgspec.to_builtins([paths.redacted(one) for one in found]),
    }
