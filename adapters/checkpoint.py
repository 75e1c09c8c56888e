"""Which folders of a run may hold an artifact, by their names alone: cheap enough to ask of every folder at every scan.

What is really in a folder is read later, by `structure.complete` (headers) and `inspect.inspect` (everything).
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from weighbridge.adapters import layout, listing, plan

_LONE: Final = (".ckpt", ".pt", ".pth", ".th")


def is_candidate(names: Collection[str]) -> bool:
    """Return whether a folder with these file names may hold an artifact, finished or not."""
    return any(
        layout.is_weights_name(name) or name in layout.ARTIFACT_CONFIGS or name.endswith(".distcp") for name in names
    )


def lone_files(names: Collection[str]) -> list[str]:
    """Return the torch files of a folder that are checkpoints of their own, by names: Lightning's `epoch=3.ckpt`.

    Where an index, a pipeline or the weights of a whole model or adapter make the folder the artifact, none is.
    """
    lone = sorted(name for name in names if name.endswith(_LONE) and is_lone_name(name))
    made = {layout.PIPELINE_CONFIG, layout.ADAPTER_WEIGHTS, *layout.ADAPTER_PICKLES, layout.MODEL_WEIGHTS}
    if not lone or made.intersection(names) or layout.is_sharded_state(names) or any(map(_of_a_model, names)):
        return []
    if layout.ADAPTER_CONFIG in names and any(name.endswith(".safetensors") for name in names):
        return []
    return lone


def is_alone(names: Collection[str], lone: Collection[str]) -> bool:
    """Return whether a folder may hold an artifact besides its lone files; the adapter's config is theirs."""
    rest = set(names).difference(lone)
    return is_candidate(rest - {layout.ADAPTER_CONFIG} if lone else rest)


def is_lone_name(name: str) -> bool:
    """Return whether a file may be a checkpoint of its own: a torch file that is no shard, rank file or byte part."""
    return (
        name.endswith(_LONE)
        and layout.is_weights_name(name)
        and not layout.is_in_progress(name)
        and layout.byte_part(name) is None
        and layout.shard_of(name) is None
        and not layout.is_rank_like(name)
    )


def _of_a_model(name: str) -> bool:
    return layout.is_weights_name(name) and (
        name.endswith(".index.json") or layout.is_model_pickle(name) or layout.shard_of(name) is not None
    )


def is_tag_alone(name: str, above: str) -> bool:
    """Return whether a DeepSpeed tag folder is a checkpoint of its own and not the weights of the folder above it.

    `run/global_step100` is one; `checkpoint-100/global_step100` and `epoch=1.ckpt/checkpoint` are another tool's.
    """
    return layout.is_step_like(name) and not (layout.is_step_like(above) or above.endswith(".ckpt"))


def papers_above(folder: str, own: Collection[str]) -> list[os.DirEntry[str]]:
    """Return config, tokenizer and licence above a numbered checkpoint without any of its own: a DeepSpeed tag.

    `own` are the names in the folder. Where the folder above holds weights, its papers belong to those.
    """
    configs = {layout.MODEL_CONFIG, layout.ADAPTER_CONFIG, layout.PIPELINE_CONFIG}
    above, _, name = folder.rstrip("/").rpartition("/")
    if not above or configs.intersection(own) or not layout.is_step_like(name):
        return []
    try:
        with os.scandir(above) as entries:
            found = [entry for entry in entries if Path(entry.path).is_file()]
    except OSError:
        return []
    names = {entry.name for entry in found}
    if layout.MODEL_CONFIG not in names or is_candidate(names):
        return []
    return [e for e in found if plan.is_paper(e.name) and plan.role_of(e.name)[0] != plan.CARD_ROLE]


def end_mark(names: Collection[str], folder: str = "") -> str | None:
    """Return the file that the folder's writer writes last, if this layout has one and it is there.

    A Trainer checkpoint ends with trainer_state.json, a root `save_model()` with training_args.bin. `folder` is the
    folder's own name. The mark is one process's word: others may still write their rank files.
    """
    if layout.is_checkpoint_name(folder):
        return layout.TRAINER_STATE if layout.TRAINER_STATE in names else None
    for mark in (layout.TRAINING_ARGS, layout.TRAINER_STATE):
        if mark in names:
            return mark
    return None


def expected_end_mark(names: Collection[str], folder: str) -> str | None:
    """Return the end mark that this folder's writer still owes, or None."""
    if not layout.is_checkpoint_name(folder) or layout.TRAINER_STATE in names:
        return None
    return layout.TRAINER_STATE if any(layout.is_trainer_name(name) for name in names) else None


def is_staging_name(name: str) -> bool:
    """Return whether a folder still has the name that trainers write under before they rename it."""
    return layout.is_staging_name(name)


def find(root: Path | str, ignore: Sequence[str] = ()) -> list[Path]:
    """Return the folders under a root, itself included, that may be artifacts on their own, in walking order.

    Folders under a staging name, and those that belong to the artifact above them (rank folders, other forms of the
    same model), are not listed. Names only: no file is opened. Raises OSError when the root is gone.
    """
    return [Path(folder.path) for folder in without_slices(list(candidates(listing.walk(root, ignore))))]


def without_slices(folders: list[listing.Folder]) -> list[listing.Folder]:
    """Drop folders of bare weights above a whole artifact: a trainer's slices are no artifact of their own."""
    whole = [f.relative for f in folders if f.names & {layout.MODEL_CONFIG, layout.ADAPTER_CONFIG}]
    bare = [f.relative for f in folders if layout.is_bare(f.names)]
    sliced = {b for b in bare if any(b == "." or w.startswith(b + "/") for w in whole if w != b)}
    # A sharded state below an exported model or adapter only serves to go on training.
    sliced |= {
        f.relative
        for f in folders
        if layout.is_sharded_state(f.names) and (f.relative.rpartition("/")[0] or ".") in whole and f.relative != "."
    }
    return [folder for folder in folders if folder.relative not in sliced]


def candidates(folders: Iterator[listing.Folder]) -> Iterator[listing.Folder]:
    """Yield the folders of a walk that may be artifacts on their own."""
    inside: set[str] = set()
    models: set[str] = set()
    """Whole models, and what lies below them without being a checkpoint of its own."""
    pipelines: set[str] = set()
    for folder in folders:
        parent, _, name = folder.relative.rpartition("/")
        parent = parent or "."
        names = folder.names
        own = folder.relative == "." or layout.step_of(name) is not None
        below_model = not own and parent in models
        if folder.relative != "." and (
            parent in inside
            or is_staging_name(name)
            or layout.is_resume_folder(name)
            or layout.is_rank_folder(name)
            or layout.is_fsdp_folder(name)
            or (below_model and (layout.is_part_name(name) or _is_copy(names)))
            or (parent in pipelines and not layout.is_checkpoint_name(name))
        ):
            inside.add(folder.relative)
            continue
        forms = layout.MODEL_CONFIG in names and any(layout.is_form_name(name) for name in folder.dirs)
        if below_model or forms or layout.is_whole_model(names):
            models.add(folder.relative)
        if layout.PIPELINE_CONFIG in names:
            pipelines.add(folder.relative)
        parts = any(layout.is_rank_folder(name) or layout.is_fsdp_folder(name) for name in folder.dirs)
        if forms or is_candidate(names) or parts:
            yield folder


def _is_copy(names: Collection[str]) -> bool:
    """Return whether a folder below a whole model holds weights and nothing that makes them a model of their own."""
    return is_candidate(names) and not {layout.MODEL_CONFIG, layout.ADAPTER_CONFIG} & set(names)
