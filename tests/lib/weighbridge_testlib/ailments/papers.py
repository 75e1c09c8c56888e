"""Folders for the rules of configs, papers and shapes."""

import json
from pathlib import Path
from typing import Any, Final

from weighbridge_testlib import builders as b
from weighbridge_testlib.ailments import making as m
from weighbridge_testlib.ailments.making import Ailment, Asked, Dice

_NO_MODEL: Final = "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory x."


def _both(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    fields: dict[str, Any] = dice.of([{}, {"base": None}])
    b.write_json(made.path / "adapter_config.json", b.lora_config(**fields))
    return made


def _no_adapter_config(root: Path, dice: Dice) -> Asked:
    made = m.sound_adapter(root, dice)
    (made.path / "adapter_config.json").unlink()
    return made


def _no_model_config(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    (made.path / "config.json").unlink()
    return made


def _no_weights(root: Path, dice: Dice) -> Asked:
    made = dice.of([m.sound_model, m.sound_adapter])(root, dice)
    for file in [*made.path.glob("*.safetensors"), *made.path.glob("*.index.json")]:
        file.unlink()
    return made


def _base(root: Path, dice: Dice, base: str | None) -> Asked:
    return Asked(m.adapter(dice.folder(root), dice, base=base))


def _impossible(root: Path, dice: Dice) -> Asked:
    made = m.sound_adapter(root, dice)
    field, value = dice.of([("r", "8"), ("r", "-1"), ("lora_alpha", "16"), ("target_modules", "[q_proj")])
    m.edited(made.path / "adapter_config.json", **{field: value})
    return made


def _untyped(root: Path, dice: Dice) -> Asked:
    made = m.sound_adapter(root, dice)
    m.edited(made.path / "adapter_config.json", peft_type=None)
    return made


def _untyped_model(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    m.edited(made.path / "config.json", model_type=None)
    return made


def _new_field(root: Path, dice: Dice) -> Asked:
    return Asked(m.adapter(dice.folder(root), dice, lora_moonshot=dice.of([True, 3, "x"])))


def _new_type(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    m.edited(made.path / "config.json", model_type="quokka9", transformers_version="9.1.0")
    return made


def _coded(root: Path, dice: Dice, *, whole: bool = True) -> Asked:
    name = dice.of(["modeling_quokka", "modelling_x1"])
    made = m.sound_model(root, dice)
    m.edited(made.path / "config.json", auto_map={"AutoModelForCausalLM": f"{name}.QuokkaForCausalLM"})
    if whole:
        (made.path / f"{name}.py").write_text("class QuokkaForCausalLM: ...\n")
    return made


def _sampling(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    field: dict[str, Any] = dice.of([{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}])
    m.edited(made.path / "generation_config.json", do_sample=False, **field)
    return made


def _leftover(root: Path, dice: Dice) -> Asked:
    method: dict[str, Any] = dice.of(
        [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq", "bits": 4, "group_size": 128}]
    )
    return Asked(m.model(dice.folder(root), m.shape(dice), quantization_config=method))


def _talker(root: Path, dice: Dice, *, template: str | None) -> Asked:
    size = m.shape(dice)
    how = dice.number(0, 2)
    fields: dict[str, Any] = {"_name_or_path": "acme/Tiny-Instruct"} if how == 0 else {}
    folder = m.model(dice.folder(root), size, template=template, **fields)
    base = None
    if how == 1:
        table = json.loads((folder / "tokenizer.json").read_text())
        table["added_tokens"].append({"id": size.vocab - 1, "content": "<|im_start|>", "special": True})
        b.write_json(folder / "tokenizer.json", table)
    elif how == 2:
        base = m.model(root / "base", size)
    return Asked(folder, base)


def _no_tokenizer(root: Path, dice: Dice) -> Asked:
    return Asked(m.model(dice.folder(root), m.shape(dice), tokenizer=False))


def _vocabulary(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    return Asked(m.model(dice.folder(root), size, vocab_size=size.vocab + dice.of([-1, 1, 3, 64])))


def _ids(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    folder = m.model(dice.folder(root), size)
    m.write_tokenizer(folder, size.vocab + dice.number(1, 9))
    return Asked(folder)


def _rank(root: Path, dice: Dice) -> Asked:
    size, rank = m.shape(dice, inner=32), dice.of([2, 4, 8])
    targets = dice.some(["q_proj", "k_proj", "v_proj"])
    made = m.lora(size, rank, targets)
    return Asked(m.adapter(dice.folder(root), dice, size, rank=2 * rank, targets=targets, tensors=made))


def _sizes(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    # Neither number divides the stored one, as a slice of a parallel save would.
    wrong: dict[str, Any] = dice.of([{"intermediate_size": size.inner + 8}, {"hidden_size": size.hidden + 8}])
    return Asked(m.model(dice.folder(root), size, **wrong))


def _layers(root: Path, dice: Dice) -> Asked:
    size = m.shape(dice)
    return Asked(m.model(dice.folder(root), size, num_hidden_layers=size.layers + dice.of([1, 5])))


def _fixed_shape(root: Path, dice: Dice, *, rows: int = 40) -> Asked:
    size = m.shape(dice)._replace(vocab=rows)
    return Asked(m.model(dice.folder(root), size))


def _pairs(root: Path, dice: Dice) -> Asked:
    made = m.sound_model(root, dice)
    table = json.loads((made.path / "tokenizer.json").read_text())
    merges = [[f"w{i}", f"w{i + 1}"] for i in range(dice.number(1, 9))]
    b.write_json(made.path / "tokenizer.json", table | {"model": {**table["model"], "type": "BPE", "merges": merges}})
    return made


AILMENTS: Final[dict[str, Ailment]] = {
    "adapter-as-model": Ailment(
        m.sound_adapter, m.sound_model,
        ("KeyError: 'base_model_name_or_path'", _NO_MODEL, "ValueError: Unrecognized model in /x. Should have a"),
    ),
    "tokenizer-of-newer-library": Ailment(
        _pairs, m.sound_model,
        ("Exception: data did not match any variant of untagged enum ModelWrapper at line 277156 column 3",),
    ),
    "targets-unstated": Ailment(
        lambda root, dice: Asked(m.adapter(dice.folder(root), dice, target_modules=dice.of([None, []]))),
        m.sound_adapter,
        ("ValueError: Please specify `target_modules` or `target_parameters` in `peft_config`",),
    ),
    "adapter-beside-model": Ailment(_both, m.sound_model, ("KeyError: 'base_model_name_or_path'",)),
    "adapter-without-config": Ailment(
        _no_adapter_config, m.sound_adapter, ("ValueError: Can't find 'adapter_config.json' at '/x'",)
    ),
    "model-without-config": Ailment(
        _no_model_config, m.sound_model,
        ("OSError: /x does not appear to have a file named config.json. Checkout 'https://huggingface.co'",),
    ),
    "weights-absent": Ailment(_no_weights, m.sound_model, (_NO_MODEL,)),
    "base-unnamed": Ailment(
        lambda root, dice: _base(root, dice, None), m.sound_adapter, ("KeyError: 'base_model_name_or_path'",)
    ),
    "base-is-path": Ailment(
        lambda root, dice: _base(root, dice, dice.of(["/data/models/llama", "./base", "../x/y/z"])),
        m.sound_adapter,
        ("HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data'",),
    ),
    "type-unstated": Ailment(_untyped, m.sound_adapter, ("KeyError: None",)),
    "adapter-config-impossible": Ailment(
        _impossible, m.sound_adapter,
        ("TypeError: '<=' not supported between instances of 'str' and 'int'",),
    ),
    "model-type-unstated": Ailment(
        _untyped_model, m.sound_model,
        ("ValueError: Unrecognized model in /x. Should have a `model_type` key in its config.json.",),
    ),
    "field-of-newer-library": Ailment(
        _new_field, m.sound_adapter,
        ("TypeError: LoraConfig.__init__() got an unexpected keyword argument 'lora_moonshot'",),
    ),
    "type-of-newer-library": Ailment(
        _new_type, m.sound_model,
        (("ValueError: The checkpoint you are trying to load has model type `quokka9` but Transformers does not "
         "recognize this architecture."),),
    ),
    "code-absent": Ailment(
        lambda root, dice: _coded(root, dice, whole=False), _coded,
        ("OSError: /x does not appear to have a file named modeling_quokka.py. Checkout",),
    ),
    "code-needed": Ailment(
        _coded, m.sound_model,
        (("ValueError: The repository /x contains custom code which must be executed to correctly load the model. You "
         "can pass the argument `trust_remote_code=True` to allow custom code to be run."),),
    ),
    "sampling-conflict": Ailment(_sampling, m.sound_model, ("ValueError: GenerationConfig is invalid: \n- `top_p`",)),
    "quantization-left": Ailment(
        _leftover, m.sound_model,
        ("ImportError: Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install -U bitsandbytes`",),
    ),
    "template-lost": Ailment(
        lambda root, dice: _talker(root, dice, template=None),
        lambda root, dice: _talker(root, dice, template="{{ messages }}"),
        ("ValueError: Cannot use chat template functions because tokenizer.chat_template is not set",
         "after the merge the output is garbage"),
    ),
    "tokenizer-lost": Ailment(_no_tokenizer, m.sound_model, ("OSError: Can't load tokenizer for '/x'. If you were",)),
    "vocabulary-differs": Ailment(
        _vocabulary, m.sound_model,
        ("size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32, 16]) from checkpoint",
         ("lm_head.weight | MISMATCH | Reinit due to size mismatch - ckpt: torch.Size([3, 16]) vs "
         "model:torch.Size([4, 16])")),
    ),
    "ids-beyond-rows": Ailment(
        _ids, m.sound_model, ("IndexError: index out of range in self", "CUDA error: device-side assert triggered")
    ),
    "rank-differs": Ailment(_rank, m.sound_adapter, ("size mismatch for x.lora_A.default.weight: copying a param",)),
    "config-of-another": Ailment(_sizes, m.sound_model, ("RuntimeError: size mismatch for mlp.up_proj.weight",)),
    "layers-differ": Ailment(
        _layers, m.sound_model,
        (("Some weights of LlamaForCausalLM were not initialized from the model checkpoint at /x and are newly "
         "initialized: ['model.layers.7.mlp.up_proj.weight']"),),
    ),
    "shape-in-text": Ailment(
        _fixed_shape,
        lambda root, dice: _fixed_shape(root, dice, rows=41),
        tuple(
            f"size mismatch for {prefix}model.embed_tokens.weight: copying a param with shape torch.Size([40, "
            f"{hidden}]) from "
            f"checkpoint, the shape in current model is torch.Size([32, {hidden}])."
            for prefix in ("", "base_model.model.")
            for hidden in (16, 24, 32)
        ),
    ),
}  # fmt: skip
