"""Where a model came from, gathered from what lies on disk; a fact that does not is absent, never guessed."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from weighbridge.adapters import code_state, history, parents, paths, recipes, secrets
from weighbridge.adapters.card_facts import CARD, CardFacts
from weighbridge.adapters.card_facts import read as read_card
from weighbridge.adapters.sidecar import Sidecar
from weighbridge.registry import times
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.types import Provenance, RunFacts

_SCAN_MAX = 10_000


def gather(
    root: Path,
    run: RunFacts,
    sidecar: Sidecar | None = None,
    *,
    run_root: Path | None = None,
    config: Mapping[str, Any] | None = None,
    adapter_config: Mapping[str, Any] | None = None,
    card: CardFacts | None = None,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    created_at: str | None = None,
    started_at: str | None = None,
    host: str | None = None,
) -> Provenance:
    """Return the provenance of the artifact in `root`.

    `run_root` is the run's own folder where it differs. `step` and `metrics` stand in where no trainer state tells them
    (a folder's number, what a checkpoint file says of itself). `created_at` is the end of writing, else the newest
    file's time; `started_at` and `host` are the caller's to know. Never raises for what a trainer wrote; raises OSError
    when the folder itself cannot be read.
    """
    sidecar = sidecar or Sidecar()
    card = card if card is not None else read_card(root / CARD)
    folders = [root] if run_root is None or run_root == root else [root, run_root]
    state = history.read(root)
    past = state or _newest_state(root)
    settings, data = recipes.training(folders, card.body)
    settings = dict(past.settings if past else {}) | settings
    merged = parents.merge(root)
    if merged is not None and merged.method is not None:
        settings["merge_method"] = merged.method
    told = history.State() if state is None else state
    found = Provenance(
        run=run,
        step=told.step if told.step is not None else step,
        epoch=told.epoch,
        created_at=created_at or newest(root),
        started_at=started_at,
        owner=sidecar.owner or owner_of(root),
        host=host,
        metrics=recipes.results([root]) | (dict(told.metrics) or _numbers(metrics)),
        best=past.best if past else None,
        history="training.json" if past and past.history else None,
        log_history=list(past.history) if past else [],
        training=dict(sorted(settings.items())),
        code=code_state.of_run(root, sidecar.code, run_root=run_root),
        data=[dict(d) for d in sidecar.data] or _card_data(card) or data,
        packages=recipes.packages(folders, [adapter_config, config], card.body),
        purpose=sidecar.purpose,
    )
    return _without_secrets(found)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: history.number(value) for name, value in (metrics or {}).items()}


WITH_PATHS: Final = ("metrics", "training", "code", "data", "packages", "purpose")
"""Fields of a provenance of which `redact` leaves out what names a path."""


def redact(provenance: Provenance, *, keep_paths: bool, declared_owner: str | None = None) -> Provenance:
    """Return what may leave: with `keep_paths` all of it, else no user name, no host and no path of a machine.

    `declared_owner` is an owner somebody wrote down (the sidecar's), which is meant to be shown.
    """
    if keep_paths:
        return provenance
    return msgspec.structs.replace(
        provenance,
        owner=declared_owner,
        host=None,
        metrics=_public(provenance.metrics),
        training=_public(provenance.training),
        code=_public(provenance.code) if provenance.code else None,
        data=[kept for d in provenance.data if (kept := _public({k: v for k, v in d.items() if k != "path"}))],
        packages=_public(provenance.packages),
        purpose=_public({"purpose": provenance.purpose}).get("purpose"),
    )


def owner_of(folder: Path) -> str | None:
    """Return the user name that owns a folder, None where its uid has none. Raises OSError."""
    try:
        return pwd.getpwuid(folder.stat().st_uid).pw_name
    except KeyError:
        return None


def newest(folder: Path) -> str | None:
    """Return the time of the last change to a file of a folder, in UTC. Raises OSError."""
    times = [e.stat(follow_symlinks=True).st_mtime for e in _entries(folder) if e.is_file()]
    return moment(max(times)) if times else None


def earliest(run_root: Path) -> str | None:
    """Return the time of the oldest entry of a run: it had begun by then. Raises OSError."""
    times = [t for e in _entries(run_root) if (t := e.stat(follow_symlinks=False).st_mtime) > 0]
    return moment(min(times)) if times else None


def moment(seconds: float) -> str | None:
    """Return a time in the spelling of the formats, None for one that no calendar holds."""
    try:
        return times.spelled(seconds)
    except (OverflowError, OSError, ValueError):
        return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    found = []
    for entry in os.scandir(folder):
        try:
            entry.stat()
        except OSError:
            continue  # a link to nothing, or gone since
        found.append(entry)
        if len(found) >= _SCAN_MAX:
            break
    return found


def _newest_state(root: Path) -> history.State | None:
    """Return the state of the run's last checkpoint: the past of a result that was saved without one."""
    numbered = []
    for entry in _entries(root):
        head, _, number = entry.name.rpartition("-")
        if head == "checkpoint" and number.isascii() and number.isdigit() and entry.is_dir():
            numbered.append((int(number), entry.path))
    for _, path in sorted(numbered, reverse=True):
        state = history.read(Path(path))
        if state is not None:
            return state
    return None


def _card_data(card: CardFacts) -> list[dict[str, Any]]:
    value = (card.front or {}).get("datasets")
    return [{"id": d, "source": CARD} for d in (value if isinstance(value, list) else [value]) if is_repo_id(d)]


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if not paths.scan_value("", v, field="path")}


def _without_secrets(provenance: Provenance) -> Provenance:
    """Drop every text that holds a secret, wherever it came from."""
    document = msgspec.to_builtins(provenance)
    return msgspec.convert(_purged(document), Provenance)


def _purged(value: Any) -> Any:
    if isinstance(value, str):
        return None if secrets.scan_bytes(value.encode("utf-8", "replace")) else value
    if isinstance(value, dict):
        kept = {k: _purged(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v is not None or value[k] is None}
    if isinstance(value, list):
        return [kept for v in value if (kept := _purged(v)) is not None or v is None]
    return value
