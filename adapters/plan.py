"""Decide what of a folder is published: an allow-list of inference files with their roles, and a reason for the rest.

Nothing that is not listed here leaves. Reasons: resume-only, training-log, cache, remote-code, duplicate-copy, stale,
pickle, other-artifact, in-progress and not-on-allow-list.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from weighbridge.adapters import layout
from weighbridge.adapters.listing import File
from weighbridge.registry.types import Value

CARD_ROLE: Final = "card"
"""The person's README.md: it feeds the card and is shown as published, but it is no payload."""


class JudgedFile(Value, frozen=True):
    """One file of the inspected folder: published in a role, or left out for a reason."""

    path: str
    size: int
    role: str
    publish: bool
    reason: str | None = None


class Allowed(Value, frozen=True):
    """A finding's code that a person has allowed, and why."""

    code: str
    reason: str


class Policy(Value, frozen=True):
    """The strictest rules of a name's home and mirrors, applied once before the seal."""

    paths: Literal["keep", "rewrite", "block"] = "keep"
    names: bool = True
    unknown_license: Literal["note", "warn", "block"] = "warn"
    deny_licenses: tuple[str, ...] = ()
    remote_code: Literal["block", "allow"] = "block"
    allowed: tuple[Allowed, ...] = ()

    @property
    def keeps_names(self) -> bool:
        """Whether what is sealed may name the machine, its user and its paths."""
        return self.names and self.paths == "keep"


_TOKENIZER = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt|model|bpe)"
    r"|merges\.txt|tokenizer\.model(?:\.v[0-9]+)?|sentencepiece\.bpe\.model|spiece\.model|spm\.model|(?:source|target)\.spm"
    r"|[\w.-]+\.tiktoken|tekken\.json|normalizer\.json|bpe\.codes|dict\.txt|vocab-(?:src|tgt)\.json|chat_template\.(?:jinja|json)"
    r"|[\w.-]+\.jinja"
)
_CONFIG = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|(?:image_|video_|audio_)?(?:pre)?processor_config\.json"
    r"|audio_tokenizer_config\.json|feature_extractor_config\.json|quantiz(?:e|ation)_config\.json|hf_quant_config\.json"
    r"|modules\.json|sentence_[a-z]+_config\.json|config_sentence_transformers\.json|model_index\.json|scheduler_config\.json"
    r"|params\.json|configuration\.json|preprocessor_config\.json|dtypes\.json"
)
_LICENSE = re.compile(r"(?:LICEN[CS]E|COPYING|NOTICE|USE_POLICY|USAGE_POLICY)(?:[-_.][\w.-]+)?", re.IGNORECASE)
_CARD = re.compile(r"readme\.md", re.IGNORECASE)
_LOG = re.compile(
    r".*\.log|.*\.jsonl|events\.out\..*|.*\.tfevents.*|(?:all|train|eval|test|predict)_results\.json|training_[a-z_]*\.(?:png|pdf|svg)"
    r"|.*\.(?:png|jpg|jpeg|svg|pdf|html)|(?:train|training|eval|run)_?(?:args|config|params|log|info|stats|metrics)?\.(?:ya?ml|json|txt)"
    r"|metrics?.*\.json|progress\.csv|.*\.csv"
)
_LOG_FOLDERS: Final = frozenset(
    {"runs", "logs", "log", "wandb", "mlruns", "tensorboard", "tb_logs", "lightning_logs", "eval", "samples"}
)
_CACHE_FOLDERS: Final = frozenset({".cache", "__pycache__", ".git", ".ipynb_checkpoints", ".huggingface", ".locks"})
_CACHE = re.compile(r"\.DS_Store|\.git(?:attributes|ignore)|.*\.lock|.*\.pyc|Thumbs\.db|.*~|\.nfs.*")
_PICKLED = re.compile(r".*\.(?:bin|pt|pth|pkl|pickle|ckpt|th)")
_TEMPLATE_FOLDERS: Final = frozenset({"additional_chat_templates", "chat_templates"})
_PART = re.compile(r"[0-9]+_[A-Z][A-Za-z]+")


def role_of(path: str) -> tuple[str, str | None]:
    """Return (role, None) of an inference file that is no weights file, or (role, reason) of one that is left out.

    `path` is relative to the artifact's folder. Weights and their index are named by the checks, not by a pattern.
    """
    folder, _, name = path.rpartition("/")
    segments = folder.split("/") if folder else []
    if any(segment in _CACHE_FOLDERS or segment.startswith(".") for segment in segments) or _CACHE.fullmatch(name):
        return "cache", "cache"
    if any(layout.is_resume_folder(segment) for segment in segments) or layout.is_resume_name(name):
        return "resume-only", "resume-only"
    if layout.is_in_progress(name):
        return "other", "in-progress"
    nested = bool(segments) and not (
        len(segments) == 1 and (segments[0] in _TEMPLATE_FOLDERS or _PART.fullmatch(segments[0]))
    )
    if not nested:
        if _TOKENIZER.fullmatch(name):
            return "tokenizer", None
        if _CONFIG.fullmatch(name):
            return "config", None
        if _LICENSE.fullmatch(name):
            return "license", None
    if not segments and _CARD.fullmatch(name):
        return CARD_ROLE, None
    if name.endswith(".py"):
        return "code", "remote-code"
    if any(segment in _LOG_FOLDERS for segment in segments) or _LOG.fullmatch(name):
        return "other", "training-log"
    if _PICKLED.fullmatch(name):
        return "other", "pickle"
    return "other", "not-on-allow-list"


def is_paper(name: str) -> bool:
    """Return whether a file goes along with the weights beside it: config, tokenizer, licence, the person's card."""
    return role_of(name)[1] is None


class Named(NamedTuple):
    """The weight files of one artifact, as its checks named them, by path from the inspected root."""

    root: str
    weights: tuple[str, ...] = ()
    listing: str | None = None
    """The index that names them."""
    copies: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    """Python files that the config's auto_map needs."""
    parts: tuple[str, ...] = ()
    """Folders of a pipeline's components, whose configs and tokenizers belong to it."""


def judge_files(files: Mapping[str, File], artifacts: Iterable[Named]) -> list[JudgedFile]:
    """Return every file of the tree in path order, each published with a role or left out with a reason.

    A file belongs to the deepest artifact whose folder holds it; outside of all of them nothing is published.
    """
    by_root: dict[str, list[Named]] = {}
    for artifact in artifacts:
        by_root.setdefault(artifact.root, []).append(artifact)
    judged: list[JudgedFile] = []
    for path in sorted(files):
        owners = [by_root[folder] for folder in folders(path) if folder in by_root]
        role, reason = _judge(path, [a for group in owners for a in group], owners[0] if owners else [])
        judged.append(JudgedFile(path=path, size=files[path].size, role=role, publish=reason is None, reason=reason))
    return judged


def folders(path: str) -> Iterator[str]:
    """Yield the folders that hold a path, the deepest first, `.` last."""
    folder = path
    while "/" in folder:
        folder = folder.rpartition("/")[0]
        yield folder
    yield "."


def _judge(path: str, owners: list[Named], deepest: list[Named]) -> tuple[str, str | None]:
    for artifact in owners:
        if path in artifact.weights:
            return "weights", None
        if path == artifact.listing:
            return "index", None
        if path in artifact.code:
            return "code", "remote-code"
        if path in artifact.copies:
            return "weights", "duplicate-copy"
        if path in artifact.stale:
            return "weights", "stale"
        if path in artifact.slices:
            return "resume-only", "resume-only"
    if not deepest:
        role, reason = role_of(path)
        return role, reason or "not-on-allow-list"
    root = deepest[0].root
    inner = path if root == "." else path.removeprefix(root + "/")
    part, _, below = inner.partition("/")
    if below and "/" not in below and any(part in artifact.parts for artifact in deepest):
        role, reason = role_of(below)
        return (role, reason) if role != CARD_ROLE else ("other", "not-on-allow-list")
    return role_of(inner)
