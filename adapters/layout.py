"""What file and folder names mean: weights, indexes, trainer state, staging, work in progress.

Names alone decide nothing here but where to look; content has the last word (`formats.sniff`). The names were read in
the sources of transformers 5, peft 0.21, accelerate 1.15 and DeepSpeed.
"""

import re
from collections.abc import Collection, Mapping
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
_STEP_LIKE = re.compile(
    r"(?:checkpoint|ckpt|step|steps|iter|iteration|epoch|global_step|samples|tokens)[-_=.]?\d.*"
    r"|.*[-_](?:step|epoch|ckpt|iter)[-_=]?\d+"
    r"|(?:epoch|step)=.*",
    re.IGNORECASE,
)
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
_MODEL_PICKLE = re.compile(
    r"(?:diffusion_)?pytorch_model(?:[-.][\w.-]+)?\.bin(?:\.index\.json)?|model-[0-9]+-of-[0-9]+\.bin"
)
_MODEL_SAFETENSORS = re.compile(r"(?:diffusion_pytorch_)?model(?:[._][\w-]+)?\.safetensors")
"""transformers, diffusers with their variants, and accelerate, which numbers further models."""

_TAG = re.compile(r"global_step[0-9]+")
_SLICE = re.compile(r"shard-(?P<rank>[0-9]{5})-(?P<rest>model-[0-9]{5}-of-[0-9]{5}\.safetensors)")
"""A rank's part of each tensor (torch.distributed.checkpoint: HuggingFaceStorageWriter with save_distributed)."""

_RANK_FOLDER = re.compile(r"mp_rank_[0-9]{2,3}(?:_[0-9]{3}){0,2}")
_FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_[0-9]{1,3}")
_RANK_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_[0-9]{1,6}_mp_rank_[0-9]{1,6}_(?:optim|model)_states\.pt")
_AVERAGED = re.compile(r"(?P<lead>|.*[-_.])(?:ema|swa|averaged?|polyak)(?P<tail>(?:[-_.].*)?)", re.IGNORECASE)
_BYTE_PART = re.compile(
    r"(?P<whole>.+\.(?:gguf|safetensors|bin|pt|pth|ckpt|onnx))(?P<mark>\.part-?|-split-|\.split-?|\.)"
    r"(?P<i>[0-9]{1,4}|[a-z]{1,3})(?:of(?P<n>[0-9]{1,4}))?"
)

RANK_NAMES: Final = (
    re.compile(r"(?P<lead>.*world_size_(?P<n>[0-9]{1,6})_rank_)(?P<i>[0-9]{1,6})(?P<tail>\.(?:pt|pth|bin|ckpt))"),
    re.compile(r"(?P<lead>.*?rank[-_]?)(?P<i>[0-9]{1,6})(?P<mid>[-_]?of[-_]?)(?P<n>[0-9]{1,6})(?P<tail>.*\.(?:pt|pth|bin|ckpt))"),
    re.compile(r"(?P<lead>consolidated\.)(?P<i>[0-9]{2,3})(?P<tail>\.(?:pt|pth))"),
    re.compile(r"(?P<lead>(?:.*[-_.])?(?:mp|tp|pp|dp|ep|model|shard|global)?[-_]?rank[-_]?)(?P<i>[0-9]{1,6})(?P<tail>(?:[-_].*)?\.(?:pt|pth|bin|ckpt))"),
)  # fmt: skip
"""How the names of files count ranks."""

_RANK_SLICE = re.compile(
    r"(?P<lead>(?:.*[-_.])?(?:mp_rank|tp_rank|rank|tp|mp)[-_]?)(?P<i>[0-9]{1,5})(?:[-_]?of[-_]?(?P<n>[0-9]{1,5}))?"
    r"(?P<tail>(?:[-_.][\w-]+)*\.safetensors)",
    re.IGNORECASE,
)
"""A tensor-parallel rank's part of a model: `rank0.safetensors` of TensorRT-LLM, `model-rank-0-part-0.safetensors` of
vLLM."""

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
    r"|.*_optim_states\.pt|.*_model_states\.pt|.*\.distcp|\.metadata"
    r"|(?:optim|extra_state|optimizer)_world_size_[0-9]+_rank_[0-9]+\.pt"
    r"|shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors"
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
    ".pt2",
    ".engine",
    ".plan",
    ".trt",
)
_INDEX_SUFFIX: Final = ".index.json"


@lru_cache(maxsize=1 << 16)
def is_weights_name(name: str) -> bool:
    """Return whether a file may hold weights, or names the shards that do; resume-only files do not count."""
    if name.endswith(_INDEX_SUFFIX):
        return name.endswith((".safetensors.index.json", ".bin.index.json"))
    return (name.endswith(_WEIGHT_SUFFIXES) and not is_resume_name(name)) or byte_part(name) is not None


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


def is_rank_folder(name: str) -> bool:
    """Return whether Megatron names a rank's folder like this: `mp_rank_00`, `mp_rank_01_003`."""
    return _RANK_FOLDER.fullmatch(name) is not None


def is_sharded_state(names: Collection[str]) -> bool:
    """Return whether a folder holds a torch distributed checkpoint, by its names."""
    return ".metadata" in names or any(name.endswith(".distcp") for name in names)


def slice_of(name: str) -> tuple[int, str] | None:
    """Return (rank, file that the ranks make together) of `shard-00001-model-00001-of-00002.safetensors`, else None."""
    match = _SLICE.fullmatch(name)
    return (int(match["rank"]), match["rest"]) if match else None


def rank_slice(name: str) -> tuple[int, int, str] | None:
    """Return (rank, ranks that the name states or 0, what the ranks' names share) of `rank0.safetensors`, else None."""
    match = _RANK_SLICE.fullmatch(name) if name.endswith(".safetensors") else None
    if match is None or slice_of(name) is not None:
        return None
    return int(match["i"]), int(match["n"] or 0), f"{match['lead']}*{name[match.end('i') :]}"


def is_fsdp_folder(name: str) -> bool:
    """Return whether accelerate names the folder of a model's pieces like this, inside a checkpoint's folder."""
    return _FSDP_FOLDER.fullmatch(name) is not None


def is_rank_like(name: str) -> bool:
    """Return whether a torch file's name counts ranks: `consolidated.00.pth`, `model_rank_3.pt`."""
    return any(pattern.fullmatch(name) for pattern in RANK_NAMES)


def is_rank_name(name: str) -> bool:
    """Return whether DeepSpeed names one rank's part of the weights like this."""
    return _RANK_FILE.fullmatch(name) is not None


def is_averaged(name: str) -> bool:
    """Return whether a file or folder holds a running average of weights, by its name: `model_ema.pt`, `unet-swa`."""
    return raw_of(name) is not None


def raw_of(name: str) -> str | None:
    """Return the name of the file or folder whose average this is by its name, None where it is none."""
    match = _AVERAGED.fullmatch(name)
    if match is None:
        return None
    lead, tail = match["lead"], match["tail"]
    return f"{lead[:-1]}{tail}" if lead else tail.lstrip("-_.")


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


def is_step_like(name: str) -> bool:
    """Return whether a folder's name is that of a checkpoint of a run rather than of a run."""
    return step_of(name) is not None or _STEP_LIKE.fullmatch(name) is not None


def is_checkpoint_name(name: str) -> bool:
    """Return whether the Trainer names its checkpoint folders like this."""
    return _CHECKPOINT.fullmatch(name) is not None


def is_staging_name(name: str) -> bool:
    """Return whether a folder still has the name that trainers write under before they rename it."""
    return _STAGING.fullmatch(name) is not None


def is_in_progress(name: str) -> bool:
    """Return whether a file is a download or a save under way, by its name."""
    return name.endswith(_IN_PROGRESS)


def left_over(times: Mapping[str, int]) -> list[str]:
    """Return the files in progress that no writer comes back for; `times` are the last changes of a folder's files.

    Such a file bears the name of one that is there, and all weights and indexes beside it are younger. A save that is
    under way, stalled or not, leaves an older one: at least the file that it is about to replace. Times are compared
    with each other only, never with a clock.
    """
    weights = [name for name in times if is_weights_name(name) and not is_in_progress(name)]
    return sorted(
        name
        for name, time in times.items()
        if (ending := next((e for e in _IN_PROGRESS if name.endswith(e)), None)) is not None
        and (whole := name.removesuffix(ending)) in times
        and all(times[other] > time for other in (whole, *weights))
    )


def shard_of(name: str) -> tuple[str, int, int, str] | None:
    """Return (stem, i, n, suffix) of `stem-0000i-of-0000n.suffix`, else None."""
    match = _SHARD.fullmatch(name)
    return (match["stem"], int(match["i"]), int(match["n"]), match["suffix"]) if match else None


def byte_part(name: str) -> str | None:
    """Return the name of the file that this one is a byte part of (`x.gguf.part1of2`, `x.gguf.part-aa`), else None."""
    match = _BYTE_PART.fullmatch(name)
    if match is None or (match["mark"] == "." and not (match["i"].isdigit() and len(match["i"]) == 3)):
        return None
    return match["whole"]


def missing_byte_parts(names: Collection[str]) -> list[str]:
    """Return the byte parts of one file that its parts' names tell of and that are not there."""
    found = [match for name in names if (match := _BYTE_PART.fullmatch(name)) is not None]
    if not found:
        return []
    first = found[0]
    if first["i"].isdigit():
        have = {int(match["i"]) for match in found if match["i"].isdigit()}
        start = 0 if 0 in have and not first["n"] else 1
        count = int(first["n"]) if first["n"] else max(have) + 1 - start
        tail = f"of{first['n']}" if first["n"] else ""
        width = len(first["i"])
        return [
            f"{first['whole']}{first['mark']}{i:0{width}d}{tail}" for i in range(start, start + count) if i not in have
        ]
    width = len(first["i"])
    have = {_of_letters(match["i"]) for match in found}
    return [f"{first['whole']}{first['mark']}{_letters(i, width)}" for i in range(max(have) + 1) if i not in have]


def _of_letters(text: str) -> int:
    value = 0
    for letter in text:
        value = value * 26 + ord(letter) - 97
    return value


def _letters(value: int, width: int) -> str:
    text = ""
    for _ in range(width):
        value, rest = divmod(value, 26)
        text = chr(97 + rest) + text
    return text


def is_variant_name(name: str) -> bool:
    """Return whether a file holds the weights of another in a second precision: `model.fp16.safetensors`."""
    return _VARIANT.search(name) is not None


def is_tag_name(name: str) -> bool:
    """Return whether DeepSpeed names its tag folders like this."""
    return _TAG.fullmatch(name) is not None


def is_model_pickle(name: str) -> bool:
    """Return whether transformers or accelerate save a whole model, or a shard of one, as a pickle under this name."""
    return _MODEL_PICKLE.fullmatch(name) is not None


def owes_config(names: Collection[str]) -> bool:
    """Return whether weights lie under names by which libraries find a model through its config.json.

    An index, shards, `model.safetensors` and its variants, `pytorch_model.bin` and its kin, in whatever container. What
    a training tool names its own way (`last.ckpt`, `weights.safetensors`, pieces, rank files) is no library's model.
    """
    return any(
        name.endswith(_INDEX_SUFFIX)
        or is_model_pickle(name)
        or shard_of(name) is not None
        or _MODEL_SAFETENSORS.fullmatch(name) is not None
        for name in names
    )


def is_bare(names: Collection[str]) -> bool:
    """Return whether a folder holds shards of some trainer's own and nothing that makes them a model."""
    made = {MODEL_CONFIG, ADAPTER_CONFIG, MODEL_WEIGHTS, MODEL_INDEX, PIPELINE_CONFIG, ADAPTER_WEIGHTS}
    weights = [name for name in names if is_weights_name(name)]
    return bool(weights) and not made & set(names) and all(name.endswith(".safetensors") for name in weights)
