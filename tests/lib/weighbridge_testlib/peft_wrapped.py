"""The real PEFT as the judge of adapters that are taken out of whole wrapped models.

    python -m weighbridge_testlib.peft_wrapped FOLDER     CASE/whole.pt, the whole state; CASE/adapter as saved

Run as a process of its own: it imports torch, transformers and peft, which no test process should hold.
"""

import sys
from pathlib import Path
from typing import Any, Final

CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "saved-whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "bias-all": {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
    "bias-lora": {"target_modules": ["c_attn"], "bias": "lora_only", "fan_in_fan_out": True},
    "two": {"target_modules": ["q_proj"]},
}


def build(folder: Path) -> None:
    """Write every case."""
    import peft  # noqa: PLC0415 - the tests import this module for its cases alone
    import torch  # noqa: PLC0415

    from weighbridge_testlib.peft_oracle import model  # noqa: PLC0415

    for name, settings in CASES.items():
        torch.manual_seed(len(name))
        config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings)
        wrapped: Any = peft.get_peft_model(model("gpt2" if name.startswith("bias") else "llama"), config)
        if name == "two":
            wrapped.add_adapter("reference", peft.LoraConfig(r=2, init_lora_weights=False, **settings))
        with torch.no_grad():
            for tensor in wrapped.parameters():
                if tensor.requires_grad:
                    tensor.add_(torch.randn_like(tensor))
        place = folder / name
        wrapped.save_pretrained(place / "adapter", save_embedding_layers=False)
        torch.save({key: value.clone() for key, value in wrapped.state_dict().items()}, place / "whole.pt")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
