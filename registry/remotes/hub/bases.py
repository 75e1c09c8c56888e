"""Base models of anybody on the Hub, to be read: a revision's commit, what it holds, and its bytes."""

import functools
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.commits import Held
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.hub.repositories import held


class Bases:
    """The models that one user may read; nothing is asked before a method is called."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.line = Line(environ=environ)

    @property
    def host(self) -> str:
        """The host of the Hub, for messages."""
        return self.line.host

    def commit(self, repo: str, revision: str | None) -> str:
        """Return the commit of a revision, of main where it is None. Raises NotFoundError, DeniedError, and others."""
        wait = self.line.patience.answer
        found = self.line.ask(
            f"cannot look at {shown(repo)}",
            functools.partial(self.line.api.model_info, repo, revision=revision, timeout=wait),
        )
        if not found.sha:
            raise errors.IntegrityError(f"{shown(repo)} has no head", why="the Hub names no commit of it")
        return str(found.sha)

    def tree(self, repo: str, commit: str) -> list[Held]:
        """Return every file at the top of a commit."""
        path = f"/api/models/{repo}/tree/{quote(commit, safe='')}"
        rows = self.line.pages(f"cannot list {shown(repo)}", path, {"expand": "false"})
        return [held(row) for row in rows if row["type"] == "file"]

    def fetch(self, repo: str, commit: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file of a commit from `offset` on."""
        return self.line.fetch(repo, commit, path, offset)
