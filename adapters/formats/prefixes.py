"""Take the wrappers' segments off the names of a state dict, and stop before the model's own.

    module.model.layers.0.weight               DDP and DeepSpeed, at the start of every name
    model._orig_mod.model.layers.0.weight      the attribute of a LightningModule, then torch.compile
    layers.0._fsdp_wrapped_module.weight       FSDP, anywhere

A word like `module` or `model` can be a true part of a name. It is only taken where it is on every name, and where the
base, the trainer's own layout or a wrapper right behind it says so.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

WRAPPERS: Final = (
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
    "_ddp_params_and_buffers.",
)
"""Segments that only wrappers put into a name; they are taken out wherever they are."""

OUTER: Final = "module."
"""What data-parallel wrappers put at the start; deeper in a name it can be the model's own."""

ATTRIBUTES: Final = frozenset(
    ("model", "net", "network", "module", "_model", "_net", "nn", "pl_module", "task_model", "lightning_module")
)
"""Names that people give the model inside a LightningModule."""

_HEAD = re.compile(r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_forward_module|_checkpoint_wrapped_module)\.)+")
_HIDDEN = re.compile(r"(?:(?:_orig_mod|_fsdp_wrapped_module|_forward_module|_checkpoint_wrapped_module)\.)+")
_SIDE = re.compile(
    r"(?:.*_)?(?:criterion|criteria|loss(?:es)?(?:_fn|_fct|_func)?|metrics?|accuracy|acc|auroc|f1|precision|recall|"
    r"iou|psnr|ssim|fid|lpips|mae|mse|rmse|confmat|perplexity)(?:_.*)?",
    re.IGNORECASE,
)
_COUNTER: Final = "n_averaged"
"""What torch's AveragedModel counts in, beside the model that it holds as `module`."""

_AVERAGED = re.compile(r"(?:model_)?(?:ema|averaged?_model|swa_model|ema_model|model_ema|shadow)", re.IGNORECASE)
_DEPTH: Final = 8


class Stripped(NamedTuple):
    """Names after the wrappers were taken off. `prefix` was on every name, `inner` segments were inside some."""

    prefix: str
    names: dict[str, str]
    """Name in the file -> name after; entries that are no weights of the model are missing."""
    others: tuple[str, ...]
    """Losses, metrics and averaged copies that ride in the same table."""
    collisions: tuple[str, ...]
    """Names that two keys would both get."""
    inner: tuple[str, ...]


def strip(names: Sequence[str], *, lightning: bool = False, base: Collection[str] | None = None) -> Stripped:
    """Return the names without wrappers; `base` holds the names of the model that they should fit."""
    main, others = _main(names)
    prefix = _from_base(main, base) if base else _from_layout(main, lightning=lightning)
    cut = len(prefix)
    table: dict[str, str] = {}
    inner: set[str] = set()
    for name in main:
        short = name[cut:]
        for segment in WRAPPERS:
            if short.startswith(segment) or f".{segment}" in short:
                inner.add(segment)
                short = short.removeprefix(segment).replace(f".{segment}", ".")
        table[name] = short
    counts = Counter(table.values())
    collisions = tuple(sorted(name for name, count in counts.items() if count > 1)) if len(counts) < len(table) else ()
    return Stripped(prefix, table, tuple(others), collisions, tuple(sorted(inner)))


def _main(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the model's names from losses, metrics and averages; a table of nothing but such names stays whole."""
    if _COUNTER in names and len(names) > 1 and all(name == _COUNTER or name.startswith(OUTER) for name in names):
        return [name for name in names if name != _COUNTER], [_COUNTER]
    side = {segment for segment in {_segment(name) for name in names} if _SIDE.fullmatch(segment) or _average(segment)}
    main = [name for name in names if _segment(name) not in side or "." not in name]
    if not side or not main:
        return list(names), []
    kept = set(main)
    return main, [name for name in names if name not in kept]


def _average(segment: str) -> bool:
    return _AVERAGED.fullmatch(segment) is not None


def _segment(name: str) -> str:
    return name.partition(".")[0]


def _from_layout(names: Iterable[str], *, lightning: bool) -> str:
    names = list(names)
    prefix = _common(names, _HEAD, "")
    if prefix or not names:
        return prefix
    first = _segment(names[0])
    attribute = f"{first}."
    if not all(name.startswith(attribute) for name in names):
        return ""
    behind = _common(names, _HIDDEN, attribute)
    if behind or (lightning and first in ATTRIBUTES):
        return attribute + behind
    return ""


def _common(names: Sequence[str], chain: re.Pattern[str], after: str) -> str:
    """Return the longest chain of wrappers that is on every name behind `after`."""
    if not names:
        return ""
    match = chain.match(names[0], len(after))
    found = match.group() if match else ""
    while found and not all(name.startswith(found, len(after)) for name in names):
        found = found[: found.rfind(".", 0, -1) + 1]
    return found


def _from_base(names: Sequence[str], base: Collection[str]) -> str:
    """Return the shared prefix whose removal lets the most names fit the base; the shortest of equals."""
    known = base if isinstance(base, (set, frozenset, dict)) else set(base)
    best, prefix, best_prefix = -1, "", ""
    for _ in range(_DEPTH):
        fits = sum(1 for name in names if _plain(name[len(prefix) :]) in known)
        if fits > best:
            best, best_prefix = fits, prefix
        rest = names[0][len(prefix) :] if names else ""
        step = prefix + rest.partition(".")[0] + "."
        if "." not in rest or not all(name.startswith(step) for name in names):
            break
        prefix = step
    return best_prefix + _common(names, _HIDDEN, best_prefix)


def _plain(name: str) -> str:
    for segment in WRAPPERS:
        name = name.removeprefix(segment).replace(f".{segment}", ".")
    return name
