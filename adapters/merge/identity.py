"""Is it the base the adapter was trained on? Copies of base tensors inside the adapter, and the ids on both sides."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge.base import Base
from weighbridge.adapters.merge.values import Origin, Source
from weighbridge.adapters.peft_config import is_local, is_quantized
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

_STEP: Final = 1 << 20
_CACHED: Final = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+?)/snapshots/(?P<commit>[0-9a-f]{40})")
_WIDTH: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def compare(
    base: Base,
    parts: Sequence[Artifact],
    configs: Sequence[Mapping[str, Any]],
    copies: Sequence[tuple[str, Origin]],
    sources: Sequence[Source],
) -> list[Finding]:
    """Return what says that the base is another one. Raises OSError."""
    found: list[Finding] = []
    for name, copy in copies:
        stored = base.places.get(name)
        if stored is None or stored.shape != copy.shape:
            continue
        different = _differing(stored, copy, sources)
        if different:
            found.append(
                findings.finding(
                    "merge-base-differs",
                    f"base/{base.weights.owners[name]}",
                    f"the adapter holds a copy of {name} as it was trained on, and it differs from this base's in "
                    f"{different} of {stored.count} elements: it is another base of the same shape",
                    "merge into the base the adapter was trained on",
                    tensor=name,
                    differing_elements=different,
                )
            )
    for one, config in zip(parts, configs, strict=True):
        found += _ids(base, one, config)
    return found


def _ids(base: Base, one: Artifact, config: Mapping[str, Any]) -> list[Finding]:
    """Compare the id and revision that the adapter records with those of the folder, where a Hub cache tells them."""
    cached = _CACHED.search(str(base.root)) or _CACHED.search(str(base.root.resolve()))
    recorded = one.base.id
    if cached is None or recorded is None or is_local(recorded) or is_quantized(recorded):
        return []
    known = f"{cached['owner']}/{cached['name']}"
    revision = one.base.revision or config.get("revision")
    commit = revision if isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision) else None
    if known.lower() == recorded.lower() and commit in (None, cached["commit"]):
        return []
    return [
        findings.finding(
            "merge-base-other",
            "base",
            f"the adapter was trained on {recorded}{f' at {commit[:12]}' if commit else ''}, this base is {known} at "
            f"{cached['commit'][:12]}",
            "name the base the adapter was trained on",
            base_model=recorded,
            base_found=known,
            commit=cached["commit"],
        )
    ]


def _differing(stored: Origin, copy: Origin, sources: Sequence[Source]) -> int:
    """Return how many elements differ; a copy in a wider dtype is compared by value, other mixtures are not."""
    if stored.dtype != copy.dtype and (stored.dtype, copy.dtype) != ("BF16", "F32"):
        return 0
    if stored.dtype not in _WIDTH:
        return 0
    width, wide = _WIDTH[stored.dtype], _WIDTH[copy.dtype]
    different = 0
    with (
        Path(sources[stored.file].path).open("rb", buffering=0) as ours,
        Path(sources[copy.file].path).open("rb", buffering=0) as theirs,
    ):
        ours.seek(stored.at)
        theirs.seek(copy.at)
        left = stored.count
        while left:
            count = min(left, _STEP)
            mine, other = ours.read(count * width), theirs.read(count * wide)
            if width != wide:
                mine = _widened(mine)
            if mine != other:
                different += sum(mine[i : i + wide] != other[i : i + wide] for i in range(0, count * wide, wide))
            left -= count
    return different


def _widened(raw: bytes) -> bytes:
    wide = bytearray(len(raw) * 2)
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return bytes(wide)


__all__ = ["compare"]
