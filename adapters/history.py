"""What `trainer_state.json` tells: step, epoch, the history of losses and metrics, the best one so far.

Every number a trainer may write is safe here: NaN and infinities become words, an "endless" count of epochs is left
out, integers that no 64-bit reader holds become text.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats.source import contents
from weighbridge.registry.errors import half_character
from weighbridge.registry.types import BestFacts

STATE: Final = "trainer_state.json"
STATE_MAX: Final = 256 << 20
POINTS: Final = 256
"""Points of the history that a manifest keeps."""

_INT_MAX: Final = (1 << 63) - 1
_ENDLESS: Final = 1 << 62
"""Trainers write the largest integer for "until the data ends"."""

_SPEED = re.compile(r"(?:runtime|samples_per_second|steps_per_second|tokens_per_second|_time|flos)$|^(?:epoch|step)$")
_SETTINGS: Final = (
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "num_input_tokens_seen",
    "total_flos",
)
_TEXT_MAX: Final = 200
_KEYS_MAX: Final = 64


class State(NamedTuple):
    """The facts of one trainer_state.json."""

    step: int | None = None
    epoch: float | str | None = None
    metrics: Mapping[str, Any] = MappingProxyType({})
    best: BestFacts | None = None
    history: Sequence[dict[str, Any]] = ()
    settings: Mapping[str, Any] = MappingProxyType({})


def read(folder: Path) -> State | None:
    """Return the trainer's state in a folder, or None when there is none or it cannot be read. Raises nothing."""
    path = folder / STATE
    try:
        if path.stat().st_size > STATE_MAX:
            return None
        document = json.loads(contents(path, STATE_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return parse(document) if isinstance(document, dict) and half_character(document) is None else None


def parse(document: dict[str, Any]) -> State:
    """Return the facts of a parsed trainer state, whatever its values are."""
    log = document.get("log_history")
    entries = [clean for e in log if isinstance(e, dict) and (clean := _entry(e))] if isinstance(log, list) else []
    step = document.get("global_step")
    return State(
        step=step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= _INT_MAX else None,
        epoch=_real(document.get("epoch")),
        metrics=metrics(entries),
        best=_recorded_best(document, entries),
        history=thinned(entries),
        settings={k: v for k in _SETTINGS if (v := _setting(document.get(k))) is not None},
    )


def thinned(entries: Sequence[dict[str, Any]], limit: int = POINTS) -> list[dict[str, Any]]:
    """Return at most `limit` entries in their order: every evaluation first, then losses evenly spread, ends kept."""
    evaluations = [i for i, e in enumerate(entries) if is_evaluation(e)]
    others = [i for i in range(len(entries)) if not is_evaluation(entries[i])]
    kept = _spread(evaluations, limit)
    kept += _spread(others, limit - len(kept))
    return [entries[i] for i in sorted(kept)]


def is_evaluation(entry: dict[str, Any]) -> bool:
    """Tell whether an entry of the history is the result of an evaluation."""
    return any(k.startswith(("eval_", "test_", "predict_")) for k in entry)


def metrics(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the last loss and the last value of every metric; speeds are no metrics."""
    found: dict[str, Any] = {}
    for entry in entries:
        for key, value in entry.items():
            wanted = key in {"loss", "train_loss"} or key.startswith(("eval_", "test_", "predict_"))
            if wanted and not _SPEED.search(key) and _is_number(value):
                found[key] = value
    return dict(sorted(found.items()))


def number(value: Any) -> Any:
    """Return a value that every JSON reader holds: NaN and infinities as words, too large integers as text."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and abs(value) > _INT_MAX:
        return str(value)[:_TEXT_MAX] if value.bit_length() < 10_000 else "a huge integer"
    return value


def _recorded_best(document: dict[str, Any], entries: list[dict[str, Any]]) -> BestFacts | None:
    """Name the metric by the evaluation that holds the recorded value; the trainer does not write its name."""
    value = document.get("best_metric")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    step = document.get("best_global_step")
    if not isinstance(step, int) or isinstance(step, bool):
        found = re.search(r"(\d+)[\\/]*$", str(document.get("best_model_checkpoint") or ""))
        step = int(found[1]) if found and len(found[1]) < 19 else None
    matching = [
        (e.get("step"), k)
        for e in entries
        for k, v in e.items()
        if k.startswith("eval_") and not _SPEED.search(k) and isinstance(v, (int, float)) and v == value
    ]
    at_step = [(s, k) for s, k in matching if step is None or s == step] or matching
    names = list(dict.fromkeys(k for _, k in at_step))
    if step is None and at_step and isinstance(at_step[0][0], int):
        step = at_step[0][0]
    return BestFacts(metric=names[0] if len(names) == 1 else "unknown", value=_real(value), step=step)


def _entry(entry: dict[Any, Any]) -> dict[str, Any]:
    clean: dict[str, Any] = {}
    for key, value in list(entry.items())[:_KEYS_MAX]:
        if isinstance(key, str) and len(key) <= _TEXT_MAX and isinstance(value, (int, float, bool)):
            clean[key] = number(value)
    return clean


def _setting(value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if isinstance(value, int) and abs(value) >= _ENDLESS:
        return None
    return number(value)


def _real(value: Any) -> float | str | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        plain = number(float(value))
    except OverflowError:
        return "Infinity"
    return plain if isinstance(plain, str) else float(value)


def _is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in {
        "NaN",
        "Infinity",
        "-Infinity",
    }


def _spread(indices: list[int], limit: int) -> list[int]:
    """Pick evenly from a list, the first and the last always."""
    if limit <= 0 or not indices:
        return []
    if len(indices) <= limit:
        return list(indices)
    if limit == 1:
        return [indices[-1]]
    last = len(indices) - 1
    return [indices[round(i * last / (limit - 1))] for i in range(limit)]
