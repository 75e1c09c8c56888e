"""What a rule is: symptoms it may explain, a pure function that says whether its cause is there, and the remedy."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.diagnose.against import Against
from weighbridge.adapters.diagnose.text import Pattern, Text
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.inspection import Artifact
from weighbridge.registry.types import Finding, Severity, Value

STAGES: Final = ("container", "parts", "config", "keys", "values", "runtime")
"""The order in which a loader stumbles: format, parallel layout, config and shapes, names, numbers, the machine."""


class Symptom(NamedTuple):
    """Something people see: how loaders word it, and what it usually means."""

    name: str
    title: str
    says: tuple[Pattern, ...]
    """What programs print."""
    means: str
    words: tuple[Pattern, ...] = ()
    """How people put it; looked for in a short text only, as in a log they would mean nothing."""


class Case(NamedTuple):
    """What a rule looks at: one artifact as inspect judged it, its tensors' names and shapes, its base, the text."""

    top: Path
    """The folder that paths in facts and findings count from."""
    artifact: Artifact
    findings: tuple[Finding, ...]
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    owners: Mapping[str, str]
    names: frozenset[str]
    """Names of the files directly in the artifact's folder."""
    tables: Mapping[str, Mapping[str, Any]]
    """Small JSON documents beside the weights, by name."""
    against: Against | None
    text: Text | None
    whole: bool = True
    """Every file of the set is there and sound, so that what is not in the tensors is nowhere."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The artifact's facts."""
        return self.artifact.facts

    @property
    def folder(self) -> Path:
        """The artifact's folder, as the person who asks would write it."""
        return self.top if self.artifact.relative == "." else self.top / self.artifact.relative

    @property
    def is_adapter(self) -> bool:
        """It is a PEFT adapter, or what should be one."""
        return "adapter" in self.artifact.artifact or self.artifact.kind == "adapter"

    def path(self, name: str) -> Path:
        """Return a path from the inspected folder as the person who asks would write it."""
        return self.top if name == "." else self.top / name


class Evidence(NamedTuple):
    """A cause that is really there: what it is about, the sentence with the figures, and what mends it."""

    subject: str
    message: str
    commands: tuple[str, ...] = ()
    severity: Severity | None = None
    """The rule's own where None."""
    fix: str | None = None
    """The rule's remedy where None."""
    finding: str | None = None
    data: Mapping[str, Any] = {}


Find = Callable[[Case], Iterable[Evidence]]
Commands = Callable[[Case, Finding], tuple[str, ...]]


class Rule(NamedTuple):
    """One cause. A rule of severity `note` explains and is no fault: it is told only where a text asks for it."""

    name: str
    stage: str
    severity: Severity
    symptoms: tuple[str, ...]
    cause: str
    remedy: str
    find: Find
    codes: tuple[str, ...] = ()
    """Finding codes that the rule hands on instead of looking itself."""


class Cause(Value, frozen=True):
    """A cause that was found; `explains` lists the symptoms of the text that it accounts for."""

    rule: str
    severity: Severity
    stage: str
    artifact_root: str
    subject: str
    message: str
    fix: str
    commands: list[str]
    finding: str | None
    explains: list[str]
    data: dict[str, Any]


def linked(  # noqa: PLR0917 - a row of the table
    name: str,
    stage: str,
    severity: Severity,
    symptoms: tuple[str, ...],
    codes: tuple[str, ...],
    cause: str,
    remedy: str,
    commands: Commands | None = None,
    *,
    when: Callable[[Case], bool] | None = None,
) -> Rule:
    """Return a rule whose cause is a finding already: its sentence and its fix are the finding's."""

    def find(case: Case) -> Iterable[Evidence]:
        if when is not None and not when(case):
            return
        for one in case.findings:
            if one.code in codes:
                told = () if commands is None else commands(case, one)
                yield Evidence(one.subject, one.message, told, _graver(severity, one), one.fix, one.code, one.data)

    return Rule(name, stage, severity, symptoms, cause, remedy, find, codes)


def _graver(own: Severity, one: Finding) -> Severity:
    order: tuple[Severity, ...] = ("note", "warn", "block")
    return own if own == "note" else max(own, one.severity, key=order.index)
