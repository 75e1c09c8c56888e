"""Judge an adapter folder: config and weights as one unit, matrices against config, values, side files, twins."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import (
    audit,
    keys,
    layout,
    lora_zeros,
    model_folder,
    peft_config,
    peft_faults,
    riders,
    torch_weights,
    values,
    weights,
)
from weighbridge.adapters.audit import Loaded
from weighbridge.adapters.draft import Draft, read_json
from weighbridge.adapters.families import assembled, pickled
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.listing import File
from weighbridge.adapters.origins import stream
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import file_findings, header_of, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

VALUES_LIMIT: Final = 1 << 30
"""Bytes of an adapter up to which every value is looked at."""

_ROWS: Final = ("input_embeddings", "output_embeddings")


def judge(place: Place) -> Draft:
    """Return a PEFT adapter as a draft."""
    draft = Draft(place, "lora-adapter", "adapter", Named(root=place.folder))
    names = place.names
    config = read_json(draft, layout.ADAPTER_CONFIG, needed=True)
    draft.config = config
    draft.config_path = place.path(layout.ADAPTER_CONFIG)
    peft_type = ""
    if config is not None:
        facts, adapter, base, found = peft_config.read(config, draft.config_path)
        draft.add(facts, [*found, *peft_faults.judge(config, draft.config_path)])
        draft.adapter, draft.base = adapter, base
        peft_type = str(facts["peft_type"] or "")
        if not peft_type:
            draft.findings.append(_no_type(draft.config_path, config))
        elif peft_type != "LORA":
            draft.artifact = "peft-other"
    elif layout.ADAPTER_CONFIG not in names:
        _no_config(draft)
    draft.facts["has_chat_template"] = model_folder.has_chat_template(place)
    weights_file = _weights_file(place)
    pickles = [names[name] for name in layout.ADAPTER_PICKLES if name in names]
    copies: list[str] = []
    if weights_file is not None:
        _judge_weights(draft, weights_file, config, peft_type)
        copies = _compare(draft, weights_file, pickles)
    elif pickles:
        weights_file = pickles[0]
        copies = [file.path for file in pickles[1:]]
        if _pickle(draft, weights_file, config, peft_type):
            pickled.converted(draft, (weights_file.path,))
    elif (other := assembled.probe(place, adapter=True)) is not None:
        return _assembled(draft, other, config, peft_type)
    else:
        _no_weights(draft)
    side = _side_files(draft)
    draft.named = Named(
        root=place.folder,
        weights=tuple([weights_file.path] if weights_file is not None else []) + tuple(side),
        copies=tuple(copies),
    )
    return draft


def _assembled(draft: Draft, other: Draft, config: dict[str, Any] | None, peft_type: str) -> Draft:
    """Judge an adapter whose weights lie in a whole wrapped model: rank files, pieces, a checkpoint of another name."""
    assembled.take_in(draft, other)
    mine = assembled.adapter(draft, config or {}) if config is not None else None
    if mine is not None:
        it = audit.load(mine, config or {}, draft.inputs[0], peft_type)
        draft.add(*audit.judge(it))
        draft.add(*riders.judge(it))
        if _looks(draft, sum(tensor.size for tensor in mine.values())):
            looked, found = _values(it, _numbers(draft, config or {}))
            draft.add({"values_checked": True, **looked}, found)
    return draft


def _numbers(draft: Draft, config: dict[str, Any]) -> Iterator[tuple[str, values.Numbers]]:
    for item in assembled.held(draft, config):
        yield item.name, values.numbers_of(item.stored, stream(item.origin))


def _weights_file(place: Place) -> File | None:
    names = place.names
    if layout.ADAPTER_WEIGHTS in names:
        return names[layout.ADAPTER_WEIGHTS]
    # An adapter under another name: only where it is the one safetensors file and its keys are PEFT's.
    alone = [f for n, f in names.items() if n.endswith(".safetensors") and not layout.is_resume_name(n)]
    if len(alone) == 1 and any("lora_" in name for name in header_of(alone[0], place.reader).tensors):
        return alone[0]
    return None


def _no_type(path: str, config: dict[str, Any]) -> Finding:
    return findings.finding(
        "adapter-type-missing",
        path,
        f"{path} states no peft_type (its fields: {some(sorted(config))}): no loader knows what to do with it",
        "put the adapter_config.json of the training beside the weights",
    )


def _no_config(draft: Draft) -> None:
    path = draft.place.path(layout.ADAPTER_CONFIG)
    draft.add(
        {"missing_files": [path], "alpha": None, "rank": None, "base_model": None},
        [
            findings.finding(
                "config-missing",
                path,
                f"{path} is missing: type, alpha and base are unknown",
                "put the adapter_config.json of the training beside the weights",
                missing_files=[path],
            )
        ],
    )


def _no_weights(draft: Draft) -> None:
    path = draft.place.path(layout.ADAPTER_WEIGHTS)
    draft.add(
        {"missing_files": [path]},
        [
            findings.finding(
                "weights-missing",
                path,
                f"{draft.config_path} is there and no weights: {path} is missing",
                "copy the adapter's weights here, or save it again",
                missing_files=[path],
            )
        ],
    )


def _pickle(draft: Draft, file: File, config: dict[str, Any] | None, peft_type: str) -> bool:
    """Judge an adapter whose weights are a torch pickle; return whether its tensors can be published."""
    reader = draft.place.reader
    draft.facts["pickle_format"] = True
    found = pickled.faults(file, reader)
    held = pickled.held(file, reader)
    draft.findings.extend(found)
    if held is None or not held.tensors:
        return False
    counted, draft.weights = weights.summary(held.tensors)
    draft.add({**counted, "foreign_globals": held.facts.get("foreign_globals", [])}, [])
    if keys.is_torchtune(held.tensors):
        draft.findings.append(audit.torchtune(file.path))
        return False
    it = audit.load(held.tensors, config or {}, file.path, peft_type)
    draft.add(*audit.judge(it))
    draft.add(*riders.judge(it))
    draft.facts["values_checked"] = held.sound and _looks(draft, counted["payload_bytes"])
    if draft.facts["values_checked"]:
        draft.add(*_values(it, torch_weights.numbers(file, held)))
    return held.sound


def _compare(draft: Draft, ours: File, pickles: list[File]) -> list[str]:
    """Compare pickles beside the adapter's weights with them; return those that are copies."""
    reader = draft.place.reader
    copies = [file.path for file in pickles]
    header = header_of(ours, reader)
    if header.faults or not header.tensors or header.payload_bytes > VALUES_LIMIT:
        return copies
    whole = WeightSet((ours.path,), None, dict(header.tensors), dict.fromkeys(header.tensors, ours.path), {}, [])
    for file in pickles:
        held = pickled.held(file, reader)
        # Another tool's form of the same adapter has names of its own (torchtune's adapter_model.pt).
        if held is None or not held.sound or (file.name != _TWIN and held.tensors.keys() != header.tensors.keys()):
            continue
        try:
            same = pickled.same_as(values.digests(reader.tree, whole), [file], reader)
        except OSError:
            continue
        draft.facts["values_equal"] = same
        if same is False:
            draft.findings.append(pickled.disagree([file.path, ours.path]))
    return copies


_TWIN: Final = "adapter_model.bin"


def _judge_weights(draft: Draft, file: File, config: dict[str, Any] | None, peft_type: str) -> None:
    reader = draft.place.reader
    faults = file_findings(file, reader)
    header = header_of(file, reader)
    counted, draft.weights = weights.summary(header.tensors)
    counted["tensor_count"] += sum(1 for f in faults if f.code == "tensor-invalid")
    draft.metadata = header.metadata
    draft.add({**counted, "metadata_format": (header.metadata or {}).get("format")}, faults)
    if any(f.code not in {"file-short", "file-long", "data-hole", "tensors-overlap"} for f in faults):
        return
    it = audit.load(header.tensors, config or {}, file.path, peft_type)
    draft.add(*audit.judge(it))
    draft.add(*riders.judge(it))
    draft.facts["values_checked"] = not faults and _looks(draft, header.payload_bytes)
    if draft.facts["values_checked"]:
        draft.add(*_values(it, values.numbers(Path(file.source), header, it.tensors)))


def _looks(draft: Draft, size: int) -> bool:
    """Return whether the values of an adapter are looked at here; where it is staged next, staging looks at all."""
    return draft.place.reader.values > 0 and size <= VALUES_LIMIT


def _values(it: Loaded, look: Iterator[tuple[str, values.Numbers]]) -> audit.Checked:
    """Look at every value: NaN, infinities, and lora_B that are zero, wholly or from some row on."""
    nan: dict[str, int] = {}
    inf: dict[str, int] = {}
    seconds = lora_zeros.Seconds()
    try:
        for name, seen in look:
            if seen.nan:
                nan[name] = seen.nan
            if seen.inf:
                inf[name] = seen.inf
            if lora_zeros.is_second(it.tensors[name]):
                seconds.add(it.tensors[name], zero_tail=seen.zero_tail)
    except (OSError, FormatFault):
        return {}, []
    facts, found = lora_zeros.judge(it.subject, seconds)
    return facts, [*values.broken(it.subject, nan, inf), *found]


def _side_files(draft: Draft) -> list[str]:
    """Return adapter data outside the weights file: new embedding rows that must travel with it."""
    place = draft.place
    side: list[str] = []
    rows = 0
    for name, file in sorted(place.names.items()):
        if not name.endswith(".safetensors") or name == layout.ADAPTER_WEIGHTS:
            continue
        tensors = header_of(file, place.reader).tensors
        if not tensors or not all(key in _ROWS for key in tensors):
            continue
        draft.findings.extend(file_findings(file, place.reader))
        side.append(file.path)
        rows = max([rows, *(t.shape[0] for t in tensors.values() if t.shape)])
    if side:
        draft.add(
            {"side_files": side, "extra_rows": rows},
            [
                findings.finding(
                    "side-file",
                    side[0],
                    f"{rows} new vocabulary rows are in {some(side)}: the adapter is not whole without "
                    f"{'it' if len(side) == 1 else 'them'}",
                    "keep the file with the adapter; loaders must be told of it",
                    side_files=side,
                    extra_rows=rows,
                )
            ],
        )
    return side
