"""What `registry push` does: judge a folder, stage it, publish it, and tell of it."""

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import layout, run_identity, sidecar
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.adapters.reading import VALUES_LIMIT
from weighbridge.config import mounts
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import fresh
from weighbridge.registry.cli.output import Output, short, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import NotFoundError, RefusedError, UsageError, WeighbridgeError, utf8
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admit import Admission, admit
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.refs import SUFFIX_ROOM, check_name, shown
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Owner, Receipt, RunFacts

SCHEMA: Final = "weighbridge/push/1"
_AT_REST: Final = frozenset({"end-mark-missing"})
"""What makes the daemon wait and a person who says "publish this" need not wait for."""


def go(
    path: Path,
    chosen: RemoteSettings,
    opened: Remote,
    *,
    name: str | None,
    kind: str | None,
    allowed: Sequence[tuple[str, str]],
    share: bool,
    again: bool,
    adopt: bool,
    out: Output,
) -> None:
    """Publish what a folder holds, and print the version.

    `allowed` are findings' codes with the reasons to publish in spite of them.
    """
    _, admission, wanted = judge(path, name, kind, chosen, allowed, values=0)
    untold: list[WeighbridgeError] = []
    owner = _writer()
    registry = fresh.registry_of(chosen, opened, writer=owner.daemon)
    begun = time.monotonic()
    with following(out) as follower:
        candidate = prepare(
            opened,
            wanted,
            admission.files,
            admission.facts,
            reserve=0,
            transform=admission.transform,
            made=admission.made,
            inputs=admission.inputs,
            staging_folder=None,
            progress=follower.total,
        )
        told = [*admission.findings, *candidate.bundle.findings]
        admission = msgspec.structs.replace(admission, findings=told)
        try:
            receipt = publish(
                opened,
                chosen.name,
                registry,
                candidate,
                owner,
                people=admission.people,
                share=share,
                again=again,
                adopt=adopt,
                untold=untold.append,
                progress=follower.total,
            )
        except BaseException:
            staging.discard(candidate.bundle)  # the next push copies anew and joins the claim that may be there
            raise
    _tell(receipt, admission, time.monotonic() - begun, out)
    fresh.published(chosen, receipt, untold, out)


def dry(
    path: Path,
    chosen: RemoteSettings,
    *,
    name: str | None,
    kind: str | None,
    allowed: Sequence[tuple[str, str]],
    out: Output,
) -> None:
    """Say what would be published."""
    artifact, admission, wanted = judge(path, name, kind, chosen, allowed, values=VALUES_LIMIT)
    _dry(wanted, artifact, admission, out)


def judge(
    path: Path,
    name: str | None,
    kind: str | None,
    chosen: RemoteSettings,
    allowed: Sequence[tuple[str, str]],
    *,
    values: int,
) -> tuple[Artifact, Admission, str]:
    """Inspect the folder and ask the remote's rules; nothing is read from or written to the remote.

    `values` is as in `inspect`.
    """
    try:
        found = inspect(path, values=values)
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no {shown(str(path))}", fix="name a folder that exists") from error
    root = Path(os.path.realpath(path))
    root = root if root.is_dir() else root.parent
    run_root = root.parent if layout.step_of(root.name) is not None else root
    note = sidecar.read(root)
    note = note if note.present else sidecar.read(run_root)
    artifact = _one(found.artifacts, path, kind, found.findings)
    kept = [f for f in artifact.findings if f.code not in _AT_REST]
    artifact = msgspec.structs.replace(artifact, findings=kept)
    wanted = name or note.name
    if wanted is None:
        raise UsageError("which name?", fix=f"registry push {shown(str(path))} --name NAME")
    check_name(wanted, room=SUFFIX_ROOM)
    policy = Policy(
        paths=chosen.paths,  # type: ignore[arg-type]
        unknown_license=chosen.unknown_license,  # type: ignore[arg-type]
        deny_licenses=chosen.deny_licenses,
        remote_code=chosen.remote_code,  # type: ignore[arg-type]
        allowed=tuple(Allowed(code=code, reason=reason) for code, reason in allowed),
    )
    run = RunFacts(
        project=utf8(run_root.parent.name) or "-",
        name=utf8(run_root.name),
        id=note.id or run_identity.identity(str(run_root), mounts.read_table(os.environ)),
    )
    admission = admit(
        artifact, name=wanted, run=run, policy=policy, sidecar=note, run_root=run_root, host=socket.gethostname()
    )
    return artifact, admission, wanted


def _one(artifacts: Sequence[Artifact], path: Path, kind: str | None, findings: Sequence[Any]) -> Artifact:
    """Return the one artifact that is meant. Raises UsageError that lists them, RefusedError when there is none."""
    able = [a for a in artifacts if a.kind is not None and (kind is None or a.kind == kind)]
    here = [a for a in able if a.relative == "."] or able
    if len(here) == 1:
        return here[0]
    if here:
        raise UsageError(
            f"{shown(str(path))} holds several things that can be published",
            why=", ".join(f"{a.file or a.relative} ({a.kind})" for a in here[:8]),
            fix=f"registry push {shown(str(path))}/{shown(here[0].file or here[0].relative)} --name NAME, or --kind",
        )
    raise RefusedError(
        f"{shown(str(path))} holds nothing that can be published",
        why=findings[0].message if findings else "no weights of a known layout are in it",
        fix=f"registry inspect {shown(str(path))}",
        findings=list(findings),
    )


def _writer() -> Owner:
    """Return who claims: this user of this machine, by a digest, because a claim may lie where no user name belongs."""
    digest = hashlib.sha256(f"weighbridge-push-v1\0{fresh.whoami()}".encode()).hexdigest()
    return Owner(host=socket.gethostname(), daemon=f"push-{digest[:32]}")


def _dry(name: str, artifact: Artifact, admission: Admission, out: Output) -> None:
    """Say what would be published."""
    files = [{"path": f.path, "size": admission.size_of(f), "role": f.role} for f in admission.files]
    whole = admission.size
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "dry_run": True,
                "ref": None,
                "name": name,
                "version": None,
                "kind": artifact.kind,
                "content": None,
                "bytes": whole,
                "files": files,
                "left_out": [msgspec.to_builtins(left) for left in admission.facts.left_out],
                "rewritten": sorted(admission.transform),
                "findings": [msgspec.to_builtins(finding) for finding in admission.findings],
            }
        )
        return
    out.say(f"{name}: {artifact.kind}, {_files(files)}, {size(whole)} would be published")
    for file in admission.files:
        changed = "   (paths rewritten)" if file.path in admission.transform else ""
        out.say(f"  {file.path}   {size(admission.size_of(file))}   {file.role}{changed}")
    for left in admission.facts.left_out:
        out.say(f"  left out: {left.path}   {size(left.size)}   {left.reason}")
    _findings(admission, out)


def _tell(receipt: Receipt, admission: Admission, seconds: float, out: Output) -> None:
    """Print the version, and how it came to be."""
    whole = admission.size
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "dry_run": False,
                "ref": f"{receipt.name}@v{receipt.n}",
                "name": receipt.name,
                "version": receipt.n,
                "kind": admission.facts.kind,
                "content": receipt.content,
                "manifest_sha256": receipt.manifest_sha256,
                "remote": receipt.remote,
                "location": receipt.location,
                "committed_at": receipt.committed_at,
                "verified": receipt.verified,
                "joined": receipt.joined,
                "bytes": whole,
                "files": [{"path": f.path, "size": admission.size_of(f), "role": f.role} for f in admission.files],
                "left_out": [msgspec.to_builtins(left) for left in admission.facts.left_out],
                "rewritten": sorted(admission.transform),
                "findings": [msgspec.to_builtins(finding) for finding in admission.findings],
            }
        )
        return
    _findings(admission, out)
    if receipt.joined:
        out.talk(f"these bytes are there already ({short(receipt.content)})")
    else:
        count = f"{_files(admission.files)}, {size(whole)} in {seconds:.1f} s"
        out.talk(f"{count}, {receipt.verified} on {receipt.remote}: {receipt.location}")
    out.say(f"{receipt.name}@v{receipt.n}")


def _files(files: Sequence[object]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"


def _findings(admission: Admission, out: Output) -> None:
    for finding in admission.findings:
        if finding.severity != "note":
            out.talk(f"{finding.severity}: {finding.code}  {finding.subject}: {finding.message}", "yellow")
            if finding.data.get("allowed"):
                out.talk(f"      allowed: {finding.data['allowed']}", "yellow")
