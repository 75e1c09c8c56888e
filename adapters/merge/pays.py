"""Does a GPU pay for a merge? From the plan's ranks and sizes, before anything is started.

A processor does about 60 billion operations a second and core in single precision; bringing torch and a device up takes
some seconds. For ordinary ranks the disk and the hash decide, and a GPU changes nothing.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from weighbridge.adapters.merge.values import Plan

_CORE: Final = 60e9
"""Operations a second and core, as measured at ranks from 8 to 1024 (50 to 90)."""

_START: Final = 12.0
"""Seconds of arithmetic that a device has to save before its start is made up for, twice over."""

_DEV: Final = Path("/dev")


def operations(plan: Plan) -> int:
    """Return the multiplications and additions of all products of a merge."""
    return sum(
        2 * (factor.a.shape[0] // factor.experts) * factor.rows * step.matrix[1]
        for step in plan.steps
        for factor in step.factors
    )


def seconds(plan: Plan, cores: int) -> float:
    """Return how long the products take on some cores."""
    return operations(plan) / (_CORE * max(1, cores))


def chosen(plan: Plan, wanted: str, cores: int, dev: Path = _DEV) -> str | None:
    """Return which device the child should take: "cuda", "processor" (torch on it), or None for numpy.

    `wanted` is auto, cpu, cuda or processor; `dev` is where devices lie.
    """
    if wanted != "auto":
        return None if wanted == "cpu" else wanted
    here = any(dev.glob("nvidia[0-9]*")) and find_spec("torch") is not None
    return "cuda" if here and seconds(plan, cores) > _START else None
