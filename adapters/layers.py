"""Which class of layer a tensor belongs to, by the words of its name: for dtypes that differ by class."""

import re
from typing import Final

CLASSES: Final = ("lora", "norm", "embed", "head", "router", "attn", "mlp", "conv", "bias", "other")

_NORM: Final = r"(?:norm|(?:^|[._])ln(?:_?[0-9a-z]{1,3})?(?=[._]|$)|layernorm|rms|(?:^|\.)bn[0-9]*\.)"
_EMBED: Final = r"(?:embed|(?:^|[._])(?:wte|wpe|shared)(?=[._]|$)|position_ids|pos_emb)"
_HEAD: Final = r"(?:^|\.)(?:lm_head|output_layer|embed_out|classifier|score|proj_out|qa_outputs|head|output)\."
_ATTN: Final = r"(?:attn|attention|(?:^|\.)[qkvo]_proj\.|qkv|to_[qkv]|(?:^|\.)w[qkvo]\.)"
_MLP: Final = r"(?:mlp|ffn|feed_forward|(?:gate|up|down)_proj|c_fc|fc[12]|experts?|dense|intermediate|linear)"
_RULES: Final = tuple(
    (label, re.compile(pattern, re.IGNORECASE))
    for label, pattern in (
        ("lora", r"(?:^|\.)(?:lora_|hada_|lokr_|ia3_|vera_|oft_)"),
        ("norm", _NORM),
        ("head", _HEAD),
        ("embed", _EMBED),
        ("router", r"(?:router|(?:mlp|moe|block_sparse_moe)\.gate\.|gate_score)"),
        ("attn", _ATTN),
        ("mlp", _MLP),
        ("conv", r"conv"),
    )
)


def layer_class(name: str) -> str:
    """Return the class of a tensor; `other` where no rule says."""
    for label, pattern in _RULES:
        if pattern.search(name):
            return label
    return "bias" if name.endswith(".bias") or name == "bias" else "other"
