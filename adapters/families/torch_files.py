"""One torch file outside of a model folder (.pt .pth .ckpt .bin .th): which weights come out of it, and may they go.

Lightning, plain training loops, DDP, FSDP and torch.compile, textual inversions, optimizer state alone, programs.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from weighbridge.adapters import audit, fit, keys, layout, quantization, torch_weights, weights
from weighbridge.adapters.draft import Draft, read_json
from weighbridge.adapters.families import image_lora, lightning, pickled
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.safetensors import Header, Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.torch_weights import Held
from weighbridge.adapters.values import broken
from weighbridge.adapters.whole import some, without_config
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts

_STEPS: Final = ("global_step", "step", "iteration", "global_steps", "num_updates", "iter", "steps")
_STEP_IN_NAME = re.compile(
    r"(?:^|[-_.=])(?:global_?)?(?:step|iter|iteration)s?[-_=]?([0-9]{1,15})(?=[-_.]|$)", re.IGNORECASE
)
_TOKEN = re.compile(r"<[^<>\s]{1,80}>|\*")
_TOKEN_FILES: Final = ("learned_embeds", "string_to_param")
_EMBEDDINGS_FEW: Final = 64


def judge(place: Place, file: File, *, several: bool = False) -> Draft:
    """Return one torch file as a draft; `several` says that others like it lie in the folder."""
    draft = Draft(place, "ckpt", "model", Named(root=place.folder, weights=(file.path,)))
    draft.alone = file.path if several else None
    kind = "dead-link" if file.link is not None else place.reader.container(file)
    if kind not in sniff.PICKLED:
        draft.kind = None
        known = kind in {"lfs-pointer", "link-text", "dead-link", "empty"}
        draft.findings.append(pickled.absent(file, place.reader, kind) if known else _odd(file, kind))
        draft.facts |= {"file": file.path, "file_bytes": file.size, "container": kind}
        return draft
    if kind == "torchscript":
        draft.artifact, draft.kind = "torchscript", None
    held = take(draft, file)
    if held.selection is not None and held.selection.rule == "optimizer-only":
        draft.artifact = "optimizer-only"
    if not held.tensors:
        draft.kind = None
        return draft
    if layout.is_averaged(file.name.rpartition(".")[0]):
        draft.facts["averaged"] = True
    dialect = image_lora.dialect(held.tensors)
    if _is_inversion(file.name, held.tensors):
        _inversion(draft, held.tensors)
    elif dialect is not None and dialect != "lora-unknown":
        draft.artifact, draft.kind = dialect, "adapter"
        image_lora.describe(draft, file.path, dialect, Header(file.size, 0, held.tensors, None), _alphas(file, held))
    else:
        lora(draft, file, held.tensors)
        if draft.kind == "model" and held.sound:
            _against_config(draft, held.tensors)
    values(draft, file, held)
    if held.sound and draft.kind is not None:
        draft.convert = (file.path,)
    return draft


def _against_config(draft: Draft, tensors: Mapping[str, Tensor]) -> None:
    """Compare the weights with the config that would go along, as for a model folder."""
    config = read_json(draft, layout.MODEL_CONFIG, needed=True)
    subject = draft.place.path(layout.MODEL_CONFIG)
    if config is None:
        if layout.MODEL_CONFIG not in draft.place.names:
            draft.findings.append(without_config(subject, draft.named.weights, owed=False))
        return
    packing = quantization.of(config, None)
    draft.add(*fit.judge(config, tensors, packing, subject))
    draft.add(*fit.required(config, tensors, subject))
    if draft.weights is not None:
        draft.weights = msgspec.structs.replace(draft.weights, architecture=draft.facts.get("architecture"))


def take(draft: Draft, file: File) -> Held:
    """Read a torch file and put what it says into a draft."""
    held = torch_weights.read(file, draft.place.reader)
    draft.add(held.facts, held.findings)
    if held.tensors:
        counted, draft.weights = weights.summary(held.tensors)
        draft.facts |= counted
    if held.directory is not None:
        draft.facts |= lightning.told(file, held.directory)
    draft.step = step_of(held, file.name)
    if draft.step is not None:
        draft.facts["step"] = draft.step
    return held


def _alphas(file: File, held: Held) -> dict[str, int | float | None]:
    """Return the values of the alpha tensors by name."""
    try:
        return {
            tensor.name: image_lora.scalar(tensor.dtype, b"".join(parts))
            for tensor, parts in torch_weights.streams(file, held)
            if image_lora.is_alpha(tensor.name) and tensor.elements == 1
        }
    except (OSError, FormatFault):
        return {}


def _odd(file: File, kind: str) -> Any:
    return (
        pickled.lying([(file, kind)])
        if kind not in {"unknown", "unreadable"}
        else findings.finding(
            "not-recognised" if kind == "unknown" else "file-unreadable",
            file.path,
            f"{file.path}: "
            + ("its content is of no kind that is known" if kind == "unknown" else "it cannot be opened"),
            "save or copy the file again",
            file=file.path,
            file_bytes=file.size,
        )
    )


def step_of(held: Held, name: str) -> int | None:
    """Return the training step that a torch file states, else the one in its name."""
    stated = {e.name: e.value for e in held.directory.entries} if held.directory is not None else {}
    for key in _STEPS:
        value = stated.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    match = _STEP_IN_NAME.search(name.rpartition(".")[0])
    return int(match[1]) if match else None


def lora(draft: Draft, file: File, tensors: Mapping[str, Tensor]) -> None:
    """Tell adapter weights inside: alone they need their config, beside a base they can be taken out."""
    mine, others = torch_weights.lora_split(tensors)
    if not mine:
        return
    if keys.is_torchtune(mine):
        draft.artifact, draft.kind = "lora-adapter" if not others else draft.artifact, None
        draft.add({"lora_tensors": len(mine), "base_tensors": len(others)}, [audit.torchtune(file.path)])
        return
    it = audit.load({name: tensors[name] for name in mine}, {}, file.path, "")
    shown, _ = audit.ranks(it)
    draft.facts |= shown
    if others:
        draft.kind = None
        draft.add({"lora_tensors": len(mine), "base_tensors": len(others)}, [inside(file.path, len(mine), len(others))])
        return
    path = draft.place.path(layout.ADAPTER_CONFIG)
    draft.artifact, draft.kind = "lora-adapter", None
    draft.add(
        {"missing_files": [path], "alpha": None, "rank": None, "base_model": None},
        [adapter_alone(path, file.path, len(mine), shown.get("rank_from_shapes"))],
    )


def adapter_alone(path: str, subject: str, count: int, rank: Any) -> Any:
    """Return the finding for adapter weights whose config, `path`, is not there."""
    return findings.finding(
        "config-missing",
        path,
        f"{subject} holds {count} LoRA tensors"
        + (f" of rank {rank}" if rank else "")
        + f", and {path} is missing: type, alpha and base are unknown",
        "put the adapter_config.json of the training beside it; then the tensors are taken out",
        missing_files=[path],
    )


def inside(subject: str, mine: int, others: int) -> Any:
    """Return the finding for adapter weights beside the base they were trained on."""
    return findings.finding(
        "adapter-inside",
        subject,
        f"{subject} holds {mine} adapter tensors beside {others} of the base: together {mine + others}, "
        f"the adapter alone is {mine}",
        "put its adapter_config.json beside it, and the adapter is published; or: registry extract --adapter",
        lora_tensors=mine,
        base_tensors=others,
    )


def values(draft: Draft, file: File, held: Held) -> None:
    """Look at every value of a set that is not too large."""
    draft.facts["values_checked"] = held.sound and draft.facts.get("payload_bytes", 0) <= draft.place.reader.values
    if not draft.facts["values_checked"]:
        return
    nan: dict[str, int] = {}
    inf: dict[str, int] = {}
    try:
        for name, seen in torch_weights.numbers(file, held):
            if seen.nan:
                nan[name] = seen.nan
            if seen.inf:
                inf[name] = seen.inf
    except (OSError, FormatFault):
        draft.facts["values_checked"] = False
        return
    draft.findings.extend(broken(file.path, nan, inf))


# --------------------------------------------------------------------------------------------------- textual inversions


def _is_inversion(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file holds the vectors of new words: names in angle brackets, or the tools' own file names."""
    if len(tensors) > _EMBEDDINGS_FEW or any(len(t.shape) not in {1, 2} for t in tensors.values()):
        return False
    named = name.startswith(_TOKEN_FILES[0])
    return named or all(_TOKEN.fullmatch(key) or key in {"emb_params", "clip_l", "clip_g"} for key in tensors)


def _inversion(draft: Draft, tensors: Mapping[str, Tensor]) -> None:
    draft.artifact, draft.kind = "textual-inversion", "adapter"
    draft.adapter = AdapterFacts(peft_type="TEXTUAL_INVERSION")
    draft.base = BaseFacts(relation="adapter")
    draft.facts |= {
        "tokens": sorted(tensors),
        "dimensions": sorted({t.shape[-1] for t in tensors.values() if t.shape}),
        "base_model": None,
    }
    draft.findings.append(
        findings.finding(
            "token-rows",
            draft.named.weights[0],
            f"the vectors of new words ({some(sorted(tensors))}): a textual inversion, no model of its own",
            tokens=sorted(tensors),
        )
    )
