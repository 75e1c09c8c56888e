"""The files beside the merged weights: what a server needs, nothing that belongs to adapter, trainer or base alone.

The config says what was written. The tokenizer is one set, the adapter's where it ships one, else the base's; the chat
template likewise. Where they differ from the base's, a finding says so.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import code_files, fit, layout
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge.base import Base
from weighbridge.adapters.merge.plan import Planned
from weighbridge.adapters.merge.values import Bundle
from weighbridge.adapters.reading import JSON_LIMIT, table_at
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_WORDS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPE_FIELDS: Final = ("dtype", "torch_dtype")
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
_VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_FIELD_LIMIT: Final = 1 << 20


class Folder(NamedTuple):
    """The published files of one artifact that are no weights: by path inside it, with the real place and the role."""

    root: Path
    files: dict[str, tuple[str, str]]

    def role(self, *roles: str) -> dict[str, str]:
        """Return the files in some roles, with their real places."""
        return {path: source for path, (source, role) in self.files.items() if role in roles}

    def table(self, path: str) -> dict[str, Any]:
        """Return a JSON object, an empty one where there is none."""
        found = self.files.get(path)
        return (table_at(Path(found[0])) if found is not None else None) or {}


def folder(artifact: Artifact) -> Folder:
    """Return what of an inspected artifact would be published."""
    prefix = "" if artifact.relative == "." else artifact.relative + "/"
    files: dict[str, tuple[str, str]] = {}
    for one in artifact.files:
        if one.publish:
            inner = one.path.removeprefix(prefix)
            files[inner] = (artifact.sources.get(one.path, str(Path(artifact.root) / inner)), one.role)
    return Folder(Path(artifact.root), files)


def make(base: Base, planned: Planned, ours: Folder, adapters: Iterable[Folder]) -> tuple[Bundle, list[Finding]]:
    """Return the bundle of a merge; `ours` is the base's folder."""
    found: list[Finding] = []
    facts: dict[str, Any] = {}
    copies = ours.role("config", "license")
    weights = {*base.weights.files, base.weights.index}
    copies |= {path: source for path, source in ours.role("weights").items() if path not in weights}
    copies |= {name: str(ours.root / name) for name in _code(base, ours)}
    written: dict[str, bytes] = {}
    if base.weights.index is not None:
        if planned.listing is not None:
            written[base.weights.index] = _json(planned.listing)
        else:
            copies[base.weights.index] = str(ours.root / base.weights.index)
    config = _config(base, planned)
    if config != base.config:
        copies.pop(layout.MODEL_CONFIG, None)
        written[layout.MODEL_CONFIG] = _json(config)
    theirs = next((one for one in adapters if any(name in one.files for name in _VOCABULARIES)), None)
    tokenizer = theirs or ours
    copies |= tokenizer.role("tokenizer")
    facts["tokenizer_from"] = "adapter" if theirs is not None else "base" if ours.role("tokenizer") else None
    template = _template(ours)
    chosen = next((text for one in adapters if (text := _template(one)) is not None), None)
    if chosen is not None and chosen != template:
        facts["template_differs"] = True
        found.append(
            findings.finding(
                "merge-template-differs",
                "chat_template.jinja",
                "the adapter's chat template is not the base's; the result carries the adapter's"
                if template is not None
                else "the adapter brings a chat template, the base has none; the result carries it",
                template_differs=True,
            )
        )
    wanted = chosen if chosen is not None else template
    if wanted is not None and _template(tokenizer) != wanted:
        for name in _TEMPLATES:
            copies.pop(name, None)
        written["chat_template.jinja"] = wanted.encode()
    if theirs is not None:
        found += _ends(ours, theirs, copies, written, facts)
        found += _fits(base, planned, theirs, facts)
    elif planned.vocabulary is not None:
        found.append(
            findings.finding(
                "merge-tokenizer-missing",
                "tokenizer.json",
                f"the adapter changes the vocabulary to {planned.vocabulary} rows and ships no tokenizer: the base's "
                "would not fit",
                "put the tokenizer of the training beside the adapter",
                adapter_vocab=planned.vocabulary,
            )
        )
    for path in written:
        copies.pop(path, None)
    return Bundle(copies=dict(sorted(copies.items())), written=dict(sorted(written.items())), facts=facts), found


def _code(base: Base, ours: Folder) -> list[str]:
    """Return the Python files that the base's config names, where they lie beside it."""
    if not base.config.get("auto_map"):
        return []
    return [name for name in sorted(code_files.needed(ours.root / layout.MODEL_CONFIG)) if (ours.root / name).is_file()]


def _config(base: Base, planned: Planned) -> dict[str, Any]:
    """Return the config with the written dtype, the vocabulary that is there, and the tie undone where it was."""
    config: dict[str, Any] = json.loads(json.dumps(base.config))
    parts = [config, *(part for part in config.values() if isinstance(part, dict) and _DTYPES & part.keys())]
    assert planned.plan is not None
    word = _WORDS.get(planned.plan.dtype)
    if word is not None and planned.plan.dtype != base.main_dtype:
        stated = False
        for part in parts:
            for field in _DTYPE_FIELDS:
                if field in part:
                    part[field] = word
                    stated = True
        if not stated:
            config["dtype"] = word
    text = fit.text_config(config)
    holder = config["text_config"] if text is not config and isinstance(config.get("text_config"), dict) else config
    if planned.vocabulary is not None:
        for part in (config, holder):
            if "vocab_size" in part:
                part["vocab_size"] = planned.vocabulary
    if planned.untied:
        config["tie_word_embeddings"] = False
        if holder is not config:
            holder["tie_word_embeddings"] = False
    return config


_DTYPES: Final = frozenset(_DTYPE_FIELDS)


def _template(one: Folder) -> str | None:
    """Return a folder's chat template, wherever it stands."""
    found = one.files.get("chat_template.jinja")
    if found is not None:
        try:
            return contents(Path(found[0]), JSON_LIMIT).decode()
        except (OSError, UnicodeDecodeError):
            return None
    for table in (one.table("chat_template.json"), one.table("tokenizer_config.json")):
        value = table.get("chat_template")
        if isinstance(value, str) and len(value) <= _FIELD_LIMIT:
            return value
    return None


def _ends(
    ours: Folder, theirs: Folder, copies: dict[str, str], written: dict[str, bytes], facts: dict[str, Any]
) -> list[Finding]:
    """Compare the end of sequence of both tokenizers; generation stops at the adapter's."""
    base, adapter = _eos(ours), _eos(theirs)
    if adapter is None or base == adapter:
        return []
    facts["eos_differs"] = True
    number = _id(theirs, adapter)
    if number is not None:
        name = layout.GENERATION_CONFIG
        generation = ours.table(name)
        config = (
            json.loads(written[layout.MODEL_CONFIG])
            if layout.MODEL_CONFIG in written
            else ours.table(layout.MODEL_CONFIG)
        )
        if generation:
            old = generation.get("eos_token_id")
            kept = old if isinstance(old, list) else [] if old is None else [old]
            generation["eos_token_id"] = [number, *(k for k in kept if k != number)] if len(kept) > 1 else number
            written[name] = _json(generation)
        if isinstance(config.get("eos_token_id"), int) and config["eos_token_id"] != number:
            config["eos_token_id"] = number
            copies.pop(layout.MODEL_CONFIG, None)
            written[layout.MODEL_CONFIG] = _json(config)
    return [
        findings.finding(
            "merge-eos-differs",
            "tokenizer_config.json",
            f"the adapter's tokenizer ends at {adapter!r}, the base's at {base!r}; the result stops at the adapter's",
            eos_differs=True,
            eos_adapter=adapter,
            eos_base=base,
            eos_token_id=number,
        )
    ]


def _eos(one: Folder) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        value = one.table(name).get("eos_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


def _id(one: Folder, token: str) -> int | None:
    document = one.table("tokenizer.json")
    for added in document.get("added_tokens") or []:
        if isinstance(added, dict) and added.get("content") == token and isinstance(added.get("id"), int):
            return int(added["id"])
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    value = vocab.get(token) if isinstance(vocab, dict) else None
    return value if isinstance(value, int) else None


def _fits(base: Base, planned: Planned, theirs: Folder, facts: dict[str, Any]) -> list[Finding]:
    """Compare the ids that the adapter's tokenizer can emit with the rows the result will have."""
    entries = fit.tokenizer_entries(theirs.table("tokenizer.json"))
    embedding = base.embedding
    if entries is None or embedding is None:
        return []
    stored = base.places[embedding].shape[0]
    rows = planned.vocabulary or stored
    facts["tokenizer_entries"] = entries[0]
    if entries[1] < rows:
        return []
    return [
        findings.finding(
            "merge-tokenizer-beyond",
            "tokenizer.json",
            f"the adapter's tokenizer emits ids up to {entries[1]}, the base has {rows} embedding rows, the adapter "
            "brings none: it belongs to a base that was resized",
            "save the adapter with its embedding rows (save_embedding_layers=True), or merge into the resized base",
            adapter_vocab=entries[1] + 1,
            base_vocab=stored,
            tokenizer_entries=entries[0],
            embedding_rows=rows,
        )
    ]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
