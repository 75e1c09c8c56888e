"""The daemon's jobs without its threads, on real parts, with a remote that dies or goes away on demand."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weighbridge.config.settings import DaemonSettings, RemoteSettings, WatchRule
from weighbridge.daemon.folders import Known, Settlement
from weighbridge.daemon.homes import Homes
from weighbridge.daemon.intake import Intake
from weighbridge.daemon.jobs import Runner
from weighbridge.daemon.jobstore import Job, JobStore
from weighbridge.daemon.scan import Tree
from weighbridge.registry import errors, layout
from weighbridge.registry.catalog import Catalog
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Wrapper
from weighbridge.registry.types import Owner


class Killed(BaseException):
    """The process dies here."""


class Faulty(Wrapper):
    """A remote that dies, is away, or loses an answer at a chosen call."""

    def __init__(self, inner: Remote, bench: "Bench") -> None:
        super().__init__(inner)
        self.bench = bench

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in {"create", "upload", "read", "stat", "list", "folders", "delete", "stage", "now"}:
            bench = object.__getattribute__(self, "bench")
            return lambda *args, **kwargs: bench.call(lambda: found(*args, **kwargs), name)
        return found


class Bench:
    """A daemon's jobs without its threads, on a real database, real folders and a real directory remote."""

    def __init__(self, place: Path, **of_rule: Any) -> None:
        self.place = place
        self.runs = place / "runs"
        self.runs.mkdir()
        self.state = place / "state"
        (self.state / "staging").mkdir(parents=True)
        (place / "remote").mkdir()
        self.rule = WatchRule(str(self.runs), home="team")._replace(**of_rule)
        self.remotes = {"team": RemoteSettings("team", str(place / "remote"))}
        self.away = False
        self.countdown: int | None = None
        self.kill_after = False
        self.calls: list[str] = []
        self.waited = 0.0
        self.open()

    def open(self) -> None:
        """Start as after a restart: nothing in memory is left."""
        self.catalog = Catalog.open(self.state / "weighbridge.db", durable=True)
        self.store = JobStore(self.catalog)
        self.homes = Homes(self.remotes, self.catalog, self.store, connect=self.connect)
        self.tree = Tree(str(self.runs), self.rule.ignore)
        self.intake = Intake(
            self.store, self.homes, {str(self.runs): self.rule}, self.remotes,
            DaemonSettings(str(self.state), str(self.state / "s"), disk_reserve=0),
            host="host", mountinfo="",
            look=lambda _root, path: self.tree.look(path),
            below=lambda _root, path: [p for p in self.tree.candidates if p.startswith(path + "/")],
        )  # fmt: skip
        owner = Owner(host="host", daemon="d")
        self.runner = Runner(
            self.store, self.homes, self.intake, owner, clock=lambda: time.time() + self.waited, chance=lambda: 1.0
        )

    def connect(self, settings: RemoteSettings) -> Remote:
        """Open a remote."""
        return Faulty(open_directory(settings.url), self)

    def restart(self) -> None:
        """Lose everything that was in memory."""
        self.catalog.close()
        self.open()

    def call(self, inner: Callable[[], Any], name: str) -> Any:
        """Carry out one request, or die before or after it."""
        if self.away:
            raise errors.UnreachableError("the remote is away")
        self.calls.append(name)
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                if self.kill_after:
                    with suppress(errors.WeighbridgeError):
                        inner()
                raise Killed
        return inner()

    def settle(self, *folders: Path) -> list[Job]:
        """Hand folders over as the watch does when they are at rest."""
        self.tree.scan(full=True)
        found = []
        for folder in folders or [Path(p) for p in self.tree.candidates]:
            listing = self.tree.look(str(folder))
            assert listing is not None
            known = Known(listing.fingerprint, listing.shape)
            if self.store.known(str(folder)) == known:
                continue
            path = str(folder)
            run_path = str(folder.parent)
            job = self.store.settled(
                str(self.runs), Settlement(self.rule, path, known, listing.size, marked=False), run_path
            )
            if job is not None:
                found.append(job)
        return found

    def work(self, rounds: int = 60) -> None:
        """Carry every job on until none can go on; waits are over at once."""
        for _ in range(rounds):
            due = self.store.runnable(time.time() + 1e9)
            if not due:
                return
            job = self.store.job(due[0].id)
            assert job is not None
            if job.until is not None:
                job = self.store.advance(job, until=None)
            if job is not None:
                self.runner.run(job)

    def versions(self) -> dict[str, str]:
        """Return every committed version with its content; each is read back and verified."""
        remote = open_directory(str(self.place / "remote"))
        found = {}
        for name in remote.folders(layout.MODELS):
            for claim in remote.list(layout.claims(name)):
                place = layout.claim_number(claim.key)
                assert place is not None
                try:
                    manifest = committed(remote, *place)
                except errors.NotFoundError:
                    continue
                assert not [f for f in verify_version(remote, *place).findings if f.severity == "block"]
                found[f"{name}@v{place[1]}"] = manifest.content
        return found

    def states(self) -> dict[str, str]:
        """Return the state of the newest job of each folder, by its name."""
        return {Path(job.path).name: job.shown for job in self.store.jobs()}


def with_mirror(place: Path) -> Bench:
    """Return a bench that publishes everything, and that has a second directory as its mirror."""
    bench = Bench(place, publish=("all",), mirrors=("mirror",))
    (place / "mirror").mkdir()
    bench.remotes["mirror"] = RemoteSettings("mirror", str(place / "mirror"))
    bench.restart()
    return bench


@contextmanager
def dying(bench: Bench) -> Iterator[list[bool]]:
    """Catch a death and start again; the list tells whether there was one."""
    died: list[bool] = []
    try:
        yield died
    except Killed:
        died.append(True)
        if bench.catalog.link.in_transaction:
            bench.catalog.link.execute("ROLLBACK")
        bench.restart()
    finally:
        bench.countdown = None
