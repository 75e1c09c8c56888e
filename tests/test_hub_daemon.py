"""The daemon and the Hub: as a home whose numbers it gives, and as a mirror that is away, full or late."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.daemon.jobs import delay
from weighbridge.registry import errors
from weighbridge.registry.flow.decision import committed
from weighbridge_testlib.hub import Fault, TestHub
from weighbridge_testlib.hub.bench import HUB, HubBench, adapter, close_all
from weighbridge_testlib.hub.rig import remote
from weighbridge_testlib.hub.store import Repo


@pytest.fixture(autouse=True)
def _closed(hub: TestHub) -> Iterator[None]:
    """Close what the tests opened before the Hub ends."""
    del hub
    yield
    close_all()


def repo_of(hub: TestHub, name: str = "team-run") -> Repo:
    """Return a repository."""
    return hub.store.get(f"acme/{name}")


def test_the_hub_is_a_home_like_any_other(hub: TestHub, tmp_path: Path) -> None:
    """A settled folder becomes a commit and a tag, through every state, and leaves no stage behind."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="hub")
    adapter(bench, "run", 1)
    bench.settle()
    bench.work()
    assert bench.states() == {"final": "done"}
    assert [c.title for c in repo_of(hub).history("main")] == ["team-run v1", "initial commit"]
    assert list(repo_of(hub).tags) == ["v1"]
    receipts = bench.homes.get("hub").catalog.receipts("team-run", 1)
    assert receipts[0]["location"] == f"hf://acme/team-run@{repo_of(hub).head.oid}"
    bench.homes.get("hub").sync()
    assert bench.homes.get("hub").catalog.names() == ["team-run"]
    bench.restart()
    hub.seen.clear()
    adapter(bench, "again", 1)
    bench.settle()
    bench.work()
    assert not list((bench.state / "staging").iterdir())


@pytest.mark.parametrize("on", ["commit", "tag", "preupload", "lfs-put", "paths-info"])
def test_a_job_goes_on_where_the_hub_failed(hub: TestHub, tmp_path: Path, on: str) -> None:
    """Whatever fails once is tried again from its step: one version, nothing lost, nothing sent twice."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="hub")
    adapter(bench, "run", 1)
    bench.settle()
    hub.faults.add(Fault(on, "lose" if on == "commit" else "refuse", status=403, times=1))
    bench.work()
    assert bench.states() == {"final": "done"}
    assert [c.title for c in repo_of(hub).history("main")] == ["team-run v1", "initial commit"]
    assert list(repo_of(hub).tags) == ["v1"]


def test_a_full_organisation_blocks_the_job_with_the_servers_words(hub: TestHub, tmp_path: Path) -> None:
    """Permanent: tried at most twice, blocked, and told once."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="hub")
    adapter(bench, "run", 1)
    bench.settle()
    hub.faults.add(Fault("commit", status=403, message="Private repository storage limit reached", times=999))
    bench.work()
    assert bench.states() == {"final": "blocked"}
    (job,) = bench.store.jobs()
    assert "storage limit reached" in (job.reason or "")
    assert hub.count("commit") <= 2


def test_two_daemons_share_a_repository(hub: TestHub, tmp_path: Path) -> None:
    """Two daemons, ten versions each, one name: all land, numbers are unique, no refusal comes out."""
    benches: list[HubBench] = []
    for who in ("a", "b"):
        (tmp_path / who).mkdir()
        bench = HubBench(
            tmp_path / who,
            lambda who=who: remote(hub, tmp_path / f"home-{who}"),  # type: ignore[misc]
            home="hub",
            name="shared",
            share=True,
        )
        for seed in range(10):
            adapter(bench, f"run-{seed}", 100 * len(benches) + seed)
        bench.settle()
        benches.append(bench)
    threads = [threading.Thread(target=bench.work, kwargs={"rounds": 200}) for bench in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bench in benches:
        assert {job.state for job in bench.store.jobs()} == {"done"}
    tags = repo_of(hub, "shared").tags
    assert sorted(int(tag[1:]) for tag in tags) == list(range(1, 21))
    assert len(repo_of(hub, "shared").history("main")) == 21


def test_a_mirror_that_is_down_catches_up(hub: TestHub, tmp_path: Path) -> None:
    """Home goes on while the Hub is away; afterwards both have the same numbers and contents."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="team", mirrors=("hub",), share=True,
                     name="shared")  # fmt: skip
    for seed in range(4):
        adapter(bench, f"run-{seed}", seed)
        bench.settle()
        if seed == 1:
            hub.faults.add(Fault("any", status=503, times=10_000))
        if seed == 3:
            hub.faults.clear()
        bench.work()
        bench.deliver(rounds=8)
    bench.deliver()
    home = bench.versions()
    assert len(home) == 4
    repo = repo_of(hub, "shared")
    assert sorted(repo.tags) == ["v1", "v2", "v3", "v4"]
    mirror = remote(hub, tmp_path / "look", token="hf_ben")
    for ref, content in home.items():
        n = int(ref.rpartition("v")[2])
        assert committed(mirror, "shared", n).content == content
    assert {row["state"] for row in bench.store.deliveries("1")} == {"done"}


def test_a_used_up_quota_waits_its_hour(hub: TestHub, tmp_path: Path) -> None:
    """The delivery's next try is when the Hub says, not sooner; the home is not touched by it."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="team", mirrors=("hub",))
    adapter(bench, "run", 1)
    bench.settle()
    bench.work()
    hub.faults.add(
        Fault("commit", status=429, message="You have exceeded the rate limit for repository commits (128 per hour).")
    )
    bench.deliveries.step()
    (row,) = bench.store.deliveries("1")
    assert row["state"] == "waiting"
    assert 3500 < row["until"] - time.time() < 3700
    assert "per hour" in row["reason"]
    commits = hub.count("commit")
    assert not bench.deliveries.step()
    assert hub.count("commit") == commits
    bench.deliver()
    assert list(repo_of(hub).tags) == ["v1"]
    assert delay(errors.QuotaError("x", retry_after=60.0), 0, 0.5) == 75.0


def test_a_mirror_of_the_latest_only_skips_what_waits(hub: TestHub, tmp_path: Path) -> None:
    """Where three versions wait and the rule says latest-only, one commit is made; the others are told as skipped."""
    bench = HubBench(
        tmp_path,
        lambda: remote(hub, tmp_path / "home"),
        hub=HUB._replace(mirror="latest-only"),
        home="team",
        mirrors=("hub",),
        share=True,
        name="shared",
    )
    for seed in range(3):
        adapter(bench, f"run-{seed}", seed)
    bench.settle()
    bench.work()
    bench.deliver()
    assert sorted(row["state"] for row in bench.store.deliveries("1")) == ["done", "skipped", "skipped"]
    assert list(repo_of(hub, "shared").tags) == ["v3"]


def test_a_renamed_repository_costs_the_daemon_nothing(hub: TestHub, tmp_path: Path) -> None:
    """The next version goes to where the repository is now; where the organisation is another one, the job waits."""
    bench = HubBench(tmp_path, lambda: remote(hub, tmp_path / "home"), home="hub", share=True, name="shared")
    adapter(bench, "run-1", 1)
    bench.settle()
    bench.work()
    hub.store.move("model", "acme/shared", "acme/elsewhere", hub.store.tokens["hf_ann"])
    bench.restart()
    adapter(bench, "run-2", 2)
    bench.settle()
    bench.work()
    receipts = bench.homes.get("hub").catalog.receipts("shared", 2)
    assert receipts[0]["location"] == f"hf://acme/elsewhere@{repo_of(hub, 'elsewhere').head.oid}"
    hub.store.rename_owner("acme", "acme-ai")
    bench.restart()
    adapter(bench, "run-3", 3)
    bench.settle()
    bench.work(rounds=1)
    (job,) = [job for job in bench.store.jobs() if job.until is not None]
    assert "acme/shared is acme-ai/elsewhere now" in (job.reason or "")
