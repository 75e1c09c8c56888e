"""Small models and adapters of many sizes, names and dtypes, from one seed: so that no rule is fitted to a sample."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from weighbridge_testlib import builders as b
from weighbridge_testlib.builders import TensorSpec
from weighbridge_testlib.containers import T, torch_zip

WORDS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD: Final = 8

Item = TypeVar("Item")


class Asked(NamedTuple):
    """What is asked about: a folder or file, and the base that is given with it."""

    path: Path
    base: Path | None = None


class Dice:
    """Chance from a seed, under the names that the builders need."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"ailments/{seed}")
        self.seed = seed

    def of(self, choices: Sequence[Item]) -> Item:
        """Return one of several."""
        return self._random.choice(choices)

    def some(self, choices: Sequence[Item], least: int = 1) -> list[Item]:
        """Return several, in their order."""
        count = self._random.randint(least, len(choices))
        kept = sorted(self._random.sample(range(len(choices)), count))
        return [choices[i] for i in kept]

    def number(self, low: int, high: int) -> int:
        """Return a whole number, both ends included."""
        return self._random.randint(low, high)

    def folder(self, root: Path) -> Path:
        """Return a folder's path, under a name as people give them."""
        return root / self.of(["model", "out put", "run-3", "sft_final", "Llama-x.v2", "it's"])


Build = Callable[[Path, Dice], Asked]


class Ailment(NamedTuple):
    """One rule's folders: where it must speak, where it must not, and texts it must explain."""

    sick: Build
    well: Build
    said: tuple[str, ...]


class Shape(NamedTuple):
    """The sizes of a model; `hidden` is as many heads of eight."""

    layers: int
    hidden: int
    inner: int
    vocab: int
    dtype: str
    tied: bool


def shape(dice: Dice, *, inner: int | None = None, dtype: str | None = None, tied: bool | None = None) -> Shape:
    """Return some sizes."""
    return Shape(
        dice.number(1, 3),
        dice.of([16, 24, 32]),
        dice.of([32, 48, 64]) if inner is None else inner,
        dice.number(20, 60),
        dice.of(["F32", "BF16", "F16"]) if dtype is None else dtype,
        dice.of([True, False]) if tied is None else tied,
    )


def tensors(size: Shape, *, seed: int = 0, prefix: str = "") -> dict[str, TensorSpec]:
    """Return the tensors of a Llama of these sizes."""
    wide, deep = size.hidden, size.inner
    sides: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocab, wide)}
    for layer in range(size.layers):
        stem = f"model.layers.{layer}."
        sides |= {
            f"{stem}self_attn.q_proj.weight": (wide, wide), f"{stem}self_attn.k_proj.weight": (HEAD, wide),
            f"{stem}self_attn.v_proj.weight": (HEAD, wide), f"{stem}self_attn.o_proj.weight": (wide, wide),
            f"{stem}mlp.gate_proj.weight": (deep, wide), f"{stem}mlp.up_proj.weight": (deep, wide),
            f"{stem}mlp.down_proj.weight": (wide, deep), f"{stem}input_layernorm.weight": (wide,),
            f"{stem}post_attention_layernorm.weight": (wide,),
        }  # fmt: skip
    sides["model.norm.weight"] = (wide,)
    if not size.tied:
        sides["lm_head.weight"] = (size.vocab, wide)
    made: dict[str, TensorSpec] = {}
    for name, side in sides.items():
        count = side[0] * (side[1] if len(side) > 1 else 1)
        made[prefix + name] = (size.dtype, side, b.gauss(seed, name, count, 0.2) if len(side) > 1 else 1.0)
    return made


def config(size: Shape, **more: Any) -> dict[str, Any]:
    """Return the fields of config.json that state the sizes."""
    return {
        "vocab_size": size.vocab, "hidden_size": size.hidden, "intermediate_size": size.inner,
        "num_hidden_layers": size.layers, "num_attention_heads": size.hidden // HEAD, "num_key_value_heads": 1,
        "head_dim": HEAD, "tie_word_embeddings": size.tied, "dtype": WORDS[size.dtype], **more,
    }  # fmt: skip


def model(
    folder: Path,
    size: Shape,
    *,
    seed: int = 0,
    shards: int = 1,
    weights: Mapping[str, TensorSpec] | None = None,
    tokenizer: bool = True,
    template: str | None = "{{ messages[0].content }}",
    **fields: Any,
) -> Path:
    """Fill a folder with a whole model."""
    made = tensors(size, seed=seed) if weights is None else weights
    b.llama_model(
        folder, tensors=made, shards=shards, tied=size.tied, tokenizer=False, **{**config(size), "dtype": None}
    )
    written = b.llama_config(**config(size, **fields))
    b.write_json(folder / "config.json", {key: value for key, value in written.items() if value is not None})
    if tokenizer:
        write_tokenizer(folder, size.vocab, template=template)
    return folder


def write_tokenizer(folder: Path, vocab: int, *, template: str | None = "{{ messages[0].content }}") -> None:
    """Write a tokenizer that the tokenizers library loads."""
    b.write_tokenizer(folder, vocab=vocab, template=template)
    table = json.loads((folder / "tokenizer.json").read_text())
    for token in table["added_tokens"]:
        token.update(single_word=False, lstrip=False, rstrip=False, normalized=False)
    b.write_json(folder / "tokenizer.json", table)


def pickled_model(folder: Path, size: Shape, *, seed: int = 0, more: Mapping[str, Any] | None = None) -> Path:
    """Fill a folder with the same model as a torch pickle; `more` are entries beside the weights."""
    model(folder, size, seed=seed)
    (folder / "model.safetensors").unlink()
    table: dict[str, Any] = torch_tensors(tensors(size, seed=seed))
    (folder / "pytorch_model.bin").write_bytes(torch_zip({**table, **(more or {})}))
    return folder


def torch_tensors(table: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return tensors for a torch file."""
    return {name: T(dtype, side, data) for name, (dtype, side, data) in table.items()}


def adapter(folder: Path, dice: Dice, size: Shape | None = None, **fields: Any) -> Path:
    """Fill a folder with an adapter for such a model; fields replace those of its config."""
    size = shape(dice, inner=32) if size is None else size
    rank = fields.pop("rank", dice.of([2, 4, 8]))
    targets = fields.pop("targets", dice.some(["q_proj", "k_proj", "v_proj", "o_proj"]))
    made = fields.pop("tensors", None)
    if made is None:
        made = lora(size, rank, targets, seed=dice.seed)
    return b.lora_adapter(
        folder, rank=rank, alpha=fields.pop("alpha", 2 * rank), targets=targets, tensors=made,
        base=fields.pop("base", dice.of(["example-org/tiny-base", "acme/Base_7b.v1"])), **fields,
    )  # fmt: skip


def lora(size: Shape, rank: int, targets: Sequence[str], *, seed: int = 0, **more: Any) -> dict[str, TensorSpec]:
    """Return the tensors of an adapter for such a model."""
    dtype = more.pop("dtype", "F32")
    return b.lora_tensors(
        seed=seed, rank=rank, targets=targets, layers=size.layers, hidden=size.hidden, dtype=dtype, **more
    )


def edited(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None takes one out."""
    table = json.loads(path.read_text()) | fields
    b.write_json(path, {key: value for key, value in table.items() if value is not None})


def pair(root: Path, dice: Dice, **fields: Any) -> tuple[Path, Path, Shape]:
    """Fill `root` with an adapter and its base; return both and the sizes."""
    size = shape(dice, inner=32)
    base = model(root / "base", size)
    return adapter(dice.folder(root), dice, size, **fields), base, size


def sound_model(root: Path, dice: Dice) -> Asked:
    """Return a whole model with nothing wrong."""
    return Asked(model(dice.folder(root), shape(dice), shards=dice.number(1, 3)))


def sound_adapter(root: Path, dice: Dice) -> Asked:
    """Return an adapter with nothing wrong."""
    return Asked(adapter(dice.folder(root), dice))


def sound_pair(root: Path, dice: Dice) -> Asked:
    """Return an adapter with nothing wrong, and its base."""
    mine, base, _ = pair(root, dice)
    return Asked(mine, base)
