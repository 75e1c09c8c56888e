"""ONNX models: versions, tensors and external data from the file's own words, with bounds."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from weighbridge.adapters.formats import onnx
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.mutation import mutated, outcome

MODEL = c.onnx_model(
    [c.onnx_tensor("w", (2, 3), raw=bytes(24)), c.onnx_tensor("b", (3,), code=10, raw=bytes(6))],
    nodes=[c.onnx_node("MatMul"), c.onnx_node("Add"), c.onnx_node("Fancy", domain="com.example")],
    inputs={"x": ["batch", 3], "w": [2, 3]},
)


def read_bytes(tmp_path: Path, data: bytes) -> Directory:
    """Write and read."""
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    return onnx.read(path)


def test_a_model_states_versions_tensors_and_axes(tmp_path: Path) -> None:
    """Operator set, producer, nodes, initializers, inputs with their dynamic axes and foreign operators are facts."""
    directory = read_bytes(tmp_path, MODEL)
    facts = directory.facts
    assert (facts["ir_version"], facts["opsets"], facts["producer"]) == (8, {"ai.onnx": 17}, "tests")
    assert (facts["nodes"], facts["initializers"]) == (3, 2)
    assert facts["inputs"] == {"x": ["batch", 3]}
    assert facts["dynamic_axes"] is True
    assert facts["custom_domains"] == ["com.example"]
    assert facts["external_data"] == []
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in directory.tensors] == [
        ("w", "F32", (2, 3), 24),
        ("b", "F16", (3,), 6),
    ]
    assert directory.hazards == ()
    raw = (tmp_path / "model.onnx").read_bytes()
    begin = directory.tensors[0].offset
    assert begin is not None
    assert raw[begin : begin + 24] == bytes(24)


def test_external_data_is_looked_for_in_the_folder(tmp_path: Path) -> None:
    """A file of weights beside the model must be there and long enough."""
    outside = {"location": "w.data", "offset": "8", "length": "24"}
    model = c.onnx_model([c.onnx_tensor("w", (2, 3), external=outside), c.onnx_tensor("v", (1,), raw=bytes(4))])
    missing = read_bytes(tmp_path, model)
    assert missing.facts["missing_files"] == ["w.data"]
    assert [(h.code, h.data["missing_tensors"]) for h in missing.hazards] == [("data-missing", ["w"])]
    (tmp_path / "w.data").write_bytes(bytes(32))
    whole = read_bytes(tmp_path, model)
    assert whole.hazards == ()
    assert whole.facts["external_data"] == ["w.data"]
    assert (whole.tensors[0].file, whole.tensors[0].offset) == ("w.data", 8)
    (tmp_path / "w.data").write_bytes(bytes(31))
    assert [h.code for h in read_bytes(tmp_path, model).hazards] == ["file-short"]


@pytest.mark.parametrize("location", ["../w", "/w", "a/../../w", "", "a\\..\\w", "w\n", "x" * 2000])
def test_external_data_stays_in_the_folder(tmp_path: Path, location: str) -> None:
    """A place outside the folder is refused, not opened."""
    directory = read_bytes(tmp_path, c.onnx_model([c.onnx_tensor("w", (2,), external={"location": location})]))
    assert [h.code for h in directory.hazards] == ["path-unsafe"]


def test_external_data_hides_in_attributes(tmp_path: Path) -> None:
    """External data of a constant inside a node, or inside a nested graph, is found too."""
    tensor = c.onnx_tensor("k", (2,), external={"location": "../k"})
    attribute = c.field(1, "value") + c.field(5, tensor)
    inner = c.field(6, c.field(1, c.onnx_node("Constant", attributes=[attribute])))
    directory = read_bytes(tmp_path, c.onnx_model([], nodes=[c.onnx_node("If", attributes=[inner])]))
    assert [h.code for h in directory.hazards] == ["path-unsafe"]


def test_a_tensor_must_have_its_bytes(tmp_path: Path) -> None:
    """Bytes that do not fit dtype and shape, an unknown dtype, and no bytes at all are named."""
    tensors = [c.onnx_tensor("a", (3,), raw=bytes(8)), c.onnx_tensor("d", (3,), code=99, raw=b"")]
    hazards = read_bytes(tmp_path, c.onnx_model(tensors)).hazards
    assert [(h.code, h.subject) for h in hazards] == [("tensor-invalid", "a"), ("tensor-invalid", "d")]
    empty = c.field(1, 3) + c.field(2, 1) + c.field(8, "none")
    assert [h.code for h in read_bytes(tmp_path, c.onnx_model([empty])).hazards] == ["tensor-missing"]
    typed = empty + c.field(4, bytes(12))
    assert read_bytes(tmp_path, c.onnx_model([typed])).hazards == ()


def test_a_cut_model_names_the_missing_bytes(tmp_path: Path) -> None:
    """A model that ends early says by how much."""
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path, c.field(1, 8) + c.field(7, bytes(0)) + c.varint(8 << 3 | 2) + c.varint(100) + b"x")
    assert (caught.value.code, caught.value.data["short_by"]) == ("file-short", 99)


def test_a_single_tensor_is_no_model(tmp_path: Path) -> None:
    """The .pb files beside test models hold one tensor: named, no model, no damage."""
    directory = read_bytes(tmp_path, c.onnx_tensor("x", (2, 2), raw=bytes(16)))
    assert directory.container == "onnx-tensor"
    assert [h.code for h in directory.hazards] == ["not-a-model"]


def test_other_messages_are_no_models(tmp_path: Path) -> None:
    """A Core ML model is told apart; text and other bytes are a fault."""
    for data in (c.field(1, 5) + c.field(2, "d") + c.field(502, b"x"), b"version https://x\n", b"", b"\x08\x07"):
        with pytest.raises(FormatFault):
            read_bytes(tmp_path, data)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated(MODEL))
def test_a_mutated_model_is_a_directory_or_a_fault(tmp_path: Path, data: bytes) -> None:
    """Whatever is done to a model, a reader gets a directory or one typed fault."""
    outcome(onnx.read, tmp_path / "m.onnx", data)


def test_models_of_the_library_are_listed_as_it_reads_them(tmp_path: Path) -> None:
    """Where the onnx package is installed, its own models agree: names, shapes, counts, inline and external."""
    library: Any = pytest.importorskip("onnx")
    numpy: Any = pytest.importorskip("numpy")
    helper, proto = library.helper, library.TensorProto
    weights = {
        "f": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "i": numpy.arange(4, dtype=numpy.int64),
        "h": numpy.ones((3, 1), dtype=numpy.float16),
    }
    tensors = [library.numpy_helper.from_array(value, label) for label, value in weights.items()]
    tensors.append(helper.make_tensor("typed", proto.FLOAT, [2], [1.0, 2.0]))
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", proto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", proto.FLOAT, ["n", 3])],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    library.save(model, tmp_path / "inline.onnx")
    inline = onnx.read(tmp_path / "inline.onnx")
    assert inline.facts["opsets"] == {"ai.onnx": 18}
    assert {t.name: t.shape for t in inline.tensors} == {**{k: v.shape for k, v in weights.items()}, "typed": (2,)}
    assert inline.hazards == ()
    library.save(model, tmp_path / "out.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
    outside = onnx.read(tmp_path / "out.onnx")
    assert outside.hazards == ()
    assert outside.facts["external_data"] == ["w.bin"]
    data = (tmp_path / "w.bin").read_bytes()
    for tensor in outside.tensors:
        if tensor.file:
            assert data[tensor.offset : (tensor.offset or 0) + tensor.nbytes] == weights[tensor.name].tobytes()
