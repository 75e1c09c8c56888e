"""The `ema` key of a watch rule: running averages are published, preferred or dropped, as tables and as files."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.adapters import layout
from weighbridge.adapters.formats.select import uncovered
from weighbridge.registry.flow.decision import committed
from weighbridge.registry.remotes.directory import open_directory
from weighbridge_testlib import builders, parts
from weighbridge_testlib.bench import Bench
from weighbridge_testlib.desk import Desk

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def published(bench: Bench) -> list[dict[str, Any]]:
    """Settle and work; return the tensors of every version, in order."""
    bench.settle()
    bench.work()
    files = sorted((bench.place / "remote/models/team-run").glob("v*/model.safetensors"))
    assert len(files) == len(bench.versions())
    return [safetensors_torch.load_file(file) for file in files]


@pytest.mark.parametrize("form", ["file", "pieces"])
@pytest.mark.parametrize("ema", ["keep", "prefer", "drop"])
def test_two_tables_in_one_checkpoint(tmp_path: Path, ema: str, form: str) -> None:
    """The raw weights are published, with "prefer" the average; never both, and the finding names the two."""
    bench = Bench(tmp_path, publish=("all",), ema=ema)
    raw, average = parts.state(1), parts.state(2)
    folder = bench.runs / "team/run"
    folder.mkdir(parents=True)
    if form == "file":
        torch.save({"state_dict": raw, "ema_state_dict": average, "epoch": 3}, folder / "last.ckpt")
    else:
        parts.pieces(folder / "step-5", {"model": raw, "ema": average})
    (found,) = published(bench)
    parts.same(found, average if ema == "prefer" else raw)
    bench.catalog.close()


@pytest.mark.parametrize(("ema", "seeds"), [("keep", [1, 2]), ("prefer", [2]), ("drop", [1])])
@pytest.mark.parametrize(
    ("name", "averaged"), [("model.pt", "model_ema.pt"), ("epoch=1.ckpt", "epoch=1-EMA.ckpt"), ("unet", "unet_ema")]
)
def test_files_and_folders_of_their_own(tmp_path: Path, ema: str, seeds: list[int], name: str, averaged: str) -> None:
    """Both are published, or the average in place of the raw one, or the raw one alone; the rest is set aside."""
    bench = Bench(tmp_path, publish=("all",), ema=ema)
    folder = bench.runs / "team/run"
    for label, seed in ((name, 1), (averaged, 2)):
        if "." in label:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(parts.state(seed), folder / label)
        else:
            builders.llama_model(folder / label, seed=seed)
    bench.settle()
    bench.work()
    assert len(bench.versions()) == len(seeds)
    done = {Path(job.path).name for job in bench.store.jobs("state = 'done'")}
    assert done == {label for label, seed in ((name, 1), (averaged, 2)) if seed in seeds}
    aside = bench.store.skipped()
    assert {row["reason"] for row in aside} == ({"averaged"} if len(seeds) == 1 else set())
    assert all("ema" in row["why"] for row in aside)
    bench.catalog.close()


LACKING = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]


def partly(seed: int) -> dict[str, Any]:
    """Return an average of everything but two tensors."""
    return {name: tensor for name, tensor in parts.state(seed).items() if name not in LACKING}


@pytest.mark.parametrize("form", ["file", "pieces"])
def test_a_table_that_averages_a_part(tmp_path: Path, form: str) -> None:
    """An average without some tensors is not preferred: the raw weights go, and the version says what is missing."""
    bench = Bench(tmp_path, publish=("all",), ema="prefer")
    folder = bench.runs / "team/run"
    folder.mkdir(parents=True)
    if form == "file":
        torch.save({"state_dict": parts.state(1), "ema_state_dict": partly(2)}, folder / "last.ckpt")
    else:
        parts.pieces(folder / "step-5", {"model": parts.state(1), "ema": partly(2)})
    (found,) = published(bench)
    parts.same(found, parts.state(1))
    told = committed(open_directory(str(tmp_path / "remote")), "team-run", 1).facts.findings
    (partial,) = [f for f in told if f.code == "average-partial"]
    assert (partial.severity, partial.data["uncovered"]) == ("warn", LACKING)
    bench.catalog.close()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_file_or_folder_that_averages_a_part(tmp_path: Path, form: str, allowed: bool) -> None:
    """It is refused with what it lacks, and the raw one is published; whoever allows it gets it with a warning."""
    bench, raw, average = pair(tmp_path, form)
    if form == "file":
        torch.save(partly(2), average)
    else:
        (average / "config.json").unlink()  # without it nothing else tells what is missing
        left = {n: t for n, t in builders.llama_tensors().items() if n not in LACKING}
        (average / "model.safetensors").rename(average / "weights.safetensors")
        (average / "weights.safetensors").write_bytes(builders.safetensors_bytes(left, metadata={"format": "pt"}))
    if allowed:
        bench.store.allow(str(average), "average-partial", "the rest is frozen", who="me")
    bench.settle()
    bench.work()
    states = {raw.name: "done", average.name: "blocked"} if not allowed else {average.name: "done"}
    assert bench.states() == states
    if not allowed:
        (job,) = bench.store.jobs("state = 'blocked'")
        assert [(f.code, f.data["uncovered"]) for f in job.findings_list] == [("average-partial", LACKING)]
    bench.catalog.close()


TABLES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,3}", fullmatch=True), st.just((2, 3)), min_size=1
)


@given(TABLES, st.data())
def test_what_an_average_covers(table: dict[str, tuple[int, ...]], data: st.DataObject) -> None:
    """Every tensor left out, or of another shape, is named; more tensors and a prefix of either side change nothing."""
    gone = data.draw(st.sets(st.sampled_from(sorted(table))))
    average = {n: s for n, s in table.items() if n not in gone} | {n: (9,) for n in gone if data.draw(st.booleans())}
    assert set(uncovered(average | {"zz.more": (1,)}, table)) == gone
    if not gone:
        outer = data.draw(st.sampled_from(["model.", "ema_model.module."]))
        longer = {outer + name: shape for name, shape in table.items()}
        assert uncovered(longer, table) == uncovered(table, longer) == ()


@pytest.mark.parametrize(("raw", "averaged"), [("model", "model_ema"), ("unet", "unet-swa"), ("final", "ema_final")])
def test_names_carry_the_run(tmp_path: Path, raw: str, averaged: str) -> None:
    """Two runs that save raw and averaged weights side by side get a name each, that of the run."""
    bench = Bench(tmp_path, publish=("all",))
    for i, run in enumerate(("one", "two")):
        builders.llama_model(bench.runs / "team" / run / raw, seed=10 * i)
        builders.llama_model(bench.runs / "team" / run / averaged, seed=10 * i + 1)
    bench.settle()
    bench.work()
    assert set(bench.states().values()) == {"done"}
    assert {ref.partition("@")[0] for ref in bench.versions()} == {"team-one", "team-two"}
    bench.catalog.close()


@pytest.mark.parametrize("order", ["raw first", "average first"])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_an_average_that_is_refused(tmp_path: Path, form: str, order: str) -> None:
    """With "prefer" the raw one is published where the average holds NaN, whichever of the two was judged first."""
    bench, raw, average = pair(tmp_path, form, broken=True)
    for one in (raw, average) if order == "raw first" else (average, raw):
        bench.settle(one)
        bench.work(1)
    bench.work()
    assert bench.states() == {raw.name: "done", average.name: "blocked"}
    assert not bench.store.skipped()
    bench.catalog.close()


@pytest.mark.parametrize("state", ["settling", "not-chosen", "not-publishable", "quarantined"])
def test_an_average_that_is_lost(tmp_path: Path, state: str) -> None:
    """The raw one is published where the average vanishes before it was, is quarantined, or holds no weights."""
    bench, raw, average = pair(tmp_path, "file")
    (waiting,) = bench.settle(average)
    bench.settle(raw)
    (job,) = bench.store.jobs("path = ?", [str(raw)])
    bench.runner.run(job)
    assert [row["reason"] for row in bench.store.skipped()] == ["averaged"]
    if state == "quarantined":
        bench.store.advance(waiting, "quarantined", was="settling")
    if state.startswith("not-"):
        bench.store.skip(waiting, state, "its folder says so")
    if state in {"settling", "not-chosen"}:
        average.unlink()
        bench.store.gone(str(average))
    bench.work()
    assert bench.states()[raw.name] == "done"
    assert len(bench.versions()) == 1
    bench.catalog.close()


@pytest.mark.parametrize("order", ["raw first", "average first"])
def test_an_average_that_is_too_large(tmp_path: Path, order: str) -> None:
    """An average that the rule itself does not publish is not preferred to the raw one."""
    bench, raw, average = pair(tmp_path, "file", largest=100_000)
    torch.save(parts.state(2) | {"weight": torch.randn(300, 300)}, average)
    for one in (raw, average) if order == "raw first" else (average, raw):
        bench.settle(one)
        bench.work(1)
    bench.work()
    assert bench.states() == {raw.name: "done"}
    assert [row["reason"] for row in bench.store.skipped()] == ["max-bytes"]
    bench.catalog.close()


def test_an_average_that_was_published_and_is_deleted(tmp_path: Path) -> None:
    """The raw one stays aside: the run has its weights, and the trainer deletes the two one after the other."""
    bench, _raw, average = pair(tmp_path, "file")
    bench.settle()
    bench.work()
    average.unlink()
    bench.store.gone(str(average))
    bench.work()
    assert len(bench.versions()) == 1
    assert [row["reason"] for row in bench.store.skipped()] == ["averaged"]
    bench.catalog.close()


def test_an_average_that_is_refused_later(tmp_path: Path) -> None:
    """Where the two are written again and the new average is refused, the new raw one is published."""
    bench, raw, average = pair(tmp_path, "file")
    bench.settle()
    bench.work()
    torch.save(parts.state(3), raw)
    torch.save(parts.state(4) | {"model.norm.weight": torch.full((16,), float("nan"))}, average)
    bench.settle()
    bench.work()
    assert {(Path(job.path).name, job.state) for job in bench.store.jobs()} == {
        (average.name, "done"), (average.name, "blocked"), (raw.name, "done"),
    }  # fmt: skip
    bench.catalog.close()


def pair(place: Path, form: str, *, broken: bool = False, largest: int | None = None) -> tuple[Bench, Path, Path]:
    """Write a raw one and its average, which may hold NaN; return them with a daemon that prefers averages."""
    bench = Bench(place, publish=("all",), ema="prefer", max_bytes=largest)
    folder = bench.runs / "team/run"
    if form == "folder":
        raw, average = folder / "unet", folder / "unet_ema"
        for one, seed in ((raw, 1), (average, 2)):
            builders.llama_model(one, seed=seed)
        if broken:
            poisoned(average / "model.safetensors")
        return bench, raw, average
    raw, average = folder / "model.pt", folder / "model_ema.pt"
    folder.mkdir(parents=True)
    torch.save(parts.state(1), raw)
    values = parts.state(2)
    if broken:
        next(iter(values.values())).view(-1)[3] = float("nan")
    torch.save(values, average)
    return bench, raw, average


def poisoned(file: Path) -> None:
    """Let the first tensor of a file hold NaN."""
    values = safetensors_torch.load_file(file)
    next(iter(values.values())).view(-1)[3] = float("nan")
    safetensors_torch.save_file(values, file, metadata={"format": "pt"})


def test_a_run_that_is_named_after_it(tmp_path: Path) -> None:
    """A folder's name alone makes no average of it: there must be the folder it is the average of."""
    bench = Bench(tmp_path, publish=("all",), ema="drop")
    builders.llama_model(bench.runs / "team/test-ema-0.999")
    bench.settle()
    bench.work()
    assert len(bench.versions()) == 1
    bench.catalog.close()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("model_ema.pt", "model.pt"), ("epoch=1-EMA.ckpt", "epoch=1.ckpt"), ("unet_ema", "unet"), ("ema-unet", "unet"),
        ("swa_model.pt", "model.pt"), ("model.averaged.pth", "model.pth"), ("schema.pt", None), ("model.pt", None),
    ],
)  # fmt: skip
def test_names(name: str, raw: str | None) -> None:
    """The word stands alone between separators, first or last; without it, it is the name of the raw one."""
    assert layout.raw_of(name) == raw


@pytest.mark.parametrize(("ema", "seed"), [("keep", 1), ("prefer", 2), ("drop", 1)])
def test_push_takes_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: str, seed: int) -> None:
    """`registry push --ema` decides as the rule does: of two tables in one file, and of two files in one folder."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    both, apart = tmp_path / "run" / "last.ckpt", tmp_path / "other"
    both.parent.mkdir()
    apart.mkdir()
    torch.save({"state_dict": parts.state(1), "ema_state_dict": parts.state(2), "epoch": 3}, both)
    for label, one in (("model.pt", 1), ("model_ema.pt", 2)):
        torch.save(parts.state(one), apart / label)
    desk.ok("push", both, "--name", "tables", "--ema", ema)
    parts.same(safetensors_torch.load_file(desk.root / "models/tables/v1/model.safetensors"), parts.state(seed))
    if ema == "keep":
        assert desk.registry("push", apart, "--name", "files").code == 2
        return
    desk.ok("push", apart, "--name", "files", "--ema", ema)
    parts.same(safetensors_torch.load_file(desk.root / "models/files/v1/model.safetensors"), parts.state(seed))
    refused, taken = ("model.pt", "model_ema.pt") if ema == "prefer" else ("model_ema.pt", "model.pt")
    said = desk.registry("push", apart / refused, "--name", "files", "--ema", ema)
    assert said.code == 5
    assert f"registry push {apart / taken}" in said.err


def test_push_of_the_working_directory_sees_the_folders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry push .` inside a folder decides by the folder's own name and by what lies beside it."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    for name in ("final", "final_ema"):
        builders.lora_adapter(tmp_path / "run" / name)
    monkeypatch.chdir(tmp_path / "run" / "final")
    said = desk.registry("push", ".", "--name", "sft", "--ema", "prefer", "--dry-run")
    assert said.code == 5
    assert "final_ema holds the averaged weights of final" in said.err


def test_push_needs_no_sight_of_what_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may enter the folder above, but not list it, can push what lies in it."""
    desk = Desk(tmp_path / "desk", monkeypatch)
    folder = builders.lora_adapter(tmp_path / "closed" / "final")
    listed = os.listdir

    def shut(place: Any = ".") -> list[Any]:
        if os.fspath(place) == str(folder.parent):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "listdir", shut)
    desk.ok("push", folder, "--name", "sft", "--dry-run")
