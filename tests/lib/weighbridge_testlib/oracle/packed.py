"""Models as compressed-tensors packs them; every scheme stands for the weights of the plain model."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import quantization
from compressed_tensors.compressors import ModelCompressor

from weighbridge_testlib.oracle.cases import SCHEMES
from weighbridge_testlib.oracle.told import Make, Told

q: Any = quantization


def _packed(made: Path, model: Any, **weights: Any) -> Told:
    """Pack every linear layer but the head, and say what the plain model had."""
    count = sum(parameter.numel() for parameter in model.parameters())
    scheme = q.QuantizationScheme(targets=["Linear"], weights=q.QuantizationArgs(**weights))
    config = q.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen")
    q.apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if name.endswith("_scale"):
            parameter.data.fill_(0.01 if not name.endswith("global_scale") else 1.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(made)
    compressor.update_config(str(made))
    facts = {"quant_method": "compressed-tensors", "bits": weights["num_bits"], "param_count": count}
    return Told("quantized", "quantized", model.state_dict(), facts)


def cases(tiny: Any) -> dict[str, Make]:
    """Return a case for every scheme; `tiny` makes the model."""
    return {
        f"packed-{name}": partial(lambda made, how: _packed(made, tiny().to(torch.bfloat16), **how), how=how)
        for name, how in SCHEMES.items()
    }
