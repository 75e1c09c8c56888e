"""What shall go wrong: which request, how often, and how."""

import re
import threading
from dataclasses import dataclass, field
from typing import Final, Literal

Act = Literal["refuse", "lose", "cut", "cut-body", "stall", "flip", "slow"]

ROUTES: Final = {
    "whoami": r"GET /api/whoami-v2",
    "create": r"POST /api/repos/create",
    "info": r"GET /api/models/[^/]+/[^/]+(/revision/[^/]+)?$",
    "list": r"GET /api/models$",
    "refs": r"GET /api/models/[^/]+/[^/]+/refs",
    "commits": r"GET /api/models/[^/]+/[^/]+/commits/",
    "tree": r"GET /api/models/[^/]+/[^/]+/tree/",
    "paths-info": r"POST /api/models/[^/]+/[^/]+/paths-info/",
    "validate-yaml": r"POST /api/validate-yaml",
    "preupload": r"POST /api/models/[^/]+/[^/]+/preupload/",
    "commit": r"POST /api/models/[^/]+/[^/]+/commit/",
    "tag": r"POST /api/models/[^/]+/[^/]+/tag/",
    "branch": r"POST /api/models/[^/]+/[^/]+/branch/",
    "lfs-batch": r"POST /[^/]+/[^/]+\.git/info/lfs/objects/batch",
    "lfs-put": r"PUT /_storage/",
    "lfs-verify": r"POST /_lfs/verify",
    "storage": r"GET /_storage/",
    "resolve": r"(GET|HEAD) /[^/]+/[^/]+/resolve/",
    "xet-token": r"GET /api/models/[^/]+/[^/]+/xet-(read|write)-token/",
    "xorb": r"POST /_cas/v1/xorbs/",
    "shard": r"POST /_cas/v1/shards",
    "reconstruction": r"GET /_cas/v1/reconstructions/",
    "cas-data": r"GET /_cas/data/",
    "any": r".",
}
"""Names for the requests of a publication and a pull; anything else is taken as a pattern of `METHOD path`."""


@dataclass
class Fault:
    """A fault on the requests that match `on`, after `skip` of them, `times` times.

    refuse: answer `status` and do nothing. lose: do it, then answer `status` (0: cut the connection). cut: cut the
    connection before anything is done. cut-body: cut in the middle of the answer. stall: say nothing for `seconds`.
    slow: send the body in small pieces over `seconds`. flip: change one bit of the answer's body.
    """

    on: str
    act: Act = "refuse"
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str | None = None
    message: str = "the test Hub was asked to fail"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 30.0

    def matches(self, line: str) -> bool:
        """Tell whether the fault is about this request, as `METHOD path`."""
        return re.match(ROUTES.get(self.on, self.on), line) is not None


class Faults:
    """The faults of one server, handed out in order; `met` holds those that struck."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []
        self._left: dict[int, list[int]] = {}
        self.met: list[tuple[Fault, str]] = []

    def add(self, *faults: Fault) -> None:
        """Let these faults wait for their requests."""
        with self._lock:
            for fault in faults:
                self._waiting.append(fault)
                self._left[id(fault)] = [fault.skip, fault.times]

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._waiting.clear()
            self._left.clear()
            self.met.clear()

    def take(self, line: str) -> Fault | None:
        """Return the fault that strikes this request, if any."""
        with self._lock:
            for fault in self._waiting:
                if not fault.matches(line):
                    continue
                left = self._left[id(fault)]
                if left[0] > 0:
                    left[0] -= 1
                    continue
                if left[1] <= 0:
                    continue
                left[1] -= 1
                self.met.append((fault, line))
                return fault
            return None
