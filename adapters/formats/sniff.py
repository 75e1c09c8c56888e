"""Tell a container by its first bytes; the suffix has no say. Recognition only: nothing is parsed, nothing is run.

safetensors, torch-zip, torchscript, torch-legacy, pickle, gguf, ggml-legacy, onnx, tflite, hdf5, npz, lfs-pointer,
link-text, empty, and unknown.
"""

import re
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters.formats import zipdir
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.source import opened

HEAD: Final = 4096
_POINTER = re.compile(
    rb"version https://(?:git-lfs\.github\.com/spec|hawser\.github\.com/spec)/v1\n(?:ext-[^\n]*\n)*"
    rb"oid sha256:(?P<sha256>[0-9a-f]{64})\n(?:ext-[^\n]*\n)*size (?P<size>[0-9]{1,18})\n?"
)
_LINK_TEXT = re.compile(rb"(?:\.{1,2}/)+[^\x00-\x1f]{1,400}")
_LEGACY_MAGIC: Final = bytes.fromhex("8a0a6cfc9c46f9206aa85019") + b"."
"""torch's magic number 0x1950a86a20f9469cfc6c as a pickled long, the start of a file written before torch 1.6."""

_GGML: Final = (b"lmgg", b"ggml", b"fmgg", b"tjgg", b"algg")
CODE_CONTAINERS: Final = frozenset({"torchscript"})
PICKLED: Final = frozenset({"torch-zip", "torch-legacy", "pickle", "torchscript"})


class Pointer(NamedTuple):
    """A Git LFS pointer: what the file would be if somebody had downloaded it."""

    sha256: str
    size: int


def container(path: Path) -> str:
    """Return the name of a file's container, `unknown` where nothing fits. Raises OSError."""
    try:
        with opened(path) as source:
            head = source.head(HEAD)
    except FormatFault:
        return "unknown"  # a FIFO or device, which is not waited for
    name = of_head(head)
    return _inside_zip(path) if name == "zip" else name


def of_head(head: bytes) -> str:
    """Return the container that some first bytes belong to; a zip file is only called `zip` here."""
    if not head:
        return "empty"
    if pointer(head) is not None:
        return "lfs-pointer"
    if head[:4] == b"GGUF":
        return "gguf"
    if head[:4] in _GGML:
        return "ggml-legacy"
    if head[4:8] == b"TFL3":
        return "tflite"
    if head[:4] in {b"PK\x03\x04", b"PK\x05\x06"}:
        return "zip"
    if head[:8] == b"\x89HDF\r\n\x1a\n":
        return "hdf5"
    if _is_safetensors(head):
        return "safetensors"
    if head[:2] in {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}:
        return "torch-legacy" if head[2:15] == _LEGACY_MAGIC else "pickle"
    if _is_onnx(head):
        return "onnx"
    if len(head) < HEAD and _LINK_TEXT.fullmatch(head):
        return "link-text"
    return "unknown"


def pointer(head: bytes) -> Pointer | None:
    """Return the Git LFS pointer that some bytes are, or None."""
    match = _POINTER.fullmatch(head)
    return Pointer(match["sha256"].decode(), int(match["size"])) if match else None


def _is_safetensors(head: bytes) -> bool:
    # A header of any length begins with `{`; nothing else we know has one at byte 8.
    return len(head) > 8 and head[8:9] == b"{" and head[9:10] in b'" \n\t}'


def _is_onnx(head: bytes) -> bool:
    # ModelProto: field 1 (ir_version, a small varint), then field 2 (producer) or 7 (graph) or 8 (opset).
    return len(head) > 4 and head[0] == 0x08 and head[1] < 0x20 and head[2] in {0x12, 0x1A, 0x3A, 0x42}


def _inside_zip(path: Path) -> str:
    """Tell archives apart by their names; a damaged one is most likely a torch file, whose reader names the damage."""
    try:
        with opened(path) as source:
            names = zipdir.names(source)
    except (FormatFault, OSError):
        return "torch-zip"
    tails = {name.partition("/")[2] for name in names}
    if "constants.pkl" in tails and any(tail.startswith("code/") for tail in tails):
        return "torchscript"
    if any(name.endswith("/data.pkl") and name.count("/") == 1 for name in names):
        return "torch-zip"
    if "archive_format" in tails:
        return "torch-export"
    return "npz" if names and all(name.endswith(".npy") for name in names) else "zip"
