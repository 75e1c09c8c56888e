"""Weights of a model folder: which files are the set, and do index, names, headers and bytes agree, tensor by tensor.

`weight_set` picks the set as a loader would (index, else a single file), checks it in both directions, and names what
lies beside it: stale shards, whole second copies, a second set that might be the model as well.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import layout
from weighbridge.adapters.beside import files_beside, shard_groups, shards_beside
from weighbridge.adapters.formats import sniff
from weighbridge.adapters.formats.safetensors import Header, Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Place, Reader, Unreadable
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import counted, dead_link, file_findings, header_of, pointer_data, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding


class Form(NamedTuple):
    """How one kind of weight file is named, indexed and read."""

    suffix: str
    single: str
    listing: str
    """Name of the index that a loader looks for; others end like it."""
    header: Callable[[File, Reader], Header]
    faults: Callable[[File, Reader], list[Finding]]
    aliases: Callable[[File, Reader], Mapping[str, str]]
    """Names that share a tensor with another name of the same file."""


def _no_aliases(_file: File, _reader: Reader) -> Mapping[str, str]:
    return {}


SAFETENSORS: Final = Form(
    ".safetensors", layout.MODEL_WEIGHTS, layout.MODEL_INDEX, header_of, file_findings, _no_aliases
)

REBUILD: Final = "write a new index from the headers, or save the model again"


def weight_set(place: Place) -> WeightSet | None:
    """Return the safetensors set of a folder, or None where it holds none and no index of one."""
    here = {
        name: file
        for name, file in place.names.items()
        if name.endswith(".safetensors") and name != layout.ADAPTER_WEIGHTS and not layout.is_resume_name(name)
    }
    return chosen(place, here, SAFETENSORS)


def chosen(place: Place, here: Mapping[str, File], form: Form) -> WeightSet | None:
    """Return the set that a loader would take among some files of one form: by index, else the single file."""
    index = _index_file(place.names, form)
    if index is not None:
        return _indexed(index, here, place, form)
    groups = shard_groups(here)
    single = _single(here, groups, form)
    if single is not None:
        return _one_file(single, here, place.reader, form)
    if groups:
        return _without_index(groups, here, place, form)
    return None


# ---------------------------------------------------------------------------------------------------------- choosing


def _index_file(names: Mapping[str, File], form: Form) -> File | None:
    if form.listing in names:
        return names[form.listing]
    found = sorted(name for name in names if name.endswith(f"{form.suffix}.index.json"))
    return names[found[0]] if found else None


def _single(tensors_here: Mapping[str, File], groups: Mapping[tuple[str, int], Any], form: Form) -> File | None:
    if form.single in tensors_here:
        return tensors_here[form.single]
    lone = [name for name in sorted(tensors_here) if layout.shard_of(name) is None]
    plain = [name for name in lone if not layout.is_variant_name(name)]
    if groups or not lone:
        return None
    return tensors_here[(plain or lone)[0]]


# ----------------------------------------------------------------------------------------------------- with an index


def _indexed(index: File, tensors_here: Mapping[str, File], place: Place, form: Form) -> WeightSet:
    reader, files = place.reader, place.reader.tree.files
    document = reader.document(index)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    good = isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values()) and bool(weight_map)
    if not good or not isinstance(weight_map, dict):
        return _bad_index(index, document, tensors_here, place, form)
    found: list[Finding] = []
    named = set(weight_map.values())
    unsafe = sorted(v for v in named if not _is_safe(v))
    if unsafe:
        found.append(
            findings.finding(
                "index-path-unsafe",
                index.path,
                f"{index.path} names {counted(len(unsafe), 'file')} outside the folder, such as {unsafe[0]!r}",
                REBUILD,
                unsafe_paths=unsafe,
            )
        )
    listed = sorted(named - set(unsafe))
    at = {v: place.path(v) for v in listed}
    here = {v: files[path] for v, path in at.items() if path in files and files[path].link is None}
    missing = [v for v in listed if v not in here]
    sound = _missing_shards(found, index, missing, weight_map, place)
    headers: dict[str, Header] = {}
    aliases: dict[str, str] = {}
    for value, file in here.items():
        faults = form.faults(file, reader)
        found.extend(faults)
        sound = sound and not blocking(faults)
        headers[value] = form.header(file, reader)
        aliases.update(form.aliases(file, reader))
    listing = {name: v for name, v in weight_map.items() if name not in aliases}
    tensors, owners, agreed = _agree(found, index, listing, headers, here, whole=sound)
    gone = set(missing)
    facts: dict[str, Any] = {
        "shards_expected": len(listed) + len(unsafe),
        "shards_found": len(here),
        "missing_files": [at[v] for v in missing],
        "missing_tensor_count": sum(1 for v in weight_map.values() if v in gone),
        **agreed,
    }
    if unsafe:
        facts["unsafe_paths"] = unsafe
    facts["index_tensor_count"] = len(weight_map)
    if aliases:
        facts["aliases"] = aliases  # older savers counted both names of a shared tensor, newer ones count one
    _totals(found, facts, index, document, tensors if sound and not unsafe and not aliases else None)
    base = WeightSet(
        files=tuple(sorted(file.path for file in here.values())),
        index=index.path,
        tensors=tensors,
        owners=owners,
        facts=facts,
        findings=found,
        metadata=next(iter(headers.values())).metadata if headers else None,
        sound=sound and not unsafe,
    )
    return _sorted(base, tensors_here, reader, index, form)


def _bad_index(index: File, document: Any, tensors_here: Mapping[str, File], place: Place, form: Form) -> WeightSet:
    """Return what the names say where the index cannot be used."""
    groups = shard_groups(tensors_here)
    problem = document.problem if isinstance(document, Unreadable) else "it holds no weight_map"
    base = (
        _without_index(groups, tensors_here, place, form, silent=True)
        if groups
        else WeightSet((), None, {}, {}, {"missing_files": []}, [], sound=False)
    )
    whole = base.sound
    note = (
        f"; {base.facts['shards_found']} of {base.facts['shards_expected']} shards by name are there" if groups else ""
    )
    note += " and whole" if groups and whole else ""
    pointer = sniff.pointer(place.reader.head(index)) if index.link is None else None
    code = "index-damaged" if pointer is None else "lfs-pointer"
    fault = findings.finding(
        code,
        index.path,
        f"{index.path} cannot be used: {problem}{note}",
        REBUILD if whole else "save the model again",
        file=index.path,
        file_bytes=index.size,
        index_rebuildable=whole,
    )
    if pointer is not None:
        fault = msgspec.structs.replace(fault, data={**fault.data, **pointer_data(pointer)})
    return replace(
        base,
        index=index.path,
        facts={**base.facts, "file": index.path, "index_rebuildable": whole},
        findings=[*base.findings, fault],
        sound=False,
    )


def _missing_shards(
    found: list[Finding], index: File, missing: list[str], weight_map: Mapping[str, str], place: Place
) -> bool:
    files = place.reader.tree.files
    at = {v: place.path(v) for v in missing}
    dead = {path: str(files[path].link) for path in at.values() if path in files}
    found.extend(dead_link(path, target) for path, target in dead.items())
    absent = [v for v in missing if at[v] not in files]
    if absent:
        lost = set(absent)
        gone = sorted(name for name, v in weight_map.items() if v in lost)
        found.append(
            findings.finding(
                "shard-missing",
                index.path,
                f"{some(at[v] for v in absent)} named by {index.path} "
                f"{'is' if len(absent) == 1 else 'are'} not there; {counted(len(gone), 'tensor')} would be missing",
                "copy the missing file here, or save the model again",
                missing_files=[at[v] for v in absent],
                missing_tensor_count=len(gone),
                tensors=gone[:50],
            )
        )
    return not missing


def _agree(
    found: list[Finding],
    index: File,
    weight_map: Mapping[str, str],
    headers: Mapping[str, Header],
    here: Mapping[str, File],
    *,
    whole: bool,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Compare the map with the headers, both ways; return the tensors, their owners and the facts about both."""
    holders: dict[str, list[str]] = {}
    for value, header in headers.items():
        for name in header.tensors:
            holders.setdefault(name, []).append(value)
    tensors: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    for name, values in holders.items():
        owner = weight_map.get(name)
        value = owner if owner in values else values[0]
        tensors[name] = headers[value].tensors[name]
        owners[name] = here[value].path
    read = {value for value, header in headers.items() if header.tensors and not header.faults}
    lost = {name: v for name, v in weight_map.items() if name not in holders and v in read}
    moved = {name: v for name, v in weight_map.items() if name in holders and v in read and v not in holders[name]}
    unlisted = sorted(name for name in holders if name not in weight_map)
    double = {name: sorted(here[v].path for v in values) for name, values in holders.items() if len(values) > 1}
    facts: dict[str, Any] = {"missing_tensors": sorted(lost), "unlisted_tensors": unlisted}
    for value in sorted(set(lost.values())):
        gone = sorted(name for name, v in lost.items() if v == value)
        path = here[value].path
        facts["in_file"] = path
        found.append(
            findings.finding(
                "tensor-missing",
                path,
                f"{index.path} puts {some(gone)} into {path}, which does not hold {'it' if len(gone) == 1 else 'them'}",
                "save the model again; the index and its shards are from different saves",
                missing_tensors=gone,
                in_file=path,
            )
        )
    if moved:
        places = {name: holders[name][0] for name in sorted(moved)}
        found.append(
            findings.finding(
                "tensor-misplaced",
                index.path,
                f"{index.path} puts {some(sorted(moved))} into the wrong shard",
                REBUILD,
                misplaced_tensors={name: here[v].path for name, v in places.items()},
                index_rebuildable=whole and not lost,
            )
        )
        facts["index_rebuildable"] = whole and not lost
    if unlisted:
        found.append(
            findings.finding(
                "tensor-unlisted",
                index.path,
                f"{some(unlisted)} {'is' if len(unlisted) == 1 else 'are'} in a shard but not in {index.path}: "
                "readers that go by the index never load it",
                REBUILD,
                unlisted_tensors=unlisted,
            )
        )
    if double:
        named = sorted({owners[name] for name in double})
        facts["duplicated_tensors"] = double
        facts["owner"] = named[0] if len(named) == 1 else {name: owners[name] for name in double}
        found.append(
            findings.finding(
                "tensor-duplicated",
                index.path,
                f"{some(sorted(double))} {'is' if len(double) == 1 else 'are'} in more than one shard "
                f"({', '.join(double[min(double)])}); the index gives it to {owners[min(double)]}",
                "save the model again, or drop the copy the index does not name",
                duplicated_tensors=double,
                owner=facts["owner"],
            )
        )
    return tensors, owners, facts


def _totals(
    found: list[Finding],
    facts: dict[str, Any],
    index: File,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
) -> None:
    """Tell what the index claims in its metadata, and compare it with the headers where all of them could be read."""
    claims = document.get("metadata")
    if not isinstance(claims, dict):
        return
    size = sum(tensor.size for tensor in (tensors or {}).values())
    count = sum(tensor.elements for tensor in (tensors or {}).values())
    for key, fact, added, what in (
        ("total_size", "index_total_size", size, "bytes"),
        ("total_parameters", "index_total_parameters", count, "parameters"),
    ):
        if key not in claims:
            continue
        claimed = claims[key]
        whole = int(claimed) if isinstance(claimed, float) and claimed.is_integer() else claimed
        facts[fact] = whole
        if tensors is None:
            continue
        packed = key == "total_parameters" and any(t.dtype in {"I32", "U32", "U8", "F4"} for t in tensors.values())
        if whole != added and not packed:
            claim: dict[str, Any] = {fact: whole}
            found.append(
                findings.finding(
                    "index-total-wrong",
                    index.path,
                    f"{index.path} declares {whole} {what}, the headers add up to {added}",
                    "the counted figure is used; write a new index",
                    counted=added,
                    **claim,
                )
            )


# -------------------------------------------------------------------------------------------------- without an index


def _without_index(
    groups: Mapping[tuple[str, int], Mapping[int, File]],
    tensors_here: Mapping[str, File],
    place: Place,
    form: Form,
    *,
    silent: bool = False,
) -> WeightSet:
    """Return the most complete group of shards by name."""
    (stem, count), members = max(groups.items(), key=lambda g: (len(g[1]) / g[0][1], g[0][1], g[0][0]))
    reader = place.reader
    found: list[Finding] = []
    width = len(str(next(iter(members.values())).name.split("-of-")[-1].split(".")[0]))
    first = min(members)
    start = 0 if first == 0 and count not in members else 1
    wanted = {
        i: place.path(f"{stem}-{i:0{width}d}-of-{count:0{width}d}{form.suffix}") for i in range(start, count + start)
    }
    here = {i: file for i, file in members.items() if file.link is None}
    missing = [wanted[i] for i in wanted if i not in here]
    tensors: dict[str, Tensor] = {}
    owners: dict[str, str] = {}
    double: dict[str, list[str]] = {}
    sound = not missing
    for file in here.values():
        faults = form.faults(file, reader)
        found.extend(faults)
        sound = sound and not blocking(faults)
        for name, tensor in form.header(file, reader).tensors.items():
            if name in owners:
                double.setdefault(name, [owners[name]]).append(file.path)
            tensors.setdefault(name, tensor)
            owners.setdefault(name, file.path)
    found.extend(dead_link(file.path, file.link) for file in members.values() if file.link is not None)
    there = {file.path for file in members.values()}
    absent = [path for path in missing if path not in there]
    if absent:
        found.append(
            findings.finding(
                "shard-missing",
                absent[0],
                f"{some(absent)} of {count} shards by name {'is' if len(absent) == 1 else 'are'} not there",
                "copy the missing file here, or save the model again",
                missing_files=absent,
            )
        )
    rebuildable = sound and not double
    facts: dict[str, Any] = {
        "shards_expected": count,
        "shards_found": len(here),
        "missing_files": missing,
        "missing_tensors": [],
        "unlisted_tensors": [],
    }
    if double:
        facts["duplicated_tensors"] = double
    if not silent:
        facts |= {"index_missing": True, "index_rebuildable": rebuildable}
        found.append(
            findings.finding(
                "index-missing",
                place.path(f"{stem}{form.suffix}.index.json"),
                f"{len(here)} of {count} shards are there but no index, so loaders find nothing"
                + ("; the set is complete and an index can be built from the headers" if rebuildable else ""),
                REBUILD if rebuildable else "save the model again",
                index_missing=True,
                index_rebuildable=rebuildable,
            )
        )
    base = WeightSet(
        files=tuple(sorted(file.path for file in here.values())),
        index=None,
        tensors=tensors,
        owners=owners,
        facts=facts,
        findings=found,
        metadata=form.header(here[min(here)], reader).metadata if here else None,
        sound=rebuildable,
    )
    return _sorted(base, tensors_here, reader, None, form)


def _one_file(file: File, tensors_here: Mapping[str, File], reader: Reader, form: Form) -> WeightSet:
    if file.link is not None:
        found = [dead_link(file.path, file.link)]
        facts: dict[str, Any] = {"missing_files": [], "missing_tensors": [], "unlisted_tensors": []}
        return WeightSet((), None, {}, {}, facts, found, sound=False)
    faults = form.faults(file, reader)
    header = form.header(file, reader)
    base = WeightSet(
        files=(file.path,),
        index=None,
        tensors=dict(header.tensors),
        owners=dict.fromkeys(header.tensors, file.path),
        facts={"missing_files": [], "missing_tensors": [], "unlisted_tensors": []},
        findings=faults,
        metadata=header.metadata,
        sound=not blocking(faults),
    )
    return _sorted(base, tensors_here, reader, None, form)


def blocking(faults: Iterable[Finding]) -> bool:
    """Return whether some findings say that a file cannot be used."""
    return any(fault.severity == "block" for fault in faults)


def _sorted(
    base: WeightSet, tensors_here: Mapping[str, File], reader: Reader, index: File | None, form: Form
) -> WeightSet:
    """Sort what lies beside a set; single pickles are told apart nowhere, they are only not part of it."""
    lying = _rest(tensors_here, base)
    base = shards_beside(base, lying, lambda file: form.header(file, reader), index)
    if form is SAFETENSORS:
        return files_beside(base, lying, reader, index)
    single = sorted(file.path for name, file in lying.items() if layout.shard_of(name) is None)
    return replace(base, others=tuple(single))


def _rest(tensors_here: Mapping[str, File], base: WeightSet) -> dict[str, File]:
    taken = set(base.files)
    return {name: file for name, file in tensors_here.items() if file.path not in taken and file.link is None}


def _is_safe(value: str) -> bool:
    parts = value.split("/")
    return not (not value or value.startswith("/") or "\\" in value or ":" in parts[0] or {"", ".", ".."} & set(parts))
