"""Pipelines and LoRA as diffusers saves them."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import diffusers
import peft
import torch
import transformers
from diffusers import training_utils
from safetensors.torch import load_file, save_file

from weighbridge_testlib.oracle.adapters import stir
from weighbridge_testlib.oracle.cases import PICTURES
from weighbridge_testlib.oracle.told import Make, Told, taken

t: Any = transformers
d: Any = diffusers
training: Any = training_utils


def _unet() -> Any:
    return d.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip


def _text() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return t.CLIPTextModel(t.CLIPTextConfig(**sizes, vocab_size=64, max_position_embeddings=16))


def _vae() -> Any:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return d.AutoencoderKL(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=4, **blocks
    )


def _pipe() -> Any:
    return d.StableDiffusionPipeline(
        unet=_unet(), text_encoder=_text(), vae=_vae(), scheduler=d.DDIMScheduler(), tokenizer=None,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def _states(pipe: Any) -> dict[str, Any]:
    """Return the tensors of a pipeline's components under component and name."""
    parts = {"unet": pipe.unet, "text_encoder": getattr(pipe, "text_encoder", None), "vae": getattr(pipe, "vae", None)}
    return {f"{k}/{name}": x for k, part in parts.items() if part is not None for name, x in part.state_dict().items()}


def _pipeline(made: Path, *, half: bool = False, **how: Any) -> Told:
    """Save a pipeline; diffusers loads each of its models from the folder again."""
    pipe = _pipe().to(torch.float16) if half else _pipe()
    pipe.save_pretrained(made, **how)
    again = d.UNet2DConditionModel.from_pretrained(
        made, subfolder="unet", variant=how.get("variant"), torch_dtype="auto"
    )
    assert all(torch.equal(x, pipe.unet.state_dict()[name]) for name, x in again.state_dict().items())
    return Told("full-model", "model", _states(pipe), {"components": ["scheduler", "text_encoder", "unet", "vae"]})


def _component(made: Path) -> Told:
    unet = _unet()
    unet.save_pretrained(made)
    return Told("full-model", "model", unet.state_dict())


def _average(made: Path) -> Told:
    unet = _unet()
    average = training.EMAModel(unet.parameters(), model_cls=d.UNet2DConditionModel, model_config=unet.config)
    average.save_pretrained(made)
    return Told("full-model", "model", unet.state_dict())


def _diffusion(made: Path) -> Told:
    unet = d.UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipe = d.DDPMPipeline(unet=unet, scheduler=d.DDPMScheduler())
    pipe.save_pretrained(made)
    return Told("full-model", "model", _states(pipe), {"components": ["scheduler", "unet"]})


# ----------------------------------------------------------------------------------------------------------------- LoRA


def _trained(part: Any, **config: Any) -> dict[str, Any]:
    """Give a component a LoRA, and return its state in diffusers' form."""
    lora = peft.LoraConfig(**config)
    peft.inject_adapter_in_model(lora, part)
    part.peft_config = {"default": lora}
    stir(part)
    return dict(d.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(part)))


_UNET: Final[dict[str, Any]] = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_out.0"]}
_TEXT: Final[dict[str, Any]] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}


def _lora(made: Path, *, text: bool = False, config: bool = True, safe: bool = True) -> Told:
    """Save a LoRA as diffusers' training scripts do, with or without the config in the header."""
    unet, encoder = _unet(), _text()
    layers: dict[str, Any] = {"unet_lora_layers": _trained(unet, **_UNET)}
    parts = {"unet": unet}
    if text:
        layers["text_encoder_lora_layers"] = _trained(encoder, **_TEXT)
        parts["text_encoder"] = encoder
    layers |= training._collate_lora_metadata(parts) if config else {}
    d.StableDiffusionPipeline.save_lora_weights(made, **layers, safe_serialization=safe)
    if not safe:
        saved = torch.load(made / "pytorch_lora_weights.bin")
        out = taken(made.parent, made)
        assert load_file(next(out.glob("*.safetensors"))).keys() == saved.keys()
    else:
        saved = load_file(made / "pytorch_lora_weights.safetensors")
    facts: dict[str, Any] = {"parts": sorted(parts), "rank": None if text else 4}
    if not config:
        return Told("diffusers-lora", "adapter", saved, {**facts, "alpha": None}, ("alpha-unknown",))
    if not text:
        return Told("diffusers-lora", "adapter", saved, {**facts, "alpha": 8, "scaling": 2.0})
    modules = sorted({name.rpartition(".lora")[0] for name in saved if name.startswith("text_encoder.")})
    facts["rank_by_module"] = {"default": 4, **dict.fromkeys(modules, 2)}
    facts["scaling_by_module"] = {"default": 2.0, **dict.fromkeys(modules, 3.0)}
    return Told("diffusers-lora", "adapter", saved, {**facts, "scaling": None, "alpha": None})


def _kohya(made: Path) -> Told:
    """Write kohya's form with diffusers' own converter; every module has its alpha in a tensor."""
    unet = _unet()
    _trained(unet, **_UNET)
    state = peft.get_peft_model_state_dict(unet)
    saved = d.utils.convert_state_dict_to_kohya({f"unet.{name}": x for name, x in state.items()})
    made.mkdir()
    saved |= {f"{n.removesuffix('.lora_down.weight')}.alpha": torch.tensor(8.0) for n in saved if ".lora_down" in n}
    save_file({name: x.contiguous() for name, x in saved.items()}, made / "style.safetensors")
    return Told("kohya-lora", "adapter", saved, {"parts": ["unet"], "rank": 4, "alpha": 8, "scaling": 2.0})


def _flux() -> Any:
    return d.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _transformer(made: Path, *, alone: bool = False) -> Told:
    """Save a LoRA of a transformer with patterns; `alone` leaves the component's name away."""
    part = _flux()
    patterns = {"rank_pattern": {"to_k": 8}, "alpha_pattern": {"to_k": 2}}
    layers = _trained(part, r=4, lora_alpha=4, target_modules=["to_q", "to_k"], **patterns)
    if alone:
        part.save_lora_adapter(made)
    else:
        metadata = training._collate_lora_metadata({"transformer": part})
        d.FluxPipeline.save_lora_weights(made, transformer_lora_layers=layers, **metadata)
    saved = load_file(made / "pytorch_lora_weights.safetensors")
    modules = {name.rpartition(".lora")[0] for name in saved}
    scaling = {module: 0.25 if module.endswith("to_k") else 1.0 for module in modules}
    ranks = {module: 8 if module.endswith("to_k") else 4 for module in modules}
    facts = {"parts": [] if alone else ["transformer"], "rank": 4, "alpha": 4, "ranks": [4, 8]}
    return Told("diffusers-lora", "adapter", saved, {**facts, "rank_by_module": ranks, "scaling_by_module": scaling})


_MAKERS: Final[dict[str, Make]] = {
    "pipeline": _pipeline,
    "pipeline-half": partial(_pipeline, half=True),
    "pipeline-variant": partial(_pipeline, half=True, variant="fp16"),
    "pipeline-pickle": partial(_pipeline, safe_serialization=False),
    "pipeline-shards": partial(_pipeline, max_shard_size="60KB"),
    "component": _component,
    "average": _average,
    "diffusion": _diffusion,
    "lora-unet": _lora,
    "lora-both": partial(_lora, text=True),
    "lora-bare": partial(_lora, config=False),
    "lora-pickle": partial(_lora, config=False, safe=False),
    "lora-kohya": _kohya,
    "lora-transformer": _transformer,
    "lora-alone": partial(_transformer, alone=True),
}


def cases() -> dict[str, Make]:
    """Return every case of this group."""
    assert tuple(_MAKERS) == PICTURES
    return _MAKERS
