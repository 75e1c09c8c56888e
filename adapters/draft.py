"""An artifact while it is being judged: what the checks of adapters, models and trainers add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place, Unreadable
from weighbridge.adapters.whole import counted, some
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts, Finding, LicenseFacts, WeightsFacts

LIST_FACTS = ("missing_files", "missing_tensors", "unlisted_tensors", "stale_files", "in_progress")
"""Facts that are a list in every answer, empty where nothing is to be told."""

WAITABLE = frozenset(
    {
        "file-empty",
        "header-cut",
        "header-damaged",
        "file-short",
        "shard-missing",
        "index-missing",
        "index-damaged",
        "index-incomplete",
        "tensor-missing",
        "weights-missing",
        "config-missing",
        "json-damaged",
        "lora-half-missing",
    }
)
"""Faults that a writer who is not finished leaves; with a sign of one they are a reason to wait."""


def joined(old: list[Any], more: Iterable[Any]) -> list[Any]:
    """Return a list with what it lacks of another one; a file may name a million things, so never pair by pair."""
    known = {repr(item) for item in old}
    return old + [item for item in more if repr(item) not in known]


@dataclass
class Draft:
    """One artifact under judgement."""

    place: Place
    artifact: str
    kind: str | None
    named: Named
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    config: dict[str, Any] | None = None
    config_path: str | None = None
    weights: WeightsFacts | None = None
    adapter: AdapterFacts | None = None
    base: BaseFacts = field(default_factory=BaseFacts)
    license: LicenseFacts = field(default_factory=LicenseFacts)
    metadata: dict[str, str] | None = None
    step: int | None = None
    end_mark: bool = False
    trainer: bool = False
    needs_code: bool = False
    alone: str | None = None
    """The one file that this is about, where a folder holds several such files."""
    convert: tuple[str, ...] = ()
    """Torch pickles among the weights: their tensors are published as safetensors."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What would come out of weights in another form: rank files, pieces, a torch file of another tool."""
    inputs: tuple[str, ...] = ()
    """The files that `tensors` are put together from; none of them is published itself."""

    def add(self, facts: dict[str, Any], found: Iterable[Finding]) -> None:
        """Take in the result of one check; lists of paths and tensors grow, other facts of a later check win."""
        for key, value in facts.items():
            old = self.facts.get(key)
            if isinstance(old, list) and isinstance(value, list):
                self.facts[key] = joined(old, value)
            else:
                self.facts[key] = value
        self.findings.extend(found)

    def tell(self) -> None:
        """Put the figures of every finding among the facts, so that one name is found in one place."""
        for one in self.findings:
            for key, value in one.data.items():
                if key in _NOT_FACTS or value is None:
                    continue
                old = self.facts.get(key)
                if old is None or old == []:
                    self.facts[key] = value
                elif isinstance(old, dict) and isinstance(value, dict):
                    self.facts[key] = {**value, **old}
                elif isinstance(old, list) and isinstance(value, list):
                    self.facts[key] = joined(old, value)
        for key in LIST_FACTS:
            self.facts.setdefault(key, [])

    def gather_pointers(self) -> None:
        """Make one finding out of many Git LFS pointers: a clone without git-lfs holds one for every shard."""
        pointers = [f for f in self.findings if f.code == "lfs-pointer"]
        if len(pointers) < 2:
            return
        table = {
            f.subject: {"size": f.data.get("pointer_size"), "sha256": f.data.get("pointer_sha256")} for f in pointers
        }
        total = sum(entry["size"] or 0 for entry in table.values())
        first = pointers[0]
        whole = findings.finding(
            "lfs-pointer",
            first.subject,
            f"{counted(len(table), 'Git LFS pointer')} instead of the files ({some(table)}): {total} bytes in all",
            first.fix,
            **{**first.data, "pointers": table, "pointers_total_size": total},
        )
        self.findings = [f for f in self.findings if f.code != "lfs-pointer"]
        self.findings.append(whole)

    def soften(self, signs: Iterable[str]) -> None:
        """Turn faults that an unfinished writer leaves into a reason to wait, where there is a sign of one."""
        named = list(signs)
        if named:
            self.findings = [
                findings.finding(
                    "still-writing",
                    f.subject,
                    f"{f.message}; {named[0]} says that somebody is still writing",
                    f.fix,
                    **f.data,
                )
                if f.code in WAITABLE
                else f
                for f in self.findings
            ]


_NOT_FACTS = frozenset(
    {
        "file_bytes",
        "problem",
        "tensors",
        "modules",
        "counted",
        "kinds",
        "offsets",
        "fields",
        "hole",
        "main_dtype",
        "rank",
    }
)


def read_json(draft: Draft, name: str, *, needed: bool = False) -> dict[str, Any] | None:
    """Return a JSON object of the draft's folder; a document that cannot be read becomes a finding."""
    file = draft.place.names.get(name)
    if file is None:
        return None
    value = draft.place.reader.document(file)
    if isinstance(value, dict):
        return value
    problem = value.problem if isinstance(value, Unreadable) else "it holds no JSON object"
    if "pointer" in problem or "link to nothing" in problem:
        return None  # told as a pointer or a dead link, once for every file
    draft.findings.append(
        findings.finding(
            "json-damaged",
            file.path,
            f"{file.path} cannot be used: {problem}",
            "save it again" if needed else "save it again, or delete it",
            severity="block" if needed else "warn",
            file=file.path,
            file_bytes=file.size,
        )
    )
    return None
