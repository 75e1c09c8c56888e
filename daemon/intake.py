"""From a folder at rest to a staged bundle: what is in it, may it go, and under which name.

The folder must be at the instant of judging, and still after copying, what the watch saw at rest; else nothing is
staged and it is watched again.
"""

import glob
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weighbridge.adapters import average, history, layout, run_identity, sidecar
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.plan import Policy
from weighbridge.config.settings import DaemonSettings, RemoteSettings, WatchRule
from weighbridge.daemon import copying, policy
from weighbridge.daemon.drift import recheck
from weighbridge.daemon.homes import Home, Homes
from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge.daemon.settle import Listing
from weighbridge.daemon.tagging import tag_best
from weighbridge.registry import errors, findings, types
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.admit import admit
from weighbridge.registry.flow.rules import rules
from weighbridge.registry.remotes import commits
from weighbridge.registry.remotes.protocol import Progress
from weighbridge.registry.times import spelled

LATER: Final = 60.0
"""Seconds until a folder that inspect calls unfinished is asked again."""

Look = Callable[[str, str], Listing | None]
"""Gives the files of a folder under a root as the watch sees them."""

Below = Callable[[str, str], Iterable[str]]
"""Gives the folders below one that are artifacts of their own."""


class Judged(NamedTuple):
    """An artifact that could be published, with the run it belongs to and what the run's sidecar says."""

    job: Job
    artifact: Artifact
    run: run_identity.Run
    note: sidecar.Sidecar


class Taken(NamedTuple):
    """A staged artifact."""

    job: Job
    bundle: staging.Bundle
    facts: types.Facts
    people: str | None


class Unfit(NamedTuple):
    """Nothing was staged: the job was set aside, blocked or told to wait, and this is it afterwards."""

    job: Job | None


class Intake:
    """Judges and stages; the only part of the daemon that reads what lies in watched folders."""

    def __init__(
        self,
        store: JobStore,
        homes: Homes,
        rules: Mapping[str, WatchRule],
        remotes: Mapping[str, RemoteSettings],
        settings: DaemonSettings,
        *,
        host: str,
        mountinfo: str,
        look: Look,
        below: Below,
        caches: Sequence[Path] = (),
        values: int = 0,
    ) -> None:
        """`look` and `below` are the watch's eyes; `caches` are Hub caches that may hold bases.

        `values` is as in `inspect`: what is staged next is looked at there.
        """
        self._store = store
        self._homes = homes
        self._rules = rules
        self._remotes = remotes
        self._settings = settings
        self._host = host
        self._mountinfo = mountinfo
        self._look = look
        self._below = below
        self.caches = caches
        self._values = values
        self._stamps: dict[str, tuple[int, int] | None] = {}

    def rule(self, job: Job) -> WatchRule | None:
        """Return the rule of a job's root, None when it is not watched any more."""
        return self._rules.get(job.root)

    def shares(self, job: Job) -> bool:
        """Tell whether another run may publish under this name."""
        rule = self.rule(job)
        return rule is not None and rule.share

    def mirrors(self, job: Job) -> tuple[str, ...]:
        """Return the remotes that follow the home."""
        rule = self.rule(job)
        return rule.mirrors if rule is not None else ()

    def take(self, job: Job, moved: Progress | None = None) -> Taken | Unfit:
        """Judge and stage a folder at rest. Raises what reading and staging raise, and RefusedError."""
        rule = self.rule(job)
        if rule is None:
            return self._set_aside(job, "not-watched", f"{job.root} is not watched any more")
        if job.recheck is not None:
            return Unfit(recheck(self._store, job))
        judged = self.judge(job, rule)
        if isinstance(judged, Unfit):
            return judged
        job = judged.job
        verdict = self.decide(job, rule)
        if isinstance(verdict, policy.Skip):
            return self._set_aside(job, verdict.reason, verdict.why)
        if isinstance(verdict, policy.Later):
            return Unfit(self._store.advance(job, until=verdict.until, reason=verdict.why))
        admission = self.admit(judged, rule)
        bundle = self.stage(job, rule, admission, moved)
        try:
            self._unchanged(job)
        except errors.WeighbridgeError:
            staging.discard(bundle)
            raise
        return Taken(job, bundle, staging.seen(bundle, admission.facts), admission.people)

    def judge(self, job: Job, rule: WatchRule) -> Judged | Unfit:
        """Find out what a folder holds and write down what the policy needs to know of it."""
        self._unchanged(job)
        run = run_identity.find(job.root, job.path)
        self._stamps[run.path] = _stamp(run.path)
        note = sidecar.read(Path(run.path))
        if note.publish is False:
            job = msgspec.structs.replace(job, run_path=run.path)
            return self._set_aside(job, "sidecar", f"{sidecar.SIDECAR} of the run says publish: false")
        if rule.publish == ("manual",):
            return self._set_aside(job, "manual", "the rule publishes nothing by itself: registry push publishes it")
        found = self._artifact(job, rule)
        if isinstance(found, Unfit):
            return found
        job, artifact = found
        folder, own = os.path.split(job.path)
        beside = os.listdir(folder) if rule.ema != "keep" else []  # noqa: PTH208 - names of a folder of strings
        averaged = artifact.facts.get("averaged") is True
        artifact = self._whole_average(job, rule, artifact, beside)
        # One transaction: an average that is lost in between would not find what it is to give back.
        with self._store.transaction():
            twins = [other for other in beside if layout.raw_of(other) == own]
            lost = {other for other in twins if self._store.lost(f"{folder}/{other}")}
            why = policy.averages(own, beside, rule, averaged=averaged, lost=lost)
            if why is not None:
                return self._set_aside(job, "averaged", why)
        return Judged(self._noted(job, run, rule, artifact, note), artifact, run, note)

    def _whole_average(self, job: Job, rule: WatchRule, artifact: Artifact, beside: Sequence[str]) -> Artifact:
        """Hold a preferred average against the raw weights it would stand for. Raises RefusedError where it is a part.

        The refusal gives the raw weights back; what a person has allowed is published with a warning.
        """
        folder, own = os.path.split(job.path)
        raw = layout.raw_of(own)
        if rule.ema != "prefer" or raw is None or raw not in beside:
            return artifact
        found = average.partial(Path(job.path), Path(folder, raw))
        if found is None:
            return artifact
        reason = next((row["reason"] for row in self._store.allows(job.path) if row["code"] == found.code), None)
        if reason is None:
            raise _refused(job, offered(job, [found]))
        told = msgspec.structs.replace(found, severity="warn", data={**found.data, "allowed": reason})
        return msgspec.structs.replace(artifact, findings=[*artifact.findings, told])

    def decide(self, job: Job, rule: WatchRule) -> policy.Publish | policy.Skip | policy.Later:
        """Return what the rule makes of a judged artifact, its siblings considered."""
        if policy.looks_at_siblings(_item(job), rule):
            self._judge_siblings(job, rule)
        bound = self._store.bound(rule.home, job.name or "")
        at = bound["published_at"] if bound else None
        return policy.decide(_item(job), self._siblings(job), rule, now=time.time(), published_at=at)

    def merges(self, job: Job, rule: WatchRule) -> bool:
        """Tell whether the rule wants a published artifact merged, its siblings considered."""
        return policy.merges(_item(job), self._siblings(job), rule)

    def _siblings(self, job: Job) -> list[policy.Item]:
        """Return what else is known of a job's run."""
        closed = "('superseded', 'vanished', 'blocked', 'quarantined', 'seen')"
        siblings = self._store.jobs(f"run_path = ? AND path != ? AND state NOT IN {closed}", [job.run_path, job.path])
        others = [_item(other) for other in siblings]
        others += [
            policy.Item(row["path"], row["kind"], row["step"], row["size"], row["metric"], bool(row["best_hint"]))
            for row in self._store.skipped("run_path = ? AND kind IS NOT NULL", [job.run_path])
            if row["path"] != job.path
        ]
        return others

    def _judge_siblings(self, job: Job, rule: WatchRule) -> None:
        """Judge what else settled in this run, so that a backlog is not published one checkpoint after the other."""
        waiting = "run_path = ? AND path != ? AND state = 'settling' AND kind IS NULL AND recheck IS NULL"
        for sibling in self._store.jobs(waiting, [job.run_path, job.path]):
            # Whatever is wrong with it is told when its own turn comes.
            with suppress(errors.WeighbridgeError, OSError):
                self.judge(sibling, rule)

    # -- what it is

    def _unchanged(self, job: Job) -> None:
        """Raise VanishedError or SourceChangedError unless the folder is what the watch saw at rest."""
        seen = self._look(job.root, job.path)
        if seen is None:
            raise errors.VanishedError(f"{job.path} is gone")
        if seen.fingerprint != job.fingerprint:
            raise errors.SourceChangedError(f"{job.path} changed", why="it is watched until it is at rest again")

    def _artifact(self, job: Job, rule: WatchRule) -> tuple[Job, Artifact] | Unfit:
        """Return the one artifact of the folder that this job is about; others get jobs of their own."""
        prefix = job.path + "/"
        # Checkpoints below a run's root are judged by their own jobs.
        below = [
            f"/{glob.escape(path.removeprefix(prefix))}" + ("/" if os.path.isdir(path) else "")  # noqa: PTH112 - a string
            for path in self._below(job.root, job.path)
        ]
        found = inspect(
            Path(job.path),
            ignore=[*rule.ignore, *below],
            caches=self.caches,
            values=self._values,
            prefer_averaged=rule.ema == "prefer",
        )
        publishable = [one for one in found.artifacts if one.relative == "." and one.kind is not None]
        if not publishable:
            blocking = [f for f in found.findings if f.severity == "block"]
            if found.outcome == "refuse" and blocking:
                raise _refused(job, blocking)
            why = f"it holds {found.artifact or 'nothing'}, of which nothing can be published"
            hints = [f for f in found.findings if f.severity == "warn" and f.fix]
            why += f": {hints[0].message}; {hints[0].fix}" if hints else ""
            return self._set_aside(job, "not-publishable", why)
        # Of several files of one kind the first is the newest and stands for all; torch files have jobs of their own.
        for kind in dict.fromkeys(one.kind or "" for one in publishable[1:] if one.kind != publishable[0].kind):
            self._store.split(job, kind)
        artifact = next((one for one in publishable if one.kind == job.part), publishable[0])
        if len({one.kind for one in publishable}) > 1 and not job.part:
            job = self._store.advance(job, part=artifact.kind or "") or job
        waits = {f.code for f in artifact.findings if findings.CODES[f.code].waits}
        if waits - {"end-mark-missing"}:
            reason = next(f.message for f in artifact.findings if f.code in waits)
            return Unfit(self._store.advance(job, until=time.time() + LATER, reason=reason))
        if artifact.outcome == "refuse":
            allowed = {row["code"] for row in self._store.allows(job.path)}
            blocking = [f for f in artifact.findings if f.severity == "block" and f.code not in waits]
            left = [f for f in blocking if f.code not in allowed or findings.CODES[f.code].integrity]
            if left:
                raise _refused(job, offered(job, left))
        # It is at rest: that the end mark never came is no reason any more.
        kept = [f for f in artifact.findings if f.code not in waits]
        return job, msgspec.structs.replace(artifact, findings=kept)

    def tag(self, job: Job, home: Home, name: str, n: int) -> None:
        """Move the tag `best` where the rule of a job names a metric and this version is the best."""
        rule = self.rule(job)
        if rule is not None and tag_best(home, job, rule, name=name, n=n, host=self._host):
            self._store.event("tagged", name=name, n=n, detail=f"best: {rule.best or 'the trainer'}")

    def _noted(
        self, job: Job, run: run_identity.Run, rule: WatchRule, artifact: Artifact, note: sidecar.Sidecar
    ) -> Job:
        """Write down what the policy and people need to know of an artifact."""
        folder = Path(job.path)
        state = history.read(folder) if folder.is_dir() else None
        name = note.name or policy.fill(rule.name, project=run.project, run=run.name)
        fault = policy.fault(name)
        if fault is not None:
            words = f"'{name}' cannot be the name of this run: {fault}"
            raise _refused(job, [findings.finding("name-invalid", job.path, words, "choose another name")])
        kind = artifact.kind or ""
        wanted = policy.named(name, kind, lambda known: self._kind_of(rule.home, known))
        own = note.id or self._store.run(
            run.path, run_identity.key(run.path), lambda: run_identity.identity(run.path, self._mountinfo)
        )
        fresh = self._store.advance(
            job,
            run_path=run.path,
            run_id=own,
            project=run.project,
            run=run.name,
            home=rule.home,
            name=wanted,
            kind=kind,
            step=artifact.step,
            metric=_metric(rule.best, state.metrics if state is not None else artifact.facts.get("metrics") or {}),
            best_hint=int(_is_trainers_best(folder) or bool(artifact.facts.get("best_so_far"))),
            size=artifact.size,
        )
        if fresh is None:
            raise errors.ConflictError(f"another hand carries {job.path} on")
        return fresh

    def _kind_of(self, home: str, name: str) -> str | None:
        """Return the kind a name has at its home, as far as is known here; the claim itself has the last word."""
        bound = self._store.bound(home, name)
        if bound is not None:
            return str(bound["kind"])
        opened = self._homes.known(home)
        row = opened.catalog.name(name) if opened is not None else None
        return row["kind"] if row else None

    # -- may it go, and the copy

    def admit(self, judged: Judged, rule: WatchRule, *, hashed: bool = True) -> Admission:
        """Return what is published of a judged artifact, by its remotes' rules; `hashed` is as in `admit`."""
        job, artifact, run, note = judged
        facts = types.RunFacts(project=run.project, name=run.name, id=job.run_id or "")
        began = run_identity.began_at(job.run_id or "")
        try:
            return admit(
                artifact,
                name=job.name or "",
                run=facts,
                policy=self.policy(rule, job.path),
                sidecar=note,
                run_root=Path(run.path),
                started_at=None if began is None else spelled(began),
                host=self._host,
                extra=self._late(job),
                caches=self.caches,
                ask=self.hub(rule),
                published=self.published(rule),
                hashed=hashed,
            )
        except errors.RefusedError as refused:
            refused.data["findings"] = offered(job, refused.data["findings"])
            raise

    def published(self, rule: WatchRule) -> types.Published:
        """Return what knows the versions on a rule's remotes."""
        return partial(self._homes.published_as, (rule.home, *rule.mirrors))

    def hub(self, rule: WatchRule) -> types.Models | None:
        """Return how the Hub among a rule's remotes is asked about models; None where there is none."""
        for name in (rule.home, *rule.mirrors):
            if self._remotes[name].url.startswith("hf://"):
                with suppress(errors.WeighbridgeError):  # it is told of where something is published there
                    hub = commits.of(self._homes.get(name).remote)
                    return hub.model if hub is not None else None
        return None

    def policy(self, rule: WatchRule, path: str) -> Policy:
        """Return the strictest of what a rule's home and mirrors ask for, and what people allowed for a path."""
        allowed = [(row["code"], row["reason"]) for row in self._store.allows(path)]
        return rules([self._remotes[name] for name in (rule.home, *rule.mirrors)], allowed)

    def _late(self, job: Job) -> list[types.Finding]:
        """Return the finding that this version supersedes an earlier one of the same folder."""
        if job.late is None:
            return []
        return [
            findings.finding(
                "late-file",
                job.path.rpartition("/")[2],
                f"the folder changed after {job.late} was published from it; this version supersedes that one",
                previous=job.late,
            )
        ]

    def stage(self, job: Job, rule: WatchRule, admission: Admission, moved: Progress | None) -> staging.Bundle:
        """Take a private copy, as in `copying.stage`."""
        return copying.stage(self._homes, self._settings, admission, home=rule.home, name=job.name or "", moved=moved)

    def papers_changed(self) -> None:
        """Try again what was held back in runs whose sidecar was changed since, and once after a restart."""
        held = {job.run_path for job in self._store.jobs("state = 'blocked' AND run_path IS NOT NULL")}
        held |= {str(row["run_path"]) for row in self._store.skipped("reason = 'sidecar' AND run_path IS NOT NULL")}
        for run_path in sorted(path for path in held if path is not None):
            now = _stamp(run_path)
            if run_path in self._stamps and self._stamps[run_path] == now:
                continue
            self._stamps[run_path] = now
            self._store.retry("state = 'blocked' AND run_path = ?", [run_path])
            self._store.unskip("reason = 'sidecar' AND run_path = ?", [run_path])

    def _set_aside(self, job: Job, reason: str, why: str) -> Unfit:
        self._store.skip(job, reason, why)
        return Unfit(None)


def _refused(job: Job, blocking: list[types.Finding]) -> errors.RefusedError:
    return errors.RefusedError(f"{job.path} cannot be published", why=blocking[0].message, findings=blocking)


def offered(job: Job, blocking: Sequence[types.Finding]) -> list[types.Finding]:
    """Let each fix also name the command that allows the finding, where all of them are for people to allow."""
    if not all(findings.may_be_allowed(f.code) for f in blocking):
        return list(blocking)
    told = []
    for one in blocking:
        command = f"registry allow {shlex.quote(job.path)} --code {one.code} --reason TEXT"
        told.append(msgspec.structs.replace(one, fix=f"{one.fix}; or: {command}" if one.fix else command))
    return told


def _item(job: Job) -> policy.Item:
    return policy.Item(job.path, job.kind or "", job.step, job.size or 0, job.metric, bool(job.best_hint))


def _metric(best: str | None, metrics: Mapping[str, Any]) -> float | None:
    """Return the value of the metric that a rule goes by, at the step of this checkpoint."""
    if best is None:
        return None
    value = metrics.get(best.rpartition(":")[0])
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _is_trainers_best(folder: Path) -> bool:
    """Tell whether the trainer itself names this checkpoint as its best so far."""
    try:
        document = json.loads((folder / layout.TRAINER_STATE).read_bytes())
        named = document.get("best_model_checkpoint")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return isinstance(named, str) and named.rstrip("/").rpartition("/")[2] == folder.name


def _stamp(run_path: str) -> tuple[int, int] | None:
    try:
        status = Path(run_path, sidecar.SIDECAR).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
