"""Read a written file again and prove it: copies byte for byte, changed elements within half a unit of rounding.

For a changed element R = f·(W + s·(B·A)) is computed in double precision from the stored tensors (f is DoRA's factor,
else 1), and |out - R| must not be above half a unit in the last place of `out` at R plus what single precision can lose
in the product and the sum: (r + 3)·2^-24·f·(|W| + s·|B||A|). Nothing in it is tuned: rounding twice breaks it, and so
does a strength that is wrong by a hundredth. All elements of a small merge are checked, of a large one seeded blocks of
rows of every changed tensor.
"""

import hashlib
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.merge import block, stream
from weighbridge.adapters.merge.block import Array, Prepared, Room
from weighbridge.adapters.merge.stream import Files
from weighbridge.adapters.merge.values import WIDTH, OutFile, Plan, Step

ALL: Final = 8 << 20
"""Changed elements up to which every one is checked."""

_SAMPLES: Final = 2
_SAMPLE: Final = 64 << 10
"""Elements of one seeded block."""

_UNIT: Final = 2.0**-24
_ROUNDING: Final = {"BF16": (7, -126), "F16": (10, -14), "F32": (23, -126), "F64": (52, -1022)}
"""Bits of the fraction and the smallest normal exponent of each dtype."""


@dataclass
class Proof:
    """What was proven of one file, or of all together."""

    copied: int = 0
    copied_bytes: int = 0
    cast: int = 0
    changed: int = 0
    elements: int = 0
    violations: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing was found wrong."""
        return not self.failures and not self.violations

    def join(self, other: "Proof") -> None:
        """Take in what was proven of another file."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.cast += other.cast
        self.changed += other.changed
        self.elements += other.elements
        self.violations += other.violations
        self.worst = max(self.worst, other.worst)
        self.failures += other.failures

    def facts(self) -> dict[str, Any]:
        """Return what was proven as JSON."""
        return {
            "passed": self.passed,
            "tensors_copied": self.copied,
            "bytes_copied": self.copied_bytes,
            "tensors_cast": self.cast,
            "tensors_changed": self.changed,
            "elements_checked": self.elements,
            "bound_violations": self.violations,
            "worst_ratio": round(self.worst, 6),
            "failures": self.failures[:20],
        }


def is_small(plan: Plan) -> bool:
    """Return whether every changed element is checked."""
    return sum(step.origin.count for step in plan.steps if step.factors) <= ALL


def check(file: OutFile, files: Files, target: Path, *, seed: str, small: bool) -> Proof:
    """Return what the written file proves; `files` are the plan's sources. Raises OSError."""
    proof = Proof()
    status = target.stat()
    with target.open("rb") as stream_:
        stored = stream_.read(len(file.header))
        stream_.seek(0)
        header = safetensors.read_from(stream_, status.st_size)
    if stored != file.header or status.st_size != file.size or header.faults:
        proof.failures.append(f"{file.path}: header or length are not those of the plan")
        return proof
    written = {t.name: (t.dtype, t.shape, header.data_start + t.begin) for t in header.tensors.values()}
    planned = {s.name: (s.dtype, s.shape, s.at) for s in file.steps}
    if written != planned:
        odd = sorted(name for name in written.keys() | planned.keys() if written.get(name) != planned.get(name))
        proof.failures.append(f"{file.path}: {', '.join(odd[:4])} do not stand as planned")
        return proof
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        room = Room()
        for step in file.steps:
            if step.verbatim:
                _same(step, files, descriptor, room, proof)
            elif step.factors or step.term is not None:
                _bound(step, files, descriptor, room, proof, seed=seed, small=small)
            else:
                _exact(step, files, descriptor, room, proof)
    finally:
        os.close(descriptor)
    return proof


def _same(step: Step, files: Files, descriptor: int, room: Room, proof: Proof) -> None:
    """Compare a tensor that nobody changes with the base's bytes, one that is replaced with the adapter's."""
    total = stream.byte_count(step.origin)
    for start, stop in block.spans(total, block.BLOCK):
        ours = room.take("ours", (1, stop - start), np.uint8)[0]
        theirs = room.take("theirs", (1, stop - start), np.uint8)[0]
        stream.read_into(descriptor, step.at + start, stream.flat(ours))
        files.into(step.origin.file, step.origin.at + start, stream.flat(theirs))
        if not np.array_equal(_words(ours), _words(theirs)):
            proof.failures.append(f"{step.name}: its bytes are not those it was copied from")
            return
    proof.copied += 1
    proof.copied_bytes += total


def _words(raw: Array) -> Array:
    return raw.view(np.uint64) if raw.size % 8 == 0 and raw.size else raw


def _exact(step: Step, files: Files, descriptor: int, room: Room, proof: Proof) -> None:
    """Compare what has one right answer: a change of dtype, and rows that are replaced."""
    it = block.prepare(step, files.load)
    rows, columns = step.matrix
    for start, stop in block.spans(rows, block.block_rows(columns, WIDTH[step.dtype])):
        raw = files.rows(step.origin, columns, start, stop, room)
        right = block.rounded(block.apply(it, raw.astype(it.wide), start, stop, room=room), step.dtype)
        ours = _stored(step, descriptor, start, stop, room)
        if not np.array_equal(ours.view(np.uint8), np.ascontiguousarray(right).view(np.uint8)):
            proof.failures.append(f"{step.name}: rows {start} to {stop} are not the rounded values of their origin")
            return
    if step.touched:
        proof.changed += 1
    else:
        proof.cast += 1


def _stored(step: Step, descriptor: int, start: int, stop: int, room: Room) -> Array:
    _, columns = step.matrix
    kind = block.dtype_of(step.dtype)
    space = room.take("stored", (stop - start, columns), kind)
    at = step.at + start * columns * kind.itemsize
    stream.read_into(descriptor, at, stream.flat(space))
    return space


def _bound(step: Step, files: Files, descriptor: int, room: Room, proof: Proof, *, seed: str, small: bool) -> None:
    it = block.prepare(step, files.load)
    rows, columns = step.matrix
    norms = None
    if step.magnitude is not None and step.magnitude.columns:
        norms = _column_norms(it, files, room)
    size = max(1, _SAMPLE // max(1, columns))
    places = list(block.spans(rows, size))
    if not small and len(places) > _SAMPLES:
        picked = hashlib.sha256(f"{seed}/{step.name}".encode()).digest()
        places = random.Random(picked).sample(places, _SAMPLES)  # noqa: S311 - to look somewhere, not to hide
    bad = 0
    for start, stop in places:
        raw = files.rows(step.origin, columns, start, stop, room)
        right, slack = _reference(it, raw.astype(np.float64), start, stop, norms)
        ours = _stored(step, descriptor, start, stop, room).astype(np.float64)
        allowed = 0.5 * ulp(right, step.dtype) + slack
        with np.errstate(invalid="ignore"):
            ratio = np.abs(ours - right) / np.maximum(allowed, np.finfo(np.float64).tiny)
        wrong = ~(ratio <= 1.0)
        bad += int(np.count_nonzero(wrong))
        proof.elements += ratio.size
        finite = ratio[np.isfinite(ratio)]
        proof.worst = max(proof.worst, float(finite.max()) if finite.size else 0.0)
    proof.violations += bad
    if bad:
        proof.failures.append(f"{step.name}: {bad} elements are further from the exact result than rounding allows")
    else:
        proof.changed += 1


def _reference(it: Prepared, base: Array, start: int, stop: int, norms: Array | None) -> tuple[Array, Array]:
    """Return the exact values of some rows, and what single precision may lose beside the last rounding."""
    added = np.zeros_like(base)
    weight = np.abs(base)
    rank = 0
    for product in it.products:
        first, last = max(start, product.at), min(stop, product.at + len(product.left))
        if first >= last:
            continue
        left = product.left[first - product.at : last - product.at].astype(np.float64)
        right = product.right[:, : product.columns].astype(np.float64)
        scale = float(product.scale)
        added[first - start : last - start] += scale * (left @ right)
        weight[first - start : last - start] += abs(scale) * (np.abs(left) @ np.abs(right))
        rank += left.shape[1] + 2
    exact = base + added
    if it.term is not None:
        exact = exact + it.term
        weight = weight + np.abs(it.term)
    slack = (rank + 3) * _UNIT * weight
    if it.magnitude is not None and it.step.magnitude is not None:
        size = it.magnitude.astype(np.float64)
        if it.step.magnitude.columns:
            assert norms is not None
            factor = (size / norms)[None, :]
            terms = it.step.matrix[0] // 2
        else:
            factor = (size[start:stop] / np.sqrt((exact * exact).sum(axis=1)))[:, None]
            terms = it.step.matrix[1] // 16  # eight partial sums, and a root halves the error
        exact = factor * exact
        # The norm is a sum of squares in single precision, each of them as exact as its element.
        slack = np.abs(factor) * slack + np.abs(exact) * (terms + rank + 16) * _UNIT
    return exact, slack


def _column_norms(it: Prepared, files: Files, room: Room) -> Array:
    rows, columns = it.step.matrix
    sums = np.zeros(columns)
    for start, stop in block.spans(rows, max(1, _SAMPLE // max(1, columns))):
        raw = files.rows(it.step.origin, columns, start, stop, room)
        exact, _ = _reference(_plain(it), raw.astype(np.float64), start, stop, None)
        sums += (exact * exact).sum(axis=0)
    return np.asarray(np.sqrt(sums))


def _plain(it: Prepared) -> Prepared:
    return it._replace(magnitude=None)


def ulp(values: Array, dtype: str) -> Array:
    """Return the distance of the numbers of a dtype around each value."""
    bits, least = _ROUNDING[dtype]
    _, exponent = np.frexp(np.abs(values))
    exponent = np.where(values == 0.0, least, np.maximum(exponent - 1, least))
    return np.asarray(np.ldexp(1.0, exponent - bits))
