"""The manifest of a usual adapter and what its card says, for the tests of cards."""

import hashlib
import re
from typing import Any

import msgspec
import yaml

from weighbridge.registry import types
from weighbridge.registry.manifest import Manifest, seal

BASE = "example-org/tiny-base"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def entry(path: str, role: str, body: bytes = b"x") -> types.FileEntry:
    """Return the file entry of some bytes."""
    return types.FileEntry(path=path, size=len(body), sha256=hashlib.sha256(body).hexdigest(), role=role)


def manifest(*, files: list[types.FileEntry] | None = None, **changes: Any) -> Manifest:
    """Return the manifest of a usual adapter; `changes` replace its facts."""
    facts = types.Facts(
        kind="adapter",
        weights=types.WeightsFacts(
            format="safetensors",
            shards=1,
            tensors=8,
            parameters=448,
            bytes=1792,
            dtypes={"F32": types.DtypeCount(tensors=8, parameters=448)},
        ),
        adapter=types.AdapterFacts(
            peft_type="LORA", rank=4, alpha=8, scaling=2.0, targets=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
        base=types.BaseFacts(id=BASE, revision=REVISION, relation="adapter", evidence="adapter_config.json"),
        license=types.LicenseFacts(id="apache-2.0", source="card", evidence="README.md declares it"),
        provenance=types.Provenance(
            run=types.RunFacts(project="medical", name="sft_0412", id="1"),
            step=280,
            epoch=1.0,
            metrics={"loss": 0.81},
            log_history=[{"loss": 1.2, "step": 10, "epoch": 0.1}, {"eval_loss": 0.9, "step": 280, "epoch": 1.0}],
            training={"learning_rate": 2e-4, "lora_rank": 4},
            packages={"peft": "0.17.1"},
        ),
    )
    listed = files or [
        entry("adapter_config.json", "config"),
        entry("adapter_model.safetensors", "weights"),
        entry("tokenizer.json", "tokenizer"),
    ]
    return seal(listed, msgspec.structs.replace(facts, **changes))


def front(text: bytes) -> dict[str, Any]:
    """Return the front matter as plain YAML 1.1 reads it, the strictest reader there is."""
    block = re.match(rb"---\n(.*?)\n---\n", text, re.DOTALL)
    assert block is not None
    loaded: dict[str, Any] = yaml.safe_load(block[1])
    return loaded
