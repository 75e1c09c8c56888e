"""Rules of values: NaN, zeros, an unknown strength, dtypes that are narrower than they should be, packed weights."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from weighbridge.adapters import quantization, weights
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.formats.safetensors import BITS
from weighbridge.adapters.layers import layer_class
from weighbridge.registry.types import Finding

_STAGE: Final = "values"
_WORDS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STRONG: Final = 8.0
_WEAK: Final = 1 / 16


def _alpha(case: Case, one: Finding) -> tuple[str, ...]:
    return (commands.set_fields(case.path(one.subject), {"lora_alpha": commands.Fill("ALPHA")}),)


def _strength(case: Case) -> Iterable[Evidence]:
    """Tell an adapter's strength where it is far from what is common, or where servers may compute another one."""
    scaling = case.facts.get("scaling")
    rank, alpha = case.facts.get("rank"), case.facts.get("alpha")
    if not case.is_adapter or not isinstance(scaling, (int, float)) or not rank or alpha is None:
        return
    subject = case.artifact.config or "adapter_config.json"
    if case.facts.get("use_rslora"):
        yield Evidence(
            subject,
            f"use_rslora is on: the strength is alpha/sqrt(r) = {scaling:g}; a program that does not know it "
            "takes alpha/r = "
            f"{alpha / rank:g}",
            data={"scaling": scaling, "plain": alpha / rank},
        )
    elif scaling >= _STRONG or scaling <= _WEAK:
        yield Evidence(
            subject,
            f"lora_alpha {alpha:g} over r {rank:g} gives the strength {scaling:g}, which is uncommon: was it "
            "trained so?",
            data={"scaling": scaling},
        )


def _dtype(case: Case, one: Finding) -> tuple[str, ...]:
    stored = one.data.get("main_dtype")
    if not isinstance(stored, str) or stored not in _WORDS:
        return ()
    field = "dtype" if "dtype" in case.config else "torch_dtype"
    return (commands.set_fields(case.path(one.subject), {field: _WORDS[stored]}),)


def _narrow(case: Case) -> Iterable[Evidence]:
    """Find norms or embeddings that are stored narrower than the matrices."""
    if case.is_adapter or not case.tensors or case.facts.get("quant_method"):
        return
    main = weights.main_dtype(case.tensors.values())
    if main not in weights.FLOATS:
        return
    low = [
        tensor
        for name, tensor in case.tensors.items()
        if tensor.dtype in BITS and BITS[tensor.dtype] < BITS[main] and layer_class(name) in {"norm", "embed", "head"}
    ]
    if not low:
        return
    kinds = Counter(f"{layer_class(tensor.name)} {tensor.dtype}" for tensor in low)
    yield Evidence(
        case.owners.get(low[0].name, case.artifact.relative),
        f"the weights are {main}, and {len(low)} tensors that need the precision most are narrower "
        f"({', '.join(f'{kind} x{count}' for kind, count in sorted(kinds.items()))}), such as {low[0].name}",
        data={"tensors": sorted(tensor.name for tensor in low)[:50], "main_dtype": main},
    )


def _mixed(case: Case) -> Iterable[Evidence]:
    """Find floating weights of several dtypes in one artifact, and an adapter in another dtype than its base."""
    if not case.tensors or case.facts.get("quant_method"):
        return
    counts = Counter(tensor.dtype for tensor in case.tensors.values() if tensor.dtype in weights.FLOATS)
    subject = next(iter(sorted(set(case.owners.values()))), case.artifact.relative)
    told = ", ".join(f"{dtype} x{count}" for dtype, count in sorted(counts.items()))
    if len(counts) > 1:
        yield Evidence(subject, f"the weights are stored in several dtypes: {told}", data={"dtypes": dict(counts)})
    theirs = case.against.main_dtype if case.against is not None else None
    if case.is_adapter and theirs in weights.FLOATS and theirs not in counts and case.against is not None:
        yield Evidence(
            subject,
            f"the adapter is stored as {told}, the base in {case.against.root} as {theirs}: a program that does not "
            "convert one of them stops",
            data={"dtypes": dict(counts), "base": theirs},
        )


def _half(case: Case) -> Iterable[Evidence]:
    """Find bfloat16 models that were stored as float16, whose range is smaller."""
    declared = weights.CONFIG_DTYPES.get(str(case.facts.get("config_dtype") or "").removeprefix("torch."))
    if case.tensors and declared == "BF16" and weights.main_dtype(case.tensors.values()) == "F16":
        count = sum(1 for tensor in case.tensors.values() if tensor.dtype == "F16")
        yield Evidence(
            case.artifact.config or case.artifact.relative,
            f"the config says bfloat16, {count} tensors are float16: activations of a model trained in "
            "bfloat16 can overflow",
            data={"tensors": count},
        )


def _twice(case: Case) -> Iterable[Evidence]:
    """Compare what config.json and quantize_config.json say about the packing."""
    config, beside = case.tables.get("config.json", {}), case.tables.get("quantize_config.json")
    inner = config.get("quantization_config")
    if not isinstance(beside, Mapping) or not isinstance(inner, dict):
        return
    wrong = {
        field: (inner[field], beside[field])
        for field in ("bits", "group_size", "desc_act", "sym")
        if field in inner and field in beside and inner[field] != beside[field]
    }
    if wrong:
        told = ", ".join(f"{field} {ours} and {theirs}" for field, (ours, theirs) in sorted(wrong.items()))
        yield Evidence(
            "quantize_config.json",
            f"config.json and quantize_config.json disagree about the packing: {told}",
            data={"fields": sorted(wrong)},
        )


def _scales(case: Case) -> Iterable[Evidence]:
    """Find packed weights without the scales that unpack them, and packings that do not fit the stated bits."""
    names = case.tensors
    stems = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    bare = sorted(stem for stem in stems if f"{stem}.scales" not in names)
    if bare:
        yield Evidence(
            case.owners.get(f"{bare[0]}.qweight", case.artifact.relative),
            f"{len(bare)} of {len(stems)} packed matrices have no scales, such as {bare[0]}.qweight: they "
            "cannot be unpacked",
            data={"modules": bare[:50]},
        )
        return
    packing = quantization.of(case.config, case.tables.get("quantize_config.json"))
    if packing is None or packing.bits is None or packing.method != "gptq":
        return
    odd = sorted(stem for stem in stems if (bits := _gptq_bits(names, stem)) is not None and bits != packing.bits)
    if odd:
        found = _gptq_bits(names, odd[0])
        yield Evidence(
            case.artifact.config or "config.json",
            f"the config says {packing.bits} bits, {len(odd)} of {len(stems)} packed matrices show {found}, such as "
            f"{odd[0]}.qweight",
            data={"bits": packing.bits, "stored_bits": found},
        )


def _gptq_bits(names: Mapping[str, Any], stem: str) -> int | None:
    """Return the bits that a GPTQ matrix shows: its packed rows against the input width of g_idx."""
    packed, order = names[f"{stem}.qweight"], names.get(f"{stem}.g_idx")
    if order is None or len(packed.shape) != 2 or len(order.shape) != 1 or not order.shape[0]:
        return None
    bits, rest = divmod(packed.shape[0] * 32, order.shape[0])
    return bits if not rest else None


def _slow(case: Case) -> Iterable[Evidence]:
    """Tell what makes a packed model slow: the method, or an order that fast kernels do not take."""
    method, bits = case.facts.get("quant_method"), case.facts.get("bits")
    if case.artifact.kind != "quantized" or not isinstance(method, str):
        return
    inner = case.config.get("quantization_config")
    table = inner if isinstance(inner, dict) else case.tables.get("quantize_config.json", {})
    size, order = table.get("group_size"), table.get("desc_act")
    reasons = [f"{method} keeps {bits or 'few'} bits in memory and unpacks them for every product"]
    if order is True:
        reasons.append("desc_act (act order) is on, for which several kernels fall back to a slow path")
    if isinstance(size, int) and 0 < size < _GROUP:
        reasons.append(f"group_size {size} means many scales")
    yield Evidence(
        case.artifact.config or case.artifact.relative,
        "; ".join(reasons) + ": it saves memory, not time, unless the server has a fused kernel for it",
        (f"vllm serve {commands.quoted(case.folder)}",)
        if method in {"gptq", "awq", "compressed-tensors", "fp8"}
        else (),
        data={"quant_method": method, "bits": bits},
    )


_GROUP: Final = 64


RULES: Final = (
    linked(
        "values-broken", _STAGE, "block", ("not-a-number", "garbage-output"), ("values-nan",),
        "tensors hold NaN or infinities",
        "take an earlier checkpoint: the training has diverged, or a conversion overflowed",
    ),
    linked(
        "delta-zero", _STAGE, "warn", ("adapter-silent", "unproven-merge"), ("lora-b-zero",),
        "every lora_B is zero: the adapter changes nothing",
        "check that the trained weights were saved",
    ),
    linked(
        "alpha-unknown", _STAGE, "warn", ("garbage-output", "adapter-silent"), ("alpha-unknown",),
        "nothing states the adapter's alpha, so its strength is assumed",
        "write the lora_alpha of the training into the config",
        _alpha,
    ),
    Rule(
        "strength-odd", _STAGE, "note", ("garbage-output", "adapter-silent"),
        "the adapter's strength (alpha and r) is uncommon, or computed in a way that not every program knows",
        "compare lora_alpha and r with the training's own settings",
        _strength,
    ),
    linked(
        "dtype-differs", _STAGE, "warn", ("garbage-output", "memory-blow-up", "dtype-clash"), ("dtype-mismatch",),
        "the config states another dtype than the weights have",
        "correct the config, or save in the wanted dtype",
        _dtype,
    ),
    Rule(
        "bfloat-as-half", _STAGE, "warn", ("not-a-number", "garbage-output"),
        "a bfloat16 model is stored as float16",
        "save it in bfloat16 or float32",
        _half,
    ),
    Rule(
        "dtype-narrow", _STAGE, "warn", ("garbage-output", "not-a-number", "dtype-clash"),
        "norms, embeddings or the head are stored narrower than the matrices",
        "save them in the dtype of the rest; registry extract --dtype has --keep-fp32 for it",
        _narrow,
    ),
    Rule(
        "dtypes-mixed", _STAGE, "note", ("dtype-clash",),
        "weights, or adapter and base, are stored in different dtypes",
        "load everything in one dtype (dtype=torch.bfloat16), or store it in one",
        _mixed,
    ),
    linked(
        "base-packed", _STAGE, "warn", ("garbage-quantized", "garbage-output", "unproven-merge"), ("base-quantized",),
        "the adapter was trained on a quantized base, and is added to another precision",
        "serve it on the base it was trained on, or merge into its 16-bit original and compare",
    ),
    linked(
        "base-changed", _STAGE, "warn", ("garbage-output", "unproven-merge"), ("base-mutated-at-start",),
        "the adapter's start method changed the base, so on the untouched base it computes something else",
        "convert the adapter, or publish the changed base with it",
    ),
    Rule(
        "packing-differs", _STAGE, "block", ("garbage-quantized", "garbage-output"),
        "two files describe the packing of the weights differently",
        "keep the file that the quantizer wrote, and make the other one agree",
        _twice,
    ),
    Rule(
        "packing-broken", _STAGE, "block", ("garbage-quantized", "missing-keys", "garbage-output"),
        "packed weights lack their scales, or show other bits than the config states",
        "quantize again from the original weights",
        _scales,
    ),
    Rule(
        "packed-slow", _STAGE, "note", ("quantized-slow",),
        "packed weights are unpacked for every product",
        "use a server with a kernel for the layout, or the 16-bit weights where memory allows",
        _slow,
    ),
)  # fmt: skip
