"""`registry diagnose` over folders made to break it: payloads, bombs, configs in which every field may be anything."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.diagnose.answer import diagnose
from weighbridge.adapters.diagnose.symptoms import SYMPTOMS
from weighbridge_testlib import builders, hostile

NOWHERE = {"HOME": "/nonexistent"}
EVERYTHING = "\n".join(" xx ".join((*symptom.says, *symptom.words)[0]) for symptom in SYMPTOMS.values())
"""A text that shows every symptom a program prints, so that nearly every explanation is asked for."""

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
LARGE = 200_000
"""Bytes of the largest hostile file that is asked about."""

SUFFIXES = {"gguf": ".gguf", "onnx": ".onnx", "opaque": ".engine"}
MODEL_FIELDS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "auto_map",
    "text_config", "_name_or_path", "transformers_version", "compression_config", "quantization",
)  # fmt: skip
ADAPTER_FIELDS = (
    "peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "target_modules", "target_parameters",
    "modules_to_save", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "init_lora_weights", "peft_version",
    "bias", "auto_mapping", "enable_lora",
)  # fmt: skip


def test_hostile_files_are_answered(tmp_path: Path) -> None:
    """Each of the corpus, asked about alone and with a text that shows everything: an answer, and no canary touched."""
    canary, asked = tmp_path / "canary", 0
    for attack in hostile.attacks(str(canary)):
        if len(attack.data) > LARGE:
            continue  # what they cost is measured where the containers are read
        path = tmp_path / f"{attack.label}{SUFFIXES.get(attack.reader, '.ckpt')}"
        if attack.reader == "dcp":
            path.mkdir()
        (path / ".metadata" if attack.reader == "dcp" else path).write_bytes(attack.data)
        found = diagnose(path, EVERYTHING, environ=NOWHERE)
        assert all(cause.message and "\n" not in cause.fix for cause in found.causes)
        asked += 1
    assert not canary.exists()
    assert asked >= 150


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "model"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_field_may_hold_anything(adapter: bool, data: st.DataObject) -> None:
    """Whatever types the fields of the configs have, every rule looks and none stumbles; the answer is JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "x"
        fields = ADAPTER_FIELDS if adapter else MODEL_FIELDS
        if adapter:
            builders.lora_adapter(folder, tokenizer=True)
        else:
            builders.llama_model(folder)
        name = "adapter_config.json" if adapter else "config.json"
        _spoil(folder / name, data, fields)
        for other in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (folder / other).exists() and data.draw(st.booleans()):
                table = json.loads((folder / other).read_text())
                _spoil(folder / other, data, tuple(table))
        if data.draw(st.booleans()):
            (folder / "quantize_config.json").write_text(json.dumps(data.draw(ANYTHING)))
        base = builders.llama_model(Path(scratch) / "base")
        for text in (None, EVERYTHING):
            found = diagnose(folder, text, base=str(base), environ=NOWHERE)
            assert found.outcome in {"found", "nothing", "wait"}


def _spoil(path: Path, data: st.DataObject, fields: tuple[str, ...]) -> None:
    table: dict[str, Any] = json.loads(path.read_text())
    for field in data.draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        table[field] = data.draw(ANYTHING, label=field)
    path.write_text(json.dumps(table))
