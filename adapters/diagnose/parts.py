"""Rules of shards and ranks: an index ahead of its files, parts that were not gathered, rank files, slices."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.container import again
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.extract import NOT_NEEDED
from weighbridge.registry.types import Finding

_STAGE: Final = "parts"
_NO_MATTER: Final = NOT_NEEDED - {"weights-ambiguous"}
"""What forbids to publish a folder, and not to take the weights out of it with the command that is named."""

_TIMES: Final = 3
"""Resume-only bytes above this multiple of what is needed to run are worth a word."""


def _index(case: Case, one: Finding) -> tuple[str, ...]:
    shards = sorted(name for name in case.names if name.endswith(".safetensors") and "-of-" in name)
    if not shards or case.facts.get("index_rebuildable") is False:
        return ()
    name = Path(one.subject).name if one.subject.endswith(".index.json") else "model.safetensors.index.json"
    return (commands.rebuild_index(case.folder, shards, name),)


def _stale(case: Case, one: Finding) -> tuple[str, ...]:
    stale = one.data.get("stale_files") or one.data.get("conflicting_files") or case.facts.get("stale_files")
    return (commands.remove([case.path(str(path)) for path in stale[:20]]),) if isinstance(stale, list) else ()


def _gather(case: Case, _: Finding) -> tuple[str, ...]:
    """Take the whole weights out of the rank files, where they lie beside the emptied ones."""
    there = case.facts.get("recoverable_from")
    if isinstance(there, str):
        target = commands.quoted(commands.beside(case.folder, "gathered"))
        more = " --adapter" if case.is_adapter else ""
        return (
            f"registry extract {commands.quoted(case.path(there))} --to {target}{more}",
            f"cp -n {commands.quoted(case.folder)}/*.json {target}/",
        )
    return ()


def _unusable(case: Case) -> bool:
    """Return whether something forbids to put the parts together; an end mark that is not there yet does not."""
    return any(f.severity == "block" and f.code not in _NO_MATTER for f in case.findings)


def _zero_only(case: Case) -> Iterable[Evidence]:
    """Find weights that exist in rank files alone."""
    if case.artifact.artifact != "deepspeed-zero" or _unusable(case):
        return
    facts = case.facts
    yield Evidence(
        case.artifact.relative,
        f"the weights are in the rank files of DeepSpeed ZeRO-{facts.get('zero_stage') or '?'} alone "
        f"({facts.get('world_size') or '?'} ranks, {facts.get('tensor_count') or '?'} tensors): no loader of "
        "models reads "
        "them",
        (commands.extract(case.folder),),
    )


def _distributed_only(case: Case) -> Iterable[Evidence]:
    """Find weights that exist as a torch distributed checkpoint alone."""
    if case.artifact.artifact != "ckpt-dcp" or _unusable(case):
        return
    files = case.facts.get("distcp_files") or []
    yield Evidence(
        case.artifact.relative,
        f"the weights are a torch distributed checkpoint ({len(files)} data files): loaders of models do not read it",
        (commands.extract(case.folder),),
    )


def _megatron(case: Case) -> Iterable[Evidence]:
    """Hand on what is cut over model-parallel ranks, and find a whole Megatron checkpoint, which is so by nature."""
    for one in case.findings:
        if one.code == "rank-files":
            yield Evidence(one.subject, one.message, (), None, one.fix, one.code, one.data)
    if case.artifact.artifact != "megatron" or _unusable(case):
        return
    facts = case.facts
    yield Evidence(
        case.artifact.relative,
        f"a Megatron checkpoint, cut over {facts.get('tensor_parallel_size') or '?'} tensor-parallel and "
        f"{facts.get('pipeline_parallel_size') or '?'} pipeline ranks: no other program reads it",
        (("python tools/checkpoint/convert.py --model-type GPT --load-dir "
         f"{commands.quoted(case.folder.parent)} --save-dir "
         f"{commands.quoted(commands.beside(case.folder, 'converted'))}"),),
    )  # fmt: skip


def _zero_huge(case: Case) -> Iterable[Evidence]:
    """Weigh what only training needs against what a model needs to run."""
    needed = sum(f.size for f in case.artifact.files if f.publish)
    resume = [f for f in case.artifact.files if f.reason == "resume-only"]
    weight = sum(f.size for f in resume)
    if not resume or weight <= _TIMES * needed:
        return
    largest = max(resume, key=lambda f: f.size)
    whole = f"{weight / needed:.0f} times the {needed} bytes that are needed to run" if needed else "all there is"
    yield Evidence(
        case.artifact.relative,
        f"{len(resume)} files of {weight} bytes serve only to go on training ({whole}); the largest is {largest.path} "
        f"with {largest.size} bytes",
        (commands.inspect(case.folder),),
    )


def _parallel(case: Case) -> Iterable[Evidence]:
    """Find weights that are one rank's slice of a tensor-parallel save, by the config's own sizes."""
    slices = tensor_slices(case)
    if slices is None:
        return
    ways, names = slices
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"{len(names)} matrices have exactly 1/{ways} of the size the config asks for, such as {names[0]}: this is one "
        f"rank's slice of a save that was cut over {ways} ranks",
    )


def tensor_slices(case: Case) -> tuple[int, list[str]] | None:
    """Return (ranks, names) where every column-cut matrix has the same fraction of its size, None where none has."""
    sizes = {
        "gate_proj": case.config.get("intermediate_size"),
        "up_proj": case.config.get("intermediate_size"),
        "q_proj": _heads(case),
    }
    ways: set[int] = set()
    names: list[str] = []
    for name, tensor in case.tensors.items():
        wanted = sizes.get(name.split(".")[-2]) if name.endswith(".weight") and name.count(".") else None
        if not isinstance(wanted, int) or len(tensor.shape) != 2 or not tensor.shape[0]:
            continue
        if wanted <= tensor.shape[0] or wanted % tensor.shape[0]:
            return None
        ways.add(wanted // tensor.shape[0])
        names.append(name)
    return (ways.pop(), sorted(names)) if len(ways) == 1 and len(names) > 1 else None


def _heads(case: Case) -> int | None:
    heads, hidden = case.config.get("num_attention_heads"), case.config.get("hidden_size")
    width = case.config.get("head_dim")
    if not isinstance(heads, int) or heads < 1:
        return None
    if isinstance(width, int):
        return heads * width
    return hidden if isinstance(hidden, int) else None


RULES: Final = (
    linked(
        "index-ahead", _STAGE, "block", ("files-missing", "missing-keys", "shards-disagree"), ("shard-missing",),
        "the index, or the names, ask for a shard that is not there",
        "fetch the missing shard; an index is copied last",
        again,
    ),
    linked(
        "index-unusable", _STAGE, "block", ("files-missing", "missing-keys", "shards-disagree", "config-broken"),
        ("index-missing", "index-incomplete", "index-damaged", "index-path-unsafe"),
        "the index is missing, cannot be read, or leaves out shards of its own set",
        "write the index again from the headers of the shards",
        _index,
    ),
    linked(
        "index-wrong", _STAGE, "block", ("shards-disagree", "missing-keys"),
        ("tensor-misplaced", "tensor-unlisted", "tensor-duplicated", "index-total-wrong"),
        "the index puts a tensor into a shard that does not hold it, or does not list it",
        "write the index again from the headers of the shards",
        _index,
    ),
    linked(
        "save-mixed", _STAGE, "warn", ("garbage-output", "shards-disagree", "unexpected-keys", "size-mismatch"),
        ("shards-stale", "sets-conflict", "copies-disagree"),
        "files of two saves lie in one folder, and a loader may take the wrong one",
        "delete what belongs to the other save",
        _stale,
    ),
    linked(
        "not-gathered", _STAGE, "block", ("size-mismatch", "missing-keys", "garbage-output"),
        ("tensors-empty", "lora-flat", "rank-part-zero"),
        "tensors have no elements, or one dimension: the parts of other ranks were not gathered before saving",
        "save again with stage3_gather_16bit_weights_on_model_save, or take the weights out of the rank files",
        _gather,
    ),
    linked(
        "partly-gathered", _STAGE, "warn", ("garbage-output", "adapter-silent"), ("lora-b-partly-zero",),
        "the same share of every lora_B is zero: one rank of several was saved",
        "save again with all ranks gathered",
        _gather,
    ),
    linked(
        "rank-file-gone", _STAGE, "block", ("zero-ranks", "files-missing"), ("rank-file-missing",),
        "a rank's file of a ZeRO checkpoint is not there, so the weights cannot be rebuilt",
        "copy the rank's file from the machine that wrote it",
        again,
    ),
    linked(
        "cannot-resume", _STAGE, "warn", ("zero-ranks",),
        ("rank-state-missing", "latest-tag-missing", "iteration-missing", "trainer-state-damaged"),
        "a part of the training state is missing: training cannot go on from here",
        "copy the missing state, or go on from an earlier checkpoint",
    ),
    Rule(
        "rank-files-only", _STAGE, "block", ("files-missing", "size-mismatch", "zero-ranks"),
        "the weights are cut over model-parallel ranks, in the layout of the framework that saved them",
        "put them together with that framework's own converter",
        _megatron,
        ("rank-files",),
    ),
    Rule(
        "parallel-slice", _STAGE, "block", ("size-mismatch", "garbage-output"),
        "the weights are one rank's slice of a tensor-parallel save",
        "put the slices of all ranks together with the framework that saved them",
        _parallel,
    ),
    Rule(
        "zero-only", _STAGE, "warn", ("files-missing", "adapter-as-model", "zero-ranks"),
        "the weights are in DeepSpeed's rank files alone",
        "take them out as safetensors",
        _zero_only,
    ),
    Rule(
        "distributed-only", _STAGE, "warn", ("files-missing", "adapter-as-model"),
        "the weights are a torch distributed checkpoint (.distcp) alone",
        "take them out as safetensors",
        _distributed_only,
    ),
    Rule(
        "zero-huge", _STAGE, "note", ("zero-huge", "memory-blow-up"),
        "optimizer state and rank files outweigh what is needed to run the model",
        "publish or copy the inference set alone; delete the state only when no training goes on from it",
        _zero_huge,
    ),
)  # fmt: skip
