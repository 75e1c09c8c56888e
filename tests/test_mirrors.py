"""Mirrors follow their home in number order, give no number themselves, and are left alone where they diverged."""

import time
from pathlib import Path

import pytest

from weighbridge.daemon import report
from weighbridge.daemon.deliveries import Deliveries
from weighbridge.daemon.follow import AGAIN_AFTER, Following
from weighbridge.registry import errors, layout
from weighbridge.registry.flow import once, tags
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.mirror import deliver
from weighbridge.registry.flow.verify import verify_version
from weighbridge.registry.flow.withdraw import withdraw
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib.bench import dying, with_mirror
from weighbridge_testlib.builders import lora_adapter, run_root


def test_a_mirror_follows_in_number_order(tmp_path: Path) -> None:
    """Home goes on while the mirror is away; then it gets every number, and never gives one."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1, 2, 3), result=False)
    bench.settle()
    bench.work()
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    assert len(bench.store.deliveries("state = 'pending'")) == 3
    bench.homes.get("team")
    bench.homes.get("mirror")
    bench.away = True
    assert deliveries.step()
    assert [row["state"] for row in bench.store.deliveries()] == ["waiting", "pending", "pending"]
    assert not deliveries.step()
    bench.away = False
    late = Deliveries(
        bench.store, bench.homes, bench.remotes, bench.state / "staging", clock=lambda: time.time() + 1000
    )
    while late.step():
        pass
    assert [row["state"] for row in bench.store.deliveries()] == ["done"] * 3
    mirror = open_directory(str(tmp_path / "mirror"))
    home = open_directory(str(tmp_path / "remote"))
    for n in (1, 2, 3):
        assert committed(mirror, "team-run", n).stored == committed(home, "team-run", n).stored
        assert not verify_version(mirror, "team-run", n).findings
        assert mirror.read(layout.claim("team-run", n)) == home.read(layout.claim("team-run", n))
    bench.catalog.close()


def test_a_mirror_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    """Another claim under the same number is reported as diverged and nothing is moved, until a person has done so."""
    bench = with_mirror(tmp_path)
    lora_adapter(bench.runs / "team/run/checkpoint-1", seed=1)
    bench.settle()
    bench.work()
    foreign = tmp_path / "mirror/models/team-run/_wb/claims/00000001.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("{}")
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    while deliveries.step():
        pass
    (row,) = bench.store.deliveries()
    assert row["state"] == "diverged"
    assert foreign.read_text() == "{}"
    foreign.unlink()
    home, mirror = bench.homes.get("team"), bench.homes.get("mirror")
    for by_hand in (False, True):
        if by_hand:
            deliver(home.remote, mirror.remote, "team-run", 1, mirror_name="mirror", registry=mirror.registry,
                    scratch=tmp_path / "scratch")  # fmt: skip
        deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
        while deliveries.step():
            pass
        (row,) = bench.store.deliveries()
        assert row["state"] == ("done" if by_hand else "diverged")
    bench.catalog.close()


def test_a_stricter_mirror_that_came_later_is_told_of_and_gets_nothing(tmp_path: Path) -> None:
    """What was sealed with its host stays away from a mirror that keeps none, and `status` says which facts and why."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1,), result=False)
    bench.settle()
    bench.work()
    bench.remotes["mirror"] = bench.remotes["mirror"]._replace(paths="rewrite")
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    while deliveries.step():
        pass
    (told,) = report.undelivered(bench.store, bench.homes)
    assert (told["code"], told["state"]) == ("mirror-refuses", "blocked")
    assert told["message"].startswith("the manifest holds the host host, the user ")
    assert '; paths = "keep" in [remotes.mirror] lets them go there; ' in told["message"]
    assert told["fix"] == "registry mirror team-run@v1 --to mirror says what is in the way"
    assert not list((tmp_path / "mirror").rglob("models/*"))
    bench.catalog.close()


@pytest.mark.parametrize("mended", ["", "settings", "by hand"])
def test_what_a_mirror_refused_is_judged_again_at_the_next_start(tmp_path: Path, mended: str) -> None:
    """Where its rules let it in it goes there, what a person brought counts as delivered, and withdrawals follow."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()

    def started(paths: str) -> list[str]:
        bench.restart()
        bench.remotes["mirror"] = bench.remotes["mirror"]._replace(paths=paths)
        deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
        bench.homes.get("team").sync()
        assert deliveries.pending() == any(row["state"] != "done" for row in bench.store.deliveries())
        while deliveries.step():
            pass
        assert not deliveries.pending()
        Following(bench.store, bench.homes).step()
        return [row["state"] for row in bench.store.deliveries()]

    assert started("rewrite") == ["blocked"] * 2
    events = len(bench.store.events())
    home, mirror = bench.homes.get("team"), bench.homes.get("mirror")
    if mended == "by hand":
        for n in (1, 2):
            deliver(home.remote, mirror.remote, "team-run", n, mirror_name="mirror", registry=mirror.registry,
                    scratch=tmp_path / "scratch")  # fmt: skip
    withdraw(home.remote, home.registry, "team-run", 2, who="lw", why="wrong data")
    for to in (1, None):
        tags.move(home.remote, home.registry, "team-run", "prod", to, "lw")
    there = "blocked" if not mended else "done"
    assert started("keep" if mended == "settings" else "rewrite") == [there, "skipped"]
    mirror = bench.homes.get("mirror")
    assert (once.look(mirror.remote, layout.withdrawn("team-run", 2)) is not None) == (mended == "by hand")
    assert bool(list((tmp_path / "mirror").rglob("models/*"))) == bool(mended)
    if not mended:
        assert len(bench.store.events()) == events + 1  # what is still refused is not told again
    bench.catalog.close()


def test_a_mirror_follows_tags_and_withdrawals(tmp_path: Path) -> None:
    """A tag that moves at home moves on the mirror, a withdrawal comes too, and without news nobody is asked."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()
    home, mirror = bench.homes.get("team"), bench.homes.get("mirror")
    following = Following(bench.store, bench.homes)
    tags.move(home.remote, home.registry, "team-run", "prod", 2, "lw", "better")
    home.sync()
    assert following.step() == 0  # nothing was delivered there yet
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    while deliveries.step():
        pass
    assert following.step() == 1
    moved = tags.current(mirror.remote, "team-run", "prod")
    assert moved is not None
    assert (moved.to, moved.who, moved.why) == (2, "lw", "better")
    bench.calls.clear()
    assert following.step() == 0
    assert bench.calls == []
    withdraw(home.remote, home.registry, "team-run", 1, who="lw", why="wrong data")
    tags.move(home.remote, home.registry, "team-run", "prod", None, "lw")
    home.sync()
    bench.restart()
    bench.homes.get("team").sync()
    bench.away = True
    now = 1000.0
    following = Following(bench.store, bench.homes, clock=lambda: now)
    assert following.step() == 0
    bench.away = False
    assert following.step() == 0  # it was tried a moment ago
    now += AGAIN_AFTER
    assert following.step() == 1
    with pytest.raises(errors.WithdrawnError):
        committed(mirror.remote, "team-run", 1)
    mirror = bench.homes.get("mirror")
    mirror.sync()
    found = mirror.catalog.version("team-run", 1)
    assert found is not None
    assert (mirror.catalog.tags("team-run"), found["state"]) == (
        {2: ["latest"]},
        "withdrawn",
    )
    bench.catalog.close()


def test_a_death_while_a_mirror_is_told(tmp_path: Path) -> None:
    """Whichever request the daemon dies after, the next one tells the mirror's readers of every move of the tag."""
    bench = with_mirror(tmp_path)
    run_root(bench.runs / "team/run", steps=(1, 2), result=False)
    bench.settle()
    bench.work()
    deliveries = Deliveries(bench.store, bench.homes, bench.remotes, bench.state / "staging")
    while deliveries.step():
        pass
    Following(bench.store, bench.homes).step()
    deaths = 0
    while True:
        home = bench.homes.get("team")
        tags.move(home.remote, home.registry, "team-run", "prod", 1 + deaths % 2, "lw")
        home.sync()
        bench.homes.get("mirror")
        bench.countdown, bench.kill_after = deaths, True
        with dying(bench) as died:
            Following(bench.store, bench.homes).step()
        bench.homes.get("team").sync()
        Following(bench.store, bench.homes).step()
        mirror, home = bench.homes.get("mirror"), bench.homes.get("team")
        mirror.sync()
        seqs = [[row["seq"] for row in one.catalog.moves("team-run", "prod")] for one in (home, mirror)]
        assert seqs[0] == seqs[1] == list(range(1, deaths + 2))
        if not died:
            break
        deaths += 1
    assert deaths >= 8
    bench.catalog.close()
