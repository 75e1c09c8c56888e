"""Which models a folder was made of, as the tools that made it wrote down beside the weights.

`mergekit_config.yml` is what mergekit leaves in a merged model (its documentation, "Merge configuration"; a reference
is `model[@revision][+lora]`); `huggingface-metadata.txt` what text-generation-webui's download-model.py leaves in a
downloaded one. Local paths name nothing that anybody else can find, so they are passed over.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.source import contents
from weighbridge.registry import frontmatter
from weighbridge.registry.hub_rules import is_repo_id

RECIPES: Final = ("mergekit_config.yml", "mergekit_moe_config.yml")
DOWNLOAD: Final = "huggingface-metadata.txt"

_SIZE_MAX: Final = 1 << 20
_LINE = re.compile(r"(url|branch|download date):[ \t]*(\S.*?)[ \t]*", re.IGNORECASE)
_HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/\s?#]+/[^/\s?#]+)/?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODELS: Final = frozenset({"model", "base_model", "source_model"})


class Merge(NamedTuple):
    """What a merge recipe says: its method, the base it names, and every model of the Hub that went in."""

    file: str
    method: str | None
    base: str | None
    models: tuple[str, ...]


class Download(NamedTuple):
    """Where a folder was downloaded from."""

    id: str
    branch: str | None
    at: str | None


def merge(folder: Path) -> Merge | None:
    """Return what mergekit wrote into a folder, None where it wrote nothing that can be read. Raises nothing."""
    for name in RECIPES:
        document = frontmatter.load(_text(folder / name) or "").value
        if isinstance(document, dict):
            method = document.get("merge_method")
            return Merge(
                file=name,
                method=method if isinstance(method, str) and _WORD.fullmatch(method) else None,
                base=_reference(document.get("base_model")),
                models=tuple(dict.fromkeys(_models(document))),
            )
    return None


def download(folder: Path) -> Download | None:
    """Return where a folder was downloaded from, None where no file says so. Raises nothing."""
    told: dict[str, str] = {}
    for line in (_text(folder / DOWNLOAD) or "").splitlines():
        match = _LINE.fullmatch(line)
        if match:
            told.setdefault(match[1].lower(), match[2])
    place = _HUB.fullmatch(told.get("url", ""))
    if place is None or not is_repo_id(place[1]):
        return None
    branch, at = told.get("branch"), told.get("download date")
    return Download(
        id=place[1],
        branch=branch if branch is not None and _WORD.fullmatch(branch) else None,
        at=at if at is not None and re.fullmatch(r"[0-9 :.TZ+-]{8,40}", at) else None,
    )


def _text(path: Path) -> str | None:
    try:
        if path.stat().st_size > _SIZE_MAX:
            return None
        return contents(path, _SIZE_MAX).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _models(value: Any) -> Iterator[str]:
    """Yield the models of the Hub that a recipe names, at whatever depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            named = _reference(item) if key in _MODELS else None
            if named is not None:
                yield named
            else:
                yield from _models(item)
    elif isinstance(value, list):
        for item in value:
            yield from _models(item)


def _reference(value: Any) -> str | None:
    """Return the repository of a model reference: `owner/name`, with a revision or an adapter behind it or not."""
    if isinstance(value, dict):
        inner = value.get("model", value)
        value = inner.get("path") if isinstance(inner, dict) else inner
    if not isinstance(value, str):
        return None
    plain = value.partition("+")[0].partition("@")[0].strip()
    return plain if "/" in plain and is_repo_id(plain) else None
