"""What is merged into a model already: the digests of the adapters' weights, which every later merge looks at.

A merge writes them into its record, a cast carries them on, and a version that is made of such a folder has them in its
manifest, whichever command has published it.
"""

import re
from pathlib import Path
from typing import Any, Final

from weighbridge.adapters.reading import table_at
from weighbridge.registry import findings
from weighbridge.registry.types import Finding

MERGED: Final = "merge.json"
"""The record of a merge, beside the weights: what was merged, how, and what was proven."""

CAST: Final = "cast.json"
"""The record of a cast, beside the weights: from what, how, and what was proven."""

TOLD: Final = "merge-inside"
"""The finding about a model that holds adapters by the records beside it."""

PROVEN: Final = "merge-proven"
"""The finding of a merge that was proven."""

CAST_PROVEN: Final = "cast-proven"
"""The finding of a cast that was proven."""

_CARRIERS: Final = frozenset({PROVEN, CAST_PROVEN, TOLD})
_RECORDS: Final = (MERGED, CAST, "manifest.json")
"""The last one lies in the folder of a version that was fetched."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def held(folder: Path) -> list[str]:
    """Return the sha256 of the weights of every adapter that a model's folder holds, by what was written down there.

    They are `adapter_weights` in the data of findings. Nothing is raised: what cannot be read tells nothing.
    """
    found: dict[str, None] = {}
    for name in _RECORDS:
        for one in _tables((table_at(folder / name) or {}).get("findings")):
            data = one.get("data")
            listed = data.get("adapter_weights") if one.get("code") in _CARRIERS and isinstance(data, dict) else None
            for digest in listed if isinstance(listed, list) else ():
                if isinstance(digest, str) and _DIGEST.fullmatch(digest):
                    found[digest] = None
    return list(found)


def told(folder: Path, subject: str) -> list[Finding]:
    """Return the finding that carries on what a model's folder holds, none where nothing is known to be in it."""
    digests = held(folder)
    if not digests:
        return []
    many = "an adapter is" if len(digests) == 1 else f"{len(digests)} adapters are"
    return [
        findings.finding(
            TOLD, subject, f"{many} merged into this model already, by the record beside it", adapter_weights=digests
        )
    ]


def _tables(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
