"""`registry verify`: a version on a remote, a pulled folder or a published source, against its record."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from weighbridge.config.settings import RemoteSettings, Settings
from weighbridge.registry import control, layout, manifest
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import DAMAGED, Shelf, complete, copies, folder_of, known_as
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import IntegrityError, NotFoundError, UnreachableError, UsageError
from weighbridge.registry.findings import outcome
from weighbridge.registry.flow import mend as mending
from weighbridge.registry.flow import once, place
from weighbridge.registry.flow.claims import told_of
from weighbridge.registry.flow.resolve import Resolved
from weighbridge.registry.flow.verify import Checked, Reading, at_remote, verify_folder, verify_source, verify_version
from weighbridge.registry.refs import shown, split
from weighbridge.registry.types import Finding

SCHEMA: Final = "weighbridge/verify/1"
_MENDED: Final = ("file-missing", "file-size", "file-damaged", "manifest-damaged")
"""What a sound copy elsewhere mends."""

_PROVEN: Final = ("sha256-read", "sha256-server")
"""Levels at which a copy was found sound."""

_STYLES: Final = {"block": "red", "warn": "yellow", "note": "dim"}


@click.command("verify")
@click.argument("subject", metavar="REF|PATH", shell_complete=complete)
@click.option("--read", is_flag=True, help="Read every byte of a version, and keep nothing.")
@click.option("--quick", is_flag=True, help="Read only files for which the remote has no checksum of its own.")
@click.option("--mend", is_flag=True, help="First put back what is lost of a version and follows from the rest.")
@options.remote
@options.config
@options.talking
def verify(
    *, subject: str, read: bool, quick: bool, mend: bool, remote: str | None, config: str | None, out: Output
) -> int:
    """Compare a version, a pulled folder or a published source with its record, and name what differs.

    REF: in a folder every byte is read; behind a network names, sizes and the store's own checksums are compared
    without downloading anything, and what rests on less is told. PATH of a pulled folder: compared with its
    manifest.json, nobody is asked. PATH of a source folder: compared with what the daemon published from it. Ends 5
    when anything differs, and 8 when nothing does but of some files only the size is known.

    With --mend the decision comes back out of its claim, once every file was read, and card and history out of the
    decision; what is damaged lies in the way and stays until it is deleted, as the fix says. Nothing is put back that
    the team was not told of, and a number that was given up is given up again.
    """
    if read and quick:
        raise UsageError("--read and --quick exclude each other", fix="leave one of them out")
    if mend and remote is None and _is_path(subject):
        raise UsageError(
            f"{shown(subject)} is a path: only a version on its remote is mended",
            fix="name one such as name@v7",
        )
    if "/" in subject and remote is not None:
        raise UsageError(
            f"{shown(subject)} is a path: it is compared with its own manifest, and no remote is asked",
            fix="leave --remote out, or name a reference such as name@v7",
        )
    if remote is not None or not _is_path(subject):
        settings = context.settings(config)
        chosen = context.choose_remote(settings, remote)
        near = folder_of(chosen.url) is not None
        reading: Reading = "needed" if quick else "all" if read or near else "nothing"
        return _version(subject, chosen, settings, out, reading=reading, mend=mend)
    path = Path(subject)
    if not path.is_dir():
        raise NotFoundError(f"there is no folder {shown(subject)}", fix="name a pulled folder, or a reference")
    if (path / "manifest.json").is_file() or (path / place.UNFINISHED).exists():
        checked = verify_folder(path)
        return tell(checked, "folder", subject, known_as(checked.content, checked.manifest), out)
    return _source(path, context.settings(config), out)


def _is_path(subject: str) -> bool:
    """Tell a path from a reference: by a slash, or by being a folder whose name is no reference with a version."""
    if "/" in subject or subject in {".", ".."}:
        return True
    return "@" not in subject and ":" not in subject and os.path.isdir(subject)  # noqa: PTH112 - a word, not a path yet


def _version(ref: str, chosen: RemoteSettings, settings: Settings, out: Output, *, reading: Reading, mend: bool) -> int:
    with fresh.opened(chosen, out, ref=ref) as found:
        mended = _mend(found, ref, out) if mend else []
        version = _named(found, ref)
        told = found.read(lambda catalog: told_of(catalog, version.name, version.n))
        with following(out) as follower:
            checked = verify_version(
                found.remote,
                version.name,
                version.n,
                manifest_sha256=told.manifest,
                claim_sha256=told.claim,
                card_sha256=version.card,
                given_up=told.given_up,
                reading=reading,
                registry=found.registry,
                begin=follower.begin,
                progress=follower.moved,
            )
        damaged = any(finding.severity == "block" for finding in checked.findings)
        level = DAMAGED if damaged else checked.level
        if level is not None:
            fresh.remember(found, version.name, version.n, level)
        if any(wrong.code in _MENDED for wrong in checked.findings):
            checked = _with_cure(found, version.name, version.n, checked, settings)
        checked = at_remote(checked, found.settings.word)
    return tell(checked, "version", version.ref, version.ref, out, mended=mended)


def _named(found: fresh.Opened, ref: str) -> Resolved:
    """Return the version a reference means; one that a damaged decision or a lost void hides by its own number."""
    try:
        return found.resolve(ref)
    except (IntegrityError, NotFoundError) as error:
        name, n, _, _ = split(ref)
        if name is None or n is None:
            raise
        if isinstance(error, NotFoundError) and not found.read(lambda catalog: told_of(catalog, name, n)).given_up:
            raise
        return Resolved(name=name, n=n, content="")


def _mend(found: fresh.Opened, ref: str, out: Output) -> list[str]:
    """Put back what is lost of a version, and return the keys. Without a decision only its number names it."""
    name, n, _, _ = split(ref)
    if name is None or n is None:
        version = found.resolve(ref)
        name, n = version.name, version.n
    with following(out) as follower:
        done = mending.mend(
            found.remote, found.settings.name, found.registry, name, n,
            told=found.read(lambda catalog: told_of(catalog, name, n)), progress=follower.total,
        )  # fmt: skip
    for key in done:
        out.talk(f"put back: {shown(key)}", "yellow")
    if layout.version(name, n, "README.md") in done:
        out.talk(f"a README's own words are in the card only where a note has them: registry card {name}@v{n} --edit")
    if done:
        fresh.catch_up(found)
    return done


def _with_cure(found: fresh.Opened, name: str, n: int, checked: Checked, settings: Settings) -> Checked:
    """Let each fix name the command that brings a sound file, where another configured remote is known to hold it.

    Only a copy that was compared by hashes from here is called sound; of others the fix says how to find out.
    """
    shelf = Shelf(found.settings, found.catalog, found.registry.registry, time.time(), cached=False)
    row = found.read(lambda catalog: catalog.version(name, n))
    others = [] if row is None else copies(shelf, row, settings.remotes.values())[1:]
    there = [copy for copy in others if copy["state"] == "committed" and copy["verified"] != DAMAGED]
    sound = next((str(copy["remote"]) for copy in there if copy["verified"] in _PROVEN), None)
    maybe = next((str(copy["remote"]) for copy in there), None)
    claim = once.look(found.remote, layout.claim(name, n))
    at_home = claim is None or f'"registry":"{found.registry.registry}"'.encode() in claim
    if at_home and maybe is None:
        return checked
    ref, here = f"{name}@v{n}", found.settings.word
    look = "" if sound or maybe is None else f"registry verify {ref} --remote {maybe} tells whether its copy is sound; "
    source = sound or maybe or "HOME"
    if at_home:
        folder = f"{name}-v{n}"
        push = f"registry push {folder} --name {name} --remote {here}"
        if found.remote.properties.commits:  # a commit is not changed any more
            push = f'registry withdraw {ref} --remote {here} --reason "..." && {push} --again'
        again = f"registry pull {ref} {folder} --remote {source} && {push}"
    else:
        again = f"registry mirror {ref} --remote {source} --to {here}"

    def cure(wrong: Finding) -> str:
        if "registry push FOLDER" not in (wrong.fix or ""):  # it needs no folder
            return str(wrong.fix)
        if not (wrong.fix or "").startswith("delete "):
            return look + again
        key = wrong.subject if wrong.code == "manifest-damaged" else layout.version(name, n, wrong.subject)
        return f"{look}delete {shown(key)} on {here}, then: {again}"

    told = [
        msgspec.structs.replace(one, fix=cure(one)) if one.code in _MENDED and one.fix else one
        for one in checked.findings
    ]
    return msgspec.structs.replace(checked, findings=told)


def _source(path: Path, settings: Settings, out: Output) -> int:
    """Ask the daemon what it published from a folder, and compare."""
    try:
        told = control.ask(settings.daemon.socket, "recorded", {"path": os.path.realpath(path)})
    except UnreachableError as error:
        raise NotFoundError(
            f"{shown(str(path))} holds no manifest.json",
            why="it was not pulled, and no daemon can be asked whether it was published",
            fix="name a pulled folder or a reference, or start the daemon",
        ) from error
    sealed = manifest.parse(str(told["manifest"]).encode(), "the recorded manifest")
    ref = f"{told['name']}@v{told['n']}" if told.get("name") and told.get("n") else None
    return tell(verify_source(path, sealed), "source", str(path), ref, out)


def tell(checked: Checked, kind: str, subject: str, ref: str | None, out: Output, *, mended: Sequence[str] = ()) -> int:
    """Print the result and return the exit code: 5 when anything differs, 8 when something is not proven."""
    wrong = [finding for finding in checked.findings if finding.severity != "note"]
    unproven = not wrong and checked.levels.get("size", 0) > 0
    code = 5 if wrong else 8 if unproven else 0
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "kind": kind,
                "subject": subject,
                "ref": ref,
                "outcome": "wait" if unproven else outcome(checked.findings),
                "content": checked.content,
                "manifest_sha256": checked.manifest,
                "files": checked.files,
                "bytes": checked.bytes,
                "partial": checked.partial,
                "verified": checked.level,
                "levels": checked.levels,
                "mended": list(mended),
                "findings": [msgspec.to_builtins(finding) for finding in checked.findings],
            }
        )
        return code
    for found in checked.findings:
        word = out.paint(found.severity, _STYLES[found.severity])
        about = "" if found.subject in found.message else f"{found.subject}: "
        out.say_painted(f"{word}  ", f"{found.code}  {about}{found.message}")
        if found.fix:
            out.say(f"    fix: {found.fix}")
    count = "1 file" if checked.files == 1 else f"{checked.files} files"
    part = " (the part that was pulled)" if checked.partial else ""
    verdict = f"{len(wrong)} of its objects differ{'s' if len(wrong) == 1 else ''}" if wrong else _sound(checked)
    what = f"{subject} ({ref})" if ref is not None and ref != subject else subject
    out.say(f"{what}: {count}{part}, {size(checked.bytes)}, {verdict}")
    return code


def _sound(checked: Checked) -> str:
    """Say what "sound" rests on where that is less than every byte."""
    sizes, told = checked.levels.get("size", 0), checked.levels.get("sha256-told", 0)
    if sizes:
        some = "1 file has" if sizes == 1 else f"{sizes} files have"
        return f"nothing differs, but {some} no checksum there and only the size was compared (--quick reads such)"
    if told:
        some = "for 1 file" if told == 1 else f"for {told} files"
        return f"sound by the store's own checksums, {some} by the word of whoever published it (--quick reads such)"
    return "sound by the store's own checksums" if checked.levels.get("sha256-server") else "sound"
