"""The arithmetic of a merge by torch, on a GPU or, with the same code, on the processor: W + (B·A)·s, one rounding.

Only the child process of a merge imports this. Single precision is full single precision: TF32, which misrounds some
elements in a hundred, is switched off. Sums may be added up in another order than on the processor, so bits may differ
by what the proof allows; hashing, writing and the proof stay where they were.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from weighbridge.adapters import starved
from weighbridge.adapters.merge import block, pays
from weighbridge.adapters.merge.block import Array, Prepared
from weighbridge.adapters.merge.stream import Base, Changed
from weighbridge.adapters.merge.values import Step
from weighbridge.registry import errors

BLOCKS: Final = 32
"""How many of the processor's blocks are sent at once: 16 MB of bf16 keep a link busy."""

_FREE: Final = 0.9
"""The share of a device's memory that must be free for it to count as free."""

_KINDS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS: Final = {2: torch.int16, 4: torch.int32}


class Engine:
    """One device; `name` is torch's, cpu or cuda:0. Safe to use from several threads, one tensor each."""

    def __init__(self, name: str, lock: int | None = None) -> None:
        self.name = name
        self._lock = lock
        self._device = torch.device(name)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.set_grad_enabled(mode=False)

    def close(self) -> None:
        """Let the next merge have the device."""
        if self._lock is not None:
            os.close(self._lock)

    def able(self, step: Step) -> bool:
        """Tell whether a step is carried out here: products and norms of rows, in single precision."""
        return pays.able(step)

    def change(self, it: Prepared, base: Base) -> Iterator[Changed]:
        """Yield the new rows of a tensor, some blocks at once; what the adapters give stays on the device meanwhile.

        Raises ArithmeticError where a value is not finite in the dtype of the result, WeighbridgeError where the
        device's memory is full.
        """
        try:
            yield from self._changed(it, base)
        except torch.OutOfMemoryError as error:
            raise starved.full(self.name, str(error)) from error

    def _changed(self, it: Prepared, base: Base) -> Iterator[Changed]:
        loaded = _Loaded(it, self._device)
        rows, _ = it.step.matrix
        for start, stop in block.spans(rows, BLOCKS * base.size):
            before, new, out = loaded.rows(base.rows(start, stop), start, stop)
            seen = [
                (_numbers(before[first:last]), _numbers(new[first:last]), _numbers(out[first:last]))
                for first, last in block.spans(stop - start, base.size)
                if base.looked((start + first) // base.size)
            ]
            yield Changed(_stored(out, it.step.dtype), bool(torch.any(out.float() != before.float())), seen)


class _Loaded:
    """One step on a device."""

    def __init__(self, it: Prepared, device: torch.device) -> None:
        self._it = it
        self._device = device
        self._products = [
            (self._up(one.left), self._up(np.ascontiguousarray(one.right[:, : one.columns])), float(one.scale), one.at)
            for one in it.products
        ]
        self._magnitude = self._up(it.magnitude) if it.magnitude is not None else None

    def _up(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def rows(self, raw: Array, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows from `start` to `stop`: the base's, the new ones, and these rounded; `raw` are the stored."""
        step = self._it.step
        bits = torch.from_numpy(raw.view(np.dtype(f"<i{raw.dtype.itemsize}")))
        before = bits.to(self._device).view(_KINDS[step.origin.dtype])
        new = before.float() if step.origin.dtype != "F32" else before.clone()
        for left, right, scale, at in self._products:
            first, last = max(start, at), min(stop, at + len(left))
            if first < last:
                part = left[first - at : last - at] @ right
                new[first - start : last - start] += part.mul_(scale)
        if self._magnitude is not None:
            new *= (self._magnitude[start:stop] / torch.linalg.vector_norm(new, dim=1))[:, None]
        top = float(new.abs().amax()) if new.numel() else 0.0
        if not top < block.limit(step.dtype):
            raise ArithmeticError(f"a value is not finite in {step.dtype}: the largest is {top}")
        return before, new, new.to(_KINDS[step.dtype])


def _stored(out: torch.Tensor, dtype: str) -> Array:
    """Return values of a device as they are written, in a dtype of numpy's."""
    kind: Any = block.dtype_of(dtype)
    return np.asarray(out.view(_BITS[kind.itemsize]).cpu().numpy().view(kind))


def _numbers(values: torch.Tensor) -> Array:
    """Return values of a device in single precision."""
    return np.array(values.float().cpu().numpy())


def take(wanted: str, locks: Path) -> tuple[Engine | None, str]:
    """Return an engine, None where the processor does it, and in a few words why.

    `wanted` is as in `pays.Choice`; a GPU is taken that is free and that no other merge holds in the folder `locks`.
    Raises UsageError where it must be a GPU and there is none, ConflictError where all are in use.
    """
    if wanted == "processor":
        return Engine("cpu"), "asked for"
    if not torch.cuda.is_available():
        why = "torch sees no GPU here (it may be built without CUDA, or its driver not fit)"
        if wanted == "cuda":
            raise pays.refusal(why)
        return None, why
    try:
        found = _free(locks)
    except RuntimeError as error:  # a driver that is there and does not come up
        why = f"CUDA does not come up: {' '.join(str(error).split())[:300]}"
        if wanted == "cuda":
            raise pays.refusal(why) from error
        return None, why
    if found is None and wanted == "cuda":
        raise errors.ConflictError(
            "every GPU here is in use",
            why=f"one counts as free when {_FREE:.0%} of its memory are, and no other merge has it",
            fix="wait for it, or leave --device out: then the processor does it",
        )
    return found or (None, "every GPU here is in use")


def _free(locks: Path) -> tuple[Engine, str] | None:
    for number in range(torch.cuda.device_count()):
        lock = _held(locks, number)
        if lock is None:
            continue
        free = False
        try:
            left, total = torch.cuda.mem_get_info(number)
            free = left >= _FREE * total
        finally:
            if not free:
                os.close(lock)
        if free:
            return Engine(f"cuda:{number}", lock), torch.cuda.get_device_name(number)
    return None


def _held(locks: Path, number: int) -> int | None:
    """Return an open lock on a device, None while another merge of this user has it.

    Named by what the device is and not by its number, which means another one where others are visible.
    """
    name = getattr(torch.cuda.get_device_properties(number), "uuid", number)
    path = locks / f"{name}.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
