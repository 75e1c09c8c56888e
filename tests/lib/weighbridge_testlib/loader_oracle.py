"""The real loaders as the judge of texts: what transformers, PEFT and torch really say about a folder.

    python -m weighbridge_testlib.loader_oracle PLAN.json      [[how, folder, base], ...] -> one JSON list of texts

Run as a process of its own: it imports torch, transformers and peft, which no test process should hold.
"""

import io
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

t: Any = transformers


def load_model(folder: str, _base: str) -> None:
    """Load a whole model."""
    t.AutoModelForCausalLM.from_pretrained(folder)


def load_adapter(folder: str, base: str) -> None:
    """Load an adapter onto a base."""
    peft.PeftModel.from_pretrained(t.AutoModelForCausalLM.from_pretrained(base), folder)


def load_tensors(folder: str, _base: str) -> None:
    """Load every safetensors file."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        load_file(file)


def load_safely(folder: str, _base: str) -> None:
    """Load every torch file as torch does by default."""
    for file in _torch_files(folder):
        torch.load(file, map_location="cpu")


def load_trusting(folder: str, _base: str) -> None:
    """Load every torch file, classes and all."""
    for file in _torch_files(folder):
        torch.load(file, map_location="cpu", weights_only=False)


def _torch_files(folder: str) -> list[Path]:
    return sorted(p for p in Path(folder).iterdir() if p.suffix in {".pt", ".pth", ".ckpt", ".bin"})


def chat(folder: str, _base: str) -> None:
    """Write a prompt with the tokenizer's template."""
    t.AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def speak(folder: str, _base: str) -> None:
    """Sample one token after the last one that the tokenizer knows."""
    model = t.AutoModelForCausalLM.from_pretrained(folder)
    last = max(t.AutoTokenizer.from_pretrained(folder).get_vocab().values())
    logits = model(torch.tensor([[last]])).logits[0, -1].float()
    torch.multinomial(torch.softmax(logits, -1), 1)


def generation(folder: str, _base: str) -> None:
    """Save the generation settings again."""
    t.GenerationConfig.from_pretrained(folder).save_pretrained(folder + "-again")


HOW: dict[str, Callable[[str, str], None]] = {
    "model": load_model, "adapter": load_adapter, "tensors": load_tensors, "safely": load_safely,
    "trusting": load_trusting, "chat": chat, "speak": speak, "generation": generation,
}  # fmt: skip


def said(how: str, folder: str, base: str) -> str:
    """Return everything that a loader logs, warns of and raises, as a person would paste it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger("transformers")
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                HOW[how](folder, base)
            except Exception:  # noqa: BLE001 - what it says is what is asked for
                stream.write(traceback.format_exc())
        stream.write("".join(f"{one.category.__name__}: {one.message}\n" for one in caught))
    finally:
        root.removeHandler(handler)
    return stream.getvalue()


def main(plan: str) -> None:
    """Print what every loader of a plan says."""
    told = [said(*entry) for entry in json.loads(Path(plan).read_text())]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
