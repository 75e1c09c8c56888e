"""Torch distributed checkpoints: every tensor from .metadata, every piece in a file that is there, nothing imported."""

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from weighbridge.adapters.formats import dcp, select
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import T, call, name
from weighbridge_testlib.distributed import folder, metadata
from weighbridge_testlib.mutation import mutated, outcome

PIECE = c.torch_zip(T("F32", (2, 4), 0.5))
TWO: dict[str, Any] = {
    "model.w": (
        (4, 4),
        [((0, 0), (2, 4), "__0_0.distcp", 0, len(PIECE)), ((2, 0), (2, 4), "__1_0.distcp", 0, len(PIECE))],
    ),
    "model.b": ((2, 4), [((0, 0), (2, 4), "__0_0.distcp", len(PIECE), len(PIECE))]),
}
PLAN = {"model.w": ("model", "w"), "model.b": ("model", "b")}
WHOLE = {"__0_0.distcp": PIECE + PIECE, "__1_0.distcp": PIECE}


def test_a_sharded_checkpoint_lists_whole_tensors(tmp_path: Path) -> None:
    """Tensors of several pieces have their whole shape; every piece leads to the torch file that holds it."""
    place = folder(tmp_path / "checkpoint", metadata(TWO, plan=PLAN), WHOLE)
    found = dcp.load(place)
    assert [(t.group, t.name, t.shape, t.dtype, t.nbytes) for t in found.directory.tensors] == [
        (("model",), "w", (4, 4), "F32", 64),
        (("model",), "b", (2, 4), "F32", 32),
    ]
    facts = found.directory.facts
    assert facts["key_prefix"] == "model."
    assert facts["distcp_files"] == ["__0_0.distcp", "__1_0.distcp"]
    assert facts["missing_files"] == []
    assert facts["item_format"] == "torch-zip"
    assert found.directory.hazards == ()
    piece = found.chunks["model.b"][0]
    inner = dcp.item(place / piece.file, piece)
    assert inner.tensors[0].shape == (2, 4)
    assert c.materialise(place / piece.file, inner.tensors[0], 4) == struct.pack("<8f", *[0.5] * 8)
    assert select.select(found.directory).weights_key == "model"
    assert dcp.read(place / ".metadata").tensors == found.directory.tensors


def test_a_missing_file_is_named_with_its_tensors(tmp_path: Path) -> None:
    """A data file that is not there blocks, with the names of the tensors it holds."""
    place = folder(tmp_path / "checkpoint", metadata(TWO, plan=PLAN), {"__0_0.distcp": PIECE + PIECE})
    directory = dcp.read(place)
    assert directory.facts["missing_files"] == ["__1_0.distcp"]
    assert [(h.code, h.subject, h.data["missing_tensors"]) for h in directory.hazards] == [
        ("data-missing", "__1_0.distcp", ["model.w"])
    ]


def test_a_short_file_is_named(tmp_path: Path) -> None:
    """A data file that ends before a piece says how many bytes are missing."""
    place = folder(tmp_path / "checkpoint", metadata(TWO, plan=PLAN), {**WHOLE, "__1_0.distcp": PIECE[:-10]})
    assert [(h.code, h.data["file"], h.data["short_by"]) for h in dcp.read(place).hazards] == [
        ("file-short", "__1_0.distcp", 10)
    ]


def test_pieces_must_cover_their_tensor(tmp_path: Path) -> None:
    """A tensor whose pieces leave a part out, or reach out of it, is named."""
    part = {"w": ((4, 4), [((0, 0), (2, 4), "__0_0.distcp", 0, len(PIECE))])}
    directory = dcp.read(folder(tmp_path / "checkpoint", metadata(part), WHOLE))
    assert [(h.code, h.subject) for h in directory.hazards] == [("tensor-incomplete", "w")]
    beyond = {"w": ((2, 4), [((2, 0), (2, 4), "__0_0.distcp", 0, len(PIECE))])}
    assert "tensor-outside" in [
        h.code for h in dcp.read(folder(tmp_path / "checkpoint", metadata(beyond), WHOLE)).hazards
    ]


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A piece in a file outside the folder is not looked for."""
    for path in ("../secret", "/etc/passwd", "a/../../b", "a//b", "x\n"):
        place = folder(tmp_path / "checkpoint", metadata({"w": ((2, 4), [((0, 0), (2, 4), path, 0, 10)])}), WHOLE)
        found = [(h.code, h.data.get("unsafe_paths")) for h in dcp.read(place).hazards]
        assert ("path-unsafe", [path]) in found


def test_a_folder_without_metadata_did_not_end(tmp_path: Path) -> None:
    """The .metadata is written last, so its absence means that the save did not end."""
    (tmp_path / "__0_0.distcp").write_bytes(PIECE)
    with pytest.raises(FormatFault) as caught:
        dcp.read(tmp_path)
    assert caught.value.code == "metadata-missing"


def test_a_payload_in_metadata_is_named(tmp_path: Path) -> None:
    """A call that rides in .metadata blocks by name; the tensors are still listed."""
    more = call(name("posix", "mkdir"), str(tmp_path / "canary"))
    directory = dcp.read(folder(tmp_path / "checkpoint", metadata(TWO, plan=PLAN, more=more), WHOLE))
    assert [(h.code, h.subject) for h in directory.hazards] == [("runs-code", "posix.mkdir")]
    assert len(directory.tensors) == 2
    assert not (tmp_path / "canary").exists()


def test_another_pickle_is_no_metadata(tmp_path: Path) -> None:
    """A pickle of something else is named as damaged metadata."""
    for value in ({"a": 1}, [1], None):
        with pytest.raises(FormatFault) as caught:
            dcp.read(folder(tmp_path / "checkpoint", pickle.dumps(value), {}))
        assert caught.value.code == "metadata-damaged"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(metadata(TWO, plan=PLAN)))
def test_mutated_metadata_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to .metadata, a reader gets a directory or one typed fault."""
    (tmp_path / "__0_0.distcp").write_bytes(PIECE)
    outcome(dcp.read, tmp_path / ".metadata", data)


@pytest.mark.filterwarnings("ignore")
def test_what_torch_saves_is_listed_as_it_was(tmp_path: Path) -> None:
    """A checkpoint written by torch itself has its names, shapes and dtypes, and its bytes where the pieces say."""
    torch = pytest.importorskip("torch")
    saver = pytest.importorskip("torch.distributed.checkpoint")
    model = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3, dtype=torch.bfloat16)}
    optimizer = {"state": {"0": {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(2.0)}}, "lr": 0.1}
    saver.save({"model": model, "optimizer": optimizer, "step": 3}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = dcp.load(tmp_path / "c")
    assert not found.directory.blocked
    table = {".".join((*t.group, t.name)): t for t in found.directory.tensors}
    assert table["model.layer.weight"].shape == (3, 4)
    assert table["model.layer.bias"].dtype == "BF16"
    assert table["optimizer.state.0.step"].shape == ()
    chosen = select.select(found.directory)
    assert [tensor.name for tensor in chosen.weights] == ["layer.weight", "layer.bias"]
    piece = found.chunks["model.layer.weight"][0]
    inner: Directory = dcp.item(tmp_path / "c" / piece.file, piece)
    expected = model["layer.weight"].numpy().tobytes()
    assert c.materialise(tmp_path / "c" / piece.file, inner.tensors[0], 4) == expected
