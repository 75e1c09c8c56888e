"""Hyper-parameters, data and package versions that a run's plain files state.

Recipes of LLaMA-Factory and axolotl, argument files in JSON, the results a Trainer writes, and the tables of a card
that a Trainer made. Only values under known names are taken, so that no path, no token and no user name comes along;
pickled arguments are never read.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters import paths, secrets
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.history import number
from weighbridge.registry import frontmatter
from weighbridge.registry.hub_rules import is_repo_id

_FILE_MAX: Final = 1 << 20
_FILES_MAX: Final = 200
_RESULTS: Final = ("all_results.json", "train_results.json", "eval_results.json")
_ARGUMENTS = re.compile(
    r"(?:training_?args?|train_?args?|training_?arguments|args|hparams|hyper_?parameters|train(?:ing)?_?config)\.json$",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"(?:(?:init_|max_|min_|initial_|peak_|base_)?(?:learning_rate|lr)(?:_\w{1,20})?"
    r"|(?:per_device_|per_gpu_|micro_|global_|total_)?(?:train_|eval_|mini_)?batch_size(?:_per_\w{1,12})?"
    r"|gradient_(?:accumulation|checkpointing|clipping)\w{0,12}|grad_(?:clip|accum)\w{0,12}|max_grad_norm"
    r"|num_(?:train_)?epochs|epochs|num_epochs|max_epochs|max_steps|num_steps|num_train_steps|total_steps"
    r"|warmup_(?:steps|ratio|epochs)|(?:lr_)?scheduler(?:_type)?|lr_scheduler_warmup_\w{1,10}|cosine_\w{1,24}"
    r"|optim(?:izer)?|adam_\w{1,12}|adam_beta[s12]?|betas?|weight_decay|momentum|epsilon"
    r"|(?:data_)?seed|bf16|fp16|fp8|tf32|mixed_precision\w{0,9}|precision|torch_dtype|dtype|training_precision|pure_bf16"
    r"|cutoff_len|max_(?:seq|sequence|source|target|prompt|completion)_len(?:gth)?|max_length|sequence_len|block_size"
    r"|packing|sample_packing|pad_to_sequence_len|group_by_length|train_on_inputs|mask_prompt|val_set_size|val_size"
    r"|max_samples|stage|finetuning_type|adapter|template|chat_template_type|rl|loss_type|label_smoothing(?:_factor)?"
    r"|lora_(?:r|rank|alpha|dropout|target\w{0,12}|modules_to_save|bias)|use_(?:dora|rslora)|pissa_init|loraplus_\w{1,12}"
    r"|quantization_(?:bit|method|type)|load_in_[48]bit|double_quantization|bnb_4bit_\w{1,24}|neftune_noise_alpha|noise_alpha"
    r"|pref_(?:beta|loss|ftx)|dpo_beta|simpo_gamma|kl_coef\w{0,12}|kto_\w{1,20}|orpo_\w{1,12}|flash_attn|flash_attention"
    r"|num_generations|temperature|num_devices|world_size|distributed_type|total_(?:train|eval)_batch_size|strategy"
    r"|train_batch_size|eval_batch_size|logging_steps|eval_steps|save_steps|save_total_limit|dropout|attn_implementation)"
)
_TELLING: Final = ("learning_rate", "lr", "batch_size", "num_train_epochs", "num_epochs", "epochs", "max_steps")
_BULLET = re.compile(r"^\s*[-*] (?P<key>[A-Za-z][\w ]{1,40}): (?P<value>\S.{0,200})$")
_VERSION = re.compile(r"^\s*[-*] (?P<name>[A-Za-z][\w .-]{1,30}?):? v?(?P<version>\d[\w.+@-]{0,60})\s*$")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,80})\s*={2,3}\s*(?P<version>[A-Za-z0-9][\w.+!-]{0,60})")
_PACKAGES: Final = {"pytorch": "torch", "sentence transformers": "sentence-transformers"}


def training(folders: list[Path], card_body: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (hyper-parameters, data) that files in some folders state; what is found first wins. Raises nothing."""
    settings: dict[str, Any] = {}
    data: list[dict[str, Any]] = []
    for folder in folders:
        for name, document in _recipes(folder):
            for key, value in _flat(document):
                if _KNOWN.fullmatch(key) and key not in settings and _harmless(value):
                    settings[key] = _value(value)
            data += [d for d in _data(document, name) if d not in data]
    for key, value in _bullets(card_body, "hyperparameters"):
        name = re.sub(r"\s+", "_", key.strip().lower())
        if _KNOWN.fullmatch(name) and name not in settings and _harmless(value):
            settings[name] = _value(frontmatter.load(value).value) if len(value) < 40 else value
    return settings, data[:_FILES_MAX]


def results(folders: list[Path]) -> dict[str, Any]:
    """Return the metrics that a Trainer wrote into its result files. Raises nothing."""
    found: dict[str, Any] = {}
    for folder in folders:
        for name in _RESULTS:
            document = _read(folder / name)
            for key, value in document.items() if isinstance(document, dict) else ():
                metric = re.match(r"(?:eval|test|train|predict)_", str(key)) and not re.search(
                    r"runtime|per_second|flos|samples$", str(key)
                )
                if metric and isinstance(value, (int, float)) and not isinstance(value, bool):
                    found.setdefault(str(key), number(value))
    return found


def packages(folders: list[Path], configs: list[Mapping[str, Any] | None], card_body: str = "") -> dict[str, str]:
    """Return the package versions that files of the run record; ours are not the trainer's and never count."""
    found: dict[str, str] = {}
    for config in configs:
        for field, name in (("peft_version", "peft"), ("transformers_version", "transformers")):
            value = (config or {}).get(field)
            if isinstance(value, str) and value and len(value) < 100:
                found.setdefault(name, value)
        diffusers = (config or {}).get("_diffusers_version")
        if isinstance(diffusers, str):
            found.setdefault("diffusers", diffusers[:100])
    for line in _section(card_body, "framework versions"):
        match = _VERSION.match(line)
        if match:
            name = match["name"].strip().lower()
            found.setdefault(_PACKAGES.get(name, name.replace(" ", "-")), match["version"])
    for folder in folders:
        for line in (_text(folder / "requirements.txt") or "").splitlines()[:1000]:
            match = _PIN.match(line.strip())
            if match:
                found.setdefault(match["name"].lower().replace("_", "-"), match["version"])
    return dict(sorted(found.items()))


def _recipes(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recipes of a folder by name: YAML with settings in it, JSON that is named like arguments."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if Path(e.path).is_file())[:_FILES_MAX]
    except OSError:
        return
    for name in names:
        if name.endswith((".yaml", ".yml")) and name != "weighbridge.yaml":
            parsed = frontmatter.load(_text(folder / name) or "").value
            if isinstance(parsed, dict) and any(_telling(k) for k, _ in _flat(parsed)):
                yield name, parsed
        elif _ARGUMENTS.fullmatch(name):
            document = _read(folder / name)
            if isinstance(document, dict):
                yield name, document


def _telling(key: str) -> bool:
    return key in _TELLING or key.endswith("batch_size")


def _flat(document: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield settings of a recipe, those of its sections by their own names."""
    for key, value in document.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, Mapping) and depth < 3:
            yield from _flat(value, depth + 1)
        else:
            yield key, value


def _data(document: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the data sets a recipe names: ids as ids, the trainer's own names as names."""
    for key in ("dataset", "datasets", "dataset_name", "train_dataset"):
        value = document.get(key)
        for item in value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else [value]:
            told = item.get("path") or item.get("name") if isinstance(item, Mapping) else item
            if not isinstance(told, str) or not told.strip() or paths.is_local(told.strip()) or len(told) > 200:
                continue
            told = told.strip()
            entry = {"id": told} if is_repo_id(told) and "/" in told else {"name": told}
            revision = item.get("revision") if isinstance(item, Mapping) else None
            if isinstance(revision, str):
                entry["revision"] = revision[:100]
            if _harmless(told):
                yield entry | {"source": name}


def _harmless(value: Any) -> bool:
    """Tell whether a value is a plain one that may leave: no path, no secret, no long text."""
    if isinstance(value, str):
        return (
            len(value) <= 200
            and "\n" not in value
            and not paths.scan_value("", value, field="path")
            and not secrets.scan_bytes(value.encode())
        )
    if isinstance(value, list):
        return len(value) <= 64 and all(isinstance(v, (str, int, float)) and _harmless(v) for v in value)
    return isinstance(value, (int, float))


def _value(value: Any) -> Any:
    return [number(v) for v in value] if isinstance(value, list) else number(value)


def _bullets(body: str, heading: str) -> Iterator[tuple[str, str]]:
    for line in _section(body, heading):
        match = _BULLET.match(line)
        if match:
            yield match["key"], match["value"].strip()


def _section(body: str, heading: str) -> Iterator[str]:
    """Yield the lines below a heading that ends in some words."""
    inside = False
    for line in body.splitlines():
        if line.startswith("#"):
            inside = line.strip("# \t*").lower().endswith(heading)
        elif inside:
            yield line


def _read(path: Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _text(path: Path) -> str | None:
    try:
        if path.stat().st_size > _FILE_MAX:
            return None
        return contents(path, _FILE_MAX).decode("utf-8-sig", "replace")
    except OSError:
        return None
