"""Merges that are tried again: after a failed proof, after something changed, after a death, when somebody asks."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weighbridge.adapters.merge import batch
from weighbridge.daemon.executors.local import HANDLE, LocalExecutor
from weighbridge.daemon.executors.protocol import Executor, Work
from weighbridge.daemon.mergestore import Merge
from weighbridge.daemon.session import allow
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.stage import Bundle
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders
from weighbridge_testlib.bench import dying
from weighbridge_testlib.merge_bench import DyingStore, MergeBench

REF = "team-run-1@v1"
NAME = "team-run-1-merged-bf16"


def touched(folder: Path) -> None:
    """Make every file of a folder younger; its bytes stay."""
    for path in folder.iterdir():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def publishing(bench: MergeBench) -> Merge:
    """Carry the only merge on until its result waits to be published."""
    bench.round()
    bench.round()
    (merge,) = bench.merges.merges()
    assert merge.state == "publishing"
    return merge


def unproven(merge: Merge) -> None:
    """Let the answer of a try say that its result failed the proof."""
    path = Path(merge.stage or "") / batch.RESULT
    told = msgspec.json.decode(path.read_bytes())
    told["result"]["proof"] |= {"passed": False, "bound_violations": 3, "failures": ["model.norm.weight"]}
    path.write_bytes(msgspec.json.encode(told))


def test_a_quarantined_merge_that_is_tried_again_is_made_anew(tmp_path: Path) -> None:
    """The answer of what was set apart counts no more: a retry runs, and its result is published."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    unproven(*bench.merges.merges())
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries) == ("quarantined", 1)
    bench.merging.retry(REF)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries, merge.merged_n) == ("done", 2, 1)


def test_a_merge_that_changes_nothing_says_so_again(tmp_path: Path) -> None:
    """Another try of a merge without an effect is refused with the same words, after it was made again."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5, alpha=1e-30))
    (merge,) = bench.merge_all()
    assert [f.code for f in merge.findings_list] == ["merge-changes-nothing"]
    bench.merging.retry(REF)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries) == ("blocked", 2)
    assert [f.code for f in merge.findings_list] == ["merge-changes-nothing"]


def test_a_base_that_was_written_before_publication_is_merged_again(tmp_path: Path) -> None:
    """What stands in our scratch is of another plan then: it is removed and made again, and nobody is asked."""
    bench = MergeBench(tmp_path)
    base = bench.base()
    bench.publish(bench.adapter(5))
    publishing(bench)
    touched(base)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries, merge.merged_n) == ("done", 2, 1)


def test_a_base_that_was_written_while_the_daemon_was_dead_is_merged_again(tmp_path: Path) -> None:
    """The same where the result had its folder and nothing was written down of it."""
    bench = MergeBench(tmp_path)
    base = bench.base()
    bench.publish(bench.adapter(5))
    store = DyingStore(bench.catalog)
    store.fatal = ("publishing", False)
    bench.merging._store = store
    with dying(bench) as died:
        bench.merge_all()
    assert died
    assert [m.state for m in bench.merges.merges()] == ["merged"]
    touched(base)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries, merge.merged_n) == ("done", 2, 1)


def test_an_adapter_that_changed_in_our_scratch_is_pulled_again(tmp_path: Path) -> None:
    """A bit that flips in the pulled copy mends itself: the published adapter is what is merged."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    copy = tmp_path / f"scratch/jobs/team/{REF}/adapter/adapter_model.safetensors"
    raw = bytearray(copy.read_bytes())
    raw[-1] ^= 1
    copy.write_bytes(raw)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_n) == ("done", 1)


class Endless(LocalExecutor):
    """Begins tries that never end; a fresh one has forgotten them, as a daemon that was started again has."""

    def room(self) -> bool:
        """Tell that another one may be submitted."""
        return True

    def submit(self, work: Work) -> str:
        """Take a try on."""
        self._key = work.key
        return HANDLE


class EndlessBench(MergeBench):
    """A bench whose merges never end."""

    def more_executors(self) -> dict[str, Executor]:
        """Return the local executor of the bench."""
        return {"local": Endless()}


def test_a_merge_that_the_daemon_does_not_survive_is_set_apart(tmp_path: Path) -> None:
    """Three deaths in a row within the same merge, without a finished file, block it with words and a cure."""
    bench = EndlessBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    seen = []
    for _ in range(8):
        bench.round()
        bench.restart()
        seen.append(bench.merges.merges()[0].state)
    (merge,) = bench.merges.merges()
    assert (merge.state, merge.tries) == ("blocked", 3), seen
    (found,) = merge.findings_list
    assert "the daemon died while it was made" in found.message
    assert "MemoryMax" in (found.fix or "")
    assert f"registryd merges --retry {REF}" in (found.fix or "")


def test_a_daemon_that_is_stopped_does_not_count_against_a_merge(tmp_path: Path) -> None:
    """However often it is stopped and started on purpose, the merge is begun again."""
    bench = EndlessBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    for _ in range(6):
        bench.round()
        bench.merging.stop(1.0)
        bench.restart()
    bench.round()
    (merge,) = bench.merges.merges()
    assert (merge.state, merge.barren) == ("running", 0)
    assert merge.tries >= 3


def denied(bench: MergeBench, *licenses: str) -> None:
    """Start again with a remote that denies licences."""
    bench.remotes["team"] = bench.remotes["team"]._replace(deny_licenses=licenses)
    bench.restart()


def blocked(tmp_path: Path) -> MergeBench:
    """Return a bench whose merge was made and whose publication is blocked."""
    bench = MergeBench(tmp_path)
    bench.base(readme=builders.card(license_id="cc-by-nc-4.0"))
    bench.publish(bench.adapter(5))
    denied(bench, "cc-by-nc-4.0")
    (merge,) = bench.merge_all()
    assert merge.state == "publishing"
    return bench


def job_of(bench: MergeBench) -> Any:
    """Return the job that publishes the merge."""
    (merge,) = bench.merges.merges()
    job = bench.store.job(merge.job or 0)
    assert job is not None
    return job


def test_a_merge_whose_publication_is_blocked_can_be_cancelled(tmp_path: Path) -> None:
    """Cancelling ends its job, too; taken up again later, the result that stands is published, not made again."""
    bench = blocked(tmp_path)
    assert [m.state for m in bench.merging.cancel(REF)] == ["cancelled"]
    assert job_of(bench).state == "superseded"
    assert [m.state for m in bench.merge_all()] == ["cancelled"]
    denied(bench)
    bench.merging.retry(REF)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries, merge.merged_n) == ("done", 1, 1)
    assert bench.merging.cancel(REF) == []


def test_a_merge_whose_publication_is_blocked_can_be_tried_again(tmp_path: Path) -> None:
    """Once the cause is gone, a retry of the merge carries its job on."""
    bench = blocked(tmp_path)
    denied(bench)
    bench.merging.retry(REF)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries, merge.merged_n) == ("done", 1, 1)


def test_a_merge_that_was_made_and_has_no_job_yet_can_be_cancelled(tmp_path: Path) -> None:
    """Between the result and its publication, cancelling works as before."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    store = DyingStore(bench.catalog)
    store.fatal = ("publishing", False)
    bench.merging._store = store
    with dying(bench):
        bench.merge_all()
    assert [m.state for m in bench.merging.cancel(REF)] == ["cancelled"]
    assert [m.state for m in bench.merge_all()] == ["cancelled"]


def test_cancelling_removes_the_copy_that_was_staged(tmp_path: Path) -> None:
    """A merged model that was staged and not published leaves nothing beside the remote's versions."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    publishing(bench)
    job = bench.runner.run(job_of(bench), upto="sealed")
    assert job is not None
    place = Path(msgspec.json.decode((job.bundle or "").encode(), type=Bundle).place or "")
    assert (place / "model.safetensors").is_file()
    assert [m.state for m in bench.merging.cancel(REF)] == ["cancelled"]
    assert not place.exists()
    assert set(bench.versions()) == {REF}


def test_a_version_that_is_out_is_not_cancelled(tmp_path: Path) -> None:
    """A merge whose job has published is past cancelling: it becomes done."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    publishing(bench)
    bench.work()
    assert bench.merging.cancel(REF) == []
    assert [m.state for m in bench.merge_all()] == ["done"]


def test_what_blocks_a_merged_model_can_be_allowed(tmp_path: Path) -> None:
    """The fix names the command that allows it, and that command carries the publication on."""
    bench = blocked(tmp_path)
    job = job_of(bench)
    (found,) = job.findings_list
    assert f"registry allow {job.path} --code {found.code}" in (found.fix or "")
    assert allow(bench.store, job.path, found.code, "bought", who="me")["retried"] == 1
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_n) == ("done", 1)


@pytest.mark.parametrize("zero", [False, True])
def test_what_the_staged_values_tell_reaches_the_manifest(tmp_path: Path, zero: bool) -> None:
    """A merged model's matrix of zeros stands in its manifest, as it does for any other version."""
    bench = MergeBench(tmp_path)
    tensors = builders.llama_tensors()
    name = "model.layers.0.mlp.down_proj.weight"
    if zero:
        dtype, shape, _ = tensors[name]
        tensors[name] = (dtype, shape, 0.0)
    bench.base(tensors=tensors)
    bench.publish(bench.adapter(5))
    (merge,) = bench.merge_all()
    assert merge.state == "done"
    facts = committed(open_directory(str(tmp_path / "remote")), NAME, 1).facts
    told = [f.data["zero_tensors"] for f in facts.findings if f.code == "values-zero"]
    assert told == ([[name]] if zero else [])
