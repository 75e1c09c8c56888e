"""Torch distributed checkpoints (.metadata and .distcp): which tensors, from which pieces, all there or not."""

from pathlib import Path

from weighbridge.adapters import layout, torch_weights, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import torch_files
from weighbridge.adapters.formats import dcp, readers
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.select import select
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import some
from weighbridge.registry import findings


def is_here(names: object) -> bool:
    """Return whether a folder holds a distributed checkpoint, finished or not."""
    return isinstance(names, dict) and any(is_piece(str(name)) for name in names)


def is_piece(name: str) -> bool:
    """Return whether a file of this name is part of a distributed checkpoint."""
    return name == dcp.METADATA or name.endswith(".distcp")


def folders(place: Place) -> list[str]:
    """Return where a folder's distributed checkpoints lie: `.` for itself, else accelerate's folders for FSDP."""
    if is_here(place.names):
        return ["."]
    tree = place.reader.tree
    dirs = [name for name in tree.folders[place.folder].dirs if layout.is_fsdp_folder(name)]
    return sorted(name for name in dirs if is_here(tree.inside(place.path(name))))


def judge(place: Place) -> Draft:
    """Return a distributed checkpoint as a draft: the one in the folder itself, or that of accelerate below it."""
    here = [place if name == "." else Place(place.reader, place.path(name)) for name in folders(place)] or [place]
    pieces = tuple(f.path for one in here for f in one.names.values() if is_piece(f.name))
    draft = Draft(place, "ckpt-dcp", None, Named(root=place.folder, slices=pieces))
    draft.facts["pickle_format"] = True
    if len(here) > 1:
        draft.findings.append(
            findings.finding(
                "weights-ambiguous",
                here[0].folder,
                f"{len(here)} models were saved here ({some(one.folder for one in here)}): which is meant is open",
                "move each of them into a folder of its own",
                weight_sets=[one.folder for one in here],
            )
        )
        return draft
    _take(draft, here[0])
    return draft


def _take(draft: Draft, place: Place) -> None:
    """Put what one distributed checkpoint holds into a draft; `place` is the folder of its pieces."""
    subject = place.path(dcp.METADATA)
    try:
        directory = dcp.read(Path(place.reader.tree.folders[place.folder].path))
    except FormatFault as error:
        missing = [subject] if error.code == "metadata-missing" else []
        draft.add({"missing_files": missing}, [readers.fault(error, subject)])
        return
    except OSError as error:
        fault = FormatFault("file-unreadable", f"it cannot be read: {error.strerror}")
        draft.findings.append(readers.fault(fault, subject))
        return
    draft.findings += readers.findings(directory, subject)
    facts = directory.facts
    draft.facts |= {k: facts[k] for k in ("container", "distcp_files", "key_prefix", "foreign_globals", "dcp_version")}
    missing = [place.path(str(file)) for file in facts["missing_files"]]
    draft.add({"missing_files": missing}, [])
    chosen = select(directory, averaged=place.reader.averaged)
    if chosen.problem is not None:
        code = "weights-ambiguous" if chosen.weight_sets else "weights-none"
        draft.findings.append(
            findings.finding(code, subject, f"{place.folder}: {chosen.problem}", weight_sets=list(chosen.weight_sets))
        )
        return
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
    if chosen.averaged:
        draft.facts["averaged"] = True
    draft.tensors = tensors
    draft.findings += torch_weights.unstorable(subject, chosen.weights)
    draft.findings += torch_weights.partly_averaged(subject, chosen)
    collisions = torch_weights.collisions(subject, chosen)
    draft.findings += collisions
    mine, others = torch_weights.lora_split(tensors)
    if mine and others:
        found = torch_files.inside(place.folder, len(mine), len(others))
        draft.add({"lora_tensors": len(mine), "base_tensors": len(others)}, [found])
    used = [name for name in facts["distcp_files"] if name not in set(facts["missing_files"])]
    draft.inputs = tuple(sorted([subject, *(place.path(str(name)) for name in used)]))
    draft.facts["assembled_from"] = f"torch distributed checkpoint, {len(used)} files, {place.folder}"
