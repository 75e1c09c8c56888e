"""`registry card`: a version's model card, and the part of it that people write."""

import os
import sys
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from weighbridge.registry import card as cards
from weighbridge.registry import layout
from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.catalogue import complete
from weighbridge.registry.cli.fresh import Opened
from weighbridge.registry.cli.output import Output, write
from weighbridge.registry.errors import NotFoundError, UsageError
from weighbridge.registry.flow import notes, once
from weighbridge.registry.flow.pull import checked_manifest
from weighbridge.registry.flow.resolve import Resolved
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.types import LicenseFacts

SCHEMA: Final = "weighbridge/card/1"


@click.command("card")
@click.argument("ref", shell_complete=complete)
@click.option("--edit", is_flag=True, help="Edit the part people write, in VISUAL or EDITOR.")
@click.option("--file", "source", metavar="FILE", help="Take the part people write from a file, '-' for stdin.")
@click.option("--license", "license_", metavar="ID", help="Say which licence it has, as the Hub spells it.")
@click.option("--why", metavar="TEXT", help="Why, for the record; needed with --license.")
@options.remote
@options.config
@options.talking
def card(
    *,
    ref: str,
    edit: bool,
    source: str | None,
    license_: str | None,
    why: str | None,
    remote: str | None,
    config: str | None,
    out: Output,
) -> None:
    """Print the model card of a version, or change what people say on it.

    What is sealed never changes: words and licence are notes beside the version, shown on its card and carried on to
    the cards of later versions.
    """
    if license_ is not None and not why:
        raise UsageError("a licence needs a reason", fix="--license ID --why 'the base model changed its licence'")
    chosen = context.choose_remote(context.settings(config), remote)
    with fresh.opened(chosen, out, ref=ref) as found:
        version = found.resolve(ref)
        manifest = checked_manifest(found.remote, version.name, version.n, version.manifest)
        changed = False
        if edit or source is not None:
            before = notes.people(found.remote, version.name, version.n)
            if before is None:
                before = cards.split_people(_text(found, version, manifest).encode())
            after = _words(before, version, source)
            if after.strip() == before.strip():
                out.talk("nothing changed")
            else:
                _note(found, version, "card", after, why)
                out.talk(f"kept; it stands on the card of {version.ref} and on those of later versions")
                changed = True
        if license_ is not None:
            _note(found, version, "license", license_, why)
            out.talk(f"{version.ref} has the licence {license_} from now on")
            changed = True
        if changed:
            fresh.catch_up(found)
            if out.as_json:
                out.json(_document(found, version, _text(found, version, manifest)))
        elif not edit and source is None:
            text = _text(found, version, manifest)
            if out.as_json:
                out.json(_document(found, version, text))
            else:
                write(text)


def _text(found: Opened, version: Resolved, manifest: Manifest) -> str:
    """Return the card: as it was published, or rendered with what people have said since."""
    said = notes.read(found.remote, version.name, version.n)
    if not said:
        stored = once.look(found.remote, layout.version(version.name, version.n, "README.md"))
        if stored is not None and (version.card is None or sha256_bytes(stored) == version.card):
            return stored.decode("utf-8", "replace")
    people = notes.people(found.remote, version.name, version.n)
    note = notes.license_of(said)
    told = LicenseFacts(id=note.text, source="note", evidence=f"{note.who}: {note.why}") if note else None
    return cards.render(manifest, version.name, version.n, people=people, license=told).decode()


def _document(found: Opened, version: Resolved, text: str) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "ref": version.ref,
        "name": version.name,
        "version": version.n,
        "text": text,
        "notes": [
            {k: v for k, v in msgspec.to_builtins(note).items() if k not in {"schema", "nonce"}}
            for note in notes.read(found.remote, version.name, version.n)
        ],
    }


def _note(found: Opened, version: Resolved, kind: Literal["card", "license"], text: str, why: str | None) -> None:
    notes.add(
        found.remote,
        found.registry,
        version.name,
        version.n,
        kind,
        text=text,
        who=fresh.whoami(found.settings),
        why=why,
    )


def _words(before: str, version: Resolved, source: str | None) -> str:
    """Return people's words from a file, stdin or an editor."""
    if source is not None:
        return sys.stdin.read() if source == "-" else _file(source)
    if not sys.stdin.isatty() and not (os.environ.get("VISUAL") or os.environ.get("EDITOR")):
        raise UsageError("there is no terminal for an editor", fix=f"registry card {version.ref} --file FILE")
    try:
        edited = click.edit(before, extension=".md")
    except click.ClickException as error:
        raise UsageError(
            "the editor did not work, nothing was changed",
            why=error.format_message(),
            fix=f"set VISUAL or EDITOR to an editor, or: registry card {version.ref} --file FILE",
        ) from error
    return before if edited is None else edited


def _file(source: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {source}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text", why=str(error)) from error
