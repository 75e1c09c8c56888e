"""The Slurm executor on a machine without Slurm: it says so, and makes nothing twice."""

from pathlib import Path

import pytest

from weighbridge.config.settings import SlurmSettings
from weighbridge.daemon import report
from weighbridge.daemon.executors.protocol import Executor, Unknown, Work
from weighbridge.daemon.executors.slurm import SlurmExecutor
from weighbridge.registry import errors
from weighbridge_testlib.merge_bench import MergeBench

WORK = Work(key="k-1", stage="/nowhere", memory=1)


class Nowhere(MergeBench):
    """A bench whose merges are to be jobs, on a machine that has no Slurm."""

    def more_executors(self) -> dict[str, Executor]:
        """Return Slurm's executor with nothing on its PATH."""
        self.settings = self.settings._replace(executor=self.where)
        return {"slurm": SlurmExecutor(SlurmSettings(), {"PATH": str(self.place / "empty")})}

    where = "slurm"


def test_without_its_programs_nothing_is_known_and_nothing_is_submitted(tmp_path: Path) -> None:
    """Looking tells that there is no Slurm here, with a cure; submitting is an error of the same words."""
    executor = SlurmExecutor(SlurmSettings(), {"PATH": str(tmp_path)})
    seen = executor.look(WORK)
    assert isinstance(seen, Unknown)
    assert "there is no Slurm on this machine" in seen.why
    assert 'executor = "local"' in (seen.fix or "")
    with pytest.raises(errors.UnreachableError, match="there is no Slurm"):
        executor.submit(WORK)
    with pytest.raises(errors.UnreachableError, match="there is no Slurm"):
        executor.cancel(WORK)


def test_a_merge_waits_for_slurm_and_is_made_here_when_the_rule_changes(tmp_path: Path) -> None:
    """Status explains the wait; with executor = "local" the same merge is made on this machine, once."""
    bench = Nowhere(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    (merge,) = bench.merges.merges()
    assert (merge.state, merge.shown, merge.executor) == ("submitting", "waiting", "slurm")
    (told,) = report._merge_problems(merge)
    assert "there is no Slurm on this machine" in told["message"]
    assert 'executor = "local"' in told["fix"]
    bench.where = "local"
    bench.restart()
    (merge,) = bench.merge_all()
    assert (merge.state, merge.executor, merge.merged_n) == ("done", "local", 1)


def test_what_may_have_been_submitted_is_not_made_twice(tmp_path: Path) -> None:
    """After an sbatch without an answer only Slurm can tell: until it does, the merge is not made elsewhere."""
    bench = Nowhere(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    (merge,) = bench.merges.merges()
    bench.merges.advance(merge, submitted_at=1.0)
    bench.where = "local"
    bench.restart()
    (merge,) = bench.merge_all(4)
    assert (merge.state, merge.executor) == ("submitting", "slurm")
    assert [version for version in bench.versions() if "merged" in version] == []
