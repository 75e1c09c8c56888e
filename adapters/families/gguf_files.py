"""GGUF: whole models, models split into numbered files, LoRA adapters, vocabularies; and files cut into byte parts."""

from collections.abc import Mapping
from typing import Any, Final

from weighbridge.adapters import layout, torch_weights, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import pickled
from weighbridge.adapters.formats import readers
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts, DtypeCount, WeightsFacts

_PLAIN: Final = frozenset({"F32", "F16", "BF16", "F64"})
_TOLD: Final = (
    "gguf_version", "architecture", "file_type", "has_chat_template", "tokenizer_entries", "metadata_keys",
    "vocab_only", "adapter_type", "split_count",
)  # fmt: skip
_INTEGERS: Final = frozenset({"I8", "I16", "I32", "I64"})


def sets(files: Mapping[str, File]) -> list[tuple[File, ...]]:
    """Return the files of a folder by set: the parts of one split together, every other file alone."""
    found: dict[tuple[str, int], list[File]] = {}
    for name, file in sorted(files.items()):
        shard = layout.shard_of(name)
        key = (shard[0], shard[2]) if shard is not None and shard[3] == "gguf" else (name, 0)
        found.setdefault(key, []).append(file)
    return [tuple(group) for group in found.values()]


def judge(place: Place, files: tuple[File, ...], *, several: bool = False) -> Draft:
    """Return one GGUF model, split or not, or one adapter, as a draft."""
    draft = Draft(place, "gguf", "model", Named(root=place.folder, weights=tuple(f.path for f in files)))
    draft.alone = files[0].path if several else None
    tensors: list[Tensor] = []
    first: Directory | None = None
    for file in files:
        kind = "dead-link" if file.link is not None else place.reader.container(file)
        if kind in {"dead-link", "lfs-pointer", "link-text", "empty"}:
            draft.findings.append(pickled.absent(file, place.reader, kind))
            continue
        directory = place.reader.directory(file)
        if isinstance(directory, FormatFault):
            draft.findings.append(readers.fault(directory, file.path))
            continue
        draft.findings += readers.findings(directory, file.path)
        first = first if first is not None else directory
        tensors += directory.tensors
    missing = _missing(place, files, first)
    if missing:
        draft.add(
            {"missing_files": missing},
            [
                findings.finding(
                    "split-part-missing",
                    missing[0],
                    f"{some(missing)} {'is' if len(missing) == 1 else 'are'} not there: a split GGUF loads with all of "
                    "its parts or not at all",
                    "copy the missing part here",
                    missing_files=missing,
                )
            ],
        )
    if first is None:
        draft.kind = None
        return draft
    facts = first.facts
    draft.facts |= {key: facts[key] for key in _TOLD if key in facts}
    draft.facts |= {"container": "gguf", "pickle_format": False}
    general = facts.get("general") or {}
    if general.get("license"):
        draft.facts["license_in_file"] = str(general["license"]).lower()
    if not missing:
        _count(draft, tensors, len(files))
    if facts.get("adapter_type") or general.get("type") == "adapter":
        _adapter(draft, tensors, facts, general)
    elif not tensors and not missing:
        draft.kind = None
        draft.findings.append(
            findings.finding(
                "weights-none",
                files[0].path,
                f"{files[0].path} holds {'a vocabulary only' if facts.get('vocab_only') else 'no tensors'}: it is no "
                "model",
                "publish the GGUF with the weights",
            )
        )
    elif any(t.dtype not in _PLAIN | _INTEGERS for t in tensors):
        draft.kind = "quantized"
        draft.facts["quant_method"] = "gguf"
    return draft


def _count(draft: Draft, tensors: list[Tensor], files: int) -> None:
    counted, _ = weights.summary(torch_weights.header_tensors(tensors))
    draft.facts |= counted
    draft.weights = WeightsFacts(
        format="gguf",
        shards=files,
        tensors=counted["tensor_count"],
        parameters=counted["param_count"],
        bytes=counted["payload_bytes"],
        dtypes={
            dtype: DtypeCount(tensors=row["tensors"], parameters=row["params"])
            for dtype, row in counted["dtype_histogram"].items()
        },
        architecture=draft.facts.get("architecture"),
    )


def _adapter(draft: Draft, tensors: list[Tensor], facts: Mapping[str, Any], general: Mapping[str, Any]) -> None:
    """Tell a LoRA in GGUF: rank from its matrices, alpha from its header."""
    draft.artifact, draft.kind = "gguf-lora", "adapter"
    ranks = sorted({t.shape[0] for t in tensors if t.name.endswith(".lora_a") and t.shape})
    alpha = facts.get("alpha")
    rank = ranks[0] if len(ranks) == 1 else None
    base = general.get("base_model.0.repo_url") or general.get("base_model.0.name")
    draft.facts |= {"rank": rank, "ranks": ranks, "alpha": alpha, "base_model": None}
    draft.facts["adapted_modules"] = sum(1 for t in tensors if t.name.endswith(".lora_a"))
    if isinstance(base, str) and base:
        draft.facts["base_model_hint"] = base
    if isinstance(alpha, (int, float)) and rank:
        draft.facts["scaling"] = alpha / rank
    halves = {t.name.rpartition(".")[0]: t.name for t in tensors if t.name.endswith(".lora_a")}
    others = {t.name.rpartition(".")[0]: t.name for t in tensors if t.name.endswith(".lora_b")}
    lonely = sorted(
        [f"{m}.lora_b" for m in halves.keys() - others.keys()] + [f"{m}.lora_a" for m in others.keys() - halves.keys()]
    )
    if lonely:
        draft.findings.append(
            findings.finding(
                "lora-half-missing",
                draft.named.weights[0],
                f"one half without the other; missing: {some(lonely)}",
                "convert the adapter again",
                missing_tensors=lonely,
            )
        )
    draft.adapter = AdapterFacts(
        peft_type="LORA", rank=rank, alpha=alpha, scaling=draft.facts.get("scaling"), variants=["gguf"]
    )
    draft.base = BaseFacts(relation="adapter")


def _missing(place: Place, files: tuple[File, ...], first: Directory | None) -> list[str]:
    """Return the parts of a split that are not there, by name; a header can ask for more than the names do."""
    shard = layout.shard_of(files[0].name)
    if shard is None:
        return []
    stem, _, count, _ = shard
    width = len(files[0].name.rpartition("-of-")[2].partition(".")[0])
    stated = first.facts.get("split_count") if first is not None else None
    if isinstance(stated, int) and stated != count and 0 < stated < 1 << 17:
        count = max(count, stated)
    here = {s[1] for f in files if (s := layout.shard_of(f.name)) is not None}
    return [place.path(f"{stem}-{i:0{width}d}-of-{count:0{width}d}.gguf") for i in range(1, count + 1) if i not in here]


# ----------------------------------------------------------------------------------------------------------- byte parts


def judge_parts(place: Place, whole: str, files: tuple[File, ...]) -> Draft:
    """Return a file that was cut into byte parts to fit somewhere, as a draft: it must be joined first."""
    suffix = whole.rpartition(".")[2]
    artifact = {"gguf": "gguf", "safetensors": "full-model"}.get(suffix, "ckpt")
    draft = Draft(place, artifact, None, Named(root=place.folder, slices=tuple(f.path for f in files)))
    draft.alone = files[0].path
    missing = [place.path(name) for name in layout.missing_byte_parts([f.name for f in files])]
    path = place.path(whole)
    gone = f" and {some(missing)} {'is' if len(missing) == 1 else 'are'} not" if missing else ""
    draft.facts["missing_files"] = missing
    draft.findings.append(
        findings.finding(
            "split-part-missing" if missing else "byte-parts",
            path,
            f"{path} is cut into byte parts, of which {len(files)} are there{gone}: they hold no weights before "
            "they are joined",
            "copy the missing part here, then join them" if missing else f"cat the parts in their order > {whole}",
            missing_files=missing,
        )
    )
    return draft
