"""What the Hugging Face Hub accepts in a card, checked here so that nothing is sent to be refused.

Lists as the Hub's own refusals state them in 2026; a newer Hub may know more, which makes us strict, never wrong.
"""

import re
from typing import Any, Final

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
