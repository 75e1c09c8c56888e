"""Rules of names: wrappers' prefixes, adapter keys that loaders pass over, tensors that are not in the file."""

from collections.abc import Iterable
from typing import Final

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.config import base_of
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.formats.prefixes import strip
from weighbridge.adapters.keys import PREFIX
from weighbridge.adapters.whole import some
from weighbridge.registry.types import Finding

_STAGE: Final = "keys"
_FEW: Final = 2


def _prefixed(case: Case) -> Iterable[Evidence]:
    """Find a wrapper's prefix on every name of a whole model."""
    if case.is_adapter or case.artifact.file is not None or len(case.tensors) < _FEW or case.facts.get("lora_keys"):
        return
    known = case.against.prefix if case.against is not None else ""
    stripped = strip(list(case.tensors))
    prefix = known or stripped.prefix
    inner = stripped.inner
    if not prefix and not inner:
        return
    example = next(iter(case.tensors))
    segment = prefix or inner[0]
    new = f"k.removeprefix({prefix!r})" if prefix else "k"
    for part in inner:
        new += f".replace({part!r}, '')"
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"{'all ' if prefix else 'some of '}{len(case.tensors)} names hold the wrapper's segment '{segment}', such as "
        f"{example}: a loader knows none of them and makes the weights up",
        _renamed(case, new),
        "warn" if case.artifact.artifact == "ckpt" else None,  # what a training loop saves, its own loader takes off
        data={"prefix": prefix, "segments": list(inner)},
    )


def _renamed(case: Case, new: str) -> tuple[str, ...]:
    if case.facts.get("pickle_format"):
        lone = case.artifact.artifact == "ckpt" and case.owners
        return (commands.extract(case.path(next(iter(case.owners.values()))) if lone else case.folder),)
    return (commands.rename_keys(case.folder, new),)


def _adapter_keys(case: Case, one: Finding) -> tuple[str, ...]:
    if one.code == "keys-without-prefix":
        return _renamed(case, f"k if k.startswith({PREFIX!r}) else {PREFIX!r} + k")
    segment = str(one.data.get("bad_segment") or "")
    if not segment:
        return _renamed(case, "k")
    if segment == PREFIX:
        return _renamed(case, f"k.replace({PREFIX + PREFIX!r}, {PREFIX!r}, 1)")
    if one.code == "keys-with-adapter-name":
        return _renamed(case, f"k.replace({'.' + segment!r}, '.')")
    return _renamed(case, f"k.removeprefix({segment!r}).replace({'.' + segment!r}, '.')")


def _slim(case: Case, _: Finding) -> tuple[str, ...]:
    return (
        commands.python(
            "import pathlib, shutil; from safetensors.torch import load_file, save_file; "
            f"s, d = pathlib.Path({str(case.folder)!r}), pathlib.Path({str(commands.beside(case.folder, 'slim'))!r}); "
            "d.mkdir(); [shutil.copy(f, d) for f in s.iterdir() if f.is_file() and f.suffix in "
            "{'.json', '.jinja', '.md'}]; "
            "t = load_file(s / 'adapter_model.safetensors'); "
            "save_file({k: v for k, v in t.items() if 'lora_' in k}, d / 'adapter_model.safetensors', {'format': 'pt'})"
        ),
    )


def _inside(case: Case, one: Finding) -> tuple[str, ...]:
    return (commands.extract(case.path(one.subject), "--adapter", ending="adapter"),)


def _not_merged(case: Case, _: Finding) -> tuple[str, ...]:
    return ("registry merge ADAPTER --base BASE --to " + commands.quoted(commands.beside(case.folder, "merged")),)


def _whole_modules(case: Case) -> Iterable[Evidence]:
    """Tell of whole modules in an adapter, which servers refuse."""
    modules = case.facts.get("full_modules")
    if not case.is_adapter or not isinstance(modules, dict) or not modules:
        return
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"{some(sorted(modules))} ({sum(modules.values())} parameters) ride{'s' if len(modules) == 1 else ''} "
        "whole with the "
        "adapter (modules_to_save): PEFT loads that, vLLM calls it an unsupported LoRA weight",
        (commands.merge(case.folder, case.against.root if case.against is not None else base_of(case)),),
        data={"full_modules": modules},
    )


def _rank_limit(case: Case) -> Iterable[Evidence]:
    """Tell the highest rank of an adapter, which a server must be started for."""
    ranks = case.facts.get("ranks")
    if not case.is_adapter or not isinstance(ranks, list) or not ranks:
        return
    highest = max(int(rank) for rank in ranks)
    if highest <= _SERVED:
        return
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"the highest rank of its matrices is {highest}; vLLM takes {_SERVED} unless --max-lora-rank says more",
        (commands.serve_adapter(case.folder, base_of(case), highest),),
        data={"rank": highest},
    )


_SERVED: Final = 16


RULES: Final = (
    Rule(
        "names-prefixed", _STAGE, "block", ("unexpected-keys", "missing-keys", "shards-disagree", "garbage-output"),
        "every name of the model carries a wrapper's prefix (DDP's module., torch.compile's _orig_mod., a "
        "trainer's attribute)",
        "write the weights again without it",
        _prefixed,
    ),
    linked(
        "adapter-keys-odd", _STAGE, "block",
        ("adapter-silent", "unexpected-keys", "missing-keys", "lora-refused", "target-not-found"),
        ("keys-wrapped", "keys-without-prefix", "keys-with-adapter-name", "lora-dialect-unknown"),
        "the adapter's keys are in a form that PEFT passes over without a word",
        "write the adapter again with the names PEFT writes",
        _adapter_keys,
    ),
    linked(
        "not-merged", _STAGE, "block", ("unexpected-keys", "missing-keys", "garbage-output", "unproven-merge"),
        ("not-merged",),
        "what is called a merged model still holds adapter names, so a loader makes the weights up",
        "merge the adapter properly, then save",
        _not_merged,
    ),
    linked(
        "adapter-in-checkpoint", _STAGE, "warn", ("unexpected-keys", "adapter-as-model"), ("adapter-inside",),
        "a checkpoint holds the adapter's weights beside the frozen base",
        "take the adapter out",
        _inside,
    ),
    linked(
        "adapter-not-exported", _STAGE, "block", ("unexpected-keys", "adapter-silent", "target-not-found"),
        ("lora-dialect-torchtune", "adapter-not-taken-out"),
        "the adapter is in its trainer's own form, or beside others, and cannot be turned into PEFT's",
        "save it with the trainer's exporter, or with save_pretrained",
    ),
    linked(
        "base-in-adapter", _STAGE, "warn", ("unexpected-keys", "lora-refused", "memory-blow-up"),
        ("base-inside-adapter",),
        "the adapter's file holds tensors of the frozen base",
        "write a slim copy with the adapter's tensors only",
        _slim,
    ),
    Rule(
        "modules-ride-along", _STAGE, "note", ("lora-refused", "unexpected-keys"),
        "whole modules ride with the adapter, which servers refuse",
        "merge the adapter into its base for serving",
        _whole_modules,
    ),
    Rule(
        "rank-above-server", _STAGE, "note", ("lora-refused",),
        "the adapter's rank is above what a server takes by default",
        "start the server with room for the rank",
        _rank_limit,
    ),
    linked(
        "tensors-absent", _STAGE, "block", ("missing-keys", "shards-disagree", "files-missing"),
        ("tensor-missing", "lora-half-missing", "saved-module-missing"),
        "tensors that the index, the architecture or the config asks for are in no file",
        "save again; what is missing cannot be made up",
    ),
    linked(
        "targets-differ", _STAGE, "warn", ("target-not-found", "adapter-silent", "missing-keys"),
        ("target-stray", "target-without-weights"),
        "config and weights of the adapter name different modules",
        "put the adapter_config.json of the same save beside the weights",
    ),
    linked(
        "dora-differs", _STAGE, "block", ("missing-keys", "unexpected-keys", "garbage-output", "adapter-silent"),
        ("dora-mismatch",),
        "the config says DoRA and the file holds no magnitudes, or the other way round",
        "put the adapter_config.json of the same save beside the weights",
    ),
    linked(
        "names-collide", _STAGE, "block", ("unexpected-keys", "missing-keys"),
        ("names-collide", "weights-ambiguous", "tensor-unstorable"),
        "a checkpoint holds several tables that could be the model, or two tensors that would get one name",
        "say which table is meant: registry extract --key",
        lambda case, one: (commands.extract(case.path(one.subject), "--key", "NAME"),),
    ),
)  # fmt: skip
