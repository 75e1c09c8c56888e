"""Which tensor of the base does an adapter's module mean? Exact names first, then the renamings loaders know.

A file keeps its own names; only the look-up is renamed. transformers 5 loads many files under other module names than
they were saved with (`block_sparse_moe` as `mlp`, `language_model.model` as `model.language_model`), so an adapter can
speak of either. Both sides are brought into one form and compared; where two tensors fall together, nothing is guessed.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_RENAMES: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # composites: the language model and the towers below one `model.`
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^model\.language_model\.lm_head\.", "lm_head."),
        (r"^model\.language_model\.model\.", "model.language_model."),
        (r"^language_model\.model\.model\.", "model.language_model."),
        (r"^language_model\.model\.", "model.language_model."),
        (r"^text_model\.model\.", "model.text_model."),
        (r"^(language_model|vision_tower|vision_model|multi_modal_projector|visual|audio_tower)\.", r"model.\1."),
        (r"^embed_out\.", "lm_head."),
        # experts of the Mixtral family
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"(\.experts\.[0-9]+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.[0-9]+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.[0-9]+)\.w2\.", r"\1.down_proj."),
        # vision towers of the ViT family
        (r"\bencoder\.layer\.(?=[0-9]+\.(?:attention\.attention|attention\.output|intermediate|output)\.)", "layers."),
        (r"\bencoder\.layer\.(?=[0-9]+\.(?:attention\.[qkvo]_proj|mlp\.fc[12])\.)", "layers."),
        (r"\battention\.attention\.query\.", "attention.q_proj."),
        (r"\battention\.attention\.key\.", "attention.k_proj."),
        (r"\battention\.attention\.value\.", "attention.v_proj."),
        (r"(\blayers\.[0-9]+)\.attention\.output\.dense\.", r"\1.attention.o_proj."),
        (r"(\blayers\.[0-9]+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
        (r"(\blayers\.[0-9]+)\.output\.dense\.", r"\1.mlp.fc2."),
        # wrappers and old spellings
        (r"\.base_layer\.", "."),
    )
)
_ROOTS: Final = (
    "model.language_model.",
    "model.text_model.",
    "model.",
    "transformer.",
    "vision_model.",
    "text_model.",
    "bert.",
    "roberta.",
    "vit.",
    "gpt_neox.",
    "backbone.",
)
"""Outermost modules that a file holds and an adapter does not speak of, or the other way round."""

_SHOWN: Final = 3


class Found(NamedTuple):
    """What a look-up gives: the tensor's name, or the several that could be meant."""

    name: str | None
    several: tuple[str, ...] = ()


class Names:
    """The names of a base's tensors, found by those of modules."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self.exact = frozenset(tensors)
        self._renamed: dict[str, list[str]] = {}
        self._rootless: dict[str, list[str]] = {}
        for name in sorted(self.exact):
            plain = renamed(name)
            self._renamed.setdefault(plain, []).append(name)
            self._rootless.setdefault(_rootless(plain), []).append(name)

    def find(self, wanted: str) -> Found:
        """Return the tensor that a parameter's full name means."""
        if wanted in self.exact:
            return Found(wanted)
        plain = renamed(wanted)
        for table, key in ((self._renamed, plain), (self._rootless, _rootless(plain))):
            names = table.get(key, [])
            if len(names) == 1:
                return Found(names[0])
            if names:
                return Found(None, tuple(names))
        return Found(None)

    def nearest(self, wanted: str) -> list[str]:
        """Return the few names that look most like one that was not found."""
        last = wanted.rsplit(".", 2)[-2:]
        alike = [name for name in self.exact if name.rsplit(".", 2)[-2:] == last] or list(self.exact)
        return difflib.get_close_matches(wanted, sorted(alike)[:2000], n=_SHOWN, cutoff=0.0)


def renamed(name: str) -> str:
    """Return a tensor's or parameter's name in the one form that all known spellings are brought to."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _rootless(name: str) -> str:
    """Return a name without its outermost modules."""
    while True:
        root = next((root for root in _ROOTS if name.startswith(root)), None)
        if root is None:
            return name
        name = name[len(root) :]
