"""The repositories of one organisation: what the Hub is asked about them, and the plain values it answers with."""

import base64
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

import httpx2

from weighbridge.registry import errors
from weighbridge.registry.refs import check_name, shown
from weighbridge.registry.remotes.commits import Change, Held
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.ledger import LEDGER_FILE

PATHS: Final = 500
"""Paths of one paths-info request; the Hub takes up to 1000."""

_NUMBER: Final = re.compile(r"v([1-9][0-9]{0,7})")


T = TypeVar("T")


class Refs(NamedTuple):
    """Branches and tags with their commits."""

    branches: dict[str, str]
    tags: dict[str, str]

    @property
    def numbers(self) -> dict[int, str]:
        """The commits of the tags v1, v2, ..."""
        found = ((_NUMBER.fullmatch(tag), commit) for tag, commit in self.tags.items())
        return {int(match[1]): commit for match, commit in found if match}


class Past(NamedTuple):
    """One commit of a history."""

    commit: str
    title: str
    message: str


class Repositories:
    """The model repositories of an organisation or a user."""

    def __init__(self, line: Line, owner: str) -> None:
        self.line = line
        self.owner = owner
        self._called: dict[str, str] = {}

    def id(self, name: str) -> str:
        """Return the repository of a name, as it is called now as far as that was seen."""
        return f"{self.owner}/{self.called(name)}"

    def called(self, name: str) -> str:
        """Return what the repository of a name is called; its versions keep their name when somebody renames it."""
        return self._called.get(name) or check_name(name)

    def follow(self, name: str, called: str) -> None:
        """Take note that the repository of a name was renamed within the organisation."""
        self._called[name] = called

    # ------------------------------------------------------------------------------------------------------ reading

    def head(self, name: str) -> str | None:
        """Return the commit that main stands at now; None where there is no repository, or none we may see.

        A repository that was renamed is followed: the Hub redirects questions about the old name, and everything from
        then on goes to the new one, because it need not redirect what writes. Raises NameTakenError for another
        spelling of the name, NotFoundError for a repository that went to another owner.
        """
        repo = self.id(name)
        try:
            there, commit = self._json(
                f"cannot look at {repo}", "GET", repo, lambda found: (str(found["id"]), found.get("sha"))
            )
        except errors.MissingError:
            raise
        except errors.NotFoundError:
            if self._called.pop(name, None) is not None:
                return self.head(name)  # what it was called is gone: it may have its old name back
            return None
        if there != repo:
            self._redirected(name, repo, there)
        if not commit:
            raise errors.IntegrityError(f"{repo} has no head", why="the Hub names no commit of main")
        return str(commit)

    def _redirected(self, name: str, asked: str, answered: str) -> None:
        """Follow a redirect to another name of the same owner."""
        owner, _, called = answered.partition("/")
        if answered.casefold() == asked.casefold():
            raise errors.NameTakenError(
                f"the name {name} is taken by {called}",
                why="names are unique without case",
                fix=f"publish as {called}, or choose another name",
            )
        if owner.casefold() != self.owner.casefold():
            raise errors.NotFoundError(
                f"{asked} is {answered} now",
                why=f"the organisation was renamed, or the repository was given to {owner}: that is another remote",
                fix=f'write url = "hf://{owner}" for this remote, or move the repository back',
                remote=f"hf://{self.owner}",
            )
        self.follow(name, called)

    def refs(self, name: str) -> Refs:
        """Return the branches and tags of a repository."""
        repo = self.id(name)
        return self._json(f"cannot list the tags of {repo}", "GET", f"{repo}/refs", _refs)

    def tree(self, name: str, commit: str) -> list[Held]:
        """Return every file of a commit."""
        repo = self.id(name)
        path = f"/api/models/{repo}/tree/{quote(commit, safe='')}"
        rows = self.line.pages(f"cannot list {repo}", path, {"recursive": "true", "expand": "false"})
        return [held(row) for row in rows if row["type"] == "file"]

    def facts(self, name: str, commit: str, paths: Sequence[str]) -> dict[str, Held]:
        """Return what the Hub reports of some files of a commit; those it does not have are left out."""
        repo = self.id(name)
        found: dict[str, Held] = {}
        for start in range(0, len(paths), PATHS):
            some = list(paths[start : start + PATHS])
            found |= self._json(
                f"cannot look at files of {repo}",
                "POST",
                f"{repo}/paths-info/{quote(commit, safe='')}",
                lambda rows: {row["path"]: held(row) for row in rows if row["type"] == "file"},
                data={"paths": some, "expand": "false"},
            )
        return found

    def history(self, name: str, revision: str) -> Iterator[Past]:
        """Yield the commits of a revision, newest first, page by page."""
        for row in self.line.pages(
            f"cannot read the history of {name}", f"/api/models/{self.id(name)}/commits/{revision}"
        ):
            yield Past(row["id"], row["title"], row["message"])

    def all(self) -> dict[str, str]:
        """Return the names that hold versions of ours, with the commits of their heads; one request a page."""
        params = {"author": self.owner, "expand": ["sha", "siblings"]}
        found = {}
        for model in self.line.pages(f"cannot list the models of {self.owner}", "/api/models", params):
            owner, _, name = str(model["id"]).partition("/")
            ours = any(sibling["rfilename"] == LEDGER_FILE for sibling in model.get("siblings") or [])
            if owner.casefold() == self.owner.casefold() and ours and model.get("sha"):
                found[name] = str(model["sha"])
        return found

    # ------------------------------------------------------------------------------------------------------ writing

    def create(self, name: str, *, private: bool) -> None:
        """Make a repository; one that is there is left as it is."""
        repo = self.id(name)
        body = {
            "name": name,
            "organization": self.owner,
            "type": "model",
            "visibility": "private" if private else "public",
        }
        what = f"cannot make the repository {repo}"
        try:
            self.line.ask(what, lambda: self.line.call("POST", "/api/repos/create", json=body), writes=True)
        except errors.ExistsError:
            return
        except (errors.DeniedError, errors.OutcomeUnknownError):
            # A token that may not create may still write what is there; a lost answer may mean that it was made.
            if self.head(name) is None:
                raise

    def edit(self, name: str, change: Change) -> str:
        """Make a commit of small files and deletions, and return its id. Raises StaleHeadError, OutcomeUnknownError."""
        header = {"summary": change.title, "description": change.message, "parentCommit": change.parent}
        lines: list[dict[str, Any]] = [{"key": "header", "value": header}]
        for path, body in change.small.items():
            text = base64.b64encode(body).decode()
            lines.append({"key": "file", "value": {"path": path, "content": text, "encoding": "base64"}})
        lines += [{"key": "deletedFile", "value": {"path": path}} for path in change.delete]
        repo = self.id(name)
        send = functools.partial(
            self.line.call,
            "POST",
            f"/api/models/{repo}/commit/{quote(change.branch, safe='')}",
            content=b"".join(json.dumps(line).encode() + b"\n" for line in lines),
            more={"Content-Type": "application/x-ndjson"},
            timeout=self.line.patience.commit,
        )
        return self.line.json(f"cannot commit to {repo}", send, lambda found: str(found["commitOid"]), writes=True)

    def tag(self, name: str, tag: str, commit: str) -> None:
        """Give a commit a tag. Raises ExistsError when it is there, wherever it stands."""
        repo = self.id(name)
        path = f"{repo}/tag/{quote(commit, safe='')}"
        self._ask(f"cannot tag {repo}", "POST", path, writes=True, json={"tag": tag})

    def untag(self, name: str, tag: str) -> None:
        """Remove a tag; one that is not there is no error."""
        repo = self.id(name)
        try:
            path = f"{repo}/tag/{quote(tag, safe='')}"
            self._ask(f"cannot remove a tag of {repo}", "DELETE", path, writes=True)
        except errors.NotFoundError:
            return

    def branch(self, name: str, branch: str, start: str) -> None:
        """Make a branch. Raises ExistsError when it is there."""
        repo = self.id(name)
        path = f"{repo}/branch/{quote(branch, safe='')}"
        self._ask(f"cannot make a branch of {repo}", "POST", path, writes=True, json={"startingPoint": start})

    def unbranch(self, name: str, branch: str) -> None:
        """Remove a branch; one that is not there is no error."""
        repo = self.id(name)
        try:
            path = f"{repo}/branch/{quote(branch, safe='')}"
            self._ask(f"cannot remove a branch of {repo}", "DELETE", path, writes=True)
        except errors.NotFoundError:
            return

    def _json(self, what: str, method: str, path: str, shape: Callable[[Any], T], **given: Any) -> T:
        """Read something of the models' interface."""
        return self.line.json(what, functools.partial(self.line.call, method, f"/api/models/{path}", **given), shape)

    def _ask(self, what: str, method: str, path: str, *, writes: bool = False, **given: Any) -> httpx2.Response:
        """Ask something of the models' interface."""
        send = functools.partial(self.line.call, method, f"/api/models/{path}", **given)
        return self.line.ask(what, send, writes=writes)


def _refs(found: Any) -> Refs:
    branches, tags = ({ref["name"]: ref["targetCommit"] for ref in found[kind]} for kind in ("branches", "tags"))
    return Refs(branches, tags)


def held(row: dict[str, Any]) -> Held:
    """Return a file as the Hub lists it."""
    lfs = row.get("lfs")
    if lfs is not None and lfs["size"] != row["size"]:
        raise errors.IntegrityError(
            f"the Hub reports two sizes of {shown(row['path'])}", why=f"{row['size']} and {lfs['size']} bytes"
        )
    return Held(path=row["path"], size=row["size"], sha256=lfs["oid"] if lfs else None, blob=row["oid"])
