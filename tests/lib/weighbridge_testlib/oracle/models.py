"""Whole models as transformers and huggingface_hub save them, and what the Trainer leaves of a full fine-tuning."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from weighbridge_testlib import peft_oracle
from weighbridge_testlib.oracle import packed
from weighbridge_testlib.oracle.cases import DTYPES, FAMILIES, MODELS
from weighbridge_testlib.oracle.told import Make, Told, taken

t: Any = transformers


def stored(folder: Path) -> dict[str, Any]:
    """Return every tensor of a folder's safetensors files."""
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def loads(folder: Path, model: Any) -> None:
    """Assert that transformers finds every weight of a model in a folder, with the values it has."""
    again, told = type(model).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    assert not told["mismatched_keys"], told
    ours, theirs = again.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def _facts(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "architecture": type(model).__name__,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "config_dtype": str(config.dtype).removeprefix("torch."),
    }


def _family(name: str, made: Path) -> Told:
    model = peft_oracle.model(name)
    model.save_pretrained(made)
    loads(made, model)
    facts = {"architecture": type(model).__name__, "metadata_format": "pt"}
    return Told("full-model", "model", stored(made), facts)


def _tiny(*, tied: bool = False) -> Any:
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=64,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _dtype(name: str, made: Path) -> Told:
    model = _tiny().to(getattr(torch, name))
    model.save_pretrained(made)
    return Told("full-model", "model", stored(made), _facts(model))


def _shards(made: Path) -> Told:
    model = _tiny()
    model.save_pretrained(made, max_shard_size="20KB")
    loads(made, model)
    count = len(list(made.glob("*.safetensors")))
    assert count > 2
    return Told("full-model", "model", stored(made), {**_facts(model), "shards_expected": count, "shards_found": count})


def _tied(made: Path) -> Told:
    model = _tiny(tied=True)
    model.save_pretrained(made)
    loads(made, model)
    return Told("full-model", "model", stored(made), _facts(model))


def _variant(made: Path) -> Told:
    model = _tiny().to(torch.float16)
    model.save_pretrained(made, variant="fp16")
    return Told("full-model", "model", stored(made), _facts(model))


def _talking(made: Path) -> Told:
    """Save a model with tokenizer, chat template and generation settings."""
    model = _tiny()
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 64))])}
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    facts = {**_facts(model), "has_chat_template": True, "config_vocab": 64, "embedding_rows": 64}
    return Told("full-model", "model", stored(made), {**facts, "tokenizer_entries": len(tokenizer)})


def _pickle(made: Path, size: str, *, tied: bool) -> Told:
    """Save pickles as transformers did before version 5; transformers loads the safetensors that we make of them."""
    model = _tiny(tied=tied)
    made.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(made)
    save_torch_state_dict(model.state_dict(), made, safe_serialization=False, max_shard_size=size)
    out = taken(made.parent, made)
    loads(out, model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return Told("full-model", "model", tensors, {**_facts(model), "pickle_format": True})


def _trainer(made: Path) -> Told:
    model = _tiny()
    data = [{"input_ids": [1, 5, 9], "labels": [1, 5, 9], "attention_mask": [1, 1, 1]} for _ in range(4)]
    arguments = t.TrainingArguments(
        output_dir=str(made), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    trainer = t.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    trainer.save_model()
    facts = {**_facts(model), "newest": "checkpoint-4"}
    return Told("run-folder", "model", stored(made), facts)


def _every_dtype(made: Path) -> Told:
    """Write a bare file with every dtype that torch and safetensors share."""
    made.mkdir()
    tensors = {f"t.{name}": torch.ones(2, 4).to(getattr(torch, name)) for name in DTYPES}
    save_file(tensors, made / "weights.safetensors", {"format": "pt"})
    return Told("full-model", "model", tensors, {})


_SAVES: Final[dict[str, Make]] = {
    "shards": _shards,
    "tied": _tied,
    "variant": _variant,
    "talking": _talking,
    "pickle": partial(_pickle, size="5GB", tied=False),
    "pickle-tied": partial(_pickle, size="5GB", tied=True),
    "pickle-shards": partial(_pickle, size="20KB", tied=False),
    "trainer": _trainer,
    "every-dtype": _every_dtype,
}


def cases() -> dict[str, Make]:
    """Return every case of this group."""
    made: dict[str, Make] = {f"family-{name}": partial(_family, name) for name in FAMILIES}
    made |= {f"dtype-{name}": partial(_dtype, name) for name in ("float32", "float16", "bfloat16", "float64")}
    made |= {f"save-{name}": make for name, make in _SAVES.items()}
    made |= packed.cases(_tiny)
    assert tuple(made) == MODELS
    return made
