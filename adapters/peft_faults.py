"""What in an adapter's config no loader can use: ranks and strengths that are no numbers, patterns that are none.

PEFT builds its layers with these values as they stand: `r: "8"` fails in the middle of loading, a pattern that is no
regular expression with it. What is not tried here is said to be so.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from weighbridge.adapters.patterns import is_name, pattern
from weighbridge.adapters.peft_config import number
from weighbridge.adapters.peft_types import KINDS
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

RANK_MAX: Final = 1 << 20
"""No layer is that wide. LoKr is given ranks beyond its layers on purpose, up to some tens of thousands."""

TRIED: Final = 2000
"""Patterns of one config that are tried, names not counted; no training writes as many."""

_ZERO: Final = frozenset({"OFT"})
"""Types whose rank 0 says that another field states it."""

_OPEN: Final = frozenset({"SUPERTUNING"})
"""Types whose rank may be null."""

_OTHER_TABLES: Final = frozenset({"ADALORA", "OSF"})
"""Types whose rank_pattern is no table of ranks by module name."""


def judge(config: Mapping[str, Any], subject: str) -> list[Finding]:
    """Return the findings of an adapter_config.json, `subject`, about numbers and patterns."""
    kind = str(config.get("peft_type") or "").upper()
    found: list[Finding] = []
    wrong = {field: _shown(value) for field, value in _wrong(config, kind)}
    if wrong:
        found.append(
            findings.finding(
                "adapter-number-invalid",
                subject,
                f"{subject}: {some(f'{field} is {value}' for field, value in wrong.items())}: a rank is a whole number "
                f"of 1 to {RANK_MAX}, an alpha a finite one, and PEFT fails on anything else",
                "put the adapter_config.json of the training beside the weights",
                invalid_numbers=wrong,
            )
        )
    broken: dict[str, str] = {}
    untried: dict[str, str] = {}
    asked = ((field, text) for field, text in _patterns(config) if not is_name(text))
    for field, text in itertools.islice(asked, TRIED):
        one = pattern(text)
        if one.problem is not None:
            broken[field] = one.problem
        elif not one.tried:
            untried[field] = _shown(text)
    if (after := sum(1 for _ in asked)) > 0:
        untried[f"{after} patterns after the first {TRIED}"] = "..."
    if broken:
        found.append(
            findings.finding(
                "adapter-pattern-invalid",
                subject,
                f"{subject}: {some(f'{field} is no regular expression ({why})' for field, why in broken.items())}: "
                "PEFT fails on it",
                "put the adapter_config.json of the training beside the weights",
                invalid_patterns=broken,
            )
        )
    if untried:
        found.append(
            findings.finding(
                "adapter-pattern-untried",
                subject,
                f"{subject}: {some(untried)} could run for ever and {'is' if len(untried) == 1 else 'are'} not tried: "
                "which modules it means is not known here",
                "list the modules by name",
                untried_patterns=untried,
            )
        )
    return found


def _wrong(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields that should hold a number and hold none that can be."""
    known = KINDS.get(kind)
    ranked = known is None or "r" in known.fields
    field = "init_r" if kind == "ADALORA" else "r"
    if field in config and ranked and not (config[field] is None and kind in _OPEN):
        least = 0 if kind in _ZERO else 1
        if not _is_rank(config[field], least):
            yield field, config[field]
    for field in ("lora_alpha", "alpha", f"{kind.lower()}_alpha"):
        value = config.get(field)
        if value is not None and number(value) is None:  # null is told as not stated
            yield field, value
    for field, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        table = config.get(field)
        if not table or kind in _OTHER_TABLES:
            continue
        if not isinstance(table, dict):
            yield field, table
            continue
        for name, value in table.items():
            if not fits(value):
                yield f"{field} of {_cut(str(name))}", value


def _is_rank(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= RANK_MAX


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the regular expressions of a config by the field they stand in, as PEFT asks them."""
    for field in ("target_modules", "exclude_modules"):
        if isinstance(text := config.get(field), str) and text:
            yield field, text
    for field in ("rank_pattern", "alpha_pattern"):
        table = config.get(field)
        for name in table if isinstance(table, dict) else ():
            yield f"{field} of {_cut(str(name))}", rf"(.*\.)?({name})"


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
