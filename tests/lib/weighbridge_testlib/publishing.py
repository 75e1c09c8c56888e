"""What a publication needs besides the product: source files, owners, and a card that is quick to make."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import Candidate, prepare, publish
from weighbridge.registry.flow.sources import SourceFile
from weighbridge.registry.flow.stage import Mode
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.types import Facts, Owner
from weighbridge_testlib.shelf import facts, payload

OWNER = Owner(host="trainer-03", daemon="d" * 32)
OTHER = Owner(host="trainer-04", daemon="e" * 32)


def role_of(path: str) -> str:
    """Return the role of a payload file of a test."""
    if path.endswith(".index.json"):
        return "index"
    if path.endswith(".safetensors"):
        return "weights"
    return "tokenizer" if "token" in path else "config" if "config" in path else "other"


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[SourceFile]:
    """Write files into a folder and return them as the sources of a publication."""
    for path, body in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)
    return sources(folder, files)


def sources(folder: Path, files: Mapping[str, bytes]) -> list[SourceFile]:
    """Return files that lie in a folder as the sources of a publication."""
    return [
        SourceFile(path=path, source=str(folder / path), size=len(body), role=role_of(path))
        for path, body in files.items()
    ]


def rendered(manifest: Manifest, name: str, n: int) -> dict[str, bytes]:
    """Return a card and a history that depend on name, number and content."""
    return {
        "README.md": f"# {name}@v{n}\n{manifest.content}\n".encode(),
        "training.json": b'{"schema":"weighbridge/training/1"}',
    }


def candidate(
    remote: Remote,
    folder: Path,
    name: str = "medical-sft",
    *,
    seed: int = 1,
    files: Mapping[str, bytes] | None = None,
    about: Facts | None = None,
    mode: Mode = "auto",
    derivation: str | None = None,
) -> Candidate:
    """Write a tiny adapter into a folder, stage it and seal it; another seed gives another content."""
    written = write_files(folder, payload(seed) if files is None else files)
    return prepare(remote, name, written, about or facts(step=seed), mode=mode, derivation=derivation)


def publish_in_process(root: Path, folder: Path, seeds: list[int], gate: Any, out: Any) -> None:
    """Publish some contents from a process of its own, all at the same moment as the others (for multiprocessing)."""
    remote = DirectoryRemote(root)
    registry = open_registry(remote, create=True)
    owner = Owner(host="trainer", daemon=str(os.getpid()))
    gate.wait()
    try:
        for seed in seeds:
            made = candidate(remote, folder / str(seed), seed=seed)
            receipt = publish(remote, "home", registry, made, owner, render=rendered)
            out.put((seed, receipt.n, receipt.content))
    except BaseException as error:
        out.put((0, 0, repr(error)))
        raise
    out.put(None)
