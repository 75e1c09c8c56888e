"""The Hub's check of a card's front matter, as far as tests need it."""

from typing import Any

import yaml

from weighbridge.registry.hub_rules import LICENSES, is_repo_id


def front_matter(text: str) -> dict[str, Any]:
    """Return the fields of a card; nothing where they cannot be read."""
    try:
        found = yaml.safe_load(_block(text) or "")
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def faults_of(text: str) -> list[str]:
    """Return what the Hub refuses in a card, in its words."""
    block = _block(text)
    if block is None:
        return []
    try:
        found = yaml.safe_load(block)
    except yaml.YAMLError as error:
        return [f"YAML front matter is invalid: {error}"]
    if found is None:
        return []
    if not isinstance(found, dict):
        return ["YAML front matter must be a mapping"]
    licences = ['"license" must be one of [apache-2.0, mit, openrail, ...]' for one in _many(found, "license")
                if one not in LICENSES]  # fmt: skip
    bases = [one for one in _many(found, "base_model") if not is_repo_id(one)]
    return licences + [
        f'"base_model" with value "{one}" is not valid. Use a model id from https://hf.co/models.' for one in bases
    ]


def _many(found: dict[str, Any], field: str) -> list[Any]:
    value = found.get(field)
    return [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _block(text: str) -> str | None:
    if not text.startswith("---"):
        return None
    body = text.split("\n---", 1)
    return body[0][3:] if len(body) == 2 else None
