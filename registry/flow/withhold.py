"""Paths of somebody's machine in what a version says of itself: one rule for everything that publishes.

Files are judged by `admit`; this looks at the facts as they would be sealed, whoever made them: base and lineage, what
they are known from, and the findings. A merge, a cast and a delivery to a mirror ask the same as a push.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from weighbridge.adapters import paths, prove_base, provenance
from weighbridge.adapters.plan import Policy
from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Facts, Finding

PRIVATE: Final = frozenset({"private-path", "private-metadata", "base-local-path"})
"""Findings that say that something which is published holds what only its machine has."""

_MODELS: Final = frozenset({"adapter-of", "merged-from", "cast-from"})
"""Edges that name a model, so that a relative path in them is one as well."""

_HIDDEN: Final = "<path>"


def held(facts: Facts) -> list[Finding]:
    """Return a finding for each path of a machine that base, lineage and findings name."""
    named = [facts.base.id, *(edge.ref for edge in facts.lineage if edge.relation in _MODELS)]
    plain = [facts.base.evidence or "", *(edge.ref for edge in facts.lineage if edge.relation not in _MODELS)]
    values = [one for one in named if one is not None and paths.is_local(one)]
    values += [hit.value for text in plain for hit in paths.scan_value("", text, field="path")]
    found = [prove_base.by_path(value, "base") for value in dict.fromkeys(values)]
    return found + [one for one in facts.findings if _tells(one)]


def private(facts: Facts) -> list[str]:
    """Return in words what sealed facts, or the files they speak of, hold that may not go where paths are not kept.

    An owner beside a machine's name is the user that a folder belonged to; without one, somebody wrote it down to be
    shown (`provenance.redact`).
    """
    sealed = facts.provenance
    told = []
    if sealed.host is not None:
        told.append(f"the host {shown(sealed.host)}")
        told += [f"the user {shown(sealed.owner)}"] if sealed.owner is not None else []
    public = provenance.redact(sealed, keep_paths=False)
    fields = [key for key in provenance.WITH_PATHS if getattr(public, key) != getattr(sealed, key)]
    told += [f"paths in {', '.join(fields)}"] if fields else []
    if any(one.code in PRIVATE for one in facts.findings) or held(facts):
        told.append("private paths")
    return told


def withheld(facts: Facts, policy: Policy, *, name: str, where: str) -> Facts:
    """Return facts as they may be sealed for remotes of a policy. Raises RefusedError for a path that may not leave.

    Where a person allowed a base that is named by a path, the path itself is left out.
    """
    if policy.paths == "keep":
        return facts
    facts = msgspec.structs.replace(facts, findings=[paths.redacted(one) for one in facts.findings])
    left = held(facts)
    if not left:
        return facts
    if not all(any(one.code == allowed.code for allowed in policy.allowed) for one in left):
        blocks = [msgspec.structs.replace(one, severity="block") for one in left]
        raise errors.RefusedError(
            f"{where} cannot be published as {name}", why=blocks[0].message, fix=blocks[0].fix, findings=blocks
        )
    return _without(facts, left)


def _without(facts: Facts, left: Sequence[Finding]) -> Facts:
    """Return facts without the paths that were found in them."""
    values = {str(value) for one in left for value in one.data.get("local_paths", [])}
    base, text = facts.base, facts.base.evidence
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, _HIDDEN) if text else text
    return msgspec.structs.replace(
        facts,
        base=msgspec.structs.replace(base, id=None if base.id in values else base.id, evidence=text),
        lineage=[
            msgspec.structs.replace(edge, ref=edge.content or _HIDDEN) if any(v in edge.ref for v in values) else edge
            for edge in facts.lineage
        ],
    )


def _tells(one: Finding) -> bool:
    """Tell whether a finding holds a path of a machine."""
    clean = paths.redacted(one)
    said = {key for key, value in one.data.items() if value not in (None, [], {}, "")}
    return (clean.message, clean.fix) != (one.message, one.fix) or not said <= clean.data.keys()
