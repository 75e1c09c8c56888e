"""From a judged artifact to what may be published: files, facts, changed bytes - or a refusal that says why.

Here the rules of a name's remotes meet the findings: unknown and denied licences, private paths, remote code, and what
a person has allowed. Whatever changes bytes is decided here, once, before the seal.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import card_facts, code_files, parents, paths, prove_base, provenance
from weighbridge.adapters import license as licences
from weighbridge.adapters.card_facts import CardFacts
from weighbridge.adapters.extract_write import Content
from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import CARD_ROLE, JudgedFile, Policy
from weighbridge.adapters.sidecar import Sidecar
from weighbridge.adapters.whole import file_name_unsafe
from weighbridge.registry import errors, findings, frontmatter
from weighbridge.registry.errors import utf8
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.convert import convert
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Made
from weighbridge.registry.flow.withhold import PRIVATE, withheld
from weighbridge.registry.hashing import CHUNK, tensor_digest
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.refs import path_fault, shown
from weighbridge.registry.types import (
    BaseFacts,
    Facts,
    Finding,
    LeftOut,
    LicenseFacts,
    LineageEdge,
    Models,
    ModelSeen,
    Published,
    RunFacts,
    WeightsFacts,
)

LEFT_OUT_MAX: Final = 5000
DIGEST_LIMIT: Final = 4 << 30
"""Bytes of an adapter whose tensors are hashed one by one, too."""

_BASE_CARD_LIMIT: Final = 1


def admit(
    artifact: Artifact,
    *,
    name: str,
    run: RunFacts,
    policy: Policy,
    sidecar: Sidecar | None = None,
    run_root: Path | None = None,
    started_at: str | None = None,
    host: str | None = None,
    extra: Sequence[Finding] = (),
    caches: Sequence[Path] = (),
    lookup: licences.Lookup | None = None,
    ask: Models | None = None,
    published: Published | None = None,
    hashed: bool = True,
) -> Admission:
    """Return what is published of an artifact under a name, by the strictest policy of its remotes.

    `extra` are findings of the caller; `caches` and `lookup` may tell a base's licence, `caches` and `ask` which model
    of the Hub a base is, and who may use it; `published` knows the versions that folders of `registry pull` hold. Who
    publishes nothing asks without `hashed`: then no weights are read for
    the digests that a version's facts hold. Raises NotFinishedError when a finding says wait, UnreachableError when
    only a Hub that is silent could tell which model a local base is, RefusedError when a finding blocks
    (`data["findings"]` holds them), OSError when the folder is gone.
    """
    note = sidecar or Sidecar()
    root = Path(artifact.root)
    card = card_facts.read(_source(artifact, _card(artifact)) if _card(artifact) else root / card_facts.CARD)
    told = [_placed(one, artifact.relative) for one in artifact.findings if not one.code.startswith("license-")]
    told += [*note.findings, *extra]
    pulled = _pulled(artifact, published) if published is not None and hashed else None
    prove = partial(prove_base.prove, caches=caches, ask=ask, known=pulled.known if pulled else None)
    base, why, tried = _base(artifact, note, card, pulled, prove)
    told += tried
    if ask is not None and base.id is not None and is_repo_id(base.id):
        seen, more = prove_base.standing(base, _within(artifact.config or ".", artifact.relative), ask)
        told += more
        lookup = lookup or (lambda *_: _stated_there(seen))
    licence = licences.find(
        root,
        None,
        licences.local_base(artifact.facts.get("base_model")),
        note,
        card=card,
        base_id=base.id if base.relation != "merge" else None,  # one parent's licence is not that of them all
        base_revision=base.revision,
        above=[run_root] if run_root is not None and run_root != root else [],
        caches=caches,
        lookup=lookup,
    )
    told += licence.findings
    chosen = [f for f in artifact.files if f.publish and f.role != CARD_ROLE]
    code, faults = _code(artifact, policy)
    chosen += code
    told = [f for f in told if f.code != "remote-code"] + faults
    told += _licence_rules(licence.license, policy)
    files = [_file(artifact, one) for one in chosen]
    unsafe = [file_name_unsafe(one.path, fault) for one in files if (fault := path_fault(one.path))]
    told += [one for one in unsafe if one not in told]
    told = [_unstated(f, licence.license, policy) for f in told]
    # A look at a checkpoint says so in passing; whoever pulls a version cannot ask its trainer any more.
    told = [msgspec.structs.replace(f, severity="warn") if f.code == "config-absent" else f for f in told]
    transform, told = _paths(files, told, policy, why)
    told = _allowed(told, policy)
    _gate(artifact, name, told)
    inputs = [_file(artifact, JudgedFile(path=p, size=0, role="weights", publish=False)) for p in artifact.inputs]
    changed = convert(artifact, files, inputs, allowed={one.code: one.reason for one in policy.allowed}, hashed=hashed)
    files = changed.files
    transform |= changed.transform
    if policy.paths != "keep":
        told = [paths.redacted(one) for one in told]
    config = _table(artifact)
    gathered = provenance.gather(
        root,
        run,
        note,
        run_root=run_root,
        config=config if artifact.kind != "adapter" else None,
        adapter_config=config if artifact.kind == "adapter" else None,
        card=card,
        step=artifact.step,
        metrics=artifact.facts.get("metrics"),
        started_at=started_at,
        host=host,
    )
    facts = Facts(
        kind=artifact.kind or "",
        weights=_digested(artifact, files, changed.made, hashed=hashed),
        base=base,
        license=licence.license,
        provenance=provenance.redact(gathered, keep_paths=policy.keeps_names, declared_owner=note.owner),
        adapter=artifact.adapter,
        lineage=[*_lineage(artifact, base, pulled), *changed.lineage],
        findings=told,
        left_out=[
            LeftOut(path=utf8(_within(f.path, artifact.relative)), size=f.size, reason=f.reason or "not-on-allow-list")
            for f in artifact.files
            if not f.publish and f.path not in {c.path for c in code}
        ][:LEFT_OUT_MAX],
    )
    return Admission(
        files=files,
        facts=withheld(facts, policy, name=name, where=artifact.root),
        transform=transform,
        findings=told,
        people=card.text if card.present else None,
        made=changed.made,
        inputs=changed.inputs,
    )


# ----------------------------------------------------------------------------------------------------------- files


def _within(path: str, root: str) -> str:
    return path if root == "." else path.removeprefix(root + "/")


def _source(artifact: Artifact, path: str | None) -> Path:
    inner = _within(path or "", artifact.relative)
    return Path(artifact.sources.get(path or "", os.path.join(artifact.root, inner)))  # noqa: PTH118 - a plain string


def _card(artifact: Artifact) -> str | None:
    return next((f.path for f in artifact.files if f.publish and f.role == CARD_ROLE), None)


def _file(artifact: Artifact, one: JudgedFile) -> SourceFile:
    named = _source(artifact, one.path)
    source = os.path.realpath(named)
    try:
        status = Path(source).stat()
    except FileNotFoundError as error:
        if named.is_symlink():
            raise errors.VanishedError(
                f"{shown(one.path)} is a link to nothing",
                why=f"{shown(str(named))} points to {shown(source)}, which is not there",
                fix="put the file there, or remove the link",
            ) from error
        raise errors.VanishedError(
            f"{shown(one.path)} is gone",
            why=f"{shown(str(named))} went away after the folder was looked at",
            fix="see who deletes there, then repeat",
        ) from error
    return SourceFile(
        path=_within(one.path, artifact.relative),
        source=source,
        size=status.st_size,
        role=one.role,
        mtime_ns=status.st_mtime_ns,
        ino=status.st_ino,
    )


def _placed(one: Finding, relative: str) -> Finding:
    """Return a finding whose subject is a path from the artifact's own folder."""
    inner = _within(one.subject, relative)
    return one if inner == one.subject else msgspec.structs.replace(one, subject=inner)


def _code(artifact: Artifact, policy: Policy) -> tuple[list[JudgedFile], list[Finding]]:
    """Return the Python files that go along, and what stands against it."""
    if not artifact.needs_code:
        return [], []
    subject = artifact.config or artifact.root
    if policy.remote_code != "allow":
        return [], [
            findings.finding(
                "remote-code",
                _within(subject, artifact.relative),
                "the config names Python files (auto_map), and a remote of this name does not allow remote code",
                "set remote_code = 'allow' for the remote, or save the model with a class of the library",
                severity="block",
            )
        ]
    wanted = code_files.needed(_source(artifact, artifact.config))
    here = {_within(f.path, artifact.relative): f for f in artifact.files}
    missing = sorted(name for name in wanted if name not in here)
    if missing:
        return [], [
            findings.finding(
                "code-missing",
                missing[0],
                f"the config names Python files that are not here ({', '.join(missing)}): a model is never published "
                "without its code",
                "copy the file beside the config",
            )
        ]
    taken = [msgspec.structs.replace(here[name], role="code", publish=True, reason=None) for name in sorted(wanted)]
    return taken, [
        findings.finding(
            "remote-code",
            _within(subject, artifact.relative),
            f"Python files go along ({', '.join(sorted(wanted))}); loaders run them only with trust_remote_code",
        )
    ]


# ----------------------------------------------------------------------------------------------------------- rules


def _licence_rules(found: LicenseFacts, policy: Policy) -> list[Finding]:
    if found.id is None:
        return []
    denied = {word.lower() for word in policy.deny_licenses}
    if not denied & {found.id.lower(), *(part.lower() for part in licences.parts(found.id))}:
        return []
    return [
        findings.finding(
            "license-denied",
            card_facts.CARD,
            f"the licence {found.id} is denied by a remote of this name ({found.evidence})",
            "publish it elsewhere, or take the licence out of deny_licenses",
            license=found.id,
        )
    ]


def _unstated(one: Finding, held: LicenseFacts, policy: Policy) -> Finding:
    """Apply the rule of unknown licences; `other` that nothing names is one for whoever may not publish such."""
    if one.code == "license-unknown":
        return msgspec.structs.replace(one, severity=policy.unknown_license)
    nameless = held.id == "other" and not held.name and not held.link
    if one.code == "card-license-unnamed" and nameless and policy.unknown_license == "block":
        return msgspec.structs.replace(one, severity="block")
    return one


def _paths(
    files: Sequence[SourceFile], told: list[Finding], policy: Policy, why: paths.Evidence | None
) -> tuple[dict[str, bytes], list[Finding]]:
    """Apply the path policy: keep with a note, rewrite by evidence, or block."""
    private = [f for f in told if f.code in PRIVATE]
    if not private:
        return {}, told
    if policy.paths == "keep":
        return {}, [msgspec.structs.replace(f, severity="note") if f.code in PRIVATE else f for f in told]
    if policy.paths == "block":
        return {}, [msgspec.structs.replace(f, severity="block") if f.code in PRIVATE else f for f in told]
    transform: dict[str, bytes] = {}
    bundle = {f.path for f in files}
    kept = [f for f in told if f.code not in PRIVATE]
    by_path = {f.path: f for f in files}
    for one in private:
        source = by_path.get(one.subject)
        if one.code == "base-local-path" and why is not None:
            continue
        if source is None or not source.path.endswith(".json"):
            kept.append(msgspec.structs.replace(one, severity="block"))
            continue
        done = paths.rewrite(source.path, Path(source.source).read_bytes(), lambda *_: why, bundle)
        if done.raw is not None:
            transform[source.path] = done.raw
        kept += done.findings
        kept += [msgspec.structs.replace(f, severity="block") for f in paths.findings(done.left)]
    return transform, kept


def _allowed(told: Iterable[Finding], policy: Policy) -> list[Finding]:
    """Turn blocks that a person has allowed into warnings that say so."""
    reasons = {one.code: one.reason for one in policy.allowed}
    found: list[Finding] = []
    for one in told:
        if one.severity == "block" and one.code in reasons and findings.may_be_allowed(one.code):
            found.append(msgspec.structs.replace(one, severity="warn", data={**one.data, "allowed": reasons[one.code]}))
        else:
            found.append(one)
    return found


def _gate(artifact: Artifact, name: str, told: Sequence[Finding]) -> None:
    waits = [f for f in told if findings.CODES[f.code].waits]
    blocks = [f for f in told if f.severity == "block" and f not in waits]
    where = artifact.root
    if blocks:
        why, fix = blocks[0].message, blocks[0].fix
        unproven = next((f for f in told if f.code == "base-unproven"), None)
        if unproven is not None and blocks[0].code in PRIVATE:
            why, fix = f"{why}; {unproven.message}", unproven.fix
            if unproven.data.get("silent") and all(f.code in PRIVATE for f in blocks):
                raise errors.UnreachableError(
                    f"{where} cannot be published as {name} yet",
                    why=why,
                    fix="repeat it when the Hub answers",
                    findings=blocks,
                )
        raise errors.RefusedError(f"{where} cannot be published as {name}", why=why, fix=fix, findings=blocks)
    if waits:
        raise errors.NotFinishedError(
            f"{where} is not finished", why=waits[0].message, fix=waits[0].fix, findings=waits
        )
    if artifact.kind is None or artifact.weights is None:
        raise errors.RefusedError(
            f"{where} cannot be published as {name}", why=f"it holds {artifact.artifact}", findings=list(told)
        )


# ----------------------------------------------------------------------------------------------------------- facts


def _stated_there(seen: ModelSeen | None) -> LicenseFacts | None:
    """Return the licence that a model's card on the Hub declares."""
    if seen is None or not seen.card.get("license"):
        return None
    fields = {k: v for k, v in seen.card.items() if k in {"license", "license_name", "license_link"}}
    said = card_facts.parse(frontmatter.fenced(fields).encode())
    if said.license is None or said.license.id == "unknown":
        return None
    return LicenseFacts(
        id=said.license.id,
        evidence=f"the card of {seen.id} on the Hub declares it, at {seen.commit[:12]}",
        name=said.license.name,
        link=said.license_link,
    )


def _pulled(artifact: Artifact, published: Published) -> prove_base.Pulled | None:
    """Return the version that the base's folder holds, where it is named by a path."""
    written = artifact.facts.get("base_model")
    return prove_base.pulled(written, published) if isinstance(written, str) and paths.is_local(written) else None


def _base(
    artifact: Artifact,
    note: Sidecar,
    card: CardFacts,
    pulled: prove_base.Pulled | None,
    prove: Callable[[str], prove_base.Proof],
) -> tuple[BaseFacts, paths.Evidence | None, list[Finding]]:
    """Return the base, what says which model that is where its name is a path, and what was tried in vain for it."""
    written = artifact.facts.get("base_model")
    base, why = named_base(artifact, note, card)
    if pulled is not None:
        told = f"; its folder holds {pulled.known.ref if pulled.known else 'a version of a registry'}"
        base = msgspec.structs.replace(base, content=pulled.content, evidence=f"{base.evidence}{told}")
    if base.id is not None or not isinstance(written, str) or not paths.is_local(written):
        return base, why, []
    proof = prove(written)
    if proof.evidence is None:
        subject = _within(artifact.config or ".", artifact.relative)
        return base, None, [prove_base.unproven(written, subject, proof)]
    found = proof.evidence
    return msgspec.structs.replace(base, id=found.value, revision=found.revision, evidence=found.why), found, []


def named_base(artifact: Artifact, note: Sidecar, card: CardFacts) -> tuple[BaseFacts, paths.Evidence | None]:
    """Return the base as sidecar, config, card and what lies beside them name it; never a path as its id."""
    own = artifact.base
    relation = own.relation or ("adapter" if artifact.kind == "adapter" else None)
    if note.base:
        fact = BaseFacts(id=note.base, revision=note.base_revision, relation=relation, evidence="weighbridge.yaml:base")
        return fact, paths.Evidence(note.base, "weighbridge.yaml names the base", note.base_revision)
    written = artifact.facts.get("base_model")
    if isinstance(written, str) and paths.is_local(written):
        why = paths.base_evidence(written, card=card.base_models)
        if why is not None:
            return BaseFacts(id=why.value, revision=why.revision, relation=relation, evidence=why.why), why
        return BaseFacts(id=None, relation=relation, evidence=f"{own.evidence}: a path of a machine"), None
    if own.id is not None:
        return own, None
    merged = parents.merge(Path(artifact.root))
    if merged is not None and merged.base is not None:
        return BaseFacts(id=merged.base, relation="merge", evidence=f"{merged.file}:base_model"), None
    if len(card.base_models) == _BASE_CARD_LIMIT and not paths.is_local(card.base_models[0]):
        stated = card.front.get("base_model_relation") if card.front else None
        word = stated if isinstance(stated, str) else relation
        return BaseFacts(id=card.base_models[0], relation=word, evidence="README.md:base_model"), None
    source = parents.download(Path(artifact.root))
    if source is not None:
        when = f", downloaded {source.at}" if source.at else ""
        evidence = f"{parents.DOWNLOAD}:url{when}"
        return BaseFacts(id=source.id, revision=source.branch, relation=relation, evidence=evidence), None
    return own, None


def _lineage(artifact: Artifact, base: BaseFacts, pulled: prove_base.Pulled | None) -> list[LineageEdge]:
    merged = parents.merge(Path(artifact.root)) if artifact.kind != "adapter" else None
    if merged is not None:
        return [LineageEdge(relation="merged-from", ref=model) for model in merged.models]
    ref = pulled.known.ref if pulled is not None and pulled.known is not None else base.id
    if artifact.kind != "adapter" or ref is None:
        return []
    return [LineageEdge(relation="adapter-of", ref=ref, content=base.content)]


def _table(artifact: Artifact) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(_source(artifact, artifact.config).read_bytes()) if artifact.config else None
    except (OSError, msgspec.DecodeError):
        return None
    return value if isinstance(value, dict) else None


def _digested(
    artifact: Artifact, files: Sequence[SourceFile], made: Mapping[str, Made], *, hashed: bool
) -> WeightsFacts:
    """Return the weights facts, for adapters with the digest that does not depend on the header's order."""
    assert artifact.weights is not None
    facts = artifact.weights
    if artifact.inputs:
        facts = msgspec.structs.replace(facts, shards=len(made))
    if not hashed or artifact.kind != "adapter" or facts.bytes > DIGEST_LIMIT:
        return facts
    lines: list[tuple[str, str, Sequence[int], str]] = []
    for file in files:
        if file.role != "weights" or not file.path.endswith(".safetensors"):
            continue
        content = made.get(file.path)
        if isinstance(content, Content):
            lines += content.digests()
            continue
        with Path(file.source).open("rb") as stream:
            header = safetensors.read_from(stream, file.size)
            for tensor in sorted(header.tensors.values(), key=lambda t: t.begin):
                stream.seek(header.data_start + tensor.begin)
                digest = hashlib.sha256()
                left = tensor.size
                while left > 0 and (block := stream.read(min(CHUNK, left))):
                    digest.update(block)
                    left -= len(block)
                lines.append((tensor.name, tensor.dtype, tensor.shape, digest.hexdigest()))
    return msgspec.structs.replace(facts, tensor_digest=tensor_digest(lines)) if lines else facts
