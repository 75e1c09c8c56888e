"""LoRA in the layouts of other tools: diffusers, kohya, lora_diffusion, MLX, GGUF, and names of nobody's."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.inspection import Inspection
from weighbridge_testlib import containers as c
from weighbridge_testlib.builders import TensorSpec, gauss, write_json, write_safetensors
from weighbridge_testlib.containers import T


def look(folder: Path) -> tuple[Inspection, set[str]]:
    """Return the answer and its codes without notes."""
    found = inspect(folder)
    return found, {f.code for f in found.findings if f.severity != "note"}


def pair(stem: str, rank: int, halves: tuple[str, str], dtype: str = "F32", width: int = 16) -> dict[str, TensorSpec]:
    """Return the two factors of a module."""
    down, up = (f"{stem}{half}" for half in halves)
    return {
        down: (dtype, (rank, width), gauss(1, down, rank * width)),
        up: (dtype, (width, rank), gauss(2, up, rank * width)),
    }


PEFT = (".lora_A.weight", ".lora_B.weight")
KOHYA = (".lora_down.weight", ".lora_up.weight")
OLD = (".processor.to_q_lora.down.weight", ".processor.to_q_lora.up.weight")
LINEAR = (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")

DIFFUSERS = {
    "transformer": ("transformer.blocks.0.attn.to_q", PEFT, ["transformer"]),
    "unet": ("unet.down_blocks.0.attn1.to_k", PEFT, ["unet"]),
    "unet, older": ("unet.down_blocks.0.attn1", OLD, ["unet"]),
    "unet, oldest": ("unet.mid_block.to_out", LINEAR, ["unet"]),
    "text encoder": ("text_encoder_2.text_model.encoder.layers.0.mlp.fc1", PEFT, ["text_encoder_2"]),
    "comfy": ("diffusion_model.double_blocks.0.img_attn.qkv", PEFT, ["transformer"]),
    "comfy unet": ("diffusion_model.input_blocks.1.1.proj_in", KOHYA, ["unet"]),
}


@pytest.mark.parametrize("label", DIFFUSERS)
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_diffusers(tmp_path: Path, label: str, rank: int) -> None:
    """Whatever the component and the era, it is a diffusers LoRA with its rank; the header states alpha."""
    stem, halves, parts = DIFFUSERS[label]
    told = {"lora_adapter_metadata": json.dumps({f"{parts[0]}.r": rank, f"{parts[0]}.lora_alpha": 2 * rank})}
    write_safetensors(tmp_path / "style.safetensors", pair(stem, rank, halves), {"format": "pt", **told})
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "diffusers-lora", "adapter", set())
    facts = found.facts
    assert (facts["rank"], facts["alpha"], facts["scaling"]) == (rank, 2 * rank, 2.0)
    assert (facts["parts"], facts["base_model"], facts["tensor_count"]) == (parts, None, 2)


def test_ranks_that_differ_without_alpha(tmp_path: Path) -> None:
    """Each module's strength is assumed as 1, and the different ranks are told by module."""
    tensors = {**pair("transformer.a", 2, PEFT), **pair("transformer.b", 8, PEFT)}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    found, codes = look(tmp_path)
    assert (found.outcome, codes) == ("warn", {"alpha-unknown"})
    assert found.facts["ranks"] == [2, 8]
    assert found.facts["rank_by_module"] == {"transformer.a": 2, "transformer.b": 8}
    assert found.facts["assumed_scaling"] == 1.0


@given(rank=st.integers(1, 9), stated=st.integers(1, 9), alpha=st.sampled_from([1, 4, 2.5]), pattern=st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_header_states_rank_and_strength_by_component(
    tmp_path: Path, rank: int, stated: int, alpha: float, pattern: bool
) -> None:
    """Each component goes by its own config in the header, patterns included; matrices of another rank refuse."""
    tensors = {**pair("unet.mid.to_q", rank, PEFT), **pair("text_encoder.layers.0.q_proj", 3, PEFT)}
    told: dict[str, Any] = {
        "unet.r": stated,
        "unet.lora_alpha": alpha,
        "text_encoder.r": 3,
        "text_encoder.lora_alpha": 6,
    }
    told |= {"unet.alpha_pattern": {"to_q": 7}} if pattern else {}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt", "lora_adapter_metadata": json.dumps(told)})
    found, codes = look(tmp_path)
    assert codes == (set() if rank == stated else {"rank-mismatch"})
    table = {"unet.mid.to_q": (7 if pattern else alpha) / rank, "text_encoder.layers.0.q_proj": 2.0}
    if len(set(table.values())) > 1:
        assert found.facts["scaling_by_module"] == pytest.approx(table)
    else:
        assert found.facts["scaling"] == 2.0


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_te1_text_model_", "lora_transformer_", "lycoris_"])
def test_kohya(tmp_path: Path, dtype: str, prefix: str) -> None:
    """Alpha tensors are read, counted as tensors and are no factors; the metadata hint at the base."""
    stem = f"{prefix}down_blocks_0_attn1_to_q" if prefix != "lycoris_" else "lycoris_unet_down_to_q"
    tensors = {**pair(stem, 8, KOHYA, dtype), f"{stem}.alpha": (dtype, (), [2.0])}
    write_safetensors(tmp_path / "s.safetensors", tensors, {"ss_base_model_version": "sdxl_base_v1-0"})
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "kohya-lora", set())
    facts = found.facts
    assert (facts["rank"], facts["alpha"], facts["scaling"], facts["tensor_count"]) == (8, 2, 0.25, 3)
    assert facts["base_model_hint"] == "sdxl_base_v1-0"


def test_numbered_copies_of_a_result(tmp_path: Path) -> None:
    """Copies of earlier steps are left out; two different results stand side by side."""
    for label in ("style", "style-000010", "style-000020", "other"):
        write_safetensors(
            tmp_path / f"{label}.safetensors", pair(f"lora_unet_{label[:5]}", 4, KOHYA), {"ss_network_alpha": "4"}
        )
    found, _ = look(tmp_path)
    assert found.outcome == "accept"
    assert sorted(found.facts["artifacts"]) == ["other.safetensors", "style.safetensors"]
    mine = next(a for a in found.artifacts if a.file == "style.safetensors")
    assert mine.facts["step_copies"] == ["style-000010.safetensors", "style-000020.safetensors"]
    assert [f.path for f in mine.files if f.publish] == ["style.safetensors"]


def test_half_a_pair(tmp_path: Path) -> None:
    """One factor without the other refuses and names it."""
    tensors = pair("transformer.a", 2, PEFT)
    del tensors["transformer.a.lora_B.weight"]
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    found, codes = look(tmp_path)
    assert "lora-half-missing" in codes
    assert found.facts["missing_tensors"] == ["transformer.a.lora_B.weight"]


def test_a_pickled_image_lora(tmp_path: Path) -> None:
    """The same in a torch file is the same, and goes out as safetensors."""
    tensors = {label: T(dtype, shape, data) for label, (dtype, shape, data) in pair("lora_unet_to_q", 4, KOHYA).items()}
    tensors["lora_unet_to_q.alpha"] = T("F32", (), [2.0])
    (tmp_path / "old.pt").write_bytes(c.torch_zip(tensors))
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, codes) == ("accept", "kohya-lora", set())
    assert (found.facts["rank"], found.facts["alpha"], found.facts["scaling"]) == (4, 2, 0.5)
    assert found.artifacts[0].convert == ["old.pt"]


def test_the_first_tool_of_all(tmp_path: Path) -> None:
    """lora_diffusion numbers its modules and keeps new words in the same file."""
    tensors: dict[str, TensorSpec] = {"<s1>": ("F32", (8,), 0.5)}
    for i in range(3):
        tensors |= {f"unet:{i}:up": ("F32", (8, 2), 0.5), f"unet:{i}:down": ("F32", (2, 8), 0.5)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found, _ = look(tmp_path)
    assert (found.outcome, found.artifact) == ("warn", "diffusion-lora")
    assert (found.facts["rank"], found.facts["parts"], found.facts["tokens"]) == (2, ["unet"], ["<s1>"])


def test_names_of_no_known_tool(tmp_path: Path) -> None:
    """Thin matrices in pairs are a LoRA of somebody's, told as such and never renamed; fat ones are a model."""
    tensors: dict[str, TensorSpec] = {}
    for i in range(4):
        tensors |= {f"w_a_{i:03d}": ("F32", (4, 64), 0.5), f"w_b_{i:03d}": ("F32", (64, 4), 0.5)}
    write_safetensors(tmp_path / "a/x.safetensors", tensors)
    found, codes = look(tmp_path / "a")
    assert (found.outcome, found.artifact, found.facts["rank"]) == ("warn", "lora-unknown", 4)
    assert "lora-dialect-unknown" in codes
    write_safetensors(
        tmp_path / "b/x.safetensors", {"w_a_000": ("F32", (64, 4), 0.5), "w_b_000": ("F32", (4, 64), 0.5)}
    )
    assert look(tmp_path / "b")[0].artifact == "full-model"


def test_a_language_models_lora_is_peft(tmp_path: Path) -> None:
    """PEFT's parts under a language model's names are a PEFT adapter without its config, not an image LoRA."""
    for i, stem in enumerate(("model.layers.0.self_attn.q_proj", "transformer.h.0.attn.c_attn")):
        folder = tmp_path / str(i)
        write_safetensors(folder / "x.safetensors", pair(stem, 4, PEFT), {"format": "pt"})
        found, codes = look(folder)
        assert (found.outcome, found.artifact) == ("refuse", "lora-adapter")
        assert "config-missing" in codes


# ------------------------------------------------------------------------------------------------------------------ MLX


def mlx(folder: Path, *, rank: int = 4, scale: float = 20.0, shown: int | None = None, **more: Any) -> Path:
    """Write an MLX-LM adapter."""
    tensors: dict[str, TensorSpec] = {}
    for i in range(2):
        stem = f"model.layers.{i}.self_attn.q_proj"
        wide = shown or rank
        tensors |= {
            f"{stem}.lora_a": ("F32", (16, wide), gauss(1, stem, 16 * wide)),
            f"{stem}.lora_b": ("F32", (wide, 16), gauss(2, stem, 16 * wide)),
        }
    write_safetensors(folder / "adapters.safetensors", tensors, {"format": "mlx"})
    table = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "model": "example-org/tiny", "num_layers": 2, "lora_parameters": table, **more}
    write_json(folder / "adapter_config.json", config)
    return folder


@pytest.mark.parametrize(("rank", "scale"), [(4, 20.0), (8, 2.0), (16, 10)])
def test_mlx(tmp_path: Path, rank: int, scale: float) -> None:
    """The scale is the factor itself, the factors are transposed, and PEFT has no part in it."""
    found, codes = look(mlx(tmp_path, rank=rank, scale=scale))
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "mlx-lora", "adapter", set())
    facts = found.facts
    assert (facts["rank"], facts["scaling"], facts["transposed"]) == (rank, scale, True)
    assert (facts["base_model"], facts["tensor_count"]) == ("example-org/tiny", 4)


def test_mlx_copies_and_faults(tmp_path: Path) -> None:
    """Numbered copies are left out; another rank than the config's refuses; weights that are gone are named."""
    folder = mlx(tmp_path / "a")
    for step in (100, 200):
        (folder / f"{step:07d}_adapters.safetensors").write_bytes((folder / "adapters.safetensors").read_bytes())
    found, _ = look(folder)
    assert found.facts["step_copies"] == ["0000100_adapters.safetensors", "0000200_adapters.safetensors"]
    assert found.facts["inference_files"] == ["adapter_config.json", "adapters.safetensors"]
    assert look(mlx(tmp_path / "b", rank=8, shown=4))[1] == {"rank-mismatch"}
    (folder / "adapters.safetensors").unlink()
    found, codes = look(folder)
    assert (found.outcome, codes) == ("refuse", {"weights-missing"})
    assert found.facts["missing_files"] == ["adapters.safetensors"]


# ----------------------------------------------------------------------------------------------------------------- GGUF


def gguf_lora(path: Path, rank: int, alpha: float) -> None:
    """Write a LoRA adapter as GGUF."""
    tensors = {
        "blk.0.attn_q.weight.lora_a": ("F32", (rank, 16), None),
        "blk.0.attn_q.weight.lora_b": ("F32", (16, rank), None),
    }
    table = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    path.write_bytes(c.gguf({**table, "adapter.lora.alpha": alpha}, tensors))


@given(rank=st.integers(1, 32), alpha=st.sampled_from([4.0, 16.0, 1.5]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gguf_lora(tmp_path: Path, rank: int, alpha: float) -> None:
    """A LoRA stored as GGUF is an adapter with rank and strength, not a whole model."""
    gguf_lora(tmp_path / "a.gguf", rank, alpha)
    found, codes = look(tmp_path)
    assert (found.outcome, found.artifact, found.kind, codes) == ("accept", "gguf-lora", "adapter", set())
    assert (found.facts["rank"], found.facts["alpha"]) == (rank, alpha)
    assert found.facts["scaling"] == pytest.approx(alpha / rank)
    assert found.facts["architecture"] == "llama"
