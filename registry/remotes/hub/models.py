"""What the Hub says of any model, such as the base of an adapter; asked once, briefly, and never a reason to fail."""

import threading
import time
from typing import Any, Final
from urllib.parse import quote

import httpx2

from weighbridge.registry import errors
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.types import ModelSeen, ModelUnseen

WAIT: Final = 10.0
"""Seconds until a Hub that is silent counts as one that could not be asked."""

_KEPT: Final = 600.0
_KEPT_UNKNOWN: Final = 60.0


class Models:
    """Answers about models, kept for a while; one that could not be had is asked for again a minute later."""

    def __init__(self, line: Line) -> None:
        self._line = line
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
                return ModelUnseen(f"{self._line.host} gave no answer a moment ago")
        found = self._ask(repo, revision)
        unknown = isinstance(found, ModelUnseen) and not found.absent
        with self._lock:
            self._kept[repo, revision] = (now + (_KEPT_UNKNOWN if unknown else _KEPT), found)
        return found

    def _ask(self, repo: str, revision: str | None) -> ModelSeen | ModelUnseen:
        # Asked without the library's `model_info`: whoever publishes would load its whole interface for this question.
        path = f"/api/models/{quote(repo)}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
        wait = min(WAIT, self._line.patience.answer)
        try:
            with self._line.speaking(f"cannot look at {repo}"):
                return _seen(self._line.call("GET", path, params={"blobs": "true"}, timeout=wait), self._line.host)
        except errors.NotFoundError:
            what = "no such revision" if revision else "no such model, or this token may not see it"
            return ModelUnseen(what, absent=True)
        except errors.UnreachableError as error:
            if not isinstance(error, errors.QuotaError) and not self._line.offline:
                with self._lock:
                    self._silent = time.monotonic() + _KEPT_UNKNOWN
            return ModelUnseen(error.why or error.what)
        except errors.WeighbridgeError as error:
            return ModelUnseen(error.why or error.what)


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
