"""Which folder is taken for an adapter's base, and what the merged version then states of it."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.merge import identity
from weighbridge.adapters.merge.base import source
from weighbridge.adapters.merge.preview import look
from weighbridge.daemon import bases
from weighbridge.registry import errors
from weighbridge.registry.flow import merged
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.flow.merged import Parent
from weighbridge.registry.remotes.directory import open_directory
from weighbridge.registry.types import BaseFacts
from weighbridge_testlib import builders
from weighbridge_testlib.merge_bench import BASE, MergeBench

COMMIT = "c" * 40
CONTENT = "sha256:" + "1" * 64


def found(bench: MergeBench, want: bases.Wanted, **more: Any) -> Path:
    """Return the folder that is taken for a base."""
    given: dict[str, Any] = {"folders": [bench.models], "caches": [], "scratch": bench.place / "scratch"} | more
    return bases.find(want, bench.homes.get("team"), **given).path


def stated(bench: MergeBench) -> BaseFacts:
    """Return what the merged version states of its base."""
    remote = open_directory(str(bench.place / "remote"))
    return committed(remote, "team-run-1-merged-bf16", 1).facts.base


@pytest.mark.parametrize("told", [None, "/home/me/tiny-base", BASE, BASE.upper()])
def test_a_folder_named_by_the_model_alone_is_taken_where_nothing_contradicts(tmp_path: Path, told: str | None) -> None:
    """`[merge] bases` may hold `model`; a config that tells no other model's name does not stand against it."""
    bench = MergeBench(tmp_path)
    folder = bench.base(bench.models / "tiny-base", **({} if told is None else {"_name_or_path": told}))
    assert found(bench, bases.Wanted(BASE)) == folder


def test_a_folder_that_says_it_is_another_model_is_passed_over(tmp_path: Path) -> None:
    """Two owners may give a model one name: the other's folder is not taken, and people are told why."""
    bench = MergeBench(tmp_path)
    bench.base(bench.models / "tiny-base", _name_or_path="somebody-else/tiny-base")
    with pytest.raises(errors.NotFinishedError, match=f"{BASE} is not here") as told:
        found(bench, bases.Wanted(BASE))
    assert "tiny-base says it is somebody-else/tiny-base" in str(told.value.why)
    right = bench.base(_name_or_path="somebody-else/started-from-this")  # a folder owner/model says enough
    assert found(bench, bases.Wanted(BASE)) == right


def test_a_name_without_an_owner_leaves_the_owner_open(tmp_path: Path) -> None:
    """`gpt2` is found in a folder whose config says `openai-community/gpt2`, not in one that is another model."""
    bench = MergeBench(tmp_path)
    folder = bench.base(bench.models / "gpt2", _name_or_path="openai-community/gpt2")
    assert found(bench, bases.Wanted("gpt2")) == folder
    bench.base(bench.models / "gpt2", _name_or_path="acme/gpt2-chat")
    with pytest.raises(errors.NotFinishedError):
        found(bench, bases.Wanted("gpt2"))


@pytest.mark.parametrize("place", ["bases", "cache", "root"])
def test_a_path_that_an_adapter_names_is_read_where_we_may_read(tmp_path: Path, place: str) -> None:
    """It must lie below `[merge] bases`, a Hub cache or a watched folder; links and `..` lead nowhere else."""
    bench = MergeBench(tmp_path)
    model = bench.base(tmp_path / "secret/tiny")
    allowed = tmp_path / place
    inside = bench.base(allowed / "deep/tiny")
    places: dict[str, list[Path]] = {"bases": [], "cache": [], "root": []} | {place: [allowed]}
    given = {"folders": places["bases"], "caches": places["cache"], "roots": places["root"]}
    assert found(bench, bases.Wanted(None, path=str(inside)), **given) == inside
    (allowed / "link").symlink_to(model)
    for path in (model, allowed / "link", f"{allowed}/../secret/tiny"):
        with pytest.raises(errors.NotFinishedError, match="is not read") as told:
            found(bench, bases.Wanted(None, path=str(path)), **given)
        assert "[merge] bases" in str(told.value.fix)


def test_an_adapter_that_names_a_folder_elsewhere_waits_with_words(tmp_path: Path) -> None:
    """The merge is not refused for ever: once the folder is one of `[merge] bases`, it goes on."""
    bench = MergeBench(tmp_path)
    base = bench.base(tmp_path / "elsewhere/tiny")
    bench.publish(bench.adapter(5, base=str(base)))
    (merge,) = bench.merge_all()
    assert (merge.state, merge.shown) == ("wanted", "waiting")
    assert f"the base {base} is not read" in (merge.reason or "")
    bench.settings = bench.settings._replace(bases=(str(tmp_path / "elsewhere"),))
    bench.restart()
    assert [m.state for m in bench.merge_all()] == ["done"]


def test_a_copy_of_a_published_base_mends_itself(tmp_path: Path) -> None:
    """A base that was pulled into our scratch and changed there is pulled again."""
    bench = MergeBench(tmp_path, merge="never")
    bench.publish(builders.trainer_checkpoint(bench.runs / "team/full/checkpoint-1", step=1, adapter=False))
    (content,) = bench.versions().values()
    want = bases.Wanted("acme/x", content=content)
    weights = found(bench, want, folders=[]) / "model.safetensors"
    right = weights.read_bytes()
    weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert (found(bench, want, folders=[]) / "model.safetensors").read_bytes() == right


def test_a_revision_that_nothing_proves_is_not_stated(tmp_path: Path) -> None:
    """A folder found by its name is not known to be at the revision the adapter records."""
    bench = MergeBench(tmp_path)
    bench.base()
    bench.publish(bench.adapter(5, revision=COMMIT))
    assert [m.state for m in bench.merge_all()] == ["done"]
    assert (stated(bench).id, stated(bench).revision) == (BASE, None)


def test_the_commit_of_a_hub_cache_is_stated(tmp_path: Path) -> None:
    """A snapshot is named after its commit: that one is stated, and it is the one the adapter records."""
    bench = MergeBench(tmp_path)
    cache = tmp_path / "cache"
    bench.base(cache / "models--example-org--tiny-base/snapshots" / COMMIT)
    bench.merging._caches = (cache,)
    bench.publish(bench.adapter(5, revision=COMMIT))
    assert [m.state for m in bench.merge_all()] == ["done"]
    assert (stated(bench).id, stated(bench).revision) == (BASE, COMMIT)


@pytest.mark.parametrize(("recorded", "proven"), [(CONTENT, True), ("sha256:" + "2" * 64, False), (None, False)])
def test_a_recorded_content_proves_the_revision_beside_it(tmp_path: Path, recorded: str | None, proven: bool) -> None:
    """Where the adapter's version recorded a content and the base has it, the revision recorded with it holds."""
    base = builders.llama_model(tmp_path / "base")
    adapter = builders.lora_adapter(tmp_path / "adapter", revision=COMMIT)
    ours = Parent(ref="a@v1", content=CONTENT, base=BaseFacts(id=BASE, revision=COMMIT, content=recorded))
    told = merged.revision_of(look([adapter], base, weigh=False), ours, Parent(ref=BASE, content=CONTENT))
    assert told == (COMMIT if proven else None)


def test_the_record_of_a_merge_takes_no_memory_for_the_adapter(tmp_path: Path) -> None:
    """The digest of an adapter's weights in merge.json is that of the file, which is never in memory as a whole."""
    size = 64 << 20
    file = tmp_path / "adapter_model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(size)
    tracemalloc.start()
    try:
        digest = identity.hashed(identity.Weights(source(file))).sha256
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert digest == "3b6a07d0d404fab4e23b6d34bc6696a6a312dd92821332385e5af7c01c421351"
    assert peak < size / 8


def test_an_adapter_that_names_no_base_is_blocked_with_words(tmp_path: Path) -> None:
    """Waiting would never end: the version says no more tomorrow. It is set aside, and told what to do instead."""
    bench = MergeBench(tmp_path)
    bench.publish(bench.adapter(5, base=None, readme=builders.card(None, "apache-2.0")))
    (merge,) = bench.merge_all()
    assert merge.state == "blocked"
    (told,) = merge.findings_list
    assert "does not say which base" in told.message
    assert "registry merge --base" in str(told.fix)
