"""A daemon that dies while a merge is under way: nothing is lost, nothing is made or published twice."""

import json
import signal
from pathlib import Path

import pytest

from weighbridge.registry import control
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, merging
from weighbridge_testlib.bench import dying
from weighbridge_testlib.merge_bench import BASE, DyingStore, MergeBench
from weighbridge_testlib.yard import Yard, until

STATES = ("submitting", "running", "merged", "publishing", "done")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_death_at_any_step_of_a_merge_leads_to_one_version(tmp_path: Path, state: str, after: bool) -> None:
    """Whatever was written down last, the next start finds its way: one merged version, no leftovers."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    store = DyingStore(bench.catalog)
    store.fatal = (state, after)
    bench.merging._store = store
    with dying(bench) as died:
        bench.merge_all()
    assert died
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_n) == ("done", 1)
    assert merge.tries <= 2
    assert sorted(bench.versions()) == ["team-run-1-merged-bf16@v1", "team-run-1@v1"]
    bench.merging.sweep()
    assert not list((tmp_path / "scratch").glob("jobs/*/*"))


@pytest.mark.parametrize("kill_after", [False, True])
def test_a_death_at_requests_to_the_remote_leads_to_one_version_each(tmp_path: Path, kill_after: bool) -> None:
    """Dying at several requests while merged models are published leaves exactly one of each."""
    bench = MergeBench(tmp_path)
    bench.base()
    deaths = 0
    for number, countdown in enumerate((2, 9, 16), 1):
        bench.publish(bench.adapter(number, run=f"run-{number}", seed=number))
        bench.kill_after, bench.countdown = kill_after, countdown
        with dying(bench) as died:
            bench.merge_all()
        deaths += len(died)
        bench.merge_all()
    assert deaths == 3
    merged = sorted(version for version in bench.versions() if "merged" in version)
    assert merged == [f"team-run-{n}-merged-bf16@v1" for n in (1, 2, 3)]


def test_a_killed_daemon_goes_on_with_the_files_that_were_finished(tmp_path: Path) -> None:
    """SIGKILL of the real daemon within a merge ends its child, too; the next start keeps what is done."""
    with Yard(tmp_path) as yard:
        base = merging.wide_model(tmp_path / "models" / BASE, shards=6)
        (base / "README.md").write_text(builders.card(license_id="apache-2.0"))
        yard.configure(daemon={"quiet": "0.2s"}, watch={"merge": "all"}, merge={"bases": [str(tmp_path / "models")]})
        journals = "state/merge/*/jobs/team/*/.merged-bf16.merge-*/journal.jsonl"
        with yard.daemon() as process:
            folder = builders.trainer_checkpoint(yard.runs / "team/run-1/checkpoint-5", step=5, ended=False)
            merging.wide_adapter(folder, base)
            builders.write_json(folder / "trainer_state.json", builders.trainer_state(5))
            until(lambda: list(tmp_path.glob(journals)), 40, "the first finished file", every=0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()
        finished = {
            json.loads(line)["path"] for path in tmp_path.glob(journals) for line in path.read_bytes().split(b"\n")[:-1]
        }
        with yard.daemon():
            done = yard.remote / "models/team-run-1-merged-bf16/v1/manifest.json"
            until(done.exists, 40, "the merged version")
            events = control.ask(str(yard.socket), "log", {"name": "team-run-1"})
        assert [e["event"] for e in events].count("merge made") == 1
        facts = committed(open_directory(str(yard.remote)), "team-run-1-merged-bf16", 1).facts
        (proven,) = [f for f in facts.findings if f.code == "merge-proven"]
        assert finished <= set(proven.data["kept_files"])
        assert len(yard.check()["committed"]) == 2
