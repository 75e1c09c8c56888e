"""The tag `best`: moved to a version when its metric is the best of the name's newest run, never against people."""

import logging
import math

from weighbridge.config.settings import WatchRule
from weighbridge.daemon.homes import Home
from weighbridge.daemon.jobstore import Job
from weighbridge.registry import errors
from weighbridge.registry.flow import decision, tags

BEST = "best"
MARK = "weighbridge"
"""How moves by a daemon begin in the field `who`."""

_log = logging.getLogger(__name__)


def tag_best(home: Home, job: Job, rule: WatchRule, *, name: str, n: int, host: str) -> bool:
    """Move `best` to a version when its rule's metric is better than that of the version it stands on.

    Returns whether it was moved. Where people moved the tag themselves it is left alone.
    """
    metric, _, sense = (rule.best or "").rpartition(":")
    if not metric or job.metric is None or not math.isfinite(job.metric):
        return False
    now = tags.current(home.remote, name, BEST)
    if now is not None:
        if now.to == n or not now.who.startswith(MARK):
            return False
        standing = _metric_of(home, name, now.to, metric, job.run_id)
        if standing is not None and (standing <= job.metric if sense == "min" else standing >= job.metric):
            return False
    why = f"{metric} {job.metric:g}"
    try:
        tags.move(home.remote, home.registry, name, BEST, n, f"{MARK} on {host}", why)
    except errors.ConflictError:
        _log.info("the tag was moved by somebody else meanwhile", extra={"ref": f"{name}:{BEST}"})
        return False
    return True


def _metric_of(home: Home, name: str, n: int | None, metric: str, run_id: str | None) -> float | None:
    """Return the metric of the version a tag stands on, None when it is of another run or tells none."""
    if n is None:
        return None
    try:
        facts = decision.committed(home.remote, name, n).facts
    except errors.NotFoundError:
        return None
    value = facts.provenance.metrics.get(metric)
    if facts.provenance.run.id != run_id or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)
