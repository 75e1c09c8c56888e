"""The manifest: the immutable document that lists a bundle's files and facts, sealed once and read for ever.

Canonical JSON: sorted keys, compact, UTF-8, NaN and infinities as strings, no duplicate keys, NFC paths. The digest
of a manifest is always that of its bytes as stored, never of a re-serialisation; unknown fields stay in `document`.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.registry import types
from weighbridge.registry.errors import IntegrityError, UsageError
from weighbridge.registry.hashing import content_digest, sha256_bytes, sha256_file
from weighbridge.registry.refs import check_paths, shown

SIZE_LIMIT: Final = 16 << 20
"""Bytes of the largest manifest that is read."""

_INT_EXACT: Final = 1 << 63


@dataclass(frozen=True)
class Manifest:
    """A sealed manifest: typed facts beside the exact bytes they were read from."""

    stored: bytes
    document: dict[str, Any]
    kind: str
    content: str
    files: tuple[types.FileEntry, ...]
    facts: types.Facts
    tool: types.Tool

    @cached_property
    def digest(self) -> str:
        """The lower-case hex sha256 of the manifest as stored."""
        return sha256_bytes(self.stored)

    @property
    def size(self) -> int:
        """Bytes of all payload files."""
        return sum(f.size for f in self.files)


def canonical(value: Any) -> bytes:
    """Return canonical JSON bytes of a value; floats that JSON lacks become the strings NaN, Infinity, -Infinity."""
    return json.dumps(
        _jsonable(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


def parse_json(stored: bytes, what: str) -> Any:
    """Return the value of strict JSON bytes. Raises IntegrityError on duplicate keys, bare NaN or bad syntax."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a key stands twice in one object")
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(stored.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{shown(what)} is damaged", why=f"it is not the JSON that was written: {error}"
        ) from error


def seal(files: Iterable[types.FileEntry], facts: types.Facts) -> Manifest:
    """Return the manifest of a bundle. Raises UsageError for unsafe paths and an unknown kind, format or role."""
    entries = sorted(files, key=lambda f: f.path.encode())
    check_paths([f.path for f in entries])
    if facts.kind not in types.KINDS:
        raise UsageError(f"'{shown(facts.kind)}' is no kind", why=f"kinds are {', '.join(types.KINDS)}")
    if facts.weights.format not in types.WEIGHT_FORMATS:
        raise UsageError(
            f"weights in {shown(facts.weights.format)} are not published",
            why=f"formats are {', '.join(types.WEIGHT_FORMATS)}",
        )
    strange = next((f for f in entries if f.role not in types.ROLES), None)
    if strange is not None:
        raise UsageError(
            f"'{shown(strange.role)}' of {shown(strange.path)} is no role", why=f"roles are {', '.join(types.ROLES)}"
        )
    rendered = [f.path for f in entries if f.path in types.RENDERED_FILES]
    if rendered:
        raise UsageError(f"'{rendered[0]}' is rendered and cannot be payload")
    from weighbridge import __version__  # noqa: PLC0415  the only place that records who sealed

    document = msgspec.to_builtins(facts)
    document |= {
        "schema": types.SCHEMA_MANIFEST,
        "content": content_digest(entries),
        "files": msgspec.to_builtins(entries),
        "tool": {"name": "weighbridge", "version": __version__},
    }
    return parse(canonical(document))


def parse(stored: bytes, what: str = "manifest.json") -> Manifest:
    """Return the manifest in these bytes.

    Raises IntegrityError when they are not one, when a path is unsafe, or when the content digest does not follow from
    the file list; UsageError when a newer version of the format is needed.
    """
    if len(stored) > SIZE_LIMIT:
        raise IntegrityError(f"{shown(what)} is too large", why=f"{len(stored)} bytes, the limit is {SIZE_LIMIT}")
    document = parse_json(stored, what)
    if not isinstance(document, dict):
        raise IntegrityError(f"{shown(what)} is damaged", why="it is not a JSON object")
    schema = document.get("schema")
    if schema != types.SCHEMA_MANIFEST:
        if isinstance(schema, str) and schema.startswith("weighbridge/manifest/"):
            raise UsageError(
                f"{shown(what)} was written by a newer version",
                why=f"its schema is {shown(schema)}",
                fix="upgrade weighbridge",
            )
        raise IntegrityError(f"{shown(what)} is no manifest", why="it has no manifest schema")
    try:
        files = tuple(msgspec.convert(document["files"], list[types.FileEntry]))
        facts = msgspec.convert(document, types.Facts)
        tool = msgspec.convert(document["tool"], types.Tool)
        check_paths([f.path for f in files])
    except (KeyError, msgspec.ValidationError, UsageError) as error:
        raise IntegrityError(f"{shown(what)} is damaged", why=str(error)) from error
    content = content_digest(files)
    if document.get("content") != content:
        raise IntegrityError(
            f"{shown(what)} is damaged", why=f"its content digest does not follow from its file list ({content})"
        )
    for entry in files:
        if len(entry.sha256) != 64 or not 0 <= entry.size < _INT_EXACT:
            raise IntegrityError(f"{shown(what)} is damaged", why=f"the entry of {shown(entry.path)} is not valid")
    return Manifest(
        stored=stored, document=document, kind=facts.kind, content=content, files=files, facts=facts, tool=tool
    )


def verify(manifest: Manifest, folder: Path) -> list[types.Finding]:
    """Return what differs between a folder and the manifest: missing, extra, short and damaged files, each named.

    The card, training.json, manifests and signatures are not payload and are not compared. Raises OSError.
    """
    found: list[types.Finding] = []
    listed = {f.path: f for f in manifest.files}
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if name not in listed and name not in types.RENDERED_FILES:
            found.append(_difference("file-extra", name, f"{shown(name)} is not in the manifest"))
    for entry in manifest.files:
        path = folder / entry.path
        if path.is_symlink() or not path.is_file():
            found.append(_difference("file-missing", entry.path, f"{shown(entry.path)} is missing"))
        elif (size := path.stat().st_size) != entry.size:
            found.append(
                _difference(
                    "file-size", entry.path, f"{shown(entry.path)} has {size} bytes, the manifest says {entry.size}"
                )
            )
        elif (sha256 := sha256_file(path)) != entry.sha256:
            found.append(
                _difference(
                    "file-damaged",
                    entry.path,
                    f"{shown(entry.path)} has sha256 {sha256[:12]}, the manifest says {entry.sha256[:12]}",
                )
            )
    return found


def _difference(code: str, subject: str, message: str) -> types.Finding:
    # A pull goes into no folder with a file that is nobody's, not even with --force.
    fix = "remove it, or move it away" if code == "file-extra" else "pull the version again, or restore the file"
    return types.Finding(code=code, severity="block", subject=subject, message=message, fix=fix)
