"""A model in another precision on its way into the registry: what it was cast from, and what was proven.

The cast itself lies in `adapters.merge.casting`; here its folder becomes a version of the kind, licence and origin that
the original has, under a name that ends in the precision.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from weighbridge import __version__
from weighbridge.adapters import provenance, sidecar
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged
from weighbridge.adapters.plan import Policy
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.merged import Parent, artifact_of, run_of
from weighbridge.registry.flow.withhold import withheld
from weighbridge.registry.hashing import derivation_key
from weighbridge.registry.refs import SUFFIX_ROOM, check_name
from weighbridge.registry.types import BaseFacts, Facts, LineageEdge


def cast_name(name: str, dtype: str) -> str:
    """Return the name that a cast of `name` is published under, `dtype` as in bf16. Raises UsageError."""
    whole = f"{name}-{dtype}"
    check_name(name, room=SUFFIX_ROOM)
    check_name(whole)
    return whole


def derivation(content: str, dtype: str, keep: Sequence[str]) -> str:
    """Return the key by which the same cast, made twice, finds the first result."""
    options = {"dtype": dtype, "keep-fp32": ",".join(sorted(keep))}
    return derivation_key("cast", {"model": content}, options, int(__version__.split(".")[0]))


def admit_cast(
    done: Merged, look: Look, parent: Parent, original: Facts | None, *, name: str, policy: Policy, host: str
) -> Admission:
    """Return what is published of a cast folder; `original` are the facts of a published original.

    Raises what `admit` raises.
    """
    assert look.base is not None
    licence = original.license if original is not None else look.base.license
    base = original.base if original is not None else look.base.base
    root = Path(look.base.root)
    run = original.provenance.run if original is not None else run_of(root, "cast")
    # The licence is asked for by the name of the original, which is where it stands.
    artifact = msgspec.structs.replace(
        artifact_of(done), base=BaseFacts(id=base.id or parent.ref, relation=base.relation)
    )
    admission = admit(artifact, name=name, run=run, policy=policy, host=host, lookup=lambda _id, _revision: licence)
    known = original.provenance if original is not None else None
    note = sidecar.read(root)
    owner = note.owner
    if known is None:
        known = provenance.gather(root, run, note, step=look.base.step, host=host)
    elif known.host is None:  # sealed for a remote that keeps no paths: its owner was declared
        owner = known.owner
    told = [f for f in admission.findings if not f.code.startswith("license-") or f.severity == "block"]
    told += [f for f in done.findings if f.code.startswith("cast-")]
    facts = msgspec.structs.replace(
        admission.facts,
        kind=original.kind if original is not None else admission.facts.kind,
        base=base,
        license=licence,
        adapter=original.adapter if original is not None else None,
        provenance=provenance.redact(known, keep_paths=policy.keeps_names, declared_owner=owner),
        lineage=[LineageEdge(relation="cast-from", ref=parent.ref, content=parent.content)],
        findings=told,
    )
    facts = withheld(facts, policy, name=name, where=done.path)
    return msgspec.structs.replace(admission, facts=facts, findings=facts.findings)
