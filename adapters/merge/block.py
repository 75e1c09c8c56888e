"""The arithmetic of a merge on one block of rows: fp32, in PEFT's order, one rounding.

W + (B·A)·s in single precision gives the bits of PEFT's default merge: each element of a product is summed in the order
of the rank whatever the block, as long as the width is padded to what the kernels of the BLAS work in and a block has
more than one row. DoRA's norms are summed as torch sums them: eight partial sums along a row, plainly down a column.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weighbridge.adapters.merge.values import Factor, Origin, Step

Array = npt.NDArray[Any]
Load = Callable[[Origin], Array]
"""Gives a stored tensor, in its own dtype and shape."""

BLOCK: Final = 1 << 19
"""Bytes of a block: larger ones leave the processor's second cache, and writing them costs three times as much."""

_DTYPES: Final[dict[str, Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LIMITS: Final = {
    "F64": float("inf"),
    "F32": float.fromhex("0x1.ffffffp+127"),
    "F16": 65520.0,
    "BF16": float.fromhex("0x1.ffp+127"),
}
"""Values from which on the nearest one of a dtype is infinite."""

_PAD: Final = 64
_LANES: Final = 8


class Product(NamedTuple):
    """Left and right matrix of a factor in fp32, the right one padded; `columns` is its width without the padding."""

    left: Array
    right: Array
    scale: Any
    at: int
    columns: int


class Prepared(NamedTuple):
    """What the blocks of one step need besides their rows."""

    step: Step
    products: tuple[Product, ...]
    magnitude: Array | None
    rows: Array | None
    where: dict[int, int]
    """Row of the tensor -> row of the trained ones."""
    term: Array | None
    wide: Any
    """The dtype of the arithmetic: float32, or float64 for a base in double precision."""


def dtype_of(name: str) -> Any:
    """Return the numpy dtype of a safetensors dtype."""
    return _DTYPES[name]


def limit(name: str) -> float:
    """Return the magnitude from which on the nearest number of a dtype is infinite."""
    return float(_LIMITS[name])


def block_rows(columns: int, width: int) -> int:
    """Return how many rows a block has."""
    return max(2, BLOCK // max(1, columns * width))


def spans(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, row behind the last) of every block."""
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def prepare(step: Step, load: Load) -> Prepared:
    """Load what a step needs of the adapters. Raises ArithmeticError where it is not finite."""
    # A tensor that is only cast is rounded once, from all it has.
    wide = np.float64 if step.origin.dtype == "F64" and (step.dtype == "F64" or not step.touched) else np.float32

    def finite(origin: Origin) -> Array:
        values = load(origin).astype(wide)
        if not np.isfinite(values).all():
            raise ArithmeticError(f"{origin.name} holds {int((~np.isfinite(values)).sum())} values that are not finite")
        return values

    cache: dict[tuple[int, int], Array] = {}  # by place: two adapters use the same names

    def matrix(origin: Origin) -> Array:
        place = (origin.file, origin.at)
        if place not in cache:
            cache[place] = finite(origin)
        return cache[place]

    products = tuple(_product(factor, matrix(factor.a), matrix(factor.b), wide) for factor in step.factors)
    magnitude = finite(step.magnitude.origin).reshape(-1) if step.magnitude is not None else None
    rows = finite(step.rows.origin) if step.rows is not None else None
    where = {row: number for number, row in enumerate(step.rows.indices)} if step.rows is not None else {}
    term = finite(step.term.origin) * wide(step.term.scale) if step.term is not None else None
    return Prepared(step, products, magnitude, rows, where, term, wide)


def _product(factor: Factor, a: Array, b: Array, wide: Any) -> Product:
    a = a.reshape(a.shape[0], -1)
    b = b.reshape(b.shape[0], -1)
    if factor.experts > 1:
        a = a.reshape(factor.experts, -1, a.shape[-1])[factor.expert]  # the expert counts slowest
        b = b.reshape(b.shape[0], -1, factor.experts)[:, :, factor.expert]  # and here fastest
    left, right = (a.T, b.T) if factor.swap else (b, a)
    left = left[factor.skip : factor.skip + factor.rows]
    columns = right.shape[1]
    padded = np.zeros((right.shape[0], -(-columns // _PAD) * _PAD), wide)
    padded[:, :columns] = right
    return Product(np.ascontiguousarray(left), padded, wide(factor.scale), factor.at, columns)


class Room:
    """Arrays that one block after the other uses again, so that no block pays for fresh memory."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], Array] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: Any) -> Array:
        """Return an array of a shape, its content left over from before; one for each name and dtype."""
        count = shape[0] * shape[1]
        key = (name, np.dtype(dtype).str)
        held = self._held.get(key)
        if held is None or len(held) < count:
            held = self._held[key] = np.empty(count, dtype)
        return held[:count].reshape(shape)


def delta(it: Prepared, start: int, stop: int, room: Room) -> Array | None:
    """Return the sum of the products on some rows, None where none lands there."""
    total: Array | None = None
    for product in it.products:
        first, last = max(start, product.at), min(stop, product.at + len(product.left))
        if first >= last:
            continue
        left = product.left[first - product.at : last - product.at]
        if len(left) == 1:  # a lone row takes another way through the BLAS, which sums in another order
            left = np.concatenate([left, np.zeros_like(left)])
        space = room.take("product", (len(left), product.right.shape[1]), it.wide)
        part = np.matmul(left, product.right, out=space)[: last - first, : product.columns]
        part *= product.scale
        if (first, last) == (start, stop):
            alone = len(it.products) == 1
            total = (part if alone else part.copy()) if total is None else total + part
            continue
        if total is None:
            total = np.zeros((stop - start, product.columns), it.wide)
        total[first - start : last - start] += part
    return total


def apply(it: Prepared, block: Array, start: int, stop: int, *, room: Room, norms: Array | None = None) -> Array:
    """Return the new values of some rows, not rounded yet; `block` holds the origin's in the arithmetic's dtype.

    `norms` are those of the columns, for a tensor whose magnitudes count columns. The block may be changed.
    """
    added = delta(it, start, stop, room)
    if added is not None:
        block = np.add(block, added, out=block)
    if it.magnitude is not None:
        block = _scaled(it, block, start, stop, norms)
    if it.where:
        assert it.rows is not None
        for row, number in it.where.items():
            if start <= row < stop:
                block[row - start] = it.rows[number]
    if it.term is not None:
        block = block + it.term
    return block


def _scaled(it: Prepared, block: Array, start: int, stop: int, norms: Array | None) -> Array:
    assert it.magnitude is not None
    assert it.step.magnitude is not None
    if it.step.magnitude.columns:
        assert norms is not None
        return block * (it.magnitude / norms)[None, :]
    return block * (it.magnitude[start:stop] / row_norms(block))[:, None]


def row_norms(block: Array) -> Array:
    """Return the Euclidean norm of every row, summed as torch does it."""
    squares = block * block
    whole = squares.shape[1] // _LANES * _LANES
    lanes = np.add.reduce(squares[:, :whole].reshape(len(squares), -1, _LANES), axis=1)
    total = lanes[:, 0].copy() if whole else np.zeros(len(squares), block.dtype)
    for lane in range(1, _LANES if whole else 0):
        total += lanes[:, lane]
    for column in range(whole, squares.shape[1]):
        total += squares[:, column]
    return np.asarray(np.sqrt(total))


class ColumnNorms:
    """The Euclidean norms of the columns of a tensor, fed with its rows in order."""

    def __init__(self, columns: int, wide: Any) -> None:
        self._sums = np.zeros(columns, wide)

    def feed(self, block: Array) -> None:
        """Take in the next rows."""
        squares = block * block
        for row in squares:
            self._sums += row

    def result(self) -> Array:
        """Return the norms."""
        return np.asarray(np.sqrt(self._sums))


def rounded(values: Array, dtype: str, room: Room | None = None) -> Array:
    """Return values rounded once to a dtype. Raises ArithmeticError where one is not finite in it."""
    if values.size:
        top = max(float(values.max()), -float(values.min()))
        if not top < _LIMITS[dtype]:
            raise ArithmeticError(f"a value is not finite in {dtype}: the largest is {top}")
    wanted = _DTYPES[dtype]
    if values.dtype == wanted:
        return values
    if values.dtype == np.float64 and dtype == "BF16":
        values = _to_odd(values)
    if room is None or values.ndim != 2:
        return values.astype(wanted)
    out = room.take("rounded", values.shape, wanted)
    np.copyto(out, values, casting="unsafe")
    return out


def _to_odd(values: Array) -> Array:
    """Return doubles in single precision, rounded so that rounding them once more gives what one rounding would.

    They are cut, and the last bit is set where something was cut off: then no tie is seen that there was not.
    """
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= (np.abs(near.astype(np.float64)) > np.abs(values)).astype(np.uint32)
    bits |= (near.astype(np.float64) != values).astype(np.uint32)
    return near
