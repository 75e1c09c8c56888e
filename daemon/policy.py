"""What a rule publishes, and under which name: pure functions over facts.

Nobody is flooded: by default all adapters up to 1 GB, and of full models the best and the last checkpoint.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from weighbridge.adapters import layout
from weighbridge.config.settings import GB, WatchRule
from weighbridge.registry.refs import NAME_MAX, SUFFIX_ROOM, name_fault, suggest_name
from weighbridge.registry.types import KIND_SUFFIX

SMALL_ADAPTER: Final = 1 * GB
"""Bytes up to which every adapter is published when a rule does not say what is."""


class Item(NamedTuple):
    """One artifact of a run as far as the policy cares; `step` None is a result, which comes after every checkpoint."""

    path: str
    kind: str
    step: int | None
    size: int
    metric: float | None = None
    best_hint: bool = False
    """The trainer itself says that this is its best checkpoint so far."""


class Publish(NamedTuple):
    """Publish it, because."""

    because: str


class Skip(NamedTuple):
    """Set it aside; `reason` is a word, `why` a sentence."""

    reason: str
    why: str


class Later(NamedTuple):
    """Ask again at the wall-clock time `until`."""

    until: float
    why: str


def decide(
    item: Item, others: Sequence[Item], rule: WatchRule, *, now: float, published_at: float | None
) -> Publish | Skip | Later:
    """Return what a rule makes of an artifact, given the other artifacts of its kind in the run.

    `published_at` is when this name was published last, in wall-clock seconds.
    """
    if rule.publish == ("manual",):
        return Skip("manual", "the rule publishes nothing by itself: registry push publishes it")
    if rule.max_bytes is not None and item.size > rule.max_bytes:
        return Skip("max-bytes", f"it has {item.size} bytes, the rule allows {rule.max_bytes}")
    if rule.publish == ("all",):
        return Publish("the rule publishes all")
    if rule.publish is None and item.kind == "adapter" and item.size <= SMALL_ADAPTER:
        return Publish("an adapter up to 1 GB")
    wanted = rule.publish or ("best", "last")
    if "best" in wanted and is_best(item, others, rule.best):
        return Publish("the best of its run so far")
    if "last" in wanted and is_last(item, others):
        if item.step is not None and published_at is not None and now < published_at + rule.min_interval:
            return Later(published_at + rule.min_interval, f"one of a run at most every {rule.min_interval:.0f} s")
        return Publish("the last of its run so far")
    words = " nor ".join({"best": "the best", "last": "the last"}[w] for w in wanted)
    return Skip(
        "not-chosen", f"it is neither {words} of its run" if len(wanted) > 1 else f"it is not {words} of its run"
    )


def averages(
    name: str, beside: Collection[str], rule: WatchRule, *, averaged: bool, lost: Collection[str] = ()
) -> str | None:
    """Return why a rule sets an artifact aside for being, or having, a running average of weights; None if it does not.

    `name` is its file or folder, `beside` what lies in the same folder, `averaged` whether its content says that it is
    one. Of two sets in one file the judgement itself has chosen; this is about files and folders of their own. Names in
    `lost` are published by nobody as things stand, and nothing is set aside in their favour.
    """
    averaged = averaged or layout.raw_of(name) in beside
    if rule.ema == "drop" and averaged:
        return 'it holds averaged weights, which the rule drops (ema = "drop")'
    twins = sorted(other for other in beside if layout.raw_of(other) == name and other not in lost)
    if rule.ema == "prefer" and twins and not averaged:
        return f'{twins[0]} holds its averaged weights, which the rule prefers (ema = "prefer")'
    return None


def looks_at_siblings(item: Item, rule: WatchRule) -> bool:
    """Tell whether the verdict depends on the other artifacts of the run."""
    if rule.publish is None:
        return item.kind != "adapter" or item.size > SMALL_ADAPTER
    return bool({"best", "last"} & set(rule.publish))


def merges(item: Item, others: Sequence[Item], rule: WatchRule) -> bool:
    """Tell whether a rule wants a published artifact merged into its base."""
    if item.kind != "adapter" or rule.merge == "never":
        return False
    if rule.merge == "best":
        return is_best(item, others, rule.best)
    return rule.merge == "all" or is_last(item, others)


def is_last(item: Item, others: Sequence[Item]) -> bool:
    """Tell whether nothing of its kind in the run has a greater step; what was not judged yet may be of its kind."""
    return all(_order(other) <= _order(item) for other in others if other.kind in {item.kind, ""})


def is_best(item: Item, others: Sequence[Item], best: str | None) -> bool:
    """Tell whether it has the best metric: the rule's, else what the trainer itself calls its best."""
    if best is None:
        return item.best_hint
    if item.metric is None or not math.isfinite(item.metric):
        return False
    sign = -1 if best.endswith(":min") else 1
    return all(
        sign * other.metric <= sign * item.metric
        for other in others
        if other.kind == item.kind and other.metric is not None and math.isfinite(other.metric)
    )


def _order(item: Item) -> float:
    return math.inf if item.step is None else item.step


def fill(template: str, *, project: str, run: str) -> str:
    """Return the name that a rule's template gives a run; always a valid name with room for suffixes.

    Where the run lies directly under the watched root, project and run are one folder and it is named once.
    """
    given = "" if project == run and "{run}" in template else project
    return suggest_name(template.replace("{project}", given).replace("{run}", run))


def named(wanted: str, kind: str, kind_of: Callable[[str], str | None]) -> str:
    """Return the name under which a kind goes: a name has one kind for ever, a second kind gets a suffix."""
    if kind_of(wanted) in {None, kind}:
        return wanted
    suffix = KIND_SUFFIX.get(kind, f"-{kind}")
    return wanted[: NAME_MAX - len(suffix)].rstrip(".-") + suffix


def fault(name: str) -> str | None:
    """Return what is wrong with a name that somebody chose, suffixes considered."""
    return name_fault(name, room=SUFFIX_ROOM)
