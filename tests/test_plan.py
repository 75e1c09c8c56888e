"""What is published and what is left out: an allow-list, with a reason for every other file."""

from pathlib import Path

import pytest

from weighbridge.adapters import plan
from weighbridge.adapters.inspect import inspect
from weighbridge_testlib import builders

PUBLISHED = {
    "tokenizer": """tokenizer.json tokenizer.model vocab.txt merges.txt chat_template.jinja spiece.model
        added_tokens.json qwen.tiktoken additional_chat_templates/tool.jinja""",
    "config": """config.json generation_config.json adapter_config.json preprocessor_config.json processor_config.json
        modules.json 1_Pooling/config.json""",
    "license": "LICENSE LICENSE.md LICENCE.txt NOTICE COPYING USE_POLICY.md",
    "card": "README.md",
}
LEFT = {
    "resume-only": """optimizer.pt scheduler.pt rng_state.pth rng_state_3.pth trainer_state.json training_args.bin
        latest zero_to_fp32.py global_step280/mp_rank_00_model_states.pt scaler.pt random_states_0.pkl optimizer.bin""",
    "training-log": """trainer_log.jsonl all_results.json training_loss.png runs/x/events.out.tfevents.1 train.log
        wandb/run/files/config.yaml logs/a.txt""",
    "cache": ".cache/huggingface/x.json .DS_Store __pycache__/a.pyc .gitattributes x.lock",
    "pickle": "weights.pt other.bin a.pkl",
    "remote-code": "modeling_tiny.py sub/code.py",
    "in-progress": "model.safetensors.incomplete x.part y.tmp",
    "not-on-allow-list": """notes.txt dataset.parquet id_rsa .env.local sub/config.json secrets.yaml x.safetensors""",
}


@pytest.mark.parametrize(
    ("role", "path"), [(role, path) for role, paths in PUBLISHED.items() for path in paths.split()]
)
def test_inference_files(role: str, path: str) -> None:
    """Every file that inference needs is published in its role."""
    assert plan.role_of(path) == (role, None)


@pytest.mark.parametrize(
    ("reason", "path"), [(reason, path) for reason, paths in LEFT.items() for path in paths.split()]
)
def test_left_out_files(reason: str, path: str) -> None:
    """Every other file is left out with its reason."""
    assert plan.role_of(path)[1] == reason


def test_slim_bundle_of_a_checkpoint(tmp_path: Path) -> None:
    """Of a DeepSpeed checkpoint only the inference set would be published, all else is told apart."""
    folder = builders.trainer_checkpoint(tmp_path / "checkpoint-280", step=280, deepspeed_ranks=10, tokenizer=True)
    (folder / "trainer_log.jsonl").write_text("{}\n")
    facts = inspect(tmp_path).facts
    assert facts["inference_files"] == [
        f"checkpoint-280/{name}"
        for name in (
            "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
            "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
        )
    ]  # fmt: skip
    assert len(facts["resume_only_files"]) == 26
    assert facts["left_out"] == ["checkpoint-280/trainer_log.jsonl"]


def test_every_file_is_judged_exactly_once(tmp_path: Path) -> None:
    """No file of the tree is forgotten, and each is either published or has a reason."""
    builders.run_root(tmp_path, steps=(1, 2), deepspeed_ranks=2)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").touch()
    files = inspect(tmp_path).files
    on_disk = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert [f.path for f in files] == on_disk
    assert all(f.publish == (f.reason is None) for f in files)


def test_unknown_files_never_leave(tmp_path: Path) -> None:
    """Only what the allow-list names is published, whatever else lies in the folder."""
    folder = builders.llama_model(tmp_path)
    for name in ("token.txt", "data.json", "backup.tar.gz", "model_v2.npz", "requirements.txt", "x.yaml"):
        (folder / name).write_text("x")
    published = {f.path for f in inspect(folder).files if f.publish}
    assert published == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja",
    }  # fmt: skip


def test_files_outside_an_artifact_are_never_published(tmp_path: Path) -> None:
    """A tokenizer beside checkpoints, in a folder that is no artifact itself, stays."""
    builders.trainer_checkpoint(tmp_path / "checkpoint-1", step=1)
    builders.write_tokenizer(tmp_path)
    outside = [f for f in inspect(tmp_path).files if "/" not in f.path]
    assert outside
    assert not any(f.publish for f in outside)


def test_pickle_beside_safetensors(tmp_path: Path) -> None:
    """Torch pickles beside safetensors are a second copy and are left out."""
    folder = builders.llama_model(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    found = inspect(folder)
    assert found.outcome == "warn"
    assert found.facts["extra_full_copies"] == ["pytorch_model.bin"]
    assert next(f.reason for f in found.files if f.path == "pytorch_model.bin") == "duplicate-copy"


def test_sentence_transformers_layers_travel_along(tmp_path: Path) -> None:
    """The weights of a pipeline's own layers are part of the bundle."""
    folder = builders.llama_model(tmp_path)
    builders.write_json(folder / "modules.json", [])
    builders.write_json(folder / "2_Dense" / "config.json", {"in_features": 16})
    builders.write_safetensors(folder / "2_Dense" / "model.safetensors", {"linear.weight": ("F32", (16, 16), 0.1)})
    found = inspect(folder)
    assert found.outcome == "accept"
    assert {"2_Dense/config.json", "2_Dense/model.safetensors"} <= set(found.facts["inference_files"])
