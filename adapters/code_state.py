"""The Git state of the code that trained a model, read from files alone.

No git command is run: a repository's own configuration can make `git status` execute programs, and whoever owns a run
folder is not trusted with that. So whether the working tree was dirty stays unknown.
"""

import os
import re
from pathlib import Path
from typing import Any, Final

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_NOTED: Final = ("git_hash.txt", "git_commit.txt", "git_sha.txt", "commit.txt", "git_commit", "git_hash")
_SMALL: Final = 1 << 20
_DEPTH: Final = 24


def of_run(folder: Path, named: str | None = None, *, run_root: Path | None = None) -> dict[str, Any] | None:
    """Return {remote, commit, branch, dirty, source} of the code of a run, or None when nothing on disk tells.

    A commit noted in the run's own files was written by the training and wins; else the repository that `named` (the
    sidecar) or a folder above the run holds, as it is now.
    """
    noted = next((c for d in dict.fromkeys((folder, run_root or folder)) if (c := _noted(d))), None)
    start = Path(named).expanduser() if named else (run_root or folder)
    found = of_folder(start, upwards=True)
    if noted is not None:
        commit, file = noted
        remote = found.get("remote") if found else None
        return {"remote": remote, "commit": commit, "branch": None, "dirty": None, "source": file}
    return found


def of_folder(folder: Path, *, upwards: bool = False) -> dict[str, Any] | None:
    """Return the Git state of a folder, of the nearest folder above it that has one if asked. Raises nothing."""
    try:
        here = Path(os.path.realpath(folder))
    except OSError:
        return None
    for place in [here, *here.parents][: _DEPTH if upwards else 1]:
        git = _git_folder(place)
        if git is not None:
            return _state(git)
    return None


def clean_remote(url: str) -> str | None:
    """Return a remote's address without user, password, token or query; None for a path of this machine."""
    url = url.strip()
    match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(?:[^/@]*@)*([^/?#]+)(/[^?#]*)?(?:[?#].*)?", url, re.IGNORECASE)
    if match:
        if match[1].lower() == "file":
            return None
        return f"{match[1].lower()}://{match[2]}{match[3] or ''}"
    match = re.fullmatch(r"(?:[^/@\s]+@)?([A-Za-z0-9.-]+\.[A-Za-z0-9-]+|localhost):(?!//)([^\s?#]+)(?:[?#].*)?", url)
    return f"{match[1]}:{match[2]}" if match else None


def _state(git: Path) -> dict[str, Any] | None:
    common = git / (_text(git / "commondir") or ".")
    head = _text(git / "HEAD")
    if head is None:
        return None
    branch = None
    commit: str | None = head
    if head.startswith("ref:"):
        ref = head[4:].strip()
        if not re.fullmatch(r"refs/[\w./+@=-]+", ref) or ".." in ref:
            return None
        branch = ref.removeprefix("refs/heads/")
        commit = _text(git / ref) or _text(common / ref) or _packed(common, ref)
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    return {"remote": _remote(common), "commit": commit, "branch": branch, "dirty": None, "source": ".git"}


def _git_folder(place: Path) -> Path | None:
    git = place / ".git"
    try:
        if git.is_dir():
            return git
        link = _text(git)
    except OSError:
        return None
    if link and link.startswith("gitdir:"):
        target = Path(os.path.realpath(place / link[7:].strip()))
        return target if target.is_dir() else None
    return None


def _packed(common: Path, ref: str) -> str | None:
    for line in (_text(common / "packed-refs", limit=16 * _SMALL) or "").splitlines():
        commit, _, name = line.partition(" ")
        if name.strip() == ref:
            return commit
    return None


def _remote(common: Path) -> str | None:
    """Return the address of `origin`, else of the first remote."""
    section, first = None, None
    for line in (_text(common / "config") or "").splitlines():
        header = re.fullmatch(r"\s*\[remote \"([^\"]+)\"\]\s*", line)
        if header or line.strip().startswith("["):
            section = header[1] if header else None
            continue
        url = re.fullmatch(r"\s*url\s*=\s*(.+?)\s*", line)
        if url and section:
            clean = clean_remote(url[1].strip('"'))
            if section == "origin":
                return clean
            first = first or clean
    return first


def _noted(folder: Path) -> tuple[str, str] | None:
    for name in _NOTED:
        found = _COMMIT.search(_text(folder / name, limit=4096) or "")
        if found:
            return found[0], name
    return None


def _text(path: Path, limit: int = _SMALL) -> str | None:
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            return stream.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return None
