"""The real PEFT as the judge of merges: tiny models of many families, adapters for them, and PEFT's own merge of each.

    python -m weighbridge_testlib.peft_oracle build FOLDER      CASE/base, CASE/adapter, CASE/peft, CASE/logits.json
    python -m weighbridge_testlib.peft_oracle logits FOLDER     CASE/merged -> CASE/error.json, CASE/behaviour.json

Run as a process of its own: it imports torch, transformers and peft, which no test process should hold.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

from weighbridge.adapters.merge import behave_job
from weighbridge_testlib import builders
from weighbridge_testlib.merge_cases import BEHAVED, CASES, Case

t: Any = transformers


def model(family: str) -> Any:
    """Return a tiny model with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    grouped: dict[str, Any] = {**sizes, "num_key_value_heads": 1}
    eye: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**grouped, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**grouped, head_dim=16)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**grouped)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**grouped, head_dim=16)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**grouped, **ids)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2)
        ),
        "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes)),
        "falcon": lambda: t.FalconForCausalLM(
            t.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
        ),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=64)),
        "mamba": lambda: t.MambaForCausalLM(
            t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
        ),
        "dinov2": lambda: t.Dinov2ForImageClassification(t.Dinov2Config(**eye, num_labels=3)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=64,
                word_embed_proj_dim=32,
                max_position_embeddings=32,
            )
        ),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2)),
        "qwen3moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(**grouped, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
        ),
        "gptoss": lambda: t.GptOssForCausalLM(
            t.GptOssConfig(
                **{**grouped, "intermediate_size": 16, **ids}, head_dim=16, num_local_experts=4, num_experts_per_tok=2
            )
        ),
        "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**sizes, max_position_embeddings=32)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**eye, num_labels=3)),
        "clip": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**eye)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=64)
        ),
        "whisper": lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                vocab_size=64,
                decoder_start_token_id=1,
                max_source_positions=16,
                max_target_positions=16,
                num_mel_bins=16,
                begin_suppress_tokens=[3, 4],
                **ids,
            )
        ),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config=t.LlamaConfig(**grouped), vision_config=t.CLIPVisionConfig(**eye), image_token_index=3
            )
        ),
        "qwen2vl": lambda: t.Qwen2VLForConditionalGeneration(
            t.Qwen2VLConfig(
                text_config={**grouped, **ids, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
                vision_config={
                    "depth": 1,
                    "embed_dim": 32,
                    "hidden_size": 32,
                    "num_heads": 2,
                    "patch_size": 8,
                    "mlp_ratio": 2,
                },
            )
        ),
        "resnet": lambda: t.ResNetForImageClassification(
            t.ResNetConfig(
                num_channels=3, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="bottleneck"
            )
        ),
    }
    return makers[family]()


def stir(adapted: Any) -> None:
    """Give every parameter of an adapter a value, so that nothing is zero and no magnitude is the norm it starts as."""
    for name, parameter in adapted.named_parameters():
        with torch.no_grad():
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter.float()).to(parameter.dtype))
            elif parameter.requires_grad or "lora_" in name or "trainable_tokens_delta" in name:
                parameter.add_(0.05 * torch.randn_like(parameter.float()).to(parameter.dtype))


def build(folder: Path, case: Case) -> None:
    """Write base and adapter, merge them with PEFT, and write what came out, or what the unmerged model says."""
    torch.manual_seed(7)
    made = model(case.family).to(getattr(torch, case.dtype)).eval()
    made.save_pretrained(folder / "base", **case.save)
    made = _load(folder / "base")
    if case.twist == "resize":
        made.resize_token_embeddings(70)
        _write_tokenizer(folder / "adapter", 70)
    if case.twist == "per-expert":
        _per_expert(folder / "adapter", made, case)
    else:
        rank = case.lora.get("r", 4)
        config = peft.LoraConfig(**{"lora_alpha": 2 * rank, "r": rank, **case.lora})
        adapted = peft.get_peft_model(made, config)
        stir(adapted)
        adapted.save_pretrained(str(folder / "adapter"), save_embedding_layers="auto")
    fresh = _load(folder / "base")
    if case.twist == "resize":
        fresh.resize_token_embeddings(70)
    loaded = peft.PeftModel.from_pretrained(fresh, folder / "adapter").eval()
    if case.ask == "logits":
        (folder / "logits.json").write_text(json.dumps(_logits(loaded)))
        return
    merged = loaded.merge_and_unload()
    merged.save_pretrained(folder / "peft", **case.save)


def compare(folder: Path) -> None:
    """Load our merged model and write how far its logits are from those of the model with its adapter."""
    wanted = torch.tensor(json.loads((folder / "logits.json").read_text()))
    ours = torch.tensor(_logits(_load(folder / "merged")))
    plain = torch.tensor(_logits(_load(folder / "base")))
    scale = float(wanted.abs().max())
    told = {"error": float((ours - wanted).abs().max()), "base": float((plain - wanted).abs().max()), "scale": scale}
    (folder / "error.json").write_text(json.dumps(told))


def behave(folder: Path) -> None:
    """Compare our merged model with base and adapter, and write the answer."""
    view = folder / "view"
    view.mkdir()
    for name, source in (("base", "base"), ("adapter0", "adapter"), ("merged", "merged")):
        (view / name).symlink_to(folder / source)
    request = {"view": str(view), "adapters": 1, "workers": 1, "dtype": CASES[folder.name].dtype}
    (folder / "behaviour.json").write_text(json.dumps(behave_job.run(request, lambda _: None)))


def _logits(loaded: Any) -> Any:
    with torch.no_grad():
        return loaded(input_ids=torch.arange(2, 34).reshape(2, 16)).logits.float().tolist()


def _load(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(t, name).from_pretrained(folder, dtype="auto").eval()


def _write_tokenizer(folder: Path, vocab: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    builders.write_tokenizer(folder, vocab=vocab)


def _per_expert(folder: Path, made: Any, case: Case) -> None:
    """Write an adapter as PEFT did for transformers 4, where every expert had layers of its own."""
    shapes = {"w1": (64, 32), "w3": (64, 32), "w2": (32, 64)}
    tensors = {}
    for layer in range(made.config.num_hidden_layers):
        for expert in range(made.config.num_local_experts):
            for name, (rows, columns) in shapes.items():
                stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{stem}.lora_A.weight"] = 0.05 * torch.randn(4, columns)
                tensors[f"{stem}.lora_B.weight"] = 0.05 * torch.randn(rows, 4)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = builders.lora_config(
        rank=4, alpha=8, targets=case.lora["target_modules"], base=str(folder.parent / "base")
    )
    builders.write_json(folder / "adapter_config.json", config)


def main(command: str, folder: Path, names: list[str]) -> None:
    """Run one command over all cases, or over the named ones; a case that fails leaves its error in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    for name in names or CASES:
        case, place = CASES[name], folder / name
        try:
            if command == "build":
                place.mkdir(parents=True, exist_ok=True)
                build(place, case)
            elif case.ask == "logits" and (place / "merged").is_dir():
                compare(place)
            if command == "logits" and name in BEHAVED:
                behave(place)
        except Exception as error:  # noqa: BLE001 - told to the test of the case
            (place / "failed.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
