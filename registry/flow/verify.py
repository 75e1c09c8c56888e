"""Comparing what lies somewhere with its record: a version on its remote, a pulled folder, a published source."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from weighbridge.registry import card, layout
from weighbridge.registry import manifest as manifests
from weighbridge.registry.errors import IntegrityError, MissingError, NotFoundError, UsageError
from weighbridge.registry.findings import finding
from weighbridge.registry.flow import once, place
from weighbridge.registry.flow.claims import Told, decode, from_copy, standing
from weighbridge.registry.flow.decision import settled
from weighbridge.registry.flow.fetch import Progress
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.hashing import sha256_bytes, sha256_file
from weighbridge.registry.manifest import Manifest, parse, parse_json
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.protocol import Remote, Stat
from weighbridge.registry.types import RENDERED_FILES, FileEntry, Finding, Registry, Value

Reading = Literal["all", "needed", "nothing"]
"""Which payload files are read: all; those for which the remote has no checksum of its own; next to none."""

LEVELS: Final = ("sha256-read", "sha256-server", "sha256-told", "size")
"""How a file was compared: every byte, by the remote's own checksum, by one that rests on the word of whoever
published it, by its size alone; the weakest last."""

SMALL: Final = 16 << 20
"""Bytes up to which a file without any checksum is read after all: of large ones that is for the user to say."""

_COPY = "restore it from a copy of the remote: a mirror holds the same object"
"""What mends an object that nobody can make anew."""

MENDING: Final = " --mend"
"""Ends a fix that is `registry verify REF --mend`: what was lost follows from the rest (`mend.mend`)."""


class Checked(Value, frozen=True):
    """What a check looked at: the manifest's digest and content (None when there is none), and what differs.

    `levels` says how many files were compared in which of the ways of `LEVELS`.
    """

    manifest: str | None
    content: str | None
    files: int
    bytes: int
    partial: bool
    levels: dict[str, int]
    findings: list[Finding]

    @property
    def level(self) -> str | None:
        """The weakest way in which a file was compared; None when none was."""
        return next((level for level in reversed(LEVELS) if self.levels.get(level)), None)


class _Look(NamedTuple):
    """How one file was compared, and what is wrong with it."""

    level: str | None
    wrong: Finding | None


def verify_version(
    remote: Remote,
    name: str,
    n: int,
    *,
    manifest_sha256: str | None = None,
    claim_sha256: str | None = None,
    card_sha256: str | None = None,
    given_up: bool = False,
    reading: Reading = "all",
    registry: Registry | None = None,
    begin: Callable[[Sequence[FileEntry]], None] | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Compare a committed version on its remote with claim, manifest and announcement.

    The three digests, and that its number was `given_up`, are what the team was told, where it was. Unless all is read,
    the remote's own checksums count where it has them; where that is not known, it is tried out first, if we may write
    into its `registry`. With "nothing" the other files are compared by what is told of them, else by size where they
    are large, which proves nothing: see `levels`. Small ones without a checksum, and those of which something else is
    told, are read all the same. `begin` is called with the files before the first byte. Raises NotFoundError and
    WithdrawnError for a version
    that is not there, and what the remote raises; damage is returned.
    """
    told = Told(claim=claim_sha256, manifest=manifest_sha256, given_up=given_up)
    try:
        manifest = checked_manifest(remote, name, n, manifest_sha256)
    except IntegrityError as error:
        return _damaged(remote, name, n, told, error)
    except NotFoundError:
        key = layout.manifest(name, n)
        if (manifest_sha256 is None and not given_up) or once.look(remote, key) is not None:
            raise
        fix = from_copy(key, f"{name}@v{n}") if given_up else _again(remote, name, n, told)
        return _unreadable(key, f"{key} is missing, though the team was told of it", fix)
    if reading != "all" and registry is not None:
        with suppress(UsageError):
            check_writer(registry)
            remote.learn()
    if begin is not None:
        begin(manifest.files)
    folder = layout.version(name, n)
    there = {stat.key.removeprefix(folder): stat for stat in remote.list(folder)}
    listed = {file.path: file for file in manifest.files}
    found = _claim(remote, name, n, manifest, claim_sha256)
    found += [
        finding("file-extra", path, f"{shown(path)} is not in the manifest", "remove the object")
        for path in sorted(set(there) - set(listed) - set(RENDERED_FILES))
    ]

    def one(file: FileEntry) -> _Look:
        look = _compare(remote, folder + file.path, file, there.get(file.path), reading=reading, progress=progress)
        if look.wrong is None:
            return look
        again = (
            _put_back(remote, name, n) if look.wrong.code == "file-missing" else _replace(remote, name, n, file.path)
        )
        return look._replace(wrong=msgspec.structs.replace(look.wrong, fix=again))

    with ThreadPoolExecutor(max(1, remote.properties.parallel), thread_name_prefix="verify") as pool:
        looks = list(pool.map(one, manifest.files))
    found += [look.wrong for look in looks if look.wrong is not None]
    found += _rendered(remote, name, n, manifest, card_sha256)
    levels = Counter(look.level for look in looks if look.level is not None)
    return _checked(manifest, found, manifest.files, levels=levels)


def _unreadable(key: str, words: str, fix: str) -> Checked:
    wrong = finding("manifest-damaged", key, words, fix)
    return Checked(manifest=None, content=None, files=0, bytes=0, partial=False, levels={}, findings=[wrong])


def _damaged(remote: Remote, name: str, n: int, told: Told, error: IntegrityError) -> Checked:
    """Return what is wrong with a decision, or with its claim where that is the one of the two that is known to be."""
    key, words = layout.manifest(name, n), f"{error.what}: {error.why}"
    if told.given_up:
        return _unreadable(key, words, from_copy(key, f"{name}@v{n}"))
    again = _again(remote, name, n, told)
    if remote.properties.commits:
        return _unreadable(error.what.split(" ", 1)[0], words, again)
    stored = once.look(remote, layout.claim(name, n))
    stands = "unknown" if stored is None else standing(remote, name, n, stored, told)
    try:
        settled(remote, name, n, once.look(remote, key) or b"")
    except IntegrityError:
        pass  # it cannot be right
    else:
        if stands == "wrong" and told.manifest is None:
            claim = layout.claim(name, n)
            words = f"{claim} is not the one that was announced, or that the next one follows"
            found = finding("claim-damaged", claim, words, from_copy(claim))
            return msgspec.structs.replace(_unreadable(key, words, again), findings=[found])
        if stands == "unknown" and told.manifest is None:
            return _unreadable(
                key, words, f"keep it, and {layout.claim(name, n)}: a copy of the remote has the right one"
            )
    return _unreadable(key, words, f"delete {shown(key)} on the remote, then: {again}")


def _put_back(remote: Remote, name: str, n: int) -> str:
    """Return what brings back a file that is lost, by whoever has the folder."""
    if remote.properties.commits:  # a commit is not changed any more
        return f'registry withdraw {name}@v{n} --reason "...", then registry push FOLDER --name {name} --again'
    return f"registry push FOLDER --name {name}, with the folder it was published from, puts back just these bytes"


def _replace(remote: Remote, name: str, n: int, path: str) -> str:
    """Return what helps against an object with other bytes, as nothing that lies there is ever overwritten."""
    again = _put_back(remote, name, n)
    if remote.properties.commits:
        return again
    way = f"delete {shown(layout.version(name, n, path))} on the remote, then: {again}"
    return f'{way}; or registry withdraw {name}@v{n} --reason "..." and that push with --again: a new number'


def _again(remote: Remote, name: str, n: int, told: Told) -> str:
    """Return what makes a decision again: its claim, which comes back first where it is known to be another one.

    Without a claim the files' owner does. Whether the files are whole is for whoever makes it again to see.
    """
    key = layout.claim(name, n)
    claim = None if remote.properties.commits else once.look(remote, key)
    if claim is None:
        return _put_back(remote, name, n)
    with suppress(IntegrityError, UsageError):
        decode(claim, key)
        if standing(remote, name, n, claim, told) != "wrong":
            return _mending(name, n)
    return from_copy(key)


def _mending(name: str, n: int) -> str:
    return f"registry verify {name}@v{n}{MENDING}"


def _claim(remote: Remote, name: str, n: int, manifest: Manifest, told: str | None) -> list[Finding]:
    key = layout.claim(name, n)
    stored = once.look(remote, key)
    try:
        document = parse_json(stored, key) if stored is not None else None
    except IntegrityError:
        document = None
    if isinstance(document, dict) and document.get("manifest") == manifest.stored.decode():
        if told is None or stored is None or sha256_bytes(stored) == told:
            return []
        return [finding("claim-damaged", key, f"{key} is not the claim that was announced", from_copy(key))]
    words = f"{key} is missing" if stored is None else f"{key} does not hold the manifest that was committed"
    return [finding("claim-damaged", key, words, from_copy(key))]


def _compare(
    remote: Remote, key: str, file: FileEntry, stat: Stat | None, *, reading: Reading, progress: Progress | None
) -> _Look:
    if stat is None:
        return _Look(None, finding("file-missing", file.path, f"{shown(file.path)} is missing", None))
    if stat.size != file.size:
        words = f"{shown(file.path)} has {stat.size} bytes, the manifest says {file.size}"
        return _Look("size", finding("file-size", file.path, words, None))
    try:
        if reading != "all":
            stat = remote.stat(key) if stat.sha256 is None else stat
        if reading != "all" and stat.sha256 is not None:
            found, level = stat.sha256, "sha256-server"
        elif reading == "nothing" and stat.told == file.sha256:
            return _Look("sha256-told", None)
        elif reading == "nothing" and stat.told is None and file.size > SMALL:
            return _Look("size", None)
        else:
            found, level = _read(remote, key, file, progress), "sha256-read"
    except MissingError:
        return _Look(None, finding("file-missing", file.path, f"{shown(file.path)} is missing", None))
    if found != file.sha256:
        words = f"{shown(file.path)} has sha256 {found[:12]}, the manifest says {file.sha256[:12]}"
        return _Look(level, finding("file-damaged", file.path, words, None))
    return _Look(level, None)


def _read(remote: Remote, key: str, file: FileEntry, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    for chunk in remote.fetch(key):
        digest.update(chunk)
        if progress is not None:
            progress(file.path, len(chunk))
    return digest.hexdigest()


def _rendered(remote: Remote, name: str, n: int, manifest: Manifest, card_sha256: str | None) -> list[Finding]:
    again = None if remote.properties.commits else _mending(name, n)

    def instead(path: str) -> str | None:
        return f"delete {layout.version(name, n, path)} on the remote, then: {again}" if again is not None else None

    found = []
    text = once.look(remote, layout.version(name, n, "README.md"))
    if text is None:
        fix = f"{_COPY}, with people's words; or {again}" if again is not None else _COPY
        found.append(finding("file-missing", "README.md", "the card is missing", fix))
    elif card_sha256 is not None and sha256_bytes(text) != card_sha256:
        fix = f"{_COPY}, with people's words; or {instead('README.md')}" if again is not None else _COPY
        found.append(finding("card-damaged", "README.md", "the card is not the one that was announced", fix))
    history = once.look(remote, layout.version(name, n, "training.json"))
    if history is None and manifest.facts.provenance.history is not None:
        found.append(finding("history-differs", "training.json", "training.json is missing", again))
    if history is not None and history != card.training(manifest):
        try:
            parse_json(history, "training.json")
        except IntegrityError as error:
            words = f"{error.what}: {error.why}"
            found.append(finding("file-damaged", "training.json", words, instead("training.json")))
        else:
            words = "training.json is not what follows from the manifest"
            found.append(finding("history-differs", "training.json", words, None))
    return found


def at_remote(checked: Checked, remote: str) -> Checked:
    """Let the command that mends a version name the remote that was looked at."""
    told = [
        msgspec.structs.replace(one, fix=f"{one.fix.removesuffix(MENDING)} --remote {remote}{MENDING}")
        if one.fix and one.fix.endswith(MENDING)
        else one
        for one in checked.findings
    ]
    return msgspec.structs.replace(checked, findings=told)


def verify_folder(path: Path) -> Checked:
    """Compare a pulled folder with the manifest.json in it. Raises NotFoundError where there is none."""
    file = path / "manifest.json"
    unfinished = (path / place.UNFINISHED).exists()
    if not file.is_file() and not unfinished:
        raise NotFoundError(
            f"{shown(str(path))} holds no manifest.json",
            why="it was not pulled",
            fix="name a pulled folder, or a reference",
        )
    found = []
    if unfinished:
        words = "a pull into this folder was cut short"
        found.append(finding("pull-unfinished", place.UNFINISHED, words, "run the same pull again"))
    try:
        manifest = parse(file.read_bytes()) if file.is_file() else None
    except IntegrityError as error:
        found.append(finding("manifest-damaged", "manifest.json", f"{error.what}: {error.why}", "pull it again"))
        manifest = None
    if manifest is None:
        return Checked(manifest=None, content=None, files=0, bytes=0, partial=False, levels={}, findings=found)
    selected = place.selection(path)
    for wrong in manifests.verify(manifest, path):
        ours = wrong.code == "file-extra" and wrong.subject in place.OURS
        left_out = wrong.code == "file-missing" and selected is not None and wrong.subject not in selected
        if not ours and not left_out:
            found.append(wrong)
    files = [f for f in manifest.files if selected is None or f.path in selected]
    return _checked(manifest, found, files, partial=selected is not None)


def verify_source(path: Path, manifest: Manifest) -> Checked:
    """Compare a source folder with what was published from it: files that went, or changed since, are named.

    Files that were published with rewritten paths are not compared, nor those that were made out of other files; what
    the folder holds beyond the manifest was left out and is not looked at. Raises OSError.
    """
    rewritten = {f.subject for f in manifest.facts.findings if f.code == "private-path-rewritten"}
    relations = {edge.relation for edge in manifest.facts.lineage}
    converted = bool(relations & {"converted-from", "extracted-from"})
    files = [
        file
        for file in manifest.files
        if file.path not in rewritten and not (converted and file.role in {"weights", "index"})
    ]
    found = []
    for file in files:
        source = path / file.path
        if "extracted-from" in relations and not source.exists():
            source = path.parent / file.path  # papers of the folder above go along
        if not source.is_file():
            words = f"{shown(file.path)} is gone from the source"
        elif source.stat().st_size != file.size or sha256_file(source) != file.sha256:
            words = f"{shown(file.path)} has changed since it was published"
        else:
            continue
        found.append(finding("source-drift", file.path, words, "publish the folder again, or restore the file"))
    return _checked(manifest, found, files)


def _checked(
    manifest: Manifest,
    found: list[Finding],
    files: Sequence[FileEntry],
    *,
    partial: bool = False,
    levels: Mapping[str, int] | None = None,
) -> Checked:
    return Checked(
        manifest=manifest.digest,
        content=manifest.content,
        files=len(files),
        bytes=sum(f.size for f in files),
        partial=partial,
        levels={"sha256-read": len(files)} if levels is None else dict(levels),
        findings=found,
    )
