"""What a look at a folder gives: frozen values, shared by inspect, admission, commands and daemon."""

from typing import Any

import msgspec

from weighbridge.adapters.plan import JudgedFile
from weighbridge.registry.types import (
    SCHEMA_INSPECT,
    AdapterFacts,
    BaseFacts,
    Finding,
    LicenseFacts,
    Outcome,
    Value,
    WeightsFacts,
)


class Artifact(Value, frozen=True):
    """One publishable thing in a folder; `root` is absolute, `relative` its path from the inspected folder.

    Paths in `files`, `facts` and `findings` are relative to the inspected folder. `kind` is None for what no name can
    hold (a container that is not handled yet, a program, training state alone).
    """

    root: str
    relative: str
    artifact: str
    kind: str | None
    outcome: Outcome
    facts: dict[str, Any]
    findings: list[Finding]
    files: list[JudgedFile]
    weights: WeightsFacts | None = None
    adapter: AdapterFacts | None = None
    base: BaseFacts = BaseFacts()
    license: LicenseFacts = LicenseFacts()
    config: str | None = None
    """Path of the config that makes it what it is."""
    step: int | None = None
    end_mark: bool = False
    resumable: bool | None = None
    needs_code: bool = False
    """Its config names Python files (auto_map) without which it cannot be loaded."""

    file: str | None = None
    """The one file that this is about, where several like it share the folder."""

    convert: list[str] = msgspec.field(default_factory=list)
    """Torch pickles among the files that would be published: their tensors are, as safetensors."""

    inputs: list[str] = msgspec.field(default_factory=list)
    """Files whose tensors are put together and published as safetensors; none of them is published itself."""

    prefer_averaged: bool = False
    """A running average was asked for where a checkpoint holds it beside the raw weights."""

    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Files whose bytes lie elsewhere than under `root` (a Hub cache written without links), with the real place."""

    @property
    def size(self) -> int:
        """Bytes that would be published; what is converted or put together counts with its tensors."""
        made = set(self.convert)
        listed = sum(file.size for file in self.files if file.publish and file.path not in made)
        return listed + (self.weights.bytes if (self.inputs or made) and self.weights is not None else 0)

    @property
    def unread(self) -> str | None:
        """What this look leaves for staging to find, in words; None where every value was looked at."""
        if self.facts.get("values_checked") is True or self.weights is None or not self.weights.bytes:
            return None  # without a byte there is nothing to look at, and another finding says what is missing
        if self.weights.format != "safetensors":
            return f"values in {self.weights.format} weights are not looked at: whether they are numbers is not known"
        return (
            f"{self.weights.bytes} bytes of values are looked at only while they are staged: NaN and infinities would "
            "refuse them then, and zeros be told"
        )


class Inspection(Value, frozen=True):
    """The answer about a folder: what is in it, what is wrong, what would be published and what not."""

    path: str
    artifact_root: str
    outcome: Outcome
    artifact: str | None
    kind: str | None
    facts: dict[str, Any]
    findings: list[Finding]
    files: list[JudgedFile]
    artifacts: list[Artifact]


def document(inspection: Inspection) -> dict[str, Any]:
    """Return the JSON object of `registry inspect --json` (docs/schemas/inspect.schema.json)."""
    return {
        "schema": SCHEMA_INSPECT,
        "path": inspection.path,
        "artifact_root": inspection.artifact_root,
        "outcome": inspection.outcome,
        "artifact": inspection.artifact,
        "kind": inspection.kind,
        "facts": inspection.facts,
        "findings": inspection.findings,
        "files": inspection.files,
        "artifacts": [_short(one) for one in inspection.artifacts] if len(inspection.artifacts) > 1 else [],
    }


def _short(one: Artifact) -> dict[str, Any]:
    return {
        "artifact_root": one.relative,
        **({"file": one.file} if one.file is not None else {}),
        "artifact": one.artifact,
        "kind": one.kind,
        "outcome": one.outcome,
        "step": one.step,
        "facts": one.facts,
        "findings": one.findings,
    }
