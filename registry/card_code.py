"""The lines of Python that load a version: only classes that its own facts name, else no code at all."""

import re
from typing import Final

from weighbridge.registry.manifest import Manifest

_TASKS: Final = {
    "CAUSAL_LM": ("AutoModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoModelForSeq2SeqLM", None),
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoModel", "feature-extraction"),
}
_ARCHITECTURES: Final = (
    ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    ("ForCausalLM", "AutoModelForCausalLM", "text-generation"),
    ("LMHeadModel", "AutoModelForCausalLM", "text-generation"),
    ("ForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "AutoModelForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "AutoModelForQuestionAnswering", "question-answering"),
    ("ForImageClassification", "AutoModelForImageClassification", "image-classification"),
    ("ForSpeechSeq2Seq", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    ("ForCTC", "AutoModelForCTC", "automatic-speech-recognition"),
)
"""Endings of an architecture's name, the class that loads it, and the task it is for."""


def pipeline_of(manifest: Manifest) -> str | None:
    """Return the Hub's task of a version where its config states one beyond doubt."""
    adapter = manifest.facts.adapter
    if adapter is not None and manifest.kind != "merged":
        return _TASKS.get(adapter.task_type or "", (None, None))[1]
    found = _of_architecture(manifest.facts.weights.architecture)
    return found[1] if found else None


def snippet(manifest: Manifest, target: str) -> tuple[str | None, str | None]:
    """Return (code that loads a version from the folder `target`, a sentence for what code cannot say)."""
    if manifest.kind == "adapter" or (manifest.facts.adapter is not None and manifest.kind != "merged"):
        return _adapter(manifest, target)
    found = _of_architecture(manifest.facts.weights.architecture)
    if found is not None and _holds(manifest, "config.json"):
        tokenizer = _has_tokenizer(manifest)
        lines = [
            f"from transformers import {found[0]}{', AutoTokenizer' if tokenizer else ''}",
            "",
            f"model = {found[0]}.from_pretrained({_text(target)})",
        ]
        if tokenizer:
            lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_text(target)})")
        return "\n".join(lines), None
    return _tensors(manifest, target), "The class of the model is unknown here; the weights load as plain tensors."


def _adapter(manifest: Manifest, target: str) -> tuple[str | None, str | None]:
    base, adapter = manifest.facts.base, manifest.facts.adapter
    task = _TASKS.get((adapter.task_type if adapter else None) or "")
    if not _holds(manifest, "adapter_config.json"):
        return _tensors(manifest, target), "The adapter's own tool loads it; it is not in PEFT's layout."
    if base.id is None:
        return (
            None,
            "The base is unknown: load the model this adapter was trained on, then attach the folder with PEFT.",
        )
    if task is None:
        load = f"PeftModel.from_pretrained(base, {_text(target)})"
        return None, f"Load the base ({base.id}) with the class it was trained with, then {load}."
    tokenizer = _has_tokenizer(manifest)
    revision = f", revision={_text(base.revision)}" if base.revision else ""
    lines = [
        "from peft import PeftModel",
        f"from transformers import {task[0]}{', AutoTokenizer' if tokenizer else ''}",
        "",
        f"base = {task[0]}.from_pretrained({_text(base.id)}{revision})",
        f"model = PeftModel.from_pretrained(base, {_text(target)})",
    ]
    if tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({_text(target)})")
    return "\n".join(lines), None


def _tensors(manifest: Manifest, target: str) -> str | None:
    files = [f.path for f in manifest.files if f.role == "weights" and f.path.endswith(".safetensors")]
    if not files:
        return None
    if len(files) == 1:
        return f"from safetensors.torch import load_file\n\ntensors = load_file({_text(f'{target}/{files[0]}')})"
    return "\n".join(
        [
            "from pathlib import Path",
            "",
            "from safetensors.torch import load_file",
            "",
            "tensors = {}",
            f"for shard in sorted(Path({_text(target)}).rglob('*.safetensors')):",
            "    tensors.update(load_file(shard))",
        ]
    )


def _of_architecture(name: str | None) -> tuple[str, str] | None:
    if not name or not re.fullmatch(r"[A-Za-z0-9_]+", name):
        return None
    return next(((cls, task) for end, cls, task in _ARCHITECTURES if name.endswith(end)), None)


def _has_tokenizer(manifest: Manifest) -> bool:
    return any(f.role == "tokenizer" and "/" not in f.path for f in manifest.files)


def _holds(manifest: Manifest, path: str) -> bool:
    return any(f.path == path for f in manifest.files)


def _text(value: str) -> str:
    """Return a Python literal on one line, in ASCII, with nothing in it that could end a block or begin a tag."""
    return ascii(value).replace("`", "\\x60").replace("<", "\\x3c")
