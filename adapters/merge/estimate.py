"""How much of a planned change would survive the rounding, before anything is written.

With numpy on the blocks that a merge would look at, at most so many bytes of them; without it in plain Python for tiny
merges, else not at all.
"""

import importlib.util
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.merge.values import Factor, Origin, Plan, Step

LIMIT: Final = 16 << 20
"""Bytes of blocks that are looked at."""

_PLACES: Final = 2
"""Blocks of each tensor of a large merge."""

_WIDEST: Final = 4
_PLAIN_LIMIT: Final = 200_000
"""Elements up to which plain Python is fast enough."""

Sums = tuple[int, int, float, float, float]
"""Elements, unchanged ones, and the sums of applied·intended, applied², intended²."""


def unchanged(plan: Plan) -> dict[str, Any]:
    """Return unchanged_share and update_cosine of the tensors that products land on; nothing where none was counted."""
    steps = [step for step in plan.steps if step.factors]
    elements = sum(step.origin.count for step in steps)
    if not steps:
        return {}
    if all(importlib.util.find_spec(name) is not None for name in ("numpy", "ml_dtypes")):
        counted = _counted(plan, steps)
    elif elements <= _PLAIN_LIMIT and all(_is_plain(step) for step in steps):
        counted = _sum([_plain(step, plan) for step in steps])
    else:
        return {}
    seen, same, both, applied, intended = counted
    if not seen:
        return {}
    cosine = 1.0 if intended == 0.0 else both / math.sqrt(applied * intended) if applied else 0.0
    return {"unchanged_share": same / seen, "update_cosine": cosine, "elements_looked_at": seen}


def _sum(parts: Sequence[Sums]) -> Sums:
    return (
        sum(p[0] for p in parts), sum(p[1] for p in parts), math.fsum(p[2] for p in parts),
        math.fsum(p[3] for p in parts), math.fsum(p[4] for p in parts),
    )  # fmt: skip


def _counted(plan: Plan, steps: Sequence[Step]) -> Sums:
    """Count with numpy, every block of a small merge, the first blocks of each tensor of a large one."""
    import numpy as np  # noqa: PLC0415 - only where the merge extra is installed

    from weighbridge.adapters.merge import block, stream  # noqa: PLC0415 - as above
    from weighbridge.adapters.merge.tally import Tally  # noqa: PLC0415 - as above

    whole = Tally()
    small = sum(step.origin.count for step in steps) * _WIDEST <= LIMIT
    elements = max(1 << 12, LIMIT // _WIDEST // len(steps) // _PLACES)
    room = block.Room()
    with stream.Files(plan) as files:
        for step in steps:
            it = block.prepare(step, files.load)
            rows, columns = step.matrix
            places = list(block.spans(rows, max(1, elements // max(1, columns))))
            norms = None
            if step.magnitude is not None and step.magnitude.columns:
                norms = stream.column_norms(it, files, room)
            for start, stop in places if small else places[:: max(1, len(places) // _PLACES)][:_PLACES]:
                before = files.rows(step.origin, columns, start, stop, room).astype(it.wide)
                new = block.apply(it, before.copy(), start, stop, room=room, norms=norms)
                after = block.rounded(new, step.dtype).astype(it.wide)
                whole.add(before, new, np.asarray(after))
    return whole.elements, whole.unchanged, whole.both, whole.applied, whole.intended


# ------------------------------------------------------------------------------------------------------- plain Python


def _is_plain(step: Step) -> bool:
    return step.magnitude is None and not step.rows and all(factor.experts == 1 for factor in step.factors)


def _plain(step: Step, plan: Plan) -> Sums:
    before = _read(step.origin, plan)
    rows, columns = step.matrix
    wanted = list(before)
    for factor in step.factors:
        _add(wanted, factor, plan, columns)
    after = _rounded(wanted, step.dtype)
    applied = [a - b for a, b in zip(after, before, strict=True)]
    intended = [w - b for w, b in zip(wanted, before, strict=True)]
    return (
        rows * columns,
        sum(1 for value in applied if value == 0.0),
        math.sumprod(applied, intended) if hasattr(math, "sumprod") else _dot(applied, intended),
        _dot(applied, applied),
        _dot(intended, intended),
    )


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def _add(wanted: list[float], factor: Factor, plan: Plan, columns: int) -> None:
    a, b = _read(factor.a, plan), _read(factor.b, plan)
    rank, wide = factor.a.shape[0], factor.a.count // factor.a.shape[0]
    for row in range(factor.rows):
        for column in range(columns):
            if factor.swap:
                terms = (b[column * rank + k] * a[k * wide + row + factor.skip] for k in range(rank))
            else:
                terms = (b[(row + factor.skip) * rank + k] * a[k * wide + column] for k in range(rank))
            wanted[(row + factor.at) * columns + column] += factor.scale * sum(terms)


def _read(origin: Origin, plan: Plan) -> list[float]:
    width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[origin.dtype]
    with Path(plan.sources[origin.file].path).open("rb") as stream:
        stream.seek(origin.at)
        raw = stream.read(origin.count * width)
    if origin.dtype == "BF16":
        wide = bytearray(len(raw) * 2)
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        raw = bytes(wide)
    code = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}[origin.dtype]
    return list(struct.unpack(f"<{origin.count}{code}", raw))


def _rounded(values: Sequence[float], dtype: str) -> list[float]:
    if dtype == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        kept = [((word + 0x7FFF + ((word >> 16) & 1)) >> 16) << 16 for word in words]
        return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}I", *kept)))
    code = {"F64": "d", "F32": "f", "F16": "e"}[dtype]
    return list(struct.unpack(f"<{len(values)}{code}", struct.pack(f"<{len(values)}{code}", *values)))
