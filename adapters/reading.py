"""Read the small parts of a tree once: JSON, safetensors headers, first bytes. Never a tensor, never a pickle."""

import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats import readers, safetensors, sniff
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.listing import File, Tree
from weighbridge.registry.errors import half_character

JSON_LIMIT: Final = 64 << 20
"""Bytes of the largest JSON document that is read."""

VALUES_LIMIT: Final = 256 << 20
"""Bytes of a whole model up to which every value is looked at by whoever only inspects; beyond, headers alone are read.
"""
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_TOKENS: Final = frozenset({"vocab.json", "tokenizer.json", "added_tokens.json"})
"""Their strings are pieces of text as a tokenizer cuts it, and become no facts."""


class Unreadable(NamedTuple):
    """Why a document could not be read."""

    problem: str


class Reader:
    """The documents, headers and containers of one tree, each read at most once.

    Whole models of up to `values` bytes may be read for their values; 0 says that neither they nor adapters may. With
    `averaged` a running average is taken where a checkpoint holds it beside the raw weights.
    """

    def __init__(self, tree: Tree, values: int = VALUES_LIMIT, *, averaged: bool = False) -> None:
        self.tree = tree
        self.values = values
        self.averaged = averaged
        self._documents: dict[str, Any] = {}
        self._headers: dict[str, safetensors.Header] = {}
        self._containers: dict[str, str] = {}
        self._directories: dict[str, Directory | FormatFault] = {}
        self.notes: dict[tuple[str, str], Any] = {}
        """What others worked out of a file, by their own name and its path."""

    def document(self, file: File) -> Any:
        """Return a file's JSON value, or an Unreadable."""
        if file.path not in self._documents:
            self._documents[file.path] = _document(file)
        return self._documents[file.path]

    def table(self, file: File | None) -> dict[str, Any] | None:
        """Return a file's JSON object; None where there is no file or it holds no object."""
        value = self.document(file) if file is not None else None
        return value if isinstance(value, dict) else None

    def header(self, file: File) -> safetensors.Header:
        """Return a safetensors header, sound or with its faults."""
        if file.path not in self._headers:
            try:
                self._headers[file.path] = safetensors.read(Path(file.source))
            except OSError as error:
                fault = safetensors.Fault(
                    "file-empty", f"it cannot be read: {error.strerror}", {"file_bytes": file.size}
                )
                self._headers[file.path] = safetensors.Header(0, 0, {}, None, (fault,))
        return self._headers[file.path]

    def container(self, file: File) -> str:
        """Return what a file is by content; `dead-link` for a link to nothing, `unreadable` where opening fails."""
        if file.path not in self._containers:
            if file.link is not None:
                self._containers[file.path] = "dead-link"
            else:
                try:
                    self._containers[file.path] = sniff.container(Path(file.source))
                except OSError:
                    self._containers[file.path] = "unreadable"
        return self._containers[file.path]

    def directory(self, file: File) -> Directory | FormatFault:
        """Return what a container lists, or the fault that forbids to read it."""
        if file.path not in self._directories:
            try:
                self._directories[file.path] = readers.read(Path(file.source))
            except FormatFault as fault:
                self._directories[file.path] = fault
            except OSError as error:
                self._directories[file.path] = FormatFault(
                    "file-unreadable", f"it cannot be read: {error.strerror}", file_bytes=file.size
                )
        return self._directories[file.path]

    def head(self, file: File, count: int = sniff.HEAD) -> bytes:
        """Return a file's first bytes, nothing where it cannot be read."""
        try:
            return contents(Path(file.source), count)
        except OSError:
            return b""

    def text(self, file: File, limit: int = 1 << 20) -> str:
        """Return a file's first bytes as text, with marks where they are not UTF-8."""
        return self.head(file, limit).decode("utf-8", "replace")


class Place(NamedTuple):
    """One folder of a tree and the reader that opens its files."""

    reader: Reader
    folder: str

    @property
    def names(self) -> dict[str, File]:
        """The files directly in the folder, by name."""
        return self.reader.tree.inside(self.folder)

    def path(self, name: str) -> str:
        """Return the path from the root of something in this folder."""
        return name if self.folder == "." else f"{self.folder}/{name}"

    def table(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object of a file of this folder, or None."""
        return self.reader.table(self.reader.tree.files.get(self.path(name)))


def table_at(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file outside any tree, None where it holds none that `Reader.table` would return.

    A pipe is not waited for, nothing beyond JSON_LIMIT is read, and no nesting is too deep. Nothing is raised.
    """
    value = _document(File(path.name, os.fspath(path), 0))
    return value if isinstance(value, dict) else None


def _document(file: File) -> Any:
    if file.link is not None:
        return Unreadable("it is a link to nothing")
    if file.size > JSON_LIMIT:
        return Unreadable(f"it has {file.size} bytes, the limit is {JSON_LIMIT}")
    try:
        stored = contents(Path(file.source), JSON_LIMIT)
    except OSError as error:
        return Unreadable(f"it cannot be read: {error.strerror}")
    if not stored:
        return Unreadable("it is empty")
    if sniff.pointer(stored) is not None:
        return Unreadable("it is a Git LFS pointer")
    try:
        document = json.loads(stored.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unreadable(f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        return Unreadable(f"not valid JSON: {error.msg} at line {error.lineno}")
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not valid JSON: {error}")
    half = half_character(document) if _HALF.search(stored) and file.name not in _TOKENS else None
    return document if half is None else Unreadable(f"{half} is half a character, which no other program can hold")
