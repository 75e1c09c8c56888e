"""Containers that are recorded and not opened: each is called what it is, with what it or its neighbours state."""

import gzip
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.formats import opaque
from weighbridge.adapters.formats.protocol import Directory, FormatFault
from weighbridge_testlib import containers as c
from weighbridge_testlib.mutation import mutated, outcome


def read_bytes(path: Path, data: bytes) -> Directory:
    """Write and read."""
    path.write_bytes(data)
    return opaque.read(path)


def npy(descr: str, shape: tuple[int, ...], body: bytes, *, fortran: bool = False) -> bytes:
    """Return a .npy file."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    head = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + body


def flax(table: dict[str, Any]) -> bytes:
    """Return msgpack as Flax writes it; a tuple (dtype, shape, bytes) is an array."""

    def word(value: str) -> bytes:
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw

    out = bytes([0x80 | len(table)])
    for key, value in table.items():
        out += word(key)
        if isinstance(value, dict):
            out += flax(value)
        elif isinstance(value, tuple):
            dtype, shape, raw = value
            sides = bytes([0x90 | len(shape)]) + b"".join(b"\xcd" + struct.pack(">H", side) for side in shape)
            inner = b"\x93" + sides + word(dtype) + b"\xc5" + struct.pack(">H", len(raw)) + raw
            out += b"\xc8" + struct.pack(">HB", len(inner), 1) + inner
        else:
            out += b"\x2a"
    return out


def test_arrays_of_numpy_are_listed(tmp_path: Path) -> None:
    """A .npz lists its arrays, stored or packed; column order is a stride; other byte orders are named."""
    members = [
        ("w.npy", npy("<f4", (2, 3), bytes(24))),
        ("turned.npy", npy("<f8", (2, 3), bytes(48), fortran=True)),
        ("big.npy", npy(">f4", (2,), bytes(8))),
        ("one.npy", npy("|b1", (), bytes(1))),
    ]
    for compress in ([], ["w.npy", "turned.npy", "big.npy", "one.npy"]):
        directory = read_bytes(tmp_path / "a.npz", c.zipped(members, align=0, compress=compress))
        assert directory.container == "npz"
        assert directory.facts["compressed"] is bool(compress)
        table = {t.name: (t.dtype, t.shape, t.stride, t.unsupported) for t in directory.tensors}
        assert table == {
            "w": ("F32", (2, 3), None, None),
            "turned": ("F64", (2, 3), (1, 2), None),
            "big": ("F32", (2,), None, "big-endian"),
            "one": ("BOOL", (), None, None),
        }
        assert directory.hazards == ()
    assert read_bytes(tmp_path / "a.npy", npy("<i4", (4,), bytes(16))).tensors[0].shape == (4,)


def test_arrays_of_objects_are_pickles(tmp_path: Path) -> None:
    """An array of objects is a pickle inside: named, blocked, not read."""
    data = npy("|O", (2,), c.pickled(c.call(c.name("posix", "mkdir"), str(tmp_path / "canary"))))
    directory = read_bytes(tmp_path / "o.npz", c.zipped([("o.npy", data)], align=0))
    assert [(h.code, h.severity) for h in directory.hazards] == [("pickled-array", "block")]
    assert not (tmp_path / "canary").exists()


def test_flax_checkpoints_are_listed(tmp_path: Path) -> None:
    """Nested maps of arrays give dotted names, shapes and places."""
    value = {
        "params": {"dense": {"kernel": ("float32", (2, 3), bytes(range(24))), "bias": ("bfloat16", (3,), bytes(6))}}
    }
    data = flax({**value, "step": 3})
    directory = read_bytes(tmp_path / "flax_model.msgpack", data)
    assert directory.container == "flax-msgpack"
    assert [(t.name, t.dtype, t.shape) for t in directory.tensors] == [
        ("params.dense.kernel", "F32", (2, 3)),
        ("params.dense.bias", "BF16", (3,)),
    ]
    begin = directory.tensors[0].offset or 0
    assert data[begin : begin + 24] == bytes(range(24))
    with pytest.raises(FormatFault):
        read_bytes(tmp_path / "flax_model.msgpack", data[:-20])


def test_hdf5_says_whether_it_is_whole(tmp_path: Path) -> None:
    """The superblock's end of file is compared with the file, and an unfinished writer is told."""
    old = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + bytes(8) + struct.pack("<QQQQ", 0, 2**64 - 1, 200, 0)
    assert read_bytes(tmp_path / "m.h5", old.ljust(200, b"\0")).hazards == ()
    short = read_bytes(tmp_path / "m.h5", old.ljust(150, b"\0"))
    assert [(h.code, h.data["short_by"]) for h in short.hazards] == [("file-short", 50)]
    new = b"\x89HDF\r\n\x1a\n" + bytes([3, 8, 8, 1]) + struct.pack("<QQQQ", 0, 2**64 - 1, 100, 0)
    assert [h.code for h in read_bytes(tmp_path / "m.h5", new.ljust(100, b"\0")).hazards] == ["still-open"]
    keras = old.ljust(100, b"\0") + b"keras_version".ljust(100, b"\0")
    assert read_bytes(tmp_path / "m.h5", keras).facts["keras"] is True


def test_engines_state_what_they_are_bound_to(tmp_path: Path) -> None:
    """A TensorRT engine is not portable; its binding comes from the configs beside it or the exporter's own head."""
    (tmp_path / "config.json").write_text(
        json.dumps({"version": "0.12", "pretrained_config": {"dtype": "float16", "mapping": {"tp_size": 2}}, "x": 1})
    )
    directory = read_bytes(tmp_path / "rank0.engine", b"ftrt" + bytes(100))
    assert directory.container == "tensorrt-engine"
    assert [(h.code, h.severity) for h in directory.hazards] == [("not-portable", "warn")]
    assert directory.facts["binding"] == {
        "version": "0.12",
        "pretrained_config.dtype": "float16",
        "pretrained_config.mapping.tp_size": 2,
    }
    (tmp_path / "config.json").unlink()
    head = json.dumps({"tensorrt_version": "10.1", "task": "detect"}).encode()
    exported = read_bytes(tmp_path / "yolo.engine", struct.pack("<I", len(head)) + head + b"ftrt" + bytes(50))
    assert exported.facts["binding"] == {"tensorrt_version": "10.1"}
    with pytest.raises(FormatFault) as caught:
        read_bytes(tmp_path / "other.engine", b"nothing of the kind")
    assert caught.value.code == "not-recognised"


def test_core_ml_models_and_packages_are_named(tmp_path: Path) -> None:
    """A .mlmodel states its specification; a .mlpackage its model and whether its parts are there."""
    model = c.field(1, 7) + c.field(2, b"") + c.field(502, b"program")
    directory = read_bytes(tmp_path / "m.mlmodel", model)
    assert (directory.container, directory.facts["model_type"]) == ("coreml", "mlProgram")
    package = tmp_path / "m.mlpackage"
    (package / "Data" / "com.apple.CoreML").mkdir(parents=True)
    (package / "Data" / "com.apple.CoreML" / "model.mlmodel").write_bytes(model)
    entries = {
        "A": {"path": "com.apple.CoreML/model.mlmodel"},
        "B": {"path": "com.apple.CoreML/weights"},
        "C": {"path": "../../x"},
    }
    manifest = {"itemInfoEntries": entries, "rootModelIdentifier": "A"}
    (package / "Manifest.json").write_text(json.dumps(manifest))
    whole = opaque.read(package)
    assert whole.facts["specification_version"] == 7
    assert whole.facts["missing_files"] == ["Data/com.apple.CoreML/weights"]
    assert [h.code for h in whole.hazards] == ["data-missing", "path-unsafe"]
    with pytest.raises(FormatFault):
        opaque.read(tmp_path)


def test_small_containers_are_called_what_they_are(tmp_path: Path) -> None:
    """ncnn, ExecuTorch, Keras, TorchServe and ggml before GGUF have their names and their few facts."""
    ncnn = read_bytes(tmp_path / "m.param", b"7767517\n3 4\nInput x 0 1 x\n")
    assert (ncnn.container, ncnn.facts["layers"], ncnn.facts["blobs"]) == ("ncnn", 3, 4)
    assert [h.subject for h in ncnn.hazards] == ["m.bin"]
    (tmp_path / "m.bin").write_bytes(b"x")
    assert read_bytes(tmp_path / "m.param", b"7767517\n3 4\n").hazards == ()
    assert read_bytes(tmp_path / "m.pte", bytes(4) + b"ET12" + bytes(30)).container == "executorch"
    parts = [("config.json", b"{}"), ("metadata.json", b'{"keras_version": "3.1"}'), ("model.weights.h5", b"x")]
    keras = read_bytes(tmp_path / "m.keras", c.zipped(parts, align=0))
    assert (keras.container, keras.facts["keras_version"]) == ("keras", "3.1")
    assert read_bytes(tmp_path / "m.mar", c.zipped([("MAR-INF/MANIFEST.json", b"{}")])).container == "torchserve"
    ggml = read_bytes(tmp_path / "m.bin", b"lmgg" + struct.pack("<5i", 51865, 1500, 384, 6, 4))
    assert (ggml.container, ggml.facts["header"][:3]) == ("ggml-legacy", [51865, 1500, 384])
    assert not ggml.blocked
    lora = read_bytes(tmp_path / "m.bin", b"algg" + struct.pack("<3i", 1, 8, 16))
    assert (lora.facts["magic"], lora.facts["version"]) == ("ggla (LoRA)", 1)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_list_their_names_and_nothing_is_taken_out(tmp_path: Path, mode: Any) -> None:
    """A tar archive, packed or not, gives its names; no file appears anywhere."""
    path = tmp_path / "model.tar"
    with tarfile.open(path, mode) as archive:
        for member in ("config.json", "weights.th", "../outside", "deep/" * 30 + "x"):
            info = tarfile.TarInfo(member)
            info.size = 700
            archive.addfile(info, io.BytesIO(bytes(700)))
    before = sorted(tmp_path.iterdir())
    directory = opaque.read(path)
    assert directory.container == "tar"
    assert [entry.name for entry in directory.entries][:3] == ["config.json", "weights.th", "../outside"]
    assert directory.facts["complete"] is True
    assert sorted(tmp_path.iterdir()) == before


def test_a_packed_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    """A single packed file is called by its packer; a damaged one is a fault."""
    assert read_bytes(tmp_path / "x.gz", gzip.compress(b"plain text")).container == "gzip"
    assert read_bytes(tmp_path / "x.zst", b"\x28\xb5\x2f\xfd" + bytes(20)).container == "zstd"
    with pytest.raises(FormatFault):
        read_bytes(tmp_path / "x.gz", b"\x1f\x8b\x08" + b"\xff" * 40)


def test_unknown_content_is_said_to_be_unknown(tmp_path: Path) -> None:
    """What is of no known kind is a verdict of its own; an empty file too."""
    for data, code in ((b"hello", "not-recognised"), (b"", "file-empty")):
        with pytest.raises(FormatFault) as caught:
            read_bytes(tmp_path / "x", data)
        assert caught.value.code == code


SEEDS = {
    "npz": c.zipped([("w.npy", npy("<f4", (2, 3), bytes(24)))], align=0, compress=["w.npy"]),
    "flax": flax({"params": {"kernel": ("float32", (2, 3), bytes(24))}, "step": 1}),
    "tflite": struct.pack("<I", 20)
    + b"TFL3"
    + struct.pack("<HHHHHH", 12, 12, 0, 0, 4, 0)
    + struct.pack("<iII", 12, 4, 0),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes([3, 8, 8, 0]) + struct.pack("<QQQQ", 0, 2**64 - 1, 48, 0),
    "gzip": gzip.compress(bytes(2000)),
    "keras": c.zipped([("config.json", b"{}"), ("metadata.json", b'{"keras_version": "3"}')], align=0),
    "ncnn": b"7767517\n3 4\nInput x 0 1 x\n",
}


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_are_a_directory_or_a_fault(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is done to any of these files, a reader gets a directory or one typed fault."""
    seed = data.draw(st.sampled_from(sorted(SEEDS)))
    outcome(opaque.read, tmp_path / "x", data.draw(mutated(SEEDS[seed])))
