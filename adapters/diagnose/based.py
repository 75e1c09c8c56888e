"""Rules that need the base: is it the adapter's own, do shapes and vocabulary fit, what did a merge leave behind."""

import re
from collections.abc import Iterable
from typing import Final

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.config import base_of
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule
from weighbridge.adapters.whole import some
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.types import Finding, Severity

_STAGE: Final = "config"
_RESULT: Final = re.compile(r"[;:] the result")
"""Where a finding about a merge goes on to speak of what is made."""


def _from_merge(  # noqa: PLR0917 - a row of the table
    name: str,
    severity: Severity,
    symptoms: tuple[str, ...],
    codes: tuple[str, ...],
    cause: str,
    remedy: str,
) -> Rule:
    """Return a rule whose cause the merge's comparison of adapter and base finds."""

    def find(case: Case) -> Iterable[Evidence]:
        if case.against is None or not case.is_adapter:
            return
        same: dict[str, list[Finding]] = {}
        for one in case.against.findings:
            if one.code in codes and not _told(case, one):
                same.setdefault(one.code, []).append(one)
        for code, every in same.items():
            one = every[0]
            more = f", and {len(every) - 1} more like it" if len(every) > 1 else ""
            told = _RESULT.split(one.message, maxsplit=1)[0]
            message = f"{told}{more} (base: {case.against.root}, {case.against.told_by})"
            yield Evidence(_inner(case, one), message, _named(case, one), finding=code, data=one.data)

    return Rule(name, _STAGE, severity, symptoms, cause, remedy, find, codes)


def _told(case: Case, one: Finding) -> bool:
    """Return whether the adapter alone says it already: its config states a rank that its matrices do not have."""
    ranks = any(f.code == "rank-mismatch" for f in case.findings)
    return ranks and one.code == "merge-shape-mismatch" and "shape_mismatch" not in one.data


def _inner(case: Case, one: Finding) -> str:
    """Return what a finding of a merge is about, by its path from the inspected folder where it is the adapter's."""
    name = one.subject.removeprefix("adapter/")
    if name == one.subject:
        return one.subject
    return name if case.artifact.relative == "." else f"{case.artifact.relative}/{name}"


def _named(case: Case, one: Finding) -> tuple[str, ...]:
    """Resize the base where the vocabulary grew, else try the base that the adapter itself names."""
    rows = one.data.get("adapter_vocab")
    if one.code.startswith("merge-vocabulary-") and isinstance(rows, int) and case.against is not None:
        return (
            commands.python(
                "from peft import PeftModel; from transformers import AutoModelForCausalLM as M; "
                f"m = M.from_pretrained({str(case.against.root)!r}); m.resize_token_embeddings({rows}); "
                f"PeftModel.from_pretrained(m, {str(case.folder)!r})"
            ),
        )
    named = base_of(case)
    others = {"merge-base-other", "merge-shape-mismatch", "merge-target-missing", "merge-base-differs"}
    if one.code not in others or named is None or not is_repo_id(named):
        return ()
    return (f"hf download {named}", f"registry diagnose {commands.quoted(case.folder)} --base {named}")


def _template(case: Case) -> Iterable[Evidence]:
    """Compare the chat template with the base's."""
    against = case.against
    if against is None or case.is_adapter or case.facts.get("has_chat_template") is not True:
        return
    own = papers_of(case)
    theirs = against.papers.template
    if own is None or theirs is None or own == theirs:
        return
    theirs_file, own_file = (place / "chat_template.jinja" for place in (against.root, case.folder))
    yield Evidence(
        "chat_template.jinja",
        f"the chat template is not the base's ({len(own)} characters, {len(theirs)} in {against.root}): prompts are "
        "written in another form than the base learned",
        (f"diff {commands.quoted(theirs_file)} {commands.quoted(own_file)}",),
    )


def papers_of(case: Case) -> str | None:
    """Return the chat template of the artifact's own folder."""
    own = case.tables.get("papers/template")
    return str(own["text"]) if own else None


def _special(case: Case) -> Iterable[Evidence]:
    """Compare the special tokens with the base's."""
    against, own = case.against, case.tables.get("papers/special")
    if against is None or case.is_adapter or not own:
        return
    wrong = {
        role: (word, against.papers.special[role])
        for role, word in own.items()
        if role in against.papers.special and against.papers.special[role] != word
    }
    if wrong:
        told = ", ".join(f"{role} {ours!r} here and {theirs!r} there" for role, (ours, theirs) in sorted(wrong.items()))
        yield Evidence(
            "special_tokens_map.json",
            f"special tokens differ from the base in {against.root}: {told}",
            data={"tokens": sorted(wrong)},
        )


def _names(case: Case) -> Iterable[Evidence]:
    """Compare the names of a model with its base's."""
    against = case.against
    if against is None or case.is_adapter or against.prefix or not case.whole:
        return
    if not (against.missing or against.extra):
        return
    parts = (
        [f"{len(against.missing)} of the base's tensors are not here ({some(against.missing)})"]
        if against.missing
        else []
    )
    parts += [f"{len(against.extra)} are not in the base ({some(against.extra)})"] if against.extra else []
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"{'; '.join(parts)} (base: {against.root}, {against.told_by})",
        data={"missing": list(against.missing[:50]), "extra": list(against.extra[:50])},
    )


def _shapes(case: Case) -> Iterable[Evidence]:
    """Compare the shapes of a model with its base's."""
    against = case.against
    if against is None or case.is_adapter or not against.shapes:
        return
    name, (ours, theirs) = next(iter(against.shapes.items()))
    yield Evidence(
        case.owners.get(name, case.artifact.relative),
        f"{len(against.shapes)} tensors have other shapes than the base's, such as {name}: {list(ours)} here, "
        f"{list(theirs)} "
        f"there (base: {against.root}, {against.told_by})",
        data={"tensors": sorted(against.shapes)[:50]},
    )


def _unchanged(case: Case) -> Iterable[Evidence]:
    """Find a model that holds its base's bytes and nothing else."""
    against = case.against
    if against is None or case.is_adapter or against.same is not True:
        return
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"all {len(case.tensors)} tensors hold the base's bytes, bit for bit ({against.root}): nothing was "
        "merged or trained",
        (f"registry merge ADAPTER --base {commands.quoted(against.root)} --dry-run",),
    )


def _no_proof(case: Case) -> Iterable[Evidence]:
    """Tell a merged model of whose merge nothing is recorded."""
    if case.is_adapter or "merge.json" in case.names or not case.tensors:
        return
    relation = case.facts.get("base_model_relation")
    named = "merged" in case.folder.name.lower() or "merged" in str(case.config.get("_name_or_path", "")).lower()
    if relation != "merge" and not named and case.artifact.kind != "merged":
        return
    yield Evidence(
        case.artifact.relative,
        "it is called a merged model, and no record of the merge lies beside it (merge.json): whether the "
        "adapter's change "
        "is in it was not proven here",
        ("registry merge ADAPTER --base BASE --dry-run",),
    )


RULES: Final = (
    _from_merge(
        "base-another", "block", ("garbage-output", "size-mismatch", "target-not-found", "adapter-silent"),
        ("merge-base-other", "merge-base-differs"),
        "the base is not the one the adapter was trained on",
        "load the adapter on its own base and revision",
    ),
    _from_merge(
        "base-holds-adapter", "block", ("garbage-output",), ("merge-adapter-twice",),
        "the base holds the adapter already, whose change then counts twice",
        "load the adapter on the base it was trained on, or the merged model alone",
    ),
    _from_merge(
        "base-shapes", "block", ("size-mismatch", "garbage-output"), ("merge-shape-mismatch",),
        "the adapter's matrices do not fit this base",
        "load the adapter on the base it was trained on",
    ),
    _from_merge(
        "base-targets", "block", ("target-not-found", "adapter-silent", "unexpected-keys", "missing-keys"),
        ("merge-target-missing", "merge-tensor-unused", "merge-ambiguous", "merge-bias-homeless"),
        "the base has no tensor for a module of the adapter",
        "load the adapter on the base it was trained on",
    ),
    _from_merge(
        "base-vocabulary", "warn", ("size-mismatch", "id-out-of-range", "template-lost"),
        (
            "merge-vocabulary-torn", "merge-vocabulary-grows", "merge-vocabulary-shrinks", "merge-tokenizer-missing",
            "merge-tokenizer-beyond",
        ),
        "the adapter was trained with a vocabulary that was resized",
        "resize the base before loading, and use the adapter's tokenizer",
    ),
    _from_merge(
        "base-template", "warn", ("template-lost", "garbage-output"), ("merge-template-differs", "merge-eos-differs"),
        "the adapter was trained with another template, or another end of sequence, than the base's",
        "serve it with the adapter's own tokenizer and template",
    ),
    _from_merge(
        "base-quantized", "warn", ("garbage-quantized", "garbage-output", "unproven-merge"),
        ("merge-base-quantized", "merge-base-format", "merge-base-changed"),
        "the base given is quantized, or was changed when training began",
        "take the 16-bit original of the base",
    ),
    Rule(
        "template-changed", _STAGE, "warn", ("template-lost", "garbage-output"),
        "the model's chat template is not its base's",
        "check which of the two the training used",
        _template,
    ),
    Rule(
        "tokens-changed", _STAGE, "warn", ("template-lost", "garbage-output"),
        "the special tokens are not the base's",
        "take the tokenizer of the training",
        _special,
    ),
    Rule(
        "names-differ", _STAGE, "warn", ("missing-keys", "unexpected-keys", "garbage-output"),
        "the names of the model are not those of its base",
        "save the whole model again, or name the base it really comes from",
        _names,
    ),
    Rule(
        "shapes-differ", _STAGE, "warn", ("size-mismatch", "id-out-of-range"),
        "tensors have other shapes than in the base",
        "load it with its own config, not with the base's",
        _shapes,
    ),
    Rule(
        "merge-left-nothing", _STAGE, "block", ("unproven-merge", "adapter-silent"),
        "the merged model holds the base's bytes",
        "merge again and look at the share of elements that change",
        _unchanged,
    ),
    Rule(
        "merge-unrecorded", _STAGE, "note", ("unproven-merge", "garbage-output"),
        "nothing records how the model was merged, or that the result was compared",
        "merge with registry merge, which proves its result and writes merge.json beside it",
        _no_proof,
    ),
)  # fmt: skip
