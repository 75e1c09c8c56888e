"""One weights file per rank: plain torch files whose names count ranks, and Megatron's folders."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys, layout
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.formats import readers
from weighbridge.adapters.formats.inert import Record
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import counted, file_findings, header_of, some
from weighbridge.registry import findings

_RANK_DIR = re.compile(r"mp_rank_(?P<tp>[0-9]{2,3})(?:_(?P<pp>[0-9]{3}))?(?:_(?P<ep>[0-9]{3}))?")
_RANK_LIMIT: Final = 100_000
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_([0-9]{7})")


class Rank(NamedTuple):
    """What a file name says of a rank: the set it belongs to, its number, and how many there are where it says so."""

    group: tuple[str, str]
    i: int
    n: int | None
    width: int
    mid: str


def rank_of(name: str) -> Rank | None:
    """Return what a name says of a rank, or None."""
    for pattern in layout.RANK_NAMES:
        match = pattern.fullmatch(name)
        if match is not None:
            parts = match.groupdict()
            n = int(parts["n"]) if parts.get("n") else None
            return Rank((match["lead"], match["tail"]), int(match["i"]), n, len(match["i"]), parts.get("mid") or "")
    return None


def groups(names: Mapping[str, File]) -> dict[tuple[str, str], dict[int, File]]:
    """Return the sets of rank files among some files: two or more, or one that says it is not alone."""
    found: dict[tuple[str, str], dict[int, File]] = {}
    stated: dict[tuple[str, str], int] = {}
    for name, file in names.items():
        rank = rank_of(name)
        if rank is not None:
            found.setdefault(rank.group, {})[rank.i] = file
            stated[rank.group] = max(stated.get(rank.group, 0), rank.n or 0)
    return {group: files for group, files in found.items() if len(files) > 1 or stated[group] > 1}


def judge(place: Place, files: tuple[File, ...]) -> Draft:
    """Return a set of rank files as a draft: named, complete or not, and never put together by guessing."""
    draft = Draft(place, "rank-sharded", None, Named(root=place.folder, slices=tuple(f.path for f in files)))
    first = rank_of(files[0].name)
    known = {rank.i: file for file in files if (rank := rank_of(file.name)) is not None}
    world = max([*(i + 1 for i in known), *(r.n or 0 for f in files if (r := rank_of(f.name)) is not None)])
    draft.facts |= {"world_size": world, "ranks_found": len(known), "pickle_format": True}
    missing: list[str] = []
    if first is not None and world < _RANK_LIMIT:
        lead, tail = first.group
        count = f"{first.mid}{first.n}" if first.mid and first.n else ""
        missing = [place.path(f"{lead}{i:0{first.width}d}{count}{tail}") for i in range(world) if i not in known]
    if missing:
        draft.add({"missing_files": missing}, [_missing(place, missing, world)])
    for file in files:
        directory = place.reader.directory(file) if file.size and file.link is None else None
        if isinstance(directory, FormatFault):
            draft.findings.append(readers.fault(directory, file.path))
        elif directory is not None and directory.blocked:
            draft.findings.extend(f for f in readers.findings(directory, file.path) if f.severity == "block")
    draft.findings.append(
        findings.finding(
            "rank-files",
            files[0].path,
            f"{len(files)} files hold one rank's part each: how the parts of a tensor fit together is not in them",
            "put them together with the framework that saved them, then publish the result",
            world_size=world,
        )
    )
    return draft


def slices(place: Place) -> tuple[File, ...]:
    """Return the safetensors of a folder that hold a rank's part of each tensor, by their names and what they hold.

    Names of torch's own writer say so. Another tool's rank counts from 0 or 1, and its files hold the same names: a
    model's shards do not, and the rank of a LoRA (`lora_rank4.safetensors`) is another thing.
    """
    own = [file for name, file in sorted(place.names.items()) if layout.slice_of(name) is not None]
    found: dict[str, dict[int, File]] = {}
    stated: dict[str, int] = {}
    for name, file in sorted(place.names.items()):
        named = layout.rank_slice(name)
        if named is not None:
            found.setdefault(named[2], {})[named[0]] = file
            stated[named[2]] = max(stated.get(named[2], 0), named[1])
    for group, files in found.items():
        if min(files) > 1 or (len(files) < 2 and stated[group] < 2):
            continue
        held = [header_of(file, place.reader).tensors.keys() for file in files.values()]
        if any(map(keys.is_lora, held)) or not all(held[0] & other for other in held[1:]):
            continue
        own += files.values()
    return tuple(own)


def judge_slices(place: Place, files: tuple[File, ...]) -> Draft:
    """Return safetensors that hold a rank's part of each tensor as a draft.

    Their headers say where a part lies in its tensor, if anything, and not how large the tensor is: that the last rank
    is there cannot be seen, so they are never put together here.
    """
    draft = Draft(place, "rank-sharded", None, Named(root=place.folder, slices=tuple(f.path for f in files)))
    by_torch = layout.slice_of(files[0].name) is not None
    known = {told for file in files if (told := _slice(file.name)) is not None}
    first = 1 if by_torch else min(1, *(rank for rank, _ in known))
    stated = max((named[1] for file in files if (named := layout.rank_slice(file.name)) is not None), default=0)
    world = max(stated, max(rank for rank, _ in known) + 1 - first)
    draft.facts |= {"world_size": world, "ranks_found": len({rank for rank, _ in known}), "pickle_format": False}
    missing = [
        place.path(f"shard-{rank:05d}-{rest}" if by_torch else _numbered(rest, rank, files))
        for rest in sorted({rest for _, rest in known})
        for rank in range(first, min(world, _RANK_LIMIT) + first)
        if (rank, rest) not in known
    ]
    if missing:
        draft.add({"missing_files": missing}, [_missing(place, missing, world)])
    for file in files:
        draft.findings.extend(file_findings(file, place.reader))
    whole = "publish the model that they were cut from, or save it whole with the framework that cut it"
    join = (
        "save again with HuggingFaceStorageWriter(..., enable_consolidation=True), or join them: "
        "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files("
        f"{place.folder!r}, OUTPUT, {{name: 1 for each tensor}}); then publish OUTPUT with the model's config.json"
    )
    draft.findings.append(
        findings.finding(
            "rank-files",
            files[0].path,
            f"{counted(len(files), 'file')} of {counted(world, 'rank')} {'holds' if len(files) == 1 else 'hold'} one "
            "rank's part of each tensor (tensor parallel): none is the model, and no loader of models joins them",
            join if by_torch else whole,
            world_size=world,
        )
    )
    return draft


def _numbered(shared: str, rank: int, files: tuple[File, ...]) -> str:
    """Return the name of another rank's file, its number as wide as theirs."""
    lead, _, tail = shared.partition("*")
    mine = (f.name for f in files if (told := layout.rank_slice(f.name)) is not None and told[2] == shared)
    width = min(len(name.removeprefix(lead).removesuffix(tail)) for name in mine)
    return f"{lead}{rank:0{width}d}{tail}"


def _slice(name: str) -> tuple[int, str] | None:
    """Return (rank, what the ranks' names share)."""
    told = layout.rank_slice(name)
    return layout.slice_of(name) or ((told[0], told[2]) if told is not None else None)


def _missing(place: Place, missing: list[str], world: int) -> Any:
    return findings.finding(
        "rank-file-missing",
        missing[0],
        f"{some(missing)} of {world} ranks {'is' if len(missing) == 1 else 'are'} not in {place.folder}",
        "copy the rank's files here from the machine that wrote them",
        missing_files=missing,
    )


# ------------------------------------------------------------------------------------------------------------- Megatron


def is_megatron(dirs: tuple[str, ...]) -> bool:
    """Return whether some folders are Megatron's ranks."""
    return any(_RANK_DIR.fullmatch(name) for name in dirs)


def judge_megatron(place: Place) -> Draft:
    """Return one iteration of a Megatron run as a draft: recognised, complete or not against its own arguments."""
    tree = place.reader.tree
    ranks = {m.group(): m for name in tree.folders[place.folder].dirs if (m := _RANK_DIR.fullmatch(name))}
    slices = [f.path for name in ranks for f in tree.below(place.path(name)).values()]
    draft = Draft(place, "megatron", None, Named(root=place.folder, slices=tuple(slices)))
    args, iteration = _arguments(place, sorted(ranks), draft)
    tp = max([_number(args, "tensor_model_parallel_size"), *(int(m["tp"]) + 1 for m in ranks.values())])
    pp = max([_number(args, "pipeline_model_parallel_size"), *(int(m["pp"] or 0) + 1 for m in ranks.values())])
    ep = max([_number(args, "expert_model_parallel_size"), *(int(m["ep"] or 0) + 1 for m in ranks.values())])
    draft.facts |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "pickle_format": True}
    if ep > 1:
        draft.facts["expert_parallel_size"] = ep
    step = layout.step_of(place.folder.rpartition("/")[2])
    draft.step = iteration if iteration is not None else step
    draft.facts["step"] = draft.step
    missing = (
        [place.path(name) for name in _wanted(tp, pp, ep) if name not in ranks] if tp * pp * ep < _RANK_LIMIT else []
    )
    empty = [place.path(name) for name in ranks if not tree.inside(place.path(name))]
    gone = sorted([*missing, *empty])
    draft.facts["missing_dirs"] = gone
    if gone:
        draft.findings.append(
            findings.finding(
                "rank-file-missing",
                gone[0],
                f"{some(gone)} of {tp * pp * ep} ranks missing: the weights are not whole",
                "copy the rank's folder here from the machine that wrote it",
                missing_dirs=gone,
            )
        )
    else:
        draft.findings.append(
            findings.finding(
                "recorded-only",
                place.folder,
                f"a complete Megatron checkpoint of {tp * pp * ep} ranks: only Megatron's own tools put it together",
                "convert it with Megatron's tools/checkpoint/convert.py, then publish the result",
                severity="warn" if tp * pp * ep > 1 else "note",
            )
        )
    return draft


def tracker(place: Place) -> list[Any]:
    """Find a tracker file that names an iteration that is not there."""
    file = place.names.get(_TRACKER)
    if file is None:
        return []
    named = place.reader.text(file, 64).strip()
    wanted = f"iter_{int(named):07d}" if named.isdigit() else named
    dirs = place.reader.tree.folders[place.folder].dirs
    if wanted in dirs or not any(_ITERATION.fullmatch(name) for name in dirs):
        return []
    return [
        findings.finding(
            "iteration-missing",
            file.path,
            f"{file.path} names {wanted}, which is not there",
            "copy that iteration here, or correct the file",
            latest_tag=wanted,
        )
    ]


def _wanted(tp: int, pp: int, ep: int) -> list[str]:
    return [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        for t in range(tp)
        for p in range(pp)
        for e in range(ep)
    ]


def _arguments(place: Place, ranks: list[str], draft: Draft) -> tuple[Mapping[str, Any], int | None]:
    """Return what the first readable rank file says of the training's arguments, and its iteration."""
    for name in ranks:
        for file in place.reader.tree.inside(place.path(name)).values():
            if not file.name.endswith(".pt") or "optim" in file.name.replace("model_optim_rng", ""):
                continue
            directory = place.reader.directory(file)
            if isinstance(directory, FormatFault):
                draft.findings.append(readers.fault(directory, file.path))
                continue
            draft.findings.extend(f for f in readers.findings(directory, file.path) if f.severity == "block")
            root = directory.root if isinstance(directory.root, dict) else {}
            args = root.get("args")
            table = args.state if isinstance(args, Record) else args
            iteration = root.get("iteration")
            return (table if isinstance(table, dict) else {}), (iteration if type(iteration) is int else None)
    return {}, None


def _number(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key)
    return value if type(value) is int and 0 < value < _RANK_LIMIT else 1
