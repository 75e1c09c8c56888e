"""A filled remote in a few lines: versions written by hand as the format says, without staging and without a daemon.

shelf = Shelf(MemoryRemote())
shelf.publish("medical-sft", step=280)          claim, files, decision, announcements
shelf.claim("medical-sft"); shelf.void("medical-sft", 2); shelf.withdraw("medical-sft", 1)
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weighbridge.registry import layout
from weighbridge.registry.errors import MissingError
from weighbridge.registry.flow import feed
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.manifest import Manifest, canonical, seal
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.times import spelled
from weighbridge.registry.types import (
    SCHEMA_CLAIM,
    SCHEMA_REGISTRY,
    SCHEMA_WITHDRAWN,
    AdapterFacts,
    BaseFacts,
    Claim,
    DtypeCount,
    Facts,
    FileEntry,
    Finding,
    LicenseFacts,
    LineageEdge,
    Owner,
    Provenance,
    Registry,
    RunFacts,
    WeightsFacts,
)

REGISTRY = "9d6f1c1e-7a53-4b1e-9a0e-3f4f0f1b2c3d"


def facts(
    *,
    kind: str = "adapter",
    step: int | None = 280,
    run: str = "run-1",
    started_at: str | None = None,
    base: str | None = "example-org/tiny-base",
    license_id: str | None = "apache-2.0",
    owner: str | None = "lw",
    created_at: str | None = "2026-11-29T16:42:10Z",
    findings: Sequence[Finding] = (),
    history: str | None = "training.json",
    **provenance: Any,
) -> Facts:
    """Return facts as a small adapter has them."""
    return Facts(
        kind=kind,
        weights=WeightsFacts(
            format="safetensors",
            shards=1,
            tensors=8,
            parameters=448,
            bytes=1792,
            dtypes={"F32": DtypeCount(tensors=8, parameters=448)},
            tensor_digest="sha256:" + "3" * 64,
        ),
        adapter=AdapterFacts(peft_type="LORA", rank=4, alpha=8, scaling=2.0, targets=["q_proj", "v_proj"])
        if kind == "adapter"
        else None,
        base=BaseFacts(id=base, relation="adapter" if base else None, evidence="adapter_config.json" if base else None),
        license=LicenseFacts(id=license_id, source="card" if license_id else None, evidence="README.md"),
        provenance=Provenance(
            run=RunFacts(project="medical", name=run, id=f"id-of-{run}"),
            step=step,
            created_at=created_at,
            started_at=started_at,
            owner=owner,
            host="trainer-03",
            history=history,
            **provenance,
        ),
        lineage=[LineageEdge(relation="adapter-of", ref=base)] if base else [],
        findings=list(findings),
    )


def payload(seed: int = 0, size: int = 2000) -> dict[str, bytes]:
    """Return the files of a tiny adapter; another seed gives other weights."""
    weights = (f"weights of seed {seed} ".encode() * (size // 8 + 1))[:size]
    return {
        "adapter_config.json": b'{"peft_type":"LORA","r":4}\n',
        "adapter_model.safetensors": weights,
        "tokenizer/tokenizer.json": b"{}",
    }


def manifest_of(files: Mapping[str, bytes], of: Facts) -> Manifest:
    """Return the sealed manifest of some files."""
    roles = {"adapter_config.json": "config", "config.json": "config"}
    return seal(
        [
            FileEntry(
                path=path,
                size=len(body),
                sha256=sha256_bytes(body),
                role=roles.get(path, "weights" if path.endswith(".safetensors") else "tokenizer"),
            )
            for path, body in files.items()
        ],
        of,
    )


class Shelf:
    """A remote with a marker, and the steps of a publication by hand."""

    def __init__(self, remote: Remote, registry: str = REGISTRY) -> None:
        self.remote = remote
        self.registry = Registry(
            schema=SCHEMA_REGISTRY, registry=registry, format=1, min_reader=1, min_writer=1, mode="shared"
        )
        try:
            remote.read(layout.MARKER)
        except MissingError:
            remote.create(layout.MARKER, canonical(self.registry))
        self.claims: dict[str, list[tuple[Claim, bytes, Manifest]]] = {}

    def claim(
        self, name: str, files: Mapping[str, bytes] | None = None, *, announce: bool = True, **about: Any
    ) -> tuple[int, Manifest]:
        """Claim the next number of a name, announce it, and return number and manifest."""
        before = self.claims.setdefault(name, [])
        n = len(before) + 1
        manifest = manifest_of(payload(n) if files is None else files, facts(**about))
        claim = Claim(
            schema=SCHEMA_CLAIM,
            registry=self.registry.registry,
            name=name,
            n=n,
            content=manifest.content,
            manifest=manifest.stored.decode(),
            owner=Owner(host="trainer-03", daemon="d" * 32),
            nonce=secrets.token_hex(8),
            prev=sha256_bytes(before[-1][1]) if before else None,
        )
        stored = canonical(claim)
        self.remote.create(layout.claim(name, n), stored)
        before.append((claim, stored, manifest))
        if announce:
            at = spelled(self.remote.stat(layout.claim(name, n)).modified)
            self.tell(feed.claim_entry(claim, sha256_bytes(stored), stored_at=at))
        return n, manifest

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes] | None = None,
        *,
        announce: bool = True,
        tell_version: bool = True,
        **about: Any,
    ) -> tuple[int, Manifest]:
        """Publish a version and return number and manifest; `tell_version` False leaves its claim open in the feed."""
        files = payload(len(self.claims.get(name, [])) + 1) if files is None else files
        n, manifest = self.claim(name, files, announce=announce, **about)
        for path, body in files.items():
            self.remote.create(layout.version(name, n, path), body)
        card = f"# {name}@v{n}\n".encode()
        self.remote.create(layout.version(name, n, "README.md"), card)
        self.remote.create(layout.version(name, n, "training.json"), b'{"schema":"weighbridge/training/1"}')
        self.remote.create(layout.manifest(name, n), manifest.stored)
        if announce and tell_version:
            self.tell(feed.version_entry(name, n, manifest, card_sha256=sha256_bytes(card)))
        return n, manifest

    def void(self, name: str, n: int, *, announce: bool = True) -> None:
        """Give a number up."""
        stored = canonical({"void": "its owner is gone", "by": "collector"})
        self.remote.create(layout.manifest(name, n), stored)
        if announce:
            self.tell(feed.void_entry(name, n, stored))

    def withdraw(self, name: str, n: int, *, announce: bool = True) -> None:
        """Take a version back; its payload stays."""
        document = {"schema": SCHEMA_WITHDRAWN, "name": name, "n": n, "why": "wrong data", "who": "lw"}
        self.remote.create(layout.withdrawn(name, n), canonical(document))
        if announce:
            self.tell(feed.withdrawn_entry(name, n, canonical(document)))

    def tell(self, *entries: Any) -> int:
        """Announce entries."""
        return feed.announce(self.remote, self.registry, entries)


def holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Tell whether a pulled folder holds exactly these files, beside card, history and manifest."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    beside = {found.pop(name, None) is not None for name in ("README.md", "training.json", "manifest.json")}
    return found == dict(files) and beside == {True}


def leftovers(folder: Path) -> list[str]:
    """Return hidden names in a folder."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]
