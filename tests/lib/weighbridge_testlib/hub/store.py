"""What a Hub holds and the rules it keeps: repositories with guarded commits, stored objects, accounts, quotas.

Everything is in memory. A commit is checked whole before any of it is seen: the parent, the objects it names with their
sizes, the paths it deletes.
"""

import hashlib
import itertools
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

Role = Literal["read", "write", "fineGrained"]

GITATTRIBUTES: Final = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in ("safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "model", "msgpack", "npz", "zip")
).encode()
"""What the Hub puts into a new repository."""

_LFS_SUFFIXES: Final = tuple(re.findall(r"^\*(\.\w+)", GITATTRIBUTES.decode(), re.MULTILINE))
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,96}")


class Refused(Exception):  # noqa: N818 - it is an answer
    """An answer of the Hub that is no success: status, the code of X-Error-Code, words, headers and a JSON body."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})
        self.body = dict(body or {})


class Limits(NamedTuple):
    """What a Hub allows; None sets no limit."""

    commits_per_hour: int | None = None
    """Per repository; the answer is a 429 whose RateLimit header does not tell it from the API's."""
    requests: int | None = None
    """API requests of one token in `window` seconds."""
    window: float = 300.0
    storage: int | None = None
    """Bytes of all stored objects of an owner."""
    file: int | None = None
    """Bytes of one stored object."""
    entries: int | None = None
    """Files of one folder."""
    lfs_above: int = 10 << 20
    """Bytes from which on a text file is stored as an object."""
    page: int = 1000
    """Entries of one page of a tree."""


class Token(NamedTuple):
    """An access token: its user and what it may do."""

    user: str
    role: Role = "write"


@dataclass(frozen=True)
class Entry:
    """One file of a tree: small ones hold their bytes, large ones name a stored object by its sha256."""

    size: int
    oid: str
    data: bytes | None = None
    sha256: str | None = None

    @property
    def pointer_size(self) -> int:
        """Return the size of the pointer file that Git keeps for a stored object."""
        return len(pointer(self.sha256 or "", self.size))


@dataclass(frozen=True)
class Commit:
    """One commit: the whole tree by path, and where it came from."""

    oid: str
    parent: str | None
    tree: Mapping[str, Entry]
    title: str
    message: str
    author: str
    time: float


@dataclass
class Discussion:
    """A discussion or pull request."""

    num: int
    title: str
    description: str
    author: str
    time: float
    pull: bool
    base: str | None = None
    status: str = "open"
    comments: list[str] = field(default_factory=list)


@dataclass
class Repo:
    """One repository."""

    kind: str
    id: str
    private: bool
    created: float
    gated: str | bool = False
    disabled: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    discussions: dict[int, Discussion] = field(default_factory=dict)
    commit_times: list[float] = field(default_factory=list)
    access: set[str] = field(default_factory=set)
    """Users who were let into a gated repository."""

    @property
    def owner(self) -> str:
        """Return the user or organisation."""
        return self.id.partition("/")[0]

    @property
    def head(self) -> Commit:
        """Return the commit that main stands at."""
        return self.commits[self.branches["main"]]

    def resolve(self, revision: str) -> Commit:
        """Return the commit of a branch, tag, pull request or commit id (7 digits or more)."""
        for names in (self.branches, self.tags, self.pulls):
            if revision in names:
                return self.commits[names[revision]]
        if re.fullmatch(r"[0-9a-f]{7,40}", revision):
            for oid, commit in self.commits.items():
                if oid.startswith(revision):
                    return commit
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def history(self, revision: str) -> list[Commit]:
        """Return the commits of a revision, newest first."""
        found: list[Commit] = []
        commit: Commit | None = self.resolve(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits.get(commit.parent) if commit.parent else None
        return found

    def at(self, revision: str = "main") -> dict[str, Entry]:
        """Return the files of a revision."""
        return dict(self.resolve(revision).tree)


class Store:
    """A whole Hub; `lock` is held by whoever changes it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.lock = threading.RLock()
        self.repos: dict[tuple[str, str], Repo] = {}
        self.moved: dict[tuple[str, str], str] = {}
        self.users: dict[str, set[str]] = {}
        self.tokens: dict[str, Token] = {}
        self.objects: dict[str, bytes] = {}
        self.xet_files: dict[str, str] = {}
        """The xet hash of each stored object that came through xet."""
        self.requests: dict[str, list[float]] = {}
        self.clock = time.time
        self._serial = itertools.count(1)

    # ---------------------------------------------------------------------------------------------------- accounts

    def add_user(self, user: str, token: str, *, orgs: Iterable[str] = (), role: Role = "write") -> None:
        """Add a user with a token; the same user may have several tokens."""
        self.users.setdefault(user, set()).update(orgs)
        self.tokens[token] = Token(user, role)

    def who(self, token: str | None) -> Token | None:
        """Return whose token it is; None without one. Raises Refused for one that nobody has."""
        if token is None:
            return None
        if token not in self.tokens:
            raise Refused(401, None, "Invalid user token.")
        return self.tokens[token]

    def may_write(self, token: Token | None, owner: str) -> bool:
        """Tell whether a token may write what an owner has."""
        return token is not None and token.role != "read" and self._belongs(token, owner)

    def _belongs(self, token: Token | None, owner: str) -> bool:
        return token is not None and (token.user == owner or owner in self.users.get(token.user, set()))

    def count_request(self, who: str) -> None:
        """Count an API request. Raises Refused with the Hub's rate headers when the window is used up."""
        if self.limits.requests is None:
            return
        now = self.clock()
        with self.lock:
            seen = [at for at in self.requests.get(who, []) if now - at < self.limits.window]
            if len(seen) >= self.limits.requests:
                left = max(1, round(self.limits.window - (now - seen[0])))
                policy = f'"fixed window";"api";q={self.limits.requests};w={round(self.limits.window)}'
                raise Refused(
                    429,
                    None,
                    "We had to rate limit your IP. To continue using our service, log in or wait.",
                    headers={"RateLimit": f'"api";r=0;t={left}', "RateLimit-Policy": policy},
                )
            seen.append(now)
            self.requests[who] = seen

    # ------------------------------------------------------------------------------------------------ repositories

    def create(self, kind: str, owner: str, name: str, token: Token | None, *, private: bool = False) -> Repo:
        """Create a repository with the Hub's first commit."""
        if token is None:
            raise Refused(401, None, "Invalid username or password.")
        if not _NAME.fullmatch(name) or "--" in name or ".." in name or name[0] in ".-" or name[-1] in ".-":
            raise Refused(400, None, f"Invalid repo name: {name}")
        if not self.may_write(token, owner):
            raise Refused(403, None, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
        with self.lock:
            key = (kind, f"{owner}/{name}".lower())
            if key in self.repos:
                raise Refused(409, None, "You already created this model repo", body={"url": self.repos[key].id})
            repo = Repo(kind=kind, id=f"{owner}/{name}", private=private, created=self.clock())
            self.repos[key] = repo
            self.moved.pop(key, None)
            first = {".gitattributes": blob(GITATTRIBUTES)}
            repo.branches["main"] = self.write(repo, None, first, "initial commit", message="", author=token.user).oid
            return repo

    def find(self, kind: str, repo_id: str, token: Token | None, *, write: bool = False, content: bool = False) -> Repo:
        """Return a repository that a token may see, write, or read the files of. Raises Refused as the Hub does.

        A private one that may not be seen is not there.
        """
        repo = self.repos.get((kind, repo_id.lower()))
        if repo is None:
            raise Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if repo.disabled:
            raise Refused(403, None, "Access to this resource is disabled.")
        member = self._belongs(token, repo.owner)
        if repo.private and not member:
            raise Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if content and repo.gated and not member and (token is None or token.user not in repo.access):
            raise Refused(
                403 if token else 401,
                "GatedRepo",
                f"Access to model {repo.id} is restricted and you are not in the authorized list.",
            )
        if write and not self.may_write(token, repo.owner):
            raise Refused(
                403, None, "You must have write access to this repository: the token has not the scope repo.write."
            )
        return repo

    def get(self, repo_id: str, kind: str = "model") -> Repo:
        """Return a repository, for tests."""
        return self.repos[kind, repo_id.lower()]

    def move(self, kind: str, old: str, new: str, token: Token | None) -> None:
        """Rename a repository; its old name redirects from now on."""
        repo = self.find(kind, old, token, write=True)
        with self.lock:
            if (kind, new.lower()) in self.repos:
                raise Refused(409, None, "A repository with that name is there already")
            del self.repos[kind, old.lower()]
            self.moved[kind, old.lower()] = new
            repo.id = new
            self.repos[kind, new.lower()] = repo

    def rename_owner(self, old: str, new: str) -> None:
        """Rename an organisation: its members stay, and every repository redirects."""
        with self.lock:
            for orgs in self.users.values():
                if old in orgs:
                    orgs.remove(old)
                    orgs.add(new)
            for (kind, _), repo in [item for item in self.repos.items() if item[1].owner == old]:
                fresh = f"{new}/{repo.id.partition('/')[2]}"
                self.moved[kind, repo.id.lower()] = fresh
                del self.repos[kind, repo.id.lower()]
                repo.id = fresh
                self.repos[kind, fresh.lower()] = repo

    def delete(self, kind: str, repo_id: str, token: Token | None) -> None:
        """Remove a repository."""
        self.find(kind, repo_id, token, write=True)
        with self.lock:
            del self.repos[kind, repo_id.lower()]

    # ----------------------------------------------------------------------------------------------------- objects

    def put_object(self, repo: Repo, body: bytes, sha256: str, *, xet: str | None = None) -> None:
        """Keep a stored object. Raises Refused when its bytes are not what their name says, or no room is left."""
        if hashlib.sha256(body).hexdigest() != sha256:
            raise Refused(400, None, "The object's sha256 does not match its content")
        with self.lock:
            self.check_room(repo, sha256, len(body))
            self.objects[sha256] = body
            repo.objects.add(sha256)
            if xet is not None:
                self.xet_files[sha256] = xet

    def check_room(self, repo: Repo, sha256: str, size: int) -> None:
        """Raise Refused when an object is larger than allowed, or its owner's storage is full."""
        if self.limits.file is not None and size > self.limits.file:
            raise Refused(413, None, f"File too large: the limit is {self.limits.file} bytes")
        limit = self.limits.storage
        if limit is not None and sha256 not in repo.objects and self.used(repo.owner) + size > limit:
            raise Refused(403, None, f"Private repository storage limit reached for {repo.owner}")

    def used(self, owner: str) -> int:
        """Return the bytes that an owner's objects take."""
        names = {sha for repo in self.repos.values() if repo.owner == owner for sha in repo.objects}
        return sum(len(self.objects[sha]) for sha in names)

    def body(self, entry: Entry) -> bytes:
        """Return the bytes of a file."""
        return entry.data if entry.data is not None else self.objects[entry.sha256 or ""]

    def mode(self, path: str, size: int, sample: bytes) -> str:
        """Return how a file is to be sent: as a stored object or inside the commit."""
        if path.endswith(_LFS_SUFFIXES) or size > self.limits.lfs_above or b"\0" in sample:
            return "lfs"
        return "regular"

    # ----------------------------------------------------------------------------------------------------- commits

    def commit(
        self,
        repo: Repo,
        branch: str,
        *,
        title: str,
        message: str,
        author: str,
        parent: str | None,
        changes: Iterable[tuple[str, dict[str, Any]]],
        pull: bool = False,
    ) -> Commit:
        """Make a commit out of the lines of the request. Raises Refused, and then nothing has changed."""
        with self.lock:
            names = repo.pulls if pull or branch.startswith("refs/pr/") else repo.branches
            base = repo.head if pull else None
            if base is None:
                if branch not in names:
                    repo.resolve(branch)
                    raise Refused(400, None, f"{branch} is not a branch")
                base = repo.commits[names[branch]]
            self._check_quota(repo)
            if parent is not None and not base.oid.startswith(parent):
                raise Refused(412, None, "A commit has happened since. Please refresh and try again.")
            tree = dict(base.tree)
            for key, value in changes:
                self._change(repo, tree, key, value)
            self._check_entries(tree)
            made = self.write(repo, base.oid, tree, title, message=message, author=author)
            names[branch] = made.oid
            repo.commit_times.append(self.clock())
            return made

    def _check_quota(self, repo: Repo) -> None:
        limit = self.limits.commits_per_hour
        now = self.clock()
        if limit is not None and sum(now - at < 3600 for at in repo.commit_times) >= limit:
            raise Refused(
                429,
                None,
                f"You have exceeded the rate limit for repository commits ({limit} per hour). Retry in about 1 hour.",
                headers={"RateLimit": '"api";r=949;t=120', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'},
            )

    def _change(self, repo: Repo, tree: dict[str, Entry], key: str, value: dict[str, Any]) -> None:
        path = value.get("path", "")
        if key == "file":
            tree[path] = blob(value["content"])
        elif key == "lfsFile":
            sha256, size = value["oid"], value.get("size")
            if sha256 not in self.objects or (size is not None and sha256 not in repo.objects):
                raise Refused(400, None, f"Your push was rejected because an LFS pointer pointed to a file that does "
                                         f"not exist: {path}")  # fmt: skip
            real = len(self.objects[sha256])
            if size is not None and size != real:
                raise Refused(400, None, f"The size of {path} is {real}, the commit says {size}")
            repo.objects.add(sha256)
            tree[path] = Entry(real, git_oid(pointer(sha256, real)), sha256=sha256)
        elif key == "deletedFile":
            if path not in tree:
                raise Refused(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
            del tree[path]
        elif key == "deletedFolder":
            inside = [p for p in tree if p.startswith(path.rstrip("/") + "/")]
            if not inside:
                raise Refused(404, "EntryNotFound", f"A folder with this name doesn't exist: {path}")
            for found in inside:
                del tree[found]
        else:
            raise Refused(400, None, f"Unknown operation: {key}")

    def _check_entries(self, tree: Mapping[str, Entry]) -> None:
        if self.limits.entries is None:
            return
        folders: dict[str, int] = {}
        for path in tree:
            folder = path.rpartition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
            if folders[folder] > self.limits.entries:
                raise Refused(403, None, "None")

    def write(
        self, repo: Repo, parent: str | None, tree: Mapping[str, Entry], title: str, *, message: str, author: str
    ) -> Commit:
        """Keep a commit; no branch stands at it yet."""
        now = self.clock()
        lines = "".join(f"{path}\0{entry.oid}\n" for path, entry in sorted(tree.items()))
        text = f"{repo.id} {parent} {title} {message} {author} {next(self._serial)}\n{lines}"
        made = Commit(
            oid=hashlib.sha1(text.encode()).hexdigest(),  # a commit's name, as Git makes it
            parent=parent,
            tree=dict(tree),
            title=title,
            message=message,
            author=author,
            time=now,
        )
        repo.commits[made.oid] = made
        return made


def blob(data: bytes) -> Entry:
    """Return a small file."""
    return Entry(len(data), git_oid(data), data=data)


def git_oid(data: bytes) -> str:
    """Return the name that Git gives to a file's bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """Return the pointer file of a stored object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
