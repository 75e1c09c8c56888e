"""The scan, which is the truth: what folders a watched root holds, and what lies in one of them.

Events are only hints. A scan costs one `stat` per folder it has to ask and lists again only folders that changed, so an
idle scan is proportional to the folders where something can happen: containers are asked every time, finished
checkpoint folders the more rarely the older they are. A full scan trusts nothing and lists everything.

Links: real folders are walked before links, and no folder twice, so `last -> checkpoint-5` is no second checkpoint, a
loop ends, and an output folder that is a link to another disk is followed once.
"""
# ruff: noqa: PTH110, PTH112, PTH116, PTH119, PTH120
# Paths are strings here: building a Path costs more than the system call it is for.

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from weighbridge.adapters import checkpoint, layout, plan
from weighbridge.adapters.listing import DEPTH_LIMIT, NEVER_ENTERED, ignored, leads_astray
from weighbridge.daemon.settle import FileStat, Listing, listing
from weighbridge.registry.errors import utf8

_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR
YOUNG: Final = 300.0
"""Seconds for which a finished folder is asked at every scan; later it is asked ever more rarely."""

NOISE_FOLDERS: Final = frozenset({"wandb", "runs", "logs", "log", "tensorboard", "mlruns", "lightning_logs", "tb_logs"})
"""Folders of logs: what happens in there says nothing of an artifact."""

_LOOK_DEPTH: Final = 4


@dataclass(slots=True)
class _Node:
    """A folder as it was listed last; times are of the monotonic clock."""

    path: str
    parent: str | None
    depth: int
    key: tuple[int, int] = (0, 0)
    mtime_ns: int = -1
    children: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    candidate: bool = False
    inside: bool = False
    """It belongs to the artifact above it: rank folders, other forms of the same model."""
    whole_model: bool = False
    files: tuple[str, ...] = ()
    """Files in it that are checkpoints of their own, as paths."""
    parts: bool = False
    """It holds rank files or pieces itself."""
    named: bool = False
    """Its own files make it a candidate."""
    holders: set[str] = field(default_factory=set)
    """Sub-folders that hold its weights in parts: a DeepSpeed tag, accelerate's pieces."""
    unnamed: tuple[str, ...] = ()
    """Sub-folders whose names are no UTF-8, as they are shown: no database or manifest can hold such a path."""
    confirm: bool = True
    """It was listed once since it changed: a change within the same tick of the file system's clock may be hidden."""
    changed: float = 0.0
    asked: float = 0.0
    cost: float = 0.0


class Scan(NamedTuple):
    """What one scan found; `changed` are candidate folders whose entries differ, `gone` folders that vanished."""

    new: list[str]
    changed: list[str]
    gone: list[str]
    seconds: float
    full: bool
    asked: int


@dataclass
class Tree:
    """The folders under one watched root; not thread-safe."""

    root: str
    ignore: Sequence[str] = ()
    exclude: Collection[str] = ()
    """Folders that are never entered: our own remotes and state."""
    clock: Callable[[], float] = time.monotonic
    nodes: dict[str, _Node] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)
    """Links that lead to folders we would not see otherwise."""
    missing: bool = False
    """The root itself is not there: nothing is concluded from that."""
    _keys: dict[tuple[int, int], str] = field(default_factory=dict)
    _excluded: frozenset[tuple[int, int]] = frozenset()
    _links: deque[tuple[str, _Node]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._patterns = tuple(self.ignore)

    @property
    def candidates(self) -> list[str]:
        """Every folder that may hold an artifact, and every file that may be one of its own."""
        return [path for node in self.nodes.values() for path in _candidates(node)]

    @property
    def unnamed(self) -> list[str]:
        """Every folder that is passed over because its name is no UTF-8, as it is shown."""
        return [path for node in self.nodes.values() for path in node.unnamed]

    def is_candidate(self, path: str) -> bool:
        """Tell whether a folder or file was a candidate when its folder was listed last."""
        node = self.nodes.get(path)
        return node.candidate if node is not None else self._is_file(path)

    def _is_file(self, path: str) -> bool:
        node = self.nodes.get(os.path.dirname(path))
        return node is not None and path in node.files

    def holds(self, path: str) -> bool:
        """Tell whether a folder is known."""
        return path in self.nodes

    def scan(self, *, full: bool = False, hinted: bool = False, active: Collection[str] = ()) -> Scan:
        """Return what changed since the last scan.

        `hinted` says that events are at work, so finished folders need to be asked only rarely; `active` are the
        folders that are looked at anyway.
        """
        begun = self.clock()
        found = _Found()
        if not self._root_is_there():
            return Scan([], [], [], self.clock() - begun, full, 1)
        self._excluded = frozenset(_key(status) for path in self.exclude if (status := _stat(path)) is not None)
        if self.root not in self.nodes:
            full = True
            self._enter(self.root, None, found)
        else:
            for path in list(self.nodes):
                node = self.nodes.get(path)
                if node is not None and (full or self._due(node, begun, hinted=hinted, active=active)):
                    self._ask(node, found, relist=full, below=not full)  # a full scan comes to those below anyway
        self._follow_links(found)
        return Scan(found.new, found.changed, found.gone, self.clock() - begun, full, found.asked)

    def touch(self, paths: Collection[str]) -> Scan:
        """Ask the folders that events named, or the nearest known folder above them."""
        begun = self.clock()
        found = _Found()
        for path in dict.fromkeys(self._known(p) for p in paths):
            node = self.nodes.get(path) if path else None
            # A folder that is slow to list is not listed again for every event; the next scan sees it.
            if node is not None and (node.candidate or begun - node.asked >= 100 * node.cost):
                self._ask(node, found, relist=True, below=True)
        self._follow_links(found)
        return Scan(found.new, found.changed, found.gone, self.clock() - begun, full=False, asked=found.asked)

    def look(self, path: str) -> Listing | None:
        """Return the files of a candidate, those of its own sub-folders included, or None when it is gone.

        A candidate that is a file comes with the papers beside it. What is an artifact of its own, logs and ignored
        names are left out. Raises OSError for a folder that cannot be read: that is not the same as gone.
        """
        try:
            if self._is_file(path):
                return listing(self._beside(path))
            node = self.nodes.get(path)
            in_parts = node is not None and (node.parts or bool(node.holders))
            return listing((*self._files(path, "", 0), *(self._above(path) if in_parts else ())))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _beside(self, path: str) -> Iterator[FileStat]:
        """Yield a file that is a checkpoint of its own, and the configs, tokenizer and licence in its folder."""
        folder, own = os.path.split(path)
        yield _stat_of(own, os.stat(path))
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.name != own and plan.is_paper(entry.name)]
        for entry in found:
            with suppress(FileNotFoundError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    yield _stat_of(entry.name, status)

    def _above(self, path: str) -> Iterator[FileStat]:
        """Yield the papers of the folder above that go along with a checkpoint whose weights are in parts."""
        for entry in checkpoint.papers_above(path, os.listdir(path)):  # noqa: PTH208 - names of a folder of strings
            with suppress(FileNotFoundError):
                yield _stat_of("../" + entry.name, entry.stat())

    def _files(self, folder: str, prefix: str, depth: int) -> Iterator[FileStat]:
        numbered = layout.step_of(os.path.basename(folder)) is not None
        with os.scandir(folder) as entries:
            found = list(entries)
        lone = self.nodes[folder].files if folder in self.nodes else ()
        for entry in found:
            name = entry.name
            if entry.path in lone:
                continue
            relative = prefix + name
            try:
                status = entry.stat()
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:
                    raise
                if entry.is_symlink():  # to nothing, or in a circle
                    yield FileStat(relative, -1, 0, 0, entry.inode())
                continue
            if stat.S_ISDIR(status.st_mode):
                if depth < _LOOK_DEPTH and not entry.is_symlink() and self._own(entry.path, name, numbered=numbered):
                    try:
                        yield from self._files(entry.path, relative + "/", depth + 1)
                    except (FileNotFoundError, NotADirectoryError):
                        continue
            elif takes_part(relative, self._patterns):
                yield _stat_of(relative, status)

    def _own(self, path: str, name: str, *, numbered: bool) -> bool:
        """Tell whether a sub-folder belongs to the artifact around it."""
        if self._skipped(path, name) or name in NOISE_FOLDERS or self.is_candidate(path):
            return False
        known = self.nodes.get(path)
        if known is not None and known.files:
            return False
        # Inside a run, numbered folders are checkpoints; inside a checkpoint they are the ranks' own state.
        return numbered or layout.step_of(name) is None

    def _skipped(self, path: str, name: str) -> bool:
        if name.startswith(".") or name in NEVER_ENTERED:
            return True
        return ignored(name, path[len(self.root) + 1 :], self.ignore, directory=True)

    def _root_is_there(self) -> bool:
        try:
            self.missing = not os.path.isdir(self.root)
        except OSError:
            self.missing = True
        return not self.missing

    def _due(self, node: _Node, now: float, *, hinted: bool, active: Collection[str]) -> bool:
        if node.confirm or node.children or node.links or node.parent is None:
            return True
        if not node.candidate and not node.inside:
            return True
        if node.path in active:
            return False
        age, rest = now - node.changed, now - node.asked
        if not hinted and age < _HOUR:
            return True
        if age < YOUNG:
            return not hinted
        return rest >= (YOUNG if age < _DAY else _HOUR)

    def _known(self, path: str) -> str | None:
        while path not in self.nodes:
            above = os.path.dirname(path)
            if above == path or len(above) < len(self.root):
                return None
            path = above
        return path

    def _ask(self, node: _Node, found: "_Found", *, relist: bool, below: bool) -> None:
        found.asked += 1
        node.asked = self.clock()
        try:
            status = os.stat(node.path)
        except (FileNotFoundError, NotADirectoryError):
            self._forget(node.path, found)
            return
        except OSError as error:
            self.unreadable[node.path] = error.strerror or str(error)
            return
        same = _key(status) == node.key and status.st_mtime_ns == node.mtime_ns
        if same and not relist and not node.confirm:
            return
        node.confirm = not same
        if not same:
            node.changed = node.asked
        if _key(status) != node.key and not self._rekey(node, status):
            self._forget(node.path, found)  # a link that now points at a folder we know by its own name
            return
        for child in self._list(node, status, found):
            self._enter(child, node, found)
        for child in node.children if below else ():
            known = self.nodes.get(child)
            if known is not None:
                self._ask(known, found, relist=False, below=True)

    def _enter(self, path: str, parent: _Node | None, found: "_Found") -> None:
        pending: deque[tuple[str, _Node | None]] = deque([(path, parent)])
        while pending:
            path, above = pending.popleft()
            status = _stat(path)
            if status is None or not stat.S_ISDIR(status.st_mode):
                continue
            key = _key(status)
            if key in self._keys or key in self._excluded:
                continue
            node = _Node(path, above.path if above else None, above.depth + 1 if above else 0, key=key)
            node.asked = self.clock()
            # How long it has been at rest already is taken from its own time, for the tiers only.
            node.changed = node.asked - max(0.0, time.time() - status.st_mtime)
            self._keys[key] = path
            self.nodes[path] = node
            found.asked += 1
            pending.extend((child, node) for child in self._list(node, status, found))

    def _list(self, node: _Node, status: os.stat_result, found: "_Found") -> list[str]:
        """List one folder again and return its sub-folders that are new."""
        begun = self.clock()
        try:
            with os.scandir(node.path) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            self._forget(node.path, found)
            return []
        except OSError as error:
            self.unreadable[node.path] = error.strerror or str(error)
            return []
        self.unreadable.pop(node.path, None)
        names: set[str] = set()
        children: list[str] = []
        links: list[str] = []
        unnamed: list[str] = []
        for entry in listed:
            if not _is_dir(entry):
                names.add(entry.name)
                # What a link to nothing points at may appear any time, and this folder will not change by it.
                node.confirm = node.confirm or (entry.is_symlink() and not os.path.exists(entry.path))
            elif node.depth >= DEPTH_LIMIT or self._skipped(entry.path, entry.name):
                continue
            elif (plain := utf8(entry.name)) != entry.name:
                unnamed.append(f"{node.path}/{plain}")
            else:
                (links if entry.is_symlink() else children).append(entry.path)
        node.unnamed = tuple(sorted(unnamed))
        node.mtime_ns, node.cost = status.st_mtime_ns, self.clock() - begun
        was, before = node.candidate, node.files
        self._classify(node, names, found)
        found.new.extend(path for path in node.files if path not in before)
        found.changed.extend(path for path in node.files if path in before)
        found.gone.extend(path for path in before if path not in node.files)
        for child in set(node.children).union(node.links).difference(children, links):
            self._forget(child, found)
        node.children, node.links = tuple(sorted(children)), tuple(sorted(links))
        self._links.extend((link, node) for link in node.links if link not in self.nodes)
        if node.candidate:
            (found.changed if was else found.new).append(node.path)
        elif was:
            found.gone.append(node.path)
        return [child for child in node.children if child not in self.nodes]

    def _classify(self, node: _Node, names: set[str], found: "_Found") -> None:
        above = self.nodes.get(node.parent) if node.parent else None
        name = os.path.basename(node.path)
        tag = any(layout.is_rank_name(file) for file in names)
        node.parts = tag or layout.is_sharded_state(names)
        parts = tag or (node.parts and layout.is_fsdp_folder(name))
        alone = above is None or (
            tag and checkpoint.is_tag_alone(name, os.path.basename(above.path)) and not above.named
        )
        node.inside = above is not None and (
            above.inside
            or (parts and not alone)
            or (layout.is_resume_folder(name) and not (tag and alone))
            or (above.whole_model and layout.is_part_name(name))
        )
        node.whole_model = layout.is_whole_model(names)
        lone = [
            file
            for file in (() if node.inside else checkpoint.lone_files(names))
            if utf8(file) == file and not ignored(file, self._relative(node.path, file), self.ignore, directory=False)
        ]
        node.files = tuple(f"{node.path}/{file}" for file in lone)
        node.named = checkpoint.is_alone(names, lone) or (tag and alone)
        self._decide(node)
        if above is not None:
            held = parts and not alone
            (above.holders.add if held else above.holders.discard)(node.path)
            self._decide(above, found)

    def _relative(self, folder: str, name: str) -> str:
        return f"{folder}/{name}"[len(self.root) + 1 :]

    @staticmethod
    def _decide(node: _Node, found: "_Found | None" = None) -> None:
        """Say whether a folder may hold an artifact, and tell `found` where that is news."""
        was = node.candidate
        node.candidate = not node.inside and (node.named or bool(node.holders))
        if found is not None and node.candidate != was:
            (found.new if node.candidate else found.gone).append(node.path)

    def _follow_links(self, found: "_Found") -> None:
        while self._links:
            path, parent = self._links.popleft()
            if path in self.nodes or parent.path not in self.nodes:
                continue
            if not leads_astray(os.path.realpath(path), os.path.realpath(self.root)):
                self._enter(path, parent, found)
                if path in self.nodes:
                    self.followed.add(path)

    def _rekey(self, node: _Node, status: os.stat_result) -> bool:
        if self._keys.get(node.key) == node.path:
            del self._keys[node.key]
        node.key = _key(status)
        return self._keys.setdefault(node.key, node.path) == node.path

    def _forget(self, path: str, found: "_Found") -> None:
        waiting = [path]
        while waiting:
            node = self.nodes.pop(waiting.pop(), None)
            if node is None:
                continue
            if self._keys.get(node.key) == node.path:
                del self._keys[node.key]
            self.unreadable.pop(node.path, None)
            self.followed.discard(node.path)
            waiting.extend((*node.children, *node.links))
            found.gone.extend(_candidates(node))
            above = self.nodes.get(node.parent) if node.parent else None
            if above is not None and node.path in above.holders:
                above.holders.discard(node.path)
                self._decide(above, found)


@dataclass
class _Found:
    new: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    asked: int = 0


def _candidates(node: _Node) -> list[str]:
    return [node.path, *node.files] if node.candidate else list(node.files)


def _stat_of(path: str, status: os.stat_result) -> FileStat:
    return FileStat(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=1 << 16)
def takes_part(path: str, ignore: tuple[str, ...] = ()) -> bool:
    """Tell whether a file takes part in the verdict on its folder.

    What is published does, and what a trainer saves beside it; a log that is written on must not hold a model back.
    """
    name = path.rpartition("/")[2]
    if ignored(name, path, ignore, directory=False):
        return False
    return layout.is_weights_name(name) or plan.role_of(path)[1] in _PARTS


_PARTS: Final = frozenset({None, "resume-only", "pickle", "in-progress", "remote-code"})
"""Why a file that takes part may be left out."""


def _key(status: os.stat_result) -> tuple[int, int]:
    return (status.st_dev, status.st_ino)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
