"""What `registry push` does: stage what was judged, publish it, and tell of it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import context, fresh
from weighbridge.registry.cli.ahead import JUDGE, Looker
from weighbridge.registry.cli.output import Output, short, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.shell import load
from weighbridge.registry.types import Receipt

if TYPE_CHECKING:
    from weighbridge.adapters.inspection import Artifact

SCHEMA: Final = "weighbridge/push/1"


def go(wish: Wish, chosen: RemoteSettings, opened: Remote, looker: Looker | None, out: Output) -> None:
    """Publish what a folder holds, and print the version. `looker` has begun to look at it, where it could."""
    found = looker.found() if looker is not None else None
    if found is None:
        hub = commits.of(opened)
        found = load(JUDGE)(wish, chosen, values=0, ask=hub.model if hub is not None else None)[1:]
    admission, wanted = found
    untold: list[WeighbridgeError] = []
    mended: list[WeighbridgeError] = []
    owner = fresh.writer()
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
                share=wish.share,
                again=wish.again,
                adopt=wish.adopt,
                untold=untold.append,
                mended=mended.append,
                progress=follower.total,
            )
        except BaseException as error:
            staging.discard(candidate.bundle)  # the next push copies anew and joins the claim that may be there
            if isinstance(error, WeighbridgeError):
                _say_how(error, wish)
            raise
    say_mended(mended, out)
    _tell(receipt, admission, time.monotonic() - begun, out)
    called = _called(receipt)
    if called != receipt.name:
        out.talk(f"the repository of {receipt.name} is called {called} now: the version went there, under its name")
    fresh.published(chosen, opened, receipt, untold, out)


def dry(wish: Wish, chosen: RemoteSettings, out: Output) -> None:
    """Say what would be published."""
    hub = commits.of(context.connect(chosen)) if chosen.url.startswith("hf://") else None
    ask = hub.model if hub is not None else None
    artifact, admission, wanted = load(JUDGE)(
        wish, chosen, values=load("weighbridge.adapters.reading:VALUES_LIMIT"), ask=ask
    )
    _dry(wanted, artifact, admission, out)


def _say_how(error: WeighbridgeError, wish: Wish) -> None:
    """Put the whole command in the place of an option that would help: who publishes knows it, the flow does not."""
    option = error.data.get("option")
    if option in {"share", "again", "adopt"} and error.fix:
        error.fix = error.fix.replace(f"registry push --{option}", wish.command(**{option: True}))


def _dry(name: str, artifact: "Artifact", admission: Admission, out: Output) -> None:
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
        out.talk(f"these bytes are there already ({short(receipt.content)}; {compared(receipt)})")
    else:
        count = f"{_files(admission.files)}, {size(whole)} in {seconds:.1f} s"
        out.talk(f"{count}, {receipt.verified} on {receipt.remote}: {receipt.location}")
    out.say(f"{receipt.name}@v{receipt.n}")


def say_mended(mended: Sequence[WeighbridgeError], out: Output) -> None:
    """Say what was wrong with the version that lies there, until it was put back."""
    for lost in mended:
        out.talk(f"mended: {lost.what}; what was lost was put back", "yellow")


def compared(receipt: Receipt) -> str:
    """Say how what lies there was compared with these bytes."""
    if receipt.verified == "size":
        return f"compared by size alone: registry verify {receipt.name}@v{receipt.n} reads it"
    return f"compared: {receipt.verified}"


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
