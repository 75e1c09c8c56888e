"""Torch zip files as bytes, without torch: cut, hostile, odd and mutated ones are a directory or one typed fault."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.deck import MEMORY_LIMIT
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import T, call, name
from weighbridge_testlib.mutation import mutated, outcome


def read_bytes(tmp_path: Path, data: bytes) -> Directory:
    """Write and read."""
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    return torch_zip.read(path)


def test_a_cut_archive_is_named_with_its_size(tmp_path: Path) -> None:
    """Whatever is cut off at the end, the fault says that the archive is cut and how long it is."""
    good = c.torch_zip({"w": T("F32", (64, 64), 1.0)})
    for size in (4, 100, len(good) // 2, len(good) - 23, len(good) - 1):
        with pytest.raises(FormatFault) as caught:
            read_bytes(tmp_path, good[:size])
        assert caught.value.code == "zip-cut"
        assert caught.value.data == {"file_bytes": size}


def test_a_payload_is_named_and_the_tensors_are_still_listed(tmp_path: Path) -> None:
    """A call of posix.mkdir beside good weights blocks, by name; the weights are listed."""
    value = {
        "state_dict": {"w": T("F32", (2,), 1.0)},
        "callbacks": call(name("posix", "mkdir"), str(tmp_path / "canary")),
    }
    directory = read_bytes(tmp_path, c.torch_zip(value))
    assert directory.facts["foreign_globals"] == ["posix.mkdir"]
    assert [(h.code, h.severity, h.subject) for h in directory.hazards] == [("runs-code", "block", "posix.mkdir")]
    assert [tensor.name for tensor in directory.tensors] == ["w"]
    assert not (tmp_path / "canary").exists()


def test_classes_of_a_trainer_are_notes(tmp_path: Path) -> None:
    """A callback's class as a key, a config object and an enum name their packages and block nothing."""
    value = {
        "state_dict": {"w": T("F32", (2,), 1.0)},
        "callbacks": {name("pytorch_lightning.callbacks.early_stopping", "EarlyStopping"): {"patience": 3}},
        "hyper_parameters": call(name("omegaconf.dictconfig", "DictConfig"), {"a": 1}),
        "kind": call(name("transformers.trainer_utils", "IntervalStrategy"), "no"),
        "enum": call(name("__builtin__", "getattr"), name("mine.config", "Mode"), "FAST"),
        "lookup": call(name("code.model", "Net")),
    }
    directory = read_bytes(tmp_path, c.torch_zip(value))
    assert {hazard.severity for hazard in directory.hazards} == {"note"}
    assert "pytorch_lightning.callbacks.early_stopping.EarlyStopping" in directory.facts["foreign_globals"]
    assert "mine.config.Mode.FAST" in directory.facts["foreign_globals"]


def test_a_called_function_of_a_package_is_a_warning(tmp_path: Path) -> None:
    """A function of somebody's package that loading would call is louder than a class that it would make."""
    directory = read_bytes(tmp_path, c.torch_zip({"x": call(name("somepackage.tools", "restore"), 1)}))
    assert [(h.code, h.severity) for h in directory.hazards] == [("foreign-call", "warn")]


def test_a_rebuild_of_the_future_is_refused(tmp_path: Path) -> None:
    """A way to rebuild tensors that is not known blocks: the list without those tensors would not be whole."""
    value = {"w": T("F32", (2,), 1.0), "x": call(name("torch._utils", "_rebuild_tensor_v9"), 1)}
    directory = read_bytes(tmp_path, c.torch_zip(value))
    assert [(h.code, h.severity) for h in directory.hazards] == [("tensor-unknown", "block")]


def test_big_endian_numbers_are_said(tmp_path: Path) -> None:
    """A file of another byte order is listed and the order is told; an unknown order blocks."""
    directory = read_bytes(tmp_path, c.torch_zip({"w": T("F32", (2,), 1.0)}, byteorder=b"big"))
    assert directory.facts["byteorder"] == "big"
    assert [hazard.code for hazard in directory.hazards] == ["big-endian"]
    assert read_bytes(tmp_path, c.torch_zip({"w": T("F32", (2,), 1.0)}, byteorder=b"odd")).blocked
    assert read_bytes(tmp_path, c.torch_zip({"w": T("F32", (2,), 1.0)}, byteorder=None)).facts["byteorder"] is None


def test_a_large_tensor_that_repeats_its_memory_blocks(tmp_path: Path) -> None:
    """A stride of zero is an honest small buffer or an attack; the size tells them apart."""
    small = read_bytes(tmp_path, c.torch_zip({"w": T("F32", (512, 4), 1.0, (0, 1), 0, "0", 4)}))
    assert not small.blocked
    large = read_bytes(tmp_path, c.torch_zip({"w": T("F32", (1 << 20, 4), 1.0, (0, 1), 0, "0", 4)}))
    assert [(h.code, h.data["bad_tensor"]) for h in large.hazards] == [("tensor-expanded", "w")]


def test_another_zip_is_no_torch_file(tmp_path: Path) -> None:
    """A zip archive without a pickle is said to be no torch file, another container not even a zip."""
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, c.zipped([("a.txt", b"text")]))
    assert caught.value.code == "not-torch"
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, b"GGUF" + bytes(100))
    assert caught.value.code == "not-zip"


def test_two_references_to_one_table_list_it_once(tmp_path: Path) -> None:
    """A table that is referenced twice, or contains itself, is walked once."""
    loop = b"\x80\x02}q\x00(" + c.text("self") + b"h\x00" + c.text("again") + b"h\x00u."
    assert read_bytes(tmp_path, c.torch_zip(loop)).tensors == ()


# --------------------------------------------------------------------------------------------------------------- fuzz

SEED = c.torch_zip(
    {
        "state_dict": {"w": T("F32", (4, 2), 0.5), "v": T("F32", (2,), None, (4,), 1, "0"), "h": T("BF16", (3,), 1.0)},
        "epoch": 3,
        "args": call(name("argparse", "Namespace")),
    }
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(SEED))
def test_a_mutated_archive_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to the archive, a reader gets a directory or one typed fault."""
    outcome(torch_zip.read, tmp_path / "x.pt", data)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=mutated(c.pickled({"w": T("F32", (4, 2), 0.5), "l": [1, (2.5, "x")], "n": {"a": None}}, c.Storages().tensor))
)
def test_a_mutated_pickle_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to the pickle inside a sound archive, a reader gets a directory or one typed fault."""
    outcome(torch_zip.read, tmp_path / "x.pt", c.torch_zip(data, more=[("data/0", bytes(32))]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.lists(st.integers(0, 255), max_size=60).map(bytes))
def test_random_opcodes_are_a_directory_or_a_fault(tmp_path: Path, body: bytes) -> None:
    """Random bytes as a pickle end as a directory or one typed fault."""
    outcome(torch_zip.read, tmp_path / "x.pt", c.torch_zip(b"\x80\x02" + body + b"."))


def _read_so_far() -> int:
    """Return how many bytes this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_directory_does_not_depend_on_the_bytes(tmp_path: Path) -> None:
    """A file with a sparse storage of gigabytes is listed by reading its ends alone."""
    assert MEMORY_LIMIT < 300 << 20
    storages = c.Storages()
    data = c.pickled({"w": T("U8", (2,), 1.0)}, storages.tensor)
    count = 3 << 30
    body = data.replace(c.whole(2) + b"tQ", c.whole(count) + b"tQ").replace(c.plain((2,)), c.plain((count,)))
    small = c.zipped([("a/data.pkl", body), ("a/data/0", b"")], align=0)
    start = small.find(b"PK\1\2")
    header = small.find(b"PK\3\4", 4)
    directory, tail = bytearray(small[start : small.rfind(b"PK\5\6")]), small[small.rfind(b"PK\5\6") :]
    record = directory.rfind(b"PK\1\2")
    directory[record + 20 : record + 28] = struct.pack("<II", count, count)
    path = tmp_path / "sparse.pt"
    with path.open("wb") as stream:
        stream.write(small[:start])
        assert header < start
        stream.seek(start + count)
        stream.write(bytes(directory) + tail[:16] + struct.pack("<I", start + count) + tail[20:])
    before = _read_so_far()
    listed = torch_zip.read(path)
    assert _read_so_far() - before < 1 << 20
    assert listed.tensors[0].nbytes == count
    assert not listed.blocked
