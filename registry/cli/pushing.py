"""What `registry push` does: judge a folder, stage it, publish it, and tell of it."""

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import layout, run_identity, sidecar
from weighbridge.adapters import license as licences
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import Allowed, Policy
from weighbridge.adapters.reading import VALUES_LIMIT
from weighbridge.config import mounts
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import context, fresh, paths
from weighbridge.registry.cli.catalogue import published_as
from weighbridge.registry.cli.output import Output, short, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import RefusedError, UsageError, WeighbridgeError, utf8
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admit import Admission, admit
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.refs import SUFFIX_ROOM, check_name, shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Models, Owner, Receipt, RunFacts

SCHEMA: Final = "weighbridge/push/1"
_SHOWN: Final = 8
_AT_REST: Final = frozenset({"end-mark-missing"})
"""What makes the daemon wait and a person who says "publish this" need not wait for."""


def go(
    path: Path,
    chosen: RemoteSettings,
    opened: Remote,
    *,
    name: str | None,
    kind: str | None,
    ema: str,
    allowed: Sequence[tuple[str, str]],
    share: bool,
    again: bool,
    adopt: bool,
    out: Output,
) -> None:
    """Publish what a folder holds, and print the version.

    `allowed` are findings' codes with the reasons to publish in spite of them.
    """
    hub = commits.of(opened)
    ask = hub.model if hub is not None else None
    _, admission, wanted = judge(path, name, kind, chosen, allowed, values=0, ema=ema, ask=ask)
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
    called = _called(receipt)
    if called != receipt.name:
        out.talk(f"the repository of {receipt.name} is called {called} now: the version went there, under its name")
    fresh.published(chosen, receipt, untold, out)


def dry(
    path: Path,
    chosen: RemoteSettings,
    *,
    name: str | None,
    kind: str | None,
    ema: str,
    allowed: Sequence[tuple[str, str]],
    out: Output,
) -> None:
    """Say what would be published."""
    hub = commits.of(context.connect(chosen)) if chosen.url.startswith("hf://") else None
    ask = hub.model if hub is not None else None
    artifact, admission, wanted = judge(path, name, kind, chosen, allowed, values=VALUES_LIMIT, ema=ema, ask=ask)
    _dry(wanted, artifact, admission, out)


def judge(
    path: Path,
    name: str | None,
    kind: str | None,
    chosen: RemoteSettings,
    allowed: Sequence[tuple[str, str]],
    *,
    values: int,
    ema: str,
    ask: Models | None,
) -> tuple[Artifact, Admission, str]:
    """Inspect the folder and ask the remote's rules; nothing of the registry is read, nothing is written.

    `values` is as in `inspect`; `ask` asks a Hub about the base.
    """
    try:
        found = inspect(path, values=values, prefer_averaged=ema == "prefer")
    except FileNotFoundError as error:
        raise paths.absent(path) from error
    root = Path(os.path.realpath(path))
    root = root if root.is_dir() else root.parent
    run_root = root.parent if layout.step_of(root.name) is not None else root
    note = sidecar.read(root)
    note = note if note.present else sidecar.read(run_root)
    artifact = _one(_wanted(found.artifacts, path.absolute(), ema), path, kind, found.findings)
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
        artifact,
        name=wanted,
        run=run,
        policy=policy,
        sidecar=note,
        run_root=run_root,
        host=socket.gethostname(),
        caches=licences.cache_roots(os.environ),
        ask=ask,
        published=partial(published_as, chosen),
    )
    return artifact, admission, wanted


def _wanted(artifacts: Sequence[Artifact], path: Path, ema: str) -> list[Artifact]:
    """Return what `--ema` leaves of the artifacts, as a watch rule's `ema` does. Raises RefusedError for none."""
    if ema == "keep":
        return list(artifacts)
    kept: list[Artifact] = []
    why: list[str] = []
    better: str | None = None
    for one in artifacts:
        place = path if path.is_file() else Path(one.root)
        if one.file is not None:
            place = Path(one.root) / Path(one.file).name
        beside = set(os.listdir(place.absolute().parent))  # noqa: PTH208 - names as strings
        averaged = one.facts.get("averaged") is True or layout.raw_of(place.name) in beside
        twins = sorted(other for other in beside if layout.raw_of(other) == place.name)
        if ema == "drop" and averaged:
            why.append(f"{shown(place.name)} holds averaged weights, and --ema drop leaves them out")
            better = layout.raw_of(place.name) if layout.raw_of(place.name) in beside else better
        elif ema == "prefer" and twins and not averaged:
            why.append(
                f"{shown(twins[0])} holds the averaged weights of {shown(place.name)}, and --ema prefer takes those"
            )
            better = twins[0]
        else:
            kept.append(one)
    if why and not kept:
        raise RefusedError(
            f"--ema {ema} leaves nothing of {shown(str(path))} to publish",
            why="; ".join(why[:8]),
            fix=f"registry push {shown(str(path.parent / better))}"
            if better
            else "leave --ema out, or name another file",
        )
    return kept


def _one(artifacts: Sequence[Artifact], path: Path, kind: str | None, findings: Sequence[Any]) -> Artifact:
    """Return the one artifact that is meant. Raises UsageError that lists them, RefusedError when there is none."""
    able = [a for a in artifacts if a.kind is not None and (kind is None or a.kind == kind)]
    here = [a for a in able if a.relative == "."] or able
    if len(here) == 1:
        return here[0]
    if here:
        lone = [str(a.kind) for a in here if sum(b.kind == a.kind for b in here) == 1]
        by_kind = f", or --kind {lone[0]}" if lone else ""
        more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
        raise UsageError(
            f"{shown(str(path))} holds several things that can be published",
            why=", ".join(f"{shown(a.file or a.relative)} ({a.kind})" for a in here[:_SHOWN]) + more,
            fix=f"registry push {shown(str(path))}/{shown(here[0].file or here[0].relative)} --name NAME{by_kind}",
        )
    others = sorted({a.kind for a in artifacts if a.kind is not None})
    if others:
        raise UsageError(
            f"{shown(str(path))} holds no {kind}", why=f"it holds: {', '.join(others)}", fix=f"--kind {others[0]}"
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
    if artifact.unread:
        out.talk(f"later: {artifact.unread}")
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


def _called(receipt: Receipt) -> str:
    """Return what the place of a version is called: on the Hub somebody may have renamed it."""
    if not receipt.location.startswith("hf://"):
        return receipt.name
    return receipt.location.rpartition("@")[0].rpartition("/")[2]


def _files(files: Sequence[object]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"


def _findings(admission: Admission, out: Output) -> None:
    for finding in admission.findings:
        if finding.severity != "note":
            out.talk(f"{finding.severity}: {finding.code}  {finding.subject}: {finding.message}", "yellow")
            if finding.data.get("allowed"):
                out.talk(f"      allowed: {finding.data['allowed']}", "yellow")
