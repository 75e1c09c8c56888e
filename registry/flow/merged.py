"""A merged model on its way into the registry: what it was made from, under which licence, and what was proven.

The merge itself lies in `adapters.merge`; here its folder meets the rules of a name's remote and becomes a version of
kind `merged` whose lineage names adapter and base.
"""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from weighbridge import __version__
from weighbridge.adapters import license, provenance, sidecar  # noqa: A004 - the module is about licences
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.adapters.plan import CARD_ROLE, Policy
from weighbridge.registry import errors
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.hashing import content_digest, derivation_key, sha256_bytes, sha256_file
from weighbridge.registry.refs import SUFFIX_ROOM, check_name
from weighbridge.registry.types import (
    BaseFacts,
    FileEntry,
    LicenseFacts,
    LineageEdge,
    Provenance,
    RunFacts,
    Value,
)

_OURS: Final = ("merge-", "jail-", "license-looser-than-base")
"""Findings that a merge alone can have, and that stay with its version."""

WORDS: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


class Parent(Value, frozen=True):
    """What one side of a merge is called, and its content; `provenance` is that of a published adapter."""

    ref: str
    content: str
    provenance: Provenance | None = None
    base: BaseFacts = BaseFacts()


def merged_name(name: str, dtype: str) -> str:
    """Return the name a merge of `name` is published under; it ends in its precision. Raises UsageError."""
    whole = f"{name}-merged-{WORDS.get(dtype, dtype.lower())}"
    check_name(name, room=SUFFIX_ROOM)
    check_name(whole)
    return whole


def content_of(artifact: Artifact) -> str:
    """Return the content digest of what would be published of an artifact. Raises OSError."""
    prefix = "" if artifact.relative == "." else artifact.relative + "/"
    entries = []
    for one in artifact.files:
        if not one.publish or one.role == CARD_ROLE:
            continue
        inner = one.path.removeprefix(prefix)
        path = Path(artifact.sources.get(one.path, str(Path(artifact.root) / inner)))
        entries.append(FileEntry(path=inner, size=path.stat().st_size, sha256=sha256_file(path), role=one.role))
    return content_digest(entries)


def derivation(adapters: Sequence[Parent], base: Parent, dtype: str) -> str:
    """Return the key by which the same merge, made twice, finds the first result."""
    parents = {"adapter" if len(adapters) == 1 else f"adapter{n}": one.content for n, one in enumerate(adapters, 1)}
    major = int(__version__.split(".")[0])
    return derivation_key("merge", {**parents, "base": base.content}, {"dtype": WORDS.get(dtype, dtype)}, major)


def admit_merged(
    merged: Merged, look: Look, adapters: Sequence[Parent], base: Parent, *, name: str, policy: Policy, host: str
) -> Admission:
    """Return what is published of a merged folder. Raises what `admit` raises."""
    artifact = artifact_of(merged)
    licence = licence_of(look)
    first = look.adapters[0]
    stated = BaseFacts(
        id=first.base.id or base.ref,
        revision=revision_of(look, adapters[0], base),
        content=base.content,
        relation="finetune",
        evidence=first.base.evidence or "registry merge --base",
    )
    root = Path(first.root)
    run = adapters[0].provenance.run if adapters[0].provenance is not None else run_of(root, "merge")
    artifact = msgspec.structs.replace(artifact, base=stated)
    admission = admit(artifact, name=name, run=run, policy=policy, host=host, lookup=lambda _id, _revision: licence)
    known = adapters[0].provenance
    if known is None:
        known = provenance.gather(root, run, sidecar.read(root), step=first.step, host=host)
        known = provenance.redact(known, keep_paths=policy.paths == "keep", declared_owner=sidecar.read(root).owner)
    told = [f for f in admission.findings if not f.code.startswith("license-") or f.severity == "block"]
    told += [f for f in merged.findings if f.code.startswith(_OURS)]
    facts = msgspec.structs.replace(
        admission.facts,
        kind="merged",
        base=stated,
        license=licence,
        adapter=first.adapter,
        provenance=known,
        lineage=[
            *(LineageEdge(relation="merged-from", ref=one.ref, content=one.content) for one in adapters),
            LineageEdge(relation="merged-from", ref=base.ref, content=base.content),
        ],
        findings=told,
    )
    return msgspec.structs.replace(admission, facts=facts, findings=told)


def revision_of(look: Look, adapter: Parent, base: Parent) -> str | None:
    """Return the revision of the base as far as it is proven, None where it is only what the adapter recorded.

    Proven is the commit whose snapshot in a Hub cache was merged into, and what was recorded with a content that the
    base has.
    """
    recorded = look.adapters[0].base
    commit = _snapshot(look.base.root, recorded.id) if look.base is not None and recorded.id else None
    if commit is not None:
        return commit
    known = adapter.base.content or recorded.content
    return recorded.revision if known is not None and known == base.content else None


def _snapshot(root: str, identity: str) -> str | None:
    """Return the commit of a folder that is a Hub cache's snapshot of a model."""
    own = "models--" + identity.replace("/", "--")
    for path in (Path(root), Path(os.path.realpath(root))):
        of_cache = path.parent.name == "snapshots" and path.parent.parent.name.casefold() == own.casefold()
        if of_cache and re.fullmatch(r"[0-9a-f]{40}", path.name):
            return path.name
    return None


def licence_of(look: Look) -> LicenseFacts:
    """Return the licence of a merge: the adapter's where it holds back no less than the base's, else the base's."""
    theirs = look.base.license if look.base is not None else LicenseFacts()
    ours = next((one.license for one in look.adapters if one.license.id and one.license.source != "base"), None)
    if ours is None or license.compare(ours, theirs) is not None:
        return theirs
    return ours


def artifact_of(merged: Merged) -> Artifact:
    """Return a written folder as an artifact of exactly the files that were written. Raises RefusedError."""
    seen = inspect(Path(merged.path), values=0)
    able = [one for one in seen.artifacts if one.relative == "." and one.kind is not None]
    if len(able) != 1:
        raise errors.RefusedError(
            "the written folder is not a whole model",
            why=seen.findings[0].message if seen.findings else None,
            findings=list(seen.findings),
        )
    files = [f for f in able[0].files if f.path in merged.files]
    return msgspec.structs.replace(able[0], files=files)


def run_of(root: Path, what: str) -> RunFacts:
    """Return the run of a folder that no run is known of: where it lies."""
    real = Path(os.path.realpath(root))
    place = f"{socket.gethostname()}\0{real}".encode("utf-8", "surrogateescape")
    note = sidecar.read(real)
    return RunFacts(project=real.parent.name or "-", name=real.name, id=note.id or f"{what}-{sha256_bytes(place)[:32]}")
