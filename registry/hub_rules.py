"""What the Hugging Face Hub accepts in a card, checked here so that nothing is sent to be refused.

Lists as the Hub's own refusals state them in 2026. A newer Hub may know more licences: one that we do not know goes
onto a card as `other` with its name, which every Hub takes.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

LICENSES: Final = frozenset({
    "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m", "bigscience-bloom-rail-1.0",
    "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
    "cdla-sharing-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
    "etalab-2.0", "eupl-1.1", "eupl-1.2", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1",
    "lgpl-3.0", "isc", "h-research", "intel-research", "lppl-1.3c", "ms-pl", "apple-ascl", "apple-amlr", "mpl-2.0",
    "odc-by", "odbl", "openmdw-1.0", "openmdw-1.1", "openrail++", "osl-3.0", "postgresql", "ofl-1.1", "ncsa",
    "unlicense", "zlib", "pddl", "lgpl-lr", "deepfloyd-if-license", "fair-noncommercial-research-license", "llama2",
    "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "grok2-community", "gemma", "unknown", "other",
})  # fmt: skip
"""Licence ids the Hub knows."""

UNNAMED: Final = frozenset({"other", "unknown"})
"""Ids that name no licence."""

RELATIONS: Final = frozenset({"adapter", "finetune", "merge", "quantized"})
"""What a model can be to its base."""

LANGUAGES: Final = frozenset({"code", "multilingual"})
"""Languages beside the two and three letter codes of ISO 639."""

_SEGMENT = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = re.compile(rf"(?:{_SEGMENT}/)?{_SEGMENT}")
_LICENSE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}")
_FOLDERS: Final = frozenset({
    "models", "datasets", "spaces", "checkpoints", "ckpts", "output", "outputs", "saves", "runs", "results",
})  # fmt: skip
"""First segments that are routes of the Hub or folders of every trainer, never an owner."""


def is_repo_id(value: Any) -> bool:
    """Tell whether a value has the form of a repository id: `name` or `owner/name`."""
    return (
        isinstance(value, str)
        and _REPO.fullmatch(value) is not None
        and "--" not in value
        and ".." not in value
        and not value.endswith(".git")
        and ("/" not in value or value.split("/")[0].casefold() not in _FOLDERS)
    )


def is_language(value: Any) -> bool:
    """Tell whether the Hub takes a value as a language."""
    return isinstance(value, str) and (value in LANGUAGES or _LANGUAGE.fullmatch(value) is not None)


def is_key(value: Any) -> bool:
    """Tell whether the Hub stores a value as the key of a mapping: text without `.` and `$`."""
    return isinstance(value, str) and value != "" and not set(value) & {".", "$"}


def license_name(text: str) -> str:
    """Return text as a `license_name`: lower case, words joined by dashes."""
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return name if _LICENSE_NAME.fullmatch(name) else "custom"


class Refusal(NamedTuple):
    """A field whose value the Hub does not take, and the rule."""

    field: str
    value: str
    rule: str


def refusals(front: dict[str, Any]) -> Iterator[Refusal]:
    """Yield every value of a card's front matter that breaks one of the Hub's rules, licences apart."""
    for field, kind in (("base_model", "models"), ("datasets", "datasets")):
        for value in listed(front.get(field)):
            if value is not None and not is_repo_id(word(value)):
                yield Refusal(field, word(value) or str(value), f"not the id of one of its {kind}")
    for value in listed(front.get("language")):
        if value is not None and not is_language(word(value)):
            yield Refusal("language", word(value) or str(value), "not a code of two or three letters (ISO 639)")
    relation = front.get("base_model_relation")
    if relation is not None and not (isinstance(relation, str) and relation in RELATIONS):
        yield Refusal("base_model_relation", str(relation), f"not one of {', '.join(sorted(RELATIONS))}")
    newer = front.get("new_version")
    if newer is not None and not is_repo_id(newer):
        yield Refusal("new_version", str(newer), "not the id of one of its models")
    for field in ("pipeline_tag", "library_name", "license_link"):
        if front.get(field) is not None and not isinstance(front[field], str):
            yield Refusal(field, str(front[field]), "not a text")
    name = front.get("license_name")
    if name is not None and not (isinstance(name, str) and _LICENSE_NAME.fullmatch(name)):
        yield Refusal("license_name", str(name), "not lower-case letters, digits, '-' and '.' alone")
    for field in ("tags", "metrics"):
        entries = listed(front.get(field))
        yield from (Refusal(field, str(one), "not a text") for one in entries if isinstance(one, (dict, list)))


def bad_keys(value: Any) -> Iterator[str]:
    """Yield the keys, at whatever depth, that the Hub cannot store."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not is_key(key):
                yield key if isinstance(key, str) else word(key) or str(key)
            yield from bad_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from bad_keys(inner)


def missing_results(index: Any) -> Iterator[str]:
    """Yield the fields of evaluation results (`model-index`) that are required and absent."""
    if index is None:
        return
    for i, model in enumerate(index if isinstance(index, list) else [index]):
        where = f"model-index[{i}]"
        if not isinstance(model, dict):
            yield where
            continue
        yield from (f"{where}.{k}" for k in ("name", "results") if model.get(k) is None)
        results = model.get("results")
        for j, result in enumerate(results if isinstance(results, list) else []):
            yield from _missing_in_result(result, f"{where}.results[{j}]")


def faults(front: dict[str, Any]) -> list[str]:
    """Return what the Hub would refuse a front matter for, in words; of its licences it has the last word itself."""
    return [
        *(f'"{one.field}" {one.value!r}: {one.rule}' for one in refusals(front)),
        *(f"the key {one!r}: it holds '.' or '$', or nothing" for one in dict.fromkeys(bad_keys(front))),
        *(f"{one} is missing" for one in missing_results(front.get("model-index"))),
    ]


def listed(value: Any) -> list[Any]:
    """Return a value as the list that it is or stands for."""
    return value if isinstance(value, list) else [] if value is None else [value]


def word(value: Any) -> str | None:
    """Return a scalar as the text a person wrote; a list or a mapping is no word."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.strip() if isinstance(value, str) else str(value) if isinstance(value, (int, float)) else None


def _missing_in_result(result: Any, where: str) -> Iterator[str]:
    if not isinstance(result, dict):
        yield where
        return
    for part, keys in (("task", ("type",)), ("dataset", ("type", "name"))):
        value = result.get(part)
        if value is None:
            yield f"{where}.{part}"
        elif isinstance(value, dict):
            yield from (f"{where}.{part}.{k}" for k in keys if value.get(k) in (None, ""))
    metrics = result.get("metrics")
    for k, metric in enumerate(metrics if isinstance(metrics, list) else []):
        if isinstance(metric, dict):
            yield from (f"{where}.metrics[{k}].{f}" for f in ("type", "value") if metric.get(f) is None)
