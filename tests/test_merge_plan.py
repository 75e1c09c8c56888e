"""What a merge would do, from headers alone: which tensors change, where the bytes will lie, what goes beside them."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from weighbridge.adapters.layout import ADAPTER_WEIGHTS
from weighbridge.adapters.merge import estimate, identity, start, unheard
from weighbridge.adapters.merge.adapter import Adapter, Part
from weighbridge.adapters.merge.base import source
from weighbridge.adapters.merge.names import Names, renamed
from weighbridge.adapters.merge.preview import Look, look
from weighbridge.adapters.merge.values import Origin
from weighbridge.registry.flow.merged import Parent, content_of, derivation
from weighbridge.registry.hashing import sha256_file
from weighbridge_testlib import builders, merging


def pair(tmp_path: Path, *, adapter: dict[str, Any] | None = None, **model: Any) -> tuple[Path, Path]:
    """Return a tiny adapter and its base."""
    base = builders.llama_model(tmp_path / "base", **model)
    return builders.lora_adapter(tmp_path / "adapter", **(adapter or {})), base


def seen(tmp_path: Path, *, dtype: str | None = None, adapter: dict[str, Any] | None = None, **model: Any) -> Look:
    """Return the look at a tiny adapter and its base."""
    ours, base = pair(tmp_path, adapter=adapter, **model)
    return look([ours], base, dtype=dtype)


def codes(found: Look) -> dict[str, str]:
    """Return the findings' codes with their severity."""
    return {one.code: one.severity for one in found.findings}


def test_the_facts_are_those_of_the_base_with_the_adapter_beside_it(tmp_path: Path) -> None:
    """Counts are the base's, strength and targets the adapter's, and the tensors that change are named."""
    found = seen(tmp_path, dtype=None)
    assert found.outcome == "accept"
    wanted = {
        "tensor_count": 21,
        "param_count": 5712,
        "payload_bytes": 11424,
        "adapter_tensors": 8,
        "rank": 4,
        "alpha": 8,
        "scaling": 2.0,
        "peft_type": "LORA",
        "base_model": "example-org/tiny-base",
        "matched_modules": 4,
        "mergeable": True,
        "changed_tensors": sorted(
            f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "v_proj")
        ),
    }
    assert {key: found.facts.get(key) for key in wanted} == wanted


def test_headers_stay_verbatim_where_nothing_moves(tmp_path: Path) -> None:
    """In the base's own precision every file keeps its header, its size and its place of every tensor."""
    found = seen(tmp_path, shards=3)
    for file in merging.plan_of(found).files:
        stored = (tmp_path / "base" / file.path).read_bytes()
        assert stored.startswith(file.header)
        assert file.size == len(stored)


def test_another_precision_gets_new_headers_and_a_new_index(tmp_path: Path) -> None:
    """A result in fp32 has headers of its own, twice the payload, and an index that adds up to it."""
    found = seen(tmp_path, shards=3, dtype="fp32")
    plan = merging.plan_of(found)
    assert {step.dtype for step in plan.steps} == {"F32"}
    assert found.bundle is not None
    index = json.loads(found.bundle.written["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == 2 * 11424
    assert json.loads(found.bundle.written["config.json"])["dtype"] == "float32"


def test_tensors_kept_in_a_wider_precision_are_not_narrowed(tmp_path: Path) -> None:
    """What the base keeps in fp32 on purpose stays fp32 when the rest is asked for in bf16."""
    tensors = builders.llama_tensors(dtype="F16")
    tensors["model.norm.weight"] = ("F32", (16,), 1.0)
    base = builders.llama_model(tmp_path / "base", tensors=tensors, dtype="F16")
    found = look([builders.lora_adapter(tmp_path / "adapter")], base, dtype="bf16")
    by_name = {step.name: step.dtype for step in merging.plan_of(found).steps}
    assert by_name.pop("model.norm.weight") == "F32"
    assert set(by_name.values()) == {"BF16"}


@pytest.mark.parametrize(
    ("model_type", "value", "warns"), [("jamba", 0.5, True), ("jamba", 0.0, False), ("zamba", 0.5, False)]
)
def test_a_layer_whose_adapter_is_passed_over_beside_the_base_is_told(
    tmp_path: Path, model_type: str, value: float, warns: bool
) -> None:
    """Where the model reads a weight and never calls its layer, a merge applies what base and adapter do not."""
    module = "model.layers.0.mamba.dt_proj"
    stem = f"base_model.model.{module}.lora_"
    factors: dict[str, builders.TensorSpec] = {
        f"{stem}A.weight": ("F32", (4, 8), 0.5), f"{stem}B.weight": ("F32", (32, 4), value)
    }  # fmt: skip
    model = builders.llama_tensors() | {f"{module}.weight": ("BF16", (32, 8), 0.5)}
    found = seen(tmp_path, adapter={"tensors": builders.lora_tensors() | factors}, tensors=model, model_type=model_type)
    told = [one.data["modules"] for one in found.findings if one.code == "merge-applies-more"]
    assert told == [[module]] * warns


def test_what_never_learned_is_told_in_blocks(tmp_path: Path) -> None:
    """A matrix of zeros is read in blocks and one with a number in it no further than that, whatever its size."""
    size = 64 << 20
    file = tmp_path / "adapter_model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(size)
    second = Origin(file=0, at=0, dtype="F32", shape=(size // 64, 16))
    part = Part("layer.dt_proj", 0, {"lora_B": second})
    adapter = Adapter(str(file), {}, {("layer.dt_proj", 0): part}, {}, {}, {}, 1)
    tracemalloc.start()
    try:
        zero = unheard.heard_after("mamba", {"adapter": adapter}, (source(file),))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (zero, peak < size / 8) == ([], True)
    with file.open("r+b") as stream:
        stream.seek(size - 4)
        stream.write(b"\0\0\0\1")
    (told,) = unheard.heard_after("mamba", {"adapter": adapter}, (source(file),))
    assert told.data["modules"] == ["layer.dt_proj"]


@pytest.mark.parametrize("alike", [True, False])
def test_the_weights_of_an_adapter_are_hashed_once_and_only_where_that_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, alike: bool
) -> None:
    """A look hashes adapters of one size; the merge takes what is missing once, and its record holds those digests."""
    base = builders.llama_model(tmp_path / "base")
    folders = [
        builders.lora_adapter(tmp_path / "one"),
        builders.lora_adapter(tmp_path / "two", tensors=builders.lora_tensors(seed=5, layers=2 if alike else 1)),
    ]
    read: list[str] = []

    def counted(path: Path) -> str:
        read.append(path.parent.name)
        return sha256_file(path)

    monkeypatch.setattr(identity, "sha256_file", counted)
    found = look(folders, base)
    assert read == (["one", "two"] if alike else [])
    start.merge(found, tmp_path / "out")
    assert read == ["one", "two"]
    told = json.loads((tmp_path / "out" / start.RECORD).read_text())["adapters"]
    assert [one["weights_sha256"] for one in told] == [sha256_file(one / ADAPTER_WEIGHTS) for one in folders]


def key_of(folders: list[Path], base: Path, dtype: str | None = None) -> str:
    """Return the key by which a merge of folders is found again."""
    found = look(folders, base, dtype=dtype, weigh=False)
    assert found.base is not None
    ours = [Parent(ref="adapter", content=content_of(one)) for one in found.adapters]
    return derivation(ours, Parent(ref="base", content=content_of(found.base)), found.precision)


def test_only_the_same_merge_is_found_again(tmp_path: Path) -> None:
    """Precision, adapters with their order and strength, and every byte of both sides make another merge of it."""
    one, base = pair(tmp_path)
    two = builders.lora_adapter(tmp_path / "two", tensors=builders.lora_tensors(seed=5))
    folders = [([one], None), ([one], "fp16"), ([one], "fp32"), ([two], None), ([one, two], None), ([two, one], None)]
    keys = [key_of(adapters, base, dtype) for adapters, dtype in folders]
    assert key_of([one], base, "bf16") == keys[0]
    builders.lora_adapter(tmp_path / "stronger", alpha=4)
    keys.append(key_of([tmp_path / "stronger"], base))
    weights = base / "model.safetensors"
    before = weights.stat()
    for at in (-1, -2):  # another byte each time, under the same name, size and times
        raw = bytearray(weights.read_bytes())
        raw[at] ^= 1
        weights.write_bytes(raw)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        keys.append(key_of([one], base))
    assert len(set(keys)) == len(keys)


def test_the_precisions_of_a_base_of_several_are_told_apart(tmp_path: Path) -> None:
    """Most of a result may be in fp32 where all of it was asked for and where a part stayed as it was stored."""
    tensors = builders.llama_tensors(dtype="F32")
    tensors["model.norm.weight"] = ("BF16", (16,), 1.0)
    adapter, base = pair(tmp_path, tensors=tensors, dtype="F32")
    plans = [merging.plan_of(look([adapter], base, dtype=dtype)) for dtype in (None, "fp32")]
    assert [plan.dtype for plan in plans] == ["F32", "F32"]
    assert plans[0].files != plans[1].files
    assert key_of([adapter], base) != key_of([adapter], base, "fp32")


@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
def test_one_end_of_a_tied_pair_gets_a_tensor_of_its_own(tmp_path: Path, part: str) -> None:
    """An adapter on embedding or head alone unties them, in weights, index and config, and says so."""
    module = f"base_model.model.{'model.' if part == 'embed_tokens' else ''}{part}"
    shapes = {
        "lm_head": {"lora_A.weight": (4, 16), "lora_B.weight": (32, 4)},
        "embed_tokens": {"lora_embedding_A": (4, 32), "lora_embedding_B": (16, 4)},
    }[part]
    tensors = {f"{module}.{k}": ("F32", v, builders.gauss(1, k, v[0] * v[1])) for k, v in shapes.items()}
    found = seen(tmp_path, adapter={"tensors": tensors, "targets": [part]}, tied=True, shards=2)
    assert codes(found)["merge-unties"] == "warn"
    assert found.facts["must_untie"] is True
    assert found.facts["tied"] is True
    steps = {step.name: step for step in merging.plan_of(found).steps}
    assert steps["lm_head.weight"].origin.name == "model.embed_tokens.weight"
    assert steps["lm_head.weight"].touched is (part == "lm_head")
    assert found.bundle is not None
    assert json.loads(found.bundle.written["config.json"])["tie_word_embeddings"] is False
    assert "lm_head.weight" in json.loads(found.bundle.written["model.safetensors.index.json"])["weight_map"]


def test_saved_ends_of_a_grown_vocabulary_lie_there_three_times(tmp_path: Path) -> None:
    """PEFT saves them under the plain name, as the saved module, and what it replaced: the plain one is merged."""
    tensors = builders.lora_tensors()
    for module in ("lm_head", "model.embed_tokens"):
        stem = f"base_model.model.{module}"
        for part, value in ((".modules_to_save", 0.5), (".original_module", 0.25), ("", 0.5)):
            tensors[f"{stem}{part}.weight"] = ("F32", (40, 16), value)
    builders.write_tokenizer(tmp_path / "adapter", vocab=40)
    found = seen(tmp_path, adapter={"tensors": tensors, "modules_to_save": ["lm_head", "embed_tokens"]})
    assert codes(found)["merge-vocabulary-grows"] == "warn"
    steps = {step.name: step for step in merging.plan_of(found).steps}
    for module in ("lm_head", "model.embed_tokens"):
        assert steps[f"{module}.weight"].origin.name == f"base_model.model.{module}.weight"


@pytest.mark.parametrize(
    ("renamed_to", "architecture", "parts"),
    [
        ("backbone.embeddings", "MambaForCausalLM", True),
        ("model.embed_tokens", "Qwen2ForSequenceClassification", False),
        ("model.embed_tokens", "Qwen2Model", False),
        ("model.embed_tokens", "GPT2LMHeadModel", True),
    ],
)
def test_only_a_head_that_is_there_parts_from_the_embedding(
    tmp_path: Path, renamed_to: str, architecture: str, *, parts: bool
) -> None:
    """A model without a language head gets none, whatever its config says; an embedding counts under every name."""
    model = builders.llama_tensors(tied=True)
    model[f"{renamed_to}.weight"] = model.pop("model.embed_tokens.weight")
    stem = f"base_model.model.{renamed_to}"
    tensors: dict[str, builders.TensorSpec] = {
        f"{stem}.lora_embedding_A": ("F32", (4, 32), builders.gauss(1, "a", 128)),
        f"{stem}.lora_embedding_B": ("F32", (16, 4), builders.gauss(1, "b", 64)),
    }
    found = seen(
        tmp_path,
        adapter={"tensors": tensors, "targets": [renamed_to.rpartition(".")[2]]},
        tensors=model,
        tied=True,
        architectures=[architecture],
        model_type="mamba" if "Mamba" in architecture else "llama",
    )
    names = {step.name for step in merging.plan_of(found).steps}
    assert ("lm_head.weight" in names) is parts
    assert ("merge-unties" in codes(found)) is parts


def test_a_change_that_the_precision_cannot_hold_is_told_with_its_share(tmp_path: Path) -> None:
    """A delta far below the spacing of bf16 leaves most elements as they are: a warning with share, cosine and cure."""
    tensors = {
        name: (dtype, shape, 0.0001 if "lora_B" in name else data)
        for name, (dtype, shape, data) in builders.lora_tensors().items()
    }
    found = seen(tmp_path, adapter={"tensors": tensors})
    assert codes(found)["merge-update-lost"] == "warn"
    assert found.facts["unchanged_share"] > 0.9
    assert found.facts["update_cosine"] < 0.5
    assert "--dtype fp32" in str(found.findings[0].fix)
    finer = look([tmp_path / "adapter"], tmp_path / "base", dtype="fp32")
    assert finer.outcome == "accept"
    assert finer.facts["unchanged_share"] < 0.01


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_share_is_the_same_without_numpy(tmp_path: Path, dtype: str) -> None:
    """Plain Python counts the elements that stay like the arithmetic of the merge does."""
    plan = merging.plan_of(seen(tmp_path, tensors=builders.llama_tensors(dtype=dtype)))
    steps = [step for step in plan.steps if step.factors]
    fast, slow = estimate._counted(plan, steps), estimate._sum([estimate._plain(step, plan) for step in steps])
    assert fast[:2] == slow[:2]
    assert fast[2:] == pytest.approx(slow[2:], rel=1e-3)


def test_the_bundle_takes_the_tokenizer_as_one_set(tmp_path: Path) -> None:
    """The adapter's tokenizer and template win as a whole; generation stops at its end token; both are told."""
    ours, base = pair(tmp_path, adapter={"tokenizer": True})
    (ours / "chat_template.jinja").write_text("{{ messages[-1].content }}<end>")
    config = json.loads((ours / "tokenizer_config.json").read_text())
    builders.write_json(ours / "tokenizer_config.json", {**config, "eos_token": "<pad>"})
    (base / "vocab.txt").write_text("the base's alone")
    found = look([ours], base)
    assert {"merge-template-differs": "warn", "merge-eos-differs": "warn"}.items() <= codes(found).items()
    assert found.bundle is not None
    assert found.bundle.copies["tokenizer.json"] == str(ours / "tokenizer.json")
    assert found.bundle.copies["chat_template.jinja"] == str(ours / "chat_template.jinja")
    assert "vocab.txt" not in found.bundle.copies
    assert json.loads(found.bundle.written["generation_config.json"])["eos_token_id"] == 3
    assert json.loads(found.bundle.written["config.json"])["eos_token_id"] == 3


def test_a_template_of_the_base_is_not_lost(tmp_path: Path) -> None:
    """Where the adapter ships a tokenizer without a chat template, the base's template stays."""
    ours, base = pair(tmp_path, adapter={"tokenizer": True})
    (ours / "chat_template.jinja").unlink()
    found = look([ours], base)
    assert found.outcome == "accept"
    assert found.bundle is not None
    assert found.bundle.written["chat_template.jinja"] == (base / "chat_template.jinja").read_bytes()


def test_nothing_of_adapter_or_other_forms_is_left_over(tmp_path: Path) -> None:
    """Cards, pickles, other formats and adapter files stay behind; licence and configs come along."""
    ours, base = pair(tmp_path, readme=builders.card(None))
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "trainer_state.json"):
        (base / name).write_bytes(b"PK\x03\x04 not read")
    (base / "LICENSE").write_text("a licence")
    builders.write_json(base / "preprocessor_config.json", {"size": 8})
    names = {file.path for file in look([ours], base).files}
    assert names == {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja", "LICENSE", "preprocessor_config.json",
    }  # fmt: skip


def test_the_stricter_licence_is_told(tmp_path: Path) -> None:
    """A base that holds back more than the adapter's card claims gives a warning with both licences."""
    ours, base = pair(
        tmp_path, adapter={"readme": builders.card(license_id="mit")}, readme=builders.card(None, "cc-by-nc-4.0")
    )
    found = look([ours], base)
    assert codes(found) == {"license-looser-than-base": "warn"}
    assert (found.facts["adapter_license"], found.facts["base_license"]) == ("mit", "cc-by-nc-4.0")


def test_a_run_folder_s_result_is_what_is_merged(tmp_path: Path) -> None:
    """The adapter at the root of a run is meant, not its checkpoints."""
    run = builders.run_root(tmp_path / "run", steps=(100,))
    base = builders.llama_model(tmp_path / "base")
    assert look([run], base).outcome == "accept"


def test_several_adapters_are_summed(tmp_path: Path) -> None:
    """Two adapters on one base give one plan in which their products meet on the same tensor."""
    base = builders.llama_model(tmp_path / "base")
    two = [builders.lora_adapter(tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]
    found = look(two, base)
    assert found.outcome == "accept"
    assert found.facts["adapter_tensors"] == 16
    touched = [step for step in merging.plan_of(found).steps if step.factors]
    assert {len(step.factors) for step in touched} == {2}


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"),
        (
            "language_model.model.layers.1.self_attn.q_proj.weight",
            "model.language_model.layers.1.self_attn.q_proj.weight",
        ),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.layers.4.mlp.up_proj.weight", "model.language_model.layers.4.mlp.up_proj.weight"),
        ("embed_out.weight", "lm_head.weight"),
        ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("vit.encoder.layer.0.attention.attention.query.weight", "vit.layers.0.attention.q_proj.weight"),
        ("vit.encoder.layer.1.output.dense.weight", "vit.layers.1.mlp.fc2.weight"),
        (
            "dinov2.encoder.layer.0.attention.attention.key.weight",
            "dinov2.encoder.layer.0.attention.k_proj.weight",
        ),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight"),
        ("encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.attention.self.query.weight"),
    ],
)
def test_a_tensor_is_found_under_every_name_loaders_know_it_by(file: str, module: str) -> None:
    """File and module names of the library's versions meet, in both directions; what is not there is not guessed."""
    assert Names([file, "model.norm.weight"]).find(module).name == file
    assert Names([module, "model.norm.weight"]).find(file).name == module
    assert renamed(renamed(file)) == renamed(file)
    assert Names([file]).find(module.replace("weight", "bias")).name is None


def test_two_tensors_under_one_name_are_not_guessed_between() -> None:
    """A name that fits two tensors gives both, and neither is taken."""
    found = Names(["model.layers.0.w.weight", "transformer.layers.0.w.weight"]).find("layers.0.w.weight")
    assert found.name is None
    assert len(found.several) == 2
