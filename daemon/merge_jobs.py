"""The end of a job that was to publish a merged model, when somebody gives the merge up."""

from typing import Final

import msgspec

from weighbridge.daemon.jobstore import JobStore
from weighbridge.registry.flow import stage as staging

_PUBLISHED: Final = frozenset({"committed", "announced", "done"})


def give_up(jobs: JobStore, number: int, why: str) -> bool:
    """End a job and discard its staged copy; False for one whose version is published, or that moved on meanwhile.

    A number that it claimed is left to the collector, as after any job that ends early.
    """
    job = jobs.job(number)
    if job is None:
        return True
    if job.state in _PUBLISHED:
        return False
    ended = jobs.advance(
        job, "superseded", event="superseded", was=None, reason=why, until=None, error=None, findings="[]", bundle=None
    )
    if ended is not None and job.bundle is not None:
        staging.discard(msgspec.json.decode(job.bundle.encode(), type=staging.Bundle))
    return ended is not None
