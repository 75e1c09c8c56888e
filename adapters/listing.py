"""Walk a folder once: every directory with its entries, links followed at most once, loops never.

Real directories come before linked ones, so that `last -> checkpoint-5` is an alias of `checkpoint-5` and never the
other way round. A link to a directory above the root, to the root itself or to one already walked is not entered.
"""

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

NEVER_ENTERED: Final = frozenset({".git", "__pycache__", "node_modules", ".venv"})
DEPTH_LIMIT: Final = 32
_MADE_UP: Final = ("/proc/", "/sys/", "/dev/")
_NAME: Final = attrgetter("name")
_TEXT_LINK_LIMIT: Final = 200
_BLOB_LINK = re.compile(rb"(?:\.\./)+blobs/[0-9a-f]{40,64}")


class Folder(NamedTuple):
    """One directory: its path from the root (`.` for the root), its subdirectories and its other entries."""

    path: str
    relative: str
    dirs: tuple[str, ...]
    files: tuple[os.DirEntry[str], ...]
    linked: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Names of the entries that are no directories, dangling links included."""
        return frozenset(entry.name for entry in self.files)


class _Place(NamedTuple):
    path: str
    real: str
    relative: str
    depth: int
    linked: bool = False


def ignored(name: str, relative: str, patterns: Sequence[str], *, directory: bool) -> bool:
    """Return whether a pattern hides this entry.

    A pattern without `/` is compared with the name, one with `/` inside with the path from the root; one that ends with
    `/` hides directories only.
    """
    for pattern in patterns:
        bare = pattern.rstrip("/")
        if pattern.endswith("/") and not directory:
            continue
        if fnmatchcase(relative if "/" in bare else name, bare.lstrip("/")):
            return True
    return False


def walk(root: Path | str, ignore: Sequence[str] = (), *, hidden: bool = False) -> Iterator[Folder]:
    """Yield every directory under the root, the root first, parents before children, names in order.

    Directories that an ignore pattern matches, and hidden ones unless `hidden`, are not entered. A directory that
    vanishes or cannot be read while we look is left out; only the root's own absence raises OSError.
    """
    top = os.fspath(root)
    real = os.path.realpath(top)
    seen = {real}
    waiting: deque[_Place] = deque([_Place(top, real, ".", 0)])
    links: deque[_Place] = deque()
    while waiting or links:
        place = waiting.popleft() if waiting else links.popleft()
        if place.linked:
            target = os.path.realpath(place.path)
            if target in seen or leads_astray(target, real):
                continue
            seen.add(target)
            place = place._replace(real=target)
        try:
            with os.scandir(place.path) as entries:
                found = sorted(entries, key=_NAME)
        except OSError:
            if place.relative == ".":
                raise
            continue
        dirs: list[str] = []
        files: list[os.DirEntry[str]] = []
        for entry in found:
            try:
                is_dir = entry.is_dir()
            except OSError:
                is_dir = False
            if not is_dir:
                files.append(entry)
                continue
            name = entry.name
            inner = name if place.relative == "." else f"{place.relative}/{name}"
            if ignored(name, inner, ignore, directory=True):
                continue
            dirs.append(name)
            if place.depth >= DEPTH_LIMIT or name in NEVER_ENTERED or (name.startswith(".") and not hidden):
                continue
            if entry.is_symlink():
                links.append(_Place(entry.path, "", inner, place.depth + 1, linked=True))
            else:
                beneath = f"{place.real}/{name}"
                if beneath not in seen:
                    seen.add(beneath)
                    waiting.append(_Place(entry.path, beneath, inner, place.depth + 1))
        yield Folder(place.path, place.relative, tuple(dirs), tuple(files), linked=place.linked)


class File(NamedTuple):
    """One file of a tree; `path` is relative to the root, `source` what is opened, `link` the target of a dead link."""

    path: str
    source: str
    size: int
    link: str | None = None

    @property
    def name(self) -> str:
        """The last segment of the path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The path of the folder, `.` for the root."""
        return self.path.rpartition("/")[0] or "."


class Tree(NamedTuple):
    """Everything under one folder at one moment."""

    root: str
    files: dict[str, File]
    folders: dict[str, Folder]

    def inside(self, folder: str) -> dict[str, File]:
        """Return the files that lie directly in a folder, by name."""
        listed = self.folders.get(folder)
        prefix = "" if folder == "." else folder + "/"
        names = [entry.name for entry in listed.files] if listed else []
        return {name: self.files[prefix + name] for name in names if prefix + name in self.files}

    def below(self, folder: str) -> dict[str, File]:
        """Return the files anywhere under a folder, by path from the root."""
        prefix = "" if folder == "." else folder + "/"
        return {path: file for path, file in self.files.items() if path.startswith(prefix)}


def read_tree(
    root: Path | str, ignore: Sequence[str] = (), beside: Callable[[str, str], bool] = lambda _own, _name: False
) -> Tree:
    """Return every file under a root with its size, hidden folders included. Raises OSError when the root is gone.

    A root that is a file gives a tree of that file, and of the files of its folder that `beside` wants with it.

    The blob store of a Hub cache is left out: its bytes are counted through the links of the snapshot. A copy made
    without symbolic links holds the target's path as text; inside a snapshot such a text is followed like a link.
    """
    if not os.path.isdir(root) and os.path.lexists(root):  # noqa: PTH112 - plain strings, as in the walk
        return _lone(Path(root), beside)
    files: dict[str, File] = {}
    folders: dict[str, Folder] = {}
    stores: set[str] = set()
    for folder in walk(root, ignore, hidden=True):
        if {"blobs", "snapshots"} <= set(folder.dirs):
            stores.add("blobs" if folder.relative == "." else f"{folder.relative}/blobs")
        if folder.relative in stores:
            continue
        folders[folder.relative] = folder
        for entry in folder.files:
            path = entry.name if folder.relative == "." else f"{folder.relative}/{entry.name}"
            if ignored(entry.name, path, ignore, directory=False) and not _in_progress(entry.name):
                continue
            file = _file(entry, path)
            if file is not None:
                files[path] = file
    return Tree(os.fspath(root), files, folders)


def with_files(tree: Tree, entries: Sequence[os.DirEntry[str]]) -> Tree:
    """Return a tree that holds some files of another folder as well, as if they lay in its root."""
    root = tree.folders["."]
    added = {e.name: file for e in entries if e.name not in tree.files and (file := _file(e, e.name)) is not None}
    more = tuple(entry for entry in entries if entry.name in added)
    folders = {**tree.folders, ".": root._replace(files=(*root.files, *more))}
    return tree._replace(files={**tree.files, **added}, folders=folders)


def _lone(path: Path, beside: Callable[[str, str], bool]) -> Tree:
    with os.scandir(path.parent) as entries:
        taken = [e for e in entries if e.name == path.name or beside(path.name, e.name)]
    files = {entry.name: file for entry in taken if (file := _file(entry, entry.name)) is not None}
    if path.name not in files:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    folder = Folder(str(path.parent), ".", (), tuple(entry for entry in taken if entry.name in files))
    return Tree(str(path.parent), files, {".": folder})


def _in_progress(name: str) -> bool:
    # `*.tmp` is often ignored, yet a save under way beside the weights must be seen.
    return name.endswith((".tmp", ".part", ".incomplete"))


def _file(entry: os.DirEntry[str], path: str) -> File | None:
    try:
        if not entry.is_file() or (entry.is_symlink() and _made_up(os.path.realpath(entry.path))):
            return _dead(entry, path)
        size = entry.stat().st_size
    except OSError:
        return _dead(entry, path)
    if size < _TEXT_LINK_LIMIT and "snapshots/" in entry.path:
        target = _text_link(entry.path)
        if target is not None:
            blob = Path(entry.path).parent / target
            return File(path, str(blob), blob.stat().st_size) if blob.is_file() else File(path, entry.path, 0, target)
    return File(path, entry.path, size)


def leads_astray(target: str, root: str) -> bool:
    """Tell whether a folder's link must not be followed: to the root or above it, or to what the kernel makes up.

    Both are real paths.
    """
    return f"{root}/".startswith(target.rstrip("/") + "/") or _made_up(target)


def _made_up(real: str) -> bool:
    return f"{real}/".startswith(_MADE_UP)


def _dead(entry: os.DirEntry[str], path: str) -> File | None:
    """Return a link to nothing as such; sockets, pipes and what has just vanished are no files."""
    try:
        return File(path, entry.path, 0, str(Path(entry.path).readlink())) if entry.is_symlink() else None
    except OSError:
        return None


def _text_link(path: str) -> str | None:
    try:
        text = Path(path).read_bytes()
    except OSError:
        return None
    match = _BLOB_LINK.fullmatch(text)
    return match[0].decode() if match else None
