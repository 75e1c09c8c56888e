"""A real, small training: transformers' Trainer and a PEFT LoRA on a tiny model built from a config.

Nothing is downloaded. The run folder looks as on any cluster: `checkpoint-N/` every few steps, rotation by
`save_total_limit`, the final adapter at the root.
"""

import argparse
import logging
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY = 256
LENGTH = 32


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Byte sequences that count upwards from a random start: easy to learn, so the loss falls."""

    def __init__(self, size: int) -> None:
        starts = torch.randint(0, VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(7))
        self.rows = (starts + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train for `--steps` steps into `--output`, with a checkpoint every quarter."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True, help="where the tiny base model is written")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    torch.set_num_threads(2)

    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    base.save_pretrained(options.base)
    (options.base / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nA tiny base model with random weights.\n")
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(options.base),
        LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"]),
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=2e-2,
            logging_steps=max(1, options.steps // 8),
            eval_strategy="steps",
            eval_steps=options.steps // 4,
            save_steps=options.steps // 4,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=7,
        ),
        train_dataset=Counting(2048),
        eval_dataset=Counting(64),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
