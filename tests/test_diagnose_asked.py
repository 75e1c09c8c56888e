"""What `registry diagnose` is asked about: one file of a set, a piece of a checkpoint, a base that is none."""

import json
import os
from pathlib import Path

import pytest

from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.answer import Diagnosis, diagnose
from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.reading import VALUES_LIMIT
from weighbridge.registry import errors
from weighbridge_testlib import builders, distributed, ranks

NOWHERE = {"HOME": "/nonexistent"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def told(path: Path, base: Path | None = None) -> Diagnosis:
    """Diagnose with no Hub cache in sight."""
    return diagnose(path, base=None if base is None else str(base), environ=NOWHERE)


def fetched(path: Path) -> list[str]:
    """Return what the commands of all causes fetch."""
    return [word.split(" ")[-1] for cause in told(path).causes for word in cause.commands if word.startswith("rsync")]


@pytest.mark.parametrize("inner", [".", "pytorch_model_fsdp_0"])
def test_the_piece_that_is_missing_is_fetched(tmp_path: Path, inner: str) -> None:
    """Of a distributed checkpoint the data file that is gone, or cut, is fetched: not the list that names it."""
    for name, harm in (("gone", None), ("cut", 50)):
        place = distributed.small(tmp_path / name / inner)
        piece = place / "__1_0.distcp"
        body = piece.read_bytes()
        piece.unlink()
        if harm is not None:
            piece.write_bytes(body[:harm])
        assert fetched(tmp_path / name) == [str(tmp_path / name / inner / "__1_0.distcp")]


def test_a_piece_with_a_path_out_of_the_folder_is_never_fetched(tmp_path: Path) -> None:
    """A name in a file that leads elsewhere does not become the target of a command."""
    piece = ((0, 0), (2, 4), "../../etc/cron.d/x", 0, 9)
    distributed.folder(tmp_path / "dcp", distributed.metadata({"w": ((2, 4), [piece])}), {"__0_0.distcp": b""})
    found = told(tmp_path / "dcp")
    assert found.outcome == "found"
    assert not [word for cause in found.causes for word in cause.commands if "cron.d" in word]


def test_byte_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    """Where every part is there the command joins them, part 10 after part 9."""
    (tmp_path / "m").mkdir()
    for number in range(1, 12):
        (tmp_path / "m" / f"x.gguf.part{number}of11").write_bytes(b"GGUF")
    (cause,) = [c for c in told(tmp_path / "m").causes if c.rule == "part-missing"]
    names = [Path(word).name for word in cause.commands[0].split()[1:12]]
    assert names == [f"x.gguf.part{number}of11" for number in range(1, 12)]
    assert cause.commands[0].endswith(f"> {tmp_path / 'm' / 'x.gguf'}")


def test_a_folder_is_fetched_as_a_folder(tmp_path: Path) -> None:
    """A cause that is about a whole folder names a copy of the folder, from its writer or from the Hub."""
    (tmp_path / "empty").mkdir()
    (cause,) = told(tmp_path / "empty").causes
    assert cause.commands == [f"rsync -r --checksum --partial HOST:FOLDER/ {tmp_path}/empty/"]
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    (snapshot / "unet").mkdir(parents=True)
    asked = {snapshot: "", snapshot / "unet": " --include 'unet/*'", snapshot / "unet" / "a.bin": " unet/a.bin"}
    for path, words in asked.items():
        assert commands.fetch(path) == f"hf download org/name{words} --revision {COMMIT} --force-download"


def test_one_file_is_judged_with_what_lies_beside_it(tmp_path: Path) -> None:
    """A safetensors file keeps its config, a shard its set; what belongs to others is not drawn in."""
    adapter = builders.lora_adapter(tmp_path / "a")
    (adapter / "other.safetensors").write_bytes(b"")
    builders.llama_model(tmp_path / "m", shards=3)
    for path in (adapter / "adapter_model.safetensors", tmp_path / "m" / "model-00002-of-00003.safetensors"):
        assert told(path).causes == []
        assert inspect(path).outcome == "accept"
    (tmp_path / "m" / "model-00003-of-00003.safetensors").unlink()
    assert "index-ahead" in {c.rule for c in told(tmp_path / "m" / "model-00002-of-00003.safetensors").causes}


def test_each_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is made from what the look at the folder has read."""
    seen: list[str] = []
    real = safetensors.read

    def counted(path: Path) -> safetensors.Header:
        seen.append(path.name)
        return real(path)

    monkeypatch.setattr(safetensors, "read", counted)
    told(builders.llama_model(tmp_path / "m", shards=3))
    assert sorted(seen) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_an_adapter_is_no_base(tmp_path: Path) -> None:
    """An adapter that is named as the base is refused with the base it has; one that a config names is told of."""
    other = builders.lora_adapter(tmp_path / "other", base="org/real-base")
    model = builders.llama_model(tmp_path / "m")
    adapter = builders.lora_adapter(tmp_path / "a", base=str(other))
    for path in (model, adapter):
        with pytest.raises(errors.UsageError, match="is an adapter") as refused:
            told(path, other)
        assert "org/real-base" in (refused.value.fix or "")
    found = told(adapter)
    assert found.base is None
    assert [one for one in found.unsure if str(other) in one and "an adapter itself" in one]
    assert found.causes


def test_a_base_that_cannot_be_compared_is_told_with_the_reason(tmp_path: Path) -> None:
    """A folder without weights, or with weights in another form, is named with what is wrong, for model and adapter."""
    model, adapter = builders.llama_model(tmp_path / "m"), builders.lora_adapter(tmp_path / "a")
    bare = builders.llama_model(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    other = distributed.small(tmp_path / "other")
    for path, base, words in (
        (model, bare, "model.safetensors is missing"),
        (adapter, bare, "model.safetensors is missing"),
        (model, other, "no whole model in safetensors"),
    ):
        assert [one for one in told(path, base).unsure if str(base) in one and words in one]
    assert [c.message for c in told(adapter, other).causes if "holds no safetensors weights" in c.message]


def test_rank_files_are_told_before_the_end_mark_is_there(tmp_path: Path) -> None:
    """A ZeRO checkpoint whose trainer died names the command that takes its weights out; a lost rank forbids it."""
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    shapes = {name: tuple(side) for name, (_, side, _) in builders.llama_tensors().items()}
    ranks.zero_folder(folder, shapes, world=2, stage=3)
    (folder / "training_args.bin").write_bytes(b"arguments")
    assert {c.rule for c in told(folder).causes} == {"not-finished", "zero-only"}
    next(folder.glob("*/zero_pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
    assert "zero-only" not in {c.rule for c in told(folder).causes}


def test_the_reason_why_values_were_not_looked_at_is_the_real_one(tmp_path: Path) -> None:
    """A small folder is never called too large, a sound one never damaged."""
    small = distributed.small(tmp_path / "d")
    (small / "__1_0.distcp").unlink()
    (why,) = told(small).unsure
    assert "not sound" in why
    assert "more than" not in why
    large = builders.llama_model(tmp_path / "m")
    size = VALUES_LIMIT + 4
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (large / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(large / "model.safetensors", 8 + len(header) + size)
    (why,) = told(large).unsure
    assert f"{size} bytes are more than" in why
    assert "not sound" not in why
