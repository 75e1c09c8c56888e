"""What happens by the clock: scans, retries, second looks, sweeping, the feed, the exported status.

The jobs' own state lies in our tables, so the scheduler keeps nothing: its store is memory, and a job that was missed
is made up for by the next one.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler

_log = logging.getLogger(__name__)


class Clockwork:
    """Calls functions every so many seconds, each in a thread of its own and never twice at a time."""

    def __init__(self, jobs: Mapping[str, tuple[float, Callable[[], object]]]) -> None:
        self._scheduler = BackgroundScheduler(
            jobstores={"default": MemoryJobStore()},
            executors={"default": ThreadPoolExecutor(4)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=UTC,
        )
        for name, (seconds, call) in jobs.items():
            self._scheduler.add_job(
                _guarded(name, call),
                "interval",
                seconds=seconds,
                id=name,
                next_run_time=datetime.now(UTC) + timedelta(seconds=min(seconds, 5.0)),
                jitter=seconds / 20 if seconds >= 60 else None,
            )

    def start(self) -> None:
        """Begin to call."""
        self._scheduler.start()

    def stop(self) -> None:
        """Call nothing any more; what runs is not waited for."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


def _guarded(name: str, call: Callable[[], object]) -> Callable[[], None]:
    def guarded() -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - the next turn comes whatever happened in this one
            _log.exception("a scheduled task failed", extra={"task": name})

    return guarded
