"""Bases that a rule lets the daemon fetch from the Hub: the exact commit, verified, within bounds; else it waits."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters import license as licences
from weighbridge.daemon import merge_scratch
from weighbridge.registry import disk, errors
from weighbridge.registry.flow import hub_base
from weighbridge.registry.remotes.commits import Held
from weighbridge.registry.remotes.hub.models import Models, of_environ
from weighbridge_testlib import builders
from weighbridge_testlib.hub import Fault, TestHub, serve
from weighbridge_testlib.hub.rig import environ, model
from weighbridge_testlib.hub.store import git_oid
from weighbridge_testlib.merge_bench import MergeBench

REPO = "acme/Tiny-Base"
ROOM = 1 << 30


@pytest.fixture(scope="module")
def hub() -> Iterator[TestHub]:
    """Run a Hub."""
    with serve() as running:
        yield running


@pytest.fixture
def base(hub: TestHub, tmp_path: Path) -> tuple[Path, str]:
    """Return a base as a folder, and its commit on the Hub."""
    hub.faults.clear()
    folder = builders.llama_model(tmp_path / "base", readme=builders.card(license_id="apache-2.0"), shards=2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "notes.pdf"):
        (folder / name).write_bytes(b"not wanted")
    return folder, model(hub, REPO, folder)


def models(hub: TestHub, home: Path, token: str | None = "hf_eve", **more: str) -> Models:
    """Return the Hub as a user sees it, by default one that is no member of the organisation."""
    found = of_environ(environ(hub, home, token=token, **more))
    found.line.sleep = lambda _seconds: None
    return found


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_exact_commit_arrives_as_a_snapshot_of_our_own(
    hub: TestHub, base: tuple[Path, str], tmp_path: Path
) -> None:
    """Weights, index, configs, tokenizer and card of the commit that was recorded come, byte for byte, and once."""
    folder, commit = base
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "config.json").write_text("{}")
    model(hub, REPO, tmp_path / "later")
    cache = tmp_path / "cache"
    place = hub_base.fetch(models(hub, tmp_path), REPO, commit, cache, limit=ROOM)
    assert place == cache / "models--acme--Tiny-Base" / "snapshots" / commit
    wanted = {name: raw for name, raw in files(folder).items() if raw != b"not wanted"}
    assert files(place) == wanted
    hub.store.repos[("model", REPO.lower())].disabled = True
    try:
        assert hub_base.fetch(models(hub, tmp_path), REPO, commit, cache, limit=ROOM) == place
    finally:
        hub.store.repos[("model", REPO.lower())].disabled = False


def test_a_branch_is_asked_for_its_commit_and_noted(hub: TestHub, base: tuple[Path, str], tmp_path: Path) -> None:
    """Without a recorded revision it is the commit that main stands at now, and the cache knows it by that name."""
    _, commit = base
    place = hub_base.fetch(models(hub, tmp_path), REPO, None, tmp_path / "cache", limit=ROOM)
    assert place.name == commit
    assert (place.parent.parent / "refs" / "main").read_text() == commit


def test_what_was_cut_is_gone_on_with(hub: TestHub, base: tuple[Path, str], tmp_path: Path) -> None:
    """A connection that breaks costs no byte that came, and a bit that flipped on the way is never kept."""
    folder, commit = base
    cache = tmp_path / "cache"
    hub.faults.add(Fault("resolve", "cut-body", skip=2), Fault("resolve", "flip", skip=3))
    for _ in range(2):
        with pytest.raises(errors.NotFinishedError, match="cannot be fetched"):
            hub_base.fetch(models(hub, tmp_path), REPO, commit, cache, limit=ROOM)
        assert not (cache / "models--acme--Tiny-Base" / "snapshots" / commit).exists()
    place = hub_base.fetch(models(hub, tmp_path), REPO, commit, cache, limit=ROOM)
    assert {name: raw for name, raw in files(folder).items() if raw != b"not wanted"} == files(place)
    assert len(hub.faults.met) == 2


@pytest.mark.parametrize(
    ("repo", "more", "words"),
    [
        ("acme/nothing", {}, "cannot look at acme/nothing"),
        (REPO, {"HF_HUB_OFFLINE": "1"}, "offline"),
        ("acme/gated", {}, "gated"),
    ],
)
def test_what_cannot_be_had_is_told(
    hub: TestHub, base: tuple[Path, str], tmp_path: Path, *, repo: str, more: Mapping[str, str], words: str
) -> None:
    """A model that is not there, a Hub that may not be asked, one that asks for a licence: why, and what to do."""
    if repo == "acme/gated":
        model(hub, repo, base[0])
        hub.store.get(repo).gated = "manual"
    with pytest.raises(errors.NotFinishedError) as caught:
        hub_base.fetch(models(hub, tmp_path, **more), repo, None, tmp_path / "cache", limit=ROOM)
    assert words in f"{caught.value.what} {caught.value.why}"
    assert caught.value.fix


class Shelf:
    """A Hub without a network: every model has one file of as many bytes as its commit says."""

    def commit(self, repo: str, revision: str | None) -> str:
        """Return a commit that names the repository."""
        return str(revision or repo.encode().hex().ljust(40, "0")[:40])

    def tree(self, repo: str, _commit: str) -> list[Held]:
        """Return one file."""
        name = "pytorch_model.bin" if repo == "a/pickle" else "model.safetensors"
        return [Held(path=name, size=100, sha256=None, blob=git_oid(bytes(100)))]

    def fetch(self, _repo: str, _commit: str, _path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes."""
        yield bytes(100)[offset:]


def test_the_cache_keeps_to_its_bound(tmp_path: Path) -> None:
    """The longest unused base goes for a new one, one in use stays, and what can never fit is told with the figures."""
    held: Any = Shelf()
    cache = tmp_path / "cache"
    first, second = (hub_base.fetch(held, repo, None, cache, limit=250) for repo in ("a/one", "a/two"))
    for place, day in ((first, 1), (second, 2)):
        os.utime(place, (day, day))
    link = tmp_path / "link"
    link.symlink_to(cache)
    hub_base.use(cache, link / first.relative_to(cache))  # somebody who found it in the cache merges into it
    hub_base.use(cache, tmp_path)  # a base that lies elsewhere is nobody's to touch
    third = hub_base.fetch(held, "a/three", None, cache, limit=250)
    assert [first.exists(), second.exists(), third.exists()] == [True, False, True]
    with pytest.raises(errors.NotFinishedError) as caught:
        hub_base.fetch(held, "a/four", None, cache, limit=250, used={link / first.relative_to(cache), third})
    assert "200" in str(caught.value.why)
    for limit, kind in ((99, errors.NotFinishedError), (ROOM, errors.DiskFullError)):
        with pytest.raises(kind):
            hub_base.fetch(held, "a/five", None, cache, limit=limit, reserve=1 << 60)
    with pytest.raises(errors.RefusedError):
        hub_base.fetch(held, "a/pickle", None, cache, limit=ROOM)


def test_what_a_cut_fetch_left_is_bounded_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leftover of another commit goes first when there is no room; this commit's own counts as fetched."""
    held: Any = Shelf()
    cache = tmp_path / "cache"
    kept = hub_base.fetch(held, "a/one", None, cache, limit=250)
    old = kept.with_name(".0123")
    old.mkdir()
    (old / "model.safetensors").write_bytes(bytes(90))
    commit = held.commit("a/two", None)
    partial = cache / "models--a--two" / "snapshots" / f".{commit}"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(bytes(90))
    monkeypatch.setattr(disk, "free_bytes", lambda _: 50)
    with pytest.raises(errors.DiskFullError) as caught:
        hub_base.fetch(held, "a/three", None, cache, limit=1000)
    assert caught.value.data["needed_bytes"] == 100
    assert hub_base.fetch(held, "a/two", None, cache, limit=250).is_dir()
    assert (kept.is_dir(), old.exists()) == (True, False)


def test_half_a_base_is_not_found(tmp_path: Path) -> None:
    """What a cut fetch left is nobody's snapshot, though it is the only folder there."""
    partial = tmp_path / "models--a--one" / "snapshots" / f".{'a' * 40}"
    partial.mkdir(parents=True)
    assert licences.cache_folder("a/one", None, [tmp_path]) is None
    partial.rename(partial.with_name("a" * 40))
    assert licences.cache_folder("a/one", None, [tmp_path]) is not None


class FetchingBench(MergeBench):
    """A bench whose rule lets bases be fetched."""

    def __init__(self, place: Path, found: Models) -> None:
        self.found = found
        place.mkdir()
        super().__init__(place)

    def hub(self) -> dict[str, Any]:
        """Return what lets bases be fetched."""
        return {"fetching": {str(self.runs)}, "open_hub": lambda: self.found}


def test_a_rule_lets_the_base_be_fetched(
    hub: TestHub, base: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge waits while the Hub is away, says why, fetches the recorded commit then, and states that commit.

    Whatever it waits for next, its base is known as being used.
    """

    def no_room(*_anything: object) -> None:
        raise errors.DiskFullError("full")

    folder, commit = base
    away = models(hub, tmp_path, HF_HUB_OFFLINE="1")
    bench = FetchingBench(tmp_path / "bench", away)
    bench.publish(bench.adapter(5, base=REPO, revision=commit))
    (merge,) = bench.merge_all()
    assert merge.shown == "waiting"
    assert "offline" in str(merge.reason)
    bench.found = models(hub, tmp_path)
    with monkeypatch.context() as full:
        full.setattr(merge_scratch, "room", no_room)
        (merge,) = bench.merge_all(2)
    assert merge.shown == "waiting"
    fetched = Path(str(merge.base_path))
    assert fetched.name == commit
    os.utime(fetched, (1, 1))
    (merge,) = bench.merge_all()
    assert (merge.state, Path(str(merge.base_path))) == ("done", fetched)
    assert fetched.stat().st_mtime > 1
    assert (folder / "config.json").is_file()
