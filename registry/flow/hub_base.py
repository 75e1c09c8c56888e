"""A base model from the Hub, fetched because a rule says so: the exact commit, its weights and papers, each verified.

    models--owner--name/snapshots/COMMIT/    appears by one rename when every file is whole
    models--owner--name/snapshots/.COMMIT/   files on their way; the next try goes on behind what is here
    models--owner--name/refs/REVISION        the commit that a branch or tag stood at

It has the shape of a Hub cache, so that whoever looks into one finds it, and belongs to us alone: the longest
unused bases go when a new one needs their room.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from weighbridge.registry import disk, errors, shell
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.commits import Held

MODELS: Final = "weighbridge.registry.remotes.hub.models:of_environ"
"""The Hub's client is loaded when the first base is fetched, not before."""

_WANTED: Final = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_PAPERS: Final = re.compile(r"(?:licen[cs]e|notice|readme)(?:\.\w+)?", re.IGNORECASE)
_LEFT: Final = re.compile(r"consolidated.*|adapter_.*|.*\.(?:bin|onnx)\..*", re.IGNORECASE)
"""Weights a second time, and what belongs to other files than the model's own."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Hub(Protocol):
    """What is needed of a Hub."""

    def commit(self, repo: str, revision: str | None) -> str:
        """Return the commit of a revision."""
        ...

    def tree(self, repo: str, commit: str) -> list[Held]:
        """Return the files at the top of a commit."""
        ...

    def fetch(self, repo: str, commit: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file."""
        ...


def open_hub(environ: Mapping[str, str]) -> Hub:
    """Return the Hub of an environment: HF_ENDPOINT and the token that huggingface_hub would use."""
    hub: Hub = shell.load(MODELS)(environ)
    return hub


def fetch(
    hub: Hub,
    repo: str,
    revision: str | None,
    cache: Path,
    *,
    limit: int,
    reserve: int = 0,
    used: Collection[Path] = (),
    moved: Callable[[int], None] = lambda _count: None,
) -> Path:
    """Return the folder of a model's revision, fetched as far as it is not here.

    `limit` is what the cache may hold in bytes, `reserve` what stays free on the disk; the snapshots in `used`, under
    whatever path, are not taken away for it. Raises NotFinishedError that says why a base cannot be had now,
    RefusedError for a model without safetensors, DiskFullError.
    """
    home = cache / ("models--" + repo.replace("/", "--"))
    try:
        commit = revision if revision and _COMMIT.fullmatch(revision) else hub.commit(repo, revision)
        place = home / "snapshots" / commit
        if not place.is_dir():
            files = wanted(hub.tree(repo, commit), repo, commit)
            partial = place.with_name(f".{commit}")
            _room(files, repo, cache, partial, limit=limit, reserve=reserve, used=used)
            _fetch_all(_From(hub, repo, commit, moved), files, place)
    except (errors.RefusedError, errors.DiskFullError):
        raise
    except errors.WeighbridgeError as error:
        told = f"{repo} at {revision}" if revision else repo
        raise errors.NotFinishedError(
            f"the base {shown(told)} cannot be fetched",
            why=f"{error.what}: {error.why}" if error.why else error.what,
            fix=error.fix or "it is asked for again",
            base=repo,
            revision=revision,
        ) from error
    _note(home, revision, commit)
    use(cache, place)
    return place


def use(cache: Path, base: Path) -> None:
    """Note that a base is being used, where it lies in the cache: the longest unused goes first."""
    real, snapshot = Path(os.path.realpath(cache)), Path(os.path.realpath(base))
    if snapshot.is_relative_to(real):
        with suppress(OSError):
            os.utime(snapshot)


def wanted(tree: Sequence[Held], repo: str, commit: str) -> list[Held]:
    """Return the files of a base: weights in safetensors, their index, configs, tokenizer and papers.

    Raises RefusedError where there are no such weights.
    """
    found = [
        one
        for one in tree
        if "/" not in one.path
        and not one.path.startswith(".")
        and not _LEFT.fullmatch(one.path)
        and (one.path.endswith(_WANTED) or _PAPERS.fullmatch(one.path))
    ]
    if not any(one.path.endswith(".safetensors") for one in found):
        raise errors.RefusedError(
            f"{shown(repo)} at {commit[:12]} holds no safetensors weights",
            why="a merge is made in safetensors, and other formats are not fetched",
            fix="convert the base, and name the folder above it in [merge] bases",
        )
    return found


def _room(
    files: Sequence[Held], repo: str, cache: Path, partial: Path, *, limit: int, reserve: int, used: Collection[Path]
) -> None:
    """Make room in the cache, the longest unused first; what is in `partial` is not fetched again.

    Raises NotFinishedError, DiskFullError.
    """
    size = sum(one.size for one in files)
    if size > limit:
        raise errors.NotFinishedError(
            f"{shown(repo)} is larger than what may be fetched",
            why=f"it has {size} bytes, [merge] fetch_max is {limit}",
            fix="raise fetch_max, or put the base into a folder of [merge] bases",
        )
    # What a fetch left over that was cut goes before any base that is whole; only this one's is gone on with.
    kept = sorted(
        (path for path in cache.glob("models--*/snapshots/*") if path != partial),
        key=lambda path: (not path.name.startswith("."), path.stat().st_mtime),
    )
    held = {path: _bytes(path) for path in kept}
    real = {os.path.realpath(path) for path in used}
    for path in kept:
        if sum(held.values()) + size <= limit:
            break
        if os.path.realpath(path) not in real:
            shutil.rmtree(path, ignore_errors=True)
            held.pop(path)
    if sum(held.values()) + size > limit:
        raise errors.NotFinishedError(
            f"there is no room for {shown(repo)}",
            why=f"it has {size} bytes, bases in use hold {sum(held.values())}, [merge] fetch_max is {limit}",
            fix="raise fetch_max, or wait until other merges are done",
        )
    with disk.speaking(f"{cache} cannot be written"):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    free, missing = disk.free_bytes(cache), size - _bytes(partial)
    if free - missing < reserve:
        raise errors.DiskFullError(
            f"there is no room for the base {shown(repo)} in {cache}",
            why=f"it needs {missing} bytes more, {free} are free, {reserve} stay free",
            fix="free some space, lower [daemon] disk_reserve, or set [merge] scratch to another disk",
            needed_bytes=missing,
            free_bytes=free,
        )


def _bytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


class _From(NamedTuple):
    """What is fetched: a commit of a repository; `moved` is told of every byte."""

    hub: Hub
    repo: str
    commit: str
    moved: Callable[[int], None]


def _fetch_all(source: _From, files: Sequence[Held], place: Path) -> None:
    partial = place.with_name(f".{source.commit}")
    with disk.speaking(f"{place} cannot be written"):
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in sorted(files, key=lambda f: f.size):
            _fetch(source, one, partial / one.path)
        disk.sync_folder(partial)
        partial.rename(place)
        disk.sync_folder(place.parent)


def _fetch(source: _From, one: Held, path: Path) -> None:
    """Fetch one file, going on behind what is here; it stays only when it is what the Hub says it is."""
    digest = _digest(one)
    with path.open("a+b") as out:
        have = out.tell()
        out.seek(0)
        while block := out.read(1 << 20):
            digest.update(block)
        if have < one.size:
            for block in source.hub.fetch(source.repo, source.commit, one.path, have):
                out.write(block)
                digest.update(block)
                have += len(block)
                source.moved(len(block))
        out.flush()
        os.fsync(out.fileno())
    if have != one.size or digest.hexdigest() != (one.sha256 or one.blob):
        path.unlink()
        raise errors.IntegrityError(
            f"{shown(one.path)} of {shown(source.repo)} did not arrive as it is there",
            why=f"{have} of {one.size} bytes came, or their digest is another one",
            fix="it is fetched again",
        )


def _digest(one: Held) -> "hashlib._Hash":
    """Return the digest that the Hub tells of a file: sha256 of what is stored, Git's name of what is not."""
    if one.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % one.size, usedforsecurity=False)


def _note(home: Path, revision: str | None, commit: str) -> None:
    """Note what a branch or tag stood at, so that whoever looks for it by that name finds the snapshot."""
    name = revision or "main"
    if _COMMIT.fullmatch(name) or not re.fullmatch(r"[\w.-]+", name):
        return
    with disk.speaking(f"{home} cannot be written"):
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / name).write_text(commit)
