"""Every rule in one table, in the order in which a loader stumbles."""

from typing import Final

from weighbridge.adapters.diagnose import (
    based,
    config,
    container,
    keys,
    memory,
    named,
    numbers,
    parts,
    runtimes,
    shapes,
)
from weighbridge.adapters.diagnose.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *container.RULES,
    *parts.RULES,
    *config.RULES,
    *shapes.RULES,
    *based.RULES,
    *keys.RULES,
    *named.RULES,
    *numbers.RULES,
    *runtimes.RULES,
    *memory.RULES,
)

ROWS: Final[dict[str, tuple[str, ...]]] = {
    "a loader meets names it does not know": ("unexpected-keys",),
    "a loader misses names and makes weights up": ("missing-keys",),
    "a tensor has another shape": ("size-mismatch",),
    "the output is garbage: dtype, or alpha and r": ("garbage-output",),
    "memory runs out": ("memory-blow-up",),
    "an unsafe pickle is warned of": ("unsafe-pickle",),
    "a pickle cannot find its class": ("class-not-found",),
    "safetensors do not fit: config, or shards": ("shards-disagree", "size-mismatch"),
    "ONNX: export or opset": ("onnx-version",),
    "TensorRT: version or GPU": ("engine-version",),
    "the output is garbage after quantisation": ("garbage-quantized",),
    "quantized, and slower": ("quantized-slow",),
    "mapped memory looks high": ("mmap-memory",),
    "an adapter is opened as a model (KeyError base_model_name_or_path)": ("adapter-as-model",),
    "the output is garbage after a merge: the template is lost": ("template-lost",),
    "a ZeRO folder is huge": ("zero-huge",),
    "an adapter without its config": ("adapter-config-missing",),
    "a merge without a comparison": ("unproven-merge",),
    "an index ahead of its files": ("files-missing",),
}
"""The rows of the error-to-cause tables, each with the symptoms that stand for it."""
