"""One door to all container readers, and their words for a person."""

import os
import re
import struct
from pathlib import Path

import pytest

from weighbridge.adapters.formats import readers, sniff
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.registry.findings import CODES
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import safetensors_bytes
from weighbridge_testlib.containers import T, call, name

STATE = {"w": T("F32", (2, 2), 1.0)}
FILES = {
    "safetensors": safetensors_bytes({"w": ("F32", (2, 2), None)}),
    "torch-zip": c.torch_zip(STATE),
    "torch-legacy": c.torch_legacy(STATE),
    "pickle": c.pickled({"a": 1}),
    "gguf": c.gguf({}, {"w": ("F32", (2, 2), None)}),
    "onnx": c.onnx_model([c.onnx_tensor("w", (2, 2), raw=bytes(16))]),
    "ggml-legacy": b"lmgg" + struct.pack("<4i", 1, 2, 3, 4),
    "tflite": struct.pack("<I", 20) + b"TFL3" + struct.pack("<6H", 12, 12, 0, 0, 4, 0) + struct.pack("<iII", 12, 4, 0),
    "zip": c.zipped([("a.txt", b"x")]),
}


@pytest.mark.parametrize("suffix", [".bin", ".safetensors", ".pt", ".gguf", ""])
@pytest.mark.parametrize("label", FILES)
def test_content_decides_and_the_suffix_has_no_say(tmp_path: Path, label: str, suffix: str) -> None:
    """Whatever a file is called, it is read as what it is."""
    path = tmp_path / f"model{suffix}"
    path.write_bytes(FILES[label])
    assert sniff.container(path) == label
    directory = readers.read(path)
    assert directory.container == label
    assert directory.facts["container"] == label
    if label not in {"pickle", "ggml-legacy", "tflite", "zip"}:
        assert [(t.name, t.dtype, t.shape, t.nbytes) for t in directory.tensors] == [("w", "F32", (2, 2), 16)]


def test_a_cut_torch_file_is_still_one(tmp_path: Path) -> None:
    """A torch archive without its end is called a torch archive, and the fault names the cut."""
    (tmp_path / "m.pt").write_bytes(c.torch_zip(STATE)[:-40])
    assert sniff.container(tmp_path / "m.pt") == "torch-zip"
    with pytest.raises(FormatFault) as caught:
        readers.read(tmp_path / "m.pt")
    found = readers.fault(caught.value, "m.pt")
    assert (found.code, found.severity, found.subject) == ("zip-cut", "block", "m.pt")
    assert found.fix
    assert found.data["file"] == "m.pt"


def test_hazards_become_findings_with_a_fix(tmp_path: Path) -> None:
    """Blocking hazards come first, name what they are about and say what to do."""
    callbacks = {name("pytorch_lightning.callbacks", "Timer"): call(name("posix", "mkdir"), "/nowhere")}
    (tmp_path / "m.ckpt").write_bytes(c.torch_zip({"state_dict": STATE, "callbacks": callbacks}))
    found = readers.findings(readers.read(tmp_path / "m.ckpt"), "m.ckpt")
    assert [(f.code, f.severity) for f in found] == [("runs-code", "block"), ("foreign-global", "note")]
    assert found[0].data["global"] == "posix.mkdir"
    assert found[0].fix


def test_damaged_headers_of_safetensors_block(tmp_path: Path) -> None:
    """A safetensors file with faults is a directory with blocking hazards."""
    (tmp_path / "m.safetensors").write_bytes(FILES["safetensors"][:-4])
    directory = readers.read(tmp_path / "m.safetensors")
    assert directory.blocked
    assert [hazard.code for hazard in directory.hazards] == ["file-short"]


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO under a model's name is no file; nobody waits for its writer."""
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(FormatFault) as caught:
        readers.read(tmp_path / "model.pt")
    assert caught.value.code == "not-a-file"


def test_a_distributed_checkpoint_is_read_by_its_folder(tmp_path: Path) -> None:
    """A folder with .metadata is read as one; another folder is of no known kind."""
    (tmp_path / ".metadata").write_bytes(c.pickled({"a": 1}))
    with pytest.raises(FormatFault) as caught:
        readers.read(tmp_path)
    assert caught.value.code == "metadata-damaged"
    (tmp_path / ".metadata").unlink()
    with pytest.raises(FormatFault) as caught:
        readers.read(tmp_path)
    assert caught.value.code == "not-recognised"


def test_every_code_of_a_reader_is_listed() -> None:
    """Each code that a reader can give stands in the table of findings."""
    written = re.compile(r'(?:FormatFault|Hazard|_block|_broken)\(\s*(?:name,\s*group,\s*)?"([a-z0-9-]+)"')
    folder = Path(readers.__file__).parent
    codes = {code for path in folder.glob("*.py") for code in written.findall(path.read_text())}
    told_apart = {code for code in codes if code.startswith("not-") and code not in CODES}
    assert codes - set(CODES) - told_apart == set()
    assert told_apart == {"not-gguf", "not-onnx", "not-npz", "not-flax", "not-tflite", "not-an-archive"}
