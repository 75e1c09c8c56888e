"""What a trainer left beside the weights: its state, the ranks' files, the pointer to the best checkpoint.

Names and JSON only; the pickles among these files are never opened.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from weighbridge.adapters import layout
from weighbridge.adapters.listing import File
from weighbridge.adapters.reading import Place, Unreadable
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

Checked = tuple[dict[str, Any], list[Finding]]

_RANK = re.compile(
    r"(?P<lead>(?:bf16_|fp16_)?zero_pp_rank_)(?P<dp>[0-9]+)_mp_rank_(?P<mp>[0-9]+)(?P<tail>_(?:optim|model)_states\.pt)"
)
_MP = re.compile(r"(?P<lead>mp_rank_)(?P<mp>[0-9]+)_model_states\.pt")
_RNG = re.compile(r"rng_state_([0-9]+)\.pth")
_RANDOM = re.compile(r"random_states_([0-9]+)\.pkl")
_OPTIMIZERS: Final = ("optimizer.pt", "optimizer.bin", "optimizer.safetensors")
_RANK_LIMIT: Final = 100_000


def is_trainer_folder(names: Mapping[str, Any], dirs: tuple[str, ...], folder: str) -> bool:
    """Return whether a folder is a trainer's checkpoint: by its name and state, or by the state needed to go on."""
    resume = [name for name in names if layout.is_trainer_name(name) and name != layout.TRAINING_ARGS]
    ranks = any(layout.is_tag_name(name) for name in dirs)
    if layout.is_checkpoint_name(folder):
        return layout.TRAINER_STATE in names or bool(resume) or ranks or layout.TRAINING_ARGS in names
    return ranks or any(name in names for name in _OPTIMIZERS) or (layout.TRAINER_STATE in names and bool(resume))


def judge(place: Place, name: str) -> Checked:
    """Return the facts and findings of a trainer's folder; `name` is the folder's own name."""
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    names = place.names
    state_file = names.get(layout.TRAINER_STATE)
    state = place.reader.document(state_file) if state_file is not None else None
    if isinstance(state, Unreadable) and state_file is not None:
        found.append(
            findings.finding(
                "trainer-state-damaged",
                state_file.path,
                f"{state_file.path} cannot be read: {state.problem}; step and metrics are unknown",
                "the weights may be fine; the training's history is lost",
            )
        )
    table = state if isinstance(state, dict) else {}
    facts["step"] = _step(table, name)
    for more, extra in (_best(table, place), _ranks(place), _end(place, name)):
        facts |= more
        found += extra
    facts["resumable"] = _resumable(place, table, found)
    return facts, found


def _step(state: Mapping[str, Any], name: str) -> int | None:
    step = state.get("global_step")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    return layout.step_of(name)


def step_of_place(place: Place, name: str) -> int | None:
    """Return the step of a folder: its trainer_state.json, else its name."""
    return _step(place.table(layout.TRAINER_STATE) or {}, name)


def best(place: Place) -> Checked:
    """Find a best checkpoint that a folder's trainer_state.json points at and that is gone."""
    return _best(place.table(layout.TRAINER_STATE) or {}, place)


def _best(state: Mapping[str, Any], place: Place) -> Checked:
    """Find a best checkpoint that the state points at and that is gone."""
    best = state.get("best_model_checkpoint")
    if not isinstance(best, str) or not best:
        return {}, []
    last = PureWindowsPath(best).name if "\\" in best else PurePosixPath(best).name
    here = Path(os.path.abspath(os.path.join(place.reader.tree.root, place.folder)))  # noqa: PTH100, PTH118
    there = last == here.name or (here.parent / last).is_dir() or (here / last).is_dir()
    there = there or (best.startswith("/") and Path(best).is_dir())
    if there:
        return {"best_model_checkpoint_exists": True}, []
    fault = findings.finding(
        "best-checkpoint-gone",
        place.path(layout.TRAINER_STATE),
        f"trainer_state.json points at a best checkpoint, {last}, that is not there: nothing may claim to be it",
        "keep the best checkpoint (load_best_model_at_end), or ignore the pointer",
        best_model_checkpoint_exists=False,
    )
    return {"best_model_checkpoint_exists": False}, [fault]


def _end(place: Place, name: str) -> Checked:
    """Find an end mark that is still owed."""
    names = place.names
    if not layout.is_checkpoint_name(name) or layout.TRAINER_STATE in names:
        return {}, []
    dirs = place.reader.tree.folders[place.folder].dirs
    if not any(layout.is_trainer_name(n) for n in names) and not any(layout.is_tag_name(d) for d in dirs):
        return {}, []
    mark = place.path(layout.TRAINER_STATE)
    fault = findings.finding(
        "end-mark-missing",
        mark,
        f"{mark}, which the trainer writes last, is not there: the checkpoint is not finished",
        "wait; if the training died here, publish the checkpoint before it, or this one with registry push",
        missing_files=[mark],
    )
    return {"missing_files": [mark]}, [fault]


def _ranks(place: Place) -> Checked:
    """Compare the rank files of DeepSpeed with the ranks that took part."""
    tree = place.reader.tree
    dirs = tree.folders[place.folder].dirs
    tags = sorted((d for d in dirs if layout.is_tag_name(d)), key=_tag_step)
    latest = place.names.get("latest")
    rng = [int(m[1]) for n in place.names if (m := _RNG.fullmatch(n) or _RANDOM.fullmatch(n))]
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    if rng:
        facts["world_size"] = len(rng)
        gaps = sorted(set(range(max(rng) + 1)) - set(rng)) if max(rng) < _RANK_LIMIT else []
        if gaps:
            found.append(
                findings.finding(
                    "rank-state-missing",
                    place.folder,
                    f"the random state of rank {some(str(g) for g in gaps)} is missing of {max(rng) + 1}",
                    "the weights are not concerned",
                    severity="note",
                    missing_ranks=gaps,
                )
            )
            facts["world_size"] = max(rng) + 1
    if not tags and latest is None:
        return facts, found
    facts["tags"] = tags
    tag = tags[-1] if tags else None
    if latest is not None:
        named = place.reader.text(latest, 200).strip()
        facts["latest_tag"] = named
        if named in tags:
            tag = named
        elif layout.is_tag_name(named) or tags:
            found.append(
                findings.finding(
                    "latest-tag-missing",
                    latest.path,
                    f"latest names {named}, which is not there"
                    + (f"; {some(tags)} {'is' if len(tags) == 1 else 'are'}" if tags else "")
                    + ": training cannot go on from here as it stands",
                    f"write {tags[-1]} into latest, if that is the state you want" if tags else None,
                    latest_tag=named,
                    tags=tags,
                )
            )
    if tag is not None:
        more, extra = _tag(place, tag, facts.get("world_size"))
        facts |= more
        found += extra
    return facts, found


def _tag_step(name: str) -> int:
    return int(re.sub(r"\D", "", name) or 0)


def _tag(place: Place, tag: str, world: int | None) -> Checked:
    """Judge one tag folder: which optimizer and model parts are there, which are wanted."""
    files = place.reader.tree.inside(place.path(tag))
    optim: dict[tuple[int, int], str] = {}
    parts: dict[tuple[int, int], str] = {}
    lead, width = "zero_pp_rank_", 2
    for name, file in files.items():
        match = _RANK.fullmatch(name)
        if match is None or len(match["dp"]) > 6 or not _is_there(file):
            continue
        lead, width = match["lead"], len(match["mp"])
        (optim if "optim" in match["tail"] else parts)[int(match["dp"]), int(match["mp"])] = name
    if not optim:
        return {}, []
    mps = max(mp for _, mp in optim) + 1
    dps = max(dp for dp, _ in optim) + 1
    if world and world % mps == 0:
        dps = max(dps, world // mps)
    wanted = [(dp, mp) for dp in range(dps) for mp in range(mps)]
    facts: dict[str, Any] = {
        "optim_ranks_expected": len(wanted),
        "optim_ranks_found": len(optim),
        "world_size": len(wanted),
    }
    missing = [
        place.path(f"{tag}/{lead}{dp}_mp_rank_{mp:0{width}d}_optim_states.pt")
        for dp, mp in wanted
        if (dp, mp) not in optim
    ]
    if parts:
        facts["zero_stage"] = 3
        missing += [
            place.path(f"{tag}/{lead}{dp}_mp_rank_{mp:0{width}d}_model_states.pt")
            for dp, mp in wanted
            if (dp, mp) not in parts
        ]
    else:
        there = {int(m["mp"]) for n in files if (m := _MP.fullmatch(n))}
        missing += [place.path(f"{tag}/mp_rank_{mp:0{width}d}_model_states.pt") for mp in range(mps) if mp not in there]
    if not missing:
        return facts, []
    facts["missing_files"] = missing
    fault = findings.finding(
        "rank-state-missing",
        place.path(tag),
        f"{len(missing)} rank file{'s are' if len(missing) > 1 else ' is'} missing ({some(missing)}); "
        f"{len(optim)} of {len(wanted)} optimizer ranks are there: training cannot go on from here, fp32 weights "
        "cannot be rebuilt",
        "copy the rank's file here; the adapter or model beside it is not concerned",
        missing_files=missing,
        optim_ranks_expected=len(wanted),
        optim_ranks_found=len(optim),
    )
    return facts, [fault]


def _is_there(file: File) -> bool:
    return file.link is None and file.size > 0


def _resumable(place: Place, state: Mapping[str, Any], found: list[Finding]) -> bool:
    """Return whether training can go on from here: state, optimizer and schedule are there and whole."""
    if not state or any(f.code in {"rank-state-missing", "latest-tag-missing"} and f.severity != "note" for f in found):
        return False
    names = place.names
    tree = place.reader.tree
    dirs = tree.folders[place.folder].dirs
    tagged = any(layout.is_tag_name(name) for name in dirs)
    single = any(name in names and _is_there(names[name]) for name in _OPTIMIZERS)
    split = any(re.fullmatch(r"optimizer_[0-9]+", name) for name in dirs)
    schedule = any(name in names for name in ("scheduler.pt", "scheduler.bin")) or tagged
    return (single or split or tagged) and schedule


def count_runs(checkpoints: Iterable[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]) -> int:
    """Return how many runs some checkpoints come from: by their configs, and by histories that contradict each other.

    Each one is (adapter or model config, trainer state), None where there is none. A greater max_steps alone says
    nothing: a run that is taken up again for more epochs has one too.
    """
    histories: dict[str, list[dict[int, Any]]] = {}
    for config, state in checkpoints:
        plain = {k: sorted(v, key=repr) if isinstance(v, list) else v for k, v in (config or {}).items()}
        kept = repr(sorted((k, repr(v)) for k, v in plain.items() if k not in _VOLATILE))
        losses = _losses(state or {})
        runs = histories.setdefault(kept, [])
        same = next((run for run in runs if all(run.get(step, loss) == loss for step, loss in losses.items())), None)
        if same is None:
            runs.append(losses)
        else:
            same.update(losses)
    return sum(len(runs) for runs in histories.values())


def _losses(state: Mapping[str, Any]) -> dict[int, Any]:
    """Return the training loss per step of a trainer's log."""
    log = state.get("log_history")
    return {
        entry["step"]: entry["loss"]
        for entry in (log if isinstance(log, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("step"), int)
        and isinstance(entry.get("loss"), (int, float))
    }


_VOLATILE: Final = frozenset(
    {"peft_version", "transformers_version", "_name_or_path", "inference_mode", "base_model_name_or_path", "revision"}
)
