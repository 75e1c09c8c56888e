"""Any model of the Hub, such as the base of an adapter: what is said of it, what a revision of it holds, its bytes.

What is said (`ask`) is asked once, briefly, and never a reason to fail; whoever needs its bytes is told what is wrong.
"""

import functools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import httpx2

from weighbridge.registry import errors
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.commits import Held
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.hub.repositories import held
from weighbridge.registry.types import ModelSeen, ModelUnseen

WAIT: Final = 10.0
"""Seconds until a Hub that is silent counts as one that could not be asked."""

_KEPT: Final = 600.0
_KEPT_UNKNOWN: Final = 60.0


def of_environ(environ: Mapping[str, str]) -> "Models":
    """Return the models of an environment's Hub, as its user may read them; nothing is asked yet."""
    return Models(Line(environ=environ))


class Models:
    """Models as one user may read them; what `ask` was told is kept for a while, what it was not for a minute."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._kept: dict[tuple[str, str | None], tuple[float, ModelSeen | ModelUnseen]] = {}
        self._silent = 0.0
        self._lock = threading.Lock()

    def ask(self, repo: str, revision: str | None) -> ModelSeen | ModelUnseen:
        """Return what the Hub says of a model; files are hidden neither by a gate nor by a missing right to read them.

        While the Hub gives no answer at all, further questions are not sent.
        """
        now = time.monotonic()
        with self._lock:
            until, kept = self._kept.get((repo, revision), (0.0, None))
            if kept is not None and now < until:
                return kept
            if now < self._silent:
                return ModelUnseen(f"{self.line.host} gave no answer a moment ago")
        found = self._ask(repo, revision)
        unknown = isinstance(found, ModelUnseen) and not found.absent
        with self._lock:
            self._kept[repo, revision] = (now + (_KEPT_UNKNOWN if unknown else _KEPT), found)
        return found

    def _ask(self, repo: str, revision: str | None) -> ModelSeen | ModelUnseen:
        try:
            with self.line.speaking(_LOOK.format(shown(repo))):
                answer = self._info(repo, revision, min(WAIT, self.line.patience.answer))
                return _seen(answer, self.line.host)
        except errors.NotFoundError:
            what = "no such revision" if revision else "no such model, or this token may not see it"
            return ModelUnseen(what, absent=True)
        except errors.UnreachableError as error:
            if not isinstance(error, errors.QuotaError) and not self.line.offline:
                with self._lock:
                    self._silent = time.monotonic() + _KEPT_UNKNOWN
            return ModelUnseen(error.why or error.what)
        except errors.WeighbridgeError as error:
            return ModelUnseen(error.why or error.what)

    def commit(self, repo: str, revision: str | None) -> str:
        """Return the commit of a revision, of main where it is None. Raises NotFoundError, DeniedError, and others."""
        look = functools.partial(self._info, repo, revision, self.line.patience.answer)
        told = self.line.json(_LOOK.format(shown(repo)), look, lambda answer: str(answer["sha"] or ""))
        if not told:
            raise errors.IntegrityError(f"{shown(repo)} has no head", why="the Hub names no commit of it")
        return told

    def tree(self, repo: str, commit: str) -> list[Held]:
        """Return every file at the top of a commit."""
        path = f"/api/models/{repo}/tree/{quote(commit, safe='')}"
        rows = self.line.pages(f"cannot list {shown(repo)}", path, {"expand": "false"})
        return [held(row) for row in rows if row["type"] == "file"]

    def fetch(self, repo: str, commit: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of a file of a commit from `offset` on."""
        return self.line.fetch(repo, commit, path, offset)

    def _info(self, repo: str, revision: str | None, wait: float) -> httpx2.Response:
        """Ask what is known of a model and its files, without the library's `model_info`.

        Whoever publishes would load the library's whole interface for this one question.
        """
        path = f"/api/models/{quote(repo)}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
        return self.line.call("GET", path, params={"blobs": "true"}, timeout=wait)


_LOOK: Final = "cannot look at {}"


def _seen(answer: httpx2.Response, host: str) -> ModelSeen | ModelUnseen:
    """Return the answer as a plain value; what is no answer of a Hub says nothing of the model."""
    try:
        told: dict[str, Any] = answer.json()
        files = {
            str(row["rfilename"]): (int(row["size"]), row["lfs"]["sha256"] if row.get("lfs") else None)
            for row in told.get("siblings") or []
            if row.get("size") is not None
        }
        card = told.get("cardData") or {}
        return ModelSeen(
            id=told["id"], commit=told.get("sha") or "", gated=told.get("gated") or None, files=files, card=dict(card)
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return ModelUnseen(f"{host} answered with what is no answer of a Hub")
