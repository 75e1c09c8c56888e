"""Parts of an adapter that the model passes over where the adapter runs beside it, and that a merge applies.

transformers reads the weight of some layers without calling them: in Mamba, Falcon Mamba and Jamba that of `dt_proj`,
the latter two only while they are not quantized. What PEFT lays around such a layer is never asked, so that it learns
nothing there; one that did learn was trained on another path, and that is what the merge computes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.merge.adapter import Adapter
from weighbridge.adapters.merge.values import Origin, Source
from weighbridge.adapters.whole import some
from weighbridge.registry import findings
from weighbridge.registry.hashing import CHUNK
from weighbridge.registry.types import Finding

_READ_ALONE: Final = {"mamba": "dt_proj", "falcon_mamba": "dt_proj", "jamba": "dt_proj"}
"""By model type: the layer whose weight is read and whose adapter is not (modeling_*.py of transformers 5)."""


def heard_after(model_type: str, adapters: Mapping[str, Adapter], sources: Sequence[Source]) -> list[Finding]:
    """Return a warning for each adapter, by its subject, with such a part that is not zero. Raises OSError.

    Of a part that was trained one block is read, however large it is.
    """
    layer = _READ_ALONE.get(model_type)
    found: list[Finding] = []
    for subject, adapter in adapters.items():
        modules = sorted(
            part.module
            for part in adapter.parts.values()
            if part.module.rpartition(".")[2] == layer and part.b is not None and _is_trained(part.b, sources)
        )
        if modules:
            found.append(
                findings.finding(
                    "merge-applies-more",
                    subject,
                    f"{some(modules)}: transformers reads the weight of such a layer of a {model_type} model, and "
                    "passes over the adapter beside it; merged, it counts, and the result computes what training on a "
                    "quantized base, or with other kernels, saw",
                    "compare the result with what was served before; --behaviour tells how far the two are apart",
                    modules=modules,
                )
            )
    return found


def _is_trained(second: Origin, sources: Sequence[Source]) -> bool:
    """Return whether a second half holds anything but zeros."""
    left = second.count * safetensors.BITS.get(second.dtype, 8) // 8
    with Path(sources[second.file].path).open("rb", buffering=0) as stream:
        stream.seek(second.at)
        while left > 0 and (block := stream.read(min(CHUNK, left))):
            if block.count(0) < len(block):
                return True
            left -= len(block)
    return False
