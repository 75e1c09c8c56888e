"""Which model of the Hub a base in a local folder is: named by what lies there, proven by the sha256 of its weights.

A config's `_name_or_path`, a folder's name or a neighbour in a Hub cache only say where to look: a model that was
trained further keeps all of them. What proves it is that every weights file has the size and the sha256 of a file of
that name there, as a Hub cache on this machine holds it or as the Hub itself reports it.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.adapters import downloads, layout, parents
from weighbridge.adapters.formats.source import contents
from weighbridge.adapters.license import cache_folder, local_base
from weighbridge.adapters.paths import Evidence
from weighbridge.registry import errors, manifest
from weighbridge.registry.findings import finding
from weighbridge.registry.hashing import sha256_file
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.refs import shown
from weighbridge.registry.types import BaseFacts, Finding, Models, ModelSeen, ModelUnseen, Published, PublishedAs

HASH_MAX: Final = 4 << 30
"""Bytes of a base whose weights are hashed for this; a larger one needs the records of its download."""

_CONFIG_MAX: Final = 16 << 20
_MANIFEST_MAX: Final = 64 << 20
_CANDIDATES: Final = 6
_REPOS: Final = 1000
"""Repositories of a Hub cache that are looked through."""


class Proof(NamedTuple):
    """The id that is proven, or what was tried and why it proves nothing."""

    evidence: Evidence | None
    tried: tuple[str, ...] = ()
    silent: bool = False
    """Whether a Hub that was asked gave no answer, so that the next look may prove it."""


class Pulled(NamedTuple):
    """The version that a folder holds, by the digest of its content, and what the registry calls it where it knows."""

    content: str
    known: PublishedAs | None


def pulled(named: str, published: Published) -> Pulled | None:
    """Return the version that lies in the folder `named`, as `registry pull` leaves it; None where it is none.

    Its manifest says so, and every weights file has the size and sha256 that stand there. Hashes up to HASH_MAX.
    """
    folder = local_base(named)
    if folder is None:
        return None
    try:
        told = manifest.parse(contents(folder / "manifest.json", _MANIFEST_MAX))
    except (OSError, errors.WeighbridgeError):
        return None
    held = _Held(folder)
    files = {one.path: one for one in told.files}
    if not held.weights or {one.path for one in told.files if one.role == "weights"} - held.weights.keys():
        return None
    for name, size in held.weights.items():
        one = files.get(name)
        if one is None or one.size != size or held.sha256(name) != one.sha256:
            return None
    return Pulled(told.content, published(told.content, told.digest))


def prove(
    named: str, *, caches: Sequence[Path] = (), ask: Models | None = None, known: PublishedAs | None = None
) -> Proof:
    """Return which model of the Hub the folder `named` holds. Reads files, hashes up to HASH_MAX, raises nothing.

    `ask` is asked only for models that something on disk names, and for the version that the folder is `known` as.
    """
    folder = local_base(named)
    if folder is None:
        return Proof(None, ("its folder is not on this machine",))
    held = _Held(folder)
    if not held.weights:
        return Proof(None, ("its folder holds no weights",))
    tried: list[str] = []
    silent = False
    if known is not None and known.repo is not None and ask is not None:
        there = ask(known.repo, known.tag)
        fault = there.why if isinstance(there, ModelUnseen) else _difference(held, there)
        if isinstance(there, ModelSeen) and fault is None:
            why = f"its files are those of {known.ref}, {there.id} at {there.commit[:12]} on the Hub"
            return Proof(Evidence(there.id, why, there.commit))
        tried.append(f"{known.ref}: {fault}")
        silent = isinstance(there, ModelUnseen) and not there.absent
    elif known is not None:
        tried.append(f"it is {known.ref}, which lies on no Hub that could be asked")
    names = list(dict.fromkeys([*_named_in(folder), *_neighbours(held, caches)]))[:_CANDIDATES]
    for name in names:
        for seen, where in _look(name, held, caches, ask):
            if isinstance(seen, ModelUnseen):
                tried.append(f"{name}: {seen.why}")
                silent = silent or (ask is not None and not seen.absent)
                continue
            fault = _difference(held, seen)
            if fault is None:
                count = len(held.weights)
                files = "its weights file has" if count == 1 else f"its {count} weights files have"
                why = f"{files} the sha256 of {seen.id} at {seen.commit[:12]}, {where}"
                return Proof(Evidence(seen.id, why, seen.commit))
            tried.append(f"{name}, {where}: {fault}")
    return Proof(None, tuple(tried) or ("nothing in its folder names a model of the Hub",), silent)


def unproven(named: str, subject: str, proof: Proof) -> Finding:
    """Return the finding that nobody knows which model a local base is, and what was tried."""
    return finding(
        "base-unproven",
        subject,
        f"which model of the Hub the base {shown(named)} is, is unknown: {shown('; '.join(proof.tried))}",
        "name it in weighbridge.yaml: base: owner/model",
        local_paths=[named],
        silent=proof.silent,
    )


def by_path(named: str, subject: str) -> Finding:
    """Return the finding that a base is named by a path of some machine."""
    return finding(
        "base-local-path",
        subject,
        f"the base is named by a path, {shown(named)}: nobody else can resolve it",
        "write the base's Hub id, or name it in weighbridge.yaml",
        base_is_local_path=True,
        local_paths=[named],
    )


def standing(base: BaseFacts, subject: str, ask: Models) -> tuple[ModelSeen | None, list[Finding]]:
    """Return what the Hub says of a base that has an id, and what follows for whoever uses the artifact."""
    name = base.id or ""
    seen = ask(name, base.revision)
    if isinstance(seen, ModelUnseen):
        if seen.absent:
            at = f" at {base.revision}" if base.revision else ""
            words = f"the base {name}{at} is not to be found on the Hub: {seen.why}; loaders that follow it will fail"
            return None, [finding("base-not-on-hub", subject, words, "name the right one in weighbridge.yaml: base")]
        words = f"whether the base {name} is on the Hub, and who may use it, is unknown: {seen.why}"
        return None, [finding("base-unasked", subject, words)]
    told = []
    if seen.gated:
        words = f"the base {seen.id} is gated ({seen.gated}): whoever loads this needs access to it"
        told.append(finding("base-gated", subject, words, f"ask for it on the page of {seen.id}", gated=seen.gated))
    if seen.id != name:
        words = f"the base {name} is called {seen.id} now; the Hub redirects the old name"
        told.append(finding("base-renamed", subject, words, base_model=name, renamed_to=seen.id))
    return seen, told


class _Held:
    """The weights of a local folder, with the sha256 that is recorded of them or is computed when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = _weights(folder)
        self._left = HASH_MAX

    def sha256(self, name: str) -> str | None:
        """Return the sha256 of a weights file; None where too much had to be read for it, or it went away."""
        path = self.folder / name
        known = downloads.record(self.folder, name)
        if known is not None and known.sha256 is not None and downloads.fresh(known, path):
            return known.sha256
        if self.weights[name] > self._left:
            return None
        self._left -= self.weights[name]
        try:
            status = path.stat()
            return _hashed(str(path), status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:
            return None

    def commits(self) -> list[str]:
        """Return the one commit that all files are recorded to come from."""
        found = {known.commit for name in self.weights if (known := downloads.record(self.folder, name))}
        return [c for c in found if c] if len(found) == 1 else []


@functools.lru_cache(maxsize=256)
def _hashed(path: str, size: int, mtime_ns: int, ino: int) -> str:
    del size, mtime_ns, ino  # they tell a changed file from the one that was hashed
    return sha256_file(Path(path))


def _weights(folder: Path) -> dict[str, int]:
    """Return the names and sizes of the weights files of a folder: safetensors, else torch files."""
    try:
        found = {e.name: e.stat().st_size for e in os.scandir(folder) if Path(e.path).is_file()}
    except OSError:
        return {}
    for suffix in (".safetensors", ".bin"):
        chosen = {n: s for n, s in found.items() if n.endswith(suffix) and _is_model(n)}
        if chosen:
            return dict(sorted(chosen.items(), key=lambda item: (item[1], item[0])))
    return {}


def _is_model(name: str) -> bool:
    return layout.is_weights_name(name) and not name.startswith("adapter_")


def _named_in(folder: Path) -> Iterator[str]:
    """Yield the models of the Hub that something in a folder, or its own name, speaks of."""
    told = parents.download(folder)
    config = _config(folder).get("_name_or_path")
    owner, name = folder.parent.name, folder.name
    joined = name.removeprefix("models--").replace("--", "/", 1).replace("__", "/", 1)
    for one in (told.id if told else None, config, joined, f"{owner}/{name}"):
        if isinstance(one, str) and "/" in one and is_repo_id(one):
            yield one


def _neighbours(held: _Held, caches: Sequence[Path]) -> Iterator[str]:
    """Yield the models of a Hub cache whose files have the names and sizes of these."""
    for root in caches:
        for repo in sorted(root.glob("models--*"))[:_REPOS]:
            name = repo.name.removeprefix("models--").replace("--", "/", 1)
            if is_repo_id(name) and any(_sizes(one, held) for one in (repo / "snapshots").glob("*")):
                yield name


def _sizes(snapshot: Path, held: _Held) -> bool:
    try:
        return all((snapshot / name).stat().st_size == size for name, size in held.weights.items())
    except OSError:
        return False


def _look(
    name: str, held: _Held, caches: Sequence[Path], ask: Models | None
) -> Iterator[tuple[ModelSeen | ModelUnseen, str]]:
    """Yield what caches and Hub say of a model, at the commit that the files are recorded of, else at main."""
    snapshots = [cache_folder(name, commit, caches) for commit in (*held.commits(), None)]
    for snapshot in dict.fromkeys(s for s in snapshots if s is not None):
        yield _cached(name, snapshot, held), "in the Hub cache"
    if ask is None:
        yield ModelUnseen("no remote of this name is a Hub that could be asked"), "on the Hub"
        return
    for commit in (*held.commits(), None):
        seen = ask(name, commit)
        yield seen, "on the Hub"
        if isinstance(seen, ModelUnseen) and not seen.absent:
            return


def _cached(name: str, snapshot: Path, held: _Held) -> ModelSeen:
    files: dict[str, tuple[int, str | None]] = {}
    for one in held.weights:
        known = downloads.record(snapshot, one)
        try:
            files[one] = (snapshot / one).stat().st_size, known.sha256 if known else None
        except OSError:
            continue
    return ModelSeen(id=name, commit=snapshot.name, files=files)


def _difference(held: _Held, seen: ModelSeen) -> str | None:
    """Return what keeps the files from being those of a model, None where all are; sizes first, they cost nothing."""
    for name, size in held.weights.items():
        theirs = seen.files.get(name)
        if theirs is None:
            return f"it has no {shown(name)}"
        if theirs[0] != size:
            return f"its {shown(name)} has {theirs[0]} bytes, this one {size}"
    for name in held.weights:
        wanted = seen.files[name][1]
        if wanted is None:
            return f"no sha256 of its {shown(name)} is known"
        ours = held.sha256(name)
        if ours is None:
            return f"{shown(name)} is larger than what is hashed for this, and no record of a download lies beside it"
        if ours != wanted:
            return f"its {shown(name)} has another sha256"
    return None


def _config(folder: Path) -> dict[str, object]:
    try:
        value = json.loads(contents(folder / layout.MODEL_CONFIG, _CONFIG_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
