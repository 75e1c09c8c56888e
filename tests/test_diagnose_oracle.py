"""The texts are real: what transformers, PEFT and torch say about an ailing folder leads to its cause."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from weighbridge.adapters.diagnose.answer import diagnose
from weighbridge.adapters.inspect import inspect
from weighbridge_testlib.ailments import AILMENTS, Asked, Dice
from weighbridge_testlib.ailments.making import Shape, model

pytestmark = [
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("torch", "transformers", "peft")), reason="a loader is not installed"
    ),
    pytest.mark.timeout(300),  # the first test waits for the import of all three
]
SEEDS: Final = (0,)
LOADERS: Final = {
    "file-cut": "tensors", "file-damaged": "tensors", "pointer-not-fetched": "tensors", "json-unreadable": "own",
    "other-format": "own", "link-to-nothing": "own", "index-ahead": "model", "index-unusable": "model",
    "model-without-config": "model", "adapter-without-config": "adapter", "weights-absent": "own",
    "vocabulary-differs": "model", "rank-differs": "adapter", "names-prefixed": "model", "adapter-keys-odd": "adapter",
    "not-gathered": "adapter", "quantization-left": "model", "layers-differ": "model", "config-of-another": "model",
    "tensors-absent": "model", "base-shapes": "adapter", "object-pickled": "trusting", "class-of-a-package": "trusting",
    "pickle-runs-code": "safely", "trainer-pickles": "safely", "template-lost": "chat", "tokenizer-lost": "chat",
    "ids-beyond-rows": "speak", "values-broken": "speak", "type-unstated": "adapter", "model-type-unstated": "model",
    "type-of-newer-library": "model", "quantization-library": "model", "parallel-slice": "model",
    "dora-differs": "adapter",
}  # fmt: skip
"""Rules whose cause a loader complains of, and how it is made to: `own` is what the folder holds."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Asked, str]]]:
    """Return for each rule some ailing folders and what the loaders say of them, all from one process."""
    root = tmp_path_factory.mktemp("oracle")
    widths = {hidden: model(root / f"{hidden}", Shape(3, hidden, 32, 60, "F32", tied=False)) for hidden in (16, 24, 32)}
    asked = [(name, AILMENTS[name].sick(root / f"{name}-{seed}", Dice(seed))) for name in LOADERS for seed in SEEDS]
    plan = [
        [_how(LOADERS[name], one.path), str(one.path), str(one.base or _fitting(one, widths))] for name, one in asked
    ]
    (root / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge_testlib.loader_oracle", str(root / "plan.json")],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent / "lib"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[tuple[Asked, str]]] = {name: [] for name in LOADERS}
    for (name, one), text in zip(asked, json.loads(done.stdout), strict=True):
        found[name].append((one, text))
    return found


def _fitting(one: Asked, widths: dict[int, Path]) -> Path:
    """Return a base on which nothing but the planted fault can stand in an adapter's way."""
    return widths[inspect(one.path).facts.get("hidden_size_from_shapes") or 16]


def _how(loader: str, folder: Path) -> str:
    if loader != "own":
        return loader
    return "adapter" if any(folder.glob("adapter_*")) else "model"


@pytest.mark.parametrize("name", LOADERS)
def test_what_loaders_say_leads_to_the_cause(said: dict[str, list[tuple[Asked, str]]], name: str) -> None:
    """The whole output of the real loader, traceback and warnings, is explained by the cause that was planted."""
    assert len(said[name]) == len(SEEDS) > 0
    for asked, text in said[name]:
        base = str(asked.base) if asked.base is not None else None
        found = diagnose(asked.path, text, base=base, environ={"HOME": "/nonexistent"})
        assert [c for c in found.causes if c.rule == name and c.explains], text[-1500:]
