"""DeepSpeed ZeRO folders without exported weights: what the rank files hold together, complete or not.

    latest                                        the tag that was written last
    TAG/mp_rank_00_model_states.pt                ZeRO-1 and 2: shapes, buffers, frozen weights
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt ZeRO-3: the same, one per rank
    TAG/zero_pp_rank_R_mp_rank_00_optim_states.pt the rank's part of the fp32 weights, flat

How the tensors are made up of them says `zero_parts`; nothing but the files' directories is read here.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from weighbridge.adapters import torch_weights, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import torch_files
from weighbridge.adapters.families.zero_parts import STATE, Part, Planned, Rebuilt, rebuild, root, whole
from weighbridge.adapters.formats import readers
from weighbridge.adapters.formats.prefixes import strip
from weighbridge.adapters.formats.protocol import BITS, FormatFault, Tensor, elements
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_RANK = re.compile(
    r"(?P<lead>(?:bf16_|fp16_)?zero_pp_rank_)(?P<dp>[0-9]{1,6})_mp_rank_(?P<mp>[0-9]{1,6})"
    r"_(?P<what>optim|model)_states\.pt"
)
_MODEL = re.compile(r"mp_rank_(?P<mp>[0-9]{1,6})_model_states\.pt")
_WORLD_LIMIT: Final = 100_000


class _Tag(NamedTuple):
    folder: str
    optim: dict[int, File]
    parts: dict[int, File]
    """The model states of every rank; under ZeRO-1 and 2 only one, of rank 0."""
    split: bool
    """Every rank has model states of its own: ZeRO-3."""
    mps: int
    lead: str
    width: int


def tags(place: Place) -> list[str]:
    """Return the folders of a place that hold rank files, `.` for the place itself, the latest step last."""
    tree = place.reader.tree
    found = [name for name in tree.folders[place.folder].dirs if _holds(tree.inside(place.path(name)))]
    found.sort(key=lambda name: (int(re.sub(r"\D", "", name)[:18] or 0), name))
    return ["."] if _holds(place.names) else found


def _holds(names: Mapping[str, File]) -> bool:
    return any(_RANK.fullmatch(name) for name in names)


def judge(place: Place) -> Draft:
    """Return a ZeRO folder as a draft."""
    draft = Draft(place, "deepspeed-zero", None, Named(root=place.folder))
    draft.facts["pickle_format"] = True
    here = tags(place)
    latest = place.names.get("latest")
    named = place.reader.text(latest, 200).strip() if latest is not None else None
    chosen = named if named in here else here[-1]
    if here != ["."]:
        draft.facts["tags"] = here
        if named:
            draft.facts["latest_tag"] = named
    tag = _tag(place, chosen)
    paths = [f.path for f in (*tag.optim.values(), *tag.parts.values())]
    draft.named = Named(root=place.folder, slices=tuple(paths))
    states, optims = _parts(draft, tag.parts), _parts(draft, tag.optim)
    world = _complete(draft, tag, states, optims)
    step = next((n for part in states.values() if (n := whole(root(part.directory).get("global_steps")))), None)
    if step is not None:
        draft.step = draft.facts["step"] = step
    if any(f.severity == "block" for f in draft.findings):
        return draft
    mine = {rank: part for rank, part in optims.items() if rank < world}
    rebuilt = rebuild(states, mine, stage=draft.facts["zero_stage"] or 0)
    rebuilt = _unwrapped(draft, rebuilt)
    place.reader.notes["zero", place.folder] = rebuilt
    if rebuilt.problem is not None:
        draft.findings.append(
            findings.finding("tensor-incomplete", place.path(chosen), f"{place.path(chosen)}: {rebuilt.problem}")
        )
        return draft
    _tell(draft, rebuilt, place.path(chosen))
    used = [*states.values(), *mine.values()]
    draft.inputs = tuple(sorted(part.path for part in used))
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    draft.facts["assembled_from"] = f"DeepSpeed ZeRO-{draft.facts['zero_stage']}, {ranks}, {place.path(chosen)}"
    return draft


def _unwrapped(draft: Draft, rebuilt: Rebuilt) -> Rebuilt:
    """Take the wrappers' segments off the names, as of any state: Lightning's `_forward_module.` is on all of them."""
    stripped = strip([planned.name for planned in rebuilt.tensors])
    names = stripped.names
    if stripped.collisions or (not stripped.prefix and not stripped.inner and not stripped.others):
        return rebuilt
    draft.facts["stripped_prefix"] = stripped.prefix
    if stripped.others:
        draft.facts["other_entries"] = list(stripped.others)
    kept = tuple(p._replace(name=names[p.name]) for p in rebuilt.tensors if p.name in names)
    cut = len(stripped.prefix)
    aliases = {name[cut:]: names[owner] for name, owner in rebuilt.aliases.items() if owner in names}
    return rebuilt._replace(tensors=kept, aliases=aliases)


def _tag(place: Place, name: str) -> _Tag:
    folder = place.folder if name == "." else place.path(name)
    optim: dict[int, File] = {}
    parts: dict[int, File] = {}
    whole: File | None = None
    mps, lead, width = 1, "zero_pp_rank_", 2
    for label, file in place.reader.tree.inside(folder).items():
        match = _RANK.fullmatch(label)
        if match is not None and file.link is None and file.size > 0:
            mps = max(mps, int(match["mp"]) + 1)
            width = len(match["mp"])
            if int(match["mp"]) == 0:
                (optim if match["what"] == "optim" else parts)[int(match["dp"])] = file
            if match["what"] == "optim":
                lead = match["lead"]
            continue
        single = _MODEL.fullmatch(label)
        if single is not None:
            mps = max(mps, int(single["mp"]) + 1)
            if int(single["mp"]) == 0 and file.link is None and file.size > 0:
                whole = file
    split = bool(parts) and whole is None
    return _Tag(folder, optim, parts if split else {0: whole} if whole is not None else {}, split, mps, lead, width)


def _parts(draft: Draft, files: Mapping[int, File]) -> dict[int, Part]:
    """Return the rank files that can be read, by rank; what is wrong with the others becomes a finding."""
    parts: dict[int, Part] = {}
    for rank, file in sorted(files.items()):
        directory = draft.place.reader.directory(file)
        if isinstance(directory, FormatFault):
            draft.findings.append(readers.fault(directory, file.path))
            continue
        draft.findings.extend(f for f in readers.findings(directory, file.path) if f.severity == "block")
        parts[rank] = Part(file.path, directory)
    return parts


def _complete(draft: Draft, tag: _Tag, states: Mapping[int, Part], optims: Mapping[int, Part]) -> int:
    """Compare the files that are there with the world the files themselves record."""
    stage, worlds = None, []
    for part in optims.values():
        table = root(part.directory).get(STATE)
        if isinstance(table, dict):
            stage = whole(table.get("zero_stage")) if stage is None else stage
            count = table.get("partition_count")
            numbers = [n for c in (count if isinstance(count, list) else [count]) if (n := whole(c))]
            worlds.append(max(numbers, default=0))
    worlds += [n for part in states.values() if (n := whole(root(part.directory).get("dp_world_size")))]
    if stage is None:
        stage = 3 if tag.split else None
    recorded = max(worlds, default=0)
    seen = max((rank + 1 for rank in tag.optim), default=0)
    world = recorded if 0 < recorded < _WORLD_LIMIT else seen
    draft.facts |= {"zero_stage": stage, "world_size": world * tag.mps}
    draft.facts |= {"optim_ranks_expected": world, "optim_ranks_found": sum(1 for r in tag.optim if r < world)}
    prefix = "" if tag.folder == "." else f"{tag.folder}/"
    missing = [
        f"{prefix}{tag.lead}{r}_mp_rank_{0:0{tag.width}d}_optim_states.pt" for r in range(world) if r not in tag.optim
    ]
    if tag.split or (stage == 3 and not tag.parts):
        lead = tag.lead.removeprefix("bf16_").removeprefix("fp16_") if not tag.parts else _lead(tag)
        missing += [
            f"{prefix}{lead}{r}_mp_rank_{0:0{tag.width}d}_model_states.pt" for r in range(world) if r not in tag.parts
        ]
    elif not tag.parts:
        missing.append(f"{prefix}mp_rank_{0:0{tag.width}d}_model_states.pt")
    stale = sorted(f.path for group in (tag.optim, tag.parts) for rank, f in group.items() if rank >= world)
    if stale:
        draft.add(
            {"stale_files": stale},
            [
                findings.finding(
                    "shards-stale",
                    stale[0],
                    f"{some(stale)} {'is' if len(stale) == 1 else 'are'} of ranks beyond the {world} that took part: "
                    "left from an earlier run",
                    "delete what belongs to the other run",
                    stale_files=stale,
                )
            ],
        )
    if missing:
        draft.add({"missing_files": missing}, [_missing(missing, world)])
    if tag.mps > 1:
        draft.findings.append(
            findings.finding(
                "rank-files",
                tag.folder,
                f"the weights are cut over {tag.mps} model-parallel ranks as well: how they fit together is not in the "
                "files",
                "put them together with the framework that saved them",
            )
        )
    return world


def _lead(tag: _Tag) -> str:
    match = _RANK.fullmatch(next(iter(tag.parts.values())).name)
    return match["lead"] if match is not None else "zero_pp_rank_"


def _missing(missing: list[str], world: int) -> Finding:
    are = "is" if len(missing) == 1 else "are"
    return findings.finding(
        "rank-file-missing",
        missing[0],
        f"{some(missing)} {are} not there: the parts of all {world} ranks are needed to put the weights together",
        "copy the rank's file here from the machine that wrote it",
        missing_files=missing,
    )


def _tell(draft: Draft, rebuilt: Rebuilt, subject: str) -> None:
    tensors = torch_weights.header_tensors([Tensor(p.name, p.dtype, p.shape, _size(p)) for p in rebuilt.tensors])
    counted, draft.weights = weights.summary(tensors)
    draft.tensors = tensors
    draft.facts |= counted
    draft.facts |= {"aliases": rebuilt.aliases, "names_in": len(tensors) + len(rebuilt.aliases)}
    mine, others = torch_weights.lora_split(tensors)
    if mine and others:
        found = torch_files.inside(subject, len(mine), len(others))
        draft.add({"lora_tensors": len(mine), "base_tensors": len(others)}, [found])


def _size(planned: Planned) -> int:
    return elements(planned.shape) * BITS[planned.dtype] // 8
