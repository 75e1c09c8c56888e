"""Folders for the rules of names and values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from weighbridge_testlib import builders as b
from weighbridge_testlib import containers as c
from weighbridge_testlib.ailments import making as m
from weighbridge_testlib.ailments.making import Ailment, Asked, Dice

_UNEXPECTED: Final = 'Unexpected key(s) in state_dict: "module.model.norm.weight".'


def _prefixed(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    folder = dice.folder(root)
    wrapper = dice.of(["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module.", "inner"])
    if wrapper == "inner":
        made = {n.replace("layers.", "layers._checkpoint_wrapped_module."): t for n, t in m.tensors(size).items()}
        return Asked(m.model(folder, size, weights=made, shards=dice.number(1, 2)))
    return Asked(m.model(folder, size, weights=m.tensors(size, prefix=wrapper), shards=dice.number(1, 3)))


def _odd_keys(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    targets = dice.some(["q_proj", "v_proj"])
    made = m.lora(size, 4, targets)
    outer = dice.of(["module.", "_orig_mod.", "base_model.model."])
    changes: list[Callable[[str], str]] = [
        lambda k: k.removeprefix("base_model.model."),
        lambda k: outer + k,
        lambda k: k.replace(".lora_A.", ".lora_A.mine.").replace(".lora_B.", ".lora_B.mine."),
        lambda k: k.replace("layers.", "layers._fsdp_wrapped_module."),
    ]
    change = dice.of(changes)
    renamed = {change(k): t for k, t in made.items()}
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=targets, tensors=renamed))


def _not_merged(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.tensors(size, prefix=dice.of(["", "base_model.model."]))
    lora = m.lora(size, 4, ["q_proj"])
    return Asked(m.model(dice.folder(root), size, weights={**made, **lora}))


def _inside(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    lora = m.torch_tensors(m.lora(size, dice.of([2, 4]), ["q_proj", "v_proj"]))
    base = m.torch_tensors(m.tensors(size, prefix="base_model.model."))
    (folder / dice.of(["model.pt", "last.ckpt"])).write_bytes(c.torch_zip({**lora, **base}))
    return Asked(folder)


def _not_exported(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    made = m.lora(size, 4, ["q_proj", "v_proj"])
    if dice.of([True, False]):
        own = {k.replace("lora_A", "lora_a").replace("lora_B", "lora_b"): t for k, t in made.items()}
        own = {k.removeprefix("base_model.model.model.").replace(".self_attn.", ".attn."): t for k, t in own.items()}
    else:
        b.write_json(folder / "adapter_config.json", b.lora_config())
        own = {k.replace(".weight", f".{name}.weight"): t for name in ("style", "tone") for k, t in made.items()}
    (folder / dice.of(["last.ckpt", "best.ckpt"])).write_bytes(c.torch_zip(m.torch_tensors(own)))
    return Asked(folder)


def _plain_file(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    (folder / dice.of(["model.pt", "last.ckpt"])).write_bytes(c.torch_zip(m.torch_tensors(m.tensors(m.shape(dice)))))
    return Asked(folder)


def _fat(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.lora(size, 4, ["q_proj"]) | m.tensors(size, prefix="base_model.model.")
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj"], tensors=made))


def _riders(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    head = dice.of(["lm_head", "score"])
    made = m.lora(size, 4, ["q_proj"]) | {
        f"base_model.model.{head}.weight": ("F32", (dice.number(2, 9), size.hidden), 0.5)
    }
    return Asked(
        m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj"], tensors=made, modules_to_save=[head])
    )


def _strong(root: Path, dice: Dice, rank: int) -> Asked:
    size = m.shape(dice, inner=32)
    return Asked(m.adapter(dice.folder(root), dice, size, rank=rank, targets=["q_proj"]))


def _absent(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, tied=False)
    made = m.tensors(size)
    gone = dice.of(["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
    if size.layers == 1 and gone.startswith("model.layers"):
        gone = "model.norm.weight"
    del made[gone]
    return Asked(m.model(dice.folder(root), size, weights=made))


def _targets(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.lora(size, 4, ["q_proj", "v_proj"])
    listed = dice.of([["q_proj"], ["wq", "wv"], ["q_proj", "v_proj", "down_proj"]])
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=listed, tensors=made))


def _dora(root: Path, dice: Dice) -> Asked:
    return Asked(m.adapter(dice.folder(root), dice, use_dora=True))


def _collide(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    size = m.shape(dice)
    table = m.torch_tensors(m.tensors(size))
    value: dict[str, Any] = {"generator": table, "discriminator": table}
    if dice.of([True, False]):
        value = {**table, "model._orig_mod.norm.weight": c.T("F32", (size.hidden,), 1.0)}
    (folder / "gan.pt").write_bytes(c.torch_zip(value))
    return Asked(folder)


# --------------------------------------------------------------------------------------------------------------- values


def _nan(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    made = m.tensors(size)
    name = dice.of(sorted(made))
    dtype, side, _ = made[name]
    count = side[0] * (side[1] if len(side) > 1 else 1)
    values = [0.5] * count
    values[dice.number(0, count - 1)] = dice.of([float("nan"), float("inf")])
    made[name] = (dtype, side, values)
    return Asked(m.model(dice.folder(root), size, weights=made))


def _zero(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.lora(size, 4, ["q_proj"])
    made = {n: (t[0], t[1], 0.0 if "lora_B" in n else t[2]) for n, t in made.items()}
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj"], tensors=made))


def _no_alpha(root: Path, dice: Dice) -> Asked:
    made = m.sound_adapter(root, dice)
    m.edited(made.path / "adapter_config.json", lora_alpha=None)
    return made


def _odd_strength(root: Path, dice: Dice) -> Asked:
    if dice.of([True, False]):
        return Asked(m.adapter(dice.folder(root), dice, rank=4, alpha=16, use_rslora=True))
    return Asked(m.adapter(dice.folder(root), dice, rank=4, alpha=dice.of([64, 256, 0.1])))


def _said_dtype(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    other = dice.of([word for dtype, word in m.WORDS.items() if dtype != size.dtype])
    return Asked(m.model(dice.folder(root), size, dtype=other))


def _half(root: Path, dice: Dice) -> Asked:
    return Asked(m.model(dice.folder(root), m.shape(dice, dtype="F16"), dtype="bfloat16"))


def _narrow(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, dtype="F32")
    word = dice.of(["norm", "embed_tokens"])
    made = {n: (dice.of(["BF16"]) if word in n else t[0], t[1], t[2]) for n, t in m.tensors(size).items()}
    return Asked(m.model(dice.folder(root), size, weights=made))


def _packed(
    root: Path, dice: Dice, *, bits: int = 4, scales: bool = True, beside: dict[str, Any] | None = None
) -> Asked:
    """Write a GPTQ model; `bits` are the stored ones, `beside` is what quantize_config.json says instead."""
    size = m.shape(dice, inner=32, dtype="F16")
    group = dice.of([16, 32])
    stated = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": dice.of([True, False]), "sym": True}
    made = m.tensors(size)
    for name in [n for n in made if n.split(".")[-2].endswith("_proj")]:
        rows, columns = made.pop(name)[1]
        stem = name.removesuffix(".weight")
        made[f"{stem}.qweight"] = ("I32", (columns * bits // 32, rows), None)
        made[f"{stem}.g_idx"] = ("I32", (columns,), None)
        made[f"{stem}.qzeros"] = ("I32", (1, rows * bits // 32), None)
        if scales:
            made[f"{stem}.scales"] = ("F16", (1, rows), 0.1)
    folder = m.model(dice.folder(root), size, weights=made, quantization_config=stated)
    if beside is not None:
        b.write_json(folder / "quantize_config.json", {**stated, **beside})
    return Asked(folder)


def _packed_broken(root: Path, dice: Dice) -> Asked:
    if dice.of([True, False]):
        return _packed(root, dice, scales=False)
    return _packed(root, dice, bits=8)


def _packed_twice(root: Path, dice: Dice) -> Asked:
    wrong: dict[str, Any] = dice.of([{"bits": 8}, {"group_size": 64}, {"sym": False}])
    return _packed(root, dice, beside=wrong)


def _on_packed(root: Path, dice: Dice) -> Asked:
    return Asked(m.adapter(dice.folder(root), dice, base=dice.of(["unsloth/tiny-bnb-4bit", "acme/tiny-GPTQ"])))


def _mutated(root: Path, dice: Dice) -> Asked:
    return Asked(m.adapter(dice.folder(root), dice, init_lora_weights=dice.of(["pissa", "olora", "pissa_niter_16"])))


def _well_packed(root: Path, dice: Dice) -> Asked:
    return _packed(root, dice, beside={})


def _other_root(root: Path, dice: Dice) -> Asked:
    """Write a model whose names begin as those of a picture model's language part."""
    size = m.shape(dice)._replace(layers=1)
    made = {f"language_model.{name}": tensor for name, tensor in m.tensors(size).items()}
    return Asked(m.model(dice.folder(root), size, weights=made))


def _mixed(root: Path, dice: Dice) -> Asked:
    if dice.of([True, False]):
        size = m.shape(dice, inner=32, dtype=dice.of(["BF16", "F16"]))
        return Asked(m.adapter(dice.folder(root), dice, size), m.model(root / "base", size))
    size = m.shape(dice, dtype="BF16")
    made = {n: ("F32" if "norm" in n else t[0], t[1], t[2]) for n, t in m.tensors(size).items()}
    return Asked(m.model(dice.folder(root), size, weights=made))


_REPORT: Final = "\n".join(
    f"{head}model.{name} | {status} | "
    for head, status in (("language_model.", "UNEXPECTED"), ("", "MISSING"))
    for name in ("norm.weight", "layers.{0, 1}.mlp.up_proj.weight", "layers.{0, 1}.mlp.gate_proj.weight")
)
_STATE: Final = (
    'Missing key(s) in state_dict: "model.norm.weight", "model.embed_tokens.weight".\n'
    '\tUnexpected key(s) in state_dict: "language_model.model.norm.weight", "language_model.model.embed_tokens.weight".'
)


AILMENTS: Final[dict[str, Ailment]] = {
    "names-prefixed": Ailment(
        _prefixed, m.sound_model, (_UNEXPECTED, "module.norm.weight | UNEXPECTED | ", "model.norm.weight | MISSING | ")
    ),
    "names-in-text": Ailment(_other_root, m.sound_model, (_REPORT, _STATE)),
    "adapter-keys-odd": Ailment(
        _odd_keys, m.sound_adapter,
        ("UserWarning: Found missing adapter keys while loading the checkpoint: ['base_model.model.x.lora_A.default']",
         "ValueError: base_model.model.lm_head.weight is unsupported LoRA weight"),
    ),
    "not-merged": Ailment(_not_merged, m.sound_model, (_UNEXPECTED, "Some weights are newly initialized: ['x']")),
    "adapter-in-checkpoint": Ailment(_inside, _plain_file, (_UNEXPECTED,)),
    "adapter-not-exported": Ailment(_not_exported, _plain_file, (_UNEXPECTED,)),
    "base-in-adapter": Ailment(_fat, m.sound_adapter, ("ValueError: a.base_layer.weight is unsupported LoRA weight",)),
    "modules-ride-along": Ailment(
        _riders, m.sound_adapter, ("ValueError: base_model.model.lm_head.weight is unsupported LoRA weight",)
    ),
    "rank-above-server": Ailment(
        lambda root, dice: _strong(root, dice, dice.of([32, 64, 100])),
        lambda root, dice: _strong(root, dice, dice.of([4, 8, 16])),
        ("ValueError: LoRA rank 64 is greater than max_lora_rank 16.",),
    ),
    "tensors-absent": Ailment(_absent, m.sound_model, ('Missing key(s) in state_dict: "model.norm.weight". ',)),
    "targets-differ": Ailment(
        _targets, m.sound_adapter,
        ("Target modules {'wq'} not found in the base model. Please check the target modules and try again.",),
    ),
    "dora-differs": Ailment(
        _dora, m.sound_adapter, ('Missing key(s) in state_dict: "x.lora_magnitude_vector.default.weight".',)
    ),
    "names-collide": Ailment(_collide, _plain_file, (_UNEXPECTED,)),
    "values-broken": Ailment(
        _nan, m.sound_model, ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",)
    ),
    "delta-zero": Ailment(_zero, m.sound_adapter, ("the adapter gives the same output as the base",)),
    "alpha-unknown": Ailment(_no_alpha, m.sound_adapter, ("the model talks gibberish with the adapter",)),
    "strength-odd": Ailment(_odd_strength, m.sound_adapter, ("only gibberish comes out",)),
    "dtype-differs": Ailment(_said_dtype, m.sound_model, ("torch.OutOfMemoryError: CUDA out of memory.", "garbage")),
    "bfloat-as-half": Ailment(_half, m.sound_model, ("probability tensor contains either `inf`, `nan`",)),
    "dtype-narrow": Ailment(_narrow, m.sound_model, ("the output is nonsense",)),
    "dtypes-mixed": Ailment(
        _mixed, m.sound_model, ("RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",)
    ),
    "base-packed": Ailment(_on_packed, m.sound_adapter, ("garbage after quantization",)),
    "base-changed": Ailment(_mutated, m.sound_adapter, ("the merged model talks gibberish",)),
    "packing-differs": Ailment(_packed_twice, _well_packed, ("quantized model outputs garbage",)),
    "packing-broken": Ailment(_packed_broken, _well_packed, ("quantized model outputs garbage",)),
    "packed-slow": Ailment(
        _packed, m.sound_model,
        ("gptq quantization is not fully optimized yet. The speed can be slower than non-quantized models.",),
    ),
    "quantization-library": Ailment(
        _packed, m.sound_model, ("ImportError: Loading a GPTQ quantized model requires optimum (`pip install`)",)
    ),
}  # fmt: skip
