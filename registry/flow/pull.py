"""Getting a version as a folder: verified while it arrives, resumed after a cut, visible all at once or not at all."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from weighbridge.registry import card, disk, layout
from weighbridge.registry import manifest as manifests
from weighbridge.registry.errors import ConflictError, DiskFullError, IntegrityError, UsageError
from weighbridge.registry.flow import fetch, once, place
from weighbridge.registry.flow.cache import Cache
from weighbridge.registry.flow.decision import Void, claimed_text, judged, settled
from weighbridge.registry.hashing import sha256_bytes, sha256_file
from weighbridge.registry.manifest import Manifest, canonical, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import FileEntry, Value

SCHEMA_PARTIAL: Final = "weighbridge/partial/1"
RESERVE: Final = 16 << 20
"""Bytes that must stay free on the target's disk."""


class Pulled(Value, frozen=True):
    """What a pull delivered. `weaker` means that the target is a mount point.

    `fetched`, `reused` and `cached` are bytes: from the remote, found here, and of the latter those of the cache.
    """

    name: str
    n: int
    content: str
    manifest: str
    path: str
    files: list[str]
    bytes: int
    fetched: int
    reused: int
    cached: int
    weaker: bool
    partial: bool
    already: bool
    notes: list[str]


def pull(
    remote: Remote,
    name: str,
    n: int,
    target: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    cache: Cache | None = None,
    manifest_sha256: str | None = None,
    card_sha256: str | None = None,
    begin: Callable[[Sequence[FileEntry]], None] | None = None,
    progress: fetch.Progress | None = None,
) -> Pulled:
    """Fetch a committed version into `target`, which appears whole and verified or stays as it was.

    `include` and `exclude` are patterns of paths (`*.safetensors`, `tokenizer/`). `force` replaces what a pull put
    there before, nothing else. `cache` lends what was pulled before, and keeps what is pulled. `manifest_sha256` and
    `card_sha256` are what the team was told; without the first, the claim is asked. A cut pull leaves a hidden folder
    beside the target from which the next one goes on. `begin` is called with the files before the first byte.

    Raises NotFoundError, WithdrawnError, ConflictError for a target that is taken, DiskFullError, and IntegrityError
    that names the damaged file.
    """
    manifest = checked_manifest(remote, name, n, manifest_sha256)
    files = chosen(manifest, include, exclude)
    partial = len(files) != len(manifest.files)
    at = place.look(target)
    if at.manifest is not None and at.manifest.digest == manifest.digest and not at.foreign:
        already = _already(at, name, n, manifest, files, partial=partial)
        if already is not None:
            return already
        if not force and not at.unfinished:
            raise _drifted(at, manifest)
    place.check(at, force=force)
    selection = "\n".join([manifest.digest, *sorted(f.path for f in files)])
    hidden = at.hidden(sha256_bytes(selection.encode())[:12])
    with disk.speaking(f"cannot make {shown(str(at.path.parent))}"):
        hidden.parent.mkdir(parents=True, exist_ok=True)
    with place.locked(hidden):
        try:
            _room(hidden, files)
        except DiskFullError:
            with suppress(OSError):
                hidden.rmdir()  # nothing to go on with later, unless an earlier pull left some
            raise
        if begin is not None:
            begin(files)
        donor = at.path if at.occupied else None
        moved = fetch.files(remote, name, n, files, hidden, donor=donor, cache=cache, progress=progress)
        extras, notes = _rendered(remote, manifest, name, n, card_sha256)
        extras["manifest.json"] = manifest.stored
        if partial:
            document = {"schema": SCHEMA_PARTIAL, "name": name, "n": n, "files": sorted(f.path for f in files)}
            extras[place.PARTIAL] = canonical(document)
        for path, body in extras.items():
            _write(hidden / path, body)
        place.settle(hidden, [*(f.path for f in files), *extras])
        at = place.look(target)
        place.check(at, force=force)
        place.reveal(at, hidden, manifest)
    return Pulled(
        name=name,
        n=n,
        content=manifest.content,
        manifest=manifest.digest,
        path=str(at.path),
        files=[f.path for f in files],
        bytes=sum(f.size for f in files),
        fetched=moved.fetched,
        reused=moved.reused,
        cached=moved.cached,
        weaker=at.mounted,
        partial=partial,
        already=False,
        notes=notes,
    )


def checked_manifest(remote: Remote, name: str, n: int, expected: str | None = None) -> Manifest:
    """Return a committed version's manifest, compared with what the team was told, else with its claim.

    Raises NotFoundError, WithdrawnError, and IntegrityError that names the object which is damaged.
    """
    key = layout.manifest(name, n)
    stored = once.look(remote, key)
    if stored is not None and sha256_bytes(stored) != expected:
        _compare_with_claim(remote, name, n, stored, expected)
    return judged(remote, name, n, stored)


def _compare_with_claim(remote: Remote, name: str, n: int, stored: bytes, expected: str | None) -> None:
    """Raise IntegrityError unless a decision is what was claimed, or gives the number up.

    Both cannot be right when they differ; where the team was told a digest, it says which one is.
    """
    key, fix = layout.manifest(name, n), f"registry verify {name}@v{n}"
    try:
        if expected is None and isinstance(settled(remote, name, n, stored), Void):
            return
        claim = once.look(remote, layout.claim(name, n))
        if claim is not None:
            parse_json(claim, layout.claim(name, n))
    except IntegrityError as error:
        error.fix = error.fix or fix
        raise
    if claimed_text(claim) != stored:
        raise IntegrityError(f"{key} is damaged", why="it is not what its claim says", fix=fix)
    if expected is not None:
        raise IntegrityError(
            f"{key} is not what the catalogue says",
            why=f"its sha256 is {sha256_bytes(stored)[:12]}, the catalogue has {expected[:12]}",
            fix="registry rebuild",
        )


def chosen(manifest: Manifest, include: Sequence[str], exclude: Sequence[str]) -> list[FileEntry]:
    """Return the files that the patterns choose, all without any. Raises UsageError when none is left."""
    files = [
        file
        for file in manifest.files
        if (not include or any(_fits(file.path, p) for p in include)) and not any(_fits(file.path, p) for p in exclude)
    ]
    if not files:
        known = ", ".join(file.path for file in manifest.files[:8])
        raise UsageError(
            "no file is left to pull", why=f"the version holds {known}", fix="change --include or --exclude"
        )
    return files


def _fits(path: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        return path.startswith(pattern)
    return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition("/")[2], pattern)


def _already(
    at: place.Target, name: str, n: int, manifest: Manifest, files: Sequence[FileEntry], *, partial: bool
) -> Pulled | None:
    """Return the result when the target holds exactly what is asked for, every byte read again."""
    if at.unfinished or place.selection(at.path) != ({f.path for f in files} if partial else None):
        return None
    with disk.speaking(f"cannot read {shown(str(at.path))}"):
        if any(_differs(at.path / file.path, file) for file in files):
            return None
    return Pulled(
        name=name,
        n=n,
        content=manifest.content,
        manifest=manifest.digest,
        path=str(at.path),
        files=[f.path for f in files],
        bytes=sum(f.size for f in files),
        fetched=0,
        reused=sum(f.size for f in files),
        cached=0,
        weaker=at.mounted,
        partial=partial,
        already=True,
        notes=[],
    )


def _differs(path: Path, entry: FileEntry) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
        return True
    return sha256_file(path) != entry.sha256


def _drifted(at: place.Target, manifest: Manifest) -> ConflictError:
    selected = place.selection(at.path)
    if selected is not None:
        return ConflictError(
            f"only a part of the version was pulled to {shown(str(at.path))}",
            why=", ".join(map(shown, sorted(selected)[:4])) + (" and more" if len(selected) > 4 else ""),
            fix="replace it with --force, or name another target",
        )
    findings = manifests.verify(manifest, at.path)
    return ConflictError(
        f"{shown(str(at.path))} is not what was pulled there",
        why=findings[0].message if findings else "another selection of files was pulled there",
        fix="replace it with --force, or name another target",
    )


def _room(hidden: Path, files: Sequence[FileEntry]) -> None:
    """Raise DiskFullError before the first byte when the files cannot fit."""
    with disk.speaking(f"cannot look at {shown(str(hidden))}"):
        here = sum(min(f.size, _held(p)) for f in files if (p := hidden / f.path).is_file())
        need = sum(f.size for f in files) - here + RESERVE
        free = disk.free_bytes(hidden)
    if need > free:
        raise DiskFullError(
            f"{shown(str(hidden.parent))} has too little room",
            why=f"{need:,} bytes are needed, {free:,} are free",
            fix="free some space, or name a target on another disk",
            need=need,
            free=free,
        )


def _held(path: Path) -> int:
    """Return the room that a file has already: its bytes, or what was reserved for it."""
    found = path.stat()
    return max(found.st_size, found.st_blocks * 512)


def _rendered(
    remote: Remote, manifest: Manifest, name: str, n: int, told: str | None
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files beside the payload, and what was wrong with them: nothing damaged is delivered.

    The history, where there is one, follows from the manifest. The card may hold people's words, so it comes from the
    remote as long as it is what was announced, else it is rendered anew.
    """
    found = {"training.json": card.training(manifest)} if manifest.facts.provenance.history is not None else {}
    notes = []
    for path in ("README.md", "manifest.dsse.json"):
        body = once.look(remote, layout.version(name, n, path))
        if body is None:
            continue
        try:
            if path == "README.md":
                body.decode()
                if told is not None and sha256_bytes(body) != told:
                    raise IntegrityError("its sha256 is not what was announced")  # noqa: TRY301
            else:
                parse_json(body, path)
        except (IntegrityError, UnicodeDecodeError) as error:
            notes.append(f"{path} is damaged on the remote and was not taken: {getattr(error, 'why', None) or error}")
        else:
            found[path] = body
    if "README.md" not in found:
        found["README.md"] = card.render(manifest, name, n)
    return found, notes


def _write(path: Path, body: bytes) -> None:
    with disk.speaking(f"cannot write {shown(path.name)}"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            disk.write_all(descriptor, body)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
