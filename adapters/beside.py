"""What lies beside the weights of a folder: stale shards, whole second copies, a rival set, unknown files."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from weighbridge.adapters import layout, values
from weighbridge.adapters.formats.safetensors import Header
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Reader
from weighbridge.adapters.weights import WeightSet, main_dtype
from weighbridge.adapters.whole import counted, header_of, some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding


def shard_groups(tensors_here: Mapping[str, File]) -> dict[tuple[str, int], dict[int, File]]:
    """Return {(stem, n): {i: file}} of the names that look like shards."""
    groups: dict[tuple[str, int], dict[int, File]] = {}
    for name, file in tensors_here.items():
        shard = layout.shard_of(name)
        if shard is not None:
            groups.setdefault((shard[0], shard[2]), {})[shard[1]] = file
    return groups


def shards_beside(
    base: WeightSet, lying: Mapping[str, File], header: Callable[[File], Header], index: File | None
) -> WeightSet:
    """Sort the other shards of the folder into those that the index forgot and those of another save."""
    facts, found = dict(base.facts), list(base.findings)
    stale: list[str] = []
    unindexed: list[str] = []
    own = {(s[0], s[2]) for path in base.files if (s := layout.shard_of(path.rpartition("/")[2]))}
    for (stem, count), members in sorted(shard_groups(lying).items()):
        paths = sorted(file.path for file in members.values())
        names = {name for file in members.values() for name in header(file).tensors}
        if index is not None and (stem, count) in own:
            left = sorted(names - base.tensors.keys())
            facts["unlisted_tensors"] = sorted({*facts.get("unlisted_tensors", []), *left})
            found.append(
                findings.finding(
                    "index-incomplete",
                    index.path,
                    f"{index.path} leaves out {some(paths)} of the same set and with it {counted(len(left), 'tensor')}",
                    "write a new index from the headers, or save the model again",
                    unindexed_files=paths,
                    unlisted_tensors=left,
                    index_rebuildable=base.sound,
                )
            )
            unindexed.extend(paths)
            continue
        stale.extend(paths)
        whole = len(members) == count and not any(header(file).faults for file in members.values())
        if whole and names >= base.tensors.keys():
            unindexed.extend(paths)
            if not base.sound:
                facts["index_rebuildable"] = True
    if unindexed:
        facts["unindexed_files"] = unindexed
    if stale:
        found.append(
            findings.finding(
                "shards-stale",
                stale[0],
                f"{some(stale)} {'is' if len(stale) == 1 else 'are'} no part of the set: "
                + ("a second complete set that the index does not name" if unindexed else "left from another save"),
                "delete what belongs to the other save",
                stale_files=stale,
                unindexed_files=unindexed,
            )
        )
    facts["stale_files"] = stale
    return replace(base, facts=facts, findings=found, stale=tuple(stale))


def files_beside(base: WeightSet, lying: Mapping[str, File], reader: Reader, index: File | None) -> WeightSet:
    """Sort the other single safetensors files of the folder into whole copies, a rival set and unknown ones."""
    facts, found = dict(base.facts), list(base.findings)
    copies: list[str] = []
    others: list[str] = []
    for name, file in sorted(lying.items()):
        if layout.shard_of(name) is not None:
            continue
        header = header_of(file, reader)
        if index is not None and name == layout.MODEL_WEIGHTS:
            # Loaders prefer the single file to the index, so it must be the same model or nothing.
            same = _same_model(file, header, base, reader)
            if same is False:
                fault = _conflict(file, header, base, index)
                facts |= fault.data
                found.append(fault)
            else:
                copies.append(file.path)
                facts["values_equal"] = same
        elif (
            (header.tensors and header.tensors.keys() == base.tensors.keys())
            or layout.is_variant_name(name)
            or name.startswith("consolidated")
        ):
            copies.append(file.path)
        else:
            others.append(file.path)
    return replace(base, facts=facts, findings=found, copies=tuple(copies), others=tuple(others))


def _same_model(file: File, header: Header, base: WeightSet, reader: Reader) -> bool | None:
    """Return whether a single file holds the model of the shards; None where the headers agree and nobody compared."""
    alike = {(t.name, t.dtype, t.shape) for t in header.tensors.values()} == {
        (t.name, t.dtype, t.shape) for t in base.tensors.values()
    }
    if not alike or header.faults:
        return False
    return values.same_tensors(reader.tree, base, header, file) if base.sound else None


def _conflict(file: File, header: Header, base: WeightSet, index: File) -> Finding:
    dtypes = {"index": main_dtype(base.tensors.values()), "single": main_dtype(header.tensors.values())}
    return findings.finding(
        "sets-conflict",
        file.path,
        f"{file.path} ({dtypes['single']}) and the shards of {index.path} ({dtypes['index']}) hold different "
        "weights; only one can be the model",
        "delete the set that is not the model",
        conflicting_files=sorted([file.path, index.path]),
        dtypes=dtypes,
    )
