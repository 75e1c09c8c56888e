"""Folders for the rules of containers, shards and ranks."""

import json
import struct
from pathlib import Path
from typing import Final

from weighbridge_testlib import builders as b
from weighbridge_testlib import containers as c
from weighbridge_testlib import distributed, ranks
from weighbridge_testlib.ailments import making as m
from weighbridge_testlib.ailments.making import Ailment, Asked, Dice

_HEADER: Final = "safetensors_rust.SafetensorError: Error while deserializing header: "


def _weights(folder: Path, dice: Dice) -> Path:
    """Return one weights file of a folder."""
    return dice.of(sorted(folder.glob("*.safetensors")))


def _cut(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    file = _weights(made.path, dice)
    raw = file.read_bytes()
    file.write_bytes(raw[: dice.of([0, 4, 60, len(raw) // 2, len(raw) - 1])])
    return made


def _damaged(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    file = _weights(made.path, dice)
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    body = raw[8 : 8 + size]
    broken = (raw + b"\0" * dice.number(1, 9), raw[:8] + body.replace(b'"dtype"', b'"dtipe"', 1) + raw[8 + size :])
    file.write_bytes(dice.of(broken))
    return made


def _pointer(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    digest = f"{dice.number(0, 1 << 62):064x}"
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {dice.number(1000, 10**10)}\n"
    _weights(made.path, dice).write_text(text)
    return made


def _dangling(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    file = _weights(made.path, dice)
    file.unlink()
    file.symlink_to(dice.of(["../../blobs/0a1b", "/mnt/gone/model.safetensors"]))
    return made


def _other_format(root: Path, dice: Dice) -> Asked:
    folder = m.model(dice.folder(root), m.shape(dice))
    file = folder / "model.safetensors"
    if dice.of([True, False]):
        file.rename(folder / "pytorch_model.bin")
    else:
        file.write_bytes(c.torch_zip({"w": c.T("F32", (2, 2), 1.0)}))
    return Asked(folder)


def _json(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    file = (
        next(made.path.glob("*config.json")) if not (made.path / "config.json").exists() else made.path / "config.json"
    )
    file.write_text(dice.of(["", '{"a": ', "{'a': 1}", file.read_text()[:-3]]))
    return made


def _unmarked(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    folder = m.model(dice.folder(root), size)
    b.write_safetensors(folder / "model.safetensors", m.tensors(size), dice.of([{}, {"note": "mine"}]))
    return Asked(folder)


def _unfinished(root: Path, dice: Dice) -> Asked:
    step = dice.number(1, 999)
    return Asked(b.trainer_checkpoint(root / f"checkpoint-{step}", step=step, ended=False))


def _finished(root: Path, dice: Dice) -> Asked:
    step = dice.number(1, 999)
    return Asked(b.trainer_checkpoint(root / f"checkpoint-{step}", step=step))


def _gguf(root: Path, dice: Dice, version: int = 3) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    name = dice.of(["tiny-f16.gguf", "m.gguf"])
    side = dice.of([4, 8, 32])
    body = c.gguf({"general.architecture": "llama"}, {"w": ("F16", (side, side), None)}, version=version)
    (folder / name).write_bytes(body)
    return Asked(folder)


def _gguf_old(root: Path, dice: Dice) -> Asked:
    made = _gguf(root, dice)
    file = next(made.path.iterdir())
    raw = file.read_bytes()
    file.write_bytes(dice.of([raw[:4] + struct.pack("<I", dice.number(7, 99)) + raw[8:], b"lmgg" + raw[4:]]))
    return made


def _split(root: Path, dice: Dice, *, whole: bool = True) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    count = dice.number(2, 4)
    for i in range(count):
        body = c.gguf({"general.architecture": "llama", "split.count": count}, {f"w{i}": ("F32", (4, 4), None)})
        (folder / f"tiny-{i + 1:05d}-of-{count:05d}.gguf").write_bytes(body)
    if not whole:
        (folder / f"tiny-{dice.number(1, count):05d}-of-{count:05d}.gguf").unlink()
    return Asked(folder)


# --------------------------------------------------------------------------------------------------------------- shards


def _sharded(root: Path, dice: Dice) -> Asked:
    return Asked(m.model(dice.folder(root), m.shape(dice), shards=dice.number(2, 4)))


def _shard_gone(root: Path, dice: Dice) -> Asked:
    made = _sharded(root, dice)
    _weights(made.path, dice).unlink()
    return made


def _index_gone(root: Path, dice: Dice) -> Asked:
    made = _sharded(root, dice)
    index = made.path / "model.safetensors.index.json"
    if dice.of([True, False]):
        index.unlink()
    else:
        index.write_text("{}")
    return made


def _index_wrong(root: Path, dice: Dice) -> Asked:
    made = _sharded(root, dice)
    index = made.path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    files = sorted(set(table["weight_map"].values()))
    name = dice.of(sorted(table["weight_map"]))
    table["weight_map"][name] = next(f for f in files if f != table["weight_map"][name])
    b.write_json(index, table)
    return made


def _stale(root: Path, dice: Dice) -> Asked:
    made = _sharded(root, dice)
    count = dice.number(5, 9)
    size = m.shape(dice)
    b.write_safetensors(made.path / f"model-00001-of-{count:05d}.safetensors", m.tensors(size))
    return made


# ---------------------------------------------------------------------------------------------------------------- ranks


def _empty(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.lora(size, 4, ["q_proj", "v_proj"])
    keep = dice.of([0, 1])
    emptied: dict[str, b.TensorSpec] = {n: (t[0], (0,), None) for n, t in list(made.items())[keep:]}
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj", "v_proj"], tensors=made | emptied))


def _one_rank(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice, inner=32)
    made = m.lora(size, 4, ["q_proj", "v_proj"], seed=dice.seed)
    world = dice.of([2, 4])
    for name, (dtype, side, data) in made.items():
        if "lora_B" in name:
            values = list(data) if isinstance(data, list) else []
            kept = side[0] // world * side[1]
            made[name] = (dtype, side, values[:kept] + [0.0] * (len(values) - kept))
    return Asked(m.adapter(dice.folder(root), dice, size, rank=4, targets=["q_proj", "v_proj"], tensors=made))


def _zero(root: Path, dice: Dice, *, stage: int | None = None) -> Asked:
    folder = dice.folder(root)
    folder.mkdir(parents=True)
    sides = {name: tuple(side) for name, (_, side, _) in m.tensors(m.shape(dice, dtype="F32")).items()}
    step = dice.number(1, 500)
    world = dice.number(2, 4)
    ranks.zero_folder(folder, sides, world=world, stage=stage or dice.of([2, 3]), tag=f"global_step{step}", step=step)
    return Asked(folder)


def _rank_gone(root: Path, dice: Dice) -> Asked:
    made = _zero(root, dice)
    dice.of(sorted(made.path.glob("*/*_optim_states.pt"))).unlink()
    return made


def _resumable(root: Path, dice: Dice) -> Asked:
    step = dice.number(1, 999)
    return Asked(b.trainer_checkpoint(root / f"checkpoint-{step}", step=step, deepspeed_ranks=dice.number(3, 5)))


def _not_resumable(root: Path, dice: Dice) -> Asked:
    made = _resumable(root, dice)
    if dice.of([True, False]):
        (made.path / "latest").write_text("global_step100000")
    else:
        (made.path / "rng_state_1.pth").unlink()
    return made


def _megatron(root: Path, dice: Dice) -> Asked:
    folder = dice.folder(root)
    return Asked(ranks.megatron_folder(folder, iteration=dice.number(1, 5000), tp=dice.of([2, 4])).parent)


def _slice(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    ways = 2
    made = m.tensors(size)
    for name, (dtype, side, _) in made.items():
        if name.split(".")[-2] in {"q_proj", "gate_proj", "up_proj"}:
            made[name] = (dtype, (side[0] // ways, side[1]), 0.5)
        elif name.split(".")[-2] in {"o_proj", "down_proj"}:
            made[name] = (dtype, (side[0], side[1] // ways), 0.5)
    return Asked(m.model(dice.folder(root), size, weights=made))


def _distributed(root: Path, dice: Dice) -> Asked:
    return Asked(distributed.small(dice.folder(root), rows=dice.of([4, 8, 10]), files=dice.of([1, 2])))


def _huge(root: Path, dice: Dice) -> Asked:
    step = dice.number(1, 999)
    folder = b.trainer_checkpoint(root / f"checkpoint-{step}", step=step, deepspeed_ranks=dice.number(1, 3))
    with next(folder.glob("global_step*/*optim*")).open("r+b") as stream:
        stream.truncate(dice.number(200_000, 900_000))
    return Asked(folder)


def _lacking(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    (made.path / "generation_config.json").unlink()
    return made


AILMENTS: Final[dict[str, Ailment]] = {
    "file-cut": Ailment(_cut, m.sound_model, (_HEADER + "incomplete metadata, file not fully covered",)),
    "file-damaged": Ailment(_damaged, m.sound_adapter, (_HEADER + "invalid JSON", "MetadataIncompleteBuffer")),
    "pointer-not-fetched": Ailment(_pointer, m.sound_model, (_HEADER + "header too large", "invalid load key, 'v'.")),
    "link-to-nothing": Ailment(_dangling, m.sound_adapter, ("FileNotFoundError: No such file or directory: 'x'",)),
    "other-format": Ailment(_other_format, m.sound_model, ("WeightsUnpickler error: \n\nUnsupported operand 32",)),
    "json-unreadable": Ailment(
        _json, m.sound_model, ("OSError: It looks like the config file at 'x/config.json' is not a valid JSON file.",)
    ),
    "format-mark": Ailment(
        _unmarked, m.sound_model,
        ("OSError: The safetensors archive passed at x does not contain the valid metadata. Make sure",),
    ),
    "not-finished": Ailment(_unfinished, _finished, ("FileNotFoundError: [Errno 2] No such file or directory",)),
    "container-old": Ailment(
        _gguf_old, _gguf, ("gguf_init_from_file_impl: invalid magic characters: 'lmgg', expected 'GGUF'",)
    ),
    "part-missing": Ailment(
        lambda root, dice: _split(root, dice, whole=False), _split, ("error: failed to load model from file",)
    ),
    "index-ahead": Ailment(
        _shard_gone, _sharded,
        ("FileNotFoundError: No such file or directory: /x/model-00002-of-00003.safetensors",),
    ),
    "file-in-text": Ailment(
        _lacking, m.sound_model,
        ("OSError: /x does not appear to have a file named generation_config.json. Checkout 'https://huggingface.co/x'",
         "FileNotFoundError: [Errno 2] No such file or directory: '/x/model/generation_config.json'"),
    ),
    "index-unusable": Ailment(
        _index_gone, _sharded, ("OSError: Error no file named model.safetensors, or pytorch_model.bin, found in x.",)
    ),
    "index-wrong": Ailment(_index_wrong, _sharded, ("SafetensorError: File does not contain tensor model.norm",)),
    "save-mixed": Ailment(_stale, _sharded, ("the output is garbage",)),
    "not-gathered": Ailment(
        _empty, m.sound_adapter,
        ("size mismatch for a.lora_A.default.weight: copying a param with shape torch.Size([0]) from checkpoint",),
    ),
    "partly-gathered": Ailment(_one_rank, m.sound_adapter, ("my LoRA has no effect",)),
    "rank-file-gone": Ailment(
        _rank_gone, _zero,
        ("ValueError: Expected 4 of '*_optim_states.pt' under 'x' but found 3 files. Possibly due to an overwrite",),
    ),
    "cannot-resume": Ailment(_not_resumable, _resumable, ("ValueError: Can't find a valid checkpoint at x",)),
    "rank-files-only": Ailment(
        _megatron, m.sound_model, ("size mismatch for weight: copying a param", "No checkpoint found")
    ),
    "parallel-slice": Ailment(_slice, m.sound_model, ("RuntimeError: size mismatch for q_proj.weight",)),
    "zero-only": Ailment(_zero, _resumable, ("OSError: Error no file named model.safetensors found in directory x",)),
    "distributed-only": Ailment(
        _distributed, m.sound_model, ("OSError: Error no file named pytorch_model.bin found in directory x",)
    ),
    "zero-huge": Ailment(_huge, _finished, ("OSError: [Errno 28] No space left on device",)),
}  # fmt: skip
