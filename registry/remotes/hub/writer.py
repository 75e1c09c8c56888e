"""Uploads and commits: in a child process that is ended when no byte moves any more, or, for a little, from here."""

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

from weighbridge.registry import errors
from weighbridge.registry.remotes.commits import Change, Sending
from weighbridge.registry.remotes.hub import child
from weighbridge.registry.remotes.hub.child import Child
from weighbridge.registry.remotes.hub.client import Line
from weighbridge.registry.remotes.protocol import Progress
from weighbridge.registry.shell import load

_START: Final = 60.0
"""Seconds in which the child must have begun."""

_KINDS: Final = {kind.__name__: kind for kind in errors.kinds()}
_HIDDEN: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")
"""Variables that the child does without: the token comes through its input."""


class LocalWriter:
    """Writes to one repository from here, by LFS: every request has a time limit, so nothing can hang."""

    def __init__(self, line: Line, repo: str) -> None:
        self._line = line
        self.repo = repo
        self._sent: set[tuple[str, str]] = set()
        self._sender: Any = None

    def send(self, files: Sequence[Sending], base: str, progress: Progress | None = None) -> None:
        """Upload files. Raises StageDamagedError and what the Hub raises."""
        wanted = [file for file in files if (file.path, file.sha256) not in self._sent]
        if not wanted:
            return
        rows = [(file.path, file.source, file.size, file.sha256) for file in wanted]
        with self._line.speaking(f"cannot upload to {self.repo}"), _quiet:
            self._whole().send(rows, base)
        self._sent |= {(file.path, file.sha256) for file in wanted}
        if progress is not None:
            progress(sum(file.size for file in wanted))

    def commit(self, change: Change) -> str:
        """Make a commit and return its id."""
        with self._line.speaking(f"cannot commit to {self.repo}", writes=True), _quiet:
            return str(self._whole().commit(change))

    def _whole(self) -> Any:
        """Return the sender; the library's part that uploads is loaded when something is sent."""
        if self._sender is None:
            make = load("weighbridge.registry.remotes.hub.sender:Sender")
            self._sender = make(self.repo, self._line.api, xet=False, alive=lambda: None, sent=lambda _: None)
        return self._sender

    def close(self) -> None:
        """Forget what was sent."""
        self._sent.clear()


class _Quiet:
    """Keeps the library from xet and from its progress bars while any thread of ours works with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = False
        self._bars: disable_progress_bars | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
                self._bars = disable_progress_bars()
                self._bars.__enter__()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._bars is not None:
                constants.HF_HUB_DISABLE_XET = self._before
                self._bars.__exit__(*error)


_quiet: Final = _Quiet()


class ChildWriter:
    """Writes to one repository through a child process, begun when it is first needed and again after it died."""

    def __init__(self, line: Line, repo: str, transport: Callable[[], str], spare: Child | None = None) -> None:
        """Take the repository, how files go there, and a child that waits for somebody's orders."""
        self._line = line
        self.repo = repo
        self._transport = transport
        self._sent: set[tuple[str, str]] = set()
        self._child = spare
        self._buffer = b""
        self._ready = False

    def begin(self) -> None:
        """Start the child now, so that it is ready when it is needed."""
        if self._child is not None and not self._child.ended():
            return
        self.close()
        self._child = child.started(self._environ())

    def send(self, files: Sequence[Sending], base: str, progress: Progress | None = None) -> None:
        """Upload files. Raises StageDamagedError, and UnreachableError when no byte moves for too long."""
        wanted = [file for file in files if (file.path, file.sha256) not in self._sent]
        if not wanted:
            return
        rows = [[file.path, file.source, file.size, file.sha256] for file in wanted]
        what = f"cannot upload to {self.repo}"
        self._order(
            {"do": "send", "files": rows, "base": base, "what": what}, what, self._line.patience.stall, progress
        )
        self._sent |= {(file.path, file.sha256) for file in wanted}

    def commit(self, change: Change) -> str:
        """Make a commit and return its id."""
        what = f"cannot commit to {self.repo}"
        order = {
            "do": "commit",
            "what": what,
            "parent": change.parent,
            "title": change.title,
            "message": change.message,
            "branch": change.branch,
            "files": change.files,
            "small": {path: body.hex() for path, body in change.small.items()},
            "delete": change.delete,
        }
        found = self._order(order, what, self._line.patience.commit, None, writes=True)
        return str(found["commit"])

    def close(self) -> None:
        """End the child, at once."""
        ending, self._child, self._buffer, self._ready = self._child, None, b"", False
        self._sent.clear()
        if ending is not None:
            ending.end()

    # ---------------------------------------------------------------------------------------------------- the dialogue

    def _order(
        self, order: dict[str, Any], what: str, limit: float, progress: Progress | None, *, writes: bool = False
    ) -> dict[str, Any]:
        if self._line.offline:
            with self._line.speaking(what):
                raise AssertionError  # never reached: speaking refuses
        alive = self._child is not None and not self._child.ended()
        if order["do"] == "commit" and order["files"] and not alive:
            self.close()
            raise errors.RetryableError(what, why="the process that uploaded the files is gone", fix="repeat it")
        self.begin()
        left = sum(row[2] for row in order["files"]) if order["do"] == "send" else 0
        try:
            if not self._ready:
                self._introduce()
                self._hear(what, _START, writes=False)
                self._ready = True
            self._tell(order)
            while True:
                answer = self._hear(what, limit, writes=writes)
                count = min(left, int(answer.get("moved", left)))
                if progress is not None and count and "error" not in answer and "sent" not in answer:
                    left -= count
                    progress(count)
                if "done" in answer:
                    found: dict[str, Any] = answer["done"]
                    return found
                if "error" in answer:
                    raise _revived(answer)  # noqa: TRY301 - what the child met is met here
        except errors.WeighbridgeError:
            raise
        except BaseException:
            self.close()  # told to stop: nothing may go on behind our back
            raise

    def _introduce(self) -> None:
        """Tell the child where it is to go, as whom and how."""
        self._tell(
            {
                "endpoint": self._line.endpoint,
                "token": self._line.token.reveal() if self._line.token else None,
                "repo": self.repo,
                "transport": self._transport(),
                "patience": list(self._line.patience),
            }
        )

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._child is not None
        try:
            self._child.orders.write(json.dumps(line).encode() + b"\n")
            self._child.orders.flush()
        except BrokenPipeError:
            return  # what it had to say comes out when it is asked

    def _hear(self, what: str, limit: float, *, writes: bool) -> dict[str, Any]:
        """Return the next line of the child. Raises when it says nothing for so long, or has ended."""
        assert self._child is not None
        pipe = self._child.answers.fileno()
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.close()
                kind = errors.OutcomeUnknownError if writes else errors.UnreachableError
                raise kind(
                    what,
                    why=f"no byte moved for {limit:.0f} s, so the upload was ended",
                    fix="it is repeated; what was confirmed is not sent again",
                )
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                words, fix = self._child.last_words()
                self.close()
                kind = errors.OutcomeUnknownError if writes else errors.RetryableError
                raise kind(what, why=f"the process that uploads has ended: {words}", fix=fix)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _environ(self) -> dict[str, str]:
        found = {key: value for key, value in (os.environ | dict(self._line.environ)).items() if key not in _HIDDEN}
        return found | {
            "HF_ENDPOINT": self._line.endpoint,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONSAFEPATH": "1",
        }


def _revived(answer: dict[str, Any]) -> errors.WeighbridgeError:
    told = answer["error"]
    kind = _KINDS.get(answer["kind"], errors.WeighbridgeError)
    return kind(told["message"], why=told["why"], fix=told["fix"], **told["data"])
