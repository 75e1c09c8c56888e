"""Publishers that race, die and lose answers: no content twice, nothing acknowledged lost, nothing visible damaged."""

import multiprocessing
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weighbridge.registry import errors
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.collect import collect
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.withdraw import purge, withdraw
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge.registry.remotes.memory import MemoryRemote
from weighbridge.registry.remotes.protocol import Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge.registry.types import Owner, Receipt
from weighbridge_testlib.audit import audit
from weighbridge_testlib.faults import Call, Fault, Faulty, Killed
from weighbridge_testlib.publishing import OWNER, candidate, publish_in_process, rendered

NAME = "medical-sft"
DAY = 86_400.0


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_threads_with_the_same_and_with_other_contents(tmp_path: Path, kind: str) -> None:
    """Eight publishers with four contents each, in any order: every content gets one number, and all agree on it."""
    memory = MemoryRemote()

    def connect() -> Remote:
        return memory if kind == "memory" else DirectoryRemote(tmp_path / "remote")

    registry = open_registry(connect(), create=True)
    gate = threading.Barrier(8)
    receipts: list[Receipt] = []

    def run(number: int) -> None:
        remote = connect()
        seeds = [1, 2, 3, 4]
        random.Random(number).shuffle(seeds)
        gate.wait()
        for seed in seeds:
            made = candidate(remote, tmp_path / f"{number}-{seed}", seed=seed)
            owner = Owner(host=f"host-{number}", daemon=str(number))
            receipts.append(publish(remote, "home", registry, made, owner, render=rendered))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receipts) == 32
    state = audit(connect(), receipts)
    assert sorted(state.committed) == [(NAME, n) for n in (1, 2, 3, 4)]
    assert connect().sweep(-100) == 0


def test_processes_on_one_folder(tmp_path: Path) -> None:
    """Four processes on one directory, with contents in common and of their own, agree on all numbers."""
    context = multiprocessing.get_context("spawn")
    gate, out = context.Barrier(4), context.SimpleQueue()
    processes = [
        context.Process(
            target=publish_in_process,
            args=(tmp_path / "remote", tmp_path / str(number), [1, 2, 10 + number, 3], gate, out),
        )
        for number in range(4)
    ]
    for process in processes:
        process.start()
    found: list[Any] = []
    while found.count(None) < 4:
        found.append(out.get())
        assert found[-1] is None or found[-1][0], found[-1]
    for process in processes:
        process.join()
    numbers = {(seed, n, content) for seed, n, content in filter(None, found)}
    assert len(numbers) == 7
    assert sorted(n for _, n, _ in numbers) == list(range(1, 8))
    state = audit(DirectoryRemote(tmp_path / "remote"))
    assert {(n, content) for _, n, content in numbers} == {(n, c) for (_, n), c in state.committed.items()}


class Plan:
    """Kills the publisher at one call, or loses or refuses answers at some."""

    def __init__(self, at: int, fault: Fault) -> None:
        self.at = at
        self.fault = fault

    def __call__(self, call: Call) -> Fault | None:
        """Fail at the chosen call; answers are lost at every multiple of it."""
        if self.fault.startswith("die"):
            return self.fault if call.number == self.at else None
        return self.fault if call.number % (self.at + 1) == 0 else None


class Publishers(RuleBasedStateMachine):
    """Publish, die anywhere, come back, collect, withdraw: the audit holds after every step."""

    kind = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="publishers-")
        self.root = Path(self.folder.name)
        self.clock = 1_800_000_000.0
        self.memory = MemoryRemote(clock=lambda: self.clock)
        self.acknowledged: list[Receipt] = []
        self.tried: set[int] = set()

    def connect(self) -> Remote:
        """Return the remote as a new process sees it."""
        return self.memory if self.kind == "memory" else DirectoryRemote(self.root / "remote")

    @initialize()
    def begin(self) -> None:
        """Begin the registry."""
        self.registry = open_registry(self.connect(), create=True)

    def attempt(self, remote: Remote, seed: int, *, again: bool = False) -> None:
        """Stage and publish one content; an acknowledged receipt is kept."""
        self.tried.add(seed)
        made = candidate(remote, self.root / str(seed), seed=seed)
        try:
            receipt = publish(remote, "home", self.registry, made, OWNER, render=rendered, again=again)
        except Killed:
            staging.discard(made.bundle)  # as a sweep will
            return
        except (errors.WithdrawnContentError, errors.UnreachableError):
            staging.discard(made.bundle)
            return
        self.acknowledged.append(receipt)

    @rule(seed=st.integers(1, 4), at=st.integers(1, 40), fault=st.sampled_from(["die-before", "die-after"]))
    def dies(self, seed: int, at: int, fault: Fault) -> None:
        """Kill a publisher before or after any of its requests."""
        self.attempt(Faulty(self.connect(), Plan(at, fault)), seed)

    @rule(
        seed=st.integers(1, 4),
        at=st.integers(2, 6),
        fault=st.sampled_from(["lost", "dropped", "busy"]),
        again=st.booleans(),
    )
    def loses_answers(self, seed: int, at: int, fault: Fault, again: bool) -> None:
        """Lose every so many answers of a publisher that retries."""
        faulty = Faulty(self.connect(), Plan(at, fault))
        self.attempt(Retrying(faulty, attempts=3, sleep=lambda _: None), seed, again=again)

    @rule(seed=st.integers(1, 4))
    def publishes(self, seed: int) -> None:
        """Let a publisher work in peace."""
        self.attempt(self.connect(), seed)

    @rule(dead_after=st.sampled_from([-10.0, 7 * DAY]))
    def collects(self, dead_after: float) -> None:
        """Void what a collector takes for dead, rightly or wrongly."""
        collect(self.connect(), self.registry, by="collector", dead_after=dead_after)

    @rule(choice=st.randoms(use_true_random=False), at=st.integers(1, 12))
    def withdraws(self, choice: random.Random, at: int) -> None:
        """Take a version back, and perhaps die while doing so or while deleting."""
        if not self.acknowledged:
            return
        version = choice.choice(self.acknowledged)
        try:
            remote = Faulty(self.connect(), Plan(at, "die-after"))
            withdraw(remote, self.registry, version.name, version.n, who="lw", why="a test")
            purge(remote, version.name, version.n, grace=-10)
        except Killed:
            return

    @rule(days=st.sampled_from([0.5, 8.0]))
    def waits(self, days: float) -> None:
        """Let time go by in the store."""
        self.clock += days * DAY

    @invariant()
    def holds(self) -> None:
        """See that nothing is doubled, lost or damaged."""
        if hasattr(self, "registry"):
            audit(self.connect(), self.acknowledged)

    def teardown(self) -> None:
        """Publish everything that was tried: each content has one number."""
        remote = self.connect()
        if hasattr(self, "registry"):
            for seed in self.tried:
                made = candidate(remote, self.root / str(seed), seed=seed)
                self.acknowledged.append(
                    publish(remote, "home", self.registry, made, OWNER, render=rendered, again=True)
                )
            state = audit(remote, self.acknowledged)
            assert state.open == set()
            living = [content for place, content in state.committed.items() if place not in state.withdrawn]
            assert len(living) == len(set(living)) == len(self.tried)
            assert remote.sweep(-100) == 0
        self.folder.cleanup()


class PublishersInAFolder(Publishers):
    """The same on a real folder, with stages."""

    kind = "directory"


TestPublishers = Publishers.TestCase
TestPublishers.settings = settings(
    max_examples=40, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPublishersInAFolder = PublishersInAFolder.TestCase
TestPublishersInAFolder.settings = settings(
    max_examples=10, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
)
