"""Merges that PEFT's own layers compute: planned from headers, carried out in a jailed child, then written by us.

    view/base, view/adapter0   links to exactly the files that were judged, under the names loaders look for
    home/computed              what the child wrote: the changed tensors in fp32

What the child changed becomes the origin of its tensors in the plan; files, proof and bundle are those of any merge.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import jail, keys, layout, worker
from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.jail import Policy
from weighbridge.adapters.memory import Room
from weighbridge.adapters.merge.adapter import Adapter
from weighbridge.adapters.merge.base import EMBEDDINGS, HEADS, Base, source
from weighbridge.adapters.merge.names import Names
from weighbridge.adapters.merge.place import Placed
from weighbridge.adapters.merge.values import Origin, Plan, Source, Step
from weighbridge.adapters.reading import table_at
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding, Value

TASK: Final = "weighbridge.adapters.merge.peft_job:run"
RECORD: Final = "computed.json"
"""What the child answered, inside the staging folder: a merge that is begun again takes it from there."""

LIBRARIES: Final = 1 << 30
"""Bytes that torch, transformers and PEFT take themselves."""

_DECOMPOSED: Final = frozenset({"OSF", "ADAMSS", "PSOFT", "FROD"})
"""Types that take every adapted weight apart and keep the parts."""

SHARE: Final = 1e-2
"""The share of the adapter's own effect on the outputs by which a merge may miss it."""

NOISE: Final = 1e-4
"""The share of the outputs that single precision may lose on its way through the layers."""

_ACTS: Final = frozenset(
    {
        "auto_map", "auto_mapping", "megatron_config", "megatron_core", "quantization_config", "attn_implementation",
        "_attn_implementation", "_attn_implementation_internal", "use_kernels",
    }
)  # fmt: skip
"""Fields of configs that make a library import a module, run code of the folder, fetch a kernel or quantize."""

QUIET: Final = (
    ("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"), ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("CUDA_VISIBLE_DEVICES", ""),
)  # fmt: skip


class Behaviour(Value, frozen=True):
    """How far outputs on fixed inputs are apart, the largest difference each; `scale` is the largest output."""

    error: float
    """The merged model from base and adapter together."""
    distance: float
    """These from the base alone."""
    scale: float


class Told(Value, frozen=True):
    """What the child answers; `behaviour` is None where it does not know inputs for such a model."""

    changed: list[str]
    behaviour: Behaviour | None
    versions: dict[str, str | int]


class Computed(NamedTuple):
    """A plan whose computed tensors have their values, what was seen on the way, and findings."""

    plan: Plan
    facts: dict[str, Any]
    findings: list[Finding]
    still: tuple[str, ...]
    """Weights the adapter is for and PEFT left as they were."""


# ------------------------------------------------------------------------------------------------------------- planning


class Configs(NamedTuple):
    """The configs of both sides, as files; the adapters in their order."""

    base: Path
    adapters: tuple[Path, ...]


def place(base: Base, adapters: Mapping[str, Adapter]) -> Placed:
    """Return which tensors of a base some unsorted adapters are for, and what stands against it.

    A module's bias may be changed beside its weight. The adapters come by the subject of their findings.
    """
    placed = Placed()
    names = Names(base.places)
    for subject, adapter in adapters.items():
        _adapter(adapter, _Onto(base, names, placed, subject))
    return placed


class _Onto(NamedTuple):
    """What an adapter is placed on, and the subject of what is found."""

    base: Base
    names: Names
    placed: Placed
    subject: str


def _adapter(adapter: Adapter, onto: _Onto) -> None:
    prefix = keys.parameter_prefix(str(adapter.config.get("peft_type") or "").upper())
    modules: set[str] = set()
    shared = False  # something hangs on the model itself, for all layers
    for name, origin in adapter.whole.items():
        key = keys.parse(name, prefix)
        inner = _inner(key, prefix)
        if inner is None and key.module.endswith(".base_layer") and key.tail != "bias":
            target = onto.names.find(f"{_bare(key.module)}.{key.tail}").name
            onto.placed.copies += [(target, origin)] if target is not None else []
        elif inner is None:
            _whole(key, origin, onto)
        elif key.prefixed and inner:
            modules.add(_bare(inner))
        else:
            shared = True
    if shared and not modules:
        modules = _targets(onto.base, adapter.config)
    for module in sorted(modules):
        _module(module, onto)


def _inner(key: keys.Key, prefix: str) -> str | None:
    """Return the module that a parameter of the adapter's type hangs on, None for a whole tensor of the model."""
    if key.part:
        return key.module
    segments = key.module.split(".")
    root = prefix.split("_", maxsplit=1)[0] + "_"
    at = next((number for number, segment in enumerate([*segments, key.tail]) if segment.startswith(root)), None)
    return None if at is None else ".".join(segments[:at])


def _targets(base: Base, config: Mapping[str, Any]) -> set[str]:
    """Return the modules that a config targets by name or pattern."""
    targets = config.get("target_modules")
    every = {name.removesuffix(".weight") for name in base.places if name.endswith(".weight")}
    if isinstance(targets, str):
        return {module for module in every if keys.matches(targets, module)}
    names = [str(name) for name in targets] if isinstance(targets, list) else []
    return {module for module in every if any(f".{module}".endswith(f".{name}") for name in names)}


def _bare(module: str) -> str:
    return module.replace(".base_layer", "").replace(".token_adapter", "")


def _module(module: str, onto: _Onto) -> None:
    base, names, placed, subject = onto
    found = names.find(f"{module}.weight")
    head = _tied_head(base, f"{module}.weight") if found.name is None else None
    if head is not None:
        assert base.embedding is not None
        placed.new[head] = base.embedding
        placed.computed.add(head)
    elif found.name is None:
        near = names.nearest(f"{module}.weight")
        placed.refuse(
            "merge-target-missing",
            subject,
            f"the base has no {module}.weight, which the adapter is for; the nearest names are "
            f"{' or '.join(found.several[:4]) or ', '.join(near) or 'none'}",
            "merge into the base the adapter was trained on",
            unmatched_module=module,
            nearest=near,
        )
    else:
        placed.computed.add(found.name)
        bias = found.name.removesuffix("weight") + "bias"
        if found.name.endswith(".weight") and bias in base.places:
            placed.computed.add(bias)


def _tied_head(base: Base, name: str) -> str | None:
    """Return the name a head gets that shares the embedding's tensor so far, None where `name` is no such head."""
    module, _, leaf = name.rpartition(".")
    if not base.tied or base.embedding is None or base.head is not None or leaf != "weight":
        return None
    return base.parted(module) if module.rpartition(".")[2] in HEADS else None


def _whole(key: keys.Key, origin: Origin, onto: _Onto) -> None:
    base, names, placed, subject = onto
    module = _bare(key.module.replace(".modules_to_save", ""))
    name = f"{module}.{key.tail}" if module else key.tail
    found = names.find(name).name
    head = _tied_head(base, name) if found is None else None
    if head is not None and base.embedding is not None and base.places[base.embedding].shape == origin.shape:
        placed.new[head] = base.embedding
        placed.computed.add(head)
    elif found is None or (base.tied and base.head is None and found == base.embedding):
        placed.refuse(
            "merge-tensor-unused",
            subject,
            f"nothing in the base takes {key.name} alone; the nearest names are {', '.join(names.nearest(name))}",
            "merge into the base the adapter was trained on, with the head that it was trained with",
            unused_tensor=key.name,
        )
    elif base.places[found].shape != origin.shape:
        grown = found.removesuffix(".weight").rpartition(".")[2] in (*EMBEDDINGS, *HEADS)
        placed.mismatch[found] = [list(origin.shape), list(base.places[found].shape)]
        if grown:
            placed.refuse(
                "merge-not-streamed",
                subject,
                f"{found} has another vocabulary in the adapter; PEFT's own merge is made for the base's alone",
                "resize the base first, then merge into that",
            )
    else:
        placed.computed.add(found)


def need(base: Base, configs: Sequence[Mapping[str, Any]], plan: Plan) -> int:
    """Return an estimate of the bytes that PEFT's merge takes: the whole model in fp32, and what is on its way.

    Beside the model there are the adapter, twice while it is loaded, and some tensors of the largest weight's size:
    PEFT's delta, what it is made of, and the sum.
    """
    counts = [origin.count for origin in base.places.values()]
    touched = [step.origin.count for step in plan.steps if step.computed]
    kept = 3 * sum(touched) if any(str(one.get("peft_type")).upper() in _DECOMPOSED for one in configs) else 0
    adapters = sum(one.size for one in plan.sources[plan.base_files :])
    return 4 * (sum(counts) + kept + 8 * max(touched, default=0)) + 4 * adapters + LIBRARIES


def short(needed: int, room: Room) -> Finding | None:
    """Return the refusal where the memory does not hold the merge."""
    if needed <= room.free:
        return None
    return findings.finding(
        "merge-memory-short",
        "adapter",
        f"the merge is PEFT's own, with the whole model in fp32: that takes about {needed} bytes of memory, here are "
        f"{room.free} ({room.by})",
        "merge it on a machine with more memory",
        needed_bytes=needed,
        free_bytes=room.free,
    )


# ------------------------------------------------------------------------------------------------------------ the work


class Order(NamedTuple):
    """What the child is asked, and what it may do."""

    request: dict[str, Any]
    policy: Policy


def installed(why: str = "this adapter is merged by PEFT itself, which needs torch, transformers and peft") -> None:
    """Raise WeighbridgeError where torch, transformers or PEFT are not installed; `why` says what for."""
    if any(find_spec(name) is None for name in ("torch", "peft", "transformers")):
        raise errors.WeighbridgeError(
            "the torch extra is not installed",
            why=why,
            fix="pip install 'weighbridge[torch]'",
        )


def compute(plan: Plan, stage: Path, *, needed: int, configs: Configs, progress: worker.Tell | None = None) -> Computed:
    """Have PEFT merge in a jailed child, and return the plan with the values that came of it.

    `needed` is the estimate of its memory. What a killed merge has computed is used again. Raises RefusedError where
    PEFT or transformers refuse, where something else than the adapted modules changed or where the merged model
    computes something else than base and adapter; JailedError; LimitError.
    """
    installed()
    record = stage / RECORD
    if not record.exists():
        order = ordered(plan, stage, needed=needed, configs=configs)
        ended = worker.jailed(TASK, order.request, order.policy, progress=progress)
        for path in sorted((stage / "home" / "computed").glob("*")):
            _sync(path)
        _write(record, {"told": ended.result, "held": ended.held._asdict(), "peak": ended.peak})
    kept = json.loads(record.read_bytes())
    computed = settle(plan, stage, kept["told"], jail.Held(**kept["held"]))
    return computed._replace(facts=computed.facts | {"memory_peak": kept["peak"]})


def ordered(plan: Plan, stage: Path, *, needed: int, configs: Configs) -> Order:
    """Lay the inputs out in `stage`/view and an empty `stage`/home, and return what the child is asked."""
    view, home = stage / "view", stage / "home"
    for folder in (view, home):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    unties = _unties(plan)
    show(plan, view, configs, untied=unties)
    workers = max(1, len(os.sched_getaffinity(0)))
    seconds = 3600 + sum(one.size for one in plan.sources) // (2 << 20)
    policy = Policy(
        reads=(str(view), *(one.path for one in plan.sources)),
        writes=(str(home),),
        memory=needed + needed // 2,
        processor=seconds * workers,
        clock=seconds,
        workers=workers,
        variables=QUIET,
    )
    request = {
        "view": str(view),
        "home": str(home),
        "adapters": len(configs.adapters),
        "workers": workers,
        "untied": unties,
    }
    return Order(request, policy)


def show(plan: Plan, view: Path, configs: Configs, *, untied: bool) -> None:
    """Lay links to exactly the files that were judged, under the names loaders look for.

    `untied` parts the base's embedding and head.
    """
    files = [
        (Path(one.path), [step.name for step in plan.steps if _is_stored(step, number)])
        for number, one in enumerate(plan.sources[: plan.base_files])
    ]
    lay(view / "base", configs.base, files, untied=untied)
    for number, (one, config) in enumerate(zip(plan.sources[plan.base_files :], configs.adapters, strict=True)):
        adapter = view / f"adapter{number}"
        adapter.mkdir()
        (adapter / layout.ADAPTER_WEIGHTS).symlink_to(one.path)
        _copy_config(config, adapter / layout.ADAPTER_CONFIG)


def lay(folder: Path, config: Path, files: Sequence[tuple[Path, Sequence[str]]], *, untied: bool = False) -> None:
    """Make a model folder of links to weights files, each with the names of its tensors, and a config without acts."""
    folder.mkdir()
    _copy_config(config, folder / layout.MODEL_CONFIG, untied=untied)
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / name).symlink_to(path)
        weight_map |= dict.fromkeys(names, name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _is_stored(step: Step, file: int) -> bool:
    """Return whether a file of the base holds the tensor of a step: a head that was tied has none of its own."""
    return step.origin.file == file and step.origin.name == step.name


def _unties(plan: Plan) -> bool:
    """Return whether embedding and head, one tensor in the base, are two in the result."""
    return any(step.origin.name != step.name for step in plan.steps)


def _copy_config(source: Path, target: Path, *, untied: bool = False) -> None:
    """Copy a config without the fields that make a library do more than compute; `untied` parts embedding and head."""
    config = table_at(source)
    if config is None:
        raise errors.SourceChangedError(f"{source} holds no config any more", fix="merge again")
    if untied:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    target.write_text(json.dumps({name: value for name, value in config.items() if name not in _ACTS}))


def _sync(path: Path) -> None:
    """Make a file durable that a library wrote, before anything says that it is there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, told: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".new")
    with scratch.open("wb") as stream:
        stream.write(json.dumps(told).encode())
        stream.flush()
        os.fsync(stream.fileno())
    scratch.rename(path)


def settle(plan: Plan, stage: Path, told: Mapping[str, Any], held: jail.Held) -> Computed:
    """Return the plan with what the child wrote; it must be of the adapted modules, of their shapes, and right."""
    try:
        seen = msgspec.convert(told, Told)
    except msgspec.ValidationError as error:
        raise _wrong(f"the child's answer is not understood: {error}") from error
    sources, values = _values(stage / "home" / "computed", len(plan.sources))
    names = Names(step.name for step in plan.steps)
    allowed = {step.name: step for step in plan.steps if step.computed}
    found: dict[str, Origin] = {}
    for name, origin in values.items():
        target = names.find(name).name
        if target not in allowed or origin.shape != allowed[target].shape or origin.dtype != "F32" or target in found:
            raise _wrong(f"PEFT changed {name}, which the adapter is not for")
        found[target] = origin
    _behaves(seen.behaviour)
    files = tuple(
        msgspec.structs.replace(file, steps=tuple(_with(step, found) for step in file.steps)) for file in plan.files
    )
    weak = jail.finding(held)
    facts = {
        "merged_by": seen.versions,
        "behaviour": msgspec.to_builtins(seen.behaviour),
        "jail": held._asdict(),
    }
    moved = {name.rpartition(".")[0] for name in found}
    still = tuple(sorted(name for name in allowed.keys() - found.keys() if name.rpartition(".")[0] not in moved))
    settled = msgspec.structs.replace(plan, sources=(*plan.sources, *sources), files=files)
    return Computed(settled, facts, [weak] if weak is not None else [], still)


def _values(folder: Path, first: int) -> tuple[list[Source], dict[str, Origin]]:
    sources: list[Source] = []
    values: dict[str, Origin] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = safetensors.read(path)
        for one in header.tensors.values():
            values[one.name] = Origin(
                file=first + len(sources), at=header.data_start + one.begin, dtype=one.dtype, shape=one.shape,
                name=one.name,
            )  # fmt: skip
        sources.append(source(path))
    return sources, values


def _with(step: Step, found: Mapping[str, Origin]) -> Step:
    if not step.computed:
        return step
    if step.name not in found:
        return msgspec.structs.replace(step, computed=False)
    return msgspec.structs.replace(step, origin=found[step.name], base=step.origin)


def _behaves(seen: Behaviour | None) -> None:
    """Raise RefusedError where the merged model's outputs are not those of base and adapter together."""
    if seen is None:
        return
    if not seen.error <= max(SHARE * seen.distance, NOISE * seen.scale):
        raise _wrong(
            f"on fixed inputs the merged model is {seen.error:.3g} away from base and adapter together, "
            f"these are {seen.distance:.3g} away from the base"
        )


def _wrong(why: str) -> errors.RefusedError:
    failed = findings.finding("merge-unproven", "model", why, "serve the adapter beside its base; report this")
    return errors.RefusedError("PEFT's merge is not right", why=why, fix=failed.fix, findings=[failed])
