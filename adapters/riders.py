"""What rides with an adapter: modules saved whole, trained layer biases, side files - or the frozen base itself."""

from typing import Any, Final

from weighbridge.adapters import audit
from weighbridge.adapters.audit import Checked, Loaded
from weighbridge.adapters.keys import Key
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_AUTO_HEADS: Final = frozenset({"classifier", "score", "qa_outputs"})
"""Heads that PEFT lists by itself for a task, whether the model has them or not."""


def judge(it: Loaded) -> Checked:
    """Return the facts and findings of everything in an adapter file that is no adapter weight."""
    facts, found = _riders(it)
    more, faults = _absent(it)
    return facts | more, found + faults


def split(it: Loaded) -> tuple[dict[str, int], list[str]]:
    """Return ({module saved whole: parameters}, [tensors of the frozen base]) among what is no adapter weight."""
    listed = it.words("modules_to_save")
    whole: dict[str, int] = {}
    loose: list[Key] = []
    for key in it.parsed:
        if key.part or (key.tail == "bias" and it.config.get("bias") in {"all", "lora_only"}):
            continue
        owner = next((name for name in listed if _within(name, key.module)), None)
        if owner is None:
            loose.append(key)
        else:
            whole[owner] = whole.get(owner, 0) + it.tensors[key.name].elements
    if all(key.module.rpartition(".")[2] in audit.ENDS for key in loose):
        for key in loose:  # PEFT saves resized embeddings by itself
            whole[key.module] = whole.get(key.module, 0) + it.tensors[key.name].elements
        loose = []
    return whole, sorted(key.name for key in loose)


def _within(name: str, module: str) -> bool:
    return f".{name}." in f".{module}."


def _riders(it: Loaded) -> Checked:
    whole, base = split(it)
    own = sum(1 for key in it.parsed if key.part)
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    if whole:
        facts["full_modules"] = whole
        many = len(whole) > 1
        found.append(
            findings.finding(
                "full-modules",
                it.subject,
                f"{len(whole)} whole module{'s' if many else ''} ({some(whole)}, {sum(whole.values())} parameters) "
                f"{'ride' if many else 'rides'} along; a merge replaces the base's, some servers refuse it",
                full_modules=whole,
            )
        )
    if base and own and it.peft_type in audit.LORA:
        facts |= {"lora_tensors": own, "base_tensors": len(base)}
        found.append(
            findings.finding(
                "base-inside-adapter",
                it.subject,
                f"{len(base)} frozen base tensors are in the file beside {own} of the adapter: the base's licence "
                "applies to it",
                f"publish a slim copy with the {own} adapter tensors only",
                lora_tensors=own,
                base_tensors=len(base),
            )
        )
    if it.tensors and not own and it.peft_type in audit.LORA:
        found.append(
            findings.finding(
                "adapter-empty",
                it.subject,
                f"{it.subject} holds {len(it.tensors)} tensors and not one LoRA matrix",
                "save the adapter again",
            )
        )
    return facts, found


def _absent(it: Loaded) -> Checked:
    """Find modules that the config says are saved whole and that are in no tensor."""
    listed = it.words("modules_to_save")
    loose = [key for key in it.parsed if not key.part]
    absent = [name for name in listed if not any(_within(name, key.module) for key in loose)]
    heads = [name for name in absent if name in _AUTO_HEADS]
    lost = [name for name in absent if name not in _AUTO_HEADS] or (heads if len(absent) == len(listed) else [])
    if lost:
        fault = findings.finding(
            "saved-module-missing",
            it.subject,
            f"the config says {some(lost)} {'was' if len(lost) == 1 else 'were'} saved whole, the file does not hold "
            f"{'it' if len(lost) == 1 else 'them'}: the base's would be used",
            "save the adapter again with the module gathered",
            missing_modules=lost,
        )
        return {}, [fault]
    if heads:
        fault = findings.finding(
            "saved-module-absent",
            it.subject,
            f"{some(heads)} is declared but absent; PEFT lists it for the task whether the model has one or not",
            missing_modules=heads,
        )
        return {}, [fault]
    return {}, []
