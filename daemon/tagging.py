"""The tag `best`: moved to a version when its metric is the best of the name's newest run, never against people."""

import logging
import math

from weighbridge.config.settings import WatchRule
from weighbridge.daemon.homes import Home
from weighbridge.daemon.jobstore import Job
from weighbridge.registry import errors
from weighbridge.registry.flow import decision, tags
from weighbridge.registry.types import Provenance

BEST = "best"
MARK = "weighbridge"
"""How moves by a daemon begin in the field `who`."""

_log = logging.getLogger(__name__)


def tag_best(home: Home, job: Job, rule: WatchRule, *, name: str, n: int, host: str) -> bool:
    """Move `best` to a version that beats the one it stands on: by the rule's metric, else by the trainer's own word.

    The trainer's word is about its run so far, so of two versions that it called best the later step counts. Returns
    whether the tag was moved. Where people moved it themselves it is left alone.
    """
    metric, _, sense = (rule.best or "").rpartition(":")
    if metric and (job.metric is None or not math.isfinite(job.metric)):
        return False
    if not metric and not job.best_hint:
        return False
    now = tags.current(home.remote, name, BEST)
    if now is not None:
        if now.to == n or not now.who.startswith(MARK):
            return False
        of = _provenance(home, name, now.to, job.run_id)
        if of is not None and not _beats(job, of, metric, sense):
            return False
    why = f"{metric} {job.metric:g}" if metric else "the trainer's own choice"
    who = f"{MARK} on {host}" if home.settings.paths == "keep" else MARK
    try:
        tags.move(home.remote, home.registry, name, BEST, n, who, why)
    except errors.ConflictError:
        _log.info("the tag was moved by somebody else meanwhile", extra={"ref": f"{name}:{BEST}"})
        return False
    return True


def _provenance(home: Home, name: str, n: int | None, run_id: str | None) -> Provenance | None:
    """Return where the version a tag stands on came from, None when it is of another run or gone."""
    if n is None:
        return None
    try:
        provenance = decision.committed(home.remote, name, n).facts.provenance
    except errors.NotFoundError:
        return None
    return provenance if provenance.run.id == run_id else None


def _beats(job: Job, standing: Provenance, metric: str, sense: str) -> bool:
    if not metric:
        return standing.step is None or (job.step or 0) > standing.step
    value = standing.metrics.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or job.metric is None:
        return True
    return job.metric < value if sense == "min" else job.metric > value
