"""What a folder holds of what `registry push` publishes, and under which name: inspect, then the remote's rules."""

import os
import shlex
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import layout, run_identity, sidecar
from weighbridge.adapters import license as licences
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.config import mounts
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli import paths
from weighbridge.registry.cli.catalogue import published_as
from weighbridge.registry.cli.wish import Wish
from weighbridge.registry.errors import RefusedError, UsageError, utf8
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.rules import rules
from weighbridge.registry.refs import SUFFIX_ROOM, check_name, shown
from weighbridge.registry.types import Models, RunFacts

_SHOWN: Final = 8
_AT_REST: Final = frozenset({"end-mark-missing"})
"""What makes the daemon wait and a person who says "publish this" need not wait for."""


def judge(wish: Wish, chosen: RemoteSettings, *, values: int, ask: Models | None) -> tuple[Artifact, Admission, str]:
    """Inspect the folder and ask the remote's rules; nothing of the registry is read, nothing is written.

    `values` is as in `inspect`; `ask` asks a Hub about the base.
    """
    path = wish.path
    try:
        found = inspect(path, values=values, prefer_averaged=wish.ema == "prefer")
    except FileNotFoundError as error:
        raise paths.absent(path) from error
    if not found.artifacts and not path.exists():
        raise paths.absent(path)  # a link to nothing, or to itself
    root = Path(os.path.realpath(path))
    root = root if root.is_dir() else root.parent
    run_root = root.parent if layout.step_of(root.name) is not None else root
    note = sidecar.read(root)
    note = note if note.present else sidecar.read(run_root)
    artifact = _one(_wanted(found.artifacts, wish), wish, found.findings)
    kept = [f for f in artifact.findings if f.code not in _AT_REST]
    artifact = msgspec.structs.replace(artifact, findings=kept)
    wanted = wish.name or note.name
    if wanted is None:
        raise UsageError("which name?", fix=wish.command(name="NAME"))
    check_name(wanted, room=SUFFIX_ROOM)
    run = RunFacts(
        project=utf8(run_root.parent.name) or "-",
        name=utf8(run_root.name),
        id=note.id or run_identity.identity(str(run_root), mounts.read_table(os.environ)),
    )
    admission = admit(
        artifact,
        name=wanted,
        run=run,
        policy=rules([chosen], wish.allowed),
        sidecar=note,
        run_root=run_root,
        host=socket.gethostname(),
        caches=licences.cache_roots(os.environ),
        ask=ask,
        published=partial(published_as, chosen),
    )
    return artifact, admission, wanted


def _wanted(artifacts: Sequence[Artifact], wish: Wish) -> list[Artifact]:
    """Return what `--ema` leaves of the artifacts, as a watch rule's `ema` does. Raises RefusedError for none."""
    path, ema = wish.path.absolute(), wish.ema
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
            fix=wish.command(path=path.parent / better, ema="keep")
            if better
            else "leave --ema out, or name another file",
        )
    return kept


def _one(artifacts: Sequence[Artifact], wish: Wish, findings: Sequence[Any]) -> Artifact:
    """Return the one artifact that is meant. Raises UsageError that lists them, RefusedError when there is none."""
    path, kind = wish.path, wish.kind
    able = [a for a in artifacts if a.kind is not None and (kind is None or a.kind == kind)]
    here = [a for a in able if a.relative == "."] or able
    if len(here) == 1:
        return here[0]
    if here:
        lone = [str(a.kind) for a in here if sum(b.kind == a.kind for b in here) == 1]
        ways = [wish.command(path=path / (here[0].file or here[0].relative), name=wish.name or "NAME")]
        ways += [wish.command(name=wish.name or "NAME", kind=lone[0])] if lone else []
        more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
        raise UsageError(
            f"{shown(str(path))} holds several things that can be published",
            why=", ".join(f"{shown(a.file or a.relative)} ({a.kind})" for a in here[:_SHOWN]) + more,
            fix="\n".join(ways),
        )
    others = sorted({a.kind for a in artifacts if a.kind is not None})
    if others:
        raise UsageError(
            f"{shown(str(path))} holds no {kind}",
            why=f"it holds: {', '.join(others)}",
            fix=wish.command(kind=others[0]),
        )
    raise RefusedError(
        f"{shown(str(path))} holds nothing that can be published",
        why=findings[0].message if findings else "no weights of a known layout are in it",
        fix=shown(f"registry inspect {shlex.quote(str(path))}"),
        findings=list(findings),
    )
