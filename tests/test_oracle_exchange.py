"""GGUF and ONNX as their own libraries write them: the libraries read, we read, and both say the same."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
from onnx import external_data_helper

from weighbridge.adapters.formats import gguf as ours
from weighbridge.adapters.formats import onnx as our_onnx
from weighbridge.adapters.formats.protocol import Tensor
from weighbridge.adapters.inspect import inspect

g: Any = gguf
o: Any = onnx


# ----------------------------------------------------------------------------------------------------------------- GGUF


def written(path: Path, tensors: Mapping[str, tuple[Any, Sequence[int]]], **how: Any) -> Any:
    """Write a GGUF with the library's writer: every tensor of a type and a shape, slowest dimension first."""
    writer = g.GGUFWriter(path, "llama", **how)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(40)])
    writer.add_token_types([1] * 40)
    writer.add_chat_template("{{ messages }}")
    for name, (kind, shape) in tensors.items():
        block, size = g.GGML_QUANT_SIZES[kind]
        raw = np.arange(math.prod(shape) // block * size, dtype=np.uint64).astype(np.uint8)
        writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer


def as_library(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return type, shape, place and bytes of each tensor as the library's reader lists them."""
    return {
        str(t.name): (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), int(t.data_offset), int(t.n_bytes))
        for t in g.GGUFReader(path).tensors
    }


def as_ours(tensors: Sequence[Tensor]) -> dict[str, tuple[str, tuple[int, ...], int | None, int]]:
    """Return the same of our directory."""
    return {t.name: (t.dtype, t.shape, t.offset, t.nbytes) for t in tensors}


EVERY = {f"blk.{kind.value}.weight": (kind, (3, 512)) for kind in g.GGML_QUANT_SIZES}


def test_the_table_of_types_is_the_librarys() -> None:
    """Name, block and bytes of every type of ggml, and the meaning of every file type, are those of the library."""
    table = {kind.value: (kind.name, *sizes) for kind, sizes in g.GGML_QUANT_SIZES.items()}
    assert {number: ours.TYPES.get(number) for number in table} == table
    names = {kind.value: kind.name for kind in g.LlamaFileType if kind.name != "GUESSED"}
    assert {number: name for number, name in names.items() if ours.FILE_TYPES.get(number, "?") not in name} == {}


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_every_type_is_listed_as_the_library_lists_it(tmp_path: Path, order: str) -> None:
    """Each type of tensor lies where the library finds it, with its shape and its bytes, in either byte order."""
    path = tmp_path / "m.gguf"
    written(path, EVERY, endianess=g.GGUFEndian[order])
    directory = ours.read(path)
    assert as_ours(directory.tensors) == as_library(path)
    assert directory.facts["architecture"] == "llama"
    assert directory.facts["metadata_keys"] == len(
        [name for name in g.GGUFReader(path).fields if not name.startswith("GGUF.")]
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_a_model_of_the_writer_is_accepted(tmp_path: Path, kind: str) -> None:
    """Counts are elements, not bytes, of packed types too; a packed model is a quantized one."""
    of = g.GGMLQuantizationType[kind]
    tensors = {"token_embd.weight": (of, (40, 256)), "blk.0.attn_q.weight": (of, (256, 256))}
    written(tmp_path / f"tiny-{kind}.gguf", {**tensors, "blk.0.attn_norm.weight": (g.GGMLQuantizationType.F32, (256,))})
    found = inspect(tmp_path)
    packed = kind not in {"F32", "F16", "BF16"}
    assert (found.outcome, found.artifact, found.kind) == ("accept", "gguf", "quantized" if packed else "model")
    assert found.facts["param_count"] == 40 * 256 + 256 * 256 + 256
    assert found.facts["tensor_count"] == 3
    assert (found.facts["architecture"], found.facts["tokenizer_entries"]) == ("llama", 40)
    assert found.facts["has_chat_template"] is True
    assert found.facts["license_in_file"] == "apache-2.0"


def test_a_split_of_the_writer_is_one_model(tmp_path: Path) -> None:
    """The parts of the writer's split are counted together; without one of them the split is not whole."""
    tensors = {f"blk.{i}.ffn_up.weight": (g.GGMLQuantizationType.F16, (16, 32)) for i in range(7)}
    written(tmp_path / "big.gguf", tensors, split_max_tensors=2)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert len(parts) == 4
    found = inspect(tmp_path)
    assert (found.outcome, found.facts["tensor_count"], found.facts["param_count"]) == ("accept", 7, 7 * 512)
    (tmp_path / parts[2]).unlink()
    found = inspect(tmp_path)
    assert {f.code for f in found.findings if f.severity == "block"} == {"split-part-missing"}
    assert found.facts["missing_files"] == [parts[2]]


def test_an_adapter_of_the_writer_has_its_rank_and_strength(tmp_path: Path) -> None:
    """A LoRA as llama.cpp's converter writes it is an adapter, its rank of the matrices, alpha of the header."""
    writer = g.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type(g.GGUFType.ADAPTER)
    writer.add_string(g.Keys.Adapter.TYPE, "lora")
    writer.add_float32(g.Keys.Adapter.LORA_ALPHA, 6.0)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_a", np.ones((4, 32), dtype=np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_b", np.ones((16, 4), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = inspect(tmp_path)
    assert (found.outcome, found.artifact, found.kind) == ("accept", "gguf-lora", "adapter")
    assert (found.facts["rank"], found.facts["alpha"], found.facts["scaling"]) == (4, 6.0, 1.5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "TQ1_0", "MXFP4"])
def test_what_the_library_quantizes_has_its_logical_shape(tmp_path: Path, kind: str) -> None:
    """Rows that the library packed are listed with the shape they had before."""
    of = g.GGMLQuantizationType[kind]
    packed = g.quants.quantize(np.ones((6, 512), dtype=np.float32), of)
    writer = g.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = ours.read(tmp_path / "q.gguf").tensors
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (kind, (6, 512), packed.nbytes)


# ----------------------------------------------------------------------------------------------------------------- ONNX

TYPES = [name for name in o.TensorProto.DataType.keys() if name not in {"UNDEFINED", "STRING"}]  # noqa: SIM118


def model_of(tensors: Sequence[Any], opset: int = 21) -> Any:
    """Return a model of one node with some initializers."""
    values = [o.helper.make_tensor_value_info(name, o.TensorProto.FLOAT, ["n", 3]) for name in ("x", "y")]
    graph = o.helper.make_graph([o.helper.make_node("Identity", ["x"], ["y"])], "g", values[:1], values[1:], tensors)
    return o.helper.make_model(graph, opset_imports=[o.helper.make_opsetid("", opset)], producer_name="maker")


def every_type() -> list[Any]:
    """Return a tensor of six elements of every type, typed by field, as the library's helper stores it."""
    return [
        o.helper.make_tensor(f"t.{name}", getattr(o.TensorProto, name), [2, 3], [1, 0, 1, 1, 0, 1]) for name in TYPES
    ]


@pytest.mark.parametrize("raw", [False, True])
def test_every_type_of_onnx_is_listed(tmp_path: Path, raw: bool) -> None:
    """Whatever field holds the values, each initializer is listed with its shape; packed ones count their elements."""
    tensors = every_type()
    if raw:
        tensors = [o.numpy_helper.from_array(o.numpy_helper.to_array(t), t.name) for t in tensors]
    o.save(model_of(tensors), tmp_path / "m.onnx")
    directory = our_onnx.read(tmp_path / "m.onnx")
    assert directory.hazards == ()
    assert {t.name: t.shape for t in directory.tensors} == {t.name: (2, 3) for t in tensors}
    numbers = {t.name: t.data_type for t in tensors}
    assert {t.name: t.dtype for t in directory.tensors} == {n: our_onnx.DTYPES[k] for n, k in numbers.items()}
    found = inspect(tmp_path)
    assert (found.outcome, found.artifact, found.kind) == ("accept", "onnx", "model")
    assert (found.facts["tensor_count"], found.facts["param_count"]) == (len(tensors), 6 * len(tensors))


@pytest.mark.parametrize("one_file", [True, False])
def test_external_data_of_the_library_is_part_of_the_model(tmp_path: Path, one_file: bool) -> None:
    """Each tensor's bytes lie where the library put them, the data files are published along, and each is missed."""
    arrays = {f"w.{i}": np.full((16, 8 + i), i, dtype=np.float32) for i in range(3)}
    model = model_of([o.numpy_helper.from_array(value, name) for name, value in arrays.items()])
    place = tmp_path / "m.onnx"
    o.save(model, place, save_as_external_data=True, all_tensors_to_one_file=one_file, size_threshold=0, location=None)
    loaded = o.load(place)
    external_data_helper.load_external_data_for_model(loaded, str(tmp_path))
    theirs = {t.name: bytes(t.raw_data) for t in loaded.graph.initializer}
    directory = our_onnx.read(place)
    for tensor in directory.tensors:
        assert tensor.file is not None
        data = (tmp_path / tensor.file).read_bytes()
        assert data[tensor.offset : (tensor.offset or 0) + tensor.nbytes] == theirs[tensor.name]
    found = inspect(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert len(files) == (2 if one_file else 4)
    assert (found.outcome, {f.path for f in found.files if f.publish}) == ("accept", files)
    assert found.facts["param_count"] == sum(value.size for value in arrays.values())
    gone = min(files - {"m.onnx"})
    (tmp_path / gone).unlink()
    broken = inspect(tmp_path)
    assert "data-missing" in {f.code for f in broken.findings if f.severity == "block"}


def test_opsets_and_functions_are_those_of_the_model(tmp_path: Path) -> None:
    """Domains, versions, producer and IR are what the library's own reading says."""
    model = model_of([o.helper.make_tensor("w", o.TensorProto.FLOAT, [2], [1.0, 2.0])], opset=17)
    model.opset_import.append(o.helper.make_opsetid("com.microsoft", 1))
    o.save(model, tmp_path / "m.onnx")
    again = o.load(tmp_path / "m.onnx")
    facts = our_onnx.read(tmp_path / "m.onnx").facts
    assert facts["opsets"] == {each.domain or "ai.onnx": each.version for each in again.opset_import}
    assert (facts["ir_version"], facts["producer"]) == (again.ir_version, "maker")
