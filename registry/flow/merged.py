"""A merged model on its way into the registry: what it was made from, under which licence, and what was proven.

The merge itself lies in `adapters.merge`; here its folder meets the rules of a name's remote and becomes a version of
kind `merged` whose lineage names adapter and base.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from weighbridge import __version__
from weighbridge.adapters import card_facts, inside, license, prove_base, provenance, sidecar  # noqa: A004
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge.identity import UNLIKE
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.adapters.paths import from_cache, is_local
from weighbridge.adapters.plan import CARD_ROLE, Policy
from weighbridge.registry import errors
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit, named_base
from weighbridge.registry.flow.withhold import withheld
from weighbridge.registry.hashing import content_digest, derivation_key, sha256_bytes, sha256_file
from weighbridge.registry.refs import SUFFIX_ROOM, check_name, shown
from weighbridge.registry.types import (
    BaseFacts,
    FileEntry,
    Finding,
    LicenseFacts,
    LineageEdge,
    Models,
    Provenance,
    Published,
    RunFacts,
    Value,
)

_OURS: Final = ("merge-", "jail-", "license-looser-than-base")
"""Findings that a merge alone can have, and that stay with its version."""

_DIGEST: Final = "sha256:"
_GIVEN: Final = "it was given to the merge"

WORDS: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


class Parent(Value, frozen=True):
    """What one side of a merge is called, and its content; `provenance` is that of a published adapter.

    A base that is no published version is called by its content.
    """

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
    merged: Merged,
    look: Look,
    adapters: Sequence[Parent],
    base: Parent,
    *,
    name: str,
    policy: Policy,
    host: str,
    caches: Sequence[Path] = (),
    ask: Models | None = None,
    published: Published | None = None,
) -> Admission:
    """Return what is published of a merged folder.

    `caches`, `ask` and `published` may tell which model of the Hub the base is, as in `admit`.

    Raises what `admit` raises.
    """
    artifact = artifact_of(merged)
    licence = licence_of(look)
    first = look.adapters[0]
    stated, tried = base_of(
        look, adapters[0], base, keep=policy.paths == "keep", caches=caches, ask=ask, published=published
    )
    root = Path(first.root)
    run = adapters[0].provenance.run if adapters[0].provenance is not None else run_of(root, "merge")
    # The licence is asked for by the name of the base, whatever that is.
    artifact = msgspec.structs.replace(artifact, base=msgspec.structs.replace(stated, id=stated.id or base.ref))
    admission = admit(
        artifact, name=name, run=run, policy=policy, host=host, extra=tried, lookup=lambda _id, _revision: licence
    )
    known = adapters[0].provenance
    owner = sidecar.read(root).owner
    if known is None:
        known = provenance.gather(root, run, sidecar.read(root), step=first.step, host=host)
    elif known.host is None:  # sealed for a remote that keeps no paths: its owner was declared
        owner = known.owner
    told = [f for f in admission.findings if not f.code.startswith("license-") or f.severity == "block"]
    told += [f for f in merged.findings if f.code.startswith(_OURS)]
    whole = stated.id is not None and not is_local(stated.id) and base.ref.startswith(_DIGEST)
    facts = msgspec.structs.replace(
        admission.facts,
        kind="merged",
        base=stated,
        license=licence,
        adapter=first.adapter,
        # What a remote that keeps paths has sealed goes on to one that does not.
        provenance=provenance.redact(known, keep_paths=policy.keeps_names, declared_owner=owner),
        lineage=[
            *(LineageEdge(relation="merged-from", ref=one.ref, content=one.content) for one in adapters),
            LineageEdge(relation="merged-from", ref=str(stated.id) if whole else base.ref, content=base.content),
        ],
        findings=told,
    )
    facts = withheld(facts, policy, name=name, where=artifact.root)
    return msgspec.structs.replace(admission, facts=facts, findings=facts.findings)


def base_of(
    look: Look,
    adapter: Parent,
    base: Parent,
    *,
    keep: bool,
    caches: Sequence[Path] = (),
    ask: Models | None = None,
    published: Published | None = None,
) -> tuple[BaseFacts, list[Finding]]:
    """Return the base that was merged into, and what was tried in vain where only its folder is known.

    What was used counts: the version it was fetched as, the commit of a Hub cache. What the adapter names stands for a
    folder only where it is a model of the Hub and nothing says that the folder is another one; else the folder's
    weights are compared with the models that it may be. `keep`: a path of this machine may be its name.
    """
    assert look.base is not None
    first, root = look.adapters[0], os.path.realpath(look.base.root)
    claim = adapter.base
    if claim.id is None or is_local(claim.id):
        claim, _ = named_base(
            first, sidecar.read(Path(first.root)), card_facts.read(Path(first.root) / card_facts.CARD)
        )
    recorded = claim.id if claim.id is not None and not is_local(claim.id) else None
    facts = BaseFacts(content=base.content, relation="finetune")
    at = _snapshot(root) or _snapshot(look.base.root)
    if at is not None and (recorded is None or recorded.casefold() != at[0].casefold()):
        why = f"its folder is a snapshot in a Hub cache{_claimed(first, recorded, keep=keep)}"
        return msgspec.structs.replace(facts, id=at[0], revision=at[1], evidence=why), []
    proven = recorded is not None and (at is not None or base.content in {adapter.base.content, first.base.content})
    other = any(one.code == UNLIKE for one in look.findings)
    named = not base.ref.startswith(_DIGEST)
    if proven or (recorded is not None and not named and not other):
        revision = revision_of(look, adapter, base)
        why = claim.evidence or _GIVEN
        return msgspec.structs.replace(facts, id=recorded, revision=revision, evidence=why), []
    why = f"{_GIVEN}{_claimed(first, recorded, keep=keep)}"
    # A version, or a folder that holds one, may lie on the Hub that is published to.
    held = prove_base.pulled(root, published) if published is not None and (ask is not None or not named) else None
    known = held.known if held is not None else None
    proof = prove_base.Proof(None)
    if known is not None or not named:
        proof = prove_base.prove(root, caches=caches, ask=ask, known=known)
    if proof.evidence is not None:
        found = proof.evidence
        return msgspec.structs.replace(facts, id=found.value, revision=found.revision, evidence=found.why), []
    if known is not None or named:
        ref = base.ref if known is None else known.ref
        return msgspec.structs.replace(facts, id=ref, evidence=why), []
    told = [prove_base.by_path(root, "base"), prove_base.unproven(root, "base", proof)]
    return msgspec.structs.replace(facts, id=root if keep else None, evidence=why), told


def _claimed(adapter: Artifact, recorded: str | None, *, keep: bool) -> str:
    """Return what an adapter says of its base, where that is not what was used."""
    written = adapter.facts.get("base_model")
    said = recorded or (written if keep and isinstance(written, str) else None)
    if said is None:
        return "; the adapter names a folder of a machine" if isinstance(written, str) else ""
    return f"; the adapter names {shown(said)}"


def revision_of(look: Look, adapter: Parent, base: Parent) -> str | None:
    """Return the revision of the base as far as it is proven, None where it is only what the adapter recorded.

    Proven is the commit whose snapshot in a Hub cache was merged into, and what was recorded with a content that the
    base has.
    """
    recorded = look.adapters[0].base
    at = None
    if look.base is not None:
        at = _snapshot(look.base.root) or _snapshot(os.path.realpath(look.base.root))
    if at is not None and recorded.id is not None and at[0].casefold() == recorded.id.casefold():
        return at[1]
    known = adapter.base.content or recorded.content
    return recorded.revision if known is not None and known == base.content else None


def _snapshot(root: str) -> tuple[str, str] | None:
    """Return model and commit of a folder that is a Hub cache's snapshot of one."""
    path = Path(root)
    found = from_cache(root) if path.parent.name == "snapshots" else None
    return (found.value, found.revision) if found is not None and found.revision is not None else None


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
    found = [f for f in able[0].findings if f.code != inside.TOLD]  # the finding of its proof says it
    return msgspec.structs.replace(able[0], files=files, findings=found)


def run_of(root: Path, what: str) -> RunFacts:
    """Return the run of a folder that no run is known of: where it lies."""
    real = Path(os.path.realpath(root))
    place = f"{socket.gethostname()}\0{real}".encode("utf-8", "surrogateescape")
    note = sidecar.read(real)
    return RunFacts(project=real.parent.name or "-", name=real.name, id=note.id or f"{what}-{sha256_bytes(place)[:32]}")
