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
    cast_elements: int = 0
    cast_exact: int = 0
    cast_to_zero: int = 0
    rounding_checked: int = 0
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
        self.cast_elements += other.cast_elements
        self.cast_exact += other.cast_exact
        self.cast_to_zero += other.cast_to_zero
        self.rounding_checked += other.rounding_checked
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
            "elements_cast": self.cast_elements,
            "elements_exact": self.cast_exact,
            "elements_to_zero": self.cast_to_zero,
            "roundings_checked": self.rounding_checked,
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
        room, places = Room(), Places(seed, small=small)
        cast = sum(step.origin.count for step in file.steps if not step.verbatim and not step.touched)
        looked_at = Places(seed, small=cast <= ALL)
        for step in file.steps:
            if step.verbatim:
                _same(step, files, descriptor, room, proof)
            elif step.factors or step.term is not None:
                _bound(step, files, descriptor, room, proof, places=places)
            else:
                _exact(step, files, descriptor, room, proof, places=looked_at)
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


def _exact(step: Step, files: Files, descriptor: int, room: Room, proof: Proof, *, places: "Places") -> None:
    """Compare what has one right answer: a change of dtype, and rows that are replaced.

    Of a change of dtype some blocks are looked at in another way, too: no neighbour of the stored number may be nearer.
    """
    it = block.prepare(step, files.load)
    rows, columns = step.matrix
    spans = list(block.spans(rows, block.block_rows(columns, WIDTH[step.dtype])))
    chosen = set() if step.touched else set(places.of(step.name, spans))
    for start, stop in spans:
        raw = files.rows(step.origin, columns, start, stop, room)
        right = block.rounded(block.apply(it, raw.astype(it.wide), start, stop, room=room), step.dtype)
        ours = _stored(step, descriptor, start, stop, room)
        if not np.array_equal(ours.view(np.uint8), np.ascontiguousarray(right).view(np.uint8)):
            proof.failures.append(f"{step.name}: rows {start} to {stop} are not the rounded values of their origin")
            return
        if not step.touched:
            _counted(raw, ours, step, proof, looked_at=(start, stop) in chosen)
    if step.touched:
        proof.changed += 1
    else:
        proof.cast += 1


def _counted(raw: Array, ours: Array, step: Step, proof: Proof, *, looked_at: bool) -> None:
    """Count what a change of dtype did to some rows, and look at every rounding of them where they were chosen."""
    before, after = raw.astype(np.float64), ours.astype(np.float64)
    proof.cast_elements += before.size
    proof.cast_exact += int(np.count_nonzero(before == after))
    proof.cast_to_zero += int(np.count_nonzero((after == 0) & (before != 0)))
    if not looked_at:
        return
    bad = int(np.count_nonzero(~nearest(before, ours, step.dtype)))
    proof.rounding_checked += before.size
    proof.violations += bad
    if bad:
        proof.failures.append(f"{step.name}: {bad} elements are not the nearest number of {step.dtype}")


def nearest(values: Array, stored: Array, dtype: str) -> Array:
    """Return which stored numbers are the nearest of their dtype to the values (in double precision), ties to even.

    Each is compared with the two numbers beside it, by the bits that stand for them: no rounding is done.
    """
    width = stored.dtype.itemsize
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
    bits = np.ascontiguousarray(stored).view(kind)
    sign = bits & kind(1 << (8 * width - 1))
    size = bits & kind((1 << (8 * width - 1)) - 1)
    away = np.abs(stored.astype(np.float64) - values)
    even = (bits & kind(1)) == 0
    fine = np.isfinite(away) & (np.abs(values) < block.limit(dtype))
    beyond = (size + kind(1)) | sign
    turned = kind(1) | (sign ^ kind(1 << (8 * width - 1)))  # the other neighbour of zero has the other sign
    within = np.where(size > 0, (size - kind(1) * (size > 0)) | sign, turned)
    for other in (beyond, within):
        with np.errstate(invalid="ignore"):
            distance = np.abs(other.astype(kind).view(stored.dtype).astype(np.float64) - values)
        fine &= (away < distance) | ((away == distance) & even)
    return np.asarray(fine)


class Places:
    """Which blocks are looked at: all of a small merge, else some that the seed picks for every tensor."""

    def __init__(self, seed: str, *, small: bool) -> None:
        self._seed = seed
        self._small = small

    def of(self, name: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the chosen ones of a tensor's blocks."""
        if self._small or len(spans) <= _SAMPLES:
            return spans
        picked = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return random.Random(picked).sample(spans, _SAMPLES)  # noqa: S311 - to look somewhere, not to hide


def _stored(step: Step, descriptor: int, start: int, stop: int, room: Room) -> Array:
    _, columns = step.matrix
    kind = block.dtype_of(step.dtype)
    space = room.take("stored", (stop - start, columns), kind)
    at = step.at + start * columns * kind.itemsize
    stream.read_into(descriptor, at, stream.flat(space))
    return space


def _bound(step: Step, files: Files, descriptor: int, room: Room, proof: Proof, *, places: Places) -> None:
    it = block.prepare(step, files.load)
    rows, columns = step.matrix
    norms = None
    if step.magnitude is not None and step.magnitude.columns:
        norms = _column_norms(it, files, room)
    size = max(1, _SAMPLE // max(1, columns))
    bad = 0
    for start, stop in places.of(step.name, list(block.spans(rows, size))):
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
