"""Torch zip files: the directory equals what torch itself loads, and nothing in them is ever run."""

import argparse
import collections
import datetime as dt
import pathlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.formats import torch_zip
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge.adapters.formats.torch_names import DTYPES, SAFE_LOADING, STORAGES
from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import T

torch = pytest.importorskip("torch")


def flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tensors of what torch loaded, with the way to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flat(item, (*path, str(index)))


def raw(tensor: Any) -> bytes:
    """Return the bytes of a plain copy of a tensor."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def agrees(path: Path, directory: Directory, loaded: Any) -> None:
    """Assert that a directory lists exactly the loaded tensors: names, dtypes, shapes and every byte."""
    expected = dict(flat(loaded))
    listed = {(*found.group, found.name) if found.name else (): found for found in directory.tensors}
    assert listed.keys() == expected.keys()
    for key, tensor in expected.items():
        found = listed[key]
        kind = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        shape = tuple(tensor.shape)
        assert found.dtype == kind.dtype, key
        if kind.dtype == "F4":
            assert found.shape == (*shape[:-1], shape[-1] * 2)
            continue
        assert found.shape == shape, key
        assert found.nbytes == tensor.numel() * tensor.element_size(), key
        assert c.materialise(path, found, tensor.element_size()) == raw(tensor), key


def saved(path: Path, value: Any, **options: Any) -> tuple[Directory, Any]:
    """Save with torch, read both ways."""
    torch.save(value, path, **options)
    return torch_zip.read(path), torch.load(path, weights_only=False)


def _dtypes() -> dict[str, Any]:
    plain = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    plain += [torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128]
    rows = {str(dtype): torch.arange(1, 7).reshape(2, 3).to(dtype) for dtype in plain}
    bits = torch.arange(1, 13, dtype=torch.uint8).reshape(2, 6)
    for wide in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        rows[wide] = bits.view(getattr(torch, wide))
    rows["float4"] = bits.view(torch.float4_e2m1fn_x2)
    for wide in ("uint16", "uint32"):
        rows[wide] = torch.arange(24, dtype=torch.uint8).view(getattr(torch, wide))
    return rows


def test_every_dtype_is_listed_as_torch_loads_it(tmp_path: Path) -> None:
    """Each dtype torch can save keeps its name, shape and bytes; what safetensors cannot hold is named."""
    directory, loaded = saved(tmp_path / "all.pt", _dtypes())
    agrees(tmp_path / "all.pt", directory, loaded)
    assert directory.facts["unsupported"] == {"torch.complex128": "complex128"}
    assert directory.facts["weights_only_loadable"] is True
    assert not directory.blocked


def test_views_of_one_storage_keep_their_own_size(tmp_path: Path) -> None:
    """Transposed, sliced, stepped, scalar and empty views are listed with offset and stride, in their own size."""
    base = torch.arange(48.0).reshape(6, 8)
    value = {
        "base": base,
        "turned": base.T,
        "rows": base[2:4],
        "columns": base[:, 3:5],
        "steps": base[::2, 1::3],
        "one": base[5, 7],
        "none": base[:0],
        "wide": torch.arange(6).reshape(1, 6)[:, None, :],
        "expanded": torch.arange(4.0).expand(3, 4),
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    }
    directory, loaded = saved(tmp_path / "views.pt", value)
    agrees(tmp_path / "views.pt", directory, loaded)
    shared = {tensor.name for tensor in directory.tensors if tensor.storage == directory.tensors[0].storage}
    assert {"base", "turned", "rows", "columns", "steps", "one"} <= shared
    turned = next(tensor for tensor in directory.tensors if tensor.name == "turned")
    assert turned.stride == (1, 8)
    assert not directory.blocked


def test_parameters_buffers_and_ties_are_tensors(tmp_path: Path) -> None:
    """Parameters are read as tensors, with or without attributes of their own; tied ones share their storage."""
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(5, 3)
    model.head = torch.nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("count", torch.tensor(3))
    marked = torch.nn.Parameter(torch.ones(2, 2))
    marked.mark = "sharded"
    value = {"state": model.state_dict(), "parameters": dict(model.named_parameters()), "marked": marked}
    directory, loaded = saved(tmp_path / "p.pt", value)
    agrees(tmp_path / "p.pt", directory, loaded)
    places = {t.name: t.storage for t in directory.tensors if t.group == ("state",)}
    assert places["embed.weight"] == places["head.weight"]
    assert directory.facts["foreign_globals"] == []


def test_a_training_checkpoint_is_listed_with_its_optimizer(tmp_path: Path) -> None:
    """Optimizer state under whole numbers, lists and nested tables keep the way that leads to them."""
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    value = {
        "epoch": 3,
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.ones(1), {"inner": torch.zeros(2)}],
        "args": argparse.Namespace(rate=0.1, where=pathlib.PurePosixPath("a/b")),
        "when": dt.date(2026, 1, 2),
        "plain": (1, 2.5, None, True, "text", b"bytes", {1, 2}),
    }
    directory, loaded = saved(tmp_path / "c.pt", value)
    agrees(tmp_path / "c.pt", directory, loaded)
    entries = {entry.name: entry for entry in directory.entries}
    assert entries["epoch"].value == 3
    assert entries["model"].tensors == 2
    assert entries["model"].nbytes == (4 * 2 + 2) * 4
    assert entries["args"].kind == "object"
    assert "argparse.Namespace" in directory.facts["foreign_globals"]
    assert not directory.blocked


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    """A file saved with another pickle protocol has the same tensors."""
    value = collections.OrderedDict(a=torch.arange(3), b={"c": torch.ones(2, 2)}, n=[1, 300, 70_000, 2**40, -1, 0.5])
    directory, loaded = saved(tmp_path / "p.pt", value, pickle_protocol=protocol)
    agrees(tmp_path / "p.pt", directory, loaded)
    assert directory.root["n"] == [1, 300, 70_000, 2**40, -1, 0.5]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    """Sparse, quantized, conjugated and meta tensors are listed and named, never silently made something else."""
    lazily = torch.ones(2, dtype=torch.complex64).conj()
    value = {
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        "conjugated": lazily,
        "meta": torch.empty(3, 4, device="meta"),
        "plain": torch.ones(2),
    }
    torch.save(value, tmp_path / "odd.pt")
    directory = torch_zip.read(tmp_path / "odd.pt")
    assert directory.facts["unsupported"] == {
        "sparse": "sparse_coo",
        "rows": "sparse_csr",
        "quantized": "quint8",
        "conjugated": "conj view",
        "meta": "meta",
    }
    sizes = {tensor.name: (tensor.shape, tensor.nbytes) for tensor in directory.tensors}
    assert sizes["sparse"] == ((3, 3), 36)
    assert sizes["meta"] == ((3, 4), 48)
    assert not directory.blocked


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_archive_is_a_program(tmp_path: Path) -> None:
    """A scripted module is called TorchScript and refused, with its tensors listed, and none of its code is run."""
    torch.jit.script(torch.nn.Linear(3, 2)).save(str(tmp_path / "m.pt"))
    directory = torch_zip.read(tmp_path / "m.pt")
    assert directory.container == "torchscript"
    assert [hazard.code for hazard in directory.hazards if hazard.severity == "block"] == ["torchscript"]
    assert {tensor.name: tensor.shape for tensor in directory.tensors} == {"weight": (2, 3), "bias": (2,)}
    assert directory.facts["code_files"] > 0


def test_a_whole_module_is_not_portable(tmp_path: Path) -> None:
    """A pickled module is refused as a whole object, its tensors named as its state dict names them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.save({"model": model}, tmp_path / "m.pt")
    directory = torch_zip.read(tmp_path / "m.pt")
    assert [tensor.name for tensor in directory.tensors] == list(model.state_dict())
    assert "whole-object" in [hazard.code for hazard in directory.hazards if hazard.severity == "block"]
    assert directory.facts["object_classes"] == ["torch.nn.modules.container.Sequential"]


def test_the_verdict_on_safe_loading_is_torchs_own(tmp_path: Path) -> None:
    """weights_only_loadable says of every value what torch.load(weights_only=True) then does."""
    numpy = pytest.importorskip("numpy")
    values = {
        "tensors": {"w": torch.ones(2)},
        "ordered": collections.OrderedDict(w=torch.ones(2)),
        "counter": collections.Counter("aab"),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "complex": 1j,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "bytearray": bytearray(b"abc"),
        "large": 2**70,
        "deque": collections.deque([1]),
        "frozenset": frozenset({1}),
        "range": range(3),
        "namespace": argparse.Namespace(a=1),
        "path": pathlib.PurePosixPath("a"),
        "date": dt.date(2026, 1, 1),
        "numpy-scalar": numpy.float64(1.5),
        "numpy-array": numpy.arange(3),
        "layer": torch.nn.Linear(1, 1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
    }
    path = tmp_path / "v.pt"
    for label, value in values.items():
        torch.save({"x": value, "w": torch.ones(1)}, path)
        try:
            torch.load(path, weights_only=True)
            expected = True
        except Exception:  # noqa: BLE001 - whatever torch says, it did not load
            expected = False
        assert torch_zip.read(path).facts["weights_only_loadable"] is expected, label


def test_the_names_that_safe_loading_allows_are_torchs_own() -> None:
    """The list of allowed globals holds every one of torch's; a new torch shows up here."""
    allowed = torch._weights_only_unpickler._get_allowed_globals()
    assert set(allowed) - SAFE_LOADING == set()
    assert {kind.__name__ for kind in torch._storage_classes} - {"TypedStorage"} <= STORAGES.keys()


def test_numpy_scalars_are_values_and_named(tmp_path: Path) -> None:
    """A numpy number beside the weights becomes its value; what the pickle names for it is reported, nothing blocks."""
    numpy = pytest.importorskip("numpy")
    directory, _ = saved(tmp_path / "n.pt", {"best": numpy.float64(0.25), "step": numpy.int32(7), "w": torch.ones(2)})
    assert directory.root["best"] == 0.25
    assert directory.root["step"] == 7
    assert not directory.blocked
    assert any(full.endswith("multiarray.scalar") for full in directory.facts["foreign_globals"])


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    """Torch can be told to write no checksums; such a file is sound."""
    torch.serialization.set_crc32_options(False)
    try:
        directory, loaded = saved(tmp_path / "n.pt", {"w": torch.arange(9)})
    finally:
        torch.serialization.set_crc32_options(True)
    agrees(tmp_path / "n.pt", directory, loaded)


def test_a_flipped_bit_in_the_pickle_is_named(tmp_path: Path) -> None:
    """The pickle is compared with its checksum before it is read."""
    path = tmp_path / "f.pt"
    torch.save({"weight": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    data[data.find(b"weight")] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatFault) as caught:
        torch_zip.read(path)
    assert caught.value.code == "record-damaged"


def test_odd_archive_names_are_read(tmp_path: Path) -> None:
    """The folder inside the archive is named after the file, whatever that is."""
    for stem in ("epoch=0-step=10", "模型", "a b", "x" * 200):
        directory, loaded = saved(tmp_path / f"{stem}.ckpt", {"w": torch.arange(5)})
        agrees(tmp_path / f"{stem}.ckpt", directory, loaded)


def test_builder_files_are_what_torch_reads(tmp_path: Path) -> None:
    """The builder that the other tests use writes files that torch itself opens."""
    value = {
        "state_dict": {
            "w": T("F32", (2, 2), [1, 2, 3, 4]),
            "column": T("F32", (2,), None, (2,), 1, "0"),
            "half": T("BF16", (3,), 1.0),
            "wide": T("C128", (2,)),
        },
        "epoch": 3,
        "deep": [1, (True, None), 2**40, -5, 1.5, b"\x00\xff"],
    }
    path = tmp_path / "b.ckpt"
    path.write_bytes(c.torch_zip(value))
    loaded = torch.load(path)
    agrees(path, torch_zip.read(path), loaded)
    assert loaded["deep"] == [1, (True, None), 2**40, -5, 1.5, b"\x00\xff"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_views_of_any_storage_agree(tmp_path: Path, data: st.DataObject) -> None:
    """Random strided views of random storages are listed byte for byte as torch loads them."""
    value = {}
    for index in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 60))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64]))
        base = torch.arange(count).to(dtype)
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        stride = [data.draw(st.integers(0, 5)) for _ in shape]
        last = sum((side - 1) * step for side, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        if last < count:
            value[f"v{index}"] = base.as_strided(shape, stride, data.draw(st.integers(0, count - 1 - last)))
    directory, loaded = saved(tmp_path / "r.pt", value)
    agrees(tmp_path / "r.pt", directory, loaded)
    assert not directory.blocked
