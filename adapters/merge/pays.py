"""Who does the arithmetic of a merge, a GPU or the processor? From the plan's ranks and sizes, before a child starts.

A processor does about 60 billion operations a second and core in single precision; bringing torch and a device up takes
some seconds. For ordinary ranks the disk and the hash decide, and a GPU changes nothing.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters.merge.values import Plan, Step
from weighbridge.registry import errors

_CORE: Final = 60e9
"""Operations a second and core, as measured at ranks from 8 to 1024 (50 to 90)."""

_START: Final = 12.0
"""Seconds of arithmetic that a device has to save before its start is made up for, twice over."""

DEV: Final = Path("/dev")
"""Where devices lie."""

_SINGLE: Final = frozenset({"F32", "F16", "BF16"})


class Choice(NamedTuple):
    """Who should do the arithmetic, and in a few words why.

    `device` is "cuda" (a GPU, or nobody), "cuda-if-free" (else the processor), "processor" (torch on it) or None for
    numpy.
    """

    device: str | None
    why: str


def able(step: Step) -> bool:
    """Tell whether torch carries a step out: products and norms of rows, in single precision."""
    plain = step.rows is None and step.term is None and not step.computed
    by_rows = step.magnitude is None or not step.magnitude.columns
    return bool(step.factors) and plain and by_rows and {step.origin.dtype, step.dtype} <= _SINGLE


def operations(plan: Plan) -> int:
    """Return the multiplications and additions of all products that a GPU would do."""
    return sum(
        2 * (factor.a.shape[0] // factor.experts) * factor.rows * step.matrix[1]
        for step in plan.steps
        if able(step)
        for factor in step.factors
    )


def seconds(plan: Plan, cores: int) -> float:
    """Return how long these products take on some cores."""
    return operations(plan) / (_CORE * max(1, cores))


def chosen(plan: Plan, wanted: str, cores: int) -> Choice:
    """Return who should do the arithmetic of a plan.

    `wanted` is auto, cpu, cuda or processor. Raises UsageError where a GPU is asked for that is not here, or that would
    have nothing to do.
    """
    if wanted == "cpu":
        return Choice(None, "asked for")
    if wanted == "processor":
        return Choice("processor", "asked for")
    lacking = _lacking(plan)
    if wanted == "cuda":
        if lacking is not None:
            raise refusal(lacking)
        return Choice("cuda", "asked for")
    if lacking is not None:
        return Choice(None, lacking)
    took = seconds(plan, cores)
    if took <= _START:
        return Choice(None, f"the products take {took:.1f} s on {cores} cores, and a GPU pays from {_START:.0f} s on")
    return Choice("cuda-if-free", f"the products would take {took:.0f} s on {cores} cores")


def refusal(why: str) -> errors.UsageError:
    """Return the error of a merge that was to be made on a GPU and cannot be."""
    return errors.UsageError(
        "the merge cannot be made on a GPU",
        why=why,
        fix="leave --device out: the processor gives the same numbers, within the same bound",
    )


def _lacking(plan: Plan) -> str | None:
    """Return why no GPU can do anything for a plan, None where one can."""
    if not any(able(step) for step in plan.steps):
        by_peft = any(step.computed for step in plan.steps)
        return "PEFT's own merge is made on the processor" if by_peft else "the plan has no product that a GPU does"
    if not any(DEV.glob("nvidia[0-9]*")):
        return "there is no NVIDIA GPU here"
    if find_spec("torch") is None:
        return "torch is not installed here: pip install 'weighbridge[torch]'"
    return None
