"""The readers of all containers behind their names, and what their hazards and faults say to a person.

read(path)                       the directory of a file of any kind, told by its content
findings(directory, "model.pt")  its hazards as findings, each with what to do
fault(error, "model.pt")         a fault as a finding
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters.formats import dcp, gguf, onnx, opaque, safetensors, sniff, torch_legacy, torch_zip
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Hazard, Tensor, plain
from weighbridge.registry.findings import CODES, finding
from weighbridge.registry.types import Finding, Severity

READERS: Final[dict[str, Callable[[Path], Directory]]] = {
    "torch-zip": torch_zip.read,
    "torchscript": torch_zip.read,
    "torch-legacy": torch_legacy.read,
    "pickle": torch_legacy.read,
    "gguf": gguf.read,
    "onnx": onnx.read,
}
"""By the names that sniff gives; everything else that is known is opaque."""

FIXES: Final[dict[str, str]] = {
    "runs-code": "do not load this file anywhere; ask whoever made it for safetensors",
    "foreign-call": "load it only where you trust that package, or ask for safetensors",
    "whole-object": "in the project that made it: torch.save(model.state_dict(), PATH)",
    "torchscript": "publish the checkpoint that the program was made from",
    "torch-tar": "open it with an old torch and save it again",
    "pickled-array": "save the array with a plain dtype",
    "zip-cut": "copy or save the file again",
    "pickle-cut": "copy or save the file again",
    "file-short": "copy or save the file again",
    "header-cut": "copy or save the file again",
    "record-damaged": "copy or save the file again",
    "metadata-missing": "wait until the save has ended, or save again",
    "data-missing": "copy the missing file from the machine that saved it",
    "record-missing": "copy or save the file again",
    "record-short": "copy or save the file again",
    "tensor-expanded": "save it with .clone(), so that it has memory of its own",
    "views-multiply": "save each tensor with .clone(), so that it has memory of its own",
    "not-portable": "keep what the engine was built from; build it again on the machine that runs it",
}
"""What to do about a code, where there is one thing to do."""


def read(path: Path, container: str | None = None) -> Directory:
    """Return what a file holds, told by its content or by the name of its container. Raises OSError, FormatFault."""
    if path.is_dir():
        return opaque.read(path) if not (path / dcp.METADATA).exists() else dcp.read(path)
    name = sniff.container(path) if container is None else container
    if name == "safetensors":
        return of_header(safetensors.read(path))
    return READERS.get(name, opaque.read)(path)


def of_header(header: safetensors.Header) -> Directory:
    """Return a safetensors header as a directory; what is wrong with it blocks."""
    tensors = tuple(
        Tensor(t.name, t.dtype, t.shape, t.size, header.data_start + t.begin) for t in header.tensors.values()
    )
    hazards = tuple(
        Hazard(fault.code, "block", str(fault.data.get("bad_tensor", "")), fault.message, fault.data)
        for fault in header.faults
    )
    facts = {"container": "safetensors", "metadata": header.metadata, "file_bytes": header.file_bytes}
    return Directory("safetensors", tensors, (), hazards, facts)


def findings(directory: Directory, file: str) -> list[Finding]:
    """Return the hazards of a file as findings about it, blocking ones first."""
    order: dict[Severity, int] = {"block": 0, "warn": 1, "note": 2}
    hazards = sorted(directory.hazards, key=lambda hazard: order[hazard.severity])
    return [
        _finding(h.code, file, h.message, h.severity, {**h.data, "subject_in_file": plain(h.subject)}) for h in hazards
    ]


def fault(error: FormatFault, file: str) -> Finding:
    """Return a fault as the finding that refuses the file."""
    return _finding(error.code, file, error.message, "block", error.data)


def _finding(code: str, file: str, message: str, severity: Severity, data: Mapping[str, Any]) -> Finding:
    known = code if code in CODES else "container-damaged"
    return msgspec.structs.replace(
        finding(known, file, f"{file}: {message}", FIXES.get(code), severity=severity), data={"file": file, **data}
    )
