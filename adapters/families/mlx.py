"""Adapters of MLX-LM: PEFT's config file name, another schema, factors stored transposed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import layout, peft_config, values, weights
from weighbridge.adapters.draft import Draft, read_json
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import file_findings, header_of, some
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts

WEIGHTS: Final = "adapters.safetensors"
VALUES_LIMIT: Final = 1 << 30
_COPY = re.compile(r"[0-9]{4,9}_adapters\.safetensors")


def is_config(config: Mapping[str, Any] | None) -> bool:
    """Return whether an adapter_config.json is MLX-LM's and not PEFT's."""
    if config is None or "peft_type" in config:
        return False
    return "fine_tune_type" in config or "lora_parameters" in config or ("lora_layers" in config and "model" in config)


def judge(place: Place) -> Draft:
    """Return an MLX-LM adapter as a draft."""
    draft = Draft(place, "mlx-lora", "adapter", Named(root=place.folder))
    config = read_json(draft, layout.ADAPTER_CONFIG, needed=True) or {}
    draft.config, draft.config_path = config, place.path(layout.ADAPTER_CONFIG)
    table = config.get("lora_parameters")
    lora: Mapping[str, Any] = table if isinstance(table, dict) else config
    base = config.get("model")
    named = base if isinstance(base, str) and base else None
    rank, alpha, scale = (peft_config.number(lora.get(key)) for key in ("rank", "alpha", "scale"))
    if scale is None and alpha is not None and rank:
        scale = alpha / rank
    draft.facts |= {"rank": rank, "alpha": alpha, "scaling": scale, "base_model": named}
    draft.facts["fine_tune_type"] = config.get("fine_tune_type", "lora")
    targets = lora.get("keys")
    listed = [str(key) for key in targets] if isinstance(targets, list) else None
    if listed is not None:
        draft.facts["targets"] = listed
    draft.base = BaseFacts(id=named, relation="adapter", evidence=f"{layout.ADAPTER_CONFIG}:model" if named else None)
    if named is not None and peft_config.is_local(named):
        draft.facts["base_is_local_path"] = True
        draft.findings.append(
            findings.finding(
                "base-local-path",
                draft.config_path,
                f"the base is named by a path, {named}: nobody else can resolve it",
                "write the base's Hub id, or name it in weighbridge.yaml",
                base_is_local_path=True,
                local_paths=[named],
            )
        )
    kind = str(config.get("fine_tune_type") or "lora").upper()
    draft.adapter = AdapterFacts(
        peft_type="LORA" if kind in {"LORA", "DORA"} else kind,
        rank=rank,
        alpha=alpha,
        scaling=scale,
        targets=listed,
        variants=["mlx", *(["dora"] if kind == "DORA" else [])],
    )
    file = place.names.get(WEIGHTS)
    copies = tuple(sorted(f.path for name, f in place.names.items() if _COPY.fullmatch(name)))
    draft.named = Named(root=place.folder, weights=(file.path,) if file is not None else (), copies=copies)
    draft.facts["step_copies"] = list(copies)
    if file is None:
        path = place.path(WEIGHTS)
        draft.add(
            {"missing_files": [path]},
            [
                findings.finding(
                    "weights-missing",
                    path,
                    f"{path} is missing: the config alone is no adapter",
                    f"copy the result here; {some(copies)} are copies of earlier steps" if copies else None,
                    missing_files=[path],
                )
            ],
        )
    else:
        _weights(draft, file, rank)
    return draft


def _weights(draft: Draft, file: File, rank: float | None) -> None:
    reader = draft.place.reader
    header = header_of(file, reader)
    faults = file_findings(file, reader)
    counted, draft.weights = weights.summary(header.tensors)
    draft.add({**counted, "metadata_format": (header.metadata or {}).get("format")}, faults)
    draft.metadata = header.metadata
    first, second = _factors(header.tensors, "lora_a"), _factors(header.tensors, "lora_b")
    draft.facts["adapted_modules"] = len(first.keys() | second.keys())
    if not first and not second:
        if not faults and draft.facts["fine_tune_type"] != "full":
            draft.findings.append(
                findings.finding("adapter-empty", file.path, f"{file.path} holds no LoRA matrices", "save it again")
            )
        return
    shown = sorted(
        {t.shape[-1] for t in first.values() if t.shape} | {t.shape[-2] for t in second.values() if len(t.shape) > 1}
    )
    draft.facts |= {"ranks": shown, "transposed": True, "magnitude_tensors": len(_factors(header.tensors, "m"))}
    draft.findings.append(
        findings.finding(
            "keys-transposed",
            file.path,
            "MLX stores the factors as (in, r) and (r, out); PEFT's loaders do not know that, and square layers would "
            "load and compute something else",
            transposed=True,
        )
    )
    lonely = sorted(first.keys() ^ second.keys())
    if lonely:
        missing = [f"{m}.lora_b" if m in first else f"{m}.lora_a" for m in lonely]
        draft.findings.append(
            findings.finding(
                "lora-half-missing",
                file.path,
                f"one half without the other; missing: {some(missing)}",
                "save the adapter again",
                missing_tensors=missing,
            )
        )
    if shown:
        draft.facts["rank_from_shapes"] = shown[0]
    if rank is not None and shown and shown != [int(rank)]:
        draft.findings.append(
            findings.finding(
                "rank-mismatch",
                file.path,
                f"the config says rank {rank:g}, the matrices have rank {', '.join(map(str, shown))}",
                "put the adapter_config.json of the same training beside the weights",
                rank_from_shapes=shown[0],
            )
        )
    if faults or not reader.values or header.payload_bytes > VALUES_LIMIT:
        return  # what is staged next is looked at there
    seen = dict(values.numbers(Path(file.source), header, header.tensors))
    nan = {name: n.nan for name, n in seen.items() if n.nan}
    inf = {name: n.inf for name, n in seen.items() if n.inf}
    draft.findings.extend(values.broken(file.path, nan, inf))
    alive = sum(1 for t in second.values() if not seen[t.name].zero)
    draft.facts |= {"values_checked": True, "nonzero_lora_b": alive}
    if second and not alive:
        draft.findings.append(
            findings.finding(
                "lora-b-zero",
                file.path,
                f"all {len(second)} lora_b are zero: the adapter changes nothing, as if it had never been trained",
                "check that the trained weights were saved",
                nonzero_lora_b=0,
            )
        )


def _factors(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removesuffix(f".{part}"): t for name, t in tensors.items() if name.endswith(f".{part}")}
