"""What a test sees of an oracle: the folders of its cases, and the judgement that we owe each of them."""

import fcntl
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection

_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
          "OMP_NUM_THREADS": "1"}  # fmt: skip


def built(group: str, factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a group; one process of a parallel run makes it for all."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / f"oracle-{group}"
    with (shared / f"oracle-{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            folder.mkdir()
            done = subprocess.run(
                [sys.executable, "-m", "weighbridge_testlib.oracle", group, str(folder)],
                capture_output=True,
                text=True,
                env={**os.environ, **_QUIET, "PYTHONPATH": str(Path(__file__).parents[2])},
                check=False,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            (folder / "ready").touch()
    return folder


def told(place: Path) -> dict[str, Any]:
    """Return what the tool says of a case; a case that it could not make fails the test."""
    failed = place / "failed.txt"
    assert not failed.exists(), failed.read_text()
    table: dict[str, Any] = json.loads((place / "told.json").read_text())
    return table


def named(place: Path) -> Inspection:
    """Assert that a case is taken for what it is, with the tool's facts and no finding that is not due."""
    want = told(place)
    found = inspect(place / "made")
    codes = {f.code: f.message for f in found.findings if f.severity != "note"}
    assert codes.keys() == set(want["due"]), codes
    assert (found.artifact, found.kind) == (want["artifact"], want["kind"])
    for name, value in want["facts"].items():
        assert _plain(found.facts.get(name)) == _plain(value), name
    return found


def judged(place: Path) -> Inspection:
    """Assert the same, and that every tensor is counted."""
    found, want = named(place), told(place)
    sizes = [(dtype, math.prod(shape)) for dtype, shape in want["tensors"].values()]
    assert found.facts["tensor_count"] == len(sizes)
    if "param_count" not in want["facts"]:  # packed weights stand for more than their elements
        assert found.facts["param_count"] == sum(size for _, size in sizes)
    counts = {
        dtype: {"tensors": sum(d == dtype for d, _ in sizes), "params": sum(n for d, n in sizes if d == dtype)}
        for dtype, _ in sizes
    }
    assert found.facts["dtype_histogram"] == counts
    for one in (artifact for artifact in found.artifacts if artifact.kind is not None):
        pickles = {f.path for f in one.files if f.publish and f.path.endswith((".bin", ".pt", ".ckpt"))}
        assert pickles <= set(one.convert), "a pickle would be published as it is"
    return found


def _plain(value: Any) -> Any:
    """Make comparable: lists of names have no order, and a strength is a quotient."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return pytest.approx(value) if isinstance(value, float) else value


def published(found: Inspection) -> list[Path]:
    """Return the safetensors files that would be published."""
    root = Path(found.path)
    return [root / f.path for f in found.files if f.publish and f.path.endswith(".safetensors")]


def listed(files: Iterable[Path]) -> dict[str, list[Any]]:
    """Return dtype and shape of each tensor as our reader lists them."""
    return {
        name: [tensor.dtype, list(tensor.shape)]
        for path in files
        for name, tensor in safetensors.read(path).tensors.items()
    }


def same(files: Iterable[Path], place: Path) -> None:
    """Assert that files hold what the tool loads: the same names, dtypes, shapes and bytes, no tensor more or less."""
    ours = [_read(path) for path in files]
    theirs = _read(place / "want.safetensors")
    table: dict[str, Any] = {}
    for part in ours:
        assert not table.keys() & part.keys()
        table |= part
    assert table.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if table[name] != tensor] == []


def _read(path: Path) -> dict[str, Any]:
    return dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
