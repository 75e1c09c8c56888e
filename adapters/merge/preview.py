"""What a merge would do and what stands against it, from two folders: the answer of `registry merge --dry-run`.

Headers are read, configs, the values of the adapter, and of the base what the adapter holds a copy of.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import layout, license, listing  # noqa: A004 - the module is about licences
from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact, Inspection
from weighbridge.adapters.memory import available
from weighbridge.adapters.merge import adapter as adapters_of
from weighbridge.adapters.merge import base as bases
from weighbridge.adapters.merge import bundle as bundles
from weighbridge.adapters.merge import estimate, identity, outside, unheard
from weighbridge.adapters.merge import plan as plans
from weighbridge.adapters.merge.adapter import Adapter
from weighbridge.adapters.merge.base import Base
from weighbridge.adapters.merge.identity import Weights
from weighbridge.adapters.merge.place import place
from weighbridge.adapters.merge.plan import Planned
from weighbridge.adapters.merge.values import Bundle, Source
from weighbridge.adapters.plan import JudgedFile, role_of
from weighbridge.adapters.reading import Place, Reader, table_at
from weighbridge.registry import findings
from weighbridge.registry.findings import outcome
from weighbridge.registry.types import Finding, Outcome

COSINE: Final = 0.95
"""Below this the stored change is no longer the intended one."""

ARTIFACT: Final = "base+adapter"
_TENSOR_FACTS: Final = (
    "tensor_count", "param_count", "payload_bytes", "dtype_histogram", "architecture", "tied", "config_dtype",
    "shards_expected", "shards_found", "index_total_size", "embedding_rows", "config_vocab", "quant_method", "bits",
    "missing_files", "missing_tensors", "unlisted_tensors", "stale_files", "file", "file_bytes", "expected_bytes",
    "short_by", "longer_by", "nan", "inf", "metadata_format", "pickle_format",
)  # fmt: skip
"""Facts of the artifact that would be published, which is the base with changed values."""

_ADAPTER_FACTS: Final = (
    "peft_type", "rank", "alpha", "scaling", "assumed_scaling", "ranks", "rank_from_shapes", "rank_by_module",
    "scaling_by_module", "targets", "target_pattern", "adapted_modules", "base_model", "base_model_hint",
    "base_is_local_path", "base_quantized", "base_mutated_at_init", "peft_version", "unknown_fields", "legacy_fields",
    "use_dora", "use_rslora", "magnitude_tensors", "bias_tensors", "nonzero_lora_b", "zero_row_share_lora_b",
    "suspected_world_size", "canonical_keys", "bad_segment", "missing_prefix", "full_modules", "trained_token_rows",
    "lora_tensors", "base_tensors", "side_files", "extra_rows", "hidden_size_from_shapes", "empty_tensors",
    "flat_tensors", "mergeable",
)  # fmt: skip

_READABLE: Final = frozenset({"keys-wrapped", "keys-without-prefix", "keys-with-adapter-name"})
"""Forms of keys that a loader passes over, and that are read here: what they mean is plain."""

_TOLD_HERE: Final = frozenset({"base-mutated-at-start", "tokenizer-beyond-vocab", "license-looser-than-base"})
"""What this module says itself, for the two together."""

_OF_THE_BASE: Final = frozenset({"generation-conflict", "vocab-mismatch", "tokenizer-beyond-vocab", "remote-code"})
"""Warnings of a base that hold for the result, too."""


class Look(NamedTuple):
    """The answer about an adapter and a base; `plan` is None where something stands against the merge."""

    adapters: tuple[Artifact, ...]
    base: Artifact | None
    outcome: Outcome
    facts: dict[str, Any]
    findings: list[Finding]
    files: list[JudgedFile]
    planned: Planned | None = None
    bundle: Bundle | None = None
    called: str | None = None
    """The version of the registry that the base is, where it was fetched as one."""
    weights: tuple[Weights, ...] = ()
    """The weights file of each adapter, where the merge can be planned."""
    precision: str = ""
    """What tells its precisions from those of other merges of the same parents, where it can be planned."""
    what: str = "merge"
    """What its refusal calls it."""


def look(
    adapters: Sequence[Path],
    base: Path,
    *,
    dtype: str | None = None,
    ignore: Sequence[str] = (),
    weigh: bool = True,
    here: bool = True,
    called: str | None = None,
) -> Look:
    """Return what merging some adapters into a base would give.

    `dtype` is bf16, fp16 or fp32; None keeps what the base is stored in. With `weigh` the share of the change that
    rounding would lose is estimated, which the merge itself counts anyway. `here`: it would be made on this machine, so
    that its memory counts, and a folder that the adapter names as its base may be looked into. `called` is the version
    that the base was fetched as. An adapter's weights are hashed only where it might be another one, or in the base.
    Raises OSError when a folder is gone, or a file cannot be read.
    """
    facts: dict[str, Any] = {}
    found: list[Finding] = []
    parts: list[Artifact] = []
    for number, path in enumerate(adapters):
        one = _artifact(inspect(path, ignore=ignore), "adapter")
        subject = "adapter" if len(adapters) == 1 else f"adapter{number + 1}"
        if isinstance(one, Artifact):
            parts.append(one)
            found += _of_adapter(one, subject)
        else:
            found += _nothing(one, subject, "adapter")
    judged = _artifact(inspect(base, ignore=ignore), "model")
    if not isinstance(judged, Artifact):
        found += _nothing(judged, "base", "base")
        return _answer(tuple(parts), None, facts, found)
    facts |= {name: judged.facts[name] for name in _TENSOR_FACTS if name in judged.facts}
    found += _of_base(judged)
    if parts:
        first = parts[0].facts
        facts |= {name: first[name] for name in _ADAPTER_FACTS if name in first}
        facts["adapter_tensors"] = sum(int(one.facts.get("tensor_count") or 0) for one in parts)
        found += _licences(parts, judged, facts)
    if len(parts) < len(adapters):
        return _answer(tuple(parts), judged, facts, found)
    seen = _planned(tuple(parts), judged, dtype, facts, found, weigh=weigh, here=here, called=called)
    return seen._replace(called=called)


def _planned(
    parts: tuple[Artifact, ...],
    judged: Artifact,
    dtype: str | None,
    facts: dict[str, Any],
    found: list[Finding],
    *,
    weigh: bool,
    here: bool,
    called: str | None,
) -> Look:
    """Plan the merge where both sides can be read."""
    configs = [_config(one) for one in parts]
    for number, config in enumerate(configs):
        subject = _subject(number, parts, layout.ADAPTER_CONFIG)
        found += adapters_of.refusals(config, subject)
        found += adapters_of.alone(config, subject) if len(parts) > 1 else []
    root = Path(judged.root)
    model = bases.read(root)
    beside = Place(Reader(listing.read_tree(root)), ".").table("quantize_config.json") if model is not None else None
    if model is None:
        found += _unreadable(judged, found)
        return _answer(parts, judged, facts, found)
    found += bases.refusals(model, beside, f"base/{layout.MODEL_CONFIG}")
    if any(f.code.startswith("merge-") and f.severity == "block" for f in found):
        return _answer(parts, judged, facts, found)
    by_peft = adapters_of.by_peft(configs)
    reading = adapters_of.unsorted if by_peft else adapters_of.read
    read: dict[str, Adapter] = {}
    sources: list[Source] = list(model.sources)
    for number, (one, config) in enumerate(zip(parts, configs, strict=True)):
        subject = _subject(number, parts, layout.ADAPTER_WEIGHTS)
        loaded = _read(one, config, len(sources), subject, reading)
        if isinstance(loaded, Finding):
            return _answer(parts, judged, facts, [*found, loaded])
        read[subject] = loaded[0]
        sources.append(loaded[1])
    subject = f"base/{layout.MODEL_CONFIG}"
    placed = outside.place(model, read) if by_peft else place(model, read)
    dtypes = plans.kept_wide(model, dtype)
    planned = plans.make(model, read, placed, tuple(sources), dtypes=dtypes, subject=subject)
    facts |= planned.facts
    facts["matched_modules"] = _matched(planned, facts)
    found += planned.findings
    taken, more = identity.twice(dict(zip(read, map(Weights, sources[len(model.sources) :]), strict=True)), root)
    found += more
    found += unheard.heard_after(str(model.config.get("model_type")), read, sources)
    facts["base_identity"], more = identity.compare(
        model, parts, configs, planned.copies, tuple(sources), here=here, called=called
    )
    found += more
    if planned.plan is None:
        return _answer(parts, judged, facts, found)
    made, more = bundles.make(model, planned, bundles.folder(judged), [bundles.folder(one) for one in parts])
    facts |= made.facts
    found += more
    if by_peft:
        facts["memory_bytes"] = outside.need(model, configs, planned.plan)
        lacking = outside.short(facts["memory_bytes"], available()) if here else None
        found += [lacking] if lacking is not None else []
    if weigh and not any(f.severity == "block" for f in found):
        found += _lost(model, planned, dtype, facts)
    seen = _answer(parts, judged, facts, found, planned=planned, made=made)
    precision = plans.precision(model, dtype, planned.plan.dtype)
    return seen._replace(weights=tuple(taken.values()), precision=precision)


def _answer(
    parts: tuple[Artifact, ...],
    judged: Artifact | None,
    facts: dict[str, Any],
    found: list[Finding],
    *,
    planned: Planned | None = None,
    made: Bundle | None = None,
) -> Look:
    for one in found:
        for key, value in one.data.items():
            if value is not None and facts.get(key) in (None, []):
                facts[key] = value
    blocked = any(f.severity == "block" for f in found)
    facts["mergeable"] = not blocked
    whole = None if blocked or planned is None or planned.plan is None else planned
    return Look(parts, judged, outcome(found), facts, found, _files(whole, made), whole, made)


def _files(planned: Planned | None, made: Bundle | None) -> list[JudgedFile]:
    """Return the files of the result."""
    if planned is None or planned.plan is None or made is None:
        return []
    files = [JudgedFile(path=f.path, size=f.size, role="weights", publish=True) for f in planned.plan.files]
    files += [
        JudgedFile(path=path, size=Path(source).stat().st_size, role=_role(path), publish=True)
        for path, source in made.copies.items()
    ]
    files += [
        JudgedFile(path=path, size=len(body), role=_role(path), publish=True) for path, body in made.written.items()
    ]
    return sorted(files, key=lambda f: f.path)


def _role(path: str) -> str:
    return "index" if path.endswith(".index.json") else "weights" if path.endswith(".safetensors") else role_of(path)[0]


# ----------------------------------------------------------------------------------------------------------- the parts


def _artifact(seen: Inspection, kind: str) -> Artifact | Inspection:
    """Return the one artifact that is meant: that of the folder itself, else the only one of its kind."""
    kinds = {"model", "quantized"} if kind == "model" else {kind}
    able = [one for one in seen.artifacts if one.kind in kinds or (one.kind is None and _of_kind(one, kind))]
    here = [one for one in able if one.relative == "."] or able
    return here[0] if len(here) == 1 else seen


def _of_kind(one: Artifact, kind: str) -> bool:
    return ("adapter" in one.artifact or "lora" in one.artifact) == (kind == "adapter")


def _nothing(seen: Inspection, subject: str, what: str) -> list[Finding]:
    """Return why a folder holds no adapter, or no base, to merge."""
    kept = [_placed(one, subject) for one in seen.findings if one.severity == "block"]
    fix = "name the folder itself"
    if len(seen.artifacts) > 1 and not kept:
        names = ", ".join(one.relative for one in seen.artifacts[:8])
        message = f"{seen.path} holds several artifacts ({names}): which one is meant?"
        fix = f"name one of them, such as {Path(seen.path) / seen.artifacts[0].relative}"
    else:
        message = f"{seen.path} holds {seen.artifact or 'nothing known'}, and no {what} that could be merged"
        fix = _MEANT[what] if seen.artifacts else fix
    if kept:
        return kept
    return [findings.finding("merge-impossible", subject, message, fix, mergeable=False)]


_MEANT: Final = {
    "adapter": "name the adapter's folder; the model it is merged into is --base",
    "base": "name the model that the adapter was trained on",
}


def _of_adapter(one: Artifact, subject: str) -> list[Finding]:
    """Return the findings of an adapter that matter to a merge."""
    kept: list[Finding] = []
    for finding in one.findings:
        if finding.code in _TOLD_HERE or finding.code.startswith(("card-", "license-", "private-")):
            continue
        if finding.code in _READABLE:
            kept.append(msgspec.structs.replace(_placed(finding, subject), severity="warn"))
        elif finding.code == "side-file":
            kept.append(
                findings.finding(
                    "merge-not-streamed",
                    f"{subject}/{finding.subject}",
                    f"{finding.message}; this version does not merge them",
                    "save the adapter with its embedding rows in one file",
                    **finding.data,
                )
            )
        elif finding.code not in {"base-local-path", "copies-extra", "base-inside-adapter"}:
            kept.append(_placed(finding, subject))
    return kept


def _of_base(one: Artifact) -> list[Finding]:
    return [_placed(f, "base") for f in one.findings if f.severity == "block" or f.code in _OF_THE_BASE or _waits(f)]


def _waits(one: Finding) -> bool:
    return findings.CODES[one.code].waits


def _placed(one: Finding, subject: str) -> Finding:
    return msgspec.structs.replace(one, subject=subject if one.subject in {".", ""} else f"{subject}/{one.subject}")


def _unreadable(judged: Artifact, found: Iterable[Finding]) -> list[Finding]:
    """Return why the weights of a base cannot be read, where nothing has said so yet."""
    if any(f.severity == "block" or _waits(f) for f in found):
        return []
    return [
        findings.finding(
            "merge-base-format",
            "base",
            f"the base ({judged.artifact}) holds no safetensors weights: a merge is made in safetensors",
            "convert the base to safetensors first; a GGUF file is made from the merged model afterwards",
            mergeable=False,
        )
    ]


def _config(one: Artifact) -> dict[str, Any]:
    return table_at(Path(one.root) / layout.ADAPTER_CONFIG) or {}


def _read(
    one: Artifact, config: dict[str, Any], file: int, subject: str, reading: Callable[..., Adapter]
) -> tuple[Adapter, Source] | Finding:
    """Return an adapter and its weights file as a source, or why it cannot be read."""
    prefix = "" if one.relative == "." else one.relative + "/"
    weights = [f.path.removeprefix(prefix) for f in one.files if f.role == "weights" and f.publish]
    named = layout.ADAPTER_WEIGHTS if layout.ADAPTER_WEIGHTS in weights else next(iter(weights), None)
    if named is None or not named.endswith(".safetensors"):
        return findings.finding(
            "merge-base-format",
            subject,
            "the adapter is no safetensors file",
            "save it again with safe_serialization=True",
        )
    path = Path(one.sources.get(prefix + named, str(Path(one.root) / named)))
    try:
        header, origin = safetensors.read(path), bases.source(path)
    except OSError as error:
        return findings.finding(
            "merge-base-format", subject, f"{named} cannot be read: {error.strerror}", "save the adapter again"
        )
    try:
        loaded = reading(Path(one.root), named, header, config, file)
    except ValueError as error:
        return findings.finding(
            "merge-ambiguous", subject, f"{error}: the file holds several adapters", "save each one on its own"
        )
    return loaded, origin


def _subject(number: int, parts: tuple[Artifact, ...], name: str) -> str:
    return f"adapter/{name}" if len(parts) == 1 else f"adapter{number + 1}/{name}"


def _matched(planned: Planned, facts: dict[str, Any]) -> int:
    missing = {f.data.get("unmatched_module") for f in planned.findings if f.code == "merge-target-missing"}
    return max(0, int(facts.get("adapted_modules") or 0) - len(missing))


# ------------------------------------------------------------------------------------------------- licence, lost update


def _licences(parts: Sequence[Artifact], judged: Artifact, facts: dict[str, Any]) -> list[Finding]:
    """Record both licences; the result is under the stricter one."""
    ours = next((one.license for one in parts if one.license.id and one.license.source != "base"), None)
    theirs = judged.license
    if theirs.id is not None:
        facts["base_license"] = theirs.name if theirs.id == "other" and theirs.name else theirs.id
    if ours is None:
        return []
    facts["adapter_license"] = ours.name if ours.id == "other" and ours.name else ours.id
    looser = license.compare(ours, theirs)
    return [] if looser is None else [msgspec.structs.replace(looser, subject="adapter/README.md")]


def _lost(model: Base, planned: Planned, dtype: str | None, facts: dict[str, Any]) -> list[Finding]:
    """Say how much of the change would be lost to rounding, and offer a precision that holds it."""
    assert planned.plan is not None
    try:
        seen = estimate.unchanged(planned.plan)
    except ArithmeticError as error:
        return [
            findings.finding(
                "merge-not-finite",
                "adapter",
                f"the merge gives values that cannot be stored: {error}",
                "look at the adapter, or choose another --dtype",
            )
        ]
    facts |= seen
    cosine, share = seen.get("update_cosine"), seen.get("unchanged_share")
    if cosine is None or share is None or cosine >= COSINE:
        return []
    return [update_lost(dtype or model.main_dtype or "the base's dtype", share, cosine)]


def update_lost(dtype: str, share: float, cosine: float) -> Finding:
    """Return the finding for a change that the stored precision cannot hold."""
    return findings.finding(
        "merge-update-lost",
        "adapter",
        f"{share:.1%} of the touched elements stay as they were when the sum is rounded to {dtype}, and the applied "
        f"change has cosine {cosine:.3f} with the intended one: the adapter is too fine for this precision",
        "merge with --dtype fp32 or --dtype fp16",
        unchanged_share=share,
        update_cosine=cosine,
    )
