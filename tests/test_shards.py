"""Shards, index and what lies beside them: both directions, tensor by tensor."""

import json
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import builders

INDEX = "model.safetensors.index.json"


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def edit_index(folder: Path, change: Any) -> None:
    """Change the index of a folder in place."""
    document = json.loads((folder / INDEX).read_text())
    change(document)
    builders.write_json(folder / INDEX, document)


@pytest.mark.parametrize("shards", [1, 2, 5, 13])
def test_whole_model(tmp_path: Path, shards: int) -> None:
    """A model in any number of shards is accepted and counted once."""
    found, codes = look(builders.llama_model(tmp_path / "m", shards=shards))
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "full-model", "model", set())
    assert (found.facts["tensor_count"], found.facts["param_count"]) == (21, 5712)
    if shards > 1:
        assert (found.facts["shards_expected"], found.facts["shards_found"]) == (shards, shards)
        assert found.facts["index_total_size"] == found.facts["payload_bytes"] == 11424


def test_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    """An index that names an absent shard refuses, naming the file and counting the tensors lost with it."""
    folder = builders.llama_model(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"shard-missing"})
    assert found.facts["missing_files"] == ["model-00002-of-00003.safetensors"]
    assert found.facts["missing_tensor_count"] == 7
    assert (found.facts["shards_expected"], found.facts["shards_found"]) == (3, 2)


@pytest.mark.parametrize(("count", "words"), [(1, "1 tensor would"), (2, "2 tensors would")])
def test_what_is_lost_with_a_shard_is_counted_in_words(tmp_path: Path, count: int, words: str) -> None:
    """One tensor is no "1 tensors"."""
    folder = builders.llama_model(tmp_path, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = [name for name, shard in index["weight_map"].items() if shard == "model-00002-of-00003.safetensors"]
    for name in gone[count:]:
        del index["weight_map"][name]
    builders.write_json(folder / "model.safetensors.index.json", index)
    (folder / "model-00002-of-00003.safetensors").unlink()
    found, _ = look(folder)
    assert words in next(f.message for f in found.findings if f.code == "shard-missing")


def test_missing_shard_beside_a_download_waits(tmp_path: Path) -> None:
    """The same with a download under way is a reason to wait, not to refuse."""
    folder = builders.llama_model(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").rename(folder / "model-00002-of-00003.safetensors.incomplete")
    found, _ = look(folder)
    assert found.outcome == "wait"
    assert found.facts["in_progress"] == ["model-00002-of-00003.safetensors.incomplete"]
    assert found.facts["missing_files"] == ["model-00002-of-00003.safetensors"]


@pytest.mark.parametrize(("cut", "key", "code"), [(-10, "short_by", "file-short"), (10, "longer_by", "file-long")])
def test_shard_of_another_length(tmp_path: Path, cut: int, key: str, code: str) -> None:
    """A shard that is short or long is named with the number of bytes, among the facts too."""
    folder = builders.llama_model(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    stored = shard.read_bytes()
    shard.write_bytes(stored[:cut] if cut < 0 else stored + bytes(cut))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {code})
    assert found.facts[key] == 10
    assert found.facts["file"] == shard.name


def test_empty_shard(tmp_path: Path) -> None:
    """A shard without a byte is refused by name."""
    folder = builders.llama_model(tmp_path, shards=2)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"file-empty"})
    assert found.facts["file"] == "model-00001-of-00002.safetensors"


def test_tensor_that_the_index_puts_into_the_wrong_file(tmp_path: Path) -> None:
    """A map entry that points at another shard than the tensor's is refused, and a new index would mend it."""
    folder = builders.llama_model(tmp_path, shards=2)
    edit_index(folder, lambda d: d["weight_map"].update({"model.norm.weight": "model-00001-of-00002.safetensors"}))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"tensor-misplaced"})
    assert found.facts["index_rebuildable"] is True


def test_tensor_that_is_in_no_shard(tmp_path: Path) -> None:
    """A tensor that only the index knows is refused with the file that should hold it."""
    folder = builders.llama_model(tmp_path, shards=2)
    edit_index(folder, lambda d: d["weight_map"].update({"extra.weight": "model-00002-of-00002.safetensors"}))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"tensor-missing"})
    assert found.facts["missing_tensors"] == ["extra.weight"]
    assert found.facts["in_file"] == "model-00002-of-00002.safetensors"


def test_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    """A tensor that only the shard knows warns and is counted."""
    folder = builders.llama_model(tmp_path, shards=2)
    edit_index(folder, lambda d: d["weight_map"].pop("model.norm.weight"))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"tensor-unlisted"})
    assert found.facts["unlisted_tensors"] == ["model.norm.weight"]
    assert found.facts["tensor_count"] == 21


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    """A tensor in two shards warns; the one the index names owns it, and it is counted once."""
    folder = builders.llama_model(tmp_path, shards=2)
    tensors = builders.llama_tensors()
    first = dict(builders.split(tensors, 2)[0])
    first["model.norm.weight"] = tensors["model.norm.weight"]
    builders.write_safetensors(folder / "model-00001-of-00002.safetensors", first)
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"tensor-duplicated"})
    assert found.facts["owner"] == "model-00002-of-00002.safetensors"
    assert found.facts["tensor_count"] == 21


def test_index_that_leaves_out_a_shard_of_its_own_set(tmp_path: Path) -> None:
    """A valid index that names too few files of the set is refused."""
    folder = builders.llama_model(tmp_path, shards=3)
    last = "model-00003-of-00003.safetensors"
    edit_index(folder, lambda d: d.update(weight_map={k: v for k, v in d["weight_map"].items() if v != last}))
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "index-incomplete" in codes
    assert found.facts["unindexed_files"] == [last]


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "empty"), ('{"weight_map": {', "not valid JSON"), ("[]", "weight_map"), ("{}", "weight_map")],
)
def test_index_that_cannot_be_read(tmp_path: Path, text: str, word: str) -> None:
    """A damaged index is refused; the shards by name are counted and the folder can be mended."""
    folder = builders.llama_model(tmp_path, shards=3)
    (folder / INDEX).write_text(text)
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"index-damaged"})
    assert (found.facts["shards_expected"], found.facts["shards_found"]) == (3, 3)
    assert found.facts["index_rebuildable"] is True
    assert any(word in f.message for f in found.findings)


@pytest.mark.parametrize("lost", [False, True])
def test_shards_without_an_index(tmp_path: Path, lost: bool) -> None:
    """Shards without an index are refused; whether one could be built depends on whether all are there."""
    folder = builders.llama_model(tmp_path, shards=4)
    (folder / INDEX).unlink()
    if lost:
        (folder / "model-00004-of-00004.safetensors").unlink()
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "index-missing" in codes
    assert found.facts["index_missing"] is True
    assert found.facts["index_rebuildable"] is (not lost)
    assert found.facts["missing_files"] == (["model-00004-of-00004.safetensors"] if lost else [])


@pytest.mark.parametrize(
    "value", ["../up.safetensors", "/etc/x.safetensors", "a/../../b.safetensors", "C:\\x.safetensors"]
)
def test_index_path_outside_the_folder(tmp_path: Path, value: str) -> None:
    """An index value that leaves the folder is refused as written and never opened."""
    folder = builders.llama_model(tmp_path / "m", shards=2)
    builders.write_safetensors(tmp_path / "up.safetensors", {"x": ("F32", (1,), 1.0)})
    edit_index(folder, lambda d: d["weight_map"].update({"x": value}))
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "index-path-unsafe" in codes
    assert found.facts["unsafe_paths"] == [value]


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        ({"total_size": 11424.0}, "accept"),
        ({"total_size": 9}, "warn"),
        ({"total_parameters": 333}, "warn"),
        ({}, "accept"),
    ],
)
def test_totals_of_the_index(tmp_path: Path, claim: dict[str, Any], outcome: str) -> None:
    """A wrong total in the index warns and the counted figure is used; no total is no fault."""
    folder = builders.llama_model(tmp_path, shards=2)
    edit_index(folder, lambda d: d.update(metadata=claim))
    found, _ = look(folder)
    assert found.outcome == outcome
    assert found.facts["payload_bytes"] == 11424


def test_stale_shards_of_an_earlier_save(tmp_path: Path) -> None:
    """Shards of another count warn, are left out as stale and count nowhere."""
    folder = builders.llama_model(tmp_path, shards=3)
    builders.write_safetensors(folder / "model-00001-of-00002.safetensors", {"x": ("F32", (4,), 1.0)})
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"shards-stale"})
    assert found.facts["stale_files"] == ["model-00001-of-00002.safetensors"]
    assert found.facts["tensor_count"] == 21
    assert next(f for f in found.files if f.path.endswith("of-00002.safetensors")).reason == "stale"


def test_index_of_a_set_that_is_gone_beside_a_whole_one(tmp_path: Path) -> None:
    """An old index over a whole new set is refused; the new set is named, and an index for it would mend the folder."""
    folder = builders.llama_model(tmp_path, shards=3)
    old = (folder / INDEX).read_text()
    for shard in folder.glob("model-*"):
        shard.unlink()
    builders.llama_model(folder, shards=2)
    (folder / INDEX).write_text(old)
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "shard-missing" in codes
    assert found.facts["unindexed_files"] == builders.shard_names(2)
    assert found.facts["index_rebuildable"] is True


def test_single_file_of_the_same_model_beside_shards(tmp_path: Path) -> None:
    """A whole copy beside the shards warns, is left out, and its values are compared."""
    folder = builders.llama_model(tmp_path, shards=2)
    builders.write_safetensors(folder / "model.safetensors", builders.llama_tensors())
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"copies-extra"})
    assert found.facts["extra_full_copies"] == ["model.safetensors"]
    assert found.facts["values_equal"] is True


@pytest.mark.parametrize("other", [{"seed": 1}, {"dtype": "F32"}])
def test_single_file_of_another_model_beside_shards(tmp_path: Path, other: dict[str, Any]) -> None:
    """A single file with other values or dtype beside shards is a conflict: nobody guesses which is the model."""
    folder = builders.llama_model(tmp_path, shards=2)
    builders.write_safetensors(folder / "model.safetensors", builders.llama_tensors(**other))
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "sets-conflict" in codes
    assert found.facts["conflicting_files"] == ["model.safetensors", INDEX]


@pytest.mark.parametrize("place", ["original", "metal", "sub/deep"])
def test_copies_in_folders_below(tmp_path: Path, place: str) -> None:
    """The same weights in a folder below warn and are left out."""
    folder = builders.llama_model(tmp_path, shards=2)
    builders.write_safetensors(folder / place / "model.safetensors", builders.llama_tensors())
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"copies-extra"})
    assert found.facts["extra_full_copies"] == [f"{place}/model.safetensors"]


def test_variant_in_half_precision(tmp_path: Path) -> None:
    """A second precision under its variant name is a copy."""
    folder = builders.llama_model(tmp_path)
    builders.write_safetensors(folder / "model.fp16.safetensors", builders.llama_tensors(dtype="F16"))
    found, codes = look(folder)
    assert (found.outcome, codes) == ("warn", {"copies-extra"})
    assert found.facts["tensor_count"] == 21


def test_git_lfs_pointers(tmp_path: Path) -> None:
    """Pointers in the place of shards are refused with size and sha256, many of them in one finding."""
    folder = builders.llama_model(tmp_path, shards=3)
    for number, shard in enumerate(sorted(folder.glob("model-*"))):
        shard.write_text(
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{str(number) * 64}\nsize {number + 1}\n"
        )
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"lfs-pointer"})
    assert found.facts["pointer"] is True
    assert (found.facts["pointer_size"], found.facts["pointer_sha256"]) == (1, "0" * 64)
    assert len([f for f in found.findings if f.code == "lfs-pointer"]) == 1
    assert found.facts["shards_found"] == 3


def test_dead_link_in_the_place_of_a_shard(tmp_path: Path) -> None:
    """A shard that is a link to nothing is refused with link and target."""
    folder = builders.llama_model(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../gone/model.safetensors")
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"link-dangling"})
    assert found.facts["dangling"] == {shard.name: "../gone/model.safetensors"}


def test_hub_cache_snapshot_of_links(tmp_path: Path) -> None:
    """A snapshot made of links into a blob store is read through them, with its commit as a fact."""
    cache = tmp_path / "models--org--base"
    source = builders.llama_model(tmp_path / "source", shards=2)
    commit = "c" * 40
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        blob = cache / "blobs" / f"{number:064x}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    found, codes = look(tmp_path / "models--org--base")
    assert (found.outcome, codes) == ("accept", set())
    assert found.facts["tensor_count"] == 21
    assert found.facts["commit"] == commit
    assert not any("blobs" in f.path for f in found.files)


def test_pickle_under_a_safetensors_name(tmp_path: Path) -> None:
    """A file whose suffix lies is named with what it really is."""
    folder = builders.llama_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00.")
    found, codes = look(folder)
    assert found.outcome == "refuse"
    assert "suffix-lies" in codes
    assert found.facts["true_formats"] == {"model.safetensors": "pickle"}
