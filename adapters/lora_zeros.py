"""What zeros in an adapter's second halves tell: a LoRA starts with lora_B at zero, so zeros were never trained.

Told from the values as they pass, whoever reads them: the look at a folder, or staging.
"""

from typing import Any, Final

from weighbridge.adapters import keys
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_WORLD_LIMIT: Final = 4096
_OTHERS: Final = (".lora_up", "lora.up", ".lora_linear_layer.up", ".lora_b")
"""How kohya's tools, diffusers and MLX call a second half."""


class Seconds:
    """The second halves that were looked at: those that are zero, and of the others the zero rows at their end."""

    def __init__(self) -> None:
        self.zero: list[str] = []
        self.tails: list[tuple[int, int]] = []
        """(zero rows at the end, rows)"""

    def add(self, tensor: Tensor, *, zero_tail: int) -> None:
        """Take note of one; `zero_tail` counts the zero bytes at its end."""
        if zero_tail >= tensor.size:
            self.zero.append(tensor.name)
        else:
            self.tails.append((zero_tail * tensor.shape[0] // tensor.size, tensor.shape[0]))

    def take(self, other: "Seconds") -> None:
        """Take in those of another file."""
        self.zero += other.zero
        self.tails += other.tails


def is_second(tensor: Tensor) -> bool:
    """Return whether a tensor is the second half of a LoRA, by its name."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        return False
    key = keys.parse(tensor.name)
    if key.part:
        return key.part in {"lora_B", "lora_embedding_B"} and key.tail != "bias"
    return tensor.name.removesuffix(".weight").endswith(_OTHERS)


def judge(subject: str, seconds: Seconds) -> tuple[dict[str, Any], list[Finding]]:
    """Return the facts and findings of some second halves; `subject` is the file."""
    zero, tails = seconds.zero, seconds.tails
    found: list[Finding] = []
    facts: dict[str, Any] = {"nonzero_lora_b": len(tails)} if zero or tails else {}
    if zero and not tails:
        found.append(
            findings.finding(
                "lora-b-zero",
                subject,
                f"all {len(zero)} lora_B are zero: the adapter changes nothing, as if it had never been trained",
                "check that the trained weights were saved",
                nonzero_lora_b=0,
            )
        )
    elif zero:
        found.append(
            findings.finding(
                "lora-b-some-zero",
                subject,
                f"{len(zero)} of {len(zero) + len(tails)} lora_B are zero, such as {zero[0]}",
                nonzero_lora_b=len(tails),
            )
        )
    partly = _partly_zero(tails)
    if partly is not None:
        world, share = partly
        facts |= {"zero_row_share_lora_b": share, "suspected_world_size": world}
        found.append(
            findings.finding(
                "lora-b-partly-zero",
                subject,
                f"the same {world - 1}/{world} of every lora_B is exactly zero: as if one of {world} ranks had "
                "been gathered",
                "save again with all ranks gathered",
                zero_row_share_lora_b=share,
                suspected_world_size=world,
            )
        )
    return facts, found


def _partly_zero(tails: list[tuple[int, int]]) -> tuple[int, float] | None:
    """Return (suspected world size, share of zero rows) where every matrix keeps only the first rank's rows."""
    if not tails or any(zero == 0 for zero, _ in tails):
        return None
    kept = [(rows - zero, rows) for zero, rows in tails]
    for world in range(2, min(_WORLD_LIMIT, max(rows for _, rows in kept)) + 1):
        if all(have == -(-rows // world) for have, rows in kept):
            return world, round(1 - 1 / world, 12)
    return None
