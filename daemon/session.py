"""A daemon at work on an open database: the watch, the workers, the clockwork and the answers on the socket."""

import getpass
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from weighbridge.config import mounts
from weighbridge.config.settings import Settings
from weighbridge.daemon import problems, report
from weighbridge.daemon import state as states
from weighbridge.daemon.control import ControlServer
from weighbridge.daemon.copying import STAGING
from weighbridge.daemon.deliveries import Deliveries
from weighbridge.daemon.drain import Drains
from weighbridge.daemon.executors.local import LocalExecutor
from weighbridge.daemon.executors.slurm import SlurmExecutor
from weighbridge.daemon.folders import Folders
from weighbridge.daemon.follow import Following
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.jobs import Runner
from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge.daemon.ledger import StoreLedger
from weighbridge.daemon.mergestore import MergeStore
from weighbridge.daemon.merging import SCRATCH, Merging
from weighbridge.daemon.schedule import Clockwork
from weighbridge.daemon.sequel import Merges
from weighbridge.daemon.settle import Listing
from weighbridge.daemon.upkeep import Upkeep
from weighbridge.daemon.watch import Hints
from weighbridge.daemon.workers import Workers
from weighbridge.registry import errors
from weighbridge.registry.flow import hub_base
from weighbridge.registry.flow.allowance import QUARANTINE, check_code
from weighbridge.registry.types import Owner

STOP_WITHIN: Final = 8.0
"""Seconds a stop waits for steps that are under way; what is cut is repeated by the next start."""

SCAN_WITHIN: Final = 60.0
"""Seconds for which somebody who asked for a scan is made to wait for its end."""

_SHORTEST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 5.0
_ASKING_WAIT: Final = 0.2
"""Seconds between two rounds when somebody waits for the end."""

_log = logging.getLogger(__name__)


class Session:
    """Everything that works on one open database; `run` returns when it is told to stop or the database is damaged."""

    hints: Hints
    homes: Homes
    folders: Folders
    intake: Intake
    runner: Runner
    deliveries: Deliveries
    following: Following
    upkeep: Upkeep
    merging: Merging

    def __init__(
        self,
        settings: Settings,
        opened: states.Opened,
        *,
        environ: Mapping[str, str],
        scan_only: bool = False,
        stop: threading.Event,
    ) -> None:
        self.settings = settings
        self.store = opened.store
        self.findings = opened.findings
        self.damage: str | None = None
        """What is wrong with the database, once that was found."""
        self.started = time.time()
        self.beat = time.monotonic()
        self._catalog = opened.catalog
        self.merges = MergeStore(opened.catalog)
        self._local = LocalExecutor(self._wake_merging)
        self._environ = environ
        self._scan_only = scan_only
        self._stop = stop
        self.trouble: errors.WeighbridgeError | None = None
        self._drains = Drains()
        self._host = socket.gethostname()
        self._owner = Owner(host=self._host, daemon=states.identity(Path(settings.daemon.state)))
        self._fresh: Settings | None = None
        self._former: list[Homes] = []
        self._build(settings)
        self.workers = Workers(self.store, lambda: self.runner, settings.daemon.workers, self._own_store)

    def _build(self, settings: Settings) -> None:
        """Make the parts that follow from the settings."""
        self.settings = settings
        daemon = settings.daemon
        self._state = Path(daemon.state)
        table = mounts.read_table(self._environ)
        self.hints = Hints(threading.Event())
        self.homes = Homes(settings.remotes, self._catalog, self.store, writer=self._owner.daemon)
        own = [daemon.state, *(_folder_of(remote.url) for remote in settings.remotes.values())]
        self.folders = Folders(
            settings.watch,
            StoreLedger(self.store, self._state, self._wake_workers),
            self.hints,
            quiet=daemon.quiet,
            scan=daemon.scan,
            wait_limit=daemon.wait_limit,
            exclude=tuple(path for path in own if path),
        )
        self.hints.bind(self.folders.wake)
        rules = {root: held.rule for root, held in self.folders.roots.items()}
        self.intake = Intake(
            self.store, self.homes, rules, settings.remotes, daemon,
            host=self._host, mountinfo=table, look=self._look, below=self._below, caches=hub_caches(self._environ),
        )  # fmt: skip
        self.merging = Merging(
            self.merges, self.store, self.homes, settings.merge,
            {"local": self._local, "slurm": SlurmExecutor(settings.merge.slurm, self._environ)},
            scratch=Path(settings.merge.scratch or self._state / SCRATCH) / self._owner.daemon[:8],
            reserve=daemon.disk_reserve, caches=hub_caches(self._environ), roots=[Path(root) for root in rules],
            fetching={root for root, rule in rules.items() if rule.merge_fetch},
            open_hub=lambda: hub_base.open_hub(self._environ), wake_workers=self._wake_workers,
        )  # fmt: skip
        sequel = Merges(self.merges, self.intake, self.merging, host=self._host)
        self.runner = Runner(
            self.store, self.homes, self.intake, self._owner, changed=self._changed, stopping=self._stop, sequel=sequel
        )
        scratch = self._state / STAGING
        self.deliveries = Deliveries(self.store, self.homes, settings.remotes, scratch)
        self.following = Following(self.store, self.homes)
        names = frozenset(rule.home for rule in settings.watch)
        self.upkeep = Upkeep(self.store, self.homes, names, self._state, self._owner.daemon)
        why = "file events are switched off" if self._scan_only else None
        reasons = {root: why or mounts.network_filesystem(root, table) for root in self.folders.roots}
        self._scan_roots = [(root, reason) for root, reason in reasons.items() if reason is not None]

    # -- running

    def run(self, *, ready: Callable[[], None] = lambda: None) -> None:
        """Work until told to stop. Raises what keeps the socket from being made."""
        self.start(ear=True)
        ready()
        try:
            self.watch()
        finally:
            self.close()

    def start(self, *, ear: bool) -> None:
        """Begin to watch and to work."""
        self.hints.start(self.folders.roots, scan_only=self._scan_roots)
        # What stands under a root that is new to us is old; nobody may be told that we are there before we know it.
        self.folders.first_look()
        self._ear = ControlServer(Path(self.settings.daemon.socket), self.ops()) if ear else None
        if self._ear is not None:
            self._ear.start()
        self._owe_mirrors()
        self.upkeep.sweep_own()
        self.upkeep.hold()
        self.merging.sweep()
        self.workers.start()
        self.merging.start()
        self._clockwork = Clockwork(self._turns(full=ear))
        self._clockwork.start()

    def watch(self, *, until: Callable[[], bool] | None = None) -> None:
        """Look at what is due, again and again, until told to stop or `until` says so."""
        longest = _LONGEST_WAIT if until is None else _ASKING_WAIT
        while not self._stop.is_set() and self.damage is None and not (until is not None and until()):
            if self._fresh is not None:
                self._apply(self._fresh)
            wait = longest
            try:
                wait = self.folders.step() - time.monotonic()
                self._own_store(None)
            except sqlite3.Error as error:
                self._own_store(error)
            except Exception:  # noqa: BLE001 - the next round comes whatever happened in this one
                _log.exception("looking at the watched folders failed")
            self.beat = time.monotonic()
            # A pause after every round, so that a burst of events is one round and not a thousand.
            if self._stop.wait(_SHORTEST_WAIT):
                return
            self.folders.wake.wait(min(longest, max(0.0, wait - _SHORTEST_WAIT)))
            self.folders.wake.clear()

    def close(self) -> None:
        """Stop everything within STOP_WITHIN seconds; what is cut is repeated by the next start."""
        self._clockwork.stop()
        self.merging.stop(0.0)
        if not self.workers.stop(STOP_WITHIN):
            _log.warning("a step was cut off; it is repeated at the next start")
        self.merging.stop(1.0)
        self.hints.stop()
        with suppress(OSError, sqlite3.Error):
            self._export(state="stopped")
        if self._ear is not None:
            self._ear.close()
        for homes in (self.homes, *self._former):
            homes.close()
        self._catalog.close()

    def reload(self, settings: Settings) -> None:
        """Take over new settings between two rounds of the watch."""
        self._fresh = settings
        self.folders.wake.set()

    def _apply(self, settings: Settings) -> None:
        self._fresh = None
        self.hints.stop()
        self._clockwork.stop()
        self._former.append(self.homes)  # a step under way may still need them
        self.merging.stop(STOP_WITHIN)
        self._build(settings)
        self.hints.start(self.folders.roots, scan_only=self._scan_roots)
        self._owe_mirrors()
        self._clockwork = Clockwork(self._turns(full=True))
        self._clockwork.start()
        self.workers.wake()
        self.merging.start()
        self.merging.hurry()
        _log.info("the configuration was read again", extra={"config": settings.source})

    def _turns(self, *, full: bool) -> dict[str, tuple[float, Callable[[], object]]]:
        scan = self.settings.daemon.scan
        turns: dict[str, tuple[float, Callable[[], object]]] = {
            "scan": (scan, self.folders.request_scan),
            "retries": (10.0, self._retries),
            "deliveries": (5.0, self._deliver),
            "following": (15.0, self.following.step),
        }
        if full:
            turns |= {
                "feed": (60.0, self.upkeep.sync),
                "verify": (3600.0, self.upkeep.verify),
                "hold": (3600.0, self.upkeep.hold),
                "sweep": (86_400.0, self.upkeep.sweep),
                "merges": (86_400.0, self.merging.sweep),
                "status": (30.0, self._export),
            }
        return turns

    def _retries(self) -> None:
        self.intake.papers_changed()
        self.workers.wake()

    def _deliver(self) -> None:
        while not self._stop.is_set() and self.deliveries.step():
            pass

    def _owe_mirrors(self) -> None:
        """Note what a mirror that was added to a rule still has to get."""
        mirrors = {root: held.rule.mirrors for root, held in self.folders.roots.items()}
        for made in self.store.made() if any(mirrors.values()) else ():
            for mirror in mirrors.get(made.root, ()):
                self.store.deliver(mirror, made.home, made.name, made.n)

    # -- what the parts tell

    def _look(self, root: str, path: str) -> Listing | None:
        held = self.folders.roots.get(root)
        return held.tree.look(path) if held is not None else None

    def _below(self, root: str, path: str) -> list[str]:
        held = self.folders.roots.get(root)
        return [p for p in held.tree.candidates if p.startswith(path + "/")] if held is not None else []

    def _wake_workers(self) -> None:
        self.workers.wake()

    def _wake_merging(self) -> None:
        self.merging.wake()

    def _changed(self, path: str) -> None:
        self.folders.reconsider(path)

    def _own_store(self, error: sqlite3.Error | None) -> None:
        """Take note of how our own database does: damage ends the session, a full disk is waited out."""
        if error is None:
            self.trouble = None
        elif states.is_damage(error):
            _log.error("the database is damaged", extra={"why": str(error)})
            self.damage = str(error)
            self.folders.wake.set()
        else:
            described = states.cannot_write(error, self._state / states.DATABASE)
            if self.trouble is None or self.trouble.why != described.why:
                _log.error(described.what, extra={"why": described.why, "fix": described.fix})
            self.trouble = described
            self.folders.wake.set()

    # -- how it stands

    def healthy(self, stale: float) -> bool:
        """Tell whether the watch goes round and every worker is there."""
        return time.monotonic() - self.beat < stale and self.workers.alive

    def quiet(self) -> bool:
        """Tell whether nothing is left to do but to wait for others."""
        return (
            not self.folders.unlooked("/")
            and all(waiting.hopeless for waiting in self.folders.waiting())
            and self.workers.idle()
            and not self.deliveries.pending()
            and self.merging.quiet()
        )

    def published(self) -> list[Job]:
        """Return the jobs that ended in a version since this session began."""
        return self.store.jobs("state = 'done' AND updated_at >= ?", [self.started], order="name, n, id")

    def problems(self) -> list[errors.WeighbridgeError]:
        """Return what keeps jobs, merges and deliveries from their end; the first one gives the exit code."""
        if self.trouble is not None:
            return [self.trouble]
        return problems.found(self.folders, self.store, self.merges, self.homes, self.settings.source)

    # -- what people ask

    def ops(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """Return what the socket answers."""
        return {
            "status": lambda _args: self.status(),
            "log": self._op_log,
            "allow": self._op_allow,
            "drain": lambda args: self._drains.answer(self.folders, self.store, args),
            "recorded": self._op_recorded,
            "scan": self._op_scan,
            "merges": self._op_merges,
        }

    def status(self) -> dict[str, Any]:
        """Return how everything stands."""
        return report.status(
            self.settings,
            self.folders,
            self.homes,
            self.store,
            self.merges,
            started=self.started,
            trouble=None if self.trouble is None else f"{self.trouble.what} ({self.trouble.why})",
            extra=self.findings,
        )

    def _export(self, state: str = "running") -> None:
        document = self.status()
        document["daemon"]["state"] = state
        report.export(document, self._state, Path(self.settings.daemon.socket).parent)

    def _op_log(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        name = args.get("name")
        return self.store.events(str(name) if name else None, min(int(args.get("limit") or 100), 10_000))

    def _op_scan(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        before = self.folders.full_scans
        self.folders.request_scan(full=True, now=True)
        end = time.monotonic() + SCAN_WITHIN
        while self.folders.full_scans == before and time.monotonic() < end and not self._stop.is_set():
            time.sleep(0.02)
        return {
            "done": self.folders.full_scans > before,
            "seconds": self.folders.full_seconds,
            "folders": self.folders.count,
        }

    def _op_merges(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Cancel or try again what is named, and return every merge that is not over, or was just named."""
        named = []
        if args.get("cancel"):
            named = self.merging.cancel(str(args["cancel"])) or self.merges.find(str(args["cancel"]))
        elif args.get("retry"):
            named = self.merging.retry(str(args["retry"]))
        rows = named or self.merges.merges("state NOT IN ('done', 'superseded')")
        return [report.merge_row(one) for one in rows]

    def _op_recorded(self, args: Mapping[str, Any]) -> dict[str, Any]:
        path = os.path.normpath(str(args.get("path") or ""))
        done = self.store.jobs("path = ? AND state = 'done'", [path], order="settled_at DESC, id DESC", limit=1)
        if not done:  # folders are watched under the names people use, links included
            published = self.store.jobs("state = 'done'", order="settled_at DESC, id DESC")
            done = [job for job in published if os.path.realpath(job.path) == path][:1]
        if not done:
            raise errors.NotFoundError(f"nothing was published from {path}", why="no version is recorded for it")
        job = done[0]
        manifest = self.store.manifest_of(job)
        return {"path": path, "name": job.name, "n": job.n, "home": job.home, "manifest": manifest}

    def _op_allow(self, args: Mapping[str, Any]) -> dict[str, Any]:
        path, code, reason = (str(args.get(key) or "") for key in ("path", "code", "reason"))
        answer = allow(self.store, path, code, reason, who=str(args.get("who") or getpass.getuser()))
        self.workers.wake()
        return answer


def allow(store: JobStore, path: str, code: str, reason: str, *, who: str) -> dict[str, Any]:
    """Record that a finding is allowed under a path and try again what it blocked. Raises UsageError, DeniedError."""
    if not path.startswith("/") or not reason.strip():
        raise errors.UsageError("an allowance needs an absolute path and a reason", fix="registry allow --help")
    check_code(code, also=QUARANTINE)
    path = os.path.normpath(path)
    with store.transaction():
        store.allow(path, code, reason, who)
        inside = "(path = ? OR substr(path, 1, ?) = ?)"
        again = store.retry(f"state IN ('blocked', 'quarantined') AND {inside}", [path, len(path) + 1, path + "/"])
    return {"path": path, "code": code, "reason": reason, "who": who, "retried": again}


def hub_caches(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the Hub caches of this user that are there: they may hold bases, and with them their licences."""
    home = (
        environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or environ.get('HOME', '') + '/.cache'}/huggingface"
    )
    wanted = [environ.get("HF_HUB_CACHE") or f"{home}/hub"]
    return tuple(path for text in wanted if (path := Path(text)).is_dir())


def _folder_of(url: str) -> str | None:
    return url.removeprefix("file://") if url.startswith(("/", "file://")) else None
