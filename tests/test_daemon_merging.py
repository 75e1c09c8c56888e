"""The rule `merge`: what it chooses, what a merge waits for, and what becomes of it, without the daemon's threads."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from weighbridge.adapters.merge import batch
from weighbridge.config.settings import WatchRule
from weighbridge.daemon import bases, policy, report
from weighbridge.daemon.policy import Item
from weighbridge.registry import errors, layout
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.types import BaseFacts
from weighbridge_testlib import builders, merging
from weighbridge_testlib.merge_bench import BASE, MergeBench

RULE = WatchRule("/runs")


def problems(bench: MergeBench) -> list[dict[str, object]]:
    """Return what `status` says of merges that do not go on."""
    return [problem for merge in bench.merges.merges() for problem in report._merge_problems(merge)]


@pytest.mark.parametrize(
    ("word", "best", "chosen"),
    [
        ("never", None, []),
        ("all", None, [10, 20, 30]),
        ("last", None, [30]),
        ("best", "eval_loss:min", [20]),
        ("best", "eval_loss:max", [10]),
        ("best", None, [20]),
    ],
)
def test_a_rule_chooses_by_its_word(word: str, best: str | None, chosen: list[int]) -> None:
    """`all` takes every adapter, `last` the newest, `best` the best by the rule's metric or the trainer's word."""
    losses = {10: 0.9, 20: 0.2, 30: 0.5}
    run = [Item(f"c-{step}", "adapter", step, 1, loss, step == 20) for step, loss in losses.items()]
    rule = RULE._replace(merge=word, best=best)
    found = [one.step for one in run if policy.merges(one, [o for o in run if o is not one], rule)]
    assert found == chosen
    assert not policy.merges(Item("m", "model", 40, 1), [], RULE._replace(merge="all"))


def test_an_adapter_becomes_a_merged_version_with_its_lineage(tmp_path: Path) -> None:
    """The result is published under the adapter's name and its precision, by the ordinary steps, and can be traced."""
    bench = MergeBench(tmp_path)
    base = bench.base()
    bench.publish(bench.adapter(5))
    (done,) = bench.merge_all()
    assert (done.state, done.merged_name, done.merged_n) == ("done", "team-run-1-merged-bf16", 1)
    versions = bench.versions()
    assert set(versions) == {"team-run-1@v1", "team-run-1-merged-bf16@v1"}
    facts = committed(open_directory(str(tmp_path / "remote")), "team-run-1-merged-bf16", 1).facts
    assert facts.kind == "merged"
    assert [(edge.relation, edge.ref) for edge in facts.lineage] == [
        ("merged-from", "team-run-1@v1"),
        ("merged-from", BASE),
    ]
    assert facts.lineage[0].content == versions["team-run-1@v1"]
    assert (facts.provenance.step, facts.provenance.run.name) == (5, "run-1")
    assert "merge-proven" in [finding.code for finding in facts.findings]
    assert bench.claim("team-run-1-merged-bf16")["derivation"] == done.derivation
    assert bench.claim("team-run-1").get("derivation") is None
    ours, theirs = merging.numbers(tmp_path / "remote/models/team-run-1-merged-bf16/v1"), merging.numbers(base)
    moved = {name for name, values in ours.items() if (values != theirs[name]).any()}
    assert moved == {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(2) for p in "qv"}
    assert not list((tmp_path / "scratch").glob("jobs/*/*"))
    events = [one["event"] for one in bench.store.events("team-run-1")]
    assert events[-4:] == ["merge wanted", "merge begun", "merge made", "merge done"]


def test_a_base_that_is_not_here_is_waited_for_and_named(tmp_path: Path) -> None:
    """Nothing is fetched: the merge waits, `status` says which base and what to do, and it goes on when it is there."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    (merge,) = bench.merge_all()
    assert (merge.state, merge.shown) == ("wanted", "waiting")
    (told,) = problems(bench)
    assert told["code"] == "merge-waits"
    assert f"the base {BASE} is not here" in str(told["message"])
    assert str(bench.models) in str(told["message"])
    assert f"hf download {BASE}" in str(told["fix"])
    bench.base()
    (merge,) = bench.merge_all()
    assert merge.state == "done"
    assert problems(bench) == []


def test_the_newest_takes_the_place_of_what_has_not_begun(tmp_path: Path) -> None:
    """Under `last` a merge that only waits gives way to that of a later checkpoint, and only that one is made."""
    bench = MergeBench(tmp_path, merge="last")
    bench.publish(bench.adapter(10, seed=1))
    bench.publish(bench.adapter(20, seed=2))
    assert [(m.step, m.state) for m in bench.merges.merges()] == [(10, "superseded"), (20, "wanted")]
    bench.publish(bench.adapter(15, seed=3))
    (last,) = [event for event in bench.store.events(name="team-run-1") if event["event"] == "not merged"]
    assert (last["n"], "its run has a later checkpoint" in last["detail"]) == (3, True)
    bench.base()
    bench.merge_all()
    facts = committed(open_directory(str(tmp_path / "remote")), "team-run-1-merged-bf16", 1).facts
    assert facts.provenance.step == 20
    assert len([v for v in bench.versions() if "merged" in v]) == 1


def test_two_daemons_make_one_merged_version(tmp_path: Path) -> None:
    """A daemon that lost its memory, or another one, finds the first result by what it was made from."""
    bench = MergeBench(tmp_path)
    bench.base()
    folder = bench.adapter(5)
    bench.publish(folder)
    bench.merge_all()
    before = bench.versions()
    bench.catalog.close()
    for part in bench.state.glob("weighbridge.db*"):
        part.unlink()
    bench.open()
    bench.publish(folder)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_n, merge.tries) == ("done", 1, 0)
    assert bench.store.events("team-run-1")[-1]["event"] == "merge joined"
    assert bench.versions() == before


def test_what_was_merged_twice_is_published_once(tmp_path: Path) -> None:
    """Two that merged at the same time meet at the claim: the derivation in it joins results that differ in a bit."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = MergeBench(tmp_path / "a"), MergeBench(tmp_path / "b", share=True)
    second.settings, second.remotes = first.settings, first.remotes
    second.restart()
    first.base()
    first.publish(first.adapter(5))
    second.publish(second.adapter(5))
    for bench in (first, second):  # both merge before either claims
        bench.round()
        bench.round()
        assert [m.state for m in bench.merges.merges()] == ["publishing"]
    (weights,) = (tmp_path / "b/scratch").glob("jobs/*/*/merged-bf16/model.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    record = weights.with_name("merge.json")  # as if it had been merged and proven with this rounding
    told = json.loads(record.read_bytes())
    told["files"][weights.name]["sha256"] = hashlib.sha256(raw).hexdigest()
    record.write_text(json.dumps(told))
    first.merge_all()
    (merge,) = second.merge_all()
    assert (merge.state, merge.merged_n) == ("done", 1)
    assert sorted(first.versions()) == ["team-run-1-merged-bf16@v1", "team-run-1@v1"]


def test_a_refused_merge_is_told_with_its_reason_and_can_be_tried_again(tmp_path: Path) -> None:
    """A base of other shapes refuses the merge; once it is the right one, a retry makes the version."""
    bench = MergeBench(tmp_path)
    base = bench.base()
    builders.llama_model(base, tensors={"model.embed_tokens.weight": ("BF16", (8, 8), 0.0)})
    bench.publish(bench.adapter(5))
    (merge,) = bench.merge_all()
    assert merge.state == "blocked"
    (told,) = problems(bench)
    assert (told["state"], told["severity"]) == ("blocked", "block")
    shutil.rmtree(base)
    bench.base()
    assert [m.state for m in bench.merging.retry("team-run-1@v1")] == ["wanted"]
    (merge,) = bench.merge_all()
    assert merge.state == "done"


def test_a_result_that_fails_its_proof_is_set_apart(tmp_path: Path) -> None:
    """What a child proved wrong is quarantined: nothing is published, the bytes stay for whoever looks."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    (merge,) = bench.merges.merges()
    result = Path(merge.stage or "") / batch.RESULT
    told = json.loads(result.read_bytes())
    told["result"]["proof"] |= {"passed": False, "bound_violations": 3, "failures": ["model.norm.weight"]}
    result.write_text(json.dumps(told))
    (merge,) = bench.merge_all()
    assert merge.state == "quarantined"
    assert [p["code"] for p in problems(bench)] == ["merge-unproven"]
    assert set(bench.versions()) == {"team-run-1@v1"}
    assert list((tmp_path / "scratch").glob("jobs/team/*/.*-failed/model.safetensors"))


@pytest.mark.parametrize(
    "error",
    [
        errors.DiskFullError("no room", why="3 bytes are free"),
        errors.SourceChangedError("the base changed while it was merged"),
        errors.WeighbridgeError("the child process did not finish", why="it was ended by SIGKILL"),
        errors.MemoryShortError("the work ran out of memory", why="3 bytes are free"),
    ],
)
def test_a_try_that_failed_for_a_passing_reason_is_followed_by_another(
    tmp_path: Path, error: errors.WeighbridgeError
) -> None:
    """A full disk or memory, a base that was being written, a killed child: the next try makes it, each one is told."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    (merge,) = bench.merges.merges()
    result = Path(merge.stage or "") / batch.RESULT
    told = json.loads(result.read_bytes()) | {"result": None, "error": errors.describe(error)}
    result.write_text(json.dumps(told))
    bench.waited += 1e6
    bench.merging.round()
    (merge,) = bench.merges.merges()
    assert error.what in (merge.reason or "")
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries) == ("done", 2)


def test_a_merge_that_gets_nowhere_waits_for_somebody(tmp_path: Path) -> None:
    """Three tries in a row that finished no file block the merge, with the reason of the last one."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    for _ in range(3):
        bench.round()
        (merge,) = bench.merges.merges()
        stage = Path(merge.stage or "")
        error = errors.describe(errors.MemoryShortError("out of memory", why="it needs more"))
        told = json.loads((stage / batch.RESULT).read_bytes()) | {"result": None, "error": error}
        (stage / batch.RESULT).write_text(json.dumps(told))
        (stage / "journal.jsonl").unlink()
        bench.waited += 1e6
        bench.merging.round()
    (merge,) = bench.merges.merges()
    assert (merge.state, merge.tries) == ("blocked", 3)
    (told,) = problems(bench)
    assert "out of memory" in str(told["message"])
    assert "MemoryMax" in str(told["fix"])
    assert "--retry team-run-1@v1" in str(told["fix"])


def test_bytes_that_changed_after_their_proof_are_not_published(tmp_path: Path) -> None:
    """A bit that flips between the proof and the copy that is published is noticed, and the merge is made again."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.round()
    bench.round()
    (weights,) = (tmp_path / "scratch").glob("jobs/*/*/merged-bf16/model.safetensors")
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    (merge,) = bench.merge_all()
    assert (merge.state, merge.tries) == ("done", 2)
    published = tmp_path / "remote/models/team-run-1-merged-bf16/v1/model.safetensors"
    raw[-1] ^= 1
    assert published.read_bytes() == bytes(raw)


@pytest.mark.parametrize(("retry", "name"), [("fp32", "fp32"), ("never", "bf16")])
def test_an_update_that_bf16_cannot_hold_is_merged_in_fp32_when_the_rule_says_so(
    tmp_path: Path, retry: str, name: str
) -> None:
    """merge_retry = "fp32" makes it again in fp32; without it the bf16 result goes out with its warning."""
    bench = MergeBench(tmp_path, merge_retry=retry)
    bench.base()
    bench.publish(bench.adapter(5, alpha=0.03))
    (merge,) = bench.merge_all()
    assert (merge.state, merge.merged_name) == ("done", f"team-run-1-merged-{name}")
    facts = committed(open_directory(str(tmp_path / "remote")), f"team-run-1-merged-{name}", 1).facts
    assert ("merge-update-lost" in [f.code for f in facts.findings]) == (retry == "never")
    assert len(bench.versions()) == 2


def test_a_base_named_by_a_path_is_taken_from_there(tmp_path: Path) -> None:
    """Where the adapter's own config names a folder, that is the base, and no path of it is published."""
    bench = MergeBench(tmp_path)
    base = bench.base(bench.runs / "bases/tiny")
    bench.publish(bench.adapter(5, base=str(base)))
    (merge,) = bench.merge_all()
    assert merge.state == "done"
    facts = committed(open_directory(str(tmp_path / "remote")), "team-run-1-merged-bf16", 1).facts
    assert str(tmp_path) not in json.dumps([edge.ref for edge in facts.lineage])


def test_a_base_that_was_published_is_pulled_by_its_content(tmp_path: Path) -> None:
    """A recorded content digest finds the version of the home registry that has it, and never another one."""
    bench = MergeBench(tmp_path, merge="never")
    folder = builders.trainer_checkpoint(bench.runs / "team/full/checkpoint-1", step=1, adapter=False)
    bench.publish(folder)
    ((ref, content),) = bench.versions().items()
    home = bench.homes.get("team")
    given = bases.wanted(BaseFacts(id="acme/x", content=content))
    found = bases.find(given, home, folders=[], caches=[], scratch=tmp_path / "scratch")
    assert (found.ref, found.content) == (ref, content)
    assert (found.path / "config.json").is_file()
    other = bases.wanted(BaseFacts(id="acme/x", content="sha256:" + "0" * 64))
    with pytest.raises(errors.NotFinishedError, match="acme/x is not here"):
        bases.find(other, home, folders=[], caches=[], scratch=tmp_path / "scratch")


def test_a_base_in_the_hub_cache_is_that_of_the_recorded_revision(tmp_path: Path) -> None:
    """The cache is asked for the commit the adapter records; another commit of the same model is not taken."""
    bench = MergeBench(tmp_path)
    commit = "a" * 40
    cache = tmp_path / "cache"
    builders.llama_model(cache / "models--acme--tiny/snapshots" / commit)
    home = bench.homes.get("team")
    found = bases.find(
        bases.wanted(BaseFacts(id="acme/tiny", revision=commit)), home, folders=[], caches=[cache], scratch=tmp_path
    )
    assert found.path.name == commit
    other = bases.wanted(BaseFacts(id="acme/tiny", revision="b" * 40))
    with pytest.raises(errors.NotFinishedError, match="acme/tiny at bbbb"):
        bases.find(other, home, folders=[], caches=[cache], scratch=tmp_path)


def test_a_cancelled_merge_stays_cancelled_until_it_is_asked_for(tmp_path: Path) -> None:
    """Cancelling gives a merge up; only a retry takes it up again."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    assert [m.state for m in bench.merging.cancel("team-run-1@v1")] == ["cancelled"]
    bench.base()
    assert [m.state for m in bench.merge_all()] == ["cancelled"]
    bench.merging.retry("team-run-1@v1")
    assert [m.state for m in bench.merge_all()] == ["done"]
    with pytest.raises(errors.NotFoundError):
        bench.merging.cancel("nobody@v1")


def test_an_adapter_that_was_withdrawn_is_not_merged(tmp_path: Path) -> None:
    """What was taken back before its merge began has none."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    bench.base()
    place = tmp_path / "remote" / layout.withdrawn("team-run-1", 1)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text('{"reason": "leak"}')
    (merge,) = bench.merge_all()
    assert merge.state == "superseded"
    assert "withdrawn" in (merge.reason or "")


def test_a_base_is_hashed_once_until_it_changes(tmp_path: Path) -> None:
    """Its content is kept under a stamp of its files; another stamp is worked out anew."""
    bench = MergeBench(tmp_path)
    worked = []

    def work_out() -> str:
        worked.append(1)
        return f"sha256:{len(worked)}"

    assert bench.merges.content_of("/b", "one", work_out) == "sha256:1"
    assert bench.merges.content_of("/b", "one", work_out) == "sha256:1"
    assert bench.merges.content_of("/b", "two", work_out) == "sha256:2"
    bench.restart()
    assert bench.merges.content_of("/b", "two", work_out) == "sha256:2"


def test_a_disk_that_would_fall_under_its_reserve_is_left_alone(tmp_path: Path) -> None:
    """The merge waits with the figures, before it writes anything."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5))
    bench.merging._reserve = 1 << 60
    (merge,) = bench.merge_all()
    assert (merge.shown, merge.tries) == ("waiting", 0)
    assert f"{1 << 60} stay free" in (merge.reason or "")
    assert not list((tmp_path / "scratch").glob("jobs/*/*/.merged*"))
    bench.merging._reserve = 0
    assert [m.state for m in bench.merge_all()] == ["done"]


def test_sweeping_keeps_what_somebody_may_go_on_with(tmp_path: Path) -> None:
    """Folders of merges under way and of tries we forgot stay; what was given up long ago goes."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5))
    bench.round()
    (merge,) = bench.merges.merges()
    own, strange = (tmp_path / "scratch/jobs/team" / name for name in (merge.ref, "other@v1"))
    strange.mkdir()
    assert own.is_dir()
    bench.waited = 0.0
    bench.merging.sweep()
    assert own.is_dir()
    assert strange.is_dir()
    bench.merging.cancel(merge.ref)
    bench.waited = 3 * 86_400.0
    bench.merging.sweep()
    assert not own.exists()
    assert not strange.exists()


def test_a_merged_model_that_may_not_be_published_says_so(tmp_path: Path) -> None:
    """The base's licence holds for the result: where it is denied, the merge is made, and its job is blocked."""
    bench = MergeBench(tmp_path)
    bench.base(readme=builders.card(license_id="cc-by-nc-4.0"))
    bench.publish(bench.adapter(5))
    bench.remotes["team"] = bench.remotes["team"]._replace(deny_licenses=("cc-by-nc-4.0",))
    bench.restart()
    (merge,) = bench.merge_all()
    assert merge.state == "publishing"
    assert "its publication is blocked" in (merge.reason or "")
    assert set(bench.versions()) == {"team-run-1@v1"}
