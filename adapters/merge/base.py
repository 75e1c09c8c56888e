"""The base of a merge: its tensors and where their bytes lie, its config, and what forbids merging into it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import fit, layout, listing, packed_weights, quantization, shards, weights
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.merge.values import Origin, Source
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.weights import WeightSet
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

HEADS: Final = ("lm_head", "embed_out", "output", "proj_out", "generator_lm_head")
EMBEDDINGS: Final = (
    "embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "word_embedding", "shared", "embeddings",
)  # fmt: skip
"""Modules that hold the input embedding, in the order in which they are looked for."""

_HEADLESS: Final = re.compile(
    r".*For(?:\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction)|.*(?<!LMHead)Model"
)
"""Architectures whose output is not made by a head that an embedding could be tied to."""

_MASKED: Final = re.compile(r".*For(?:MaskedLM|PreTraining)")
"""Architectures whose head has another name in each family."""
_FIXES: Final = {
    "gptq": "merge into the original base and quantize the result again",
    "awq": "merge into the original base and quantize the result again",
    "aqlm": "merge into the original base and quantize the result again",
    "eetq": "merge into the original base and quantize the result again",
}
_HALF: Final = "merge into the 16-bit model that the quantized one was made from"


class Base(NamedTuple):
    """A base model; tensors by their names in the files, `places` where their bytes lie."""

    root: Path
    config: dict[str, Any]
    weights: WeightSet
    places: dict[str, Origin]
    headers: dict[str, bytes]
    """The header of each file as it stands there, by path from the root."""
    sources: tuple[Source, ...]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        return fit.text_config(self.config)

    @property
    def tied(self) -> bool:
        """Embedding and head are one tensor."""
        if _HEADLESS.fullmatch(self.architecture):
            return False
        stated = self.config.get("tie_word_embeddings", self.text.get("tie_word_embeddings"))
        if isinstance(stated, bool):
            return stated
        # Older configs leave it out where the library's default is to tie; then the files hold no head.
        return self.embedding is not None and self.head is None and str(self.config.get("model_type")) in _TIED

    @property
    def architecture(self) -> str:
        """The class that the config names, empty where it names none."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    @property
    def several_ends(self) -> bool:
        """The embedding is the input of an encoder and of a decoder, too: a module of its own for each."""
        return self.config.get("is_encoder_decoder") is True or str(self.config.get("model_type")) == "t5"

    @property
    def parts(self) -> bool:
        """Whether it is known under which names embedding and head lie in a file once they are two tensors."""
        return not self.several_ends and not _MASKED.fullmatch(self.architecture)

    def parted(self, module: str = "lm_head") -> str:
        """Return the name of the tensor that a tied head gets once it is one of its own."""
        inner = self.embedding is not None and self.embedding.startswith("language_model.")
        return f"{'language_model.' if inner else ''}{module.rpartition('.')[2]}.weight"

    @property
    def embedding(self) -> str | None:
        """The name of the input embedding."""
        return _named(self.places, EMBEDDINGS)

    @property
    def head(self) -> str | None:
        """The name of the output head, None where the files hold none."""
        return _named(self.places, HEADS)

    @property
    def main_dtype(self) -> str | None:
        """The dtype that holds most bytes."""
        return weights.main_dtype(self.weights.tensors.values())


_TIED: Final = frozenset({"gpt2", "gemma", "gemma2", "gemma3_text", "opt", "bloom", "falcon", "codegen", "cohere"})


def read(root: Path) -> Base | None:
    """Return a base whose weights are safetensors and whole, None for anything else. Raises OSError."""
    place = Place(Reader(listing.read_tree(root)), ".")
    found = shards.weight_set(place)
    if found is None or not found.sound or not found.tensors:
        return None
    config = place.table(layout.MODEL_CONFIG) or {}
    files = sorted(set(found.owners.values()))
    sources: list[Source] = []
    headers: dict[str, bytes] = {}
    places: dict[str, Origin] = {}
    for number, path in enumerate(files):
        file = place.reader.tree.files[path]
        header = place.reader.header(file)
        sources.append(source(Path(file.source)))
        headers[path] = contents(Path(file.source), header.data_start)
        for name, tensor in header.tensors.items():
            if found.owners.get(name) == path:
                places[name] = Origin(
                    file=number, at=header.data_start + tensor.begin, dtype=tensor.dtype, shape=tensor.shape, name=name
                )
    return Base(root, config, found, places, headers, tuple(sources))


def source(path: Path) -> Source:
    """Return a file as it is now. Raises OSError."""
    real = os.path.realpath(path)
    status = Path(real).stat()
    return Source(path=real, size=status.st_size, mtime_ns=status.st_mtime_ns, ino=status.st_ino)


def refusals(base: Base, beside: Mapping[str, Any] | None, subject: str) -> list[Finding]:
    """Return what forbids merging into a base: weights that are not stored as plain numbers."""
    packing = quantization.of(base.config, beside)
    packed = packed_weights.is_packed(base.weights.tensors)
    if not packed:
        return []
    method = packing.method if packing is not None else "an unknown method"
    original = _original(base.config)
    return [
        findings.finding(
            "merge-base-quantized",
            subject,
            f"the base is quantized ({method}): its weights are codes that a delta cannot be added to",
            f"{_FIXES.get(method, _HALF)}{f': {original}' if original else ''}",
            quant_method=method,
            bits=packing.bits if packing is not None else None,
            mergeable=False,
        )
    ]


def _original(config: Mapping[str, Any]) -> str | None:
    table = config.get("quantization_config")
    for holder in (table if isinstance(table, dict) else {}, config):
        for field in ("base_model_name_or_path", "original_model", "_name_or_path"):
            value = holder.get(field)
            if isinstance(value, str) and value and not value.startswith(("/", ".", "~")):
                return value
    return None


def _named(places: Mapping[str, Origin], modules: tuple[str, ...]) -> str | None:
    for module in modules:
        found = [
            name
            for name, origin in places.items()
            if len(origin.shape) == 2 and (name == f"{module}.weight" or name.endswith(f".{module}.weight"))
        ]
        if found:
            return min(found, key=len)
    return None
