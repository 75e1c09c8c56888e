"""The base of a merge: is it the one the adapter was trained on, and does it hold the adapter already.

Told by copies of base tensors inside the adapter, by the ids on both sides, and by what a merge wrote down.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters.formats import safetensors
from weighbridge.adapters.inside import held
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.license import local_base
from weighbridge.adapters.merge import base as bases
from weighbridge.adapters.merge.base import Base
from weighbridge.adapters.merge.values import Origin, Source
from weighbridge.adapters.peft_config import is_local, is_quantized
from weighbridge.registry import findings
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.refs import shown
from weighbridge.registry.types import Finding

_STEP: Final = 1 << 20
_CACHED: Final = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+?)/snapshots/(?P<commit>[0-9a-f]{40})")
_WIDTH: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


_ENDS: Final = 64 << 10
"""Bytes at both ends of a tensor that are compared: further training changes the first of them already."""


KNOWN: Final = {
    "copies": "the base's tensors that the adapter holds a copy of are this base's",
    "commit": "the base is the one, and at the commit, that the adapter records",
    "id": "the base lies in a Hub cache under the id that the adapter records, which names no commit",
    "folder": "the base is the folder that the adapter names, or equals it in shapes and both ends of every tensor",
}
"""What can speak for a base, by the word of the fact `base_identity`; the first that holds counts."""

UNKNOWN: Final = (
    "nothing in the adapter tells whether this base is the one it was trained on: it holds no copy of a base tensor, "
    "and no record of its base could be compared; names and shapes fit"
)


OTHER: Final = "the adapter names another one than this"

UNLIKE: Final = "merge-base-other"
"""The finding that says so."""


def told(known: str | None, found: Iterable[Finding]) -> str:
    """Return a sentence on how far it is known that a base is the right one; `found` are the findings of the two."""
    if known is not None:
        return KNOWN[known]
    return OTHER if any(one.code == UNLIKE for one in found) else UNKNOWN


class Weights(NamedTuple):
    """The weights file of an adapter as it was looked at, and its sha256 where that was taken."""

    source: Source
    sha256: str | None = None


def hashed(weights: Weights) -> Weights:
    """Return an adapter's weights with their sha256, for which the file is read once; without where it cannot be."""
    if weights.sha256 is not None:
        return weights
    try:
        return weights._replace(sha256=sha256_file(Path(weights.source.path)))
    except OSError:
        return weights


def twice(parts: Mapping[str, Weights], base: Path) -> tuple[dict[str, Weights], list[Finding]]:
    """Return a refusal for each adapter, by its subject, that would count twice: given twice, or in the base already.

    What is in the base is told by the records that merge and cast leave there, or by the manifest of a published one.
    Files that differ in size are not read for it; the weights come back with the digests that were taken.
    """
    inside = set(held(base))
    sizes = Counter(one.source.size for one in parts.values())
    taken = {name: hashed(one) if inside or sizes[one.source.size] > 1 else one for name, one in parts.items()}
    found: list[Finding] = []
    seen: dict[str, str] = {}
    for subject, (_, digest) in taken.items():
        if digest is None:
            continue
        if digest in inside:
            where, fix = "in the base already, by what its merge wrote down", "merge into the base it was trained on"
        elif digest in seen:
            where, fix = f"given as {seen[digest]}, too", "name each adapter once"
        else:
            seen[digest] = subject
            continue
        message = f"this adapter is {where}: merged again, its change would count twice"
        found.append(findings.finding("merge-adapter-twice", subject, message, fix, weights_sha256=digest))
    return taken, found


def compare(
    base: Base,
    parts: Sequence[Artifact],
    configs: Sequence[Mapping[str, Any]],
    copies: Sequence[tuple[str, Origin]],
    sources: Sequence[Source],
    *,
    here: bool = True,
    called: str | None = None,
) -> tuple[str | None, list[Finding]]:
    """Return what speaks for the base, a word of KNOWN or None, and what says that it is another one. Raises OSError.

    `here`: a folder that an adapter names may be looked into; `called` is the version that the base was fetched as.
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
        named = local_base(config.get("base_model_name_or_path")) if here else None
        word, more = _ids(base, one, config) if named is None else _folders(base, named, called or str(base.root))
        found += more
        words.append(word)
    if equal and len(parts) == 1:
        return "copies", found
    return next((word for word in (None, "id", "folder", "commit") if word in words), None), found


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
            UNLIKE,
            "base",
            f"the adapter was trained on {recorded}{f' at {commit[:12]}' if commit else ''}, this base is {known} at "
            f"{cached['commit'][:12]}",
            "name the base the adapter was trained on",
            base_model=recorded,
            base_found=known,
            commit=cached["commit"],
        )
    ]


def fingerprint(base: Base) -> str:
    """Return a digest of all names, dtypes and shapes, and of both ends of each tensor's bytes. Raises OSError.

    It costs 128 KiB of reading for a tensor, however large the model is; small tensors are in it whole.
    """
    digest = hashlib.sha256()
    for name, one in sorted(base.places.items()):
        digest.update(f"{name}\0{one.dtype}\0{one.shape}\n".encode())
        with Path(base.sources[one.file].path).open("rb", buffering=0) as stream:
            size = one.count * safetensors.BITS.get(one.dtype, 8) // 8
            for at in sorted({0, max(0, size - _ENDS)}):
                stream.seek(one.at + at)
                digest.update(stream.read(min(_ENDS, size - at)))
    return digest.hexdigest()


def cached(root: Path) -> str | None:
    """Return id@commit of a model that lies in a Hub cache, None for any other folder."""
    found = _CACHED.search(str(root)) or _CACHED.search(str(root.resolve()))
    return f"{found['owner']}/{found['name']}@{found['commit']}" if found is not None else None


def _folders(base: Base, named: Path, called: str) -> tuple[str | None, list[Finding]]:
    """Compare the base with the folder that the adapter names, which is there."""
    if named.resolve() == base.root.resolve():
        return "folder", []
    try:
        other = bases.read(named)
    except OSError:
        other = None  # what nobody may read tells nothing
    if other is None:
        return None, []
    if fingerprint(other) == fingerprint(base):
        return "folder", []
    return None, [
        findings.finding(
            UNLIKE,
            "base",
            f"the adapter was trained on {shown(str(named))}, and {shown(called)} has other tensors",
            "name the base the adapter was trained on",
            base_model=str(named),
            base_found=called,
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
