"""Judge a whole model in Hugging Face layout: weights, config, tokenizer, generation settings, copies beside it."""

from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import fit, layout, packed_weights, quantization, shards, torch_weights, values, weights
from weighbridge.adapters.draft import Draft, read_json
from weighbridge.adapters.families import assembled, foreign, pickled
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import VALUES_LIMIT, Place
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import file_findings, some, without_config
from weighbridge.registry import findings

_FOREIGN: Final = (".h5", ".msgpack", ".ot", ".onnx", ".tflite")
_OTHER_FORMS: Final = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot")


def judge(place: Place) -> Draft:
    """Return a whole model as a draft."""
    found = shards.weight_set(place)
    draft = Draft(place, "full-model", "model", Named(root=place.folder))
    config = read_json(draft, layout.MODEL_CONFIG, needed=True)
    draft.config = config
    draft.config_path = place.path(layout.MODEL_CONFIG)
    beside = place.table("quantize_config.json")
    packing = quantization.of(config or {}, beside)
    pickles = pickled.named(place)
    from_pickles = found is None and bool(pickles)
    if from_pickles:
        found = pickled.weight_set(place)
    if found is not None:
        _take_in(draft, found, packing, from_pickles=from_pickles)
    elif (other := assembled.probe(place)) is not None:
        return _assembled(draft, other, config, packing)
    else:
        _no_weights(draft)
    if config is None and layout.MODEL_CONFIG not in place.names and (found is not None or pickles):
        _no_config(draft, found, pickles)
    if packing is not None:
        draft.facts |= {"quant_method": packing.method, "bits": packing.bits}
    if config is not None:
        tensors = found.tensors if found is not None else {}
        draft.add(*fit.judge(config, tensors, packing, draft.config_path))
        if found is not None and found.sound:
            draft.add(*fit.required(config, tensors, draft.config_path))
        draft.needs_code = bool(config.get("auto_map"))
        if draft.weights is not None:
            draft.weights = msgspec.structs.replace(draft.weights, architecture=draft.facts.get("architecture"))
    _generation(draft)
    _tokenizer(draft)
    copies: list[str] = []
    if found is not None:
        lying = [] if from_pickles else [f for f in pickles if not f.name.endswith(".index.json")]
        copies = [*found.copies, *_other_forms(draft, lying)]
        _compare(draft, found, lying)
    _copies(draft, copies)
    _parts(draft)
    if found is None and draft.named.weights:
        return draft
    draft.named = Named(
        root=place.folder,
        weights=(*(found.files if found is not None else ()), *draft.facts.pop("_parts", ())),
        listing=found.index if found is not None else None,
        copies=tuple(copies),
        stale=found.stale if found is not None else (),
    )
    return draft


def _assembled(
    draft: Draft, other: Draft, config: dict[str, Any] | None, packing: quantization.Quantization | None
) -> Draft:
    """Judge a model whose weights lie in rank files or pieces, beside its config."""
    assembled.take_in(draft, other)
    draft.artifact = other.artifact
    mine, _ = torch_weights.lora_split(draft.tensors)
    if mine:
        return assembled.alone(_kindless(draft))
    if draft.inputs and draft.weights is not None and config is not None and draft.config_path is not None:
        draft.add(*fit.judge(config, draft.tensors, packing, draft.config_path))
        draft.add(*fit.required(config, draft.tensors, draft.config_path))
        draft.weights = msgspec.structs.replace(draft.weights, architecture=draft.facts.get("architecture"))
        draft.findings.append(assembled.told(draft))
        assembled.values(draft)
    draft.needs_code = bool((config or {}).get("auto_map"))
    _generation(draft)
    _tokenizer(draft)
    return draft


def _kindless(draft: Draft) -> Draft:
    draft.kind = None
    return draft


def _no_config(draft: Draft, found: WeightSet | None, pickles: list[File]) -> None:
    path = draft.place.path(layout.MODEL_CONFIG)
    listed = [*(found.files if found is not None else ()), *(f.path for f in pickles)]
    listed += [found.index] if found is not None and found.index is not None else []
    owed = layout.owes_config([name.rpartition("/")[2] for name in listed])
    draft.add({"missing_files": [path]} if owed else {}, [without_config(path, listed, owed=owed)])


def _take_in(draft: Draft, found: WeightSet, packing: quantization.Quantization | None, *, from_pickles: bool) -> None:
    packed = packed_weights.is_packed(found.tensors)
    quantized = packing is not None and (packed or not found.tensors)
    counted, summary = weights.summary(found.tensors, shards=max(1, len(found.files)))
    if packed:
        counted["param_count"] = _logical(draft, found, packing)
        summary = msgspec.structs.replace(summary, parameters=counted["param_count"])
    invalid = sum(1 for f in found.findings if f.code == "tensor-invalid")
    counted["tensor_count"] += invalid
    draft.weights = summary
    if not found.tensors and not found.sound:
        counted = dict.fromkeys(counted)  # nothing could be read: how many there are is not known
    draft.add({**counted, **found.facts}, found.findings)
    if quantized:
        draft.artifact, draft.kind = "quantized", "quantized"
    draft.metadata = found.metadata
    written = (found.metadata or {}).get("format")
    if from_pickles:
        draft.facts["pickle_format"] = True
        if found.files and found.sound:
            pickled.converted(draft, found.files)
    else:
        draft.facts["metadata_format"] = written
    if written is None and found.sound and not quantized and not from_pickles:
        draft.findings.append(
            findings.finding(
                "format-metadata-missing",
                found.files[0],
                f"the header of {found.files[0]} does not say its format: several loaders then fail",
                "save it again with the metadata format=pt; the weights themselves are fine",
                metadata_format=None,
            )
        )
    if found.sound and not found.tensors and found.files:
        told = f"{some(found.files)} {'holds' if len(found.files) == 1 else 'hold'} no tensors"
        draft.findings.append(findings.finding("weights-none", found.files[0], told, "save the model again"))
    empty = sorted(name for name, tensor in found.tensors.items() if 0 in tensor.shape)
    if empty:
        draft.add(
            {"empty_tensors": empty},
            [
                findings.finding(
                    "tensors-empty",
                    found.owners[empty[0]],
                    f"{len(empty)} of {len(found.tensors)} tensors have no elements ({some(empty)}): the parts of "
                    "other ranks were not gathered",
                    "save again with all ranks gathered",
                    empty_tensors=empty,
                )
            ],
        )
    draft.facts["values_checked"] = found.sound and summary.bytes <= draft.place.reader.values
    if draft.facts["values_checked"]:
        look_at_values(draft, found)


def _logical(draft: Draft, found: WeightSet, packing: quantization.Quantization | None) -> int | None:
    """Return how many weights a packed set holds, None where nothing tells it."""
    try:
        stated = packed_weights.shapes(found, draft.place.reader)
    except OSError:
        stated = {}
    bits = packing.bits if packing is not None else None
    return packed_weights.parameters(found.tensors, bits, quantization.by_module(draft.config or {}), stated)


def look_at_values(draft: Draft, found: WeightSet) -> None:
    """Find NaN and infinities in a set that is whole."""
    reader = draft.place.reader
    nan: dict[str, int] = {}
    inf: dict[str, int] = {}
    for path in sorted(set(found.owners.values())):
        file = reader.tree.files[path]
        mine = {name: found.tensors[name] for name, owner in found.owners.items() if owner == path}
        held = pickled.held(file, reader)
        try:
            if held is not None:
                look = torch_weights.numbers(file, held)
            else:
                look = values.numbers(Path(file.source), reader.header(file), mine)
            for name, seen in look:
                if seen.nan:
                    nan[name] = seen.nan
                if seen.inf:
                    inf[name] = seen.inf
        except (OSError, FormatFault):
            return
    draft.findings.extend(values.broken(found.files[0], nan, inf, found.owners))


def _compare(draft: Draft, found: WeightSet, lying: list[File]) -> None:
    """Compare pickles beside the weights with them, value by value where that is not too much to read."""
    reader = draft.place.reader
    if not lying or not found.sound or any(reader.container(f) not in sniff.PICKLED for f in lying):
        return
    size = sum(tensor.size for tensor in found.tensors.values())
    if size > VALUES_LIMIT:
        return
    try:
        ours = values.digests(reader.tree, found)
    except OSError:
        return
    same = pickled.same_as(ours, lying, reader)
    draft.facts["values_equal"] = same
    if same is False:
        draft.findings.append(pickled.disagree([found.files[0], lying[0].path]))


def _foreign(place: Place) -> list[File]:
    """Return the same model's files for other frameworks, in the folder or in folders named after their form."""
    tree = place.reader.tree
    found = [f for n, f in sorted(place.names.items()) if n.endswith(_FOREIGN)]
    for name in tree.folders[place.folder].dirs:
        if layout.is_form_name(name):
            found += [f for f in tree.below(place.path(name)).values() if layout.is_weights_name(f.name)]
    return found


def _no_weights(draft: Draft) -> None:
    path = draft.place.path(layout.MODEL_WEIGHTS)
    files = tuple(_foreign(draft.place))
    if files:
        draft.kind = None
        if not foreign.onnx(draft, files):
            foreign.take(draft, files)
            if not any(f.severity == "block" for f in draft.findings):
                draft.findings.append(foreign.recorded(files, "weights of another framework"))
        return
    draft.add(
        {"missing_files": [path], "missing_tensors": []},
        [
            findings.finding(
                "weights-missing",
                path,
                f"{draft.config_path} is there and no weights: {path} is missing",
                "copy the weights here, or save the model again",
                missing_files=[path],
            )
        ],
    )


def _generation(draft: Draft) -> None:
    table = read_json(draft, layout.GENERATION_CONFIG)
    if table is not None:
        draft.add(*fit.generation(table, draft.place.path(layout.GENERATION_CONFIG)))


def _tokenizer(draft: Draft) -> None:
    """Tell of the chat template, and compare the tokenizer with the embedding."""
    place = draft.place
    draft.facts["has_chat_template"] = has_chat_template(place)
    file = place.names.get("tokenizer.json")
    table = read_json(draft, "tokenizer.json", needed=True)
    entries = fit.tokenizer_entries(table) if table is not None else None
    if entries is not None and file is not None:
        draft.add(*fit.tokenizer(*entries, draft.facts.get("embedding_rows"), file.path))


def has_chat_template(place: Place) -> bool:
    """Return whether a chat template is there, as a file or inside the tokenizer's config."""
    if any(n in place.names for n in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool((place.table("tokenizer_config.json") or {}).get("chat_template"))


def _other_forms(draft: Draft, pickles: list[File]) -> list[str]:
    """Return files that hold the same weights again: pickles beside safetensors, original/, other frameworks."""
    place = draft.place
    files = [f.path for f in pickles if not f.name.endswith(".index.json")]
    files += [place.path(name) for name in _OTHER_FORMS if name in place.names]
    for name in place.reader.tree.folders[place.folder].dirs:
        below = place.reader.tree.below(place.path(name))
        candidates = {p: f for p, f in below.items() if layout.is_weights_name(f.name) and not p.endswith(".json")}
        if layout.is_form_name(name):
            files += sorted(candidates)
        elif not layout.is_checkpoint_name(name) and draft.weights is not None:
            files += sorted(p for p, f in candidates.items() if _is_copy(draft, f))
    return files


def _is_copy(draft: Draft, file: File) -> bool:
    """Return whether a file in a folder without a config of its own repeats the model, by the size of its tensors."""
    reader = draft.place.reader
    beside = reader.tree.inside(file.folder)
    if layout.MODEL_CONFIG in beside or layout.ADAPTER_CONFIG in beside or not file.name.endswith(".safetensors"):
        return False
    header = reader.header(file)
    return draft.weights is not None and not header.faults and header.payload_bytes == draft.weights.bytes > 0


def _copies(draft: Draft, copies: list[str]) -> None:
    if not copies:
        return
    files = draft.place.reader.tree.files
    sizes = {path: files[path].size for path in copies}
    told = some(f"{path} ({size} bytes)" for path, size in sorted(sizes.items()))
    draft.add(
        {"extra_full_copies": sorted(copies)},
        [
            findings.finding(
                "copies-extra",
                copies[0],
                f"the same weights lie here again and are left out: {told}",
                "delete what nobody loads",
                extra_full_copies=sorted(copies),
                sizes=sizes,
            )
        ],
    )


def _parts(draft: Draft) -> None:
    """Take in the weights of a sentence-transformers pipeline's own layers (2_Dense/model.safetensors)."""
    place = draft.place
    if "modules.json" not in place.names:
        return
    taken: list[str] = []
    for name in place.reader.tree.folders[place.folder].dirs:
        if not layout.is_sentence_part(name):
            continue
        for file in place.reader.tree.inside(place.path(name)).values():
            if file.name.endswith(".safetensors"):
                draft.findings.extend(file_findings(file, place.reader))
                taken.append(file.path)
    draft.facts["_parts"] = taken
