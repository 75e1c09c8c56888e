"""LoRA files of image tools, which stand alone without a config: diffusers, kohya and LyCORIS, lora_diffusion.

    transformer.blocks.0.attn.to_q.lora_A.weight           diffusers, PEFT's parts under the pipeline's component
    unet.down_blocks.0.attn1.processor.to_q_lora.down.weight   diffusers, older
    lora_unet_down_blocks_0_attn1_to_q.lora_down.weight    kohya, with a scalar `alpha` per module
    unet:12:down                                           lora_diffusion

Rank and alpha come from the header's metadata, from alpha tensors, or from shapes; a strength that nothing states is
told as assumed.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import keys, layout, peft_config, values, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.formats.safetensors import Header, Tensor
from weighbridge.adapters.listing import File
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.whole import file_findings, header_of, some
from weighbridge.registry import findings
from weighbridge.registry.types import AdapterFacts, BaseFacts, Finding

VALUES_LIMIT: Final = 1 << 30
_KOHYA = re.compile(r"(?:lora|lycoris)_(?P<part>unet|te[123]?|transformer|prior|prior_unet|dit|vae)_")
_FIRST: Final = frozenset((
    "a", "A", "lora_A", "lora_down", "down", "lora.down", "lora_a", "hada_w1_b", "lokr_w2_b",
))  # fmt: skip
_PART = re.compile(
    r"(?P<module>.+?)[._](?P<half>lora_A|lora_B|lora_down|lora_up|lora_mid|lora\.down|lora\.up|lora_linear_layer\.down|"
    r"lora_linear_layer\.up|down|up|hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|diff|diff_b|dora_scale|"
    r"lora_magnitude_vector|alpha)(?:\.default)?(?:\.weight|\.bias)?"
)
_CLONED = re.compile(r"(?P<part>[a-z_0-9]+):(?P<i>[0-9]+):(?P<half>up|down)")
_TOKEN = re.compile(r"<[^<>\s]{1,80}>")
_UNNAMED = re.compile(r"(?P<head>.*?)(?P<half>w_a|w_b|_A|_B|down|up|lora_a|lora_b)(?P<tail>[._]?[0-9]*(?:\.weight)?)")
_DOWN: Final = frozenset({"lora_A", "lora_down", "lora.down", "lora_linear_layer.down", "down", "w_a", "_A", "lora_a"})
_UP: Final = frozenset({"lora_B", "lora_up", "lora.up", "lora_linear_layer.up", "up", "w_b", "_B", "lora_b"})
_COMPONENTS: Final = (
    "transformer_2",
    "transformer",
    "unet",
    "text_encoder_3",
    "text_encoder_2",
    "text_encoder",
    "prior",
)
_TEXT_ENCODERS: Final = {"te": "text_encoder", "te1": "text_encoder", "te2": "text_encoder_2", "te3": "text_encoder_3"}
_STEP_COPY = re.compile(r"(?P<stem>.+?)[-_](?:step)?(?P<step>[0-9]{4,9})\.safetensors")
_RANK_LIMIT: Final = 1024
_CONFIGS: Final = "lora_adapter_metadata"
"""Where diffusers keeps the LoRA config of each component in a header (diffusers: LORA_ADAPTER_METADATA_KEY)."""

_HINTS: Final = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name", "base_model", "sshs_model_name")


class _Key(NamedTuple):
    module: str
    half: str


def dialect(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str | None:
    """Return the artifact name of a file's tool by its keys, None for what is no LoRA or has PEFT's own names.

    diffusers writes a component's LoRA under the component's own names, with the config in the header's metadata.
    """
    names = tensors.keys()
    if any(name.startswith("base_model.") for name in names):
        return None
    if _CONFIGS in (metadata or {}) and keys.is_lora(names):
        return "diffusers-lora"
    if any(_KOHYA.match(name) for name in names):
        return "kohya-lora"
    if any(_CLONED.fullmatch(name) for name in names):
        return "diffusion-lora"
    if any((key := _key(name)) is not None and _is_image_key(key) for name in names):
        return "diffusers-lora"
    return "lora-unknown" if not keys.is_lora(names) and _is_unnamed(tensors) else None


def _is_image_key(key: _Key) -> bool:
    """Return whether a key is of an image pipeline: PEFT's own parts count only under a pipeline's component."""
    if key.half in {"lora_A", "lora_B"}:
        return bool(_component(key.module))
    return key.half.startswith(("lora", "hada", "lokr")) and key.half != "lora_magnitude_vector"


def _key(name: str) -> _Key | None:
    match = _PART.fullmatch(name)
    if match is None:
        return None
    half = match["half"]
    if half in {"down", "up"} and not match["module"].endswith(("_lora", ".lora")):
        return None
    return _Key(match["module"], f"lora_{half}" if half in {"down", "up"} else half)


def _is_unnamed(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file holds nothing but pairs of thin matrices under names of nobody's."""
    pairs: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _UNNAMED.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            return False
        pairs.setdefault((match["head"], match["tail"]), {})[match["half"]] = tensor
    if not pairs:
        return False
    for pair in pairs.values():
        down = next((t for half, t in pair.items() if half in _DOWN), None)
        up = next((t for half, t in pair.items() if half in _UP), None)
        if down is None or up is None or len(pair) != 2:
            return False
        rank = down.shape[0]
        if rank != up.shape[1] or not 0 < rank <= min(_RANK_LIMIT, down.shape[1], up.shape[0]):
            return False
    return True


def step_copies(files: Iterable[File]) -> dict[str, str]:
    """Return {numbered copy: the result it is a copy of} among files of one folder."""
    names = {file.name: file.path for file in files}
    found: dict[str, str] = {}
    for name, path in names.items():
        match = _STEP_COPY.fullmatch(name)
        if match is not None and f"{match['stem']}.safetensors" in names:
            found[path] = names[f"{match['stem']}.safetensors"]
    return found


def judge(place: Place, file: File, *, several: bool = False, copies: tuple[str, ...] = ()) -> Draft:
    """Return one LoRA file of an image tool as a draft; `copies` are numbered copies of an earlier step."""
    header = header_of(file, place.reader)
    name = dialect(header.tensors, header.metadata) or "diffusers-lora"
    draft = Draft(place, name, "adapter", Named(root=place.folder, weights=(file.path,), copies=copies))
    draft.alone = file.path if several else None
    faults = file_findings(file, place.reader)
    counted, draft.weights = weights.summary(header.tensors)
    draft.add({**counted, "base_model": None, "pickle_format": False}, faults)
    draft.metadata = header.metadata
    if copies:
        draft.facts["step_copies"] = list(copies)
    if name == "lora-unknown":
        draft.findings.append(
            findings.finding(
                "lora-dialect-unknown",
                file.path,
                f"{file.path} holds {len(header.tensors)} thin matrices in pairs under names of no known tool: which "
                "module each belongs to is not in the file",
                "keep the program that trained it beside it; it is not translated to another tool's names",
                severity="warn",
            )
        )
    sound = not any(f.severity == "block" for f in faults)
    modules = describe(draft, file.path, name, header, _alphas(file, header) if sound else {})
    draft.findings += _halves(file, modules)
    if sound and place.reader.values and header.payload_bytes <= VALUES_LIMIT:  # else staging looks at them
        _values(draft, file, header, modules)
    return draft


def describe(
    draft: Draft, subject: str, name: str, header: Header, alphas: Mapping[str, int | float | None]
) -> dict[str, dict[str, Tensor]]:
    """Tell modules, components, rank and strength of a LoRA of this dialect; `alphas` are values of alpha tensors."""
    modules, parts, loose = _modules(header.tensors, name)
    draft.facts |= {"parts": sorted(parts), "adapted_modules": len(modules), "base_model": None}
    if loose:
        draft.facts["tokens"] = sorted(loose)
    _strength(draft, subject, header.metadata or {}, modules, alphas)
    draft.base = BaseFacts(relation="adapter")
    hint = next((text for key in _HINTS if (text := (header.metadata or {}).get(key))), None)
    if hint:
        draft.facts["base_model_hint"] = hint
    draft.adapter = AdapterFacts(
        peft_type="LORA" if name != "lora-unknown" else "unknown",
        rank=draft.facts.get("rank"),
        alpha=draft.facts.get("alpha"),
        scaling=draft.facts.get("scaling"),
        variants=[name],
    )
    return modules


def _modules(tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, dict[str, Tensor]], set[str], list[str]]:
    """Return the parts of every module, the components they belong to, and trained word vectors that ride along."""
    modules: dict[str, dict[str, Tensor]] = {}
    parts: set[str] = set()
    loose: list[str] = []
    for label, tensor in tensors.items():
        cloned = _CLONED.fullmatch(label)
        unnamed = _UNNAMED.fullmatch(label) if name == "lora-unknown" else None
        key = _key(label)
        if cloned is not None:
            modules.setdefault(f"{cloned['part']}:{cloned['i']}", {})[f"lora_{cloned['half']}"] = tensor
            parts.add(cloned["part"])
        elif unnamed is not None:
            modules.setdefault(unnamed["head"] + unnamed["tail"], {})[
                "lora_down" if unnamed["half"] in _DOWN else "lora_up"
            ] = tensor
        elif key is not None:
            modules.setdefault(key.module, {})[key.half] = tensor
            parts |= _component(key.module)
        elif _TOKEN.fullmatch(label):
            loose.append(label)
    return modules, parts, loose


def _component(module: str) -> set[str]:
    match = _KOHYA.match(module)
    if match is not None:
        part = match["part"]
        return {_TEXT_ENCODERS.get(part, "prior" if part == "prior_unet" else "transformer" if part == "dit" else part)}
    first, _, rest = module.partition(".")
    if first in _COMPONENTS and rest:
        return set() if rest.startswith("h.") else {first}  # GPT-2 calls its own trunk transformer
    if first == "diffusion_model" or module.startswith("model.diffusion_model."):
        return (
            {"unet"}
            if any(word in module for word in ("input_blocks", "down_blocks", "up_blocks"))
            else {"transformer"}
        )
    return set()


def _rank_of(parts: Mapping[str, Tensor]) -> int | None:
    for half in ("lora_A", "lora_down", "lora.down", "lora_linear_layer.down", "hada_w1_b", "lokr_w2_b"):
        if half in parts and parts[half].shape:
            return parts[half].shape[0]
    for half in ("lora_B", "lora_up", "lora.up", "lora_linear_layer.up", "hada_w1_a"):
        if half in parts and len(parts[half].shape) > 1:
            return parts[half].shape[1]
    return None


def _strength(
    draft: Draft,
    subject: str,
    metadata: Mapping[str, str],
    modules: Mapping[str, Mapping[str, Tensor]],
    read: Mapping[str, int | float | None],
) -> None:
    """Tell rank, alpha and scaling: of alpha tensors, of the header, or assumed."""
    ranks = {module: rank for module, parts in modules.items() if (rank := _rank_of(parts)) is not None}
    configs = _configs(metadata)
    only = next(iter(configs.values())) if len(configs) == 1 else {}
    mine = {module: _config_of(module, configs) for module in ranks}
    facts = draft.facts
    different = sorted(set(ranks.values()))
    facts["ranks"] = different
    if different:
        facts["rank_from_shapes"] = Counter(ranks.values()).most_common(1)[0][0]
    if len(different) > 1:
        facts["rank_by_module"] = _by_module(ranks)
    stated = peft_config.number(only.get("r")) or _decimal(metadata.get("ss_network_dim"))
    facts["rank"] = different[0] if len(different) == 1 else stated
    alphas: dict[str, int | float] = {}
    strengths: dict[str, float] = {}
    for module, rank in ranks.items():
        own = modules[module].get("alpha")
        alpha = read.get(own.name) if own is not None else None
        config, path = mine[module]
        if alpha is None:
            alpha = peft_config.in_pattern(peft_config.patterns(config, "alpha_pattern"), path)
        if alpha is None:
            alpha = peft_config.number(config.get("lora_alpha"))
        strength = peft_config.strength(rank, alpha, stabilised=config.get("use_rslora") is True)
        if alpha is not None and strength is not None:
            alphas[module], strengths[module] = alpha, strength
    shown = set(alphas.values())
    covered = bool(ranks) and len(alphas) == len(ranks)
    written = any("alpha" in modules[module] for module in ranks)
    usual = None if written else peft_config.number(only.get("lora_alpha"))
    facts["alpha"] = shown.pop() if covered and len(shown) == 1 else usual
    _ranks_stated(draft, subject, ranks, mine)
    facts["scaling"] = None
    if covered:
        every = set(strengths.values())
        facts["scaling"] = every.pop() if len(every) == 1 else None
        if every:
            facts["scaling_by_module"] = _by_module(strengths)
        return
    if not ranks:
        return
    facts["assumed_scaling"] = 1.0
    draft.findings.append(
        findings.finding(
            "alpha-unknown",
            subject,
            f"{subject} records no alpha for {len(ranks) - len(strengths)} of {len(ranks)} modules"
            + (f" of ranks {', '.join(map(str, different))}" if len(different) > 1 else "")
            + ": alpha is taken as each module's own rank (scaling 1.0), as diffusers does",
            "save it with its alpha, module by module",
            severity="warn",
            assumed_scaling=1.0,
            ranks=different,
        )
    )


def _ranks_stated(
    draft: Draft, subject: str, ranks: Mapping[str, int], mine: Mapping[str, tuple[Mapping[str, Any], str]]
) -> None:
    """Find modules whose matrices have another rank than the config in the header states, which then fits nothing."""
    wrong: dict[str, float] = {}
    for module, rank in ranks.items():
        config, path = mine[module]
        special = peft_config.in_pattern(peft_config.patterns(config, "rank_pattern"), path)
        stated = special if special is not None else peft_config.number(config.get("r"))
        if stated is not None and stated != rank:
            wrong[module] = stated
    if not wrong:
        return
    module = min(wrong)
    draft.findings.append(
        findings.finding(
            "rank-mismatch",
            subject,
            f"the config in the header says rank {wrong[module]:g}, the matrices of {len(wrong)} modules have another, "
            f"such as {module} with {ranks[module]}: the adapter would not load",
            "save it again with the config of its training",
            rank=wrong[module],
            rank_from_shapes=draft.facts["rank_from_shapes"],
            modules=sorted(wrong)[:50],
        )
    )


def _by_module(table: Mapping[str, int | float]) -> dict[str, int | float]:
    """Return the values that differ from the usual one, which is `default` where most modules have it."""
    ordered = Counter(table.values()).most_common(2)
    usual, count = ordered[0]
    if count * 2 <= len(table):
        return dict(table)
    return {**{module: value for module, value in table.items() if value != usual}, "default": usual}


def _configs(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the LoRA config that the header states for each component; `""` where it is for the whole file."""
    try:
        table = json.loads(metadata.get(_CONFIGS, ""))
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        alpha = _decimal(metadata.get("ss_network_alpha"))
        return {"": {"lora_alpha": alpha}} if alpha is not None else {}
    found: dict[str, dict[str, Any]] = {}
    for key, value in table.items():
        component, _, name = key.rpartition(".")
        found.setdefault(component, {})[name] = value
    return found


def _config_of(module: str, configs: Mapping[str, dict[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """Return the config that covers a module, and the module's path inside its component."""
    for component, config in configs.items():
        if component and module.startswith(component + "."):
            return config, module[len(component) + 1 :]
    return (next(iter(configs.values())), module) if len(configs) == 1 else ({}, module)


def _decimal(text: str | None) -> int | float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return peft_config.number(int(value) if value.is_integer() else value) if abs(value) < 1e9 else None


def _alphas(file: File, header: Header) -> dict[str, int | float | None]:
    """Return the values of the alpha tensors by name."""
    found: dict[str, int | float | None] = {}
    try:
        with Path(file.source).open("rb") as stream:
            for name, tensor in header.tensors.items():
                if is_alpha(name) and tensor.elements == 1:
                    stream.seek(header.data_start + tensor.begin)
                    found[name] = scalar(tensor.dtype, stream.read(tensor.size))
    except OSError:
        return {}
    return found


def is_alpha(name: str) -> bool:
    """Return whether a tensor is a module's alpha."""
    return name.endswith(".alpha")


def scalar(dtype: str, data: bytes) -> int | float | None:
    """Return one element as a number, whole where it is whole."""
    try:
        read = values.decode(dtype, data)
    except (ValueError, struct.error):
        return None
    value = peft_config.number(read[0]) if read else None
    return int(value) if value is not None and float(value).is_integer() else value


_HALVES: Final = {
    "lora_A": "lora_B",
    "lora_down": "lora_up",
    "lora.down": "lora.up",
    "lora_linear_layer.down": "lora_linear_layer.up",
    "hada_w1_a": "hada_w1_b",
    "hada_w2_a": "hada_w2_b",
}


def _halves(file: File, modules: Mapping[str, Mapping[str, Tensor]]) -> list[Finding]:
    lonely = [
        f"{module}.{missing}.weight"
        for module, parts in modules.items()
        for one, two in _HALVES.items()
        for have, missing in ((one, two), (two, one))
        if have in parts and missing not in parts
    ]
    if not lonely:
        return []
    return [
        findings.finding(
            "lora-half-missing",
            file.path,
            f"{file.path}: one half without the other; missing: {some(sorted(lonely))}",
            "save the adapter again",
            missing_tensors=sorted(lonely),
        )
    ]


def _values(draft: Draft, file: File, header: Header, modules: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Look at every value: NaN, infinities, and second halves that are all zero."""
    nan: dict[str, int] = {}
    inf: dict[str, int] = {}
    seconds = {t.name for parts in modules.values() for half, t in parts.items() if half in _UP}
    zero = 0
    try:
        for name, seen in values.numbers(Path(file.source), header, header.tensors):
            if seen.nan:
                nan[name] = seen.nan
            if seen.inf:
                inf[name] = seen.inf
            zero += name in seconds and seen.zero
    except OSError:
        return
    draft.facts["values_checked"] = True
    draft.findings.extend(values.broken(file.path, nan, inf))
    if seconds:
        draft.facts["nonzero_lora_b"] = len(seconds) - zero
    if seconds and zero == len(seconds):
        draft.findings.append(
            findings.finding(
                "lora-b-zero",
                file.path,
                f"all {zero} second halves are zero: the adapter changes nothing, as if it had never been trained",
                "check that the trained weights were saved",
                nonzero_lora_b=0,
            )
        )


def is_image_file(name: str) -> bool:
    """Return whether a file can be one of these."""
    return name.endswith(".safetensors") and not layout.is_resume_name(name)
