"""Torch files from before 1.6 and plain pickles: the same tensors as torch loads, by the machine that runs nothing."""

import argparse
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from weighbridge.adapters.formats import opaque, torch_legacy
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import pack
from weighbridge_testlib.containers import T, call, name
from weighbridge_testlib.mutation import mutated, outcome

STATE = {
    "w": T("F32", (2, 3), [1, 2, 3, 4, 5, 6]),
    "turned": T("F32", (3, 2), None, (1, 3), 0, "0"),
    "b": T("BF16", (3,), 1.0),
}


def read_bytes(tmp_path: Path, data: bytes) -> Directory:
    """Write and read."""
    path = tmp_path / "x.pth"
    path.write_bytes(data)
    return torch_legacy.read(path)


def test_an_old_file_lists_tensors_with_their_places(tmp_path: Path) -> None:
    """Names, shapes, strides and bytes come from the pickle and from the storages behind it."""
    directory = read_bytes(tmp_path, c.torch_legacy({"state_dict": STATE, "epoch": 7}))
    assert directory.container == "torch-legacy"
    table = {tensor.name: tensor for tensor in directory.tensors}
    assert table["w"].shape == (2, 3)
    assert table["turned"].stride == (1, 3)
    assert table["turned"].storage == table["w"].storage
    assert c.materialise(tmp_path / "x.pth", table["w"], 4) == pack("F32", (6,), [1, 2, 3, 4, 5, 6])
    assert c.materialise(tmp_path / "x.pth", table["turned"], 4) == pack("F32", (6,), [1, 4, 2, 5, 3, 6])
    assert [entry.value for entry in directory.entries if entry.name == "epoch"] == [7]
    assert directory.facts["weights_only_loadable"] is True
    assert directory.hazards == ()


def test_a_cut_old_file_names_the_missing_bytes(tmp_path: Path) -> None:
    """An old file that ends inside a storage says how many bytes are missing at least."""
    good = c.torch_legacy({"w": T("F32", (100,), 1.0)})
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, good[:-40])
    assert caught.value.code == "file-short"
    assert caught.value.data["short_by"] == 40
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, good[:200])
    assert caught.value.code == "pickle-cut"


def test_bytes_after_the_last_storage_are_a_warning(tmp_path: Path) -> None:
    """More bytes than the storages need are told."""
    directory = read_bytes(tmp_path, c.torch_legacy(STATE) + b"more")
    assert [(h.code, h.severity) for h in directory.hazards] == [("file-long", "warn")]


def test_a_storage_of_another_length_is_refused(tmp_path: Path) -> None:
    """The length before a storage must be the pickle's."""
    good = bytearray(c.torch_legacy({"w": T("F32", (4,), 1.0)}))
    good[-24] = 9
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, bytes(good))
    assert caught.value.code == "storage-mismatch"


def test_a_payload_in_an_old_file_is_named(tmp_path: Path) -> None:
    """The same judgement holds for old files: nothing is run, the global is named."""
    value = {"w": T("F32", (2,), 1.0), "x": call(name("posix", "mkdir"), str(tmp_path / "canary"))}
    directory = read_bytes(tmp_path, c.torch_legacy(value))
    assert [(h.code, h.subject) for h in directory.hazards] == [("runs-code", "posix.mkdir")]
    assert not (tmp_path / "canary").exists()


def test_a_pickle_longer_than_the_first_look_is_read(tmp_path: Path) -> None:
    """A file whose pickle does not fit into what is read first is read further."""
    value = {"w": T("F32", (2,), 1.0), "words": [f"{'x' * 900}{i}" for i in range(2000)]}
    assert len(read_bytes(tmp_path, c.torch_legacy(value)).tensors) == 1


def test_a_plain_pickle_is_a_pickle(tmp_path: Path) -> None:
    """What pickle.dump writes is called a pickle; its objects are records, nothing is imported."""
    data = pickle.dumps({"args": argparse.Namespace(rate=1), "n": [1, 2]}, protocol=4)
    directory = read_bytes(tmp_path, data)
    assert directory.container == "pickle"
    assert directory.facts["foreign_globals"] == ["argparse.Namespace"]
    assert directory.facts["weights_only_loadable"] is False
    assert directory.root["args"].state == {"rate": 1}
    assert [h.code for h in read_bytes(tmp_path, data + b"more").hazards] == ["pickle-trailing"]


def test_a_tar_file_of_the_first_torch_is_named(tmp_path: Path) -> None:
    """The tar archives of torch 0.1 are recognised and refused with what to do."""
    path = tmp_path / "old.pt"
    with tarfile.open(path, "w") as archive:
        for member in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(member)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"\x80\x02N."))
    directory = opaque.read(path)
    assert directory.container == "torch-tar"
    assert [h.code for h in directory.hazards if h.severity == "block"] == ["torch-tar"]


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    """No bytes are a fault of their own."""
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, b"")
    assert caught.value.code == "file-empty"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(c.torch_legacy({"state_dict": STATE, "epoch": 3})))
def test_a_mutated_old_file_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to an old file, a reader gets a directory or one typed fault."""
    outcome(torch_legacy.read, tmp_path / "x.pth", data)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(pickle.dumps({"a": [1, 2.5, ("x", b"y")], "n": argparse.Namespace(k={1, 2})}, protocol=4)))
def test_a_mutated_pickle_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to a plain pickle, a reader gets a directory or one typed fault."""
    outcome(torch_legacy.read, tmp_path / "x.pkl", data)


# ------------------------------------------------------------------------------------------------------ with torch


def torch_module() -> Any:
    """Return torch, or skip."""
    return pytest.importorskip("torch")


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_old_files_agree_with_torch(tmp_path: Path, protocol: int) -> None:
    """What torch writes in the old format is listed as torch loads it, byte for byte."""
    torch = torch_module()
    base = torch.arange(24.0).reshape(4, 6)
    value = {
        "plain": base,
        "turned": base.T,
        "part": base[1:3, ::2],
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "small": torch.arange(5, dtype=torch.uint8).view(torch.float8_e5m2),
    }
    path = tmp_path / "old.pt"
    torch.save(value, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    directory = torch_legacy.read(path)
    assert [tensor.name for tensor in directory.tensors] == list(value)
    for tensor in directory.tensors:
        loaded = value[tensor.name].detach().contiguous()
        assert tensor.shape == tuple(loaded.shape)
        expected = loaded.reshape(-1).view(torch.uint8).numpy().tobytes() if loaded.numel() else b""
        assert c.materialise(path, tensor, loaded.element_size()) == expected, tensor.name
    assert not directory.blocked


def test_old_whole_modules_and_pickled_states_are_labelled(tmp_path: Path) -> None:
    """A module saved whole names its class; a state dict written by pickle itself lists its tensors without places."""
    torch = torch_module()
    layer = torch.nn.Linear(4, 3)
    torch.save(layer, tmp_path / "whole.pt", _use_new_zipfile_serialization=False)
    whole = torch_legacy.read(tmp_path / "whole.pt")
    assert whole.facts["object_classes"] == ["torch.nn.modules.linear.Linear"]
    assert "whole-object" in [h.code for h in whole.hazards if h.severity == "block"]
    assert {tensor.name: tensor.shape for tensor in whole.tensors} == {"weight": (3, 4), "bias": (3,)}
    for protocol in (0, 2, 4):
        (tmp_path / "state.pkl").write_bytes(pickle.dumps(layer.state_dict(), protocol=protocol))
        state = torch_legacy.read(tmp_path / "state.pkl")
        assert {tensor.name: tensor.shape for tensor in state.tensors} == {"weight": (3, 4), "bias": (3,)}
        assert "torch.storage._load_from_bytes" in state.facts["foreign_globals"]
        assert not state.blocked
