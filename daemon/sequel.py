"""What follows from a published adapter, and how a merged model enters the jobs (the `Sequel` of jobs.py)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from weighbridge.adapters.merge import start
from weighbridge.daemon.intake import Intake, Taken, Unfit, offered
from weighbridge.daemon.jobstore import Job
from weighbridge.daemon.mergestore import MergeStore
from weighbridge.daemon.merging import PART, Merging
from weighbridge.registry import errors
from weighbridge.registry.flow import merged
from weighbridge.registry.flow import stage as staging

_UNCHOSEN: Final = {
    "best": "merge = best, and this is not the best of its run so far ({by})",
    "last": "merge = last, and its run has a later checkpoint",
}


class Merges:
    """Chooses what is merged by the rules, and stages what was."""

    def __init__(self, store: MergeStore, intake: Intake, merging: Merging, *, host: str) -> None:
        self._store = store
        self._intake = intake
        self._merging = merging
        self._host = host

    def follows(self, job: Job) -> None:
        """Note a merge where the rule of a published adapter asks for one."""
        rule = self._intake.rule(job)
        if rule is not None and job.part != PART:
            if self._intake.merges(job, rule):
                self._store.want(job, rule.merge, rule.merge_dtype, rule.merge_retry)
            elif job.kind == "adapter" and rule.merge != "never":
                by = f"by {rule.best}" if rule.best else "the trainer names none, or another one"
                why = _UNCHOSEN[rule.merge].format(by=by)
                self._store.event("not merged", name=job.name, n=job.n, path=job.path, detail=why)
        self._merging.wake()

    def derivation(self, job: Job) -> str | None:
        """Return the key of a merge; None for what came from a watched folder."""
        merge = self._store.of_job(job.id) if job.part == PART else None
        return merge.derivation if merge is not None else None

    def take(self, job: Job, moved: Callable[[int], None]) -> Taken | Unfit | None:
        """Stage a merged folder; None for a job of the watch. Raises what `Merging.sides` and staging raise."""
        if job.part != PART:
            return None
        merge, rule = self._store.of_job(job.id), self._intake.rule(job)
        if merge is None:
            raise errors.VanishedError(f"{job.path} belongs to no merge")
        if rule is None:
            raise errors.NotFinishedError(
                f"{job.root} is not watched any more",
                why="its rule says where the merged model goes",
                fix="watch it again, or: registryd merges --cancel",
            )
        sides = self._merging.sides(merge)
        done = start.standing(sides.seen, Path(job.path))
        if done is None or done.plan != merge.plan:
            raise errors.SourceChangedError(
                f"{job.path} is not the merge that was made", why="adapter, base or program changed since"
            )
        try:
            admission = merged.admit_merged(
                done, sides.seen, [sides.adapter], sides.base,
                name=job.name or "", policy=self._intake.policy(rule, job.path), host=self._host,
                caches=self._intake.caches, ask=self._intake.hub(rule), published=self._intake.published(rule),
            )  # fmt: skip
        except errors.RefusedError as refused:
            refused.data["findings"] = offered(job, refused.data.get("findings") or [])
            raise
        bundle = self._intake.stage(job, rule, admission, moved)
        replaced = {*admission.transform, *admission.made}
        wrong = [
            file.path for file in bundle.files
            if file.path not in replaced and done.files.get(file.path, {}).get("sha256") != file.sha256
        ]  # fmt: skip
        if wrong:
            staging.discard(bundle)
            shutil.rmtree(job.path, ignore_errors=True)
            raise errors.SourceChangedError(
                f"{wrong[0]} of the merged model is not what was proven", why="its sha256 is another one by now"
            )
        return Taken(job, bundle, staging.seen(bundle, admission.facts), None)
