"""Convert floating tensors block by block; needs numpy, which comes with `weighbridge[merge]`.

Every conversion rounds to nearest, ties to even, as torch does. A finite value that the target cannot hold becomes
infinite and is counted, so that nobody finds out later.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Counter:
    """How many finite values became infinite."""

    def __init__(self) -> None:
        self.overflowed = 0


def blocks(parts: Iterator[bytes], source: str, target: str, counter: Counter) -> Iterator[bytes]:
    """Yield the same values in another floating dtype; every part holds whole elements."""
    for part in parts:
        wide = _wide(part, source)
        finite = np.isfinite(wide)
        with np.errstate(over="ignore"):
            narrow, values = _narrow(wide, target)
        counter.overflowed += int(np.count_nonzero(finite & ~np.isfinite(values)))
        yield narrow


def _wide(part: bytes, dtype: str) -> npt.NDArray[np.floating]:
    if dtype == "BF16":
        return (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(part, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


def _narrow(wide: npt.NDArray[np.floating], dtype: str) -> tuple[bytes, npt.NDArray[np.floating]]:
    if dtype != "BF16":
        out = wide.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
        return out.tobytes(), out
    bits = wide.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype("<u2")
    return rounded.tobytes(), (rounded.astype(np.uint32) << 16).view(np.float32)
