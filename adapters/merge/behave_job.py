"""What a merged model computes beside base and adapter together, inside the jailed child process, on fixed inputs.

Three models are run one after the other: the base in fp32 without and with the adapter, the same in the precision of
the result, and the merged model in fp32. The second one is the noise that whoever serves base and adapter in that
precision lives with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weighbridge.adapters import starved
from weighbridge.adapters.merge import peft_job
from weighbridge.registry import errors


def run(request: dict[str, Any], tell: Callable[[int], None]) -> dict[str, Any]:
    """Compare the models in `request["view"]`; `dtype` names the torch dtype of the result.

    Returns `distances`, or `why` the models cannot be run.
    """
    peft_job.begin(request["workers"])
    view = Path(request["view"])
    try:
        model, _ = peft_job.load_base(view / "base")
        tell(_size(model))
        inputs = peft_job.fixed_inputs(model)
        plain = peft_job.outputs_of(model, inputs)
        adapted = peft_job.put_on(model, [view / f"adapter{number}" for number in range(request["adapters"])])
        wanted = peft_job.outputs_of(adapted, inputs)
        if plain is None or wanted is None or not wanted.numel():
            return {"why": "it takes neither tokens nor images that are known here"}
        noisy = peft_job.outputs_of(adapted.to(getattr(torch, request["dtype"])), _cast(inputs, request["dtype"]))
        del model, adapted
        merged, missing = peft_job.load_base(view / "merged")
        tell(_size(merged))
    except errors.RefusedError as error:
        return {"why": f"{error.what}: {error.why}"}
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        # What the jail forbids, and what the memory lacks, is told by whoever runs us; the rest are moods of libraries.
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None or starved.told(words):
            raise
        return {"why": " ".join(words.split())[:500]}
    if missing:
        return {"why": f"transformers finds no value for {', '.join(sorted(missing)[:4])} in the result"}
    got = peft_job.outputs_of(merged, inputs)
    if got is None or got.shape != wanted.shape:
        return {"why": "the merged model cannot be run with the same inputs"}
    return {
        "distances": {
            "merged": _apart(got, wanted),
            "base": _apart(plain, wanted),
            "noise": _apart(noisy, wanted) if noisy is not None and noisy.isfinite().all() else None,
            "scale": float(wanted.abs().max()),
        }
    }


def _size(model: Any) -> int:
    """Return the bytes of a model's parameters."""
    return sum(one.numel() * one.element_size() for one in model.parameters())


def _cast(inputs: Any, dtype: str) -> Any:
    """Return inputs with their fractions in another dtype; ids stay."""
    kind = getattr(torch, dtype)
    return inputs and {name: one.to(kind) if one.is_floating_point() else one for name, one in inputs.items()}


def _apart(some: Any, wanted: Any) -> dict[str, float]:
    """Return how far outputs are from the wanted ones: the largest difference, and means over the positions.

    `cosine` is 1 - cos of the vectors, `kl` the divergence of what they predict, in nats.
    """
    left, right = (one.double().reshape(-1, one.shape[-1]) for one in (some, wanted))
    angle = 1 - torch.nn.functional.cosine_similarity(left, right, dim=-1)
    ours, theirs = left.log_softmax(-1), right.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    return {
        "largest": float((left - right).abs().max()),
        "cosine": max(0.0, float(angle.mean())),
        "kl": max(0.0, float(divergence.mean())),
    }
