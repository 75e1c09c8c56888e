"""Torch distributed checkpoints (.metadata and .distcp): which tensors, from which pieces, all there or not."""

from pathlib import Path

from weighbridge.adapters import torch_weights, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import torch_files
from weighbridge.adapters.formats import dcp, readers
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.select import select
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.registry import findings


def is_here(names: object) -> bool:
    """Return whether a folder holds a distributed checkpoint, finished or not."""
    return isinstance(names, dict) and (dcp.METADATA in names or any(str(name).endswith(".distcp") for name in names))


def judge(place: Place) -> Draft:
    """Return a distributed checkpoint as a draft."""
    pieces = tuple(f.path for f in place.names.values() if f.name.endswith(".distcp") or f.name == dcp.METADATA)
    draft = Draft(place, "ckpt-dcp", None, Named(root=place.folder, slices=pieces))
    draft.facts["pickle_format"] = True
    subject = place.path(dcp.METADATA)
    try:
        directory = dcp.read(Path(place.reader.tree.folders[place.folder].path))
    except FormatFault as error:
        missing = [subject] if error.code == "metadata-missing" else []
        draft.add({"missing_files": missing}, [readers.fault(error, subject)])
        return draft
    except OSError as error:
        fault = FormatFault("file-unreadable", f"it cannot be read: {error.strerror}")
        draft.findings.append(readers.fault(fault, subject))
        return draft
    draft.findings += readers.findings(directory, subject)
    facts = directory.facts
    draft.facts |= {k: facts[k] for k in ("container", "distcp_files", "key_prefix", "foreign_globals", "dcp_version")}
    missing = [place.path(str(file)) for file in facts["missing_files"]]
    draft.add({"missing_files": missing}, [])
    chosen = select(directory)
    if chosen.problem is not None:
        code = "weights-ambiguous" if chosen.weight_sets else "weights-none"
        draft.findings.append(
            findings.finding(code, subject, f"{place.folder}: {chosen.problem}", weight_sets=list(chosen.weight_sets))
        )
        return draft
    tensors = torch_weights.header_tensors(chosen.weights)
    counted, draft.weights = weights.summary(tensors)
    draft.facts |= counted
    draft.facts |= {
        "weights_key": chosen.weights_key,
        "stripped_prefix": chosen.stripped.prefix,
        "dropped_top_keys": list(chosen.dropped_top_keys),
    }
    if chosen.weights_key and not draft.facts["key_prefix"]:
        draft.facts["key_prefix"] = chosen.weights_key.replace("/", ".") + "."
    unsupported = {t.name: t.unsupported for t in chosen.weights if t.unsupported}
    if unsupported:
        draft.facts["unsupported"] = unsupported
    mine, others = torch_weights.lora_split(tensors)
    if mine and others:
        found = torch_files.inside(place.folder, len(mine), len(others))
        draft.add({"lora_tensors": len(mine), "base_tensors": len(others)}, [found])
    return draft
