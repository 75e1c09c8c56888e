"""What file and folder names mean: weights, indexes, trainer state, staging, work in progress.

Names alone decide nothing here but where to look; content has the last word (`formats.sniff`). The names were read in
the sources of transformers 5, peft 0.21, accelerate 1.15 and DeepSpeed.
"""

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Final

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MODEL_CONFIG: Final = "config.json"
MODEL_WEIGHTS: Final = "model.safetensors"
PIPELINE_CONFIG: Final = "model_index.json"
MODEL_INDEX: Final = "model.safetensors.index.json"
GENERATION_CONFIG: Final = "generation_config.json"
TRAINER_STATE: Final = "trainer_state.json"
TRAINING_ARGS: Final = "training_args.bin"
CARD: Final = "README.md"

ARTIFACT_CONFIGS: Final = frozenset({ADAPTER_CONFIG, PIPELINE_CONFIG, ".metadata"})
"""Files that make a folder an artifact, finished or not, even before its weights are there."""

_TRAINER_NAMES: Final = frozenset(
    {"optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "training_args.bin", "latest"}
)
_STEP = re.compile(r"(?:checkpoint|ckpt|step|iter|global_step)[-_=]?0*([0-9]{1,18})", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
_SHARD = re.compile(r"(?P<stem>.+?)[-_](?P<i>[0-9]{1,6})-of-(?P<n>[0-9]{1,6})\.(?P<suffix>safetensors|bin|gguf|pt|pth)")
_STAGING = re.compile(
    r"tmp[-_.].*"  # tmp-checkpoint-500
    r"|.+[-_.](?:tmp|incomplete|partial|unfinished)(?:[-.][0-9a-z]+)?"  # checkpoint-600-tmp, x.orbax-checkpoint-tmp-17
    r"|.*\.staging-.*",  # .run.staging-ab12cd34
    re.IGNORECASE,
)
_IN_PROGRESS = (".incomplete", ".part", ".partial", ".tmp", ".crdownload", ".aria2", ".filepart", ".download")
_VARIANT = re.compile(r"\.(?:fp16|fp32|bf16|fp8|int8|non_ema|ema)\.[a-z]+$")
_RNG_RANK = re.compile(r"rng_state_([0-9]+)\.pth")
_MODEL_PICKLE = re.compile(r"pytorch_model(?:[-.][\w.-]+)?\.bin(?:\.index\.json)?|model-[0-9]+-of-[0-9]+\.bin")
_TAG = re.compile(r"global_step[0-9]+")

_RESUME_NAMES: Final = frozenset(
    {
        "optimizer.pt",
        "optimizer.bin",
        "optimizer.safetensors",
        "scheduler.pt",
        "scheduler.bin",
        "scaler.pt",
        "rng_state.pth",
        "training_args.bin",
        "trainer_state.json",
        "latest",
        "zero_to_fp32.py",
        "random_states.pkl",
        "sampler.bin",
        "dataloader_state.pt",
        "training_state.pt",
        "recipe_state.pt",
        "train_state.pt",
        "latest_checkpointed_iteration.txt",
    }
)
_RESUME_PATTERNS = re.compile(
    r"(?:optimizer|optim|scheduler|scaler|sampler|dl_state_dict|custom_checkpoint|dataloader)(?:_[0-9]+)?\.(?:pt|bin|pth|pkl)"
    r"|rng_state(?:_[0-9]+)?\.pth|random_states_[0-9]+\.pkl|rank[0-9]+-of-[0-9]+-optimizer\.pt"
    r"|(?:optimizer|scheduler|training_state|trainer_state|recipe_state|rng)[-_.].*\.(?:pt|pth|bin|pkl|th)"
    r"|.*_optim_states\.pt|.*_model_states\.pt|.*\.distcp"
)
_RESUME_FOLDERS = re.compile(r"global_step[0-9]+|optimizer(?:_[0-9]+)?|recipe_state|optim|rng|dataloader|train_state")
_OTHER_FORMS: Final = frozenset(
    {"original", "metal", "onnx", "openvino", "gguf", "ggml", "coreml", "tflite", "flax", "tf"}
)
"""Folders inside a model folder that hold the same model in another form."""

_SENTENCE_PART = re.compile(r"[0-9]+_[A-Z][A-Za-z]+")
_WEIGHT_SUFFIXES: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".th",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".onnx",
    ".tflite",
    ".distcp",
    ".npz",
    ".h5",
    ".msgpack",
    ".pkl",
    ".nemo",
)
_INDEX_SUFFIX: Final = ".index.json"


@lru_cache(maxsize=1 << 16)
def is_weights_name(name: str) -> bool:
    """Return whether a file may hold weights, or names the shards that do; resume-only files do not count."""
    if name.endswith(_INDEX_SUFFIX):
        return name.endswith((".safetensors.index.json", ".bin.index.json"))
    return name.endswith(_WEIGHT_SUFFIXES) and not is_resume_name(name)


@lru_cache(maxsize=1 << 16)
def is_resume_name(name: str) -> bool:
    """Return whether a file serves only to go on training."""
    return name in _RESUME_NAMES or _RESUME_PATTERNS.fullmatch(name) is not None


def is_trainer_name(name: str) -> bool:
    """Return whether the Trainer leaves such a file beside the weights of a checkpoint."""
    return name in _TRAINER_NAMES or _RNG_RANK.fullmatch(name) is not None


def is_resume_folder(name: str) -> bool:
    """Return whether a folder of this name holds optimizer and rank state of the checkpoint around it."""
    return _RESUME_FOLDERS.fullmatch(name) is not None


def is_form_name(name: str) -> bool:
    """Return whether a folder of this name inside a whole model holds the same model in another form."""
    return name.lower() in _OTHER_FORMS


def is_sentence_part(name: str) -> bool:
    """Return whether sentence-transformers names the folders of its layers like this: `1_Pooling`."""
    return _SENTENCE_PART.fullmatch(name) is not None


def is_part_name(name: str) -> bool:
    """Return whether a folder of this name inside a whole model is part of it or another form of it."""
    return is_form_name(name) or is_sentence_part(name)


def is_whole_model(names: Collection[str]) -> bool:
    """Return whether these files make the folder a model: a config and weights of its own."""
    return MODEL_CONFIG in names and any(is_weights_name(name) for name in names)


def step_of(name: str) -> int | None:
    """Return the step a folder's name tells: 280 for `checkpoint-280`, 10 for `iter_0000010`."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    """Return whether the Trainer names its checkpoint folders like this."""
    return _CHECKPOINT.fullmatch(name) is not None


def is_staging_name(name: str) -> bool:
    """Return whether a folder still has the name that trainers write under before they rename it."""
    return _STAGING.fullmatch(name) is not None


def is_in_progress(name: str) -> bool:
    """Return whether a file is a download or a save under way, by its name."""
    return name.endswith(_IN_PROGRESS)


def shard_of(name: str) -> tuple[str, int, int, str] | None:
    """Return (stem, i, n, suffix) of `stem-0000i-of-0000n.suffix`, else None."""
    match = _SHARD.fullmatch(name)
    return (match["stem"], int(match["i"]), int(match["n"]), match["suffix"]) if match else None


def is_variant_name(name: str) -> bool:
    """Return whether a file holds the weights of another in a second precision: `model.fp16.safetensors`."""
    return _VARIANT.search(name) is not None


def is_tag_name(name: str) -> bool:
    """Return whether DeepSpeed names its tag folders like this."""
    return _TAG.fullmatch(name) is not None


def is_model_pickle(name: str) -> bool:
    """Return whether transformers or accelerate save a whole model, or a shard of one, as a pickle under this name."""
    return _MODEL_PICKLE.fullmatch(name) is not None


def is_bare(names: Collection[str]) -> bool:
    """Return whether a folder holds shards of some trainer's own and nothing that makes them a model."""
    made = {MODEL_CONFIG, ADAPTER_CONFIG, MODEL_WEIGHTS, MODEL_INDEX, PIPELINE_CONFIG, ADAPTER_WEIGHTS}
    weights = [name for name in names if is_weights_name(name)]
    return bool(weights) and not made & set(names) and all(name.endswith(".safetensors") for name in weights)
