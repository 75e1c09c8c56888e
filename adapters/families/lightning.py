"""What a Lightning checkpoint says of itself: the metric its callback watches, and whether it is the best so far.

    callbacks -> "ModelCheckpoint{...}" -> monitor, current_score, best_model_path      (lightning.pytorch.callbacks)

The callback's state is written into each file it saves, the best path already brought up to date.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from weighbridge.adapters import values
from weighbridge.adapters.formats.inert import Symbol
from weighbridge.adapters.formats.protocol import Directory, FormatFault, Tensor
from weighbridge.adapters.formats.source import opened
from weighbridge.adapters.formats.torch_bytes import blocks
from weighbridge.adapters.listing import File

_CALLBACK: Final = "ModelCheckpoint"
_TEXT: Final = 200


def told(file: File, directory: Directory) -> dict[str, Any]:
    """Return `metrics` by name and `best_so_far` as the file states them; numbers at its top level count too."""
    metrics = {e.name: e.value for e in directory.entries if type(e.value) is float and len(e.name) <= _TEXT}
    facts: dict[str, Any] = {}
    root = directory.root if isinstance(directory.root, dict) else {}
    callbacks = root.get("callbacks")
    for key, state in callbacks.items() if isinstance(callbacks, dict) else []:
        # Up to Lightning 1.5 the key was the class itself.
        name, kind = (key.full, key.name) if isinstance(key, Symbol) else (str(key), str(key))
        if not kind.startswith(_CALLBACK) or not isinstance(state, dict):
            continue
        monitor = state.get("monitor")
        score = _score(file, directory, name, state)
        if isinstance(monitor, str) and len(monitor) <= _TEXT and score is not None:
            metrics[monitor] = score
        best = state.get("best_model_path")
        if isinstance(best, str) and best and isinstance(monitor, str):
            last = PureWindowsPath(best).name if "\\" in best else PurePosixPath(best).name
            facts["best_so_far"] = facts.get("best_so_far", False) or last == file.name
    return facts | ({"metrics": dict(sorted(metrics.items()))} if metrics else {})


def _score(file: File, directory: Directory, callback: str, state: Mapping[Any, Any]) -> float | None:
    """Return the metric at the step of this file: a number, or a tensor of one element."""
    plain = state.get("current_score")
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        return float(plain)
    found = [t for t in directory.tensors if t.group == ("callbacks", callback) and t.name == "current_score"]
    return _number(file, found[0], directory) if found and found[0].elements == 1 else None


def _number(file: File, tensor: Tensor, directory: Directory) -> float | None:
    try:
        with opened(Path(file.source)) as source:
            raw = b"".join(blocks(source, tensor, big_endian=directory.facts.get("byteorder") == "big"))
    except (OSError, FormatFault):
        return None
    decoded = values.decode(tensor.dtype, raw)
    return decoded[0] if decoded else None
