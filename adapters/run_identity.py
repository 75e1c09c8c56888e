"""Which run a folder belongs to, and who that run is.

A run is one training's output folder: the parent of numbered or conventionally named folders, else the folder itself.
Its identity has two halves, `place-start`: the place is stable for as long as the run's folder stays where it is, also
for another daemon on the same shared file system and for one that lost its state; the start differs when the folder was
made anew. A name belongs to a place; `latest` is worked out within one start.
"""

import hashlib
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters import checkpoint, layout
from weighbridge.adapters.run_place import PLACE
from weighbridge.config import mounts
from weighbridge.registry import disk

_CONVENTIONAL: Final = frozenset(
    """final last best latest result results output outputs model models adapter adapters lora merged weights export
    final_model final-model final_checkpoint final-checkpoint best_model best-model last_model last-model
    best_checkpoint best-checkpoint last_checkpoint last-checkpoint checkpoint checkpoints ckpt hf huggingface
    default pretrained saved_model""".split()  # noqa: SIM905 - words
)
_OLDEST_CREDIBLE: Final = 946684800.0
"""Seconds since 1970 of the year 2000: file times before are no times."""


class Run(NamedTuple):
    """A run: its folder, and the words that name templates use."""

    path: str
    project: str
    name: str


def run_of(root: str, path: str, *, above_is_artifact: bool, paired: bool = False) -> Run:
    """Return the run of an artifact's folder under a watched root.

    `above_is_artifact` tells that the folder above holds an artifact or numbered checkpoints itself, `paired` that raw
    weights and their running average lie side by side, this being one of the two: then the folder of both is the run.
    """
    folder = path
    while folder != root:
        above, _, name = folder.rpartition("/")
        checkpoint = layout.is_step_like(name) or (folder == path and above_is_artifact)
        # Right under the root a folder named `model` is a run of that name; a numbered one makes the root the run.
        part = _is_conventional(name) or (folder == path and paired)
        if not checkpoint and (above == root or not part):
            break
        folder = above
    relative = folder[len(root) + 1 :].split("/") if folder != root else [root.rpartition("/")[2]]
    return Run(folder, relative[0], relative[-1])


def find(root: str, path: str) -> Run:
    """Return the run of an artifact's folder, looking at what lies beside it."""
    try:
        names = set(os.listdir(os.path.dirname(path)))  # noqa: PTH120, PTH208 - names of a folder of strings
    except OSError:
        names = set()
    own = os.path.basename(path)  # noqa: PTH119 - a string
    paired = layout.raw_of(own) in names or any(layout.raw_of(name) == own for name in names)
    holds = holds_checkpoints(names) or checkpoint.is_candidate(names) or layout.MODEL_CONFIG in names
    return run_of(root, path, above_is_artifact=holds, paired=paired)


def _is_conventional(name: str) -> bool:
    """Tell whether a folder is named after what it holds, raw or averaged, and not after its run."""
    return name.lower() in _CONVENTIONAL or (layout.raw_of(name) or "").lower() in _CONVENTIONAL


def place(path: str, table: str) -> str:
    """Return a digest of where a run lies, the same on every host that shares the file system.

    `table` is the mount table. A local disk is told apart by the machine.
    """
    real = os.path.realpath(path)
    mount = mounts.mount_of(real, table)
    if mount is not None and mounts.is_network(mount.type):
        within = real[len(mount.point.rstrip("/")) :]
        return _digest("network", mount.type, mount.source, within)
    return _digest("local", machine(), real)


def machine() -> str:
    """Return what tells this machine from others."""
    for file in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            found = Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if found:
            return hashlib.sha256(b"weighbridge" + found.encode()).hexdigest()[:16] + socket.gethostname()
    return socket.gethostname()


def identity(path: str, table: str) -> str:
    """Return the identity of a run that is seen for the first time: its place, and when it began."""
    return f"{place(path, table)}-{int(began(path)):x}"


def began(path: str) -> float:
    """Return the best guess at when a run began: its oldest entry with a credible time, else now."""
    now = time.time()
    found = [now]
    try:
        with os.scandir(path) as entries:
            found += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    except OSError:
        pass
    return min(moment for moment in found if _OLDEST_CREDIBLE <= moment <= now)


def began_at(identity: str) -> float | None:
    """Return when a run began, out of an identity of ours; None for an identity that people chose."""
    place, _, start = identity.partition("-")
    try:
        return float(int(start, 16)) if len(place) == PLACE and start else None
    except ValueError:
        return None


def key(path: str) -> str:
    """Return what changes when a run's folder is made anew: its number, and when it was born. Raises OSError.

    A number alone is no proof: ext4 gives that of a folder which was deleted to the next one that is made.
    """
    status = os.stat(path)  # noqa: PTH116 - a string
    born = disk.born_ns(path)
    return f"{status.st_dev}:{status.st_ino}" + ("" if born is None else f":{born}")


def is_same(key: str, other: str) -> bool:
    """Tell whether two keys are of one folder; where a file system told no birth, the numbers decide."""
    return all(mine == theirs for mine, theirs in zip(key.split(":"), other.split(":"), strict=False))


def _digest(*words: str) -> str:
    text = "\n".join(("weighbridge-run-v1", *words))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:PLACE]


def holds_checkpoints(names: Collection[str]) -> bool:
    """Tell whether a folder with these sub-folders is a run."""
    return any(layout.step_of(name) is not None for name in names)
