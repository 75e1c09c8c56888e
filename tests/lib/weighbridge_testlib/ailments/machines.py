"""Folders for the rules of pickles, runtimes, memory, and of an artifact beside its base."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Final

from weighbridge_testlib import builders as b
from weighbridge_testlib import containers as c
from weighbridge_testlib.ailments import making as m
from weighbridge_testlib.ailments.making import Ailment, Asked, Dice

_UNSAFE: Final = (
    "_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value",
    "WeightsUnpickler error: Unsupported global: GLOBAL mypkg.Net was not an allowed global by default.",
)
_CLASS: Final = ("ModuleNotFoundError: No module named 'mypkg'", "AttributeError: Can't get attribute 'Net' on <module")
_ADAM: Final = {"state": {0: {"exp_avg": c.T("F32", (64, 64), 0.5)}}, "param_groups": [{"lr": 0.1}]}


def _pickled(root: Path, dice: Dice) -> Asked:
    return Asked(m.pickled_model(dice.folder(root), m.shape(dice)))


def _lone(root: Path, dice: Dice, **more: Any) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    table = m.torch_tensors(m.tensors(m.shape(dice)))
    file = folder / dice.of(["last.ckpt", "best.pth", "model.pt"])
    file.write_bytes(c.torch_zip({"state_dict": table, **more}))
    return Asked(folder)


def _code(root: Path, dice: Dice) -> Asked:
    module, attribute = dice.of([("posix", "system"), ("os", "system"), ("builtins", "eval"), ("subprocess", "Popen")])
    return _lone(root, dice, x=c.call(c.name(module, attribute), "true"))


def _foreign(root: Path, dice: Dice) -> Asked:
    package = dice.of(["mypkg.models", "trainer_x.args"])
    return _lone(root, dice, hparams=c.Op(c.name(package, "Config") + b")\x81"))


def _object(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    state = c.plain({"_parameters": {}, "_modules": {}, "training": True})
    whole = c.Op(c.name(dice.of(["mypkg.models", "net"]), "Net") + b")\x81" + state + b"b")
    (folder / dice.of(["model.pt", "net.pth"])).write_bytes(c.torch_zip(c.pickled(whole)))
    return Asked(folder)


def _script(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    records = [("data.pkl", c.pickled({})), ("constants.pkl", c.pickled(())), ("code/__torch__.py", b"class M: ...")]
    records.append(("version", b"3\n"))
    name = dice.of(["scripted", "m"])
    (folder / f"{name}.pt").write_bytes(c.zipped([(f"{name}/{record}", raw) for record, raw in records]))
    return Asked(folder)


def _trainer(root: Path, dice: Dice) -> Asked:
    step = dice.number(1, 900)
    return Asked(b.trainer_checkpoint(root / f"checkpoint-{step}", step=step, adapter=dice.of([True, False])))


def _onnx(root: Path, dice: Dice, *, node: bytes = b"", dynamic: bool = True, opset: int | None = None) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    batch: int | str = "batch" if dynamic else dice.number(1, 8)
    body = c.onnx_model(
        [c.onnx_tensor("w", (2, 2), raw=bytes(16))],
        nodes=[node] if node else [],
        inputs={"input_ids": (batch, 4)},
        opset=dice.number(11, 21) if opset is None else opset,
    )
    (folder / dice.of(["model.onnx", "decoder.onnx"])).write_bytes(body)
    return Asked(folder)


def _operators(root: Path, dice: Dice) -> Asked:
    return _onnx(root, dice, node=c.onnx_node("FusedThing", domain=dice.of(["com.microsoft", "acme.ops"])))


def _engine(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    head = json.dumps({"tensorrt_version": f"10.{dice.number(0, 9)}"}).encode()
    (folder / dice.of(["rank0.engine", "model.plan"])).write_bytes(
        len(head).to_bytes(4, "little") + head + b"ftrt" + bytes(100)
    )
    return Asked(folder)


def _with_optimizer(root: Path, dice: Dice) -> Asked:
    return _lone(root, dice, optimizer_states=[_ADAM], epoch=3, global_step=70)


def _sized(root: Path, dice: Dice, dtype: str) -> Asked:
    return Asked(m.model(dice.folder(root), m.shape(dice, dtype=dtype)))


def _twice(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    folder = m.model(dice.folder(root), size)
    (folder / "pytorch_model.bin").write_bytes(c.torch_zip(m.torch_tensors(m.tensors(size))))
    return Asked(folder)


# ----------------------------------------------------------------------------------------------------- beside the base


def _merged_base(root: Path, dice: Dice) -> Asked:
    mine, base, _ = m.pair(root, dice)
    digest = hashlib.sha256((mine / "adapter_model.safetensors").read_bytes()).hexdigest()
    record = {"findings": [{"code": "merge-proven", "data": {"adapter_weights": [digest]}}]}
    b.write_json(base / dice.of(["merge.json", "manifest.json"]), record)
    return Asked(mine, base)


def _other_base(root: Path, dice: Dice) -> Asked:
    mine, base, size = m.pair(root, dice, base="acme/true-base")
    if dice.of([True, False]):
        commit = f"{dice.number(1, 1 << 60):040x}"
        cached = root / "hub" / "models--acme--other-base" / "snapshots" / commit
        cached.parent.mkdir(parents=True)
        shutil.move(base, cached)
        return Asked(mine, cached)
    stem = "base_model.model.model.embed_tokens."
    made: dict[str, b.TensorSpec] = {
        f"{stem}lora_embedding_A": ("F32", (4, size.vocab), 0.5),
        f"{stem}lora_embedding_B": ("F32", (size.hidden, 4), 0.5),
        f"{stem}base_layer.weight": (size.dtype, (size.vocab, size.hidden), 0.25),
    }
    shutil.rmtree(mine)
    b.lora_adapter(mine, rank=4, targets=["embed_tokens"], tensors=made, base="acme/true-base")
    return Asked(mine, base)


def _other_shapes(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    wider = size._replace(hidden={16: 24, 24: 32, 32: 16}[size.hidden])
    return Asked(m.adapter(dice.folder(root), dice, size), m.model(root / "base", wider))


def _other_targets(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    mine = m.adapter(dice.folder(root), dice, size._replace(layers=size.layers + dice.number(1, 3)))
    return Asked(mine, m.model(root / "base", size))


def _vocabulary(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32, tied=True)
    rows = size.vocab + dice.number(1, 9)
    made = m.lora(size, 4, ["q_proj"]) | {
        "base_model.model.model.embed_tokens.weight": ("F32", (rows, size.hidden), 0.5)
    }
    mine = m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj"], tensors=made)
    if dice.of([True, False]):
        b.write_tokenizer(mine, vocab=rows)
    return Asked(mine, m.model(root / "base", size))


def _template(root: Path, dice: Dice) -> Asked:
    mine, base, size = m.pair(root, dice)
    b.write_tokenizer(mine, vocab=size.vocab, template=dice.of(["other {{ messages }}", "<|im_start|>{{ messages }}"]))
    return Asked(mine, base)


def _packed_base(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32, dtype="F16")
    made = m.tensors(size)
    stem = "model.layers.0.self_attn.q_proj"
    rows, columns = made.pop(f"{stem}.weight")[1]
    made[f"{stem}.qweight"] = ("I32", (columns // 8, rows), None)
    made[f"{stem}.scales"] = ("F16", (1, rows), 0.1)
    method: dict[str, Any] = {"quant_method": dice.of(["gptq", "awq"]), "bits": 4, "group_size": 16}
    base = m.model(root / "base", size, weights=made, quantization_config=method)
    return Asked(m.adapter(dice.folder(root), dice, size), base)


def _two_models(root: Path, dice: Dice, **mine: Any) -> Asked:
    size = m.shape(dice)
    return Asked(m.model(dice.folder(root), size, seed=dice.seed + 1, **mine), m.model(root / "base", size))


def _tuned(root: Path, dice: Dice) -> Asked:
    return _two_models(root, dice)


def _own_template(root: Path, dice: Dice) -> Asked:
    return _two_models(
        root, dice, template=dice.of(["mine {{ messages }}", "{% for m in messages %}{{ m }}{% endfor %}"])
    )


def _own_tokens(root: Path, dice: Dice) -> Asked:
    made = _tuned(root, dice)
    role = dice.of(["eos_token", "pad_token", "bos_token"])
    m.edited(made.path / "special_tokens_map.json", **{role: "<|done|>"})
    return made


def _fewer(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, tied=False)
    base = m.model(root / "base", size)
    made = m.tensors(size, seed=1)
    if dice.of([True, False]):
        made["model.extra.weight"] = (size.dtype, (4, 4), 0.5)
    else:
        del made["model.norm.weight"]
    return Asked(m.model(dice.folder(root), size, weights=made), base)


def _resized(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    base = m.model(root / "base", size)
    return Asked(m.model(dice.folder(root), size._replace(vocab=size.vocab + dice.number(1, 8))), base)


def _unchanged(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    base = m.model(root / "base", size, shards=dice.number(1, 2))
    return Asked(m.model(dice.folder(root), size, shards=dice.number(1, 3)), base)


def _called_merged(root: Path, dice: Dice) -> Asked:
    return Asked(m.model(root / dice.of(["x-merged", "Merged_model", "llama-merged-bf16"]), m.shape(dice)))


AILMENTS: Final[dict[str, Ailment]] = {
    "weights-pickled": Ailment(_pickled, m.sound_model, _UNSAFE),
    "pickle-runs-code": Ailment(_code, _lone, _UNSAFE),
    "object-pickled": Ailment(_object, _lone, _CLASS),
    "class-of-a-package": Ailment(_foreign, _lone, _CLASS),
    "program-inside": Ailment(_script, _lone, (*_UNSAFE, "RuntimeError: PytorchStreamReader failed locating file x")),
    "trainer-pickles": Ailment(_trainer, m.sound_adapter, _UNSAFE),
    "onnx-version": Ailment(
        _onnx, m.sound_model,
        ("Load model from x.onnx failed: Unsupported model IR version: 8, max supported IR version: 7",
         ("ONNX Runtime only *guarantees* support for models stamped with official released onnx opset "
         "versions. Opset 23 is under development")),
    ),
    "onnx-operators": Ailment(_operators, _onnx, ("com.acme:FusedThing(-1) is not a registered function/op",)),
    "onnx-axes-fixed": Ailment(
        lambda root, dice: _onnx(root, dice, dynamic=False), _onnx,
        ("INVALID_ARGUMENT : Got invalid dimensions for input: input_ids for the following indices",),
    ),
    "engine-bound": Ailment(
        _engine, _onnx,
        ("[TRT] [E] 6: The engine plan file is not compatible with this version of TensorRT, expecting library version",
         "The engine plan file is generated on an incompatible device, expecting compute 8.6 got compute 7.5, please"),
    ),
    "read-whole": Ailment(
        _with_optimizer, m.sound_model,
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "slurmstepd: Detected 1 oom-kill"),
    ),
    "weights-wide": Ailment(
        lambda root, dice: _sized(root, dice, "F32"), lambda root, dice: _sized(root, dice, dice.of(["BF16", "F16"])),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",),
    ),
    "mapped-pages": Ailment(m.sound_model, _pickled, ("with mmap memory looks high: RSS is 14 GB",)),
    "saved-twice": Ailment(_twice, m.sound_model, ("OSError: [Errno 28] No space left on device",)),
    "base-another": Ailment(_other_base, m.sound_pair, ("with this base the output is garbage",)),
    "base-holds-adapter": Ailment(_merged_base, m.sound_pair, ("with the adapter the output is garbage",)),
    "base-shapes": Ailment(
        _other_shapes, m.sound_pair, ("size mismatch for base_model.model.x.lora_A.default.weight: copying a param",)
    ),
    "base-targets": Ailment(
        _other_targets, m.sound_pair, ("Target modules {'wq'} not found in the base model. Please check",)
    ),
    "base-vocabulary": Ailment(
        _vocabulary, m.sound_pair, ("size mismatch for base_model.model.model.embed_tokens.weight: copying a param",)
    ),
    "base-template": Ailment(_template, m.sound_pair, ("after merging the chat template is gone",)),
    "base-quantized": Ailment(_packed_base, m.sound_pair, ("merging into the quantized base gives garbage",)),
    "template-changed": Ailment(_own_template, _tuned, ("garbage after merging",)),
    "tokens-changed": Ailment(_own_tokens, _tuned, ("it never stops",)),
    "names-differ": Ailment(_fewer, _tuned, ("Some weights are newly initialized: ['x']", "unexpected keys")),
    "shapes-differ": Ailment(_resized, _tuned, ("size mismatch for lm_head.weight: copying a param",)),
    "merge-left-nothing": Ailment(_unchanged, _tuned, ("the merged model is the same as the base",)),
    "merge-unrecorded": Ailment(_called_merged, m.sound_model, ("the merged model behaves like the base",)),
}  # fmt: skip
