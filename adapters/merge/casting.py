"""Give a model another precision: the streaming of a merge without an adapter, every element rounded once and proven.

What a cast cannot be made of is told in words: packed weights, files that are no safetensors, values that the new
precision cannot hold. The result is a folder of its own with a record beside the weights, `cast.json`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge import __version__
from weighbridge.adapters import inside, layers, layout, listing, packed_weights, quantization
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge import base as bases
from weighbridge.adapters.merge import bundle as bundles
from weighbridge.adapters.merge import children, staging
from weighbridge.adapters.merge import plan as plans
from weighbridge.adapters.merge.base import Base
from weighbridge.adapters.merge.place import Placed
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import OUT, Merged, Ready
from weighbridge.adapters.merge.values import DTYPES, WIDTH
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.whole import some
from weighbridge.registry import errors, findings
from weighbridge.registry.findings import outcome
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

RECORD: Final = inside.CAST

SCHEMA: Final = "weighbridge/cast/1"
FORMULA: Final = "round(W), once, to nearest, ties to even"
_FACTS: Final = ("architecture", "tensor_count", "param_count", "payload_bytes", "dtype_histogram", "config_dtype")


def look(folder: Path, *, dtype: str, keep: Sequence[str] = ()) -> Look:
    """Return what casting the model in a folder would give; headers are read and configs.

    `dtype` is a name of DTYPES, `keep` holds classes of layers (`layers.CLASSES`) that get fp32. Raises OSError where
    the folder is gone, UsageError for a class that there is none of.
    """
    seen = inspect(folder)
    able = [one for one in seen.artifacts if one.kind in {"model", "quantized"}]
    able = [one for one in able if one.relative == "."] or able
    if len(able) != 1:
        told = [f for f in seen.findings if f.severity == "block" or findings.CODES[f.code].waits]
        return _answer(
            None, {}, told or [_no_model(Path(seen.path), seen.artifact, [one.kind for one in seen.artifacts])]
        )
    judged = able[0]
    facts: dict[str, Any] = {name: judged.facts[name] for name in _FACTS if name in judged.facts}
    found = [f for f in judged.findings if f.severity == "block" or findings.CODES[f.code].waits]
    model = bases.read(Path(judged.root)) if not found else None
    if model is None:
        found = found or [
            _impossible(f"the model ({judged.artifact}) holds no safetensors weights", "registry extract makes them")
        ]
        return _answer(judged, facts, found)
    found = _refusals(model)
    dtypes = _dtypes(model, DTYPES[dtype], keep)
    facts["cast"] = _changes(model, dtypes)
    facts["keep_fp32"] = sorted(keep)
    if not found and not facts["cast"]:
        found.append(
            findings.finding(
                "cast-changes-nothing",
                layout.MODEL_CONFIG,
                f"every weight is in {dtype} already" + (", or is to stay as it is" if keep else ""),
                "choose another --dtype",
            )
        )
    if found:
        return _answer(judged, facts, found)
    planned = plans.make(model, {}, Placed(), model.sources, dtypes=dtypes, subject=layout.MODEL_CONFIG)
    made, more = bundles.make(model, planned, bundles.folder(judged), [])
    return _answer(judged, facts | planned.facts, [*planned.findings, *more], planned, made)


def cast(
    look: Look,
    target: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Merged:
    """Carry out what was looked at, into a folder that appears whole or not at all.

    Raises RefusedError with its findings, or with the tensors that the precision cannot hold; ConflictError for a
    target that holds something else or is being written; DiskFullError; and what the child process raises. Then nothing
    is published, and the same call goes on with the files that were finished.
    """
    ready = staging.ready(look, target, RECORD)
    if isinstance(ready, Merged):
        return ready
    with staging.working(ready) as there:
        if there is not None:
            return there
        result = children.carry_out(children.begun(ready, workers), progress)
        found = [*look.findings, *_judged(result, ready, look)]
        facts = {**look.facts, **_facts(result)}
        record = {
            "schema": SCHEMA,
            "plan": ready.identity,
            "tool": {"name": "weighbridge", "version": __version__},
            "formula": FORMULA,
            "dtype": result["dtype"],
            "arithmetic": result["arithmetic"],
            "files": result["files"],
            "facts": facts,
            "findings": msgspec.to_builtins(found),
        }
        staging.publish(ready, record)
    return Merged(path=str(ready.target), plan=ready.identity, files=result["files"], facts=facts, findings=found)


def known(keep: Sequence[str]) -> None:
    """Raise UsageError for a class of layers that there is none of."""
    unknown = set(keep) - set(layers.CLASSES)
    if unknown:
        raise errors.UsageError(f"'{shown(min(unknown))}' is no class of layers", fix=", ".join(layers.CLASSES))


def _dtypes(model: Base, wanted: str, keep: Sequence[str]) -> dict[str, str]:
    """Return the dtype of every tensor; those of the classes in `keep` get fp32. Raises UsageError."""
    known(keep)
    return {
        name: origin.dtype if origin.dtype not in WIDTH else "F32" if layers.layer_class(name) in keep else wanted
        for name, origin in model.places.items()
    }


def _changes(model: Base, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Return how many tensors change from which dtype to which."""
    found: dict[str, int] = {}
    for name, origin in model.places.items():
        if dtypes[name] != origin.dtype:
            label = f"{origin.dtype} to {dtypes[name]}"
            found[label] = found.get(label, 0) + 1
    return found


def _refusals(model: Base) -> list[Finding]:
    """Return what forbids a cast: weights that are not stored as plain numbers."""
    place = Place(Reader(listing.read_tree(model.root)), ".")
    packing = quantization.of(model.config, place.table("quantize_config.json"))
    if packed_weights.is_packed(model.weights.tensors):
        method = packing.method if packing is not None else "an unknown method"
        return [
            findings.finding(
                "cast-impossible",
                layout.MODEL_CONFIG,
                f"the model is quantized ({method}): its weights are codes and have no other precision to be cast to",
                "cast the 16-bit model that it was made from",
                quant_method=method,
            )
        ]
    odd = sorted(name for name, one in model.places.items() if one.dtype.startswith("F") and one.dtype not in WIDTH)
    if odd:
        return [_impossible(f"{some(odd)} are stored as {model.places[odd[0]].dtype}, numbers with scales beside them")]
    return []


def _no_model(folder: Path, artifact: str | None, kinds: Sequence[str | None]) -> Finding:
    """Return the refusal of a folder that is no one model; one that was fetched is known by its last name alone."""
    name = shown(Path(os.path.realpath(folder)).name)
    fix = "merge it into its base, which casts as well: registry merge ... --dtype" if kinds == ["adapter"] else None
    return _impossible(f"{name} holds {artifact or 'nothing known'}, and no one model", fix)


def _impossible(message: str, fix: str | None = "cast a model in safetensors, of 16, 32 or 64 bits") -> Finding:
    return findings.finding("cast-impossible", "model", message, fix or "name the folder of one model")


def _answer(
    judged: Artifact | None,
    facts: dict[str, Any],
    found: list[Finding],
    planned: plans.Planned | None = None,
    made: Any = None,
) -> Look:
    return Look((), judged, outcome(found), facts, found, [], planned, made, what="cast")


def _judged(result: dict[str, Any], ready: Ready, look: Look) -> list[Finding]:
    """Return the finding of what was written. Raises RefusedError where it is not what it must be."""
    proof = result["proof"]
    if not proof["passed"]:
        apart = staging.quarantine(ready.stage)
        failed = findings.finding(
            "cast-unproven",
            "model",
            f"{len(proof['failures'])} tensors are not the rounded ones: {'; '.join(proof['failures'][:3])}",
            "do not use it; report this",
            **proof,
        )
        raise errors.RefusedError(
            "the written model failed its proof", why=f"{failed.message}; it lies apart in {apart}", findings=[failed]
        )
    broken = [f for f in inspect(ready.stage / OUT).findings if f.severity == "block"]
    if broken:
        raise errors.RefusedError(
            "the cast folder is not a whole model", why=broken[0].message, fix=broken[0].fix, findings=broken
        )
    assert look.base is not None
    held = inside.held(Path(look.base.root))  # a merge into the result must see what is in the original
    carried: dict[str, Any] = {"adapter_weights": held} if held else {}
    return [
        findings.finding(
            inside.CAST_PROVEN,
            "model",
            f"{proof['tensors_copied']} tensors are the original's byte for byte, {proof['tensors_cast']} were read "
            f"again: every one of {proof['elements_cast']} elements is the original's, rounded once; "
            f"{proof['elements_exact']} are equal to it, {proof['elements_to_zero']} became zero",
            **_facts(result),
            cast=look.facts["cast"],
            keep_fp32=look.facts["keep_fp32"],
            **carried,
        )
    ]


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "proof": result["proof"],
        "formula": FORMULA,
        "written_dtype": result["dtype"],
        "kept_files": result["kept"],
        "jail": result["jail"],
    }
