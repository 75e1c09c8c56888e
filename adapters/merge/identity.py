"""Is it the base the adapter was trained on? Copies of base tensors inside the adapter, and the ids on both sides."""

import os
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


KNOWN: Final = {
    "copies": "the base's tensors that the adapter holds a copy of are this base's",
    "commit": "the base is the one, and at the commit, that the adapter records",
    "id": "the base lies in a Hub cache under the id that the adapter records, which names no commit",
}
"""What can speak for a base, by the word of the fact `base_identity`; the first that holds counts."""

UNKNOWN: Final = (
    "nothing in the adapter tells whether this base is the one it was trained on: it holds no copy of a base tensor, "
    "and no record of its base could be compared; names and shapes fit"
)


def told(known: str | None) -> str:
    """Return a sentence on how far it is known that a base is the right one."""
    return UNKNOWN if known is None else KNOWN[known]


def compare(
    base: Base,
    parts: Sequence[Artifact],
    configs: Sequence[Mapping[str, Any]],
    copies: Sequence[tuple[str, Origin]],
    sources: Sequence[Source],
) -> tuple[str | None, list[Finding]]:
    """Return what speaks for the base, a word of KNOWN or None, and what says that it is another one. Raises OSError.

    Of several adapters all have to agree: what speaks for the base is what is known of the least known one.
    """
    found: list[Finding] = []
    equal = 0
    for name, copy in copies:
        stored = base.places.get(name)
        if stored is None or stored.shape != copy.shape or not _comparable(stored, copy):
            continue
        different = _differing(stored, copy, sources)
        equal += different == 0
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
    words: list[str | None] = []
    for one, config in zip(parts, configs, strict=True):
        word, more = _ids(base, one, config)
        found += more
        words.append(word)
    if equal and len(parts) == 1:
        return "copies", found
    return next((word for word in (None, "id", "commit") if word in words), None), found


def _ids(base: Base, one: Artifact, config: Mapping[str, Any]) -> tuple[str | None, list[Finding]]:
    """Compare the id and revision that the adapter records with those of the folder, where a Hub cache tells them."""
    cached = _CACHED.search(str(base.root)) or _CACHED.search(os.path.realpath(base.root))
    recorded = one.base.id
    if cached is None or recorded is None or is_local(recorded) or is_quantized(recorded):
        return None, []
    known = f"{cached['owner']}/{cached['name']}"
    revision = one.base.revision or config.get("revision")
    commit = revision if isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision) else None
    if known.lower() == recorded.lower() and commit in (None, cached["commit"]):
        return ("id" if commit is None else "commit"), []
    return None, [
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


def _comparable(stored: Origin, copy: Origin) -> bool:
    """Return whether two tensors can be compared: one dtype, or the same values in a wider one."""
    return stored.dtype in _WIDTH and (stored.dtype == copy.dtype or (stored.dtype, copy.dtype) == ("BF16", "F32"))


def _differing(stored: Origin, copy: Origin, sources: Sequence[Source]) -> int:
    """Return how many elements differ; a copy in a wider dtype is compared by value."""
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
