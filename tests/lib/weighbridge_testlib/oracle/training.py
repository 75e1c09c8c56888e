"""Checkpoints as training tools leave them: torch, Lightning, accelerate, torch.distributed on one rank and on two."""

import multiprocessing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import accelerate
import lightning
import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from accelerate.utils import fsdp_utils
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from weighbridge_testlib.oracle.adapters import llama
from weighbridge_testlib.oracle.cases import NAMED, TRAINING
from weighbridge_testlib.oracle.models import stored
from weighbridge_testlib.oracle.told import Make, Told, taken

dcp: Any = torch.distributed.checkpoint


class Net(torch.nn.Module):
    """A small network with a buffer, a norm with running means, two layers of one weight, and a half of bfloat16."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 12)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(12)
        self.head = torch.nn.Linear(12, 20, bias=False).to(torch.bfloat16)
        self.register_buffer("scale", torch.tensor(2.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        """Return the head's output."""
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return torch.nn.functional.linear(self.norm(y) * self.scale, self.head.weight.float())


def _taken(made: Path, wanted: Mapping[str, Any], artifact: str, due: tuple[str, ...] = (), **facts: Any) -> Told:
    """Extract a checkpoint; what a loader of the new folder sees must be the state that was saved."""
    _same(stored(taken(made.parent, made)), wanted)
    return Told(artifact, "model", wanted, facts, due)


def _same(ours: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert ours.keys() == wanted.keys(), (sorted(ours), sorted(wanted))
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in wanted.items())


def _adapter_taken(made: Path, adapted: Any, state: Mapping[str, Any], artifact: str, key: str) -> Told:
    """Extract the adapter alone; it must be what PEFT itself would save."""
    _same(stored(taken(made.parent, made, adapter=True)), peft.get_peft_model_state_dict(adapted))
    return Told(artifact, None, state, {"weights_key": key}, ("adapter-inside",))


def _torch(made: Path, value: Any, wanted: Mapping[str, Any], *, legacy: bool = False, **facts: Any) -> Told:
    made.mkdir()
    torch.save(value, made / "weights.pt", _use_new_zipfile_serialization=not legacy)
    return _taken(made, wanted, "ckpt", **facts)


def _plain(made: Path, *, legacy: bool = False) -> Told:
    state = Net().state_dict()
    return _torch(made, state, state, legacy=legacy, stripped_prefix="")


def _alone(made: Path) -> None:
    """Start torch.distributed with one rank, once."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{made.parent}/meeting", rank=0, world_size=1)


def _wrapped(made: Path, *wrappers: str) -> Told:
    """Save the state of a wrapped model; the names come out without the wrappers."""
    net = Net()
    wanted, wrapped = net.state_dict(), net
    for wrapper in wrappers:
        if wrapper == "ddp":
            _alone(made)
            wrapped = DistributedDataParallel(wrapped)  # type: ignore[assignment]
        else:
            wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    names = {"ddp": "module.", "compile": "_orig_mod."}
    return _torch(made, wrapped.state_dict(), wanted, stripped_prefix="".join(names[w] for w in reversed(wrappers)))


def _averaged(made: Path) -> Told:
    """Save torch's own average of weights: a counter rides beside the model."""
    net = Net()
    average = AveragedModel(net)
    average.update_parameters(net)
    return _torch(made, average.state_dict(), net.state_dict(), stripped_prefix="module.")


def _nested(made: Path) -> Told:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randint(0, 20, (4,))).sum().backward()
    optimizer.step()
    value = {
        "epoch": 3, "model": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1).state_dict(), "args": {"lr": 0.1, "name": "x"},
    }  # fmt: skip
    return _torch(made, value, net.state_dict(), weights_key="model")


def _module_list(made: Path) -> Told:
    """Save a state whose names begin with a number."""
    state = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).state_dict()
    return _torch(made, state, state, stripped_prefix="")


# ------------------------------------------------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    """A training of the small network."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 12})
        self.net = net

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        (x,) = batch
        return self.net(x).float().square().mean()

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters())


def _lightning(made: Path, *, whole: bool = True, twist: str = "") -> Told:
    """Train a step and save; the names come out without the module's own prefix."""
    net: Any = Net()
    if twist == "lora":
        net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["blocks.0", "blocks.1"], r=2))
    inner = torch.compile(net) if twist == "compiled" else net
    module = Module(inner)
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=made.parent,
    )  # fmt: skip
    if twist != "compiled":
        trainer.fit(module, DataLoader(TensorDataset(torch.randint(0, 20, (4, 4)).reshape(16)), batch_size=4))
    else:
        trainer.strategy.connect(module)
    trainer.save_checkpoint(made / "last.ckpt", weights_only=not whole)
    prefix = "net._orig_mod." if twist == "compiled" else "net."
    if twist == "lora":
        return _adapter_taken(made, net, net.state_dict(), "ckpt", "state_dict")
    return _taken(made, net.state_dict(), "ckpt", weights_key="state_dict", stripped_prefix=prefix)


# ----------------------------------------------------------------------------------------------------------- accelerate


def _save_model(made: Path, size: str) -> Told:
    net = Net()
    accelerate.Accelerator(cpu=True).save_model(net, str(made), max_shard_size=size)
    return Told("full-model", "model", net.state_dict(), {}, ("config-missing",))


def _save_state(made: Path, *, safe: bool) -> Told:
    """Save a training state; the model's weights are in it, the rest only serves to go on."""
    net = Net()
    worker = accelerate.Accelerator(cpu=True)
    worker.prepare(net, torch.optim.AdamW(net.parameters()))
    worker.save_state(str(made), safe_serialization=safe)
    artifact, due = "trainer-checkpoint+full-model", ("config-missing",)
    return Told(artifact, "model", net.state_dict(), {}, due) if safe else _taken(made, net.state_dict(), artifact, due)


# ------------------------------------------------------------------------------------------------ torch.distributed


def _distributed(made: Path, *, nested: bool = True) -> Told:
    """Save on one rank with the optimizer; torch's own converter gives what we take out."""
    net = Net()
    state = net.state_dict()
    value = {"model": state, "step": 3, "optimizer": {"exp_avg": torch.zeros(50)}} if nested else dict(state)
    dcp.save(value, checkpoint_id=made, no_dist=True)
    dcp_to_torch_save(made, made.parent / "converted.pt")
    converted = torch.load(made.parent / "converted.pt", weights_only=False)
    wanted = converted["model"] if nested else converted
    return _taken(made, wanted, "ckpt-dcp", weights_key="model" if nested else None)


def _rank(rank: int, made: Path, seed: int) -> None:
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{made.parent}/pair", rank=rank, world_size=2)
    net = Net()
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=made)
    dist.destroy_process_group()


def _pair(work: Callable[..., None], *arguments: Any) -> None:
    """Run two ranks of a function, which gets its rank first."""
    ranks = [multiprocessing.get_context("fork").Process(target=work, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def _two_ranks(made: Path) -> Told:
    """Save from two ranks that hold half of every tensor each; odd sizes leave unequal halves."""
    _pair(_rank, made, 11)
    dcp_to_torch_save(made, made.parent / "converted.pt")
    wanted = torch.load(made.parent / "converted.pt", weights_only=False)["model"]
    torch.manual_seed(11)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in Net().state_dict().items())
    return _taken(made, wanted, "ckpt-dcp", weights_key="model", distcp_files=["__0_0.distcp", "__1_0.distcp"])


def _accelerated_rank(rank: int, made: Path, kind: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{made.parent}/{kind}", rank=rank, world_size=2)
    accelerate.PartialState(cpu=True)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    worker = SimpleNamespace(
        process_index=rank, is_main_process=rank == 0, num_processes=2, wait_for_everyone=dist.barrier,
        device=torch.device("cpu"),
    )  # fmt: skip
    torch.manual_seed(11)
    net = llama()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    made.mkdir(exist_ok=True)
    fsdp_utils.save_fsdp_model(plugin, worker, net, str(made), 0)
    optimizer.step()
    fsdp_utils.save_fsdp_optimizer(plugin, worker, optimizer, net, str(made), 0)
    dist.destroy_process_group()


def _accelerated(made: Path, *, kind: str) -> Told:
    """Save as accelerate does under FSDP: sharded by rank, or gathered; the optimizer lies beside."""
    _pair(_accelerated_rank, made, kind)
    torch.manual_seed(11)
    wanted = llama().state_dict()
    if kind == "SHARDED_STATE_DICT":
        return _taken(made, wanted, "ckpt-dcp", weights_key="model")
    return _taken(made, wanted, "trainer-checkpoint+full-model")


def _slicing_rank(rank: int, made: Path, joined: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{made.parent}/slices", rank=rank, world_size=2)
    torch.manual_seed(11)
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    state = get_model_state_dict(net)
    files = {name: 1 + i % 2 for i, name in enumerate(state)}
    for place in (made, joined):
        writer = dcp.HuggingFaceStorageWriter(
            path=str(place), save_distributed=True, enable_consolidation=place == joined, fqn_to_index_mapping=files
        )
        dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


def _slices(made: Path) -> Told:
    """Save safetensors from two ranks, once as they are and once joined by torch, which keeps the slices beside."""
    _pair(_slicing_rank, made, made.parent / "joined")
    return Told("rank-sharded", None, {}, {"world_size": 2, "ranks_found": 2}, ("rank-files",))


def _joined(made: Path) -> Told:
    """Take the folder that torch joined; its headers have no metadata, and nobody wrote a config."""
    (made.parents[1] / "dcp-slices/joined").rename(made)
    torch.manual_seed(11)
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
    _same(stored(made), net.state_dict())
    return Told("full-model", "model", net.state_dict(), {}, ("config-missing", "format-metadata-missing"))


def _program(made: Path) -> Told:
    made.mkdir()
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(made / "m.pt"))  # type: ignore[no-untyped-call]
    return Told("torchscript", None, {}, {}, ("torchscript",))


def _object(made: Path) -> Told:
    made.mkdir()
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), made / "m.pt")
    return Told("ckpt", None, {}, {}, ("whole-object",))


def _exported(made: Path) -> Told:
    made.mkdir()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), str(made / "m.pt2"))
    return Told("torch-export", None, {}, {"container": "torch-export"})


def _optimizer(made: Path) -> Told:
    """Save a trained optimizer alone: it holds tensors and no weights."""
    made.mkdir()
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), made / "m.pt")
    return Told("optimizer-only", None, {}, {}, ("weights-none",))


def _wrapped_names(made: Path) -> Told:
    """Save the names of a compiled model inside FSDP."""
    net = Net()
    state = {f"_orig_mod._fsdp_wrapped_module.{name}": tensor for name, tensor in net.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=made, no_dist=True)
    return _taken(made, net.state_dict(), "ckpt-dcp", weights_key="model")


def _distributed_adapter(made: Path) -> Told:
    """Save base and adapter in one checkpoint; the adapter comes out in PEFT's own form."""
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    dcp.save({"model": adapted.state_dict()}, checkpoint_id=made, no_dist=True)
    return _adapter_taken(made, adapted, adapted.state_dict(), "ckpt-dcp", "model")


_MAKERS: Final[dict[str, Make]] = {
    "plain": _plain,
    "legacy": partial(_plain, legacy=True),
    "wrapped-ddp": lambda made: _wrapped(made, "ddp"),
    "wrapped-compile": lambda made: _wrapped(made, "compile"),
    "wrapped-both": lambda made: _wrapped(made, "ddp", "compile"),
    "averaged": _averaged,
    "nested": _nested,
    "module-list": _module_list,
    "lightning": _lightning,
    "lightning-weights": partial(_lightning, whole=False),
    "lightning-lora": partial(_lightning, twist="lora"),
    "lightning-compiled": partial(_lightning, twist="compiled"),
    "save-model": partial(_save_model, size="10GB"),
    "save-model-shards": partial(_save_model, size="1KB"),
    "save-state": partial(_save_state, safe=True),
    "save-state-pickle": partial(_save_state, safe=False),
    "dcp": _distributed,
    "dcp-flat": partial(_distributed, nested=False),
    "dcp-two-ranks": _two_ranks,
    "dcp-wrapped": _wrapped_names,
    "dcp-adapter": _distributed_adapter,
    "dcp-fsdp": partial(_accelerated, kind="SHARDED_STATE_DICT"),
    "dcp-gathered": partial(_accelerated, kind="FULL_STATE_DICT"),
    "dcp-joined": _joined,
    "dcp-slices": _slices,
    "script": _program,
    "object": _object,
    "exported": _exported,
    "optimizer": _optimizer,
}


def cases() -> dict[str, Make]:
    """Return every case of this group; those that fork come first, before this process meets anybody."""
    assert tuple(_MAKERS) == (*TRAINING, *NAMED)
    return {name: _MAKERS[name] for name in ("dcp-two-ranks", "dcp-slices", "dcp-fsdp", "dcp-gathered")} | _MAKERS
