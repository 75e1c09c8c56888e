"""Is one weights file whole? Pointer, dead link, other container, header, length: each fault with its figures."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from weighbridge.adapters.formats import sniff
from weighbridge.adapters.formats.safetensors import Header
from weighbridge.adapters.listing import File
from weighbridge.registry import findings
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

if TYPE_CHECKING:
    from weighbridge.adapters.reading import Reader  # the readers of every format, which whoever sifts does not need

_SHOWN: Final = 4


def file_findings(file: File, reader: "Reader") -> list[Finding]:
    """Return what is wrong with one file that should be safetensors: pointer, other container, header, length."""
    if file.link is not None:
        return [dead_link(file.path, file.link)]
    kind = reader.container(file)
    if kind == "lfs-pointer":
        return [pointer_finding(file, reader)]
    if kind == "link-text":
        target = reader.head(file).decode("utf-8", "replace")
        return [dead_link(file.path, target)]
    if kind in sniff.PICKLED or kind in {"gguf", "onnx", "hdf5", "tflite", "ggml-legacy", "npz", "zip"}:
        return [
            findings.finding(
                "suffix-lies",
                file.path,
                f"{file.path} is named safetensors and is {kind}",
                "give it its true suffix, or convert it",
                file=file.path,
                container=kind,
                true_formats={file.path: kind},
            )
        ]
    return [
        findings.finding(
            fault.code,
            file.path,
            f"{file.path}: {fault.message}",
            _FIXES.get(fault.code, "save or copy the file again"),
            file=file.path,
            **fault.data,
        )
        for fault in reader.header(file).faults
    ]


_FIXES: Final = {
    "tensors-overlap": "save again and keep one name for tied weights",
    "tensor-invalid": "save again without the placeholder entry",
    "file-long": "save or copy the file again; some readers accept it, the library does not",
}


def is_pointer(file: File, reader: "Reader") -> bool:
    """Return whether a Git LFS pointer stands in for a file."""
    return file.link is None and file.size < sniff.HEAD and reader.container(file) == "lfs-pointer"


def pointer_data(pointer: sniff.Pointer) -> dict[str, Any]:
    """Return the facts of a Git LFS pointer."""
    return {"pointer": True, "pointer_size": pointer.size, "pointer_sha256": pointer.sha256}


def pointer_finding(file: File, reader: "Reader") -> Finding:
    """Return the finding for a Git LFS pointer in the place of a file."""
    pointer = sniff.pointer(reader.head(file)) or sniff.Pointer("", 0)
    return findings.finding(
        "lfs-pointer",
        file.path,
        f"{file.path} is a Git LFS pointer of {file.size} bytes, not downloaded: it stands for {pointer.size} bytes "
        f"with sha256 {pointer.sha256}",
        "git lfs pull",
        file=file.path,
        **pointer_data(pointer),
    )


def dead_link(path: str, target: str) -> Finding:
    """Return the finding for a link to nothing."""
    return findings.finding(
        "link-dangling",
        path,
        f"{path} is a link to {target}, which is not there",
        "restore the target, or copy the file itself here",
        dangling={path: target},
    )


def file_name_unsafe(path: str, fault: str) -> Finding:
    """Return the finding for a file that no remote can hold under its name."""
    return findings.finding(
        "file-name-unsafe", path, f"{shown(path)} cannot be published under this name: {fault}", "rename the file"
    )


def without_config(config: str, weights: Sequence[str], *, owed: bool) -> Finding:
    """Return the finding for a model's weights beside which no config.json lies; one rule for every container.

    `owed` says that libraries look for such weights through a config (`layout.owes_config`): those are not whole
    without it. Others are taken in as what they are, and whoever publishes them is warned.
    """
    if owed:
        return findings.finding(
            "config-missing",
            config,
            f"{config} is missing: weights alone do not say what model they are",
            "save the model's config beside its weights",
            missing_files=[config],
        )
    return findings.finding(
        "config-absent",
        weights[0],
        f"{some(weights)}: no {config} says what model they are: only a program that knows it can load what is "
        "published",
        f"put the model's config beside them as {config}, where it has one",
    )


def header_of(file: File, reader: "Reader") -> Header:
    """Return a file's header; one without tensors for links to nothing and pointers."""
    if file.link is not None or reader.container(file) in {"lfs-pointer", "link-text"}:
        return Header(file.size, 0, {}, None)
    return reader.header(file)


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Iterable[str], *, between: str = ", ") -> str:
    """Return the first few names as text, and how many more there are."""
    every = list(names)
    text = between.join(every[:_SHOWN])
    return f"{text} and {len(every) - _SHOWN} more" if len(every) > _SHOWN else text
