"""Rules of the container: files that are cut off, damaged, pointers, links to nothing, or another format than named."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from weighbridge.adapters import layout
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.registry.refs import path_fault
from weighbridge.registry.types import Finding

_SUFFIXES: Final = {
    "safetensors": ".safetensors", "torch-zip": ".bin", "torch-legacy": ".bin", "pickle": ".bin", "gguf": ".gguf",
    "onnx": ".onnx", "hdf5": ".h5", "tflite": ".tflite", "npz": ".npz", "zip": ".zip", "torchscript": ".pt",
}  # fmt: skip
_STAGE: Final = "container"
_FETCHED: Final = 8
"""Files of one cause that are named in commands."""

CUT: Final = ("file-short", "file-empty", "header-cut", "zip-cut", "pickle-cut", "record-short", "record-missing")
DAMAGED: Final = (
    "header-too-large", "header-damaged", "tensor-invalid", "tensors-overlap", "data-hole", "file-long", "zip-damaged",
    "zip-duplicate", "zip-encrypted", "zip-too-large", "not-zip", "not-torch", "record-compressed", "record-damaged",
    "storage-mismatch", "pickle-damaged", "pickle-too-large", "pickled-array", "container-damaged", "not-recognised",
    "byteorder-unknown", "tensor-unknown", "tensor-outside", "tensor-expanded", "tensor-incomplete", "views-multiply",
    "metadata-damaged", "file-unreadable", "not-a-file", "path-unsafe",
)  # fmt: skip


def again(case: Case, one: Finding) -> tuple[str, ...]:
    """Fetch what a finding is about once more: the files it misses, the one it found at fault, else its subject."""
    return tuple(commands.fetch(path) for path in _wanted(case, one)[:_FETCHED])


def _wanted(case: Case, one: Finding) -> list[Path]:
    """Return the paths that a finding asks for; names in files that lead out of the folder ask for nothing."""
    missing = one.data.get("missing_files")
    if isinstance(missing, list) and missing:
        return [case.path(str(path)) for path in missing]
    subject = case.path(one.subject)
    if one.subject == "." and Path(case.artifact.root).is_file():
        return []  # the one file that was asked about is there, and is no weights
    inner = one.data.get("file")
    if not isinstance(inner, str) or inner == one.subject:
        return [subject]
    # A list of pieces (.metadata, an ONNX graph, a package) says where they lie counted from itself.
    return [(subject if subject.is_dir() else subject.parent) / inner] if path_fault(inner) is None else []


def _pull(case: Case, one: Finding) -> tuple[str, ...]:
    path = case.path(one.subject)
    if commands.origin(path) is not None:
        return (commands.fetch(path),)
    return (f"git -C {commands.quoted(path.parent)} lfs pull",)


def _part(case: Case, one: Finding) -> tuple[str, ...]:
    """Join the byte parts of a file where all of them are there, else fetch what is missing."""
    if one.code != "byte-parts":
        return again(case, one)
    whole = case.path(one.subject)
    parts = sorted((name for name in case.names if layout.byte_part(name) == whole.name), key=_numbered)
    return (f"cat {' '.join(commands.quoted(whole.with_name(name)) for name in parts)} > {commands.quoted(whole)}",)


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return the key by which part 10 comes after part 9."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split("([0-9]+)", name)]


def _rename(case: Case, one: Finding) -> tuple[str, ...]:
    told: list[str] = []
    table = one.data.get("true_formats")
    for path, kind in sorted(table.items()) if isinstance(table, dict) else ():
        suffix = _SUFFIXES.get(str(kind))
        if suffix is not None:
            place = case.path(path)
            told.append(commands.move(place, place.with_suffix(suffix)))
            if suffix == ".bin":
                told.append(commands.extract(place.with_suffix(suffix)))
    return tuple(told)


def _wait(case: Case, _: Finding) -> tuple[str, ...]:
    return (commands.inspect(case.folder),)


def _mark(case: Case, one: Finding) -> tuple[str, ...]:
    return (commands.mark_format(case.path(one.subject)),)


def _old_gguf(case: Case) -> Iterable[Evidence]:
    for one in case.findings:
        if one.code in {"gguf-version", "ggml-legacy", "big-endian"}:
            yield Evidence(one.subject, one.message, (), None, one.fix, one.code, one.data)


RULES: Final = (
    linked(
        "file-cut", _STAGE, "block", ("file-broken", "files-missing", "config-broken"), CUT,
        "a weights file is empty or ends before its header says",
        "copy or download the file again; nothing of it can be trusted",
        again,
    ),
    linked(
        "file-damaged", _STAGE, "block", ("file-broken",), DAMAGED,
        "a weights file does not keep to its format",
        "save or copy the file again",
        again,
    ),
    linked(
        "pointer-not-fetched", _STAGE, "block", ("file-broken", "config-broken", "unsafe-pickle", "tokenizer-broken"),
        ("lfs-pointer",),
        "a Git LFS pointer of a hundred bytes lies where the weights should",
        "fetch what the pointer stands for",
        _pull,
    ),
    linked(
        "link-to-nothing", _STAGE, "block", ("files-missing", "file-broken"), ("link-dangling",),
        "a file is a link whose target is gone, as after a cache was cleaned",
        "fetch the file again, or copy the real file here",
        again,
    ),
    linked(
        "other-format", _STAGE, "block", ("file-broken", "unsafe-pickle"), ("suffix-lies",),
        "a file is another format than its name says, and loaders go by the name",
        "give the file its true suffix",
        _rename,
    ),
    linked(
        "json-unreadable", _STAGE, "block", ("config-broken", "files-missing", "tokenizer-broken"), ("json-damaged",),
        "a config is empty or no valid JSON",
        "write the file again, from the same save",
        again,
    ),
    linked(
        "format-mark", _STAGE, "warn", ("format-mark-missing", "file-broken"), ("format-metadata-missing",),
        "the safetensors header does not say format=pt",
        "write the file again with the mark; the weights themselves are fine",
        _mark,
    ),
    linked(
        "not-finished", _STAGE, "block", ("files-missing", "file-broken", "missing-keys", "zero-ranks"),
        ("still-writing", "end-mark-missing", "staging-name", "metadata-missing", "still-open"),
        "the folder is still being written, or its writer was killed",
        "wait for the writer; if there is none any more, take an earlier checkpoint",
        _wait,
    ),
    Rule(
        "container-old", _STAGE, "block", ("file-broken", "config-field-unknown"),
        "a GGUF or ggml file of a version, or a byte order, that today's programs do not read",
        "convert the model again with today's tools",
        _old_gguf,
        ("gguf-version", "ggml-legacy", "big-endian"),
    ),
    linked(
        "part-missing", _STAGE, "block", ("file-broken", "files-missing", "onnx-version"),
        ("split-part-missing", "data-missing", "byte-parts"),
        "a file that is stored in parts lacks one of them, or is not joined yet",
        "fetch the missing part; byte parts are joined with cat",
        _part,
    ),
)  # fmt: skip
