"""What a folder says about talking to its model: the chat template, the special tokens, the tokenizer that is there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

LIMIT: Final = 4 << 20
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class Papers(NamedTuple):
    """The template (None: there is none), special tokens by their role, and the tokenizer files."""

    template: str | None = None
    special: Mapping[str, str] = {}
    tokenizers: tuple[str, ...] = ()


def papers(folder: Path) -> Papers:
    """Return what a folder's small files say. Raises nothing: what cannot be read is not there."""
    config = table(folder / "tokenizer_config.json")
    special: dict[str, str] = {}
    for source in (table(folder / "special_tokens_map.json"), config):
        for role in _SPECIAL:
            value = source.get(role)
            word = value.get("content") if isinstance(value, dict) else value
            if isinstance(word, str):
                special[role] = word
    here = tuple(name for name in TOKENIZERS if (folder / name).is_file())
    return Papers(_template(folder, config), special, here)


def table(path: Path) -> dict[str, Any]:
    """Return a small JSON object, an empty one where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > LIMIT:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    try:
        file = folder / "chat_template.jinja"
        if file.is_file() and file.stat().st_size <= LIMIT:
            return file.read_text("utf-8", "replace")
    except OSError:
        return None
    for source in (table(folder / "chat_template.json"), config):
        value = source.get("chat_template")
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return json.dumps(value, sort_keys=True)
    return None
